"""Explain's order is that of pops, for any topic and any history of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline import Outgoing
from heapline.testing import HandClock, MemoryBroker

TOPICS = st.sampled_from(
    [
        {}, {"mode": "max"}, {"partitions": 4}, {"ordering": {"rate": 0.5}, "partitions": 2},
        {"fairness": "keys"}, {"fairness": "keys", "partitions": 3, "max_inflight_per_key": 2},
        {"strategy": "round_robin", "partitions": 4}, {"strategy": "weighted", "partitions": 3},
        {"min_freshness": 2.0, "partitions": 2}, {"max_inflight": 5}, {"max_inflight_per_key": 1, "fairness": "keys"},
    ]
)  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.lists(st.tuples(st.integers(-3, 3), st.sampled_from("abc"), st.sampled_from((0, 3))), max_size=12),
        ),
        st.tuples(st.just("pop"), st.integers(1, 5)),
        st.tuples(st.just("nack"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(0, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("reschedule"), st.integers(0, 50)),
        st.tuples(st.just("throttle"), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(TOPICS, STEPS, st.integers(1, 20))
def test_first_of_explain_are_what_the_next_pop_hands_out(topic: dict[str, Any], steps: list[Any], want: int) -> None:
    asyncio.run(_check(topic, steps, want))


async def _check(topic: dict[str, Any], steps: list[Any], want: int) -> None:
    clock = HandClock()
    async with MemoryBroker(clock) as hl:
        await hl.create_topic("jobs", **topic)
        ids: list[int] = []
        for step, argument in steps:
            await _take(hl, clock, ids, step, argument)
            await _compare(hl, want)


async def _take(hl: MemoryBroker, clock: HandClock, ids: list[int], step: str, argument: Any) -> None:
    if step == "put" and argument:
        is_fair = (await hl.get_topic("jobs")).config.fairness == "keys"
        batch = [
            Outgoing(b"", priority=p, fairness_key=key if is_fair else None, delay=delay or None)
            for p, key, delay in argument
        ]
        ids += [result.id for result in await hl.enqueue_batch("jobs", batch)]
    elif step == "pop":
        await hl.pop("jobs", argument, visibility=4.0)
    elif step == "nack":
        await hl.nack(await hl.pop("jobs", 2), backoff=float(argument))
    elif step == "wait":
        clock.advance(argument)
        for _ in range(2):  # the second call sees what time has brought about
            await hl.stats("jobs")
    elif step == "throttle":
        await hl.set_partition_throttled("jobs", 0, bool(argument))
    elif ids and step in ("cancel", "reschedule"):
        info = await hl.get("jobs", ids[argument % len(ids)])
        if info.state in ("ready", "delayed"):
            change = hl.cancel("jobs", info.id) if step == "cancel" else hl.reschedule("jobs", info.id, priority=-2)
            await change


async def _compare(hl: MemoryBroker, want: int) -> None:
    explained = await hl.explain("jobs", want)
    popped = await hl.pop("jobs", want)
    items = [item.message.id for item in explained.items]
    assert [message.id for message in popped] == items[: len(popped)]
    if not explained.holds:
        assert len(popped) == len(items)
    await hl.release(popped)


@pytest.mark.parametrize("topic", [{}, {"partitions": 3}, {"mode": "max", "ordering": {"rate": 2.0}}])
async def test_line_of_one_message_is_its_number_among_all(topic: dict[str, Any]) -> None:
    clock = HandClock()
    async with MemoryBroker(clock) as hl:
        await hl.create_topic("jobs", **topic)
        for priority in (3, 1, 2, 1, 3):
            await hl.enqueue_batch("jobs", [Outgoing(b"", priority=priority)] * 4)
            clock.advance(1)
        for item in (await hl.explain("jobs", 100)).items:
            (alone,) = (await hl.explain("jobs", message_id=item.message.id)).items
            assert (alone.line, alone.turns_ahead, alone.message) == (item.line, item.turns_ahead, item.message)
