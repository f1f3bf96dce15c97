"""The views `backlog` and `dlq`: one point in time, the same for every later read."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from heapline.contract.errors import BadRequest, RecordCorrupt
from heapline.contract.message import Outgoing
from heapline.engine import state_rows
from heapline.spark.options import parse_options
from heapline.spark.schema import arrow_schema
from heapline.spark.topic_log import DataLost
from heapline.spark.views.state import StateTask, pack, plan_state, read_state, unpack
from tests.unit.engine.rig import PATH, Rig, opened
from tests.unit.engine.test_maintenance import churn, long_lived, reclaim
from tests.unit.spark.log_rig import release, source_of


def planned(rig: Rig, view: str = "backlog", **options: str) -> tuple[list[StateTask], Any]:
    asked = parse_options({"path": PATH, "subscribe": "jobs", "view": view, **options}, streaming=False)
    return plan_state(source_of(rig), asked), asked


def shown(rig: Rig, work: list[StateTask], asked: Any) -> list[dict[str, Any]]:
    work = pickle.loads(pickle.dumps(work))
    batches = [batch for piece in work for batch in read_state(source_of(rig), piece, asked)]
    found: list[dict[str, Any]] = pa.Table.from_batches(batches, arrow_schema(asked.columns)).to_pylist()
    return sorted(found, key=lambda row: row.get("id", 0))


def rows(rig: Rig, view: str = "backlog", **options: str) -> list[dict[str, Any]]:
    found = shown(rig, *planned(rig, view, **options))
    release(rig)
    return found


def moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


@pytest.mark.parametrize("snapshot", [False, True])
async def test_backlog_has_the_state_of_every_message(snapshot: bool) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        kept = await long_lived(rig)
        await rig.hl.prepare_batch("b", "p", [Outgoing(b"prepared")], topic="jobs")
        if snapshot:
            await rig.hl.snapshot("jobs")
            await rig.hl.enqueue("jobs", b"since", priority=9)
        found = {row["value"].decode(): row for row in rows(rig, includeHeaders="true")}
        now = rig.clock.wall_ms()
        year = timedelta(days=366)
        since = {"since"} if snapshot else set()
        assert found.keys() == {"delayed", "moment", "retried", "leased", "touched", "ready"} | since
        assert {name: row["state"] for name, row in found.items() if name not in since} == {
            "delayed": "delayed", "moment": "delayed", "retried": "delayed", "leased": "leased", "touched": "delayed",
            "ready": "ready",
        }  # fmt: skip
        assert found["delayed"]["headers"] == [{"key": "a", "value": b"b"}]
        assert found["delayed"]["key"] == b"k"
        assert found["delayed"]["due_at"] - moment(now) == pytest.approx(year, abs=timedelta(seconds=5))
        assert found["retried"]["reason"] == "try next year"
        assert (found["retried"]["attempts"], found["ready"]["attempts"], found["leased"]["attempts"]) == (1, 0, 1)
        assert (found["retried"]["deliver_at"], found["retried"]["max_retries"]) == (None, 3)
        assert (found["leased"]["holder"], found["ready"]["holder"]) == ("w", None)
        assert found["leased"]["deadline"] - moment(now) == pytest.approx(year / 2, abs=timedelta(seconds=5))
        assert (found["touched"]["priority"], found["ready"]["priority"]) == (77, 3)
        assert found["ready"]["expires_at"] is not None
        assert found["ready"]["due_at"] is None
        ends = {p: end for p, (_, end) in (await rig.hl.offsets("jobs")).items()}
        assert all(row["as_of_offset"] == ends[row["partition"]] for row in found.values())
        (dead,) = rows(rig, "dlq")
        assert (dead["id"], dead["value"], dead["key"], dead["reason"]) == (kept["dead"], b"dead", b"dead", "kaputt")
        assert (dead["attempts"], dead["priority"]) == (1, -7)


async def test_server_and_directory_return_the_same_state() -> None:
    async with opened(topic={"partitions": 2, "fairness": "keys", "max_inflight_per_key": 2}) as rig:
        await long_lived(rig)
        await rig.hl.enqueue_batch(
            "jobs", [Outgoing(b"%d" % i, i, fairness_key=f"f{i % 3}") for i in range(9000)], atomic=False
        )
        await rig.hl.pop("jobs", 5)
        for dead in (False, True):
            live = await state_rows.pin(rig.hl.topics.runner("jobs"), dead)
            log = source_of(rig).open(source_of(rig).topics()[0])
            log.refresh()
            still = log.state_rows(dead)
            assert (live.rows == still.rows).all()
            assert (live.texts, live.ends, live.segment_bytes) == (still.texts, still.ends, still.segment_bytes)
        await rig.hl.snapshot("jobs")  # as whole as before it was pinned
        await rig.reopen()
        assert ((await state_rows.pin(rig.hl.topics.runner("jobs"), True)).rows == live.rows).all()


async def test_state_view_is_stable_while_the_queue_works() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%05d" % i * 100, i, key=f"k{i}") for i in range(500)])
        work, asked = planned(rig, minPartitions="3")
        assert len(work) == 3
        before = shown(rig, work, asked)
        assert [row["priority"] for row in before] != []
        assert {row["value"][:5] for row in before} == {b"%05d" % i for i in range(500)}
        await rig.hl.ack(await rig.hl.pop("jobs", 500))
        await churn(rig)
        await reclaim(rig)
        assert shown(rig, work, asked) == before
        await rig.reopen()
        assert shown(rig, work, asked) == before
        assert rows(rig) == []
        release(rig)
        await reclaim(rig)
        with pytest.raises(DataLost, match="reclaimed after the read was planned"):
            shown(rig, work, asked)


async def test_late_task_holds_what_it_reads() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 50_000, i) for i in range(200)], atomic=False)
        (work,), asked = planned(rig)
        release(rig)
        late = replace(work, hold_from=0.0)
        batches = read_state(source_of(rig), late, asked)
        next(batches)
        assert len(rig.files(".lease")) == 1
        assert sum(batch.num_rows for batch in batches) > 0
        assert not rig.files(".lease")


async def test_state_columns_are_read_without_records() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x", i) for i in range(20)])
        (work,), asked = planned(rig, columns="id,state,attempts,as_of_offset")
        for path in rig.files(".seg"):
            if "/jobs" in path:
                rig.disk.unlink(path)
        assert shown(rig, [work], asked) == [
            {"id": row["id"], "state": "ready", "attempts": 0, "as_of_offset": 20}
            for row in unpack(work.packed)
        ]  # fmt: skip


async def test_corrupt_record_fails_the_read() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 5000, i) for i in range(20)])
        work, asked = planned(rig)
        (segment,) = [path for path in rig.files(".seg") if "/jobs" in path]
        rig.disk.damage(segment, 60)
        with pytest.raises(RecordCorrupt, match="is corrupt"):
            shown(rig, work, asked)


async def test_unassigned_partitions_are_neither_read_nor_held() -> None:
    async with opened(topic={"partitions": 3}) as rig:
        assert rows(rig) == []
        work, asked = planned(rig, "dlq")
        assert (work, rig.files(".lease")) == ([], [])
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x", key=f"k{i}") for i in range(60)])
        asked = parse_options({"path": PATH, "view": "backlog", "assign": '{"jobs": [1]}'}, streaming=False)
        found = shown(rig, plan_state(source_of(rig), asked), asked)
        assert {row["partition"] for row in found} == {1}
        assert len(found) == sum(row["partition"] == 1 for row in rows(rig)) > 0


@pytest.mark.parametrize("view", ["backlog", "dlq"])
def test_state_views_reject_streams_and_ranges(view: str) -> None:
    given = {"path": PATH, "subscribe": "jobs", "view": view}
    with pytest.raises(BadRequest, match=f"the view {view} shows one point in time and is batch only"):
        parse_options(given, streaming=True)
    with pytest.raises(BadRequest, match="omit startingOffsets"):
        parse_options({**given, "startingOffsets": "earliest"}, streaming=False)


async def test_state_plan_is_small() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 20, i % 7) for i in range(8000)], atomic=False)
        pinned = await state_rows.pin(rig.hl.topics.runner("jobs"), dead=False)
        packed = pack(pinned.rows)
        assert len(packed) < 20 * len(pinned.rows)
        assert (unpack(packed) == pinned.rows).all()
