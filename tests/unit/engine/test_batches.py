"""Decisions about prepared batches: crashes at every step, failed writes, doubts, timeouts, forgetting."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from heapline.contract.config import BrokerConfig, check_config, parse_topic
from heapline.contract.errors import (
    BadName,
    BatchDecided,
    BatchInDoubt,
    Closed,
    IdempotencyConflict,
    JournalCorrupt,
    StorageFull,
    TopicReloading,
    UnknownPart,
)  # fmt: skip
from heapline.contract.message import Outgoing
from heapline.engine import internal_topic, topics
from heapline.engine.batches import decisions
from heapline.engine.broker import EmbeddedBroker
from heapline.engine.columns import EnqueueCall
from heapline.engine.runner import TopicRunner
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.node import Node
from tests.unit.engine.rig import SMALL, Rig, opened, settle, until

HOUR = 3600.0


def some(*payloads: str, **facts: Any) -> list[Outgoing]:
    return [Outgoing(payload.encode(), **facts) for payload in payloads]


async def taken(hl: EmbeddedBroker, topic: str) -> list[str]:
    messages = await hl.pop(topic, 1000)
    await hl.ack(messages)
    return sorted(m.payload.decode() for m in messages)


# -- crashes -----------------------------------------------------------------------------------------------------------

PARTS = {
    "1": {"a": some("a1", "a2", idempotency_key=None), "b": some("b1")},
    "2": {"b": some("b2", idempotency_key="k")},
    "loser": {"a": some("lost"), "b": some("lost", idempotency_key="k")},
}
WANTED = (["a1", "a2"], ["b1", "b2"])
NOTHING: tuple[list[str], list[str]] = ([], [])


@functools.cache
def topics_on_disk(system: bool) -> FakeDisk:
    """Create a disk with two durable topics; with the system journal, or before it was first needed."""
    node = Node(0, BrokerConfig(spare_segment_bytes=0))

    async def make() -> None:
        await node.hl.create_topic("a", **SMALL, partitions=3)
        await node.hl.create_topic("b", **SMALL)
        if system:
            await node.hl.commit_batch("first", [])

    node.live(lambda: [make()])
    return node.disk


class Crashing:
    """Prepare and commit over two topics, cut the power at a given disk operation, then check what is left."""

    def __init__(self, seed: int, system: bool = True) -> None:
        self.node = Node(seed, BrokerConfig(spare_segment_bytes=0, reclaim_interval=3600.0))
        self.node.disk = topics_on_disk(system).crash(self.node.rng)
        self.answered: list[str] = []
        self.seen: list[tuple[list[str], list[str]]] = []
        self.steps = 0  # disk operations of the work

    def run(self, steps: int, steps_of_open: int | None = None) -> bool:
        """Whether the power was cut before the end."""
        cut = self.node.live(lambda: [self._work(steps)]) == "crash"
        if steps_of_open is not None:
            self.node.disk.cut_power_in(steps_of_open)
            self.node.live(list)
        self.node.live(lambda: [self._look()])
        return cut

    async def _work(self, steps: int) -> None:
        self.node.disk.cut_power_in(steps)
        before = self.node.disk.steps
        await self._prepare()
        assert await self.node.hl.commit_batch("batch", ["1", "2"]) == 4
        self.answered.append("commit")
        self.steps = self.node.disk.steps - before

    async def _prepare(self) -> None:
        for part, shares in PARTS.items():
            await self.node.hl.prepare_batch("batch", part, shares)
            self.answered.append(part)

    async def _see(self) -> tuple[list[str], list[str]]:
        found = await taken(self.node.hl, "a"), await taken(self.node.hl, "b")
        self.seen.append(found)
        return found

    async def _look(self) -> None:
        hl = self.node.hl
        assert await self._see() in (NOTHING, WANTED)
        try:
            assert await hl.commit_batch("batch", ["1", "2"]) == 4
        except UnknownPart:
            assert "loser" not in self.answered, "all had been prepared, durably"
            assert await self._see() == NOTHING
            await self._prepare()
            assert await hl.commit_batch("batch", ["1", "2"]) == 4
        await self._see()
        assert await hl.commit_batch("batch", ["1", "2"]) == 4
        await self._see()
        for name in ("a", "b"):
            assert sum(p.prepared for p in (await hl.stats(name)).partitions) == 0
        assert (await hl.enqueue("b", b"b2", idempotency_key="k")).duplicate

    def judge(self) -> None:
        committed = "commit" in self.answered
        assert self.seen[0] == WANTED or not committed, "an answered commit is visible"
        assert self.seen[0] == NOTHING or {"1", "2", "loser"} <= set(self.answered), (
            "nothing is committed without a request"
        )
        assert [found for found in self.seen if found != NOTHING] == [WANTED], "each message once"


def crash_everywhere(system: bool, stride: int) -> set[tuple[bool, bool]]:
    """Cut the power after one disk operation, two, and so on until the end: (was it visible?, was it answered?)"""
    first_seen = set()
    for steps in range(0, 1000, stride):
        world = Crashing(steps, system)
        cut = world.run(steps)
        world.judge()
        first_seen.add((bool(world.seen[0][0]), "commit" in world.answered))
        if not cut:
            return first_seen
    pytest.fail("it never finished")


def test_crash_while_the_system_journal_is_created_leaves_all_or_nothing() -> None:
    assert {(False, False), (True, True)} <= crash_everywhere(system=False, stride=2)


def test_crash_at_every_step_leaves_all_or_nothing_over_both_topics() -> None:
    first_seen = crash_everywhere(system=True, stride=1)
    assert first_seen == {(False, False), (True, False), (True, True)}, "some are decided without an answer"


@pytest.mark.parametrize("steps_of_open", range(10, 60, 10))
def test_crash_while_a_crash_is_being_recovered_changes_nothing(steps_of_open: int) -> None:
    """The power fails when the decision is durable but not all topics have recorded it, and again while opening."""
    whole = Crashing(steps_of_open)
    assert not whole.run(1 << 30)
    for back in (1, 3):
        world = Crashing(steps_of_open)
        world.run(whole.steps - back, steps_of_open)
        world.judge()


def test_prepare_interrupted_between_topics_is_completed_by_repeating_it() -> None:
    partial = 0
    for seed in range(24):
        world = Crashing(seed)
        node = world.node

        async def work(node: Node = node, steps: int = 2 + seed % 4) -> None:
            node.disk.cut_power_in(steps)
            await node.hl.prepare_batch("batch", "1", PARTS["1"])

        async def look(node: Node = node) -> None:
            nonlocal partial
            held = {topic for info in await node.hl.list_batches() for topic in info.parts.get("1", ())}
            if len(held) < 2:
                with pytest.raises(UnknownPart):
                    await node.hl.commit_batch("batch", ["1"])
                partial += len(held)
            if held:
                with pytest.raises(IdempotencyConflict):
                    await node.hl.prepare_batch("batch", "1", {"a": some("other"), "b": some("b1")})
            await node.hl.prepare_batch("batch", "1", PARTS["1"])
            if len(held) == 1:
                assert await node.hl.commit_batch("batch", ["1"]) == 3

        for coroutine in (work, look):
            node.live(lambda coroutine=coroutine: [coroutine()])  # type: ignore[misc]
    assert partial, "one crash was between the topics"


# -- all at once -------------------------------------------------------------------------------------------------------


async def test_commit_becomes_visible_in_all_topics_in_one_step_of_the_loop() -> None:
    async with opened() as rig:
        await rig.topic("b", partitions=3)
        await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y", "z")})
        seen = set()
        commit = asyncio.ensure_future(rig.hl.commit_batch("batch", ["1"]))
        while not commit.done():
            seen.add((rig.runner().loaded.topic.ready, rig.runner("b").loaded.topic.ready))
            await asyncio.sleep(0)
        assert seen == {(0, 0), (1, 2)}


async def test_waiting_pops_are_woken_by_a_commit() -> None:
    async with opened() as rig:
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        pop = asyncio.ensure_future(rig.hl.pop("jobs", wait=60))
        await settle()
        await rig.hl.commit_batch("batch", ["1"])
        assert [m.payload for m in await pop] == [b"x"]


async def test_nothing_is_visible_before_the_decision_is_durable() -> None:
    async with opened() as rig:
        await rig.hl.commit_batch("first", [])  # the system journal exists
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        rig.io.hold = {"commit"}
        commit = asyncio.ensure_future(rig.hl.commit_batch("batch", ["1"]))
        await settle()
        assert len(rig.io.held) == 1
        assert rig.runner().loaded.topic.ready == 0
        rig.io.step()
        await settle()
        assert rig.runner().loaded.topic.ready == 1
        assert not commit.done(), "the topic's own record is not durable yet"
        rig.io.release()
        assert await commit == 1


# -- one decision ------------------------------------------------------------------------------------------------------


async def test_concurrent_commits_and_aborts_agree() -> None:
    for first, second in (("commit", "abort"), ("abort", "commit"), ("commit", "commit")):
        async with opened() as rig:
            await rig.topic("b")
            await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
            calls = [
                rig.hl.commit_batch("batch", ["1"]) if verb == "commit" else rig.hl.abort_batch("batch")
                for verb in (first, second)
            ]  # fmt: skip
            ends = await asyncio.gather(*calls, return_exceptions=True)
            if first == "abort":
                assert ends[0] == 1
                assert isinstance(ends[1], UnknownPart)
                assert await taken(rig.hl, "jobs") == await taken(rig.hl, "b") == []
            else:
                assert ends[0] == 2
                assert ends[1] == 2 or isinstance(ends[1], BatchDecided)
                assert (await taken(rig.hl, "jobs"), await taken(rig.hl, "b")) == (["x"], ["y"])


async def test_commit_continues_when_its_caller_is_cancelled() -> None:
    async with opened() as rig:
        await rig.hl.commit_batch("first", [])
        await rig.topic("b")
        await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
        rig.io.hold = {"commit"}
        commit = asyncio.ensure_future(rig.hl.commit_batch("batch", ["1"]))
        await settle()
        commit.cancel()
        await settle()
        rig.io.release()
        await settle()
        assert (await taken(rig.hl, "jobs"), await taken(rig.hl, "b")) == (["x"], ["y"])
        assert await rig.hl.commit_batch("batch", ["1"]) == 2


async def test_part_prepared_during_the_commit_is_dropped_with_unnamed_parts() -> None:
    async with opened() as rig:
        await rig.hl.commit_batch("first", [])
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        rig.io.hold = {"commit"}
        commit = asyncio.ensure_future(rig.hl.commit_batch("batch", ["1"]))
        await settle()
        late = asyncio.ensure_future(rig.hl.prepare_batch("batch", "2", some("late"), topic="jobs"))
        await settle()
        rig.io.release()
        assert await commit == 1
        await asyncio.gather(late, return_exceptions=True)
        assert rig.runner().loaded.topic.partitions[0].entries.prepared.count == 0
        assert await taken(rig.hl, "jobs") == ["x"]


async def test_reopened_topic_applies_the_commit_before_it_serves() -> None:
    async with opened() as rig:
        await rig.topic("b")
        await rig.hl.commit_batch("first", [])
        await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
        decided, go_on = asyncio.Event(), asyncio.Event()
        record = rig.hl.topics.batches.decisions.record

        async def slow(decision: decisions.Decision) -> None:
            await record(decision)
            decided.set()
            await go_on.wait()

        rig.hl.topics.batches.decisions.record = slow  # type: ignore[method-assign]
        commit = asyncio.ensure_future(rig.hl.commit_batch("batch", ["1"]))
        await decided.wait()
        rig.io.hold = {"load"}
        update = asyncio.ensure_future(rig.hl.update_topic("jobs", tick=0.2))
        await until(lambda: bool(rig.io.held))
        pop = asyncio.ensure_future(rig.hl.pop("jobs"))
        go_on.set()
        assert await commit == 2
        assert await taken(rig.hl, "b") == ["y"]
        rig.io.release()
        assert [m.payload for m in await pop] == [b"x"]
        await update


async def test_broker_can_be_closed_while_a_batch_is_being_committed() -> None:
    for turns in range(0, 40, 3):
        async with opened() as rig:
            await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
            commit = asyncio.ensure_future(rig.hl.commit_batch("batch", ["1"]))
            await settle(turns)
            async with asyncio.timeout(20):
                await rig.hl.close()
                (end,) = await asyncio.gather(commit, return_exceptions=True)
            await rig.open()
            seen = await taken(rig.hl, "jobs")
            assert seen == (["x"] if end == 1 else []) or isinstance(end, TopicReloading)
            assert end == 1 or isinstance(end, Closed | TopicReloading)
            assert await rig.hl.commit_batch("batch", ["1"]) == 1


# -- failed writes -----------------------------------------------------------------------------------------------------


async def test_failed_commit_record_is_applied_when_the_topic_is_reloaded() -> None:
    async with opened() as rig:
        await rig.topic("b")
        await rig.hl.commit_batch("first", [])
        await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
        rig.disk.inject("pwritev", path="jobs.")
        assert await rig.hl.commit_batch("batch", ["1"]) == 2
        await until(lambda: rig.runner().is_serving)
        assert rig.runner().counters.reloads == 1
        assert (await taken(rig.hl, "jobs"), await taken(rig.hl, "b")) == (["x"], ["y"])
        await rig.reopen()
        assert await taken(rig.hl, "jobs") == await taken(rig.hl, "b") == []


async def test_decision_with_a_failed_write_can_be_repeated() -> None:
    async with opened() as rig:
        await rig.hl.commit_batch("first", [])
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        rig.disk.inject("pwritev", path="_system")
        with pytest.raises(TopicReloading):
            await rig.hl.commit_batch("batch", ["1"])
        assert await taken(rig.hl, "jobs") == []
        await until(lambda: not rig.hl.topics.batches.decisions.in_doubt)
        assert await rig.hl.commit_batch("batch", ["1"]) == 1
        assert await taken(rig.hl, "jobs") == ["x"]


@pytest.mark.parametrize("operation", ["fdatasync", "pwritev"])
async def test_write_that_fails_at_any_step_of_a_commit_leaves_all_or_nothing(operation: str) -> None:
    """No crash: topics are reloaded while the broker runs, and the commit is repeated."""
    failed = 0
    for after in range(6):
        async with opened() as rig:
            await rig.topic("b")
            await rig.hl.commit_batch("first", [])
            await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
            rig.disk.inject(operation, path=".seg", after=after)
            try:
                assert await rig.hl.commit_batch("batch", ["1"]) == 2
            except TopicReloading:
                failed += 1
            rig.disk.clear_faults()
            runners = [
                runner
                for runner in (rig.runner(), rig.runner("b"), rig.hl.topics.batches.decisions.topic.runner)
                if runner is not None
            ]
            await until(lambda runners=runners: all(runner.is_serving for runner in runners))  # type: ignore[misc]
            assert (rig.runner().loaded.topic.ready, rig.runner("b").loaded.topic.ready) in ((0, 0), (1, 1))
            assert await rig.hl.commit_batch("batch", ["1"]) == 2
            assert (await taken(rig.hl, "jobs"), await taken(rig.hl, "b")) == (["x"], ["y"])
            await rig.reopen()
            assert (await taken(rig.hl, "jobs"), await taken(rig.hl, "b")) == NOTHING
    assert failed, "some commit was not answered"


async def unsure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next decision durable without answering its caller."""
    await rig.hl.commit_batch("first", [])
    system = rig.hl.topics.batches.decisions.topic.runner
    assert system is not None
    enqueue = TopicRunner.enqueue

    async def lose_the_answer(self: TopicRunner, call: EnqueueCall) -> Any:
        await enqueue(self, call)
        raise TopicReloading(self.name, "the answer was lost")

    monkeypatch.setattr(system, "enqueue", lose_the_answer.__get__(system))


