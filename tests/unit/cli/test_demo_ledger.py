"""The demo's ledger detects every way in which a queue could break its promises."""

from __future__ import annotations

import pytest

from heapline.cli.demo import Ledger, number_of, payload_of, priorities_of


@pytest.fixture
def ledger() -> Ledger:
    """Six messages that must be delivered as 1, 4, 0, 3, 2, 5."""
    return Ledger([5, 1, 9, 5, 1, 9])


RIGHT = [1, 4, 0, 3, 2, 5]
FIRST = [1] * 6


def test_messages_in_order_and_acked_leave_no_fault(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT)
    assert ledger.faults() == []
    assert (ledger.acked_count, ledger.lost, ledger.redelivered) == (6, 0, 0)


def test_undelivered_message_is_lost(ledger: Ledger) -> None:
    ledger.popped(RIGHT[:5], FIRST[:5])
    ledger.acked(RIGHT[:5])
    assert ledger.faults() == ["1 message(s) lost"]


def test_delivered_message_without_ack_is_lost(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT[:5])
    assert ledger.faults() == ["1 message(s) lost"]
    assert ledger.in_doubt() == [5]


def test_recorded_ack_with_a_lost_response_is_not_a_loss(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT[:5])
    ledger.found_acked(5)
    assert ledger.faults() == []


def test_order_of_first_deliveries_is_checked_over_batches(ledger: Ledger) -> None:
    ledger.popped([1, 0], [1, 1])
    ledger.popped([4], [1])  # more urgent than 0, which was delivered before it
    assert ledger.out_of_order == 1


def test_equal_priorities_are_delivered_in_enqueue_order(ledger: Ledger) -> None:
    ledger.popped([4, 1], [1, 1])
    assert ledger.out_of_order == 1


def test_redelivered_message_is_counted_and_not_out_of_order(ledger: Ledger) -> None:
    ledger.popped(RIGHT[:3], FIRST[:3])
    ledger.popped([3, 2, 5], FIRST[:3])
    ledger.popped(RIGHT[:3], [2, 2, 2])
    ledger.acked(RIGHT)
    assert (ledger.redelivered, ledger.faults()) == (3, [])


def test_delivery_after_an_answered_ack_is_a_fault(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT)
    ledger.popped([1], [2])
    assert ledger.faults() == ["1 message(s) delivered again after their ack was answered"]


def test_delivery_after_a_recorded_ack_is_a_fault(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT[1:])
    ledger.found_acked(1)
    ledger.popped([1], [2])
    assert ledger.after_ack == 1


def test_damaged_payload_is_a_fault(ledger: Ledger) -> None:
    ledger.popped([number_of(payload_of(1)[:-1] + b"x")], [1])
    assert ledger.damaged == 1


def test_payloads_of_two_numbers_are_never_taken_for_one_another() -> None:
    assert [number_of(payload_of(n)) for n in range(50)] == list(range(50))
    assert number_of(payload_of(1)[:8] + payload_of(2)[8:]) == -1
    assert number_of(b"") == -1
    assert {len(payload_of(n)) for n in (0, 1, 10**9)} == {256}


def test_priorities_are_the_same_in_every_process() -> None:
    assert priorities_of(1000)[:500] == priorities_of(500)
    assert len(set(priorities_of(1000))) > 300
