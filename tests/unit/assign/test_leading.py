"""What a leader decides, step by step; whole stories are in test_windows.py."""

from __future__ import annotations

import math

import pytest

from heapline.assign.config import Config
from heapline.assign.document import Document, first
from heapline.assign.leading import Ask, Cause, Decision, Leading
from heapline.assign.leases import Tombstone
from heapline.assign.model import Partition, State
from heapline.assign.records import Standing, WorkerRecord

PARTITIONS = [Partition((str(n),)) for n in range(4)]
CONFIG = Config(startup_timeout=100.0)  # so that no window is cut short


def leading(term: int | None = 1, session: str = "me", since: float = 0.0) -> Leading:
    made = Leading(CONFIG, session, since, term)
    made.see_partitions(PARTITIONS)
    return made


def publish(leader: Leading, decision: Decision, now: float) -> Document:
    assert decision.publish is not None
    leader.published(decision.publish, leader.revision + 10, now)
    return decision.publish


def live(leader: Leading, worker: str, session: str, revision: int, now: float, **more: object) -> None:
    leader.sessions.see(worker, WorkerRecord(session=session, **more), revision, now)  # type: ignore[arg-type]


def spread(ask: Ask) -> dict[str, list[Partition]]:
    return {worker: list(ask.partitions[n :: len(ask.workers)]) for n, worker in enumerate(ask.workers)}


def planned(leader: Leading, now: float) -> Document:
    """Go through an ask to its document."""
    decision = leader.look(now)
    assert decision.ask is not None
    leader.planned(decision.ask, spread(decision.ask), now)
    return publish(leader, leader.look(now), now)


def settled(*workers: str) -> Leading:
    """A leader at 30 s, whose crowd has its first plan."""
    leader = leading()
    leader.see_document(None, 0, 0.0)
    publish(leader, leader.look(0.0), 0.0)
    for n, worker in enumerate(workers):
        live(leader, worker, f"s{n}", 100 + n, 25.0)
    planned(leader, 30.0)
    assert leader.look(30.0).publish is None
    return leader


def asked_for_a_join(leader: Leading) -> Ask:
    """At 50 s, of a worker c that came at 40 s."""
    live(leader, "c", "s9", 200, 40.0)
    assert leader.look(40.0).ask is None
    ask = leader.look(50.0).ask
    assert ask is not None
    return ask


def test_nothing_is_decided_before_the_document_was_read() -> None:
    assert leading().look(1000.0) == Decision()


def test_leader_writes_its_epoch_before_anything_else() -> None:
    leader = leading(term=7)
    leader.see_document(first(3, "other"), 50, 0.0)
    decision = leader.look(0.0)
    assert decision.publish is not None
    assert (decision.publish.epoch, decision.publish.writer, decision.publish.version) == (7, "me", 2)


def test_leader_with_a_term_steps_down_before_a_higher_epoch() -> None:
    leader = leading(term=3)
    leader.see_document(first(3, "other"), 50, 0.0)
    assert leader.look(0.0).deposed


def test_leader_without_terms_counts_on_from_the_document() -> None:
    leader = leading(term=None)
    leader.see_document(first(3, "other"), 50, 0.0)
    assert publish(leader, leader.look(0.0), 0.0).epoch == 4
    leader.see_document(Document(version=9, epoch=5, writer="other"), 99, 1.0)
    assert leader.look(1.0).deposed


def test_document_that_was_removed_is_not_made_anew_while_somebody_may_hold_by_it() -> None:
    leader = leading()
    leader.see_document(None, 0, 0.0)
    live(leader, "w", "s", 5, 0.0, confirmed=12)
    assert leader.look(0.0).publish is None
    assert leader.look(6.0).writes == [Tombstone("w", "s", 5)]
    leader.sessions.see("w", WorkerRecord(session="s", standing=Standing.ENDED), 6, 6.0)
    assert leader.look(6.0).publish is not None


def test_cold_start_counts_from_when_this_process_began() -> None:
    leader = leading(since=10.0)
    leader.see_document(None, 0, 20.0)
    publish(leader, leader.look(20.0), 20.0)
    live(leader, "w", "s", 5, 20.0)
    assert leader.look(39.9).ask is None
    ask = leader.look(40.0).ask
    assert ask is not None
    assert ask.cause is Cause.COLD_START


