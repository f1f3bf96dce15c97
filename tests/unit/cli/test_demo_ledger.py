"""The demo's judge must see every way in which a queue could break its promises."""

from __future__ import annotations

import pytest

from heapline.cli.demo_ledger import Ledger, number_of, payload_of, priorities_of


@pytest.fixture
def ledger() -> Ledger:
    """Six messages that must come as 1, 4, 0, 3, 2, 5."""
    return Ledger([5, 1, 9, 5, 1, 9])


RIGHT = [1, 4, 0, 3, 2, 5]
FIRST = [1] * 6


def test_messages_in_order_and_acked_leave_no_fault(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT)
    assert ledger.faults() == []
    assert (ledger.acked_count, ledger.lost, ledger.again) == (6, 0, 0)


def test_message_that_never_came_is_lost(ledger: Ledger) -> None:
    ledger.popped(RIGHT[:5], FIRST[:5])
    ledger.acked(RIGHT[:5])
    assert ledger.faults() == ["1 message(s) lost"]


def test_message_that_came_and_was_never_acked_is_lost(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT[:5])
    assert ledger.faults() == ["1 message(s) lost"]
    assert ledger.in_doubt() == [5]


def test_ack_that_counted_though_its_answer_was_lost_is_no_loss(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT[:5])
    ledger.found_gone(5)
    assert ledger.faults() == []


def test_order_of_first_deliveries_is_checked_over_batches(ledger: Ledger) -> None:
    ledger.popped([1, 0], [1, 1])
    ledger.popped([4], [1])  # more urgent than 0, which came before it
    assert ledger.out_of_order == 1


def test_equal_priorities_come_in_the_order_they_went_in(ledger: Ledger) -> None:
    ledger.popped([4, 1], [1, 1])
    assert ledger.out_of_order == 1


def test_message_that_comes_again_is_counted_and_not_out_of_order(ledger: Ledger) -> None:
    ledger.popped(RIGHT[:3], FIRST[:3])
    ledger.popped([3, 2, 5], FIRST[:3])
    ledger.popped(RIGHT[:3], [2, 2, 2])
    ledger.acked(RIGHT)
    assert (ledger.again, ledger.faults()) == (3, [])


def test_delivery_after_an_answered_ack_is_a_fault(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT)
    ledger.popped([1], [2])
    assert ledger.faults() == ["1 message(s) delivered again after their ack was answered"]


def test_delivery_after_an_ack_that_counted_is_a_fault(ledger: Ledger) -> None:
    ledger.popped(RIGHT, FIRST)
    ledger.acked(RIGHT[1:])
    ledger.found_gone(1)
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
