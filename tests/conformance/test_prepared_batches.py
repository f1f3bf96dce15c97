"""Prepared batches: parts are stored invisibly; then exactly the named ones become visible together, or none do."""

from __future__ import annotations

from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import Memory, World

pytestmark = pytest.mark.feature("batches")


def some(*payloads: str, **facts: Any) -> list[Outgoing]:
    return [Outgoing(payload.encode(), **facts) for payload in payloads]


async def taken(broker: Broker, topic: str = "jobs") -> list[str]:
    """Pop and ack everything that is ready."""
    messages = await broker.pop(topic, 1000)
    await broker.ack(messages)
    return [m.payload.decode() for m in messages]


@pytest.fixture
async def two(broker: Broker, topic: MakeTopic) -> Broker:
    """A broker with topics "jobs" (three partitions) and "mail"."""
    await topic(partitions=3)
    await topic("mail")
    return broker


async def test_prepared_messages_are_invisible_until_their_part_is_committed(two: Broker) -> None:
    await two.prepare_batch("b", "1", {"jobs": some("a", "b"), "mail": some("c")})
    assert (await taken(two), await taken(two, "mail"), await two.peek("jobs")) == ([], [], [])
    stats = await two.stats("jobs")
    assert (stats.ready, sum(p.prepared for p in stats.partitions)) == (0, 2)
    assert await two.commit_batch("b", ["1"]) == 3
    assert (sorted(await taken(two)), await taken(two, "mail")) == (["a", "b"], ["c"])
    assert sum(p.prepared for p in (await two.stats("jobs")).partitions) == 0


async def test_only_the_named_parts_become_visible(two: Broker) -> None:
    await two.prepare_batch("b", "attempt-1", some("first"), topic="jobs")
    await two.prepare_batch("b", "attempt-2", {"jobs": some("second"), "mail": some("second")})
    assert await two.commit_batch("b", ["attempt-1"]) == 1
    assert (await taken(two), await taken(two, "mail")) == (["first"], [])


async def test_commit_that_names_an_unknown_part_changes_nothing(two: Broker) -> None:
    await two.prepare_batch("b", "1", some("a"), topic="jobs")
    with pytest.raises(heapline.UnknownPart, match="'2' of batch 'b'") as caught:
        await two.commit_batch("b", ["1", "2"])
    assert caught.value.facts() == {"batch_id": "b", "part": "2"}
    assert await taken(two) == []
    assert await two.commit_batch("b", ["1"]) == 1


async def test_repeated_commit_is_a_no_op(two: Broker) -> None:
    await two.prepare_batch("b", "1", {"jobs": some("a"), "mail": some("b")})
    await two.prepare_batch("b", "2", some("c"), topic="mail")
    assert await two.commit_batch("b", ["1", "2"]) == 3
    await taken(two), await taken(two, "mail")
    assert await two.commit_batch("b", ["2", "1", "1"]) == 3
    assert (await taken(two), await taken(two, "mail")) == ([], [])


async def test_committed_batch_cannot_be_decided_otherwise(two: Broker) -> None:
    await two.prepare_batch("b", "1", some("a"), topic="jobs")
    await two.prepare_batch("b", "2", some("b"), topic="jobs")
    await two.commit_batch("b", ["1"])
    with pytest.raises(heapline.BatchDecided):
        await two.commit_batch("b", ["1", "2"])
    with pytest.raises(heapline.BatchDecided):
        await two.abort_batch("b")
    with pytest.raises(heapline.BatchDecided):
        await two.prepare_batch("b", "3", some("late attempt"), topic="jobs")
    assert await taken(two) == ["a"]


async def test_aborted_parts_are_removed(two: Broker) -> None:
    await two.prepare_batch("b", "1", {"jobs": some("a"), "mail": some("b")})
    await two.prepare_batch("b", "2", some("c"), topic="jobs")
    assert await two.abort_batch("b") == 2
    assert await two.abort_batch("b") == 0
    with pytest.raises(heapline.UnknownPart):
        await two.commit_batch("b", ["1"])
    assert (await taken(two), await taken(two, "mail")) == ([], [])


