"""`heapline journal` on real directories: undamaged, damaged, and in use."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli.main import app
from heapline.journal import RealDisk, SnapshotStore, scan

SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}
FOLDER = "topics/default/jobs.1"


def cli(*arguments: str, answer: str = "") -> Any:
    return CliRunner().invoke(app, ["journal", *arguments], input=answer, env={"COLUMNS": "200"})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create two topics; `jobs` had 10 messages (3 acked, 1 dead, 1 delayed). The one snapshot is from the close."""
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", **SMALL)
        hl.create_topic("billing/invoices", partitions=2, **SMALL)
        hl.enqueue_batch("billing/invoices", [heapline.Outgoing(b"i", key=str(n)) for n in range(20)])
        batch = [heapline.Outgoing(b"job %d" % n, priority=n, key="k", headers={"n": str(n)}) for n in range(9)]
        hl.enqueue_batch("jobs", batch)
        hl.enqueue("jobs", b"later", delay=3600.0)
        popped = hl.pop("jobs", 4, holder="w1", visibility=600.0)
        hl.ack(popped[:3])
        hl.bury(popped[3:], reason="poison")
    return tmp_path / "data"


def units(data: Path) -> list[Any]:
    return list(scan(RealDisk(), str(data / FOLDER)))


def segment(data: Path) -> Path:
    return data / FOLDER / "0000000001.seg"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def forget_snapshots(data: Path) -> None:
    for path in (data / FOLDER / "snapshots").iterdir():
        path.unlink()


