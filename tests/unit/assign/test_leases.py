"""What a holder may believe of its lease, and what a leader may conclude about it."""

from __future__ import annotations

import math

import pytest

from heapline.assign.leases import Bar, Lease, Sessions, Tombstone
from heapline.assign.records import Standing, WorkerRecord

TTL = 6.0


def live(session: str, **more: object) -> WorkerRecord:
    return WorkerRecord(session=session, **more)  # type: ignore[arg-type]


def ended(session: str) -> WorkerRecord:
    return WorkerRecord(session=session, standing=Standing.ENDED)


def released(session: str) -> WorkerRecord:
    return WorkerRecord(session=session, standing=Standing.RELEASED)


def test_holder_counts_from_the_sending_of_its_last_renewal() -> None:
    lease = Lease(TTL)
    lease.renewed(100.0)
    lease.renewed(98.0)  # an earlier one that was answered later
    assert lease.stops_at == pytest.approx(105.0)
    assert lease.ends_at == pytest.approx(105.7)


def test_holder_begins_to_stop_before_its_lease_ends_and_that_before_the_full_ttl() -> None:
    lease = Lease(TTL)
    lease.renewed(0.0)
    assert 0 < lease.stops_at < lease.ends_at < TTL


def test_lost_lease_is_over_at_once() -> None:
    lease = Lease(TTL)
    lease.renewed(100.0)
    lease.lost()
    assert lease.ends_at < 0


def test_leader_buries_a_revision_that_it_has_known_for_a_full_ttl() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a"), 7, 10.0)
    assert sessions.due(15.9) == []
    assert sessions.due(16.0) == [Tombstone("w", "a", 7)]
    assert not sessions.is_ended("w", "a", 1000.0)  # silence alone proves nothing


def test_leader_starts_timing_anew_with_every_renewal() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a"), 7, 10.0)
    sessions.see("w", live("a"), 9, 14.0)
    assert sessions.due(16.0) == []
    assert sessions.due(20.0) == [Tombstone("w", "a", 9)]


def test_the_same_revision_read_again_does_not_prolong_a_lease() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a"), 7, 10.0)
    sessions.see("w", live("a"), 7, 15.0)
    assert sessions.due(16.0) == [Tombstone("w", "a", 7)]


def test_tombstone_that_was_written_ends_the_session() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a"), 7, 10.0)
    sessions.see("w", ended("a"), 8, 16.0)
    assert sessions.is_ended("w", "a", 16.0)
    assert sessions.live() == {}


def test_failed_tombstone_is_not_tried_again_at_once() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a"), 7, 10.0)
    assert sessions.due(16.0)
    assert sessions.due(16.5) == []
    assert sessions.due(17.0) == [Tombstone("w", "a", 7)]


def test_released_session_holds_nothing_at_once() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", released("a"), 7, 10.0)
    assert sessions.is_ended("w", "a", 10.0)
    assert sessions.released_at("w") == 10.0


def test_session_that_was_displaced_has_ended_a_ttl_after_that_was_seen() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.see("w", live("b"), 9, 12.0)
    sessions.see("w", live("b"), 10, 14.0)
    assert not sessions.is_ended("w", "a", 17.9)
    assert sessions.is_ended("w", "a", 18.0)


def test_reading_from_before_a_session_does_not_end_it() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "b", 9, 10.0)
    sessions.see("w", live("a"), 7, 12.0)
    sessions.see("w", ended("a"), 8, 13.0)
    assert not sessions.is_ended("w", "b", 1000.0)


def test_reading_from_before_the_document_named_a_session_does_not_end_it() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", released("a"), 7, 12.0)
    sessions.expect("w", "b", 9, 13.0)
    assert not sessions.is_ended("w", "b", 1000.0)


def test_session_that_was_displaced_before_the_document_was_read_is_timed_from_then() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("b"), 9, 1.0)
    sessions.expect("w", "a", 7, 10.0)
    assert not sessions.is_ended("w", "a", 15.9)
    assert sessions.is_ended("w", "a", 16.0)


