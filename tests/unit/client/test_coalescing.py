"""Joining of calls: which ones, in which order, and that each caller gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.client.wrappers.coalescing import PACE_SECONDS, Batcher, Lane, Pacer, Pending
from heapline.contract.errors import HeaplineError, TopicNotFound, UnavailableError
from tests.simulation.loop import run


class Waiter:
    """The part of a future that gathering uses."""

    def __init__(self, gone: bool) -> None:
        self.gone = gone

    def done(self) -> bool:
        return self.gone


FAR = 1e9  # in the loop's time
CALLS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=60)


@given(calls=CALLS, count_max=st.integers(1, 8), bytes_max=st.integers(0, 100), apart=st.booleans())
def test_batches_hold_all_waiting_calls_in_order_within_the_limits(
    calls: list[tuple[int, int, bool]], count_max: int, bytes_max: int, apart: bool
) -> None:
    gathering = Batcher(count_max, bytes_max, (lambda call: call[1]) if apart else None)
    singles = [Pending((i, name), Waiter(gone), 0.0, size) for i, (name, size, gone) in enumerate(calls)]
    for single in singles:
        gathering.calls.append(single)
    batches = []
    while batch := gathering.take():
        batches.append(batch)
    assert [s for batch in batches for s in batch] == [s for s in singles if not s.future.done()]
    assert not gathering.calls
    for batch, after in zip(batches, [*batches[1:], []], strict=False):
        size, names = sum(s.nbytes for s in batch), [s.call[1] for s in batch]
        assert len(batch) <= count_max
        assert size <= bytes_max or len(batch) == 1, "a call that is too large is sent alone"
        assert not apart or len(set(names)) == len(names)
        if after:  # no call that would have fit was held back
            more = after[0]
            assert len(batch) == count_max or size + more.nbytes > bytes_max or (apart and more.call[1] in names)


class Road:
    """Answer batches on request of the test, and record them."""

    def __init__(self, crowd: Pacer | None = None, **caps: Any) -> None:
        self.batches: list[list[Any]] = []
        self.errors: dict[Any, Exception] = {}
        self.failure: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self._tasks: list[asyncio.Future[None]] = []
        self.lane = Lane(
            Batcher(**caps), self._carry, self._own, lambda sent: TimeoutError(f"{sent=}"), pacer=crowd
        )  # fmt: skip

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _carry(self, batch: list[Pending], until: float) -> list[Any]:
        self.batches.append([single.call for single in batch])
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        return [self.errors.get(single.call, f"done {single.call}") for single in batch]


async def steps(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_calls_of_one_turn_share_a_batch_and_later_ones_the_next() -> None:
    road = Road()
    road.open.clear()
    first = [road.lane.put(what, FAR) for what in "ab"]
    await steps()
    later = [road.lane.put(what, FAR) for what in "cde"]
    await steps()
    assert road.batches == [["a", "b"]], "one call is in flight at a time"
    road.open.set()
    assert await asyncio.gather(*first, *later) == [f"done {what}" for what in "abcde"]
    assert road.batches == [["a", "b"], ["c", "d", "e"]]
    await road.lane.put("f", FAR)
    assert road.batches[2:] == [["f"]], "an idle lane sends immediately"


async def test_few_calls_wait_for_a_large_batch_in_progress_and_join_it() -> None:
    crowd = Pacer()
    enqueues, acks = Road(crowd), Road(crowd)
    acks.open.clear()
    many = [acks.lane.put(what, FAR) for what in "abcde"]
    await steps()
    few = enqueues.lane.put("ahead", FAR)
    await steps()
    assert enqueues.batches == []

    async def next_call(acked: asyncio.Future[Any]) -> None:
        await enqueues.lane.put((await acked).removeprefix("done "), FAR)

    following = [asyncio.ensure_future(next_call(acked)) for acked in many]
    await steps()
    acks.open.set()
    await asyncio.gather(few, *following)
    assert enqueues.batches == [["ahead", *"abcde"]]


async def test_few_calls_do_not_wait_for_a_small_batch() -> None:
    crowd = Pacer()
    enqueues, acks = Road(crowd), Road(crowd)
    acks.open.clear()
    acked = [acks.lane.put(what, FAR) for what in "ab"]
    await steps()
    assert await enqueues.lane.put("c", FAR) == "done c", "half as many do not fill a batch"
    acks.open.set()
    await asyncio.gather(*acked)


async def test_waiting_calls_continue_if_a_large_batch_fails_or_hangs() -> None:
    crowd = Pacer()
    enqueues, acks = Road(crowd), Road(crowd)
    acks.open.clear()
    acks.failure = UnavailableError("gone")
    many = [acks.lane.put(what, FAR) for what in "abcde"]
    await steps()
    late, few = enqueues.lane.put("late", asyncio.get_running_loop().time()), enqueues.lane.put("few", FAR)
    with pytest.raises(TimeoutError, match="sent=False"):
        await late
    acks.open.set()
    assert await few == "done few"
    assert enqueues.batches == [["few"]]
    assert all(isinstance(error, UnavailableError) for error in await asyncio.gather(*many, return_exceptions=True))


def test_few_calls_wait_only_briefly_for_a_slow_large_batch() -> None:
    """A batch that waits for a decision, or is repeated until its deadline, must not keep acks until leases end."""

    async def go() -> float:
        crowd = Pacer()
        enqueues, acks = Road(crowd), Road(crowd)
        enqueues.open.clear()
        many = [enqueues.lane.put(what, FAR) for what in "abcde"]
        await steps()
        assert await acks.lane.put("ack", FAR) == "done ack"
        at = asyncio.get_running_loop().time()
        assert await acks.lane.put("again", FAR) == "done again"
        enqueues.open.set()
        await asyncio.gather(*many)
        return at

    assert run(go()) <= PACE_SECONDS


async def test_rejected_call_fails_only_its_own_caller() -> None:
    road = Road()
    road.errors["b"] = TopicNotFound("x")
    results = await asyncio.gather(*(road.lane.put(what, FAR) for what in "abc"), return_exceptions=True)
    assert results[0] == "done a"
    assert results[2] == "done c"
    assert results[1] is road.errors["b"]


async def test_failed_batch_raises_a_separate_error_for_each_caller() -> None:
    road = Road()
    road.failure = UnavailableError("gone")
    results = await asyncio.gather(*(road.lane.put(what, FAR) for what in "ab"), return_exceptions=True)
    assert [str(r) for r in results] == ["gone", "gone"]
    assert results[0] is not results[1]
    road.failure = None
    assert await road.lane.put("c", FAR) == "done c", "the lane continues"


async def test_call_cancelled_before_sending_is_never_sent() -> None:
    road = Road()
    road.open.clear()
    first = road.lane.put("a", FAR)
    await steps()
    second, third = road.lane.put("b", FAR), road.lane.put("c", FAR)
    second.cancel()
    first.cancel()
    road.open.set()
    assert await third == "done c"
    assert road.batches == [["a"], ["c"]]


async def test_closed_lane_fails_waiting_calls_with_its_error() -> None:
    road = Road()
    road.open.clear()
    road.lane.put("a", FAR).cancel()
    waiting = [road.lane.put(what, FAR) for what in "bc"]
    road.lane.end(UnavailableError("closed"))
    for future in waiting:
        with pytest.raises(HeaplineError, match="closed"):
            await future
    assert road.batches == []


def test_each_call_ends_at_its_own_deadline_while_its_batch_continues() -> None:
    async def go() -> list[tuple[float, str]]:
        road, reported = Road(), []
        road.open.clear()

        async def call(what: str, begin: float) -> None:
            await asyncio.sleep(begin)
            try:
                text = await road.lane.put(what, begin + 10)
            except TimeoutError as error:
                text = str(error)
            reported.append((asyncio.get_running_loop().time(), text))

        calls = [asyncio.ensure_future(call(what, begin)) for what, begin in (("a", 0), ("b", 1), ("c", 5))]
        await asyncio.sleep(11.5)
        road.open.set()
        await asyncio.gather(*calls)
        assert road.batches == [["a"], ["c"]], "a call past its deadline is not sent"
        return reported

    reported = run(go())
    assert [text for _, text in reported] == ["sent=True", "sent=False", "done c"]
    assert [round(at, 3) for at, _ in reported] == [10, 11, 11.5]