async def test_durable_decision_in_doubt_is_found_and_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await unsure(rig, monkeypatch)
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        with pytest.raises(TopicReloading):
            await rig.hl.commit_batch("batch", ["1"])
        await until(lambda: rig.runner().loaded.topic.ready == 1)  # without a call
        assert await rig.hl.commit_batch("batch", ["1"]) == 1
        assert await taken(rig.hl, "jobs") == ["x"]


async def test_all_decisions_in_doubt_are_applied_even_if_the_caller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as rig:
        await rig.topic("b")
        await unsure(rig, monkeypatch)
        await rig.hl.prepare_batch("one", "1", some("x"), topic="jobs")
        await rig.hl.prepare_batch("two", "1", some("y"), topic="b")
        commits = [rig.hl.commit_batch(batch, ["1"]) for batch in ("one", "two")]
        ends = await asyncio.gather(*commits, return_exceptions=True)
        assert [type(end) for end in ends] == [TopicReloading] * 2
        rig.io.hold = {"commit"}
        finder = asyncio.ensure_future(rig.hl.prepare_batch("three", "1", some("z"), topic="jobs"))
        await until(lambda: len(rig.hl.topics.batches.decisions.all()) == 3)
        await settle(5)
        finder.cancel()
        await settle(5)
        rig.io.release()
        assert (await taken(rig.hl, "jobs"), await taken(rig.hl, "b")) == (["x"], ["y"])


