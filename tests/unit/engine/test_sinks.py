"""Versions of a sink's commits: across power cuts, forgetting, doubts and concurrent commits."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
import pytest

from heapline.contract.config import BrokerConfig
from heapline.contract.errors import BatchDecided, TopicReloading, UnknownPart
from heapline.engine.batches.decisions import SINK_KEPT, Decision
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.node import Node
from tests.unit.engine.rig import SMALL, Rig, opened, until
from tests.unit.engine.test_batches import HOUR, some, taken

DAY = 24 * HOUR


async def committed(rig: Rig, batch: str, version: int, sink: str = "s") -> int:
    await rig.hl.prepare_batch(batch, "1", some(batch), topic="jobs")
    return await rig.hl.commit_batch(batch, ["1"], sink=sink, version=version)


def prepared(rig: Rig) -> int:
    return rig.runner().loaded.topic.partitions[0].entries.prepared.count


async def test_last_version_of_a_sink_is_never_forgotten() -> None:
    async with opened() as rig:
        await committed(rig, "b0", 0)
        await committed(rig, "b1", 1)
        for _ in range(3):
            rig.clock.advance(8 * DAY)
            await rig.hl.topics.batches.forget_old(7 * DAY)
            await rig.reopen()
        assert [(s.name, s.version, s.batch_id) for s in await rig.hl.list_sinks()] == [("s", 1, "b1")]
        assert await committed(rig, "again", 1) == 1, "the first commit's answer is still known"
        assert await committed(rig, "older", 0) == 0, "the second one's is not, and it changes nothing either"
        assert prepared(rig) == 0
        assert await taken(rig.hl, "jobs") == ["b0", "b1"]


async def test_many_commits_of_a_sink_leave_few_decisions_behind() -> None:
    async with opened() as rig:
        for version in range(3 * SINK_KEPT):
            await committed(rig, f"b{version}", version)
        await rig.hl.topics.batches.forget_old(7 * DAY)
        assert len(rig.hl.topics.batches.decisions.all()) == SINK_KEPT
        assert await committed(rig, "again", 0) == 0
        assert await committed(rig, "again", 3 * SINK_KEPT - 1) == 1
        assert len(await taken(rig.hl, "jobs")) == 3 * SINK_KEPT


async def test_late_part_of_a_forgotten_version_is_rejected() -> None:
    async with opened() as rig:
        last = 2 * SINK_KEPT
        for version in range(last + 1):
            await committed(rig, f"b{version}", version)
        await rig.hl.topics.batches.forget_old(7 * DAY)
        for _ in range(2):
            with pytest.raises(BatchDecided, match=f"is version 0 of sink 's', and version {last} was committed"):
                await rig.hl.prepare_batch("b0", "late", some("late"), topic="jobs", sink="s", version=0)
            assert prepared(rig) == 0
            await rig.reopen()
        await rig.hl.prepare_batch("next", "1", some("next"), topic="jobs", sink="s", version=last + 1)
        await rig.hl.prepare_batch("other", "1", some("other"), topic="jobs", sink="t", version=0)
        assert prepared(rig) == 2


async def test_last_version_is_kept_despite_newer_commits_of_other_sinks() -> None:
    async with opened() as rig:
        await committed(rig, "a", 5, sink="a")
        rig.clock.advance(30 * DAY)
        await committed(rig, "b", 0, sink="b")
        await rig.hl.topics.batches.forget_old(7 * DAY)
        assert await committed(rig, "a again", 5, sink="a") == 1
        assert len(await taken(rig.hl, "jobs")) == 2


async def test_forgotten_sink_loses_all_versions_even_after_reopening() -> None:
    async with opened() as rig:
        for version in range(3):
            await committed(rig, f"b{version}", version)
        assert await rig.hl.forget_sink("s")
        await rig.reopen()
        assert (await rig.hl.list_sinks(), await rig.hl.list_batches()) == ([], [])
        with pytest.raises(UnknownPart):
            await rig.hl.commit_batch("b2", ["1"], sink="s", version=2)
        assert await committed(rig, "b0", 0) == 1


async def test_sink_is_not_forgotten_while_a_topic_has_not_applied_its_commit() -> None:
    async with opened() as rig:
        await rig.topic("b")
        await rig.hl.commit_batch("first", [])
        await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
        rig.io.hold = {"load"}
        rig.disk.inject("pwritev", path="jobs.")
        assert await rig.hl.commit_batch("batch", ["1"], sink="s", version=0) == 2
        with pytest.raises(TopicReloading):
            await rig.hl.forget_sink("s")
        rig.io.release()
        await until(lambda: rig.runner().is_serving)
        assert await taken(rig.hl, "jobs") == ["x"]
        assert await rig.hl.forget_sink("s")


async def test_repeat_during_the_first_commit_waits_and_changes_nothing() -> None:
    async with opened() as rig:
        await rig.hl.commit_batch("first", [])
        for batch in ("one", "two"):
            await rig.hl.prepare_batch(batch, "1", some("x"), topic="jobs")
        rig.io.hold = set(rig.io.ran)
        first = asyncio.ensure_future(rig.hl.commit_batch("one", ["1"], sink="s", version=0))
        second = asyncio.ensure_future(rig.hl.commit_batch("two", ["1"], sink="s", version=0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        assert not second.done()
        rig.io.release()
        assert await asyncio.gather(first, second) == [1, 1]
        assert (prepared(rig), await taken(rig.hl, "jobs")) == (0, ["x"])


async def test_commit_in_doubt_is_settled_before_its_version_is_committed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as rig:
        await rig.hl.commit_batch("first", [])
        system = rig.hl.topics.batches.decisions.topic.runner
        assert system is not None
        enqueue = system.enqueue

        async def written_but_not_answered(call: Any) -> Any:
            await enqueue(call)
            raise OSError("the answer was lost")

        monkeypatch.setattr(system, "enqueue", written_but_not_answered)
        await rig.hl.prepare_batch("one", "1", some("x"), topic="jobs")
        with pytest.raises(OSError, match="lost"):
            await rig.hl.commit_batch("one", ["1"], sink="s", version=0)
        monkeypatch.undo()
        await rig.hl.prepare_batch("two", "1", some("x"), topic="jobs")
        assert await rig.hl.commit_batch("two", ["1"], sink="s", version=0) == 1
        assert (prepared(rig), await taken(rig.hl, "jobs")) == (0, ["x"])


def test_decision_of_an_earlier_version_can_be_read() -> None:
    fields = {"batch_id": "b", "parts": ["1"], "topics": ["jobs"], "count": 1, "at": 0, "left_out": {}}
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Decision)
    assert (old.sink, old.version) == ("", -1)


# -- power cuts --------------------------------------------------------------------------------------------------------


@functools.cache
def topics_on_disk() -> FakeDisk:
    node = Node(0, BrokerConfig(spare_segment_bytes=0))

    async def make() -> None:
        await node.hl.create_topic("a", **SMALL, partitions=2)
        await node.hl.create_topic("b", **SMALL)
        await node.hl.commit_batch("first", [])

    node.live(lambda: [make()])
    return node.disk


class Writer:
    """Write three versions, each under names that no other attempt has, as Spark does; cut the power at any step,
    and rewrite the last version that is not known to be committed."""

    def __init__(self, seed: int) -> None:
        self.node = Node(seed, BrokerConfig(spare_segment_bytes=0, reclaim_interval=3600.0))
        self.node.disk = topics_on_disk().crash(self.node.rng)
        self.attempts = 0
        self.done = 0
        self.seen: list[str] = []

    async def write(self) -> None:
        hl = self.node.hl
        while self.done < 3:
            self.attempts += 1
            batch = f"{self.done}.{self.attempts}"
            for part in ("1", "2"):
                shares = {"a": some(f"{self.done}a{part}"), "b": some(f"{self.done}b{part}")}
                await hl.prepare_batch(batch, part, shares)
            assert await hl.commit_batch(batch, ["1", "2"], sink="s", version=self.done) == 4
            self.done += 1

    async def cut(self, steps: int) -> None:
        self.node.disk.cut_power_in(steps)
        await self.write()

    async def look(self) -> None:
        await self.write()
        for topic in ("a", "b"):
            self.seen += await taken(self.node.hl, topic)
            assert sum(p.prepared for p in (await self.node.hl.stats(topic)).partitions) in (0, 1, 2)


@pytest.mark.parametrize("offset", range(4))
def test_versions_rewritten_after_a_power_cut_are_stored_once(offset: int) -> None:
    wanted = sorted(f"{version}{topic}{part}" for version in range(3) for topic in "ab" for part in "12")
    retried = 0
    for steps in range(offset, 1000, 4):
        writer = Writer(steps)
        crashed = writer.node.live(lambda w=writer, n=steps: [w.cut(n)]) == "crash"
        writer.node.live(lambda w=writer: [w.look()])
        assert sorted(writer.seen) == wanted
        retried += writer.attempts > 3
        if not crashed:
            break
    else:
        pytest.fail("it never finished")
    assert retried
