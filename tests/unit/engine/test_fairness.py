"""Fair topics in a complete engine: keys in several partitions, reloads, and wakeups by the rate."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from heapline import LeaseRef, Message, Outgoing
from heapline.engine import EmbeddedBroker, admission
from heapline.testing import FakeClock
from tests.conformance.worlds import EmbeddedWorld
from tests.unit.engine.rig import SMALL, Rig


@pytest.fixture
def scattered() -> Iterator[None]:
    """Keys can be in any partition, as after a growth."""
    rng = random.Random(1)

    def anywhere(keys: list[bytes], partitions: int) -> Any:
        return np.array([rng.randrange(partitions) for _ in keys], dtype=np.int64)

    with mock.patch.object(admission, "place", anywhere):
        yield


async def serve_all(world: EmbeddedWorld, rng: random.Random, limit: int, expected: int) -> list[str]:
    """Pop, end leases in many ways and restart until all are acked; the limit always holds."""
    held: dict[int, Message] = {}
    acked: list[str] = []
    idle = 0
    while len(acked) < expected:
        hl = world.broker
        got = await hl.pop("jobs", rng.choice((1, 3, 50)))
        assert not held.keys() & {m.id for m in got}
        held |= {m.id: m for m in got}
        keys = Counter(m.fairness_key for m in held.values())
        assert all(count <= limit for key, count in keys.items() if key is not None)
        idle = 0 if got or held else idle + 1
        assert idle < 3, "nothing is leased, and nothing is delivered"
        for message in rng.sample(list(held.values()), k=len(held) // 2 + (len(held) == 1)):
            ref = LeaseRef("jobs", message.id, message.token)
            del held[message.id]
            if rng.random() < 0.7:
                await hl.ack(ref)
                acked.append(message.payload.decode())
            elif rng.random() < 0.5:
                await hl.release(ref)
            else:
                await hl.nack(ref, backoff=0)
        if rng.random() < 0.1:
            await world.reopen(rng.choice(("snapshot", "journal")))
    assert await world.broker.pop("jobs", 50) == []
    return acked


@pytest.mark.usefixtures("scattered")
@pytest.mark.parametrize("seed", range(3))
async def test_key_limit_holds_across_partitions_without_leftovers(tmp_path: Any, seed: int) -> None:
    rng = random.Random(seed)
    world = EmbeddedWorld(tmp_path)
    await world.start()
    limit = rng.choice((1, 2))
    await world.broker.create_topic(
        "jobs", fairness="keys", max_inflight_per_key=limit, partitions=3, max_retries_default=250, **world.small
    )
    batch = [Outgoing(b"%d" % i, i % 2, fairness_key=rng.choice(("a", "a", "b", None))) for i in range(80)]
    await world.broker.enqueue_batch("jobs", batch)
    acked = await serve_all(world, rng, limit, len(batch))
    assert sorted(acked) == sorted(m.payload.decode() for m in batch)
    runner = world.broker.topics.runner("jobs")
    assert [p.entries.parked.rows for p in runner.loaded.topic.partitions] == [0, 0, 0]
    await world.stop()


@pytest.mark.usefixtures("scattered")
async def test_one_pop_over_many_partitions_respects_the_limit_and_returns_the_best(tmp_path: Any) -> None:
    world = EmbeddedWorld(tmp_path)
    await world.start()
    hl = world.broker
    await hl.create_topic("jobs", fairness="keys", max_inflight_per_key=2, partitions=4, **world.small)
    for i in range(20):  # one by one: within a batch, turns follow the order in each partition
        await hl.enqueue("jobs", b"%d" % i, fairness_key="ab"[i % 2])
    taken: list[int] = []
    while got := await hl.pop("jobs", 20):
        assert Counter(m.fairness_key for m in got) == {"a": 2, "b": 2}
        assert [int(m.payload) // 2 for m in got] == sorted(int(m.payload) // 2 for m in got)
        taken += [int(m.payload) for m in got]
        await hl.ack(got)
    assert [n for n in taken if n % 2] == list(range(1, 20, 2))
    assert [n for n in taken if not n % 2] == list(range(0, 20, 2))
    await world.stop()


async def test_limit_and_rate_hold_after_a_failed_write() -> None:
    rig = Rig()
    hl = await rig.open()
    await hl.create_topic("jobs", fairness="keys", max_inflight_per_key=1, max_pops_per_second=20, **SMALL)
    await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, fairness_key="a" if i < 3 else None) for i in range(9)])
    assert [m.payload for m in await hl.pop("jobs", 9)] == [b"0", b"3"]
    runner = hl.topics.runner("jobs")
    runner.poison(OSError("the disk said no"))
    while not runner.is_serving:  # noqa: ASYNC110 - nothing tells the end of it
        await asyncio.sleep(0)
    assert await hl.pop("jobs", 9) == []
    rig.clock.advance(0.1)
    assert [m.payload for m in await hl.pop("jobs", 9)] == [b"4", b"5"]
    await hl.close()


async def test_pop_waiting_for_the_rate_wakes_automatically(tmp_path: Any) -> None:
    """No other call arrives, so the runner must have scheduled its next check."""
    clock = FakeClock()
    async with EmbeddedBroker(str(tmp_path / "data"), clock=clock) as hl:
        await hl.create_topic("jobs", max_pops_per_second=1000, **SMALL)
        await hl.enqueue_batch("jobs", [Outgoing(b"")] * 150)
        assert len(await hl.pop("jobs", 150)) == 100
        waiting = asyncio.create_task(hl.pop("jobs", 150, wait=60))
        await hl.stats("jobs")
        clock.advance(0.02)
        async with asyncio.timeout(30):
            assert len(await waiting) == 20


# -- prepared batches --------------------------------------------------------------------------------------------------


def of_key(key: str, count: int) -> list[Outgoing]:
    return [Outgoing(f"{key}{i}".encode(), fairness_key=key) for i in range(count)]


async def reopen_from_journal(rig: Rig) -> EmbeddedBroker:
    """Restart as after a kill: without the snapshot that closing writes."""
    other = Rig(rig.disk.crash())
    other.clock = rig.clock
    return await other.open()


@pytest.mark.parametrize("snapshot", [False, True])
async def test_prepared_messages_keep_keys_and_limits_over_a_restart(snapshot: bool) -> None:
    rig = Rig()
    hl = await rig.open()
    await rig.topic(fairness="keys", max_inflight_per_key=1)
    await hl.prepare_batch("batch", "1", of_key("a", 3) + of_key("b", 1), topic="jobs")
    if snapshot:
        await hl.snapshot("jobs")
    again = await reopen_from_journal(rig)
    assert await again.commit_batch("batch", ["1"]) == 4
    assert [m.payload for m in await again.pop("jobs", 10)] == [b"a0", b"b0"]
    await again.close()
    await hl.close()


async def test_journal_with_prepared_messages_of_fair_topics_replays() -> None:
    rig = Rig()
    hl = await rig.open()
    await rig.topic(fairness="keys")
    await hl.prepare_batch("batch", "1", of_key("a", 3), topic="jobs")
    await hl.enqueue("jobs", b"b0", fairness_key="b")
    await hl.commit_batch("batch", ["1"])
    first = await hl.pop("jobs", 3)
    assert [m.payload for m in first] == [b"a0", b"b0", b"a1"]
    again = await reopen_from_journal(rig)
    assert (await again.stats("jobs")).leased == 3
    await again.enqueue("jobs", b"b1", fairness_key="b")
    await again.enqueue("jobs", b"a3", fairness_key="a")
    assert [m.payload for m in await again.pop("jobs", 3)] == [b"a2", b"b1", b"a3"]
    await again.close()
    await hl.close()