async def test_repeated_prepare_answers_the_same_ids(two: Broker) -> None:
    await two.enqueue("jobs", b"known", idempotency_key="k")
    messages = [*some("a", "b", priority=3), *some("known", idempotency_key="k"), *some("c", "c", idempotency_key="c")]
    first = await two.prepare_batch("b", "1", {"jobs": messages, "mail": some("d")})
    assert [r.duplicate for r in first["jobs"]] == [False, False, True, False, True]
    assert first["jobs"][3].id == first["jobs"][4].id
    assert await two.prepare_batch("b", "1", {"mail": some("d"), "jobs": messages}) == first
    with pytest.raises(heapline.IdempotencyConflict, match="part '1' of batch 'b'"):
        await two.prepare_batch("b", "1", {"jobs": messages, "mail": some("other")})
    assert await two.commit_batch("b", ["1"]) == 4
    by_id = {m.id: m.payload for m in await two.pop("jobs", 10)}
    assert [by_id[r.id] for r in first["jobs"]] == [b"a", b"b", b"known", b"c", b"c"]


async def test_ids_order_and_due_times_are_those_of_the_prepare(fake_time: None, world: World, jobs: Broker) -> None:
    messages = [*some("old"), *some("late", delay=10), *some("urgent", priority=-1)]
    await jobs.prepare_batch("b", "1", messages, topic="jobs")
    await world.advance(5)
    await jobs.enqueue("jobs", b"new")
    await jobs.commit_batch("b", ["1"])
    assert await taken(jobs) == ["urgent", "old", "new"]
    await world.advance(6)
    assert await taken(jobs) == ["late"]


async def test_message_due_before_the_commit_is_served_after_it(fake_time: None, world: World, jobs: Broker) -> None:
    await jobs.prepare_batch("b", "1", [*some("due", delay=5), *some("ended", ttl=5)], topic="jobs")
    await world.advance(60)
    await jobs.commit_batch("b", ["1"])
    await world.advance(0.2)
    assert await taken(jobs) == ["due"]


async def test_empty_part_can_be_prepared_and_named(two: Broker) -> None:
    assert await two.prepare_batch("b", "1", [], topic="jobs") == {"jobs": []}
    await two.prepare_batch("b", "2", {"jobs": [], "mail": some("a")})
    assert await two.commit_batch("b", ["1", "2"]) == 1
    assert await taken(two, "mail") == ["a"]


async def test_batch_without_any_part_can_be_committed(two: Broker) -> None:
    await two.prepare_batch("b", "1", some("a"), topic="jobs")
    assert await two.commit_batch("b", []) == 0
    assert await two.commit_batch("nothing", []) == 0
    assert await taken(two) == []


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_prepared_parts_survive_a_restart(world: World, two: Broker, memory: Memory) -> None:
    first = await two.prepare_batch("b", "1", {"jobs": some("a", "b", idempotency_key=None), "mail": some("c")})
    await two.prepare_batch("b", "2", some("d", idempotency_key="k"), topic="jobs")
    broker = await world.reopen(memory)
    assert await broker.prepare_batch("b", "1", {"jobs": some("a", "b"), "mail": some("c")}) == first
    with pytest.raises(heapline.BatchInDoubt):
        await broker.enqueue("jobs", b"d", idempotency_key="k")
    assert await broker.commit_batch("b", ["1", "2"]) == 4
    broker = await world.reopen(memory)
    assert await broker.commit_batch("b", ["1", "2"]) == 4
    assert (sorted(await taken(broker)), await taken(broker, "mail")) == (["a", "b", "d"], ["c"])
    assert (await broker.enqueue("jobs", b"d", idempotency_key="k")).duplicate


# -- identities --------------------------------------------------------------------------------------------------------


