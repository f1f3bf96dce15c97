"""Rebuilding a topic's past: at every time the state that the engine itself reported."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from typer.testing import CliRunner

import heapline
from heapline.cli.pipeline import app
from heapline.contract.config import Backoff
from heapline.contract.message import DlqFilter, MessageInfo, Outgoing, from_ms
from heapline.spark.jobs.archive import archive
from heapline.spark.jobs.rebuild import MOMENT, rebuild, states
from heapline.spark.jobs.replay import _Log, _ranges, sliced
from tests.spark.conftest import MARKS
from tests.unit.engine.rig import Rig, opened, settle
from tests.unit.spark.log_rig import table

pytestmark = MARKS
THERE = ("ready", "delayed", "leased", "dead")
Infos = dict[int, MessageInfo]


class History:
    """Performs random actions of every kind, and records the engine's state at each step."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.random = rig, random.Random(seed)
        self.ids: list[int] = []
        self.held: list[Any] = []
        self.moments: list[tuple[datetime, dict[int, int], Infos]] = []

    async def live(self, steps: int) -> None:
        kinds = [self.enqueue, self.commit, self.pop, self.end, self.meddle, self.dead, self.wait, self.wait]
        for _ in range(steps):
            await self.random.choice(kinds)()
            if self.random.random() < 0.04:
                await self.rig.hl.purge("jobs")
            await self.note()

    async def note(self) -> None:
        hl = self.rig.hl
        for _ in range(2):  # due messages fire after the first one
            await hl.stats("jobs")
            await settle()
        received = {info.id: info for id in self.ids if (info := await hl.get("jobs", id)).state in THERE}
        self.ids = list(received)
        ends = {p: end for p, (_, end) in (await hl.offsets("jobs")).items()}
        self.moments.append((from_ms(self.rig.clock.wall_ms()), ends, received))
        self.rig.clock.advance(0.002)

    def outgoing(self) -> Outgoing:
        pick = self.random
        delay, ttl = pick.choice([None, None, 3.0, 40.0]), pick.choice([None, None, 5.0, 60.0])
        at = None if delay or pick.random() < 0.8 else from_ms(self.rig.clock.wall_ms()) + timedelta(seconds=20)
        return Outgoing(b"x" * pick.randrange(9), pick.randrange(9), delay=delay, deliver_at=at, ttl=ttl,
                        max_retries=pick.choice([None, 0, 1]))  # fmt: skip

    async def enqueue(self) -> None:
        batch = [self.outgoing() for _ in range(self.random.randrange(1, 6))]
        self.ids += [sent.id for sent in await self.rig.hl.enqueue_batch("jobs", batch)]

    async def commit(self) -> None:
        name, hl = f"b{len(self.moments)}", self.rig.hl
        sent = await hl.prepare_batch(name, "p", [self.outgoing(), self.outgoing()], topic="jobs")
        await self.note()
        await (hl.commit_batch(name, ["p"]) if self.random.random() < 0.7 else hl.abort_batch(name))
        self.ids += [one.id for one in sent["jobs"] if await self._is_known(one.id)]

    async def _is_known(self, id: int) -> bool:
        try:
            await self.rig.hl.get("jobs", id)
        except heapline.contract.errors.MessageNotFound:
            return False
        return True

    async def pop(self) -> None:
        count, holder = self.random.randrange(1, 5), self.random.choice([None, "ann", "bob"])
        self.held += await self.rig.hl.pop("jobs", count, holder=holder, visibility=self.random.choice([4.0, 30.0]))

    async def end(self) -> None:
        hl, pick = self.rig.hl, self.random
        ways = [hl.ack, hl.nack, hl.release, hl.bury, lambda m: hl.extend(m, 50.0), lambda m: hl.nack(m, reason="no")]
        pick.shuffle(self.held)
        for _ in range(min(3, len(self.held))):
            with suppress(heapline.contract.errors.ConflictError):  # its lease had ended
                await pick.choice(ways)([self.held.pop()])

    async def meddle(self) -> None:
        hl, pick = self.rig.hl, self.random
        for id in pick.sample(self.ids, min(4, len(self.ids))):
            with suppress(heapline.HeaplineError):  # it is leased, dead or removed
                if pick.random() < 0.3:
                    await hl.cancel("jobs", id)
                else:
                    await hl.reschedule("jobs", id, priority=pick.randrange(20), delay=pick.choice([None, 0, 7.0]))

    async def dead(self) -> None:
        if self.random.random() < 0.7:
            await self.rig.hl.dlq_replay("jobs", where=DlqFilter(), rate=self.random.choice([None, 1.0]))
        else:
            await self.rig.hl.dlq_delete("jobs", where=DlqFilter(priority_max=4))

    async def wait(self) -> None:
        self.rig.clock.advance(self.random.choice([0.5, 3.0, 11.0]))


