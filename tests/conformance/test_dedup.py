"""A repeated enqueue is recognized: by idempotency key and its scope, or by a producer's numbers."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.fields import INT64_MAX
from heapline.contract.message import Outgoing
from heapline.contract.messages import EnqueueBatch, enqueued, pack_messages
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, picture, take

# -- idempotency keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 5])
@pytest.mark.parametrize("scope", [None, "window", "pending", "until_ack"])
async def test_duplicate_gets_the_first_id_and_is_not_enqueued(
    topic: MakeTopic, broker: Broker, scope: Any, partitions: int
) -> None:
    await topic(partitions=partitions)
    first = await broker.enqueue("jobs", b"x", idempotency_key="order-1", idempotency_scope=scope)
    again = await broker.enqueue("jobs", b"x", idempotency_key="order-1", idempotency_scope=scope, priority=9)
    assert (again.id, again.duplicate, first.duplicate) == (first.id, True, False)
    assert (await broker.stats("jobs")).ready == 1
    assert (await broker.stats("jobs")).duplicates_total == 1


async def test_concurrent_enqueues_with_one_key_create_one_message(jobs: Broker) -> None:
    results = await asyncio.gather(*(jobs.enqueue("jobs", b"x", idempotency_key="k") for _ in range(20)))
    assert len({r.id for r in results}) == 1
    assert sorted(r.duplicate for r in results) == [False] + [True] * 19


async def test_same_key_with_another_payload_is_a_conflict_and_changes_nothing(jobs: Broker) -> None:
    first = await jobs.enqueue("jobs", b"x", idempotency_key="order-1")
    before = await picture(jobs)
    with pytest.raises(heapline.IdempotencyConflict, match="new idempotency key") as caught:
        await jobs.enqueue("jobs", b"y", idempotency_key="order-1")
    assert "order-1" in caught.value.identity
    assert caught.value.message_id == first.message_id
    assert await picture(jobs) == before


async def test_other_keys_and_other_topics_are_other_messages(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    await topic("other")
    ids = {
        (await broker.enqueue("jobs", b"x", idempotency_key="a")).id,
        (await broker.enqueue("jobs", b"x", idempotency_key="b")).id,
        (await broker.enqueue("jobs", b"x")).id,
    }
    assert len(ids) == 3
    assert (await broker.enqueue("other", b"x", idempotency_key="a")).duplicate is False


async def test_key_of_the_window_outlives_the_message(jobs: Broker) -> None:
    first = await jobs.enqueue("jobs", b"x", idempotency_key="k")
    await (await take(jobs)).ack()
    again = await jobs.enqueue("jobs", b"x", idempotency_key="k")
    assert (again.id, again.duplicate) == (first.id, True)


async def test_key_of_the_window_is_free_after_the_window(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(dedup_window=2.0)
    first = await hl.enqueue("jobs", b"x", idempotency_key="k")
    await world.advance(1.5)
    assert (await hl.enqueue("jobs", b"x", idempotency_key="k")).duplicate
    await world.advance(1)
    again = await hl.enqueue("jobs", b"another", idempotency_key="k")
    assert (again.duplicate, again.id == first.id) == (False, False)


@pytest.mark.usefixtures("fake_time")
async def test_window_is_a_day_by_default(world: World, jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"x", idempotency_key="k")
    await world.advance(24 * 3600 - 60)
    assert (await jobs.enqueue("jobs", b"x", idempotency_key="k")).duplicate
    await world.advance(120)
    assert not (await jobs.enqueue("jobs", b"x", idempotency_key="k")).duplicate


async def test_pending_key_is_free_when_the_message_is_first_leased(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"x", idempotency_key="k", idempotency_scope="pending")
    m = await take(jobs)
    again = await jobs.enqueue("jobs", b"another", idempotency_key="k", idempotency_scope="pending")
    assert not again.duplicate
    await m.release()
    assert (await jobs.enqueue("jobs", b"another", idempotency_key="k", idempotency_scope="pending")).id == again.id


async def test_until_ack_key_is_kept_through_retries_and_dead_letters(world: World, jobs: Broker) -> None:
    def again() -> Any:
        return jobs.enqueue("jobs", b"x", idempotency_key="k", idempotency_scope="until_ack")

    first = await again()
    await (await take(jobs)).nack(backoff=0)
    assert (await again()).id == first.id
    await (await take(jobs)).bury("no good")
    assert (await again()).id == first.id
    await jobs.dlq_replay("jobs")
    assert (await again()).id == first.id
    await (await take(jobs)).ack()
    assert (await again()).id != first.id


@pytest.mark.parametrize("end", ["cancel", "purge", "expire", "dlq_delete"])
async def test_until_ack_key_is_free_however_the_message_ends(world: World, jobs: Broker, end: str) -> None:
    r = await jobs.enqueue("jobs", b"x", idempotency_key="k", idempotency_scope="until_ack", ttl=1)
    if end == "cancel":
        await jobs.cancel("jobs", r.id)
    elif end == "purge":
        await jobs.purge("jobs")
    elif end == "expire":
        await world.advance(2)
    else:
        await (await take(jobs)).bury()
        await jobs.dlq_delete("jobs", ids=[r.id])
    assert not (await jobs.enqueue("jobs", b"y", idempotency_key="k", idempotency_scope="until_ack")).duplicate


# -- producers ---------------------------------------------------------------------------------------------------------


async def test_producer_numbers_messages_without_duplicates(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    producer = heapline.Producer("p1")
    single = await broker.enqueue("jobs", b"a", producer=producer)
    batch = await broker.enqueue_batch("jobs", [Outgoing(b"b"), Outgoing(b"c")], producer=producer)
    assert not any(r.duplicate for r in [single, *batch])
    assert sorted(await drain(broker)) == [b"a", b"b", b"c"]


async def test_concurrent_first_uses_of_a_producer_share_one_epoch(jobs: Broker) -> None:
    producer = heapline.Producer("p1")
    await asyncio.gather(*(jobs.enqueue("jobs", b"%d" % i, producer=producer) for i in range(20)))
    assert (await jobs.stats("jobs")).ready == 20
    assert await jobs.open_producer("jobs", "p1") == 2


async def test_newer_producer_of_the_name_fences_the_older(jobs: Broker) -> None:
    old, new = heapline.Producer("p1"), heapline.Producer("p1")
    await jobs.enqueue("jobs", b"a", producer=old)
    await jobs.enqueue("jobs", b"b", producer=new)
    before = await picture(jobs)
    with pytest.raises(heapline.StaleEpoch, match="another process") as caught:
        await jobs.enqueue("jobs", b"c", producer=old)
    assert (caught.value.producer_id, caught.value.epoch, caught.value.current) == ("p1", 1, 2)
    assert await picture(jobs) == before
    await jobs.enqueue("jobs", b"d", producer=new)


async def test_producers_of_other_names_do_not_meet(jobs: Broker) -> None:
    one, two = heapline.Producer("p1"), heapline.Producer("p2")
    for _ in range(2):
        await jobs.enqueue("jobs", b"a", producer=one)
        await jobs.enqueue("jobs", b"a", producer=two)
    assert (await jobs.stats("jobs")).ready == 4


async def test_producer_has_an_epoch_of_its_own_on_each_topic(topic: MakeTopic, broker: Broker) -> None:
    await topic("a")
    await topic("b")
    producer = heapline.Producer("p1")
    await broker.open_producer("a", "p1")
    await broker.enqueue("a", b"x", producer=producer)
    await broker.enqueue("b", b"x", producer=producer)
    assert await broker.open_producer("a", "p1") == 3
    assert await broker.open_producer("b", "p1") == 2


FORKING = """
import os, heapline
producer = heapline.Producer("p1")
read, write = os.pipe()
if not (pid := os.fork()):
    os.write(write, producer.producer_id.encode())
    os._exit(0)
