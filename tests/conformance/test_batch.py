"""`enqueue_batch`: all or none by default; otherwise each message on its own."""

from __future__ import annotations

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, picture


async def test_batch_answers_row_by_row(jobs: Broker) -> None:
    results = await jobs.enqueue_batch("jobs", [Outgoing(str(i).encode(), priority=-i) for i in range(50)])
    assert len({r.id for r in results}) == 50
    by_id = {m.id: m.payload for m in await jobs.pop("jobs", 100)}
    assert [by_id[r.id] for r in results] == [str(i).encode() for i in range(50)]


async def test_empty_batch_does_nothing(jobs: Broker) -> None:
    before = await picture(jobs)
    assert await jobs.enqueue_batch("jobs", []) == []
    assert await jobs.enqueue_batch("jobs", [], atomic=False) == []
    assert await picture(jobs) == before


async def test_batch_may_be_any_iterable(jobs: Broker) -> None:
    assert len(await jobs.enqueue_batch("jobs", (Outgoing(b"x") for _ in range(3)))) == 3  # type: ignore[arg-type]


async def test_batch_of_something_else_is_refused(jobs: Broker) -> None:
    with pytest.raises(heapline.BadRequest, match="Outgoing"):
        await jobs.enqueue_batch("jobs", [b"x"])  # type: ignore[list-item]
    (result,) = await jobs.enqueue_batch("jobs", [{"payload": b"x"}], atomic=False)  # type: ignore[list-item]
    assert isinstance(result.error, heapline.BadRequest)


async def test_every_message_of_a_batch_may_have_its_own_options(world: World, jobs: Broker) -> None:
    results = await jobs.enqueue_batch(
        "jobs",
        [
            Outgoing(b"late", delay=60), Outgoing(b"at", deliver_at=world.now()), Outgoing(b"short", ttl=5),
            Outgoing(b"once", idempotency_key="k", priority=9), Outgoing(b"head", headers={"a": "b"}, priority=8),
        ],
    )  # fmt: skip
    assert [(await jobs.get("jobs", r.id)).state for r in results] == ["delayed", *["ready"] * 4]
    await world.advance(6)
    assert await drain(jobs) == [b"at", b"head", b"once"]


@pytest.mark.feature("partitions")
async def test_atomic_batch_is_stored_whole_across_partitions(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=8)
    results = await broker.enqueue_batch("jobs", [Outgoing(b"x", key=f"k{i}") for i in range(100)])
    assert len({(await broker.get("jobs", r.id)).partition for r in results}) > 4
    assert (await broker.stats("jobs")).ready == 100


async def test_atomic_batch_with_a_conflict_leaves_nothing_behind(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=4)
    await broker.enqueue("jobs", b"one", idempotency_key="k")
    before = await picture(broker)
    batch = [Outgoing(str(i).encode(), idempotency_key=f"n{i}") for i in range(20)]
    with pytest.raises(heapline.IdempotencyConflict):
        await broker.enqueue_batch("jobs", [*batch, Outgoing(b"two", idempotency_key="k")])
    assert await picture(broker) == before
    results = await broker.enqueue_batch("jobs", batch)
    assert not any(r.duplicate for r in results), "a refused batch is not remembered"


async def test_non_atomic_batch_gives_each_result_its_own_error(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"first", idempotency_key="k")
    batch = [
        Outgoing(b"a"),
        Outgoing("no bytes"),  # type: ignore[arg-type]
        Outgoing(b"b", headers={"n": 1}),  # type: ignore[dict-item]
        Outgoing(b"other", idempotency_key="k"),
        Outgoing(b"first", idempotency_key="k"),
        Outgoing(b"x" * (64 << 10) + b"x"),
        Outgoing(b"c", priority=1),
    ]
    results = await jobs.enqueue_batch("jobs", batch, atomic=False)
    kinds = [type(r.error) for r in results]
    none = type(None)
    assert kinds == [
        none, heapline.BadRequest, heapline.BadRequest, heapline.IdempotencyConflict, none, heapline.PayloadTooLarge,
        none,
    ]  # fmt: skip
    assert [r.duplicate for r in results] == [False, False, False, False, True, False, False]
    assert await drain(jobs) == [b"first", b"a", b"c"]


async def test_results_of_an_atomic_batch_carry_no_error(jobs: Broker) -> None:
    results = await jobs.enqueue_batch("jobs", [Outgoing(b"a"), Outgoing(b"b")])
    assert [r.error for r in results] == [None, None]


async def test_repeats_within_one_batch_are_duplicates_of_its_first(jobs: Broker) -> None:
    results = await jobs.enqueue_batch(
        "jobs", [Outgoing(b"a", idempotency_key="k"), Outgoing(b"a", idempotency_key="k")]
    )
    assert [r.duplicate for r in results] == [False, True]
    assert results[0].id == results[1].id
    assert await drain(jobs) == [b"a"]


async def test_conflict_within_one_batch_refuses_it(jobs: Broker, bare_log: None) -> None:
    before = await picture(jobs)
    with pytest.raises(heapline.IdempotencyConflict):
        await jobs.enqueue_batch(
            "jobs", [Outgoing(b"a", idempotency_key="k"), Outgoing(b"b", idempotency_key="k")]
        )  # fmt: skip
    assert await picture(jobs) == before


async def test_atomic_batch_too_large_for_one_write_is_rejected_by_name(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    batch = [Outgoing(b"x" * 60_000)] * 300
    with pytest.raises(heapline.BadRequest, match="atomic=False"):
        await broker.enqueue_batch("jobs", batch)
    assert (await broker.stats("jobs")).ready == 0
    results = await broker.enqueue_batch("jobs", batch, atomic=False)
    assert not any(r.error for r in results)
    assert (await broker.stats("jobs")).ready == 300


async def test_batch_over_max_backlog_is_refused_whole_if_atomic(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=3)
    with pytest.raises(heapline.ResourceExhausted, match="max_backlog") as caught:
        await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 4)
    assert caught.value.limit == 3
    assert (await broker.stats("jobs")).ready == 0


async def test_non_atomic_batch_over_max_backlog_is_accepted_up_to_the_limit(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=3, partitions=2)
    await broker.enqueue("jobs", b"0")
    for keys in (False, True):
        batch = [Outgoing(str(i).encode(), idempotency_key=f"k{i}" if keys else None) for i in range(4)]
        results = await broker.enqueue_batch("jobs", batch, atomic=False)
        assert [r.error is None for r in results] == [True, True, False, False]
        assert all(isinstance(r.error, heapline.ResourceExhausted) for r in results[2:])
        assert (await broker.stats("jobs")).ready == 3
        await broker.ack(await broker.pop("jobs", 2))