async def test_decisions_in_doubt_are_read_once_for_all_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await unsure(rig, monkeypatch)
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        with pytest.raises(TopicReloading):
            await rig.hl.commit_batch("batch", ["1"])
        before = rig.io.ran["load"]
        asks = [rig.hl.prepare_batch(f"other-{i}", "1", some("y"), topic="jobs") for i in range(20)]
        await asyncio.gather(*asks)
        assert rig.io.ran["load"] == before + 1


async def test_abort_after_a_commit_in_doubt_resolves_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await unsure(rig, monkeypatch)
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        with pytest.raises(TopicReloading):
            await rig.hl.commit_batch("batch", ["1"])
        with pytest.raises(BatchDecided):
            await rig.hl.abort_batch("batch")
        assert await taken(rig.hl, "jobs") == ["x"]


async def test_part_in_a_loading_topic_is_not_reported_as_unknown() -> None:
    async with opened() as rig:
        await rig.topic("b")
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="b")
        rig.io.hold = {"load"}
        rig.disk.inject("pwritev", path="b.")
        with pytest.raises(TopicReloading):
            await rig.hl.enqueue("b", b"y")
        with pytest.raises(TopicReloading):
            await rig.hl.commit_batch("batch", ["1"])
        with pytest.raises(TopicReloading):
            await rig.hl.abort_batch("batch")
        rig.io.release()
        await until(lambda: rig.runner("b").is_serving)
        assert await rig.hl.commit_batch("batch", ["1"]) == 1