def test_plan_for_a_worker_that_is_gone_meanwhile_is_not_used() -> None:
    leader = settled("a", "b")
    ask = asked_for_a_join(leader)
    leader.sessions.see("c", WorkerRecord(session="s9", standing=Standing.ENDED), 201, 50.0)
    assert not leader.planned(ask, spread(ask), 50.0)
    assert leader.look(50.0).publish is None


def test_plan_that_could_not_be_written_is_asked_for_again() -> None:
    leader = settled("a", "b")
    ask = asked_for_a_join(leader)
    leader.planned(ask, spread(ask), 50.0)
    decision = leader.look(50.0)
    assert decision.publish is not None
    assert decision.state is State.REBALANCING
    assert leader.look(50.1).publish == decision.publish  # not answered: the same again


def test_write_that_was_not_answered_is_found_by_reading() -> None:
    leader = settled("a", "b")
    ask = asked_for_a_join(leader)
    leader.planned(ask, spread(ask), 50.0)
    written = leader.look(50.0).publish
    leader.see_document(written, 500, 51.0)
    assert leader.document == written
    assert leader.look(51.0).state is State.STABLE


def test_older_document_is_not_believed() -> None:
    leader = settled("a", "b")
    newest = leader.document
    leader.see_document(first(1, "me"), 1, 40.0)
    leader.see_document(None, 0, 40.0)
    assert leader.document is newest


def test_crash_in_a_window_does_not_wait_for_it_and_takes_the_newcomer_in() -> None:
    leader = settled("a", "b", "c")
    live(leader, "d", "s9", 200, 35.0)
    assert leader.look(35.0).state is State.SCALING
    leader.sessions.see("a", WorkerRecord(session="s0", standing=Standing.ENDED), 201, 36.0)
    decision = leader.look(36.0)
    assert decision.ask is not None
    assert (decision.ask.cause, decision.ask.workers) == (Cause.CRASH, ("b", "c", "d"))
    assert decision.state is State.EMERGENCY


def test_crash_leaves_the_place_of_one_that_is_being_restarted() -> None:
    leader = settled("a", "b", "c", "d")
    leader.sessions.see("b", WorkerRecord(session="s1", standing=Standing.RELEASED), 200, 35.0)
    leader.sessions.see("a", WorkerRecord(session="s0", standing=Standing.ENDED), 201, 36.0)
    ask = leader.look(36.0).ask
    assert ask is not None
    assert ask.workers == ("b", "c", "d")


def test_worker_that_comes_after_the_plan_of_a_restart_waits_for_the_planned_window() -> None:
    leader = settled("a", "b", "c")
    for n, worker in enumerate("bc", 1):
        leader.sessions.see(worker, WorkerRecord(session=f"s{n}", standing=Standing.RELEASED), 200 + n, 31.0)
    publish(leader, leader.look(31.0), 31.0)  # which says that a restart was detected
    live(leader, "a", "s0", 300, 60.0)
    decision = leader.look(61.0)
    assert decision.ask is not None
    assert decision.ask.cause is Cause.RESTART
    leader.planned(decision.ask, spread(decision.ask), 61.0)
    publish(leader, leader.look(61.0), 61.0)
    live(leader, "d", "s9", 400, 61.0)
    assert leader.look(61.0).ask is None
    assert leader.look(70.9).ask is None
    live(leader, "a", "s0", 401, 70.9)
    ask = leader.look(71.0).ask
    assert ask is not None
    assert ask.cause is Cause.PLANNED


def test_join_is_planned_after_window_and_cooldown() -> None:
    leader = settled("a", "b")
    live(leader, "c", "s9", 200, 31.0)
    decision = leader.look(31.0)
    assert decision.ask is None
    assert decision.wake_at == pytest.approx(32.0)  # a and b have not renewed for 6 s: if they go on, it looks again
    assert leader.look(40.9).ask is None
    assert leader.look(41.0).ask is not None


def test_wish_to_list_partitions_anew_is_heard_once() -> None:
    leader = settled("a", "b")
    live(leader, "a", "s0", 300, 31.0, refreshes=1)
    assert leader.look(31.0).refresh
    assert not leader.look(31.0).refresh


def test_nobody_waits_for_ever_when_nothing_is_to_be_done() -> None:
    leader = settled("a")
    assert leader.look(30.0).wake_at < math.inf  # a's lease has to be looked at again
