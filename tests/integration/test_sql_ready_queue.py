"""Pops from the ready queue in Redis: their promises with other nodes, and when Redis fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline import Outgoing
from heapline.contract.call import Context
from heapline.contract.errors import ResourceExhausted
from heapline.contract.leases import Leased, Pop
from tests.postgres import fresh_schema, shared_url
from tests.valkey import Valkey, fresh_redis

pytest.importorskip("asyncpg")
from heapline.sql.ready_queue import ReadyQueue

MESSAGES = 60


@pytest.fixture
async def nodes() -> AsyncIterator[list[Any]]:
    """Two nodes with a topic whose messages are prefetched."""
    schema, redis = fresh_schema(), fresh_redis()
    async with AsyncExitStack() as stack:
        brokers = [heapline.sql.open([shared_url()], schema=schema, redis=redis) for _ in range(2)]
        yield [await stack.enter_async_context(broker) for broker in brokers]


def queue_of(node: Any) -> ReadyQueue:
    found = node.node.ready_queues["jobs"]
    assert isinstance(found, ReadyQueue)
    return found


async def prefetch(node: Any, count: int = MESSAGES) -> list[int]:
    """Fill the topic and the ready queue; return the remaining ids, best first."""
    await node.create_topic("jobs", k=1000)
    results = await node.enqueue_batch("jobs", [Outgoing(b"x", priority=n) for n in range(count + 1)])
    await node.ack(await node.pop("jobs"))  # leased from the database, and fills the queue
    await node.node.tasks.join()
    assert await queue_of(node).depth() == count
    return [result.id for result in results[1:]]


async def test_nodes_share_prefetched_messages(nodes: list[Any]) -> None:
    ids = await prefetch(nodes[0])
    await nodes[1].pop("jobs")  # its first pop leases from the database
    got: list[int] = []

    async def client(node: Any) -> None:
        while messages := await node.pop("jobs"):
            got.extend(message.id for message in messages)
            await node.ack(messages)

    await asyncio.gather(*(client(node) for node in nodes * 4))
    assert sorted(got) == sorted(ids[1:])
    assert (await nodes[0].stats("jobs")).leased == 1


async def test_prefetched_messages_are_ready_for_all_calls(nodes: list[Any]) -> None:
    ids = await prefetch(nodes[0])
    stats = await nodes[0].stats("jobs")
    assert (stats.ready, stats.leased) == (MESSAGES, 0)
    assert (await nodes[0].get("jobs", ids[0])).state == "ready"
    await nodes[1].cancel("jobs", ids[0])
    await nodes[1].reschedule("jobs", ids[1], priority=1000)
    await nodes[1].reschedule("jobs", ids[2], delay=60)
    got = [message.id for _ in range(5) for message in await nodes[0].pop("jobs", 2)]
    assert got
    assert got == ids[3 : 3 + len(got)]
    assert await nodes[1].purge("jobs") == MESSAGES - 1 - len(got)
    assert await nodes[0].pop("jobs") == []


async def test_pause_ends_delivery_of_prefetched_messages(nodes: list[Any]) -> None:
    ids = await prefetch(nodes[0])
    await nodes[1].pause_topic("jobs")
    assert await nodes[0].pop("jobs") == []
    await nodes[1].resume_topic("jobs")
    assert [message.attempts for message in await nodes[0].pop("jobs", 3)] == [1, 1, 1]
    assert (await nodes[0].get("jobs", ids[-1])).attempts == 0


async def test_strict_order_takes_effect_immediately(nodes: list[Any]) -> None:
    await prefetch(nodes[0])
    await nodes[1].update_topic("jobs", k=1)
    urgent = await nodes[1].enqueue("jobs", b"now", priority=-1)
    assert [message.id for message in await nodes[0].pop("jobs")] == [urgent.id]


async def test_entries_of_a_deleted_topic_lease_nothing_of_its_successor(nodes: list[Any]) -> None:
    await prefetch(nodes[0])
    await nodes[1].delete_topic("jobs")
    await nodes[1].create_topic("jobs", k=1000)
    assert await nodes[0].pop("jobs") == []
    id = (await nodes[1].enqueue("jobs", b"new")).id
    assert [message.id for message in await nodes[0].pop("jobs")] == [id]


async def test_request_repeated_on_another_node_gets_the_same_leases(nodes: list[Any]) -> None:
    await prefetch(nodes[0])
    for node in nodes:
        await queue_of(nodes[0]).depth()
        await node.pop("jobs")
    pops = [node.do(Pop(topic="jobs", max_messages=1, request_id=f"r{n}")) for n in range(10) for node in nodes]
    answers: list[Leased] = await asyncio.gather(*pops)
    tokens = [bytes(answer.messages.tokens) for answer in answers]
    assert tokens[::2] == tokens[1::2]
    assert len(set(tokens)) == 10


async def test_leases_of_a_holder_are_limited_over_all_nodes(nodes: list[Any]) -> None:
    await prefetch(nodes[0])
    await nodes[1].pop("jobs")
    context = Context(principal="worker", leases_max=5)
    pops = [node.do(Pop(topic="jobs", max_messages=1), context) for _ in range(8) for node in nodes]
    answers = await asyncio.gather(*pops, return_exceptions=True)
    assert sum(isinstance(answer, Leased) for answer in answers) == 5
    assert sum(isinstance(answer, ResourceExhausted) for answer in answers) == 11


async def test_limited_topics_are_not_prefetched(nodes: list[Any]) -> None:
    await nodes[0].create_topic("jobs", k=1000, max_inflight=3)
    await nodes[0].enqueue_batch("jobs", [Outgoing(b"x")] * MESSAGES)
    assert len([await nodes[0].pop("jobs") for _ in range(3)]) == 3
    await nodes[0].node.tasks.join()
    assert await queue_of(nodes[0]).depth() == 0
    with pytest.raises(ResourceExhausted):
        await nodes[0].pop("jobs")
    assert (await nodes[0].stats("jobs")).spine.bound == 1


async def test_bytes_of_a_pop_are_limited(nodes: list[Any]) -> None:
    await nodes[0].create_topic("jobs", k=1000)
    await nodes[0].enqueue_batch("jobs", [Outgoing(b"x" * 1000, priority=n) for n in range(MESSAGES)])
    await nodes[0].ack(await nodes[0].pop("jobs"))
    await nodes[0].node.tasks.join()
    assert len(await nodes[0].pop("jobs", 10, max_bytes=2500)) == 2
    assert (await nodes[0].stats("jobs")).leased == 2


async def test_stats_report_the_bound_of_the_order(nodes: list[Any]) -> None:
    bounds = {}
    for k in (1, 50, 5000):
        await nodes[0].create_topic(f"k-{k}", k=k)
        bounds[k] = (await nodes[0].stats(f"k-{k}")).spine.bound
    assert bounds == {1: 1, 50: 50, 5000: 1001}


async def test_bound_is_none_while_a_node_has_a_log(nodes: list[Any], tmp_path: Any) -> None:
    await nodes[0].create_topic("jobs", k=50)
    await nodes[0].create_topic("strict")
    schema = nodes[0].node.config.schema
    async with heapline.sql.open([shared_url()], schema=schema, wal=str(tmp_path / "wal")) as logging:
        await logging.enqueue("jobs", b"x")
        assert (await logging.stats("jobs")).spine.bound is None
        assert (await nodes[0].stats("jobs")).spine.bound is None
        assert (await nodes[0].stats("strict")).spine.bound == 1
        names = {row.name for row in await logging.metric_rows()}
        assert {"buffered_units", "flush_lag_ms", "flush_failures_total", "slow_mode"} <= names


async def test_metrics_show_how_many_are_prefetched(nodes: list[Any]) -> None:
    await prefetch(nodes[0])
    assert len(await nodes[0].pop("jobs", 3)) == 3
    rows = await nodes[0].metric_rows()
    assert ("prefetched", ("jobs",), MESSAGES - 3) in rows
    assert ("prefetched_total", ("jobs",), 3) in rows


async def test_killed_redis_costs_only_speed() -> None:
    valkey = Valkey().start()
    try:
        async with heapline.sql.open([shared_url()], schema=fresh_schema(), redis=valkey.url()) as hl:
            ids = await prefetch(hl)
            got = [message.id for message in await hl.pop("jobs", 3)]
            valkey.kill()
            got += [message.id for _ in range(5) for message in await hl.pop("jobs")]
            assert got == ids[:8]
            valkey.start()
            async with asyncio.timeout(10):
                while not hl.node.redis.is_up:  # noqa: ASYNC110 - nothing reports it
                    await asyncio.sleep(0.05)
            got += [message.id for _ in range(MESSAGES - 8) for message in await hl.pop("jobs")]
            assert sorted(got) == sorted(ids)
    finally:
        valkey.close()


async def test_entries_of_a_node_that_was_killed_are_leased_by_others(nodes: list[Any]) -> None:
    ids = await prefetch(nodes[0])
    assert len(await queue_of(nodes[0]).pop(MESSAGES // 2)) == MESSAGES // 2  # popped, but never leased
    got: list[int] = []
    while messages := await nodes[1].pop("jobs"):
        got += [message.id for message in messages]
    assert sorted(got) == sorted(ids)
