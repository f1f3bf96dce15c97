"""Spine and publisher without faults: one turn in one process, restarts, stats, and refusals.

Their promises under faults are in test_spine.py.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest

from heapline.contract.errors import BadRequest
from heapline.core.spine.strategy import Strategy
from tests.simulation.spine_parts import SimQueue
from tests.simulation.spine_protocol.coordinator import Spine, budget_for
from tests.simulation.spine_protocol.messages import (
    NOTHING,
    Cancel,
    Fenced,
    LeaseAnswer,
    LeaseRequest,
    OpenEpoch,
    Place,
    Publish,
    ToPartition,
    ToSpine,
)
from tests.simulation.spine_protocol.publisher import Durable, Publisher

T = TypeVar("T")


def take(outbox: list[T]) -> list[T]:
    taken = outbox[:]
    outbox.clear()
    return taken


class Topic:
    """A spine and its partitions in one process: messages are received in the turn in which they are sent."""

    def __init__(self, k: int, partitions: int, strategy: Strategy = "best_first") -> None:
        self.publishers = {number: Publisher(SimQueue(lambda place: None), Durable()) for number in range(partitions)}
        self.spine = Spine(1, self.publishers, k, at=0, strategy=strategy)
        self.carry()

    def carry(self) -> None:
        while self.spine.outbox or any(publisher.outbox for publisher in self.publishers.values()):
            for number, message in take(self.spine.outbox):
                self.publishers[number].receive(message, 0)
            for number, publisher in self.publishers.items():
                for answer in take(publisher.outbox):
                    self.spine.receive(number, answer, 0)

    def enqueue(self, number: int, *places: Place) -> None:
        self.publishers[number].offer(places, 0)
        self.carry()

    def pop(self, n: int = 1) -> list[Place]:
        pop = self.spine.pop(n, 0)
        self.carry()
        deliveries = take(self.spine.deliveries)
        assert all(delivery.pop == pop for delivery in deliveries)
        return [place for delivery in deliveries for place in delivery.leased]


@pytest.mark.parametrize(
    ("k", "partitions", "budget"), [(1, 5, 0), (10, 1, 9), (10, 2, 9), (10, 4, 3), (9, 5, 2), (3, 9, 0), (1, 0, 0)]
)
def test_budget_divides_the_bound_among_the_others(k: int, partitions: int, budget: int) -> None:
    assert budget_for(k, partitions) == budget
    assert 1 + max(0, partitions - 1) * budget <= k


def test_in_one_process_nothing_is_held_and_order_is_exact() -> None:
    topic = Topic(k=1, partitions=3)
    places = [(key, id) for id, key in enumerate([5, 3, 9, 1, 7, 3, 8, 2, 6])]
    for place in places:
        topic.enqueue(place[1] % 3, place)
        assert not any(publisher.held for publisher in topic.publishers.values())
    assert [topic.pop() for _ in places] == [[place] for place in sorted(places)]
    assert topic.pop() == []


def test_answer_contains_only_messages_within_the_limit() -> None:
    topic = Topic(k=1, partitions=2)
    topic.enqueue(0, (1, 1), (2, 2), (5, 5))
    topic.enqueue(1, (4, 4))
    assert topic.pop(10) == [(1, 1), (2, 2)]
    assert topic.pop(10) == [(4, 4)]
    assert topic.pop(10) == [(5, 5)]


def test_pop_waits_for_the_next_message() -> None:
    topic = Topic(k=1, partitions=2)
    assert topic.pop() == []
    assert topic.spine.waiting == 1
    topic.enqueue(1, (4, 4))
    assert [delivery.leased for delivery in topic.spine.deliveries] == [((4, 4),)]
    assert topic.spine.waiting == 0


def test_throttled_partition_accepts_messages_but_serves_none() -> None:
    topic = Topic(k=1, partitions=2)
    topic.spine.throttle(0, "moving", 0)
    topic.carry()
    topic.enqueue(0, (1, 1))
    topic.enqueue(1, (4, 4))
    assert not topic.publishers[0].held
    assert topic.pop() == [(4, 4)]
    assert topic.pop() == []  # it waits, without an error
    topic.spine.unthrottle(0, 0)
    topic.carry()
    assert [delivery.leased for delivery in topic.spine.deliveries] == [((1, 1),)]


def test_stats_count_updates_selections_and_refusals() -> None:
    topic = Topic(k=4, partitions=2)
    topic.enqueue(0, (1, 1))
    topic.enqueue(1, (4, 4))
    topic.spine.throttle(1, "moving", 0)
    topic.carry()
    assert topic.pop() == [(1, 1)]
    stats = topic.spine.stats()
    assert (stats.partitions, stats.available, stats.selections, stats.bound) == (2, 1, 1, 4)
    assert stats.candidates == 1
    assert stats.per_partition[0][2:] == (1, True, None)
    assert stats.per_partition[1][2:] == (0, False, "moving")
    assert stats.updates == sum(partition.updates for partition in stats.per_partition.values()) > 0


def test_smaller_bound_waits_for_all_budgets_and_a_larger_one_does_not() -> None:
    topic = Topic(k=4, partitions=2)
    topic.spine.set_bound(1, 0)
    assert topic.spine.stats().bound == 4
    topic.carry()
    assert topic.spine.stats().bound == 1
    topic.spine.set_bound(9, 0)
    assert topic.spine.stats().bound == 9


def test_round_robin_takes_partitions_in_turn_and_promises_no_bound() -> None:
    topic = Topic(k=1, partitions=2, strategy="round_robin")
    topic.enqueue(0, (1, 1), (2, 2))
    topic.enqueue(1, (7, 7), (8, 8), (9, 9))
    assert [topic.pop() for _ in range(5)] == [[(1, 1)], [(7, 7)], [(2, 2)], [(8, 8)], [(9, 9)]]
    assert topic.spine.stats().bound is None


@pytest.mark.parametrize("bad", [lambda: Spine(1, [0], 0, at=0), lambda: Spine(0, [0], 1, at=0)])
def test_invalid_spine_is_rejected(bad: object) -> None:
    with pytest.raises(BadRequest):
        bad()  # type: ignore[operator]


def test_invalid_calls_are_rejected() -> None:
    spine = Topic(1, 2).spine
    calls = [(spine.pop, 0), (spine.add, 1), (spine.unthrottle, 7), (spine.set_bound, 0)]
    for call, argument in calls:
        with pytest.raises(BadRequest):
            call(argument, 0)
    assert len(spine.serving) == 2


# --- the publisher alone ----------------------------------------------------------------------------------------------


def opened(places: list[Place], durable: Durable | None = None) -> tuple[Publisher, SimQueue]:
    queue = SimQueue(lambda place: None)
    queue.ready = sorted(places)
    publisher = Publisher(queue, durable or Durable())
    publisher.receive(OpenEpoch(1, 1, 0), 0)
    return publisher, queue


def last_publication(publisher: Publisher) -> Publish:
    message = publisher.outbox[-1]
    return message.publication if isinstance(message, LeaseAnswer) else message  # type: ignore[return-value]


def request(publisher: Publisher, number: int, n: int = 1) -> LeaseRequest:
    return LeaseRequest(1, publisher.durable.boot, number, n, NOTHING, 0)


def test_duplicated_request_gets_the_same_leases() -> None:
    publisher, queue = opened([(1, 1), (2, 2)])
    publisher.receive(request(publisher, 1), 0)
    publisher.receive(request(publisher, 1), 0)
    answers = [message for message in publisher.outbox if isinstance(message, LeaseAnswer)]
    assert answers[0] == answers[1]
    assert queue.leased == {(1, 1)}


def test_leases_survive_a_restart_and_are_not_repeated() -> None:
    publisher, queue = opened([(1, 1), (2, 2)])
    asked = request(publisher, 7)
    publisher.receive(asked, 0)
    again = Publisher(queue, publisher.durable)
    again.receive(asked, 0)
    answer = again.outbox[-1]
    assert isinstance(answer, LeaseAnswer)
    assert answer.leased == ((1, 1),)
    assert queue.ready == [(2, 2)]


def test_restarted_partition_refuses_requests_to_its_last_boot() -> None:
    publisher, queue = opened([(1, 1)])
    asked = request(publisher, 7)
    again = Publisher(queue, publisher.durable)
    again.receive(asked, 0)
    answer = again.outbox[-1]
    assert isinstance(answer, LeaseAnswer)
    assert answer.leased == ()
    assert answer.publication.number > last_publication(publisher).number
    assert queue.ready == [(1, 1)]


def test_restarted_partition_announces_itself() -> None:
    publisher = Publisher(SimQueue(lambda place: None), Durable(epoch=1, boot=3))
    assert publisher.next_deadline() == 0
    publisher.tick(1000)
    assert last_publication(publisher).boot == 4


def test_older_spine_is_fenced() -> None:
    publisher, queue = opened([(1, 1)])
    publisher.receive(OpenEpoch(2, 1, 0), 0)
    for outdated in (request(publisher, 9), Cancel(1, 9), OpenEpoch(1, 1, 9)):
        publisher.receive(outdated, 0)
        assert publisher.outbox[-1] == Fenced(2)
    assert queue.ready == [(1, 1)]
    assert publisher.refused == 3


def test_held_message_can_be_withdrawn() -> None:
    publisher, queue = opened([])
    publisher.offer([(3, 3), (4, 4)], 0)
    assert (len(publisher.held), queue.ready) == (2, [])
    assert publisher.withdraw((3, 3))
    assert not publisher.withdraw((3, 3))
    assert publisher.held == [(4, 4)]


def test_deposed_spine_is_inactive() -> None:
    topic = Topic(1, 2)
    topic.publishers[0].receive(OpenEpoch(5, 1, 0), 0)
    topic.publishers[0].outbox.clear()
    topic.enqueue(1, (1, 1))
    topic.spine.receive(0, Fenced(5), 0)
    assert topic.spine.deposed_by == 5
    topic.spine.pop(1, 0)
    topic.spine.tick(10_000)
    assert topic.spine.outbox == []


def test_messages_survive_msgpack() -> None:
    publication = Publish(1, 2, (3, 4), 5)
    there: list[tuple[object, ToPartition | ToSpine]] = [
        (ToPartition, LeaseRequest(1, 2, 3, 4, NOTHING, 5)),
        (ToSpine, LeaseAnswer(1, ((1, 2), (-(2**63), 4)), publication)),
        (ToSpine, Fenced(7)),
    ]
    for kind, message in there:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