async def test_full_disk_refuses_parts_and_decisions_and_lets_aborts_through() -> None:
    async with opened() as rig:
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        rig.disk.capacity = rig.disk.used
        with pytest.raises(StorageFull):
            await rig.hl.commit_batch("batch", ["1"])  # the system journal cannot be created
        rig.disk.capacity = None
        assert await rig.hl.commit_batch("batch", ["1"]) == 1


# -- damage ------------------------------------------------------------------------------------------------------------


async def test_damaged_system_journal_only_prevents_batch_decisions() -> None:
    rig = Rig()
    await rig.open()
    await rig.topic()
    await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
    await rig.hl.commit_batch("other", [])
    await rig.hl.close()
    for path in rig.files(".snap"):
        if "_system" in path:
            rig.disk.unlink(path)
    (segment,) = [path for path in rig.files(".seg") if "_system" in path and path.endswith("1.seg")]
    rig.disk.damage(segment, 0)
    await rig.open()
    for work in (
        rig.hl.commit_batch("batch", ["1"]), rig.hl.abort_batch("batch"),
        rig.hl.prepare_batch("batch", "2", some("y"), topic="jobs"), rig.hl.list_batches(), rig.hl.list_sinks(),
    ):  # fmt: skip
        with pytest.raises(JournalCorrupt):
            await work
    await rig.hl.enqueue("jobs", b"z")
    assert await taken(rig.hl, "jobs") == ["z"]
    await rig.hl.close()