async def test_identity_in_an_undecided_batch_is_in_doubt(jobs: Broker) -> None:
    (row,) = (await jobs.prepare_batch("b", "1", some("a", idempotency_key="k"), topic="jobs"))["jobs"]
    with pytest.raises(heapline.BatchInDoubt, match="retry"):
        await jobs.enqueue("jobs", b"a", idempotency_key="k")
    with pytest.raises(heapline.BatchInDoubt):
        await jobs.prepare_batch("other", "1", some("a", idempotency_key="k"), topic="jobs")
    mixed = [*some("fine"), *some("a", idempotency_key="k")]
    results = await jobs.enqueue_batch("jobs", mixed, atomic=False)
    assert [type(r.error) for r in results] == [type(None), heapline.BatchInDoubt]
    assert await taken(jobs) == ["fine"]
    await jobs.commit_batch("b", ["1"])
    again = await jobs.enqueue("jobs", b"a", idempotency_key="k")
    assert (again.id, again.duplicate) == (row.id, True)
    with pytest.raises(heapline.IdempotencyConflict):
        await jobs.enqueue("jobs", b"other", idempotency_key="k")


async def test_identity_of_an_aborted_or_unnamed_part_is_free(jobs: Broker) -> None:
    await jobs.prepare_batch("b", "1", some("a", idempotency_key="k"), topic="jobs")
    await jobs.abort_batch("b")
    assert not (await jobs.enqueue("jobs", b"other", idempotency_key="k")).duplicate
    await jobs.prepare_batch("c", "1", some("a", idempotency_key="l"), topic="jobs")
    await jobs.commit_batch("c", [])
    assert not (await jobs.enqueue("jobs", b"other", idempotency_key="l")).duplicate


async def test_two_attempts_of_one_task_may_carry_the_same_identities(jobs: Broker) -> None:
    epoch = await jobs.open_producer("jobs", "task-7")
    for attempt in ("1", "2"):
        messages = [Outgoing(b"a", seq=0), Outgoing(b"b", seq=1)]
        await jobs.prepare_batch("b", attempt, messages, topic="jobs", producer_id="task-7", epoch=epoch)
    with pytest.raises(heapline.BatchInDoubt, match="sequence 1"):
        await jobs.enqueue("jobs", b"b", producer_id="task-7", epoch=epoch, seq=1)
    assert await jobs.commit_batch("b", ["2"]) == 2
    assert await taken(jobs) == ["a", "b"]
    assert (await jobs.enqueue("jobs", b"b", producer_id="task-7", epoch=epoch, seq=1)).duplicate


async def test_second_named_part_with_the_same_identity_is_a_duplicate(jobs: Broker) -> None:
    for part in ("1", "2"):
        messages = [*some("same", idempotency_key="k"), *some(f"own {part}")]
        await jobs.prepare_batch("b", part, messages, topic="jobs")
    assert await jobs.commit_batch("b", ["1", "2"]) == 3
    assert sorted(await taken(jobs)) == ["own 1", "own 2", "same"]


async def test_commit_of_contradictory_parts_is_refused(jobs: Broker) -> None:
    await jobs.prepare_batch("b", "1", some("one", idempotency_key="k"), topic="jobs")
    await jobs.prepare_batch("b", "2", some("two", idempotency_key="k"), topic="jobs")
    with pytest.raises(heapline.IdempotencyConflict):
        await jobs.commit_batch("b", ["1", "2"])
    assert await taken(jobs) == []
    assert await jobs.commit_batch("b", ["2"]) == 1