def test_successor_that_saw_the_end_of_its_predecessor_vouches_for_it() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.see("w", live("b", follows="a"), 9, 12.0)
    assert sessions.is_ended("w", "a", 12.0)


def test_key_that_is_gone_is_barred_and_then_waited_for() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.listed(set(), 10.0)
    assert sessions.due(15.9) == []
    assert sessions.due(16.0) == [Bar("w")]
    assert not sessions.is_ended("w", "a", 1000.0)
    sessions.see("w", WorkerRecord(standing=Standing.BARRED), 20, 16.0)
    assert not sessions.is_ended("w", "a", 21.9)
    assert sessions.is_ended("w", "a", 22.0)


def test_key_that_only_one_listing_missed_is_not_barred() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.listed(set(), 10.0)
    sessions.listed({"w"}, 12.0)
    sessions.listed(set(), 14.0)
    assert sessions.due(19.9) == []


def test_confirmations_belong_to_their_session() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a", confirmed=5), 7, 10.0)
    sessions.see("w", live("b"), 8, 11.0)
    assert sessions.confirmed("w", "a") == 5
    assert sessions.confirmed("w", "b") == 0


def test_only_what_the_document_names_or_a_key_shows_is_remembered() -> None:
    sessions = Sessions(TTL)
    sessions.see("w", live("a"), 7, 10.0)
    sessions.see("w", live("b"), 8, 11.0)
    sessions.see("x", live("c"), 9, 11.0)
    sessions.keep_only([("w", "b")])
    assert sessions.live() == {"w": ("b", 8), "x": ("c", 9)}
    assert not sessions.is_ended("w", "a", 1000.0)  # forgotten, so nothing is said about it


def test_lease_that_its_holder_counts_longer_is_waited_for_that_long() -> None:
    sessions = Sessions(6.0)
    sessions.see("w", WorkerRecord(session="s", ttl=30.0), 5, 0.0)
    assert sessions.due(29.9) == []
    assert sessions.next_at(1.0) == 30.0
    assert sessions.due(30.0) == [Tombstone("w", "s", 5)]


def test_lease_that_its_holder_counts_shorter_is_waited_for_as_long_as_the_leader_counts() -> None:
    sessions = Sessions(6.0)
    sessions.see("w", WorkerRecord(session="s", ttl=2.0), 5, 0.0)
    assert sessions.due(5.9) == []
    assert sessions.due(6.0) == [Tombstone("w", "s", 5)]


def test_session_that_was_displaced_is_waited_for_as_long_as_its_holder_counts() -> None:
    sessions = Sessions(6.0)
    sessions.expect("w", "s", 5, 0.0, ttl=30.0)
    sessions.see("w", WorkerRecord(session="t", ttl=6.0), 9, 1.0)
    assert not sessions.is_ended("w", "s", 30.9)
    assert sessions.is_ended("w", "s", 31.0)


def test_nothing_that_has_ended_long_ago_wakes_a_leader_up() -> None:
    """Each wake-up is a look at everything: a moment that has passed must not be named for ever."""
    sessions = Sessions(6.0)
    sessions.see("released", WorkerRecord(session="s", standing=Standing.RELEASED), 5, 0.0)
    sessions.see("displaced", WorkerRecord(session="s"), 6, 0.0)
    sessions.see("displaced", WorkerRecord(session="t", standing=Standing.RELEASED), 7, 0.0)
    sessions.listed({"displaced"}, 1.0)
    assert sessions.next_at(1.0) == 6.0
    assert sessions.next_at(6.0) == 7.0
    assert sessions.due(7.0) == []
    assert sessions.next_at(7.0) == math.inf


def test_tombstone_that_could_not_be_written_wakes_a_leader_up_when_it_may_be_tried_again() -> None:
    sessions = Sessions(6.0)
    sessions.see("w", WorkerRecord(session="s"), 5, 0.0)
    assert sessions.due(6.0) == [Tombstone("w", "s", 5)]
    assert sessions.next_at(6.0) == 7.0
    assert sessions.due(7.0) == [Tombstone("w", "s", 5)]
