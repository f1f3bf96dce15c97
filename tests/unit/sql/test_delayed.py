"""Slots of delayed messages, and how far a node has fired."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heapline.sql.delayed import BASE_MS, LEVELS, RATIO, SHARE, FiredUpTo, past_slots
from heapline.sql.layout import DELAYED_SLOTS


@given(st.integers(0, 1 << 45))
def test_each_level_has_one_slot_of_the_last_period(now: int) -> None:
    slots = past_slots(now)
    assert [slot // RATIO for slot in slots] == list(range(LEVELS))
    assert max(slots) < DELAYED_SLOTS == LEVELS * RATIO
    assert past_slots(now + BASE_MS)[0] == (slots[0] + 1) % RATIO


def test_check_skips_messages_that_an_earlier_one_fired() -> None:
    fired = FiredUpTo(1.0)
    assert fired.start(10.0) == 0
    fired.end(5000, 10.0, 10.01)
    assert fired.start(10.5) == 5000


def test_message_that_was_due_before_the_last_check_is_found_by_the_next() -> None:
    fired = FiredUpTo(1.0)
    fired.start(10.0)
    fired.end(5000, 10.0, 10.0)
    fired.lower(4000)
    assert fired.start(10.1) == 3999


def test_message_that_arrives_during_a_check_is_found_by_the_next() -> None:
    fired = FiredUpTo(1.0)
    fired.start(10.0)
    fired.lower(4000)
    fired.end(5000, 10.0, 10.0)
    assert fired.start(10.1) == 3999


def test_message_in_the_future_changes_nothing() -> None:
    fired = FiredUpTo(1.0)
    fired.start(10.0)
    fired.lower(9000)
    fired.end(5000, 10.0, 10.0)
    assert fired.start(10.1) == 5000


def test_complete_check_is_due_after_the_interval_and_a_share_of_its_duration() -> None:
    fired = FiredUpTo(1.0)
    fired.end(5000, 10.0, 10.01)
    assert [fired.start(11.0), fired.start(11.02)] == [5000, 0]
    fired.end(6000, 11.02, 12.02)
    assert [fired.start(12.0 + SHARE), fired.start(12.1 + SHARE)] == [6000, 0]