async def test_unreadable_system_journal_does_not_keep_topics_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "LOAD_PAUSES", (0.0, 0.0))
    rig = Rig()
    await rig.open()
    await rig.topic()
    await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
    await rig.hl.commit_batch("other", [])
    await rig.hl.close()
    rig.disk.inject("pread", path="_system", times=1 << 30)
    await rig.open()
    with pytest.raises(JournalCorrupt, match="cannot be read"):
        await rig.hl.commit_batch("batch", ["1"])
    await rig.hl.enqueue("jobs", b"z")
    assert await taken(rig.hl, "jobs") == ["z"]
    rig.disk.clear_faults()
    await rig.reopen()
    assert await rig.hl.commit_batch("batch", ["1"]) == 1
    await rig.hl.close()


# -- time --------------------------------------------------------------------------------------------------------------


async def test_batch_is_aborted_when_its_last_part_is_older_than_the_timeout() -> None:
    async with opened(batch_timeout=24 * HOUR) as rig:
        coordinator = rig.hl.topics.batches
        await rig.hl.prepare_batch("batch", "1", some("x", idempotency_key="k"), topic="jobs")
        rig.clock.advance(23 * HOUR)
        await rig.topic("b")
        await rig.hl.prepare_batch("batch", "2", some("y"), topic="b")
        rig.clock.advance(2 * HOUR)
        assert await coordinator.abort_overdue(24 * HOUR) == 0, "its newest part is two hours old"
        with pytest.raises(BatchInDoubt):
            await rig.hl.enqueue("jobs", b"x", idempotency_key="k")
        rig.clock.advance(22 * HOUR)
        assert await coordinator.abort_overdue(24 * HOUR) == 1
        assert await rig.hl.list_batches() == []
        assert not (await rig.hl.enqueue("jobs", b"other", idempotency_key="k")).duplicate


