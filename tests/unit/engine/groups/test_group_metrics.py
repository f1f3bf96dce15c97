"""Metrics of a topic's groups, and of the lateness of its timers."""

from __future__ import annotations

import numpy as np

from heapline.core.latency import BOUNDS_MS, Latency
from heapline.testing import HandClock
from tests.unit.engine.groups.test_groups import ack, fetch, let_pass, world


def test_batches_are_counted_like_single_rows() -> None:
    times = [0, 1, 2, 7, 49, 50, 51, 10_000, 99_999_999]
    one, many = Latency(), Latency()
    for ms in times:
        one.add(ms / 1000)
    many.add_many(np.array(times))
    assert many.tally().counts == one.tally().counts
    assert many.tally().sum_ms == sum(times)
    assert len(one.tally().counts) == len(BOUNDS_MS) + 1


async def test_scheduler_delay_is_from_due_to_fired() -> None:
    clock = HandClock()
    async with await world(clock) as hl:
        await hl.enqueue("jobs", b"x", delay=1.0)
        await let_pass(clock, 1.9)  # and a tick more
        reported = (await hl.stats("jobs")).latencies["fired"]
        assert sum(reported.counts) == 1
        assert 900 <= reported.sum_ms <= 1100


async def test_lag_redeliveries_timeouts_and_rebalances_are_measured() -> None:
    clock = HandClock()
    async with await world(clock) as hl:
        backoff = {"base": 1.0, "factor": 1.0, "jitter": 0.0}
        await hl.create_group("jobs", "g", max_retries=1, ack_timeout=5.0, backoff=backoff, member_lease=100.0)
        await hl.enqueue("jobs", b"x")
        await hl.enqueue("jobs", b"y")
        got = await fetch(hl)
        await hl.group_ack("jobs", "g", "a", {0: [got.batches[0].offsets.tolist()[0]]}, session="s")
        await let_pass(clock, 6)
        await let_pass(clock, 2)
        await ack(hl, await fetch(hl))
        await hl.enqueue("jobs", b"z")
        (topic,) = (await hl.metrics()).topics
        (group,) = topic.groups
        assert (group.name, group.lag, group.members, group.dead) == ("g", 1, 1, 0)
        reported = {name: topic.totals[name] for name in ("redeliveries", "rebalances", "group_timeouts", "group_dead")}
        assert reported == {"redeliveries": 1, "rebalances": 1, "group_timeouts": 1, "group_dead": 0}