def rebuilt(spark: Any, rig: Rig, history: History) -> list[Infos]:
    """All times in one job: every other one by its time, the rest by offsets."""
    events = spark.createDataFrame(table(rig, view="events"))
    rows = [(m, at, None if m % 2 else ends) for m, (at, ends, _) in enumerate(history.moments)]
    cuts = spark.createDataFrame(rows, "m int, moment timestamp, ends map<int,bigint>")
    by_time, by_offset = F.col("timestamp") <= F.col(MOMENT), F.col("offset") < F.col("ends")[F.col("partition")]
    cut = events.join(F.broadcast(cuts), F.when(F.col("ends").isNull(), by_time).otherwise(by_offset)).drop("ends")
    found: list[Infos] = [{} for _ in rows]
    for row in states(cut, ["m"]).collect():
        assert row.id not in found[row.m]
        found[row.m][row.id] = row
    return found


@pytest.mark.parametrize("streams", [True, False], ids=["with streams", "without"])
async def test_rebuilt_state_equals_the_engines_at_every_time(spark: Any, streams: bool) -> None:
    topic = {"partitions": 3, "streams": streams, "max_retries_default": 1, "backoff": Backoff(base=2.0, jitter=0.0)}
    async with opened(topic=topic) as rig:
        history = History(rig, 11 + streams)
        await history.live(60)
        found = rebuilt(spark, rig, history)
    seen: set[str] = set()
    for (_, _, received), rows in zip(history.moments, found, strict=True):
        assert rows.keys() == received.keys()
        for id, info in received.items():
            row: Any = rows[id]
            seen.add(info.state)
            for name in ("state", "priority", "attempts", "holder", "partition", "message_id", "reason"):
                assert row[name] == getattr(info, name), (name, info)
            assert _utc(row.deadline) == info.deadline
            if info.state == "delayed":
                assert _utc(row.due) == info.due_at
            assert _utc(row.enqueued_at) == info.enqueued_at
            if info.state != "dead":
                assert _utc(row.expires_at) == info.expires_at
            assert row.payload_bytes == len(info.payload or b"")
    assert seen == set(THERE)


def _utc(naive: datetime | None) -> datetime | None:
    return None if naive is None else naive.astimezone(UTC)


def test_rebuild_adds_payloads_and_the_command_writes_them(spark: Any, tmp_path: Path) -> None:
    where, out = {"path": str(tmp_path / "data")}, tmp_path / "state"
    path = ["--path", where["path"]]
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as hl:
        hl.create_topic("jobs", partitions=2, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        hl.enqueue("jobs", b"first", priority=3, key="k", headers={"a": "b"})
        middle = {p: end for p, (_, end) in hl.offsets("jobs").items()}
        hl.enqueue("jobs", b"second", priority=9)
        hl.ack(hl.pop("jobs", 1))
        [row] = rebuild(spark, where, "jobs", offsets=middle, values=True).collect()
        assert (bytes(row.value), bytes(row.key), row.state) == (b"first", b"k", "ready")
        assert [(h.key, bytes(h.value)) for h in row.headers] == [("a", b"b")]
        received = CliRunner().invoke(
            app, ["rebuild", *path, "--topic", "jobs", "--at", "0s", "--out", str(out), "--json"]
        )
        assert received.exit_code == 0, received.output
        assert json.loads(received.stdout) | {"at": None, "out": None} == {
            "topic": "jobs", "at": None, "offsets": None, "ready": 1, "delayed": 0, "leased": 0, "dead": 0, "out": None,
        }  # fmt: skip
        assert [row.priority for row in spark.read.parquet(str(out)).collect()] == [9]


def test_rebuild_and_replay_read_lake_and_journal(spark: Any, tmp_path: Path) -> None:
    where, lake = {"path": str(tmp_path / "data")}, str(tmp_path / "lake")
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as hl:
        hl.create_topic("jobs", partitions=2)
        hl.enqueue_batch("jobs", [Outgoing(b"%d" % n, n) for n in range(20)])
        hl.ack(hl.pop("jobs", 5))
        archive(spark, where, "jobs", lake)
        hl.enqueue_batch("jobs", [Outgoing(b"%d" % n, n) for n in range(20, 30)])
        hl.ack(hl.pop("jobs", 5))
        acked = datetime.now(UTC)
        while (later := datetime.now(UTC)) < acked + timedelta(milliseconds=2):
            pass  # the journal's clock may be a millisecond ahead of this one
        found = rebuild(spark, where, "jobs", later, lake=lake, values=True).collect()
        assert sorted(int(row.value) for row in found) == list(range(10, 30))
        log = _Log(spark, where, lake, "jobs")
        ends = {p: end for p, (_, end) in hl.offsets("jobs").items()}
        ranges = log.ranges(None, ends)
        again = [bytes(row.value) for part in sliced(ranges, 20) for row in log.messages(_ranges(part)).collect()]
        assert sorted(map(int, again)) == list(range(30))