async def test_newer_epoch_does_not_hinder_the_commit(jobs: Broker) -> None:
    epoch = await jobs.open_producer("jobs", "p")
    await jobs.prepare_batch("b", "1", [Outgoing(b"a", seq=0)], topic="jobs", producer_id="p", epoch=epoch)
    newer = await jobs.open_producer("jobs", "p")
    assert await jobs.commit_batch("b", ["1"]) == 1
    assert not (await jobs.enqueue("jobs", b"z", producer_id="p", epoch=newer, seq=0)).duplicate
    assert await taken(jobs) == ["a", "z"]


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_sequences_in_doubt_survive_a_restart(world: World, jobs: Broker, memory: Memory) -> None:
    epoch = await jobs.open_producer("jobs", "p")
    messages = [Outgoing(b"a", seq=3), Outgoing(b"b", seq=5, idempotency_key="k")]
    (first, _) = (await jobs.prepare_batch("b", "1", messages, topic="jobs", producer_id="p", epoch=epoch))["jobs"]
    broker = await world.reopen(memory)
    with pytest.raises(heapline.BatchInDoubt):
        await broker.enqueue("jobs", b"a", producer_id="p", epoch=epoch, seq=3)
    assert not (await broker.enqueue("jobs", b"between", producer_id="p", epoch=epoch, seq=4)).duplicate
    await broker.commit_batch("b", ["1"])
    broker = await world.reopen(memory)
    again = await broker.enqueue("jobs", b"a", producer_id="p", epoch=epoch, seq=3)
    assert (again.id, again.duplicate) == (first.id, True)
    assert sorted(await taken(broker)) == ["a", "b", "between"]


async def test_part_with_only_duplicates_can_be_committed(jobs: Broker) -> None:
    known = await jobs.enqueue("jobs", b"a", idempotency_key="k")
    (row,) = (await jobs.prepare_batch("b", "1", some("a", idempotency_key="k"), topic="jobs"))["jobs"]
    assert (row.id, row.duplicate) == (known.id, True)
    with pytest.raises(heapline.IdempotencyConflict):
        await jobs.prepare_batch("b", "2", some("other", idempotency_key="k"), topic="jobs")
    assert await jobs.commit_batch("b", ["1"]) == 0
    assert await taken(jobs) == ["a"]


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_prepared_messages_count_against_max_backlog(broker: Broker, topic: MakeTopic) -> None:
    await topic(max_backlog=3)
    await broker.prepare_batch("b", "1", some("a", "b"), topic="jobs")
    with pytest.raises(heapline.ResourceExhausted):
        await broker.enqueue_batch("jobs", some("c", "d"))
    with pytest.raises(heapline.ResourceExhausted):
        await broker.prepare_batch("b", "2", some("c", "d"), topic="jobs")
    await broker.enqueue("jobs", b"c")
    await broker.abort_batch("b")
    await broker.enqueue_batch("jobs", some("d", "e"))


@pytest.mark.feature("log")  # only small segments reject a part of 1 MB
async def test_error_for_a_too_large_part_says_what_to_do(jobs: Broker) -> None:
    with pytest.raises(heapline.BadRequest, match="several parts"):
        await jobs.prepare_batch("b", "1", [Outgoing(bytes(60 << 10))] * 18, topic="jobs")
    assert await jobs.list_batches() == []


@pytest.mark.parametrize("name", ["", "x" * 257, "ü" * 200, None, 5, b"b", "\ud800"])
async def test_names_of_batches_and_parts_are_checked(jobs: Broker, name: Any) -> None:
    with pytest.raises(heapline.BadRequest):
        await jobs.prepare_batch(name, "1", some("a"), topic="jobs")
    with pytest.raises(heapline.BadRequest):
        await jobs.prepare_batch("b", name, some("a"), topic="jobs")
    with pytest.raises(heapline.BadRequest):
        await jobs.commit_batch(name, ["1"])
    with pytest.raises(heapline.BadRequest):
        await jobs.commit_batch("b", [name])
    with pytest.raises(heapline.BadRequest):
        await jobs.abort_batch(name)


