"""Directories that earlier versions wrote must open for ever, with all that was in them.

Each is kept as bytes in tests/fixtures/<version>, with what it held when it was written. Never change one: see
tests/fixtures/make_v1.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli.main import app
from heapline.core.events import KIND_NAMES, decode_events
from heapline.engine import EmbeddedBroker
from heapline.journal import RealDisk
from heapline.journal.reader import LogReader
from tests.fixtures.make_v1 import log_of
from tests.fixtures.make_v3 import groups_of
from tests.integration.whole import STILL, FixedClock, digest

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = ("v1", "v2", "v3")
KEPT_BYTES_MAX = 300_000


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / version / "expected.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def data(version: str, tmp_path: Path) -> Iterator[Path]:
    with tarfile.open(FIXTURES / version / "data.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    yield tmp_path / "data"
    shutil.rmtree(tmp_path / "data")


def opened(data: Path, expected: dict[str, Any]) -> EmbeddedBroker:
    """In the moment in which it was written."""
    clock = FixedClock(expected["now"])
    return EmbeddedBroker(str(data), config=STILL, clock=clock, draw=np.random.default_rng(1).random)


async def check_content(data: Path, expected: dict[str, Any]) -> None:
    async with opened(data, expected) as hl:
        infos = {info.name: info for info in await hl.list_topics()}
        assert set(infos) == set(expected["topics"])
        for name, topic in expected["topics"].items():
            assert infos[name].incarnation == topic["incarnation"]
            config = json.loads(msgspec.json.encode(infos[name].config))
            assert topic["config"].items() <= config.items(), name  # later versions may know more settings
            assert await log_of(hl, name) == topic["log"], name
            found = json.loads(json.dumps(await digest(hl, name, topic["ids"])))
            assert found == topic["digest"], name
            if "groups" in topic:
                assert json.loads(json.dumps(await groups_of(hl, name))) == topic["groups"], name


def test_every_message_state_config_and_event_is_read_back(data: Path, expected: dict[str, Any]) -> None:
    asyncio.run(check_content(data, expected))


def test_journals_alone_lead_to_the_same_state(data: Path, expected: dict[str, Any]) -> None:
    """Where nothing was reclaimed: without snapshots, indexes and watermark, from the first unit on."""
    removed = 0
    for folder in data.glob("topics/*/*"):
        if (folder / "0000000001.seg").exists():
            for path in [*folder.glob("snapshots/*"), *folder.glob("*.idx")]:
                path.unlink()
                removed += 1
    assert removed
    asyncio.run(check_content(data, expected))


def test_what_was_promised_before_still_holds(data: Path, expected: dict[str, Any]) -> None:
    """Leases, idempotency keys, producers' sequences and request ids are remembered."""

    async def ask() -> None:
        async with opened(data, expected) as hl:
            again = await hl.enqueue("jobs", b"only once", priority=-60, idempotency_key="order-1")
            assert again.duplicate
            with pytest.raises(heapline.IdempotencyConflict):
                await hl.enqueue("jobs", b"something else", idempotency_key="order-2", idempotency_scope="until_ack")
            assert (await hl.enqueue("jobs", b"numbered", producer_id="p1", epoch=1, seq=7)).duplicate
            assert await hl.open_producer("jobs", "p1") == 2
            held = await hl.pop("jobs", 9, request_id="pop-1")
            assert len(held) == 5, "the same leases again, but for those that were buried"
            await hl.ack(held)
            fresh = await hl.enqueue("jobs", b"new")
            assert fresh.id > max(expected["topics"]["jobs"]["ids"])
            assert (await hl.stats("halted")).paused

    asyncio.run(ask())


def test_group_made_on_old_data_reads_what_is_there_and_its_lag_becomes_zero(
    data: Path, expected: dict[str, Any]
) -> None:
    """Snapshots from before there were groups hold no counts: what lies below them counts as less than nothing."""

    async def read() -> None:
        async with opened(data, expected) as hl:
            for topic in ("jobs", "moved", "billing/invoices"):
                lag, got = (await hl.create_group(topic, "new")).lag, 0
                assert lag > 0
                while batches := (await hl.group_fetch(topic, "new", "m", session="s")).batches:
                    for batch in batches:
                        got += len(batch.offsets)
                        await hl.group_ack(topic, "new", "m", {batch.partition: batch.offsets.tolist()}, session="s")
                assert got == lag, topic
                assert (await hl.get_group(topic, "new")).lag == 0

    asyncio.run(read())


