"""What a second reader found: answers, leases and files when a write fails, a caller goes or the power goes at a bad
moment. Each test stands for a defect that was there once."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import heapline
from heapline import Outgoing
from heapline.contract.config import BrokerConfig
from heapline.engine.broker import EmbeddedBroker
from heapline.testing.clock import FakeClock
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.loop import run

SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 500_000}


class HeldIo:
    """Runs each job at once, except those of the names in `hold`, which wait for `let_go`."""

    def __init__(self) -> None:
        self.hold: set[str] = set()
        self.answers_held = False  # the jobs run, but nobody hears of it yet
        self._held: list[Callable[[], None]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: Exception | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args)
            except Exception as problem:
                error = problem
            if self.answers_held and name in self.hold:
                self._held.append(lambda: tell(result, error))
            else:
                loop.call_soon(tell, result, error)

        name = getattr(function, "__name__", "")
        if name in self.hold and not self.answers_held:
            self._held.append(work)
        else:
            loop.call_soon(work)
        return future

    def let_go(self) -> None:
        self.hold, self.answers_held = set(), False
        held, self._held = self._held, []
        for job in held:
            job()

    def close(self) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.clock, self.disk, self.io = FakeClock(), FakeDisk(), HeldIo()

    def broker(self, disk: FakeDisk | None = None, **config: Any) -> EmbeddedBroker:
        settings = {"spare_segment_bytes": 0, "reclaim_interval": 1e6, "snapshot_interval": 1e9} | config
        return EmbeddedBroker(
            "/data", config=BrokerConfig(**settings), disk=disk or self.disk, io=self.io, clock=self.clock,
            draw=np.random.default_rng(1).random,
        )  # fmt: skip

    async def opened(self, config: dict[str, Any] | None = None, **topic: Any) -> EmbeddedBroker:
        hl = await self.broker(**(config or {})).__aenter__()
        await hl.create_topic("jobs", **(SMALL | topic))
        return hl


def play(scene: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    rig = Rig()
    run(scene(rig), rig.clock)


async def spin(turns: int = 40) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def test_segment_is_not_deleted_before_the_acks_that_emptied_it_are_durable() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        for i in range(3):
            await hl.enqueue("jobs", bytes(400_000), priority=i)
        held = await hl.pop("jobs", 3)
        for _ in range(3):
            await hl.enqueue("jobs", b"later", delay=1e6)
            await hl.snapshot("jobs")
        rig.io.hold = {"commit"}
        acking = asyncio.ensure_future(hl.ack(held))
        await spin()
        reclaiming = asyncio.ensure_future(hl._runners["jobs"].upkeep.reclaim())
        await spin()
        after = rig.disk.crash(random.Random(5))
        assert not acking.done()
        rig.io.let_go()
        await asyncio.gather(acking, reclaiming)
        assert hl._runners["jobs"].upkeep.segments_reclaimed_total == 1
        rig.clock.advance(3600)
        again = await rig.broker(after).__aenter__()
        await asyncio.sleep(5)
        assert sorted(len(m.payload) for m in await again.pop("jobs", 3)) == [400_000] * 3

    play(scene)


@pytest.mark.parametrize("policy", ["os", "interval"])
def test_snapshot_under_a_relaxed_policy_is_never_ahead_of_its_journal(policy: str) -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened(fsync=policy, fsync_interval=50.0)
        for i in range(20):
            await hl.enqueue("jobs", bytes(1000), priority=i)
        await hl.snapshot("jobs")
        for seed in range(10):
            after = await rig.broker(rig.disk.crash(random.Random(seed))).__aenter__()
            assert (await after.stats("jobs")).ready == 20

    play(scene)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_reload_does_not_move_the_time_that_leases_run_on(jump: float) -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        await hl.pop("jobs", visibility=600)
        rig.clock.advance(60)
        before = hl._runners["jobs"].steady.now().steady
        rig.clock.jump_wall(jump)
        rig.disk.inject("fdatasync", path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await hl.enqueue("jobs", b"y", delay=1e6)
        await asyncio.sleep(5)
        assert hl._runners["jobs"].steady.now().steady == before + 5000
        assert await hl.pop("jobs") == []

    play(scene)


def test_pop_in_a_turn_that_fails_is_refused_rather_than_forgotten() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        await spin()
        rig.disk.inject("fdatasync", path=".seg")
        rig.io.hold, rig.io.answers_held = {"commit"}, True
        enqueueing = asyncio.ensure_future(hl.enqueue("jobs", b"y"))
        await spin()
        popping = asyncio.ensure_future(hl.pop("jobs"))
        await spin()
        rig.io.let_go()
        await asyncio.wait([popping, enqueueing], timeout=5)
        for call in (popping, enqueueing):
            assert isinstance(call.exception(), heapline.TopicReloading)
        await asyncio.sleep(1)
        assert len(await hl.pop("jobs")) == 1

    play(scene)


def test_syncing_at_intervals_goes_on_after_a_failed_sync() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened(fsync="interval", fsync_interval=0.05)
        await hl.enqueue("jobs", b"x")
        rig.disk.inject("fdatasync", path=".seg")
        await asyncio.sleep(2)
        await hl.enqueue("jobs", b"y")
        await asyncio.sleep(1)
        journal = hl._runners["jobs"].loaded.journal
        assert hl._runners["jobs"].counters.reloads == 1
        assert journal.durable_unit == journal.written_unit

    play(scene)


def test_wait_ends_when_the_only_message_turns_out_to_be_damaged() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened({"cache_bytes": 0})
        await hl.enqueue("jobs", bytes(2000))
        await hl.enqueue("jobs", b"drives the first from memory", delay=1e6)
        rig.disk.damage(hl._runners["jobs"].loader.directory + "/0000000001.seg", 3, "garbage")
        async with asyncio.timeout(60):
            assert await hl.pop("jobs", wait=2) == []

    play(scene)


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_topic_serves_on_when_reopening_it_for_new_settings(how: str) -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        if how == "fails":
            rig.disk.inject("open", path=".seg")
            await hl.update_topic("jobs", fsync="os")
        else:
            rig.io.hold = {"load"}
            updating = asyncio.ensure_future(hl.update_topic("jobs", fsync="os"))
            await spin()
            updating.cancel()
            await spin()
            rig.io.let_go()
        await asyncio.sleep(1)
        async with asyncio.timeout(5):
            await hl.enqueue("jobs", b"x")
        assert hl._runners["jobs"].loaded.journal._policy == "os"

    play(scene)


def test_cancelled_pop_does_not_take_back_leases_that_were_handed_to_its_repetition() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        await spin()
        rig.io.hold = {"commit"}
        first = asyncio.ensure_future(hl.pop("jobs", request_id="r"))
        await spin()
        first.cancel()
        await spin()
        second = asyncio.ensure_future(hl.pop("jobs", request_id="r"))
        await spin()
        rig.io.let_go()
        (message,) = await second
        await spin()
        assert await hl.pop("jobs") == []
        await message.ack()

    play(scene)


def test_extend_tells_the_deadline_that_it_made_durable() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        (message,) = await hl.pop("jobs", visibility=30)
        now = hl._runners["jobs"].steady.now().steady
        await spin()
        rig.io.hold, rig.io.answers_held = {"commit"}, True
        first = asyncio.ensure_future(hl.extend(message, 60))
        await spin()
        second = asyncio.ensure_future(hl.extend(message, 6000))
        await spin()
        rig.disk.inject("fdatasync", path=".seg")
        rig.io.let_go()
        await first
        with pytest.raises(heapline.TopicReloading):
            await second
        assert message._deadline_ms == now + 60_000

    play(scene)


def test_row_that_repeats_a_refused_row_of_its_batch_is_not_taken_for_a_duplicate() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        who = {"producer_id": "p", "epoch": await hl.open_producer("jobs", "p")}
        first = await hl.enqueue("jobs", b"a", seq=1, **who)
        batch = [Outgoing(b"a", seq=1, idempotency_key="k"), Outgoing(b"a", seq=2, idempotency_key="k")]
        assert [r.id for r in await hl.enqueue_batch("jobs", batch, atomic=False, **who)] == [first.id] * 2
        batch = [Outgoing(b"other", seq=1, idempotency_key="l"), Outgoing(b"other", seq=3, idempotency_key="l")]
        results = await hl.enqueue_batch("jobs", batch, atomic=False, **who)
        assert [type(r.error) for r in results] == [heapline.IdempotencyConflict] * 2

    play(scene)


def test_too_many_open_files_make_no_dead_letters() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened({"cache_bytes": 0})
        await hl.enqueue_batch("jobs", [Outgoing(bytes(2000))] * 10)
        await hl.enqueue("jobs", b"drives the others from memory", delay=1e6)
        rig.disk.inject("open", errno.EMFILE, path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await hl.pop("jobs", 10)
        stats = await hl.stats("jobs")
        assert (stats.ready, stats.dead, stats.leased) == (10, 0, 0)

    play(scene)


def test_clock_beyond_the_range_of_ids_refuses_enqueues_without_a_reload() -> None:
    async def scene(rig: Rig) -> None:
        rig.clock.jump_wall(75 * 366 * 86400)
        hl = await rig.opened()
        with pytest.raises(heapline.ResourceExhausted):
            await hl.enqueue("jobs", b"x")
        assert hl._runners["jobs"].counters.reloads == 0

    play(scene)


def test_cancelled_create_topic_does_not_drop_another_topic_from_the_catalog() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        rig.io.hold, rig.io.answers_held = {"_make_topic"}, False
        making = asyncio.ensure_future(hl.create_topic("a", **SMALL))
        await spin()
        making.cancel()
        await spin()
        other = asyncio.ensure_future(hl.create_topic("b", **SMALL))
        await spin()
        assert not other.done()  # it waits until the thread of the first has ended
        rig.io.let_go()
        await other
        await hl.enqueue("a", b"x")
        await hl.enqueue("b", b"x")
        await hl.close()
        again = await rig.broker().__aenter__()
        assert [info.name for info in await again.list_topics()] == ["a", "b", "jobs"]

    play(scene)


def test_nothing_touches_the_directory_after_its_lock_was_released() -> None:
    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        rig.disk.inject("fdatasync", path=".seg")
        rig.io.hold = {"load"}
        with pytest.raises(heapline.TopicReloading):
            await hl.enqueue("jobs", b"x")
        await spin()
        closing = asyncio.ensure_future(hl.close())
        await spin()
        assert not closing.done()
        assert rig.disk._locks
        rig.io.let_go()
        await closing
        assert not rig.disk._locks

    play(scene)


def test_closing_one_topic_leaves_the_shared_budget_alone_while_another_uses_it() -> None:
    """Files are closed in a thread; what is in memory is given up by the event loop alone."""

    async def scene(rig: Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", bytes(1000))
        journal = hl._runners["jobs"].loaded.journal
        thread = threading.Thread(target=journal.close)
        thread.start()
        thread.join()
        assert hl._budget.used_bytes > 1000
        await hl._runners["jobs"].close()
        assert hl._budget.used_bytes == 0

    play(scene)
