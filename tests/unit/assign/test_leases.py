"""A holder's view of its own lease, and what a leader may conclude about it."""

from __future__ import annotations

import math

import pytest

from heapline.assign.leases import Bar, Lease, Sessions, Tombstone
from heapline.assign.worker_ids import Standing, WorkerRecord

TTL = 6.0


def live(session: str, **more: object) -> WorkerRecord:
    return WorkerRecord(session=session, **more)  # type: ignore[arg-type]


def ended(session: str) -> WorkerRecord:
    return WorkerRecord(session=session, standing=Standing.ENDED)


def released(session: str) -> WorkerRecord:
    return WorkerRecord(session=session, standing=Standing.RELEASED)


def test_holder_counts_from_sending_its_last_renewal() -> None:
    lease = Lease(TTL)
    lease.renewed(100.0)
    lease.renewed(98.0)  # an earlier renewal that was answered later
    assert lease.stops_at == pytest.approx(105.0)
    assert lease.ends_at == pytest.approx(105.7)


def test_holder_stops_before_its_lease_ends_and_that_before_the_full_ttl() -> None:
    lease = Lease(TTL)
    lease.renewed(0.0)
    assert 0 < lease.stops_at < lease.ends_at < TTL


def test_lost_lease_is_over_immediately() -> None:
    lease = Lease(TTL)
    lease.renewed(100.0)
    lease.lost()
    assert lease.ends_at < 0


def test_leader_writes_a_tombstone_over_a_revision_known_for_a_full_ttl() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a"), 7, 10.0)
    assert sessions.pending_writes(15.9) == []
    assert sessions.pending_writes(16.0) == [Tombstone("w", "a", 7)]
    assert not sessions.is_ended("w", "a", 1000.0)  # silence alone proves nothing


def test_every_renewal_restarts_the_leaders_timer() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a"), 7, 10.0)
    sessions.observe("w", live("a"), 9, 14.0)
    assert sessions.pending_writes(16.0) == []
    assert sessions.pending_writes(20.0) == [Tombstone("w", "a", 9)]


def test_rereading_the_same_revision_does_not_extend_a_lease() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a"), 7, 10.0)
    sessions.observe("w", live("a"), 7, 15.0)
    assert sessions.pending_writes(16.0) == [Tombstone("w", "a", 7)]


def test_written_tombstone_ends_the_session() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a"), 7, 10.0)
    sessions.observe("w", ended("a"), 8, 16.0)
    assert sessions.is_ended("w", "a", 16.0)
    assert sessions.live() == {}


def test_failed_tombstone_is_not_retried_immediately() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a"), 7, 10.0)
    assert sessions.pending_writes(16.0)
    assert sessions.pending_writes(16.5) == []
    assert sessions.pending_writes(17.0) == [Tombstone("w", "a", 7)]


def test_released_session_counts_as_ended_immediately() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", released("a"), 7, 10.0)
    assert sessions.is_ended("w", "a", 10.0)
    assert sessions.released_at("w") == 10.0


def test_displaced_session_ends_one_ttl_after_it_was_noticed() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.observe("w", live("b"), 9, 12.0)
    sessions.observe("w", live("b"), 10, 14.0)
    assert not sessions.is_ended("w", "a", 17.9)
    assert sessions.is_ended("w", "a", 18.0)


def test_reading_from_before_a_session_does_not_end_it() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "b", 9, 10.0)
    sessions.observe("w", live("a"), 7, 12.0)
    sessions.observe("w", ended("a"), 8, 13.0)
    assert not sessions.is_ended("w", "b", 1000.0)


def test_reading_from_before_the_document_named_a_session_does_not_end_it() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", released("a"), 7, 12.0)
    sessions.expect("w", "b", 9, 13.0)
    assert not sessions.is_ended("w", "b", 1000.0)


def test_session_displaced_before_the_document_was_read_is_timed_from_then() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("b"), 9, 1.0)
    sessions.expect("w", "a", 7, 10.0)
    assert not sessions.is_ended("w", "a", 15.9)
    assert sessions.is_ended("w", "a", 16.0)


