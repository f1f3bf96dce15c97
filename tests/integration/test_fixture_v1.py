"""A data directory written by each released format version must open with everything in it.

Each is stored as bytes in tests/fixtures/<version>, with a digest of its content. See tests/fixtures/make_v1.py
for when it may be regenerated.
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
from heapline.core.events import KIND_NAMES, BatchCommitted, Fired, Replayed, Rescheduled, decode_events
from heapline.engine import EmbeddedBroker
from heapline.journal import RealDisk
from heapline.journal.reader import LogReader
from tests.fixtures.make_v1 import groups_of, log_of
from tests.integration.directory_digest import STILL, FixedClock, digest

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = ("v1",)
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
    """Open it at the time at which it was written."""
    clock = FixedClock(expected["now"])
    return EmbeddedBroker(str(data), config=STILL, clock=clock, draw=np.random.default_rng(1).random)


async def check_content(data: Path, expected: dict[str, Any]) -> None:
    async with opened(data, expected) as hl:
        infos = {info.name: info for info in await hl.list_topics()}
        assert set(infos) == set(expected["topics"])
        for name, topic in expected["topics"].items():
            assert (infos[name].incarnation, infos[name].id_suffix) == (topic["incarnation"], topic["id_suffix"])
            config = json.loads(msgspec.json.encode(infos[name].config))
            assert topic["config"].items() <= config.items(), name  # later versions may have more settings
            assert await log_of(hl, name) == topic["log"], name
            found = json.loads(json.dumps(await digest(hl, name, topic["ids"])))
            assert found == topic["digest"], name
            assert json.loads(json.dumps(await groups_of(hl, name))) == topic["groups"], name


def test_every_message_state_config_and_event_is_read_back(data: Path, expected: dict[str, Any]) -> None:
    asyncio.run(check_content(data, expected))


def test_journals_alone_restore_the_same_state(data: Path, expected: dict[str, Any]) -> None:
    """If nothing was reclaimed: without snapshots and indexes, from the first unit on."""
    removed = 0
    for folder in data.glob("topics/*/*"):
        if (folder / "0000000001.seg").exists():
            for path in [*folder.glob("snapshots/*"), *folder.glob("*.idx")]:
                path.unlink()
                removed += 1
    assert removed
    asyncio.run(check_content(data, expected))


def test_leases_dedup_and_producer_epochs_are_remembered(data: Path, expected: dict[str, Any]) -> None:
    async def ask() -> None:
        async with opened(data, expected) as hl:
            again = await hl.enqueue("jobs", b"only once", priority=-60, idempotency_key="order-1")
            assert again.duplicate
            with pytest.raises(heapline.IdempotencyConflict):
                await hl.enqueue("jobs", b"something else", idempotency_key="order-2", idempotency_scope="until_ack")
            assert (await hl.enqueue("jobs", b"numbered", producer_id="p1", epoch=1, seq=7)).duplicate
            assert await hl.open_producer("jobs", "p1") == 2
            held = await hl.pop("jobs", 9, request_id="pop-1")
            assert len(held) == 5, "the same leases again, except those that were buried"
            await hl.ack(held)
            fresh = await hl.enqueue("jobs", b"new")
            assert fresh.id > max(expected["topics"]["jobs"]["ids"])
            assert (await hl.stats("halted")).paused

    asyncio.run(ask())


def test_new_group_reads_the_whole_stream_and_its_lag_becomes_zero(data: Path, expected: dict[str, Any]) -> None:
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


def test_every_message_of_the_directory_is_served_today(data: Path, expected: dict[str, Any]) -> None:
    """Leases, delays and TTLs have ended; the rest can be popped."""

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


def test_fixture_has_every_kind_of_file(data: Path) -> None:
    names = {path.suffix or path.name for path in data.rglob("*") if path.is_file()}
    assert names >= {".seg", ".idx", ".snap", ".blob", "watermark", ".json"}


def test_fixture_has_every_kind_of_event_and_is_small(version: str, expected: dict[str, Any]) -> None:
    kinds = {event[0] for topic in expected["topics"].values() for log in topic["log"].values() for event in log}
    if version == VERSIONS[-1]:
        assert kinds == set(KIND_NAMES.values())
    states = {
        (reported or {}).get("state")
        for topic in expected["topics"].values()
        for reported in topic["digest"]["others"].values()
    }
    assert {"delayed", "leased", "dead", "acked", "cancelled", "expired", "purged", "deleted"} <= states
    assert any(topic["digest"]["ready"] for topic in expected["topics"].values())
    assert expected["topics"]["moved"]["log"]["0"][0][1] > 0, "the beginning of one log was reclaimed"
    size = sum(path.stat().st_size for path in (FIXTURES / version).iterdir())
    assert size < KEPT_BYTES_MAX


#: Combinations of optional columns, as the engine writes them.
COMBINATIONS = {
    Fired: {("count",), ("ids", "positions"), ("ids", "keys", "positions"), ("again", "ids", "positions"),
            ("again", "ids", "keys", "positions")},
    Rescheduled: {(), ("again",)},
    Replayed: {(), ("keys",)},
    BatchCommitted: {(), ("positions", "ready"), ("keys", "positions", "ready")},
}  # fmt: skip


def test_fixture_has_every_combination_of_optional_columns_of_every_event(tmp_path: Path) -> None:
    """In the journals of all versions together; a kind that is no longer written is in an old one."""
    found: dict[type, set[tuple[str, ...]]] = {}
    for version in VERSIONS:
        with tarfile.open(FIXTURES / version / "data.tar.xz") as archive:
            archive.extractall(tmp_path / version, filter="data")
        for folder in sorted((tmp_path / version / "data" / "topics").glob("*/*")):
            for unit in LogReader(RealDisk(), str(folder)).read_units():
                for event in (event for frame in unit.frames for event in decode_events(frame.events, "fixture")):
                    optional = (
                        event.__struct_fields__[-len(event.__struct_defaults__) :] if event.__struct_defaults__ else ()
                    )
                    given = tuple(sorted(name for name in optional if getattr(event, name) is not None))
                    found.setdefault(type(event), set()).add(given)
        shutil.rmtree(tmp_path / version)
    assert set(found) == set(KIND_NAMES)
    for kind, combinations in COMBINATIONS.items():
        assert found[kind] == combinations, kind


def test_growth_throttling_key_limits_and_undecided_batches_are_remembered(
    data: Path, expected: dict[str, Any]
) -> None:
    async def ask() -> None:
        async with opened(data, expected) as hl:
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