os.waitpid(pid, 0)
print(os.read(read, 1000).decode(), producer.producer_id)
"""


async def test_forked_child_is_another_producer(jobs: Broker) -> None:
    producer = heapline.Producer("p1")
    await jobs.enqueue("jobs", b"x", producer=producer)
    # In a separate process: forking this one would fork gRPC, which a child does not always survive.
    printed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", FORKING], capture_output=True, check=True)
    child, parent = printed.stdout.decode().split()
    assert child.startswith("p1")
    assert child != "p1"
    assert parent == "p1"
    await jobs.enqueue("jobs", b"x", producer=heapline.Producer(child))
    await jobs.enqueue("jobs", b"x", producer=producer)  # the child did not fence it


@pytest.mark.parametrize("partitions", [1, 4])
async def test_own_numbers_recognise_a_repeat(topic: MakeTopic, broker: Broker, partitions: int) -> None:
    await topic(partitions=partitions)
    epoch = await broker.open_producer("jobs", "p")
    first = await broker.enqueue("jobs", b"x", producer_id="p", epoch=epoch, seq=7)
    again = await broker.enqueue("jobs", b"x", producer_id="p", epoch=epoch, seq=7)
    assert (again.id, again.duplicate) == (first.id, True)
    with pytest.raises(heapline.IdempotencyConflict, match="sequence 7"):
        await broker.enqueue("jobs", b"y", producer_id="p", epoch=epoch, seq=7)
    assert not (await broker.enqueue("jobs", b"y", producer_id="p", epoch=epoch, seq=6)).duplicate
    assert (await broker.stats("jobs")).ready == 2


async def test_batch_of_own_numbers_is_recognised_row_by_row(jobs: Broker) -> None:
    batch = [Outgoing(b"%d" % i, seq=i) for i in range(5)]
    first = await jobs.enqueue_batch("jobs", batch, producer_id="p", epoch=1)
    again = await jobs.enqueue_batch("jobs", [*batch, Outgoing(b"5", seq=5)], producer_id="p", epoch=1)
    assert [r.duplicate for r in again] == [True] * 5 + [False]
    assert [r.id for r in again[:5]] == [r.id for r in first]


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_batch_numbered_by_its_first_number_is_recognised_row_by_row(
    topic: MakeTopic, broker: Broker, monkeypatch: pytest.MonkeyPatch, partitions: int, is_cut: bool
) -> None:
    if is_cut:  # each message is sent or written by itself
        monkeypatch.setattr("heapline.client.transports.transport.BATCH_BYTES", 1)
        monkeypatch.setattr("heapline.engine.messages.CHUNK_BYTES", 1)
    await topic(partitions=partitions)
    rows = pack_messages([Outgoing(b"%d" % i) for i in range(5)])
    batch = EnqueueBatch("jobs", rows, atomic=False, producer_id="p", epoch=1, first_seq=3)
    first, again = [enqueued(await broker.do(batch)) for _ in range(2)]
    assert [r.duplicate for r in first + again] == [False] * 5 + [True] * 5
    assert [r.id for r in again] == [r.id for r in first]
    assert (await broker.enqueue("jobs", b"4", producer_id="p", epoch=1, seq=7)).id == first[4].id
    assert not (await broker.enqueue("jobs", b"5", producer_id="p", epoch=1, seq=8)).duplicate


def test_first_number_of_a_batch_is_checked() -> None:
    rows, numbered = pack_messages([Outgoing(b"a"), Outgoing(b"b")]), pack_messages([Outgoing(b"a", seq=1)])
    with pytest.raises(heapline.BadRequest, match="give first_seq, or each message its seq, not both"):
        EnqueueBatch("jobs", numbered, producer_id="p", epoch=1, first_seq=1)
    with pytest.raises(heapline.BadRequest, match="epoch, seq and answered_below need a producer_id"):
        EnqueueBatch("jobs", rows, first_seq=1)
    with pytest.raises(heapline.BadRequest, match="is too large for 2 messages"):
        EnqueueBatch("jobs", rows, producer_id="p", epoch=1, first_seq=INT64_MAX)
    EnqueueBatch("jobs", rows, producer_id="p", epoch=1, first_seq=INT64_MAX - 1)


async def test_epoch_of_ones_own_opens_by_being_used_and_fences_older_ones(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"x", producer_id="p", epoch=5, seq=0)
    with pytest.raises(heapline.StaleEpoch):
        await jobs.enqueue("jobs", b"x", producer_id="p", epoch=4, seq=1)
    assert await jobs.open_producer("jobs", "p") == 6
    assert not (await jobs.enqueue("jobs", b"x", producer_id="p", epoch=6, seq=0)).duplicate


async def test_number_below_answered_below_is_refused_as_stale(jobs: Broker) -> None:
    for seq in range(5):
        await jobs.enqueue("jobs", b"%d" % seq, producer_id="p", epoch=1, seq=seq, answered_below=seq)
    before = await picture(jobs)
    with pytest.raises(heapline.StaleSequence, match="use a higher sequence") as caught:
        await jobs.enqueue("jobs", b"3", producer_id="p", epoch=1, seq=3)
    assert (caught.value.seq, caught.value.answered_below) == (3, 4)
    assert await picture(jobs) == before
    assert (await jobs.enqueue("jobs", b"4", producer_id="p", epoch=1, seq=4)).duplicate


async def test_stale_number_in_a_batch_is_its_own_error_if_not_atomic(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"5", producer_id="p", epoch=1, seq=5, answered_below=5)
    batch = [Outgoing(b"1", seq=1), Outgoing(b"5", seq=5), Outgoing(b"6", seq=6)]
    results = await jobs.enqueue_batch("jobs", batch, atomic=False, producer_id="p", epoch=1)
    assert isinstance(results[0].error, heapline.StaleSequence)
    assert [(r.error, r.duplicate) for r in results[1:]] == [(None, True), (None, False)]


@pytest.mark.usefixtures("fake_time")
async def test_numbers_are_remembered_for_the_window(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(dedup_window=60)
    await hl.enqueue("jobs", b"1", producer_id="p", epoch=1, seq=1)
    await world.advance(50)
    again = await hl.enqueue("jobs", b"1", producer_id="p", epoch=1, seq=1)
    assert again.duplicate
    await world.advance(50)
    with contextlib.suppress(heapline.StaleSequence):  # it may be remembered longer; once forgotten it is never new
        assert (await hl.enqueue("jobs", b"1", producer_id="p", epoch=1, seq=1)).id == again.id
    assert (await hl.stats("jobs")).ready == 1


async def test_producer_and_own_numbers_do_not_mix(jobs: Broker) -> None:
    producer = heapline.Producer("p1")
    before = await picture(jobs)
    for own in ({"seq": 1}, {"producer_id": "p2", "epoch": 1, "seq": 1}, {"epoch": 3}, {"answered_below": 1}):
        with pytest.raises(heapline.BadRequest):
            await jobs.enqueue("jobs", b"x", producer=producer, **own)
    for own in ({"producer_id": "p2"}, {"epoch": 3}, {"answered_below": 1}):
        with pytest.raises(heapline.BadRequest):
            await jobs.enqueue_batch("jobs", [Outgoing(b"x")], producer=producer, **own)
    with pytest.raises(heapline.BadRequest):
        await jobs.enqueue_batch("jobs", [Outgoing(b"x", seq=1)], producer=producer)
    assert await picture(jobs) == before


async def test_repeat_is_answered_even_when_the_backlog_is_full(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=1)
    first = await broker.enqueue("jobs", b"x", idempotency_key="k")
    again = await broker.enqueue("jobs", b"x", idempotency_key="k")
    assert (again.id, again.duplicate) == (first.id, True)
    with pytest.raises(heapline.ResourceExhausted):
        await broker.enqueue("jobs", b"x", idempotency_key="other")
