"""Bursts: very many timers, leases or ttls that end together delay each caller by a bounded number of rows.

The tests count rows, not time: those in the units that an answer waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.message import Outgoing
from heapline.core.placement import place
from heapline.engine.timers import IN_LINE, INF, QUANTUM_ROWS, Wakes
from tests.unit.engine.rig import Rig, opened, settle

SLICE = 64
HERD = 2000


async def fill(rig: Rig, topic: str, count: int, **fields: Any) -> None:
    batch = [Outgoing(b"", i % 97, **fields) for i in range(count)]
    await rig.hl.enqueue_batch(topic, batch, atomic=False)


def waiting(rig: Rig, topic: str = "jobs") -> list[int]:
    """Return the messages of each partition that have not fired."""
    return [p.entries.delayed for p in rig.runner(topic).loaded.topic.partitions]


async def rows_waited_for(rig: Rig, call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the call's answer, and how many rows of the burst fired before it."""
    before = sum(waiting(rig))
    answer = await call()
    return answer, before - sum(waiting(rig))


async def test_calls_during_a_burst_wait_for_a_bounded_number_of_rows() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, delay=60)
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"first", -1) for _ in range(20)])
        messages = await rig.hl.pop("jobs", 20, visibility=3600)
        rig.clock.advance(61)
        asked = 0
        while sum(waiting(rig)):
            asked += 1
            calls: list[Callable[[], Any]] = [lambda: rig.hl.enqueue("jobs", b"x")]
            if messages:
                calls.append(messages.pop().ack)
            for call in calls:
                _, rows = await rows_waited_for(rig, call)
                assert rows <= 3 * SLICE, "the unit being written, the open unit, and what fires as it ends"
        assert asked >= HERD // (6 * SLICE), "the calls overlap the burst"


async def test_burst_adds_at_most_one_slice_per_unit() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, delay=60)
        rig.io.hold = {"commit"}
        rig.clock.advance(61)
        calls = []
        for _ in range(50):
            calls.append(asyncio.create_task(rig.hl.enqueue("jobs", b"x")))
            await settle(3)
        assert HERD - sum(waiting(rig)) <= 2 * SLICE, "one in the unit that is being written, one in the open one"
        assert sum(waiting(rig)) < HERD
        rig.io.release()
        await asyncio.gather(*calls)
        await settle(2000)
        assert sum(waiting(rig)) == 0, "the rest fires without another call"


async def test_burst_adds_no_unit_while_calls_wait_for_a_write() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, delay=60)
        rig.io.hold = {"commit"}
        call = asyncio.create_task(rig.hl.enqueue("jobs", b"x"))
        await settle()
        rig.clock.advance(60.05)
        second = asyncio.create_task(rig.hl.stats("jobs"))
        await settle()
        rig.clock.advance(0.06)
        rig.runner().turns.plan()
        await settle()
        assert rig.runner().loaded.firing.wakes.line, "the burst is due"
        assert sum(waiting(rig)) == HERD, "the next caller would wait for a unit that only the burst needed"
        rig.io.release()
        await asyncio.gather(call, second)
        await settle(2000)
        assert sum(waiting(rig)) == 0


async def test_pop_finds_messages_even_if_the_units_slice_is_used() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, delay=60)
        rig.clock.advance(61)
        rig.io.hold = {"commit"}
        pops = []
        for _ in range(20):
            pops.append(asyncio.create_task(rig.hl.pop("jobs", 20)))
            await settle(3)
        rig.io.release()
        assert [len(messages) for messages in await asyncio.gather(*pops)] == [20] * 20


async def test_bursts_of_several_partitions_progress_evenly() -> None:
    async with opened() as rig:
        await rig.topic("wide", partitions=5)
        count = 4 * QUANTUM_ROWS
        for number in range(5):
            await fill(rig, "wide", count, delay=60, key=_key_of(number))
        rig.clock.advance(61)
        assert waiting(rig, "wide") == [count] * 5
        seen = 0
        while sum(waiting(rig, "wide")):
            seen += 1
            await rig.hl.enqueue("wide", b"x")
            left = waiting(rig, "wide")
            assert max(left) - min(left) <= QUANTUM_ROWS, left
        assert seen > 4


def _key_of(number: int) -> str:
    return next(f"k{i}" for i in range(1000) if place([b"k%d" % i], 5) == [number])