async def test_timeout_is_enforced_without_a_call() -> None:
    async with opened(batch_timeout=0.02) as rig:
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        rig.clock.advance(1.0)
        await until(lambda: not rig.runner().loaded.topic.partitions[0].entries.prepared.batches)


async def test_committed_batch_is_never_timed_out() -> None:
    async with opened() as rig:
        await rig.hl.prepare_batch("batch", "1", some("x"), topic="jobs")
        await rig.hl.commit_batch("batch", ["1"])
        rig.clock.advance(1000 * HOUR)
        assert await rig.hl.topics.batches.abort_overdue(HOUR) == 0
        assert await taken(rig.hl, "jobs") == ["x"]


async def test_old_decision_is_forgotten_and_a_late_repeat_fails_instead_of_duplicating() -> None:
    async with opened() as rig:
        coordinator = rig.hl.topics.batches
        for batch in ("old", "new"):
            await rig.hl.prepare_batch(batch, "1", some(batch), topic="jobs")
            await rig.hl.commit_batch(batch, ["1"])
            rig.clock.advance(20 * HOUR)
        await coordinator.forget_old(24 * HOUR)
        assert [info.batch_id for info in await rig.hl.list_batches()] == ["new"]
        await rig.reopen()
        assert [info.batch_id for info in await rig.hl.list_batches()] == ["new"]
        with pytest.raises(UnknownPart):
            await rig.hl.commit_batch("old", ["1"])
        assert await rig.hl.commit_batch("new", ["1"]) == 1
        assert await taken(rig.hl, "jobs") == ["new", "old"]


async def test_decision_is_kept_until_every_topic_applied_it() -> None:
    async with opened() as rig:
        await rig.topic("b")
        await rig.hl.commit_batch("first", [])
        await rig.hl.prepare_batch("batch", "1", {"jobs": some("x"), "b": some("y")})
        rig.io.hold = {"load"}
        rig.disk.inject("pwritev", path="jobs.")
        assert await rig.hl.commit_batch("batch", ["1"]) == 2
        rig.clock.advance(1000 * HOUR)
        await rig.hl.topics.batches.forget_old(HOUR)
        rig.io.release()
        await until(lambda: rig.runner().is_serving)
        assert await taken(rig.hl, "jobs") == ["x"]
        await rig.hl.topics.batches.forget_old(HOUR)
        assert await rig.hl.list_batches() == []


