"""A topic that grows: after a crash, a failed write or on a full disk; and retries against a naive model."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heapline
from heapline import Outgoing
from heapline.contract.broker import Broker
from heapline.contract.config import BrokerConfig, make_config
from heapline.contract.messages import enqueued
from heapline.core.events import Grown
from heapline.engine.batches import prepared_share
from heapline.engine.columns import Columns, EnqueueCall, batch_bytes_max
from tests.simulation.loop import run
from tests.simulation.node import Node
from tests.unit.engine.rig import SMALL, Rig, opened, settle, until

KEYS = 12
CONFIG = BrokerConfig(spare_segment_bytes=0, reclaim_interval=3600.0)


async def grown(rig: Rig) -> tuple[int, int, int]:
    """Return the partition counts of the catalog, of the settings in force and of the topic itself."""
    (info,) = await rig.hl.list_topics()
    topic = rig.runner().loaded.topic
    return info.config.partitions, topic.config.partitions, len(topic.partitions)


async def drained(hl: Broker) -> list[bytes]:
    payloads: list[bytes] = []
    while messages := await hl.pop("jobs", 1000):
        payloads += [m.payload for m in messages]
        await hl.ack(messages)
    return payloads


def keyed(prefix: str) -> list[Outgoing]:
    return [Outgoing(f"{prefix}{i}".encode(), key=f"k{i}", idempotency_key=f"{prefix}{i}") for i in range(KEYS)]


# -- crashes -------------------------------------------------------------------------------------------------------


class Scene:
    """A growth from 2 to 5 partitions whose power is cut at one of its disk operations."""

    def __init__(self, **config: Any) -> None:
        self.node = Node(7, CONFIG)
        self.config = {**SMALL, "partitions": 2, **config}
        self.answered: list[str] = []

    async def prepare(self) -> None:
        hl = self.node.hl
        await hl.create_topic("jobs", **self.config)
        await hl.enqueue_batch("jobs", keyed("old"))
        await hl.snapshot("jobs")
        await hl.enqueue_batch("jobs", keyed("tail"))

    async def grow(self, cut_in: int | None, steps: Steps) -> None:
        await self.prepare()
        hl = self.node.hl
        if cut_in is None:
            steps.watch(self.node)
        else:
            self.node.disk.cut_power_in(cut_in)
        await hl.update_topic("jobs", partitions=5, max_backlog=1000)
        self.answered.append("grown")
        await hl.enqueue_batch("jobs", keyed("new"))
        self.answered.append("new")

    async def fall_behind(self, snapshot: bool) -> None:
        """Grow without the catalog."""
        await self.prepare()
        hl, disk = self.node.hl, self.node.disk
        disk.inject("rename", path="catalog")
        with pytest.raises(OSError, match="injected"):
            await hl.update_topic("jobs", partitions=5, max_backlog=1000, tick=0.05)
        assert (await hl.list_topics())[0].config.partitions == 2
        await hl.enqueue_batch("jobs", keyed("new"))
        if snapshot:
            await hl.snapshot("jobs")
        self.node.end("crash")
        await asyncio.sleep(1)

    async def check_lined_up(self) -> None:
        hl = self.node.hl
        (info,) = await hl.list_topics()
        assert (info.config.partitions, info.config.max_backlog, info.config.tick) == (5, 1000, 0.05)
        assert hl.topics._runners["jobs"].loaded.topic.partitions[0].entries.delays.tick_ms == 50
        self.answered.append("grown")
        await self.check()

    async def check(self) -> None:
        hl = self.node.hl
        (info,) = await hl.list_topics()
        topic = hl.topics._runners["jobs"].loaded.topic
        assert (info.config.partitions, info.config.max_backlog) in ((2, 0), (5, 1000))
        assert info.config == topic.config
        assert len(topic.partitions) == info.config.partitions
        if "grown" in self.answered:
            assert info.config.partitions == 5
        assert (await hl.update_topic("jobs", partitions=5, max_backlog=1000)).config.partitions == 5
        assert [(g.before, g.after) for g in topic.growths] == [(2, 5)]
        for prefix in ("old", "tail", "new"):
            await hl.enqueue_batch("jobs", keyed(prefix))
        wanted = sorted(m.payload for prefix in ("old", "tail", "new") for m in keyed(prefix))
        assert sorted(await drained(hl)) == wanted


WRITES = {"create", "fallocate", "fdatasync", "fsync_dir", "pwritev", "rename", "truncate", "unlink", "zero"}


class Steps:
    """Return the disk operations of a run that write: a power cut between two of them equals one at the second."""

    def __init__(self) -> None:
        self._at: list[int] = []

    def watch(self, node: Node) -> None:
        disk, start = node.disk, node.disk.steps

        def note(operation: str, path: str) -> None:
            if operation in WRITES:
                self._at.append(disk.steps - start - 1)

        disk.on_step = note  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[int]:
        assert len(self._at) > 10
        return iter(self._at)


@pytest.mark.parametrize("fsync", ["commit", "os"])
def test_power_cut_at_any_write_leaves_the_topic_as_before_or_after(fsync: str) -> None:
    steps, seen = Steps(), set()
    for step in chain([None], steps):
        scene = Scene(fsync=fsync)
        how = scene.node.live(lambda scene=scene, step=step: [scene.grow(step, steps)])  # type: ignore[misc]
        assert how == ("done" if step is None else "crash")
        scene.node.live(lambda scene=scene: [scene.check()])  # type: ignore[misc]
        seen.add(tuple(scene.answered))
    assert seen == {(), ("grown",), ("grown", "new")}


@pytest.mark.parametrize("snapshot", [False, True])
def test_power_cut_at_any_write_of_the_opening_that_updates_the_catalog(snapshot: bool) -> None:
    steps = Steps()
    for step in chain([None], steps):
        scene = Scene()
        assert scene.node.live(lambda scene=scene: [scene.fall_behind(snapshot)]) == "crash"  # type: ignore[misc]
        if step is None:
            steps.watch(scene.node)
        else:
            scene.node.disk.cut_power_in(step)
        how = scene.node.live(lambda: [asyncio.sleep(0)])
        assert how == ("done" if step is None else "crash")
        scene.node.live(lambda scene=scene: [scene.check_lined_up()])  # type: ignore[misc]


async def test_growth_is_durable_before_the_catalog_has_it_under_every_policy() -> None:
    for policy in ("commit", "interval", "os"):
        rig = Rig()
        await rig.open()
        await rig.topic(partitions=2, fsync=policy, fsync_interval=60.0)
        await rig.hl.enqueue_batch("jobs", keyed("old"))
        rig.io.hold = {"change"}
        growing = asyncio.ensure_future(rig.hl.update_topic("jobs", partitions=4))
        await until(lambda rig=rig: bool(rig.io.held))  # type: ignore[misc]
        crashed = Rig(rig.disk.crash())
        await crashed.open()
        assert await grown(crashed) == (4, 4, 4)
        await crashed.hl.close()
        rig.io.release()
        await growing
        await rig.hl.close()


# -- writes that fail ----------------------------------------------------------------------------------------------


async def test_growth_whose_write_fails_changes_nothing() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.disk.inject("pwritev", path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.update_topic("jobs", partitions=4)
        await until(lambda: rig.runner().is_serving)
        assert await grown(rig) == (1, 1, 1)
        await rig.hl.update_topic("jobs", partitions=4)
        assert await grown(rig) == (4, 4, 4)
        assert await drained(rig.hl) == [b"x"]


async def test_growth_with_a_failed_sync_is_consistent() -> None:
    """No caller got an answer, so either outcome is right; but catalog, settings and partitions agree."""
    async with opened() as rig:
        rig.disk.inject("fdatasync", path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.update_topic("jobs", partitions=4, max_backlog=50)
        await until(lambda: rig.runner().is_serving)
        _, inforce, there = await grown(rig)
        assert inforce == there
        assert there in (1, 4)  # any subset of the sectors may have been written
        await rig.hl.update_topic("jobs", partitions=4, max_backlog=50)
        with pytest.raises(heapline.BadRequest, match="shrink"):
            await rig.hl.update_topic("jobs", partitions=3)
        with pytest.raises(heapline.TopicExists):
            await rig.topic(partitions=1)
        await rig.hl.update_topic("jobs", max_inflight=9)
        assert await grown(rig) == (4, 4, 4)
        (info,) = await rig.hl.list_topics()
        assert (info.config.max_backlog, info.config.max_inflight) == (50, 9)
        assert len(rig.runner().loaded.topic.growths) == 1


async def test_unwritable_catalog_does_not_keep_a_grown_topic_closed() -> None:
    async with opened() as rig:
        rig.disk.inject("rename", errno.EIO, path="catalog")
        with pytest.raises(OSError, match="injected"):
            await rig.hl.update_topic("jobs", partitions=4)
        await rig.hl.enqueue_batch("jobs", keyed("a"))
        rig.disk.inject("rename", errno.ENOSPC, path="catalog")
        await rig.reopen()
        assert await grown(rig) == (1, 4, 4)
        assert rig.runner().loaded.snapshot_unit == rig.runner().loaded.journal.written_unit, (
            "the snapshot was not used"
        )
        await rig.hl.update_topic("jobs", partitions=4)  # a repeat completes it
        assert await grown(rig) == (4, 4, 4)
        assert len(rig.runner().loaded.topic.growths) == 1
        assert sorted(await drained(rig.hl)) == sorted(m.payload for m in keyed("a"))


async def test_journal_is_opened_with_the_settings_of_a_growth() -> None:
    """Even if the catalog does not contain them yet: what stats say about durability must be true."""
    rig = Rig()
    await rig.open()
    await rig.topic(fsync="os")
    rig.disk.inject("rename", errno.EIO, path="catalog", times=2)
    with pytest.raises(OSError, match="injected"):
        await rig.hl.update_topic("jobs", partitions=4, fsync="commit")
    await _check_answers_are_durable(rig, 1)
    rig.disk.inject("pwritev", path=".seg")
    with pytest.raises(heapline.TopicReloading):
        await rig.hl.enqueue("jobs", b"lost")
    await until(lambda: rig.runner().is_serving)
    await _check_answers_are_durable(rig, 2)
    await rig.reopen()
    await _check_answers_are_durable(rig, 3)
    await rig.hl.close()


async def _check_answers_are_durable(rig: Rig, count: int) -> None:
    assert await grown(rig) == (1, 4, 4)
    assert (await rig.hl.stats("jobs")).durability == "every answer is durable"
    await rig.hl.enqueue("jobs", b"x")
    crashed = Rig(rig.disk.crash())
    await crashed.open()
    assert (await crashed.hl.stats("jobs")).ready == count
    await crashed.hl.close()


async def test_full_disk_refuses_a_growth_and_nothing_changes() -> None:
    async with opened() as rig:
        rig.disk.capacity = rig.disk.used
        results = [await _tried(rig.hl.enqueue("jobs", bytes(100_000))) for _ in range(30)]
        assert isinstance(results[-1], heapline.StorageFull)
        before = rig.runner().loaded.topic.partitions[0].state.offset
        with pytest.raises(heapline.StorageFull):
            await rig.hl.update_topic("jobs", partitions=4)
        assert await grown(rig) == (1, 1, 1)
        assert rig.runner().loaded.topic.partitions[0].state.offset == before
        rig.disk.capacity = None


@pytest.mark.parametrize("snapshot", [False, True])
async def test_settings_changed_while_the_catalog_is_behind_are_not_forgotten(snapshot: bool) -> None:
    async with opened() as rig:
        rig.disk.inject("rename", errno.EIO, path="catalog", times=2)
        for settings in ({"partitions": 4, "max_backlog": 50}, {"max_inflight": 9}):
            with pytest.raises(OSError, match="injected"):
                await rig.hl.update_topic("jobs", **settings)
        if snapshot:
            await rig.hl.snapshot("jobs")
        assert (await rig.hl.list_topics())[0].config.partitions == 1
        crashed = Rig(rig.disk.crash())
        await crashed.open()
        (info,) = await crashed.hl.list_topics()
        assert (info.config.partitions, info.config.max_backlog, info.config.max_inflight) == (4, 50, 9)
        await crashed.hl.close()


async def test_growth_on_a_topic_that_reloads_is_refused_and_changes_nothing() -> None:
    async with opened() as rig:
        rig.io.hold = {"load"}
        rig.disk.inject("pwritev", path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.update_topic("jobs", partitions=4)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.update_topic("jobs", max_backlog=4)
        rig.io.release()
        await until(lambda: rig.runner().is_serving)
        assert await grown(rig) == (1, 1, 1)
        assert (await rig.hl.list_topics())[0].config.max_backlog == 0


async def test_closing_during_a_growth_loses_neither() -> None:
    rig = Rig()
    await rig.open()
    await rig.topic(fsync="os")
    rig.io.hold = {"commit"}
    growing = asyncio.ensure_future(rig.hl.update_topic("jobs", partitions=4))
    await settle()
    closing = asyncio.ensure_future(rig.hl.close())
    await settle()
    rig.io.release()
    await closing
    await asyncio.gather(growing, return_exceptions=True)
    await rig.open()
    assert await grown(rig) == (4, 4, 4)
    await rig.hl.close()


# -- one turn ------------------------------------------------------------------------------------------------------


async def test_growth_and_messages_for_new_partitions_in_one_unit_replay() -> None:
    """The frame that adds partitions precedes theirs, even if partition 0 was not the first to be written."""
    async with opened() as rig:
        await rig.hl.update_topic("jobs", partitions=2)
        rig.io.hold = {"commit"}
        await asyncio.gather(*(_started(rig.hl.enqueue("jobs", b"a", key=f"k{i}")) for i in range(4)))
        growing = asyncio.ensure_future(rig.hl.update_topic("jobs", partitions=6))
        await settle()
        more = asyncio.ensure_future(rig.hl.enqueue_batch("jobs", keyed("b")))
        await settle()
        rig.io.release()
        await asyncio.gather(growing, more)
        crashed = Rig(rig.disk.crash())
        await crashed.open()
        assert await grown(crashed) == (6, 6, 6)
        assert len(await drained(crashed.hl)) == 4 + KEYS
        await crashed.hl.close()


async def _tried(work: Any) -> Any:
    try:
        return await work
    except heapline.HeaplineError as error:
        return error


async def _started(work: Any) -> asyncio.Future[Any]:
    future = asyncio.ensure_future(work)
    await settle(3)
    return future


async def test_large_batch_that_a_growth_makes_too_large_is_refused() -> None:
    async with opened() as rig:
        before = rig.runner().loaded.topic.config
        count = 1000
        after = make_config({"partitions": 1024}, before)
        size = (batch_bytes_max(before, count) + batch_bytes_max(after, count)) // 2 // count - 2 * 96
        messages = [Outgoing(bytes(size), key=f"k{i}") for i in range(count)]
        runner = rig.runner()
        atomic = EnqueueCall(runner.future(), columns=Columns(messages))
        assert batch_bytes_max(after, count) < atomic.nbytes <= batch_bytes_max(before, count)
        loose = EnqueueCall(runner.future(), columns=Columns(messages), atomic=False)
        await rig.hl.update_topic("jobs", partitions=1024)
        with pytest.raises(heapline.BadRequest, match="split it"):
            await runner.enqueue(atomic)
        refused = enqueued(await runner.enqueue(loose))
        assert {type(r.error) for r in refused} == {heapline.BadRequest}
        assert runner.counters.reloads == 0
        assert (await rig.hl.stats("jobs")).ready == 0


async def test_part_that_a_growth_makes_too_large_is_refused() -> None:
    """Between measuring a part and its turn are awaits, in which the topic may grow."""
    async with opened() as rig:
        runner = rig.runner()
        name = prepared_share.PartName("batch", "1", ["jobs"], b"print")
        messages = [Outgoing(bytes(700), key=f"k{i}") for i in range(1000)]
        call = EnqueueCall(runner.future(), columns=Columns(messages))
        prepared_share.check_share_bytes(call, name, runner.loaded.topic.config, "jobs")
        await rig.hl.update_topic("jobs", partitions=1024)
        with pytest.raises(heapline.BadRequest, match="several parts"):
            await runner.bring(partial(prepared_share.prepare, runner, name, call))
        assert runner.counters.reloads == 0
        assert await rig.hl.list_batches() == []


@pytest.mark.parametrize("restart", ["none", "snapshot", "journal"])
async def test_key_in_an_old_partition_is_found_for_its_whole_window(restart: str) -> None:
    """The second attempt's keys go where the first attempt's are in doubt, and expire later than those."""
    rig = Rig()
    hl = await rig.open()
    await rig.topic(dedup_window=100.0)
    messages = [Outgoing(b"x", idempotency_key=f"k{i}") for i in range(KEYS)]
    await hl.prepare_batch("batch", "first", messages, topic="jobs")
    await hl.update_topic("jobs", partitions=16)
    rig.clock.advance(90)
    await hl.prepare_batch("batch", "second", messages, topic="jobs")
    assert await hl.commit_batch("batch", ["second"]) == KEYS
    if restart == "journal":
        rig.disk = rig.disk.crash()
        hl = await rig.open()
    elif restart == "snapshot":
        hl = await rig.reopen()
    rig.clock.advance(20)
    assert all([(await hl.enqueue("jobs", b"x", idempotency_key=f"k{i}")).duplicate for i in range(KEYS)])
    rig.clock.advance(81)
    assert not any([(await hl.enqueue("jobs", b"x", idempotency_key=f"k{i}")).duplicate for i in range(KEYS)])
    await hl.close()


async def test_growths_survive_in_snapshot_and_journal() -> None:
    async with opened() as rig:
        for count in (2, 3, 7):
            await rig.hl.update_topic("jobs", partitions=count)
            await rig.hl.enqueue_batch("jobs", keyed(f"n{count}-"))
        reported = list(rig.runner().loaded.topic.growths)
        assert [(g.before, g.after) for g in reported] == [(1, 2), (2, 3), (3, 7)]
        assert all(isinstance(g, Grown) and g.until > g.at for g in reported[1:])
        crashed = Rig(rig.disk.crash())
        await crashed.open()
        assert crashed.runner().loaded.topic.growths == reported
        await crashed.reopen()  # from the snapshot that closing wrote
        assert crashed.runner().loaded.topic.growths == reported
        await crashed.hl.close()


async def test_epoch_is_recorded_in_new_partitions_at_its_producer_s_next_call() -> None:
    async with opened() as rig:
        epoch = await rig.hl.open_producer("jobs", "p")
        await rig.hl.update_topic("jobs", partitions=4)
        partitions = rig.runner().loaded.topic.partitions
        assert [p.state.sequences.epoch_of("p") for p in partitions] == [epoch, None, None, None]
        offset = partitions[0].state.offset
        sent = await rig.hl.enqueue("jobs", b"x", producer_id="p", epoch=epoch, seq=0)
        assert (await rig.hl.get("jobs", sent.id)).partition == 0, "numbers stay in the partitions of the epoch's start"
        assert [p.state.sequences.epoch_of("p") for p in partitions] == [epoch] * 4
        assert [p.state.sequences.partitions_of("p") for p in partitions] == [1] * 4
        assert partitions[0].state.offset == offset + 1, "it is not recorded again where it was known"
        assert await rig.hl.open_producer("jobs", "p") == epoch + 1
        assert [p.state.sequences.partitions_of("p") for p in partitions] == [4] * 4


# -- retries against a naive model ---------------------------------------------------------------------------------

WINDOW = 100.0
STYLES = ("seq", "seq-keyed", "window", "window-keyed", "pending", "until_ack", "both")


class Model:
    """The naive model of what the broker must remember."""

    def __init__(self) -> None:
        self.first: dict[int, tuple[int, float]] = {}  # message -> id of its valid first try, and when
        self.style: dict[int, str] = {}
        self.alive: dict[int, int] = {}  # id -> message; not popped yet
        self.sent: list[int] = []

    def remembers(self, message: int, now: float) -> bool:
        if message not in self.first:
            return False
        id, at = self.first[message]
        style = self.style[message]
        if style.startswith(("seq", "both")):
            return True
        if style.startswith("window"):
            return now < at + WINDOW
        return id in self.alive


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.lists(st.integers(0, 13), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("send"), st.lists(st.integers(0, 13), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("grow"), st.integers(1, 6)),
        st.tuples(st.just("restart"), st.sampled_from(("snapshot", "crash"))),
        st.tuples(st.just("pop"), st.integers(1, 4)),
        st.tuples(st.just("wait"), st.sampled_from((30.0, 99.0, 150.0))),
    ),
    max_size=18,
)


class Player:
    def __init__(self) -> None:
        self.rig = Rig()
        self.model = Model()
        self.partitions = 1
        self.now = 0.0
        self.popped: list[int] = []
        self.epoch = 0

    async def play(self, moves: list[tuple[str, Any]]) -> None:
        await self.rig.open()
        await self.rig.topic(dedup_window=WINDOW)
        self.epoch = await self.rig.hl.open_producer("jobs", "p")
        for move, argument in moves:
            await getattr(self, f"_{move}")(argument)
        while await self._pop(100):
            pass
        assert not self.model.alive
        assert len(self.popped) == len(set(self.popped)) == len(self.model.sent)
        await self.rig.hl.close()

    def _message(self, number: int) -> Outgoing:
        style = self.model.style[number] = STYLES[number % len(STYLES)]
        scope: Any = style.removesuffix("-keyed") if style[0] in "wpu" else None
        return Outgoing(
            b"%d" % number, key=f"k{number}" if style.endswith("keyed") else None,
            idempotency_key=None if style.startswith("seq") else f"i{number}",
            idempotency_scope=scope, seq=number if style.startswith(("seq", "both")) else None,
        )  # fmt: skip

    async def _send(self, numbers: list[int]) -> None:
        """In two calls, because numbered messages are sent separately; each may repeat known messages or add new."""
        messages = {number: self._message(number) for number in numbers}
        for has_seq in (True, False):
            mine = {n: m for n, m in messages.items() if (m.seq is not None) == has_seq}
            if not mine:
                continue
            who: dict[str, Any] = {"producer_id": "p", "epoch": self.epoch} if has_seq else {}
            results = await self.rig.hl.enqueue_batch("jobs", list(mine.values()), atomic=False, **who)
            for number, result in zip(mine, results, strict=True):
                self._judge(number, result)

    def _judge(self, number: int, result: heapline.Enqueued) -> None:
        model = self.model
        if isinstance(result.error, heapline.StaleSequence):  # forgotten with its window: refused, never duplicated
            assert self.now >= WINDOW
            return
        assert result.error is None
        assert result.duplicate == model.remembers(number, self.now), (number, model.style[number])
        if result.duplicate:
            assert result.id == model.first[number][0]
        else:
            model.first[number] = (result.id, self.now)
            model.alive[result.id] = number
            model.sent.append(result.id)

    async def _grow(self, by: int) -> None:
        self.partitions += by
        await self.rig.hl.update_topic("jobs", partitions=self.partitions)

    async def _restart(self, how: str) -> None:
        if how == "snapshot":
            await self.rig.reopen()
            return
        clock = self.rig.clock
        self.rig = Rig(self.rig.disk.crash(random.Random(1)))
        self.rig.clock = clock
        await self.rig.open()

    async def _pop(self, count: int) -> int:
        messages = await self.rig.hl.pop("jobs", count)
        await self.rig.hl.ack(messages)
        for message in messages:
            self.popped.append(message.id)
            del self.model.alive[message.id]
        return len(messages)

    async def _wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.now += seconds
        for _ in range(2):
            await self.rig.hl.stats("jobs")


@settings(max_examples=40, deadline=None)
@given(steps)
def test_retries_across_growths_and_restarts_never_duplicate(moves: list[tuple[str, Any]]) -> None:
    async def scene() -> None:
        await Player().play(moves)

    run(scene())