def test_verify_finds_every_byte_in_order(data: Path) -> None:
    result = CliRunner().invoke(app, ["journal", "verify", str(data)])
    assert result.exit_code == 0, result.output


def test_directory_serves_years_later(data: Path, expected: dict[str, Any]) -> None:
    """By the clock of whoever opens it: leases have ended, delays are over, lives too; the rest can be popped."""

    async def drain() -> int:
        async with heapline.open(data) as hl:
            served = 0
            for name in expected["topics"]:
                await hl.resume_topic(name)
                await hl.dlq_replay(name)
                for partition in (await hl.stats(name)).partitions:
                    await hl.set_partition_throttled(name, partition.partition, False)
                while popped := await hl.pop(name, 1000, wait=0.2, max_bytes=1 << 30):
                    await hl.ack(popped)
                    served += len(popped)
                assert (await hl.stats(name)).ready == 0
            return served

    assert asyncio.run(drain()) > 100


#: Kinds of event that came when the last version was already written; the next fixture has them.
LATER: set[str] = set()


def test_fixture_holds_every_kind_of_file(data: Path) -> None:
    names = {path.suffix or path.name for path in data.rglob("*") if path.is_file()}
    assert names >= {".seg", ".idx", ".snap", ".blob", "watermark", ".json"}


def test_fixture_holds_every_kind_of_event_and_is_small(version: str, expected: dict[str, Any]) -> None:
    kinds = {event[0] for topic in expected["topics"].values() for log in topic["log"].values() for event in log}
    if version == VERSIONS[-1]:
        assert kinds == set(KIND_NAMES.values()) - LATER
    states = {
        (told or {}).get("state")
        for topic in expected["topics"].values()
        for told in topic["digest"]["others"].values()
    }
    assert {"delayed", "leased", "dead", "acked", "cancelled", "expired", "purged", "deleted"} <= states
    assert any(topic["digest"]["ready"] for topic in expected["topics"].values())
    assert expected["topics"]["moved"]["log"]["0"][0][1] > 0, "the beginning of one log was reclaimed"
    size = sum(path.stat().st_size for path in (FIXTURES / version).iterdir())
    assert size < KEPT_BYTES_MAX


def test_fixture_holds_every_version_of_every_event(tmp_path: Path) -> None:
    """In the journals of all versions together; a kind that is written no more stands in an old one."""
    found: set[type] = set()
    for version in VERSIONS:
        with tarfile.open(FIXTURES / version / "data.tar.xz") as archive:
            archive.extractall(tmp_path / version, filter="data")
        for folder in sorted((tmp_path / version / "data" / "topics").glob("*/*")):
            for unit in LogReader(RealDisk(), str(folder)).read_units():
                found |= {type(event) for frame in unit.frames for event in decode_events(frame.events, "fixture")}
        shutil.rmtree(tmp_path / version)
    assert found == set(KIND_NAMES)


def test_version_2_goes_on_where_it_was(tmp_path: Path) -> None:
    """Growth, throttling, limits of keys and batches that were not decided are remembered."""
    with tarfile.open(FIXTURES / "v2" / "data.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((FIXTURES / "v2" / "expected.json").read_text(encoding="utf-8"))

    async def ask() -> None:
        async with opened(tmp_path / "data", expected) as hl:
            again = [await hl.enqueue("grown", b"keyed", key=f"k{i}", idempotency_key=f"o{i}") for i in range(12)]
            assert all(answer.duplicate for answer in again)
            assert [p.throttled for p in (await hl.stats("grown")).partitions] == [
                None,
                "moving disks",
                None,
                None,
                None,
            ]
            out = Counter(m.fairness_key for m in await hl.pop("fair", 100))
            assert out[None] == 4
            assert out["late"] == 2, "two at once"
            with pytest.raises(heapline.BatchInDoubt):
                await hl.enqueue("orders", b"once", idempotency_key="day-2-once")
            assert await hl.commit_batch("day-1", ["won"]) == 9
            assert await hl.commit_batch("day-2", ["first", "second"]) == 17
            with pytest.raises(heapline.UnknownPart):
                await hl.commit_batch("day-3", ["never"])

    asyncio.run(ask())