async def test_few_timers_of_one_partition_do_not_wait_for_anothers_burst() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await rig.topic("wide", partitions=5)
        await fill(rig, "wide", HERD, delay=60, key=_key_of(0))
        await rig.hl.enqueue("wide", b"lone", delay=60, priority=-1, key=_key_of(4))
        rig.clock.advance(61)
        for _ in range(12):
            await rig.hl.enqueue("wide", b"x", priority=1000)
        assert waiting(rig, "wide")[0] > HERD // 2
        assert waiting(rig, "wide")[4] == 0


async def test_order_is_strict_among_fired_messages() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, delay=60)
        rig.clock.advance(61)
        popped = 0
        while popped < HERD:
            partition = rig.runner().loaded.topic.partitions[0]
            messages = await rig.hl.pop("jobs", 50)
            left = partition.head()
            popped += len(messages)
            order = [(m.priority, m.id) for m in messages]
            assert order == sorted(order)
            assert left is None or order[-1] < left, "no fired message was better than the popped ones"
            await rig.hl.ack(messages)
        assert popped == HERD


async def test_leases_expiring_together_are_returned_in_slices() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD)
        assert len(await rig.hl.pop("jobs", HERD, max_bytes=1 << 40, visibility=5)) == HERD
        rig.clock.advance(6)
        turns, partition = 0, rig.runner().loaded.topic.partitions[0]
        while len(partition.entries.leases):
            before = len(partition.entries.leases)
            await rig.hl.enqueue("jobs", b"x")
            assert before - len(partition.entries.leases) <= SLICE // 2, "each of these costs eight timers"
            turns += 1
        assert turns > HERD // SLICE
        assert sum(waiting(rig)) + partition.entries.ready == HERD + turns


async def test_ttls_that_end_together_end_in_slices() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, ttl=5)
        rig.clock.advance(6)
        turns, partition = 0, rig.runner().loaded.topic.partitions[0]
        while (before := partition.entries.ready - turns) > 0:
            await rig.hl.enqueue("jobs", b"x")
            turns += 1
            assert before - (partition.entries.ready - turns) <= SLICE // 2
        assert turns > HERD // SLICE


async def test_entries_of_a_cancelled_burst_are_skipped_in_slices() -> None:
    async with opened(fire_slice=SLICE) as rig:
        await fill(rig, "jobs", HERD, ttl=60)
        messages = await rig.hl.pop("jobs", HERD, max_bytes=1 << 40)
        await rig.hl.ack(messages)
        ends = rig.runner().loaded.topic.partitions[0].entries.ttls
        assert len(ends) == HERD, "too few to be swept"
        rig.clock.advance(61)
        before = len(ends)
        await rig.hl.enqueue("jobs", b"x")
        assert 0 < before - len(ends) <= 8 * SLICE
        await settle(2000)
        assert len(ends) == 0


async def test_overdue_burst_at_open_fires_in_slices() -> None:
    rig = Rig(fire_slice=SLICE)
    await rig.open()
    await rig.topic()
    await fill(rig, "jobs", HERD, delay=60)
    await rig.hl.close()
    rig.clock.advance(3600)
    await rig.open()
    assert sum(waiting(rig)) >= HERD - 3 * SLICE
    _, rows = await rows_waited_for(rig, lambda: rig.hl.enqueue("jobs", b"x"))
    assert rows <= 3 * SLICE
    await settle(2000)
    assert sum(waiting(rig)) == 0
    await rig.hl.close()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30) | st.none(), st.booleans()), max_size=60))
def test_wakes_are_those_last_planned(steps: list[tuple[int, int | None, bool]]) -> None:
    wakes, plan, now = Wakes(5), [IN_LINE] * 5, 0
    for number, wait, moves in steps:
        while wakes.line:
            plan[wakes.leave()] = INF
        plan[number] = INF if wait is None else now + wait
        wakes.plan(number, plan[number])
        assert wakes.next() == min(plan)
        if moves:
            now += 7
            wakes.come(now)
            due = [n for n, wake in enumerate(plan) if wake <= now]
            assert sorted(wakes.line) == due
            for n in due:
                wakes.plan(n, now + 1)
            assert sorted(wakes.line) == due, "partitions in the line are planned when they leave it"


def test_replaced_wake_times_are_not_kept() -> None:
    wakes = Wakes(3)
    while wakes.line:
        wakes.leave()
    for i in range(10_000):
        wakes.plan(i % 3, 1e12 - i)
    assert len(wakes._heap) < 100
    assert wakes.next() == 1e12 - 9999