def test_successor_proves_the_end_of_its_predecessor() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.observe("w", live("b", follows="a"), 9, 12.0)
    assert sessions.is_ended("w", "a", 12.0)


def test_missing_key_is_barred_and_its_ttl_waited_for() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.note_listing(set(), 10.0)
    assert sessions.pending_writes(15.9) == []
    assert sessions.pending_writes(16.0) == [Bar("w")]
    assert not sessions.is_ended("w", "a", 1000.0)
    sessions.observe("w", WorkerRecord(standing=Standing.BARRED), 20, 16.0)
    assert not sessions.is_ended("w", "a", 21.9)
    assert sessions.is_ended("w", "a", 22.0)


def test_key_missing_from_one_listing_is_not_barred() -> None:
    sessions = Sessions(TTL)
    sessions.expect("w", "a", 7, 10.0)
    sessions.note_listing(set(), 10.0)
    sessions.note_listing({"w"}, 12.0)
    sessions.note_listing(set(), 14.0)
    assert sessions.pending_writes(19.9) == []


def test_confirmations_belong_to_their_session() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a", confirmed=5), 7, 10.0)
    sessions.observe("w", live("b"), 8, 11.0)
    assert sessions.confirmed("w", "a") == 5
    assert sessions.confirmed("w", "b") == 0


def test_only_sessions_in_the_document_or_a_key_are_remembered() -> None:
    sessions = Sessions(TTL)
    sessions.observe("w", live("a"), 7, 10.0)
    sessions.observe("w", live("b"), 8, 11.0)
    sessions.observe("x", live("c"), 9, 11.0)
    sessions.keep_only([("w", "b")])
    assert sessions.live() == {"w": ("b", 8), "x": ("c", 9)}
    assert not sessions.is_ended("w", "a", 1000.0)  # forgotten, so nothing is concluded


def test_leader_waits_for_a_holders_longer_lease() -> None:
    sessions = Sessions(6.0)
    sessions.observe("w", WorkerRecord(session="s", ttl=30.0), 5, 0.0)
    assert sessions.pending_writes(29.9) == []
    assert sessions.next_deadline(1.0) == 30.0
    assert sessions.pending_writes(30.0) == [Tombstone("w", "s", 5)]


def test_leader_waits_its_own_ttl_for_a_holders_shorter_lease() -> None:
    sessions = Sessions(6.0)
    sessions.observe("w", WorkerRecord(session="s", ttl=2.0), 5, 0.0)
    assert sessions.pending_writes(5.9) == []
    assert sessions.pending_writes(6.0) == [Tombstone("w", "s", 5)]


def test_leader_waits_for_a_displaced_holders_own_lease_length() -> None:
    sessions = Sessions(6.0)
    sessions.expect("w", "s", 5, 0.0, ttl=30.0)
    sessions.observe("w", WorkerRecord(session="t", ttl=6.0), 9, 1.0)
    assert not sessions.is_ended("w", "s", 30.9)
    assert sessions.is_ended("w", "s", 31.0)


def test_sessions_that_ended_long_ago_do_not_wake_the_leader() -> None:
    """Every wakeup checks everything, so a time in the past must not be returned forever."""
    sessions = Sessions(6.0)
    sessions.observe("released", WorkerRecord(session="s", standing=Standing.RELEASED), 5, 0.0)
    sessions.observe("displaced", WorkerRecord(session="s"), 6, 0.0)
    sessions.observe("displaced", WorkerRecord(session="t", standing=Standing.RELEASED), 7, 0.0)
    sessions.note_listing({"displaced"}, 1.0)
    assert sessions.next_deadline(1.0) == 6.0
    assert sessions.next_deadline(6.0) == 7.0
    assert sessions.pending_writes(7.0) == []
    assert sessions.next_deadline(7.0) == math.inf


def test_failed_tombstone_wakes_the_leader_when_it_may_be_retried() -> None:
    sessions = Sessions(6.0)
    sessions.observe("w", WorkerRecord(session="s"), 5, 0.0)
    assert sessions.pending_writes(6.0) == [Tombstone("w", "s", 5)]
    assert sessions.next_deadline(6.0) == 7.0
    assert sessions.pending_writes(7.0) == [Tombstone("w", "s", 5)]