@pytest.mark.parametrize("fsync", ["os", "interval"])
async def test_decision_is_forgotten_only_when_its_effects_are_durable(fsync: str) -> None:
    async with opened() as rig:
        await rig.topic("fast", fsync=fsync, fsync_interval=60.0)
        await rig.hl.prepare_batch("batch", "1", {"fast": some("x"), "jobs": some("y")})
        await rig.hl.commit_batch("batch", ["1"])
        journal = rig.runner("fast").loaded.journal
        assert journal.durable_unit < journal.written_unit, "its application is not durable yet"
        rig.clock.advance(1000 * HOUR)
        await rig.hl.topics.batches.forget_old(HOUR)
        assert await rig.hl.list_batches() == []
        assert journal.durable_unit == journal.written_unit


# -- maintenance -------------------------------------------------------------------------------------------------------


async def test_segment_with_prepared_records_is_rewritten_and_the_parts_stay_valid() -> None:
    async with opened(rewrite_below=0.9) as rig:
        await rig.hl.prepare_batch("batch", "1", some("x", "y", idempotency_key=None), topic="jobs")
        for _ in range(3):
            await rig.hl.enqueue_batch("jobs", [Outgoing(bytes(100_000))] * 8)
            messages = await rig.hl.pop("jobs", 100, max_bytes=1 << 30)
            await rig.hl.ack(messages)
            await rig.hl.snapshot("jobs")
        maintenance = rig.runner().maintenance
        await maintenance.reclaim()
        assert maintenance.records_moved_total == 2
        await rig.hl.enqueue("jobs", b"z")
        await rig.hl.snapshot("jobs")
        await rig.hl.enqueue("jobs", b"z")
        await rig.hl.snapshot("jobs")
        await rig.runner().maintenance.reclaim()
        assert rig.runner().maintenance.segments_reclaimed_total > 0
        assert await taken(rig.hl, "jobs") == ["z", "z"]
        await rig.reopen()
        assert await rig.hl.commit_batch("batch", ["1"]) == 2
        assert await taken(rig.hl, "jobs") == ["x", "y"]


async def test_large_part_is_one_unit_and_commits_in_events_that_fit() -> None:
    async with opened() as rig:
        messages = [Outgoing(b"", idempotency_key=f"k{i}") for i in range(2500)]
        for part in ("1", "2", "3"):
            numbered = [Outgoing(b"", idempotency_key=f"{part}{m.idempotency_key}") for m in messages]
            await rig.hl.prepare_batch("batch", part, numbered, topic="jobs")
        assert await rig.hl.commit_batch("batch", ["1", "2", "3"]) == 7500
        await rig.reopen()
        assert rig.runner().loaded.topic.ready == 7500


async def test_relaxed_fsync_policy_keeps_batches_whole() -> None:
    """The decision is always synced, so the parts it depends on must be synced before it."""
    async with opened() as rig:
        await rig.topic("fast", fsync="os")
        await rig.hl.prepare_batch("batch", "1", {"fast": some("x"), "jobs": some("y")})
        durable = rig.runner("fast").loaded.journal.durable_unit
        assert durable < rig.runner("fast").loaded.journal.written_unit
        await rig.hl.commit_batch("batch", ["1"])
        assert rig.runner("fast").loaded.journal.durable_unit > durable
        other = Rig(rig.disk.crash())
        await other.open()
        assert (await taken(other.hl, "fast"), await taken(other.hl, "jobs")) == (["x"], ["y"])
        await other.hl.close()


def test_system_topic_has_a_name_that_users_cannot_use() -> None:
    with pytest.raises(BadName):
        parse_topic(f"{internal_topic.NAMESPACE}/{decisions.NAME}")
    check_config(internal_topic.CONFIG)