async def test_messages_are_given_by_topic_or_with_one(jobs: Broker) -> None:
    for messages, topic in ((some("a"), None), ({"jobs": some("a")}, "jobs"), ({}, None), ("text", "jobs")):
        with pytest.raises(heapline.BadRequest):
            await jobs.prepare_batch("b", "1", messages, topic=topic)  # type: ignore[arg-type]
    with pytest.raises(heapline.BadRequest, match="twice"):
        await jobs.prepare_batch("b", "1", {"jobs": some("a"), "default/jobs": some("b")})
    with pytest.raises(heapline.TopicNotFound):
        await jobs.prepare_batch("b", "1", {"jobs": some("a"), "none": some("b")})
    with pytest.raises(heapline.BadRequest):
        await jobs.commit_batch("b", "part")
    with pytest.raises(heapline.UnknownPart):
        await jobs.commit_batch("b", ["1"])


# -- operators ---------------------------------------------------------------------------------------------------------


async def test_batches_are_listed_with_their_parts(two: Broker) -> None:
    await two.prepare_batch("b", "1", {"jobs": some("a", "b"), "mail": some("c")})
    await two.prepare_batch("c", "1", some("d"), topic="jobs")
    await two.commit_batch("c", ["1"])
    undecided, committed = await two.list_batches()
    assert (undecided.batch_id, undecided.state, undecided.messages) == ("b", "undecided", 3)
    assert undecided.parts == {"1": {"jobs": 2, "mail": 1}}
    assert (committed.batch_id, committed.state, committed.messages) == ("c", "committed", 1)
    assert list(committed.parts) == ["1"]


async def test_decisions_are_in_no_topic_visible_to_users(two: Broker) -> None:
    await two.commit_batch("b", [])
    assert [info.name for info in await two.list_topics()] == ["jobs", "mail"]
    for call in (two.stats, two.pop, two.purge, two.delete_topic, two.create_topic):
        with pytest.raises(heapline.BadName):
            await call("_system/batches")


async def test_part_in_a_deleted_topic_is_unknown(two: Broker, topic: MakeTopic) -> None:
    await two.prepare_batch("b", "1", {"jobs": some("a"), "mail": some("b")})
    await two.delete_topic("mail")
    with pytest.raises(heapline.UnknownPart):
        await two.commit_batch("b", ["1"])
    await topic("mail")
    with pytest.raises(heapline.UnknownPart):
        await two.commit_batch("b", ["1"])
    assert await taken(two) == []


@pytest.mark.feature("log")
async def test_log_shows_prepared_committed_and_aborted_batches(jobs: Broker) -> None:
    rows = (await jobs.prepare_batch("b", "1", some("a", "b"), topic="jobs"))["jobs"]
    await jobs.prepare_batch("b", "2", some("c"), topic="jobs")
    await jobs.prepare_batch("x", "1", some("d"), topic="jobs")
    await jobs.commit_batch("b", ["1"])
    await jobs.abort_batch("x")
    events = [event async for frame in jobs.read_log("jobs") for event in frame.events]
    reported = [(e.kind, e.offset, e.row_count, e.payloads) for e in events if e.kind.startswith("batch")]
    assert reported == [
        ("batch_prepared", 0, 1, [b"a", b"b"]), ("batch_prepared", 1, 1, [b"c"]), ("batch_prepared", 2, 1, [b"d"]),
        ("batch_committed", 3, 2, None), ("batch_aborted", 5, 1, None),
    ]  # fmt: skip
    prepared, committed = events[0].columns["messages"], events[3].columns
    assert prepared["ids"].tolist() == committed["ids"].tolist() == [r.id for r in rows]
    assert (events[0].columns["batch_id"], events[0].columns["part"]) == ("b", "1")
    assert committed["parts"] == ["1"]


async def test_calls_on_a_closed_broker_are_refused(world: World, jobs: Broker) -> None:
    await jobs.close()
    for work in (
        jobs.prepare_batch("b", "1", some("a"), topic="jobs"), jobs.commit_batch("b", []), jobs.abort_batch("b"),
        jobs.list_batches(),
    ):  # fmt: skip
        with pytest.raises(heapline.Closed):
            await work
