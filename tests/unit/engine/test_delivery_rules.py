"""Delivery when several of fairness, limits, rates, strategies and freshness apply together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from heapline import Outgoing
from heapline.engine import EmbeddedBroker, admission
from tests.conformance.worlds import EmbeddedWorld
from tests.unit.engine.rig import SMALL, Rig, settle


@asynccontextmanager
async def with_topic(**config: Any) -> AsyncIterator[tuple[Rig, EmbeddedBroker]]:
    rig = Rig()
    hl = await rig.open()
    await hl.create_topic("jobs", **{**SMALL, **config})
    try:
        yield rig, hl
    finally:
        await rig.hl.close()


@pytest.fixture
def placed() -> Iterator[None]:
    """The last character of the key, or else of the fairness key, is the partition: "a2" is in the third."""

    def where(keys: list[bytes], partitions: int) -> Any:
        return np.array([int(key[-1:]) for key in keys], dtype=np.int64)

    with mock.patch.object(admission, "place", where):
        yield


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_prepared_messages_keep_their_turns_and_keys_across_a_restart(tmp_path: Any, memory: Any) -> None:
    world = EmbeddedWorld(tmp_path)
    await world.start()
    await world.broker.create_topic("jobs", fairness="keys", max_inflight_per_key=1, **world.small)
    await world.broker.prepare_batch(
        "b", "1", [Outgoing(b"%d" % i, 5, fairness_key="a") for i in range(3)], topic="jobs"
    )
    await world.broker.prepare_batch("b", "2", [Outgoing(b"c", 5, fairness_key="c")], topic="jobs")
    await world.reopen(memory)
    await world.broker.enqueue("jobs", b"first", priority=4)
    await world.broker.commit_batch("b", ["1", "2"])
    assert [m.payload for m in await world.broker.pop("jobs", 9)] == [b"first", b"0", b"c"]
    await world.reopen(memory)
    assert await world.broker.pop("jobs", 9) == []
    await world.stop()


@pytest.mark.usefixtures("placed")
async def test_blocked_messages_do_not_hide_the_best_of_another_partition() -> None:
    async with with_topic(fairness="keys", max_inflight_per_key=1, partitions=3) as (rig, hl):
        partitions = rig.runner().loaded.topic.partitions
        await hl.enqueue("jobs", b"best", priority=1, fairness_key="x0")
        await hl.enqueue("jobs", b"worst", priority=9, fairness_key="y0")
        await hl.enqueue("jobs", b"third", priority=3, fairness_key="z2")
        with mock.patch.object(admission, "place", lambda keys, _: np.ones(len(keys), dtype=np.int64)):
            await hl.enqueue(
                "jobs", b"held back", priority=2, fairness_key="x0"
            )  # as after a growth: the key is in two
        assert [p.entries.ready for p in partitions] == [2, 1, 1]
        assert [m.payload for m in await hl.pop("jobs", 2)] == [b"best", b"third"]


@pytest.mark.usefixtures("placed")
async def test_pop_waiting_for_the_rate_ignores_fresh_messages_elsewhere() -> None:
    config = {"strategy": "round_robin", "min_freshness": 60.0, "max_pops_per_second": 10.0}
    async with with_topic(partitions=2, **config) as (rig, hl):
        await hl.enqueue_batch("jobs", [Outgoing(b"old", key="a0")] * 3)
        rig.clock.advance(60)
        await hl.enqueue("jobs", b"fresh", key="b1")
        assert [m.payload for m in await hl.pop("jobs", 9)] == [b"old"]
        waiting = asyncio.create_task(hl.pop("jobs", 9, wait=600))
        await settle()
        runner = rig.runner()
        assert runner.loaded.delivery.next_room_in(runner.steady.now()) == 100
        waiting.cancel()


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("blocker", ["rate", "pause"])
async def test_freshness_counts_from_arrival_even_while_nothing_is_served(blocker: str) -> None:
    async with with_topic(min_freshness=1.0, max_pops_per_second=0.5) as (rig, hl):
        await hl.enqueue("jobs", b"one", priority=1)
        rig.clock.advance(1)
        if blocker == "rate":
            assert [m.payload for m in await hl.pop("jobs")] == [b"one"]
        else:
            await hl.pause_topic("jobs")
        waiting = asyncio.create_task(hl.pop("jobs", wait=600))
        await settle()
        await hl.enqueue("jobs", b"two", priority=0)
        rig.clock.advance(3)
        await hl.resume_topic("jobs")
        async with asyncio.timeout(5):
            assert [m.payload for m in await waiting] == [b"two"]


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("strategy", ["round_robin", "weighted"])
async def test_pops_that_get_fewer_than_requested_still_serve_all_partitions(strategy: str) -> None:
    async with with_topic(partitions=3, strategy=strategy) as (_, hl):
        for number in range(3):
            await hl.enqueue_batch("jobs", [Outgoing(b"%d" % number, key=f"k{number}")] * 9)
        got = [(await hl.pop("jobs", 3, max_bytes=1))[0].payload for _ in range(6)]
        assert sorted(got) == [b"0", b"0", b"1", b"1", b"2", b"2"]


@pytest.mark.usefixtures("placed")
async def test_turns_are_not_spent_on_blocked_messages() -> None:
    async with with_topic(partitions=2, strategy="round_robin", fairness="keys", max_inflight_per_key=1) as (_, hl):
        await hl.enqueue_batch("jobs", [Outgoing(b"held back", fairness_key="k0")] * 9)
        await hl.enqueue_batch("jobs", [Outgoing(b"free", key="x1")] * 9)
        got = [m.payload for m in await hl.pop("jobs", 10)]
        assert sorted(got) == [b"free"] * 9 + [b"held back"]


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_stats_of_a_fair_topic_count_by_priority_with_blocked_messages(mode: str) -> None:
    async with with_topic(mode=mode, fairness="keys", max_inflight_per_key=1) as (rig, hl):
        await hl.enqueue("jobs", b"", priority=-3, fairness_key="a")
        rig.clock.advance(100)
        await hl.enqueue_batch("jobs", [Outgoing(b"", p, fairness_key="a") for p in (-3, -3, 0, 1, 3, 4, 7)])
        best = (await hl.pop("jobs"))[0].priority
        assert await hl.pop("jobs", 9) == []
        stats = await hl.stats("jobs")
        left = {(-4, -2): 3, (0, 0): 1, (1, 1): 1, (2, 4): 2, (5, 9): 1}
        left[(-4, -2) if mode == "min" else (5, 9)] -= 1
        assert best == (-3 if mode == "min" else 7)
        assert {(b[0], b[1]): b[2] for b in map(_bucket, stats.depth_by_priority)} == {
            k: n for k, n in left.items() if n
        }
        assert stats.partitions[0].blocked == stats.ready == 7
        assert stats.oldest_ready_age == (0.0 if mode == "min" else 100.0)


def _bucket(bucket: Any) -> tuple[int, int, int]:
    return tuple(getattr(bucket, name) for name in bucket.__struct_fields__)  # type: ignore[return-value]


async def test_stats_do_not_count_prepared_messages_as_ready() -> None:
    async with with_topic(fairness="keys") as (_, hl):
        await hl.prepare_batch("b", "1", [Outgoing(b"", 5, fairness_key="a")] * 3, topic="jobs")
        stats = await hl.stats("jobs")
        assert (stats.ready, stats.depth_by_priority, stats.oldest_ready_age) == (0, [], None)
        await hl.commit_batch("b", ["1"])
        stats = await hl.stats("jobs")
        assert [_bucket(b) for b in stats.depth_by_priority] == [(5, 9, 3)]