def objects(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", [True, False])
def test_verify_and_dump_read_a_topic_whose_growth_the_catalog_has_missed(data: Path, snapshots: bool) -> None:
    catalog = (data / "catalog.json").read_bytes()
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        hl.update_topic("jobs", partitions=4)
        hl.enqueue_batch("jobs", [heapline.Outgoing(b"new", key=str(n)) for n in range(20)])
    (data / "catalog.json").write_bytes(catalog)
    if not snapshots:
        forget_snapshots(data)
    result = cli("verify", str(data))
    assert result.exit_code == 0, result.stdout
    assert result.stdout.count("no damage found") == 2
    shown = cli("dump", str(data), "--topic", "jobs", "--kind", "grown")
    assert "before=1 after=4" in shown.stdout
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        assert {info.name: info.config.partitions for info in hl.list_topics()}["jobs"] == 4
        assert hl.stats("jobs").ready == 25


def test_verify_finds_no_damage_in_undamaged_directories(data: Path) -> None:
    result = cli("verify", str(data))
    assert result.exit_code == 0
    assert result.stdout.count("no damage found") == 2
    assert "5 ready, 1 delayed, 0 leased, 1 dead" in result.stdout


def test_verify_json_is_one_object_per_topic(data: Path) -> None:
    found = {topic["topic"]: topic for topic in objects(cli("verify", str(data), "--json").stdout)}
    assert set(found) == {"jobs", "billing/invoices"}
    assert found["jobs"]["ok"]
    assert found["jobs"]["messages"] == 10
    assert found["jobs"]["state"] == {"ready": 5, "delayed": 1, "leased": 0, "dead": 1}
    assert found["jobs"]["findings"] == []


def test_verify_names_file_and_byte_and_says_what_to_do(data: Path) -> None:
    forget_snapshots(data)
    last = units(data)[-1]
    flip(segment(data), last.offset + 70)
    result = cli("verify", str(data))
    assert result.exit_code == 1
    assert f"{segment(data)} at byte {last.offset}" in result.stdout
    assert "heapline journal repair" in result.stdout
    assert result.stdout.count("no damage found") == 1, "the other topic is not damaged"
    findings = objects(cli("verify", str(data), "--topic", "jobs", "--json").stdout)[0]["findings"]
    assert (findings[0]["path"], findings[0]["offset"]) == (str(segment(data)), last.offset)


def test_verify_of_one_topic_leaves_the_others_alone(data: Path) -> None:
    forget_snapshots(data)
    flip(segment(data), units(data)[-1].offset + 70)
    assert cli("verify", str(data), "--topic", "billing/invoices").exit_code == 0


@pytest.mark.parametrize("name", ["watermark", "snapshots/*.snap"])
def test_verify_finds_damage_that_opening_would_fix(data: Path, name: str) -> None:
    path = next((data / FOLDER).glob(name))
    flip(path, 20)
    result = cli("verify", str(data))
    assert result.exit_code == 1
    assert path.name in result.stdout
    heapline.open_sync(data, spare_segment_bytes=0).__enter__().close()


@pytest.fixture
def grown(data: Path) -> Path:
    """Continue `data` into a second segment before the last snapshot, so that opening can skip the first."""
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        for _ in range(3):
            hl.enqueue_batch("jobs", [heapline.Outgoing(b"." * 50_000)] * 10)
    assert units(data)[-1].segment == 2
    return data


def test_verify_says_that_damage_below_a_snapshot_needs_no_cut(grown: Path) -> None:
    data = grown
    flip(segment(data), units(data)[0].offset + 200)
    result = cli("verify", str(data))
    assert result.exit_code == 1
    assert "the topic opens from a newer snapshot" in result.stdout


def test_verify_uses_an_older_snapshot_when_opening_does(data: Path) -> None:
    forget_snapshots(data)
    SnapshotStore(RealDisk(), str(data / FOLDER / "snapshots")).write(2, b"intact bytes, but not a state", {})
    found = objects(cli("verify", str(data), "--topic", "jobs", "--json").stdout)[0]
    assert [Path(finding["path"]).name for finding in found["findings"]] == ["0000000000000002.snap"]
    assert found["state"] == {"ready": 5, "delayed": 1, "leased": 0, "dead": 1}
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        assert hl.stats("jobs").ready == 5


def test_verify_says_that_a_topic_without_its_live_segment_cannot_be_opened(grown: Path) -> None:
    segment(grown).unlink()
    found = objects(cli("verify", str(grown), "--topic", "jobs", "--json").stdout)[0]
    assert found["state"] is None
    assert any("cannot be rebuilt" in finding["detail"] for finding in found["findings"])
    with (
        heapline.open_sync(grown, spare_segment_bytes=0) as hl,
        pytest.raises(heapline.CorruptionError, match="file is missing"),
    ):
        hl.pop("jobs")


def test_verify_finds_a_damaged_catalog_and_still_checks_topics(data: Path) -> None:
    flip(data / "catalog.json", 40)
    result = cli("verify", str(data), "--json")
    assert result.exit_code == 1
    found = {topic["topic"]: topic for topic in objects(result.stdout)}
    assert not found[None]["ok"]
    assert found["jobs"]["ok"]


def test_verify_accepts_the_directory_of_one_topic(data: Path) -> None:
    result = cli("verify", str(data / FOLDER), "--json")
    assert [topic["topic"] for topic in objects(result.stdout)] == ["jobs"]


def test_verify_beside_an_engine_checks_up_to_the_durable_end(data: Path) -> None:
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        hl.enqueue("jobs", b"while open")
        result = cli("verify", str(data), "--json")
        assert result.exit_code == 0
        jobs = objects(result.stdout)[1]
        assert (jobs["running"], jobs["state"]["ready"]) == (True, 6)
        assert list((data / FOLDER / "readers").iterdir()) == [], "the reader lease was released"
        hl.ack(hl.pop("jobs"))


# --- repair -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(data: Path) -> Path:
    """Damage the unit of the first pop, which acks and a burial follow."""
    forget_snapshots(data)
    flip(segment(data), units(data)[2].offset + 70)
    return data


def test_repair_cuts_keeps_a_copy_and_shows_what_is_lost(damaged: Path) -> None:
    before = segment(damaged).read_bytes()
    result = cli("repair", str(damaged), "--topic", "jobs", "--yes")
    assert result.exit_code == 0, result.output
    assert "units lost" in result.stdout
    assert "3 acked" in result.stdout
    aside = damaged / FOLDER / "damaged" / "0000000001.seg"
    assert aside.read_bytes() == before
    assert cli("verify", str(damaged)).exit_code == 0
    with heapline.open_sync(damaged, spare_segment_bytes=0) as hl:
        assert [m.payload for m in hl.pop("jobs", 100)] == [b"job %d" % n for n in range(9)]


def test_repair_lists_messages_that_will_be_lost(data: Path) -> None:
    forget_snapshots(data)
    later = objects(cli("dump", str(data), "-t", "jobs", "--json", "--start", "9", "--limit", "1").stdout)[0]
    flip(segment(data), units(data)[0].offset + 70)
    result = cli("repair", str(data), "--topic", "jobs", "--yes")
    assert f"1: {later['message_id']}" in result.stdout, "its unit follows the cut and can still be read"
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        assert hl.pop("jobs", 100) == []


def test_repair_requires_confirmation(damaged: Path) -> None:
    before = segment(damaged).read_bytes()
    result = cli("repair", str(damaged), "--topic", "jobs", answer="n\n")
    assert result.exit_code == 1
    assert "Cut the journal there?" in result.stdout
    assert "nothing was changed" in result.stdout
    assert segment(damaged).read_bytes() == before
    assert cli("repair", str(damaged), "--topic", "jobs", answer="y\n").exit_code == 0


def test_repair_of_an_undamaged_directory_does_nothing(data: Path) -> None:
    result = cli("repair", str(data), "--yes")
    assert result.exit_code == 0
    assert result.stdout.count("nothing to repair") == 2


def test_repair_never_cuts_a_topic_that_opens(grown: Path) -> None:
    data = grown
    flip(segment(data), units(data)[0].offset + 200)
    before = segment(data).read_bytes()
    result = cli("repair", str(data), "--topic", "jobs", "--yes")
    assert result.exit_code == 1
    assert "can be opened as it is" in result.stdout
    assert segment(data).read_bytes() == before


def test_repair_needs_the_directory_lock(damaged: Path) -> None:
    with heapline.open_sync(damaged, spare_segment_bytes=0):
        result = cli("repair", str(damaged), "--yes")
    assert result.exit_code == 1
    assert "DirectoryLocked" in result.stderr


# --- dump -------------------------------------------------------------------------------------------------------------


def test_dump_shows_what_happened_in_order(data: Path) -> None:
    lines = cli("dump", str(data), "--topic", "jobs").stdout.splitlines()
    kinds = [line.split()[2] for line in lines]
    assert kinds == ["enqueued"] * 10 + ["leased"] * 4 + ["acked"] * 3 + ["dead_lettered"]
    assert "key=k" in lines[0]
    assert 'headers={"n": "0"}' in lines[0]
    assert "reason=poison" in lines[-1]
    assert lines[0].startswith("0:0 ")


def test_dump_shows_prepared_batches_and_the_decisions_about_them(tmp_path: Path) -> None:
    with heapline.open_sync(str(tmp_path / "q")) as hl:
        hl.create_topic("jobs", segment_bytes=1 << 20)
        hl.prepare_batch("b", "1", [heapline.Outgoing(b"x"), heapline.Outgoing(b"y")], topic="jobs")
        hl.prepare_batch("b", "empty", [], topic="jobs")
        hl.commit_batch("b", ["1"])
        hl.prepare_batch("c", "1", [heapline.Outgoing(b"z")], topic="jobs")
        hl.commit_batch("c", [])
    rows = objects(cli("dump", str(tmp_path / "q"), "-t", "jobs", "--json", "--payloads").stdout)
    reported = [(row["kind"], row["batch_id"], row.get("ids", row.get("id"))) for row in rows]
    first, second = rows[0]["ids"]
    assert reported[:4] == [
        ("batch_prepared", "b", [first, second]), ("batch_prepared", "b", []), ("batch_committed", "b", first),
        ("batch_committed", "b", second),
    ]  # fmt: skip
    assert reported[5:] == [("batch_committed", "c", None)], "a row without a message"
    assert [len(row["payloads"]) for row in rows if row["kind"] == "batch_prepared"] == [2, 0, 1]
    assert len(objects(cli("dump", str(tmp_path / "q"), "-t", "_system/batches", "--json").stdout)) == 2


def test_dump_as_json_has_payloads_only_if_requested(data: Path) -> None:
    plain = objects(cli("dump", str(data), "-t", "jobs", "--json", "--limit", "1").stdout)[0]
    assert (plain["payload_len"], "payload" in plain) == (5, False)
    whole = objects(cli("dump", str(data), "-t", "jobs", "--json", "--limit", "1", "--payloads").stdout)[0]
    assert base64.b64decode(whole["payload"]) == b"job 0"


@pytest.mark.parametrize("partition", [[], ["--partition", "0"]])
def test_dump_takes_offsets_and_kinds(data: Path, partition: list[str]) -> None:
    rows = objects(cli("dump", str(data), "-t", "jobs", "--json", "--start", "8", "--end", "16", *partition).stdout)
    assert [row["offset"] for row in rows] == list(range(8, 16))
    leased = objects(cli("dump", str(data), "-t", "jobs", "--json", "--kind", "leased", *partition).stdout)
    assert [(row["holder"], row["attempts"]) for row in leased] == [("w1", 1)] * 4


def test_dump_of_several_partitions_is_all_of_them_or_one(data: Path) -> None:
    both = objects(cli("dump", str(data), "-t", "billing/invoices", "--json").stdout)
    parts = [objects(cli("dump", str(data), "-t", "billing/invoices", "--json", "--partition", p).stdout) for p in "01"]
    assert len(both) == 20
    assert sorted(map(str, both)) == sorted(map(str, parts[0] + parts[1]))
    assert all(parts)


def test_dump_needs_one_topic_and_known_kinds(data: Path) -> None:
    several = cli("dump", str(data))
    assert several.exit_code == 1
    assert "--topic" in several.stderr
    unknown = cli("dump", str(data), "-t", "jobs", "--kind", "nonsense")
    assert unknown.exit_code == 1
    assert "lease_expired" in unknown.stderr


def test_dump_beside_an_engine_shows_what_is_durable(data: Path) -> None:
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        hl.enqueue("jobs", b"while open")
        rows = objects(cli("dump", str(data), "-t", "jobs", "--json", "--start", "18").stdout)
    assert [row["kind"] for row in rows] == ["enqueued"]


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_counts_rows_by_kind_and_what_is_live(data: Path) -> None:
    found = objects(cli("stats", str(data), "--json", "-t", "jobs").stdout)[0]
    assert found["rows"] == {"enqueued": 10, "leased": 4, "acked": 3, "dead_lettered": 1}
    assert found["live_messages"] == {"1": 7}
    assert (found["segments"], found["bytes"]) == (1, 1 << 20)
    assert 0 < found["live_bytes_max"] < found["bytes"]
    assert found["from_ms"] <= found["to_ms"]
    assert list(found["snapshots"]) == [str(found["last_unit"])]


def test_stats_for_people_names_every_topic(data: Path) -> None:
    result = cli("stats", str(data))
    assert result.exit_code == 0
    assert "billing/invoices" in result.stdout
    assert "dead_lettered" in result.stdout


async def _with_groups(data: Path) -> None:
    async with heapline.open(data, spare_segment_bytes=0) as hl:
        await hl.update_topic("jobs", max_payload_bytes=256 << 10)
        await hl.create_group("jobs", "slow")
        await hl.create_group("jobs", "watching", observer=True)
        for _ in range(12):
            await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x" * 200_000, priority=-9)] * 2)
            await hl.ack(await hl.pop("jobs", 2))
        for _ in range(2):
            await hl.snapshot("jobs")
            await hl.enqueue("jobs", b"")


def test_stats_show_why_segments_are_kept_and_what_was_reclaimed(data: Path) -> None:
    asyncio.run(_with_groups(data))
    found = objects(cli("stats", str(data), "--json", "-t", "jobs").stdout)[0]
    assert found["segments"] >= 4
    kept = found["kept_for"]
    assert kept["group slow"]["segments"] >= 3
    assert kept["group slow"]["bytes"] == kept["group slow"]["segments"] << 20
    assert "group watching" not in kept
    assert "retention" not in kept
    assert kept["live messages"]["segments"] >= 1
    assert kept["being written"]["segments"] >= 1
    assert found["groups"] == {
        "slow": {"lag": 35, "dead": 0, "holds": True}, "watching": {"lag": 35, "dead": 0, "holds": False}
    }  # fmt: skip
    assert (found["given_back_segments"], found["given_back_bytes"], found["moved_records"]) == (0, 0, 0)
    shown = cli("stats", str(data), "-t", "jobs").stdout
    assert "group slow" in shown
    assert "reclaimed" in shown


# --- what was typed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "stats", "dump", "repair"])
def test_wrong_paths_are_refused_with_advice(command: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, advice in ((tmp_path / "absent", "does not exist"), (tmp_path / "empty", "does not contain a queue")):
        result = cli(command, str(path))
        assert result.exit_code == 1
        assert advice in result.stderr
    assert list((tmp_path / "empty").iterdir()) == [], "reading creates no files"
    unknown = cli(command, str(data), "--topic", "nobody")
    assert unknown.exit_code == 1
    assert "topic 'nobody'" in unknown.stderr


@pytest.mark.parametrize("command", ["verify", "stats", "dump", "repair"])
def test_every_command_shows_an_example(command: str) -> None:
    assert cli(command, "--help").stdout.count(f"heapline journal {command}") >= 2
