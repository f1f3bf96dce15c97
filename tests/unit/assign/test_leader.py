"""A leader's decisions, step by step. Complete scenarios are in test_rebalance_windows.py."""

from __future__ import annotations

import math

import pytest

from heapline.assign.assignment import Document, first
from heapline.assign.config import Config
from heapline.assign.leader import Cause, Decision, Leader, PlanRequest
from heapline.assign.leases import Tombstone
from heapline.assign.partitions import Partition
from heapline.assign.states import State
from heapline.assign.worker_ids import Standing, WorkerRecord

PARTITIONS = [Partition((str(n),)) for n in range(4)]
CONFIG = Config(startup_timeout=100.0)  # keeps the windows at full length


def new_leader(term: int | None = 1, session: str = "me", since: float = 0.0) -> Leader:
    made = Leader(CONFIG, session, since, term)
    made.observe_partitions(PARTITIONS)
    return made


def publish(leader: Leader, decision: Decision, now: float) -> Document:
    assert decision.publish is not None
    leader.published(decision.publish, leader.revision + 10, now)
    return decision.publish


def live(leader: Leader, worker: str, session: str, revision: int, now: float, **more: object) -> None:
    leader.sessions.observe(worker, WorkerRecord(session=session, **more), revision, now)  # type: ignore[arg-type]


def spread(request: PlanRequest) -> dict[str, list[Partition]]:
    return {worker: list(request.partitions[n :: len(request.workers)]) for n, worker in enumerate(request.workers)}


def plan(leader: Leader, now: float) -> Document:
    """Follow a plan request through to the document it leads to."""
    decision = leader.decide(now)
    assert decision.plan_request is not None
    leader.accept_plan(decision.plan_request, spread(decision.plan_request), now)
    return publish(leader, leader.decide(now), now)


def settled(*workers: str) -> Leader:
    """A leader at 30 s, whose pool has its first plan."""
    leader = new_leader()
    leader.observe_document(None, 0, 0.0)
    publish(leader, leader.decide(0.0), 0.0)
    for n, worker in enumerate(workers):
        live(leader, worker, f"s{n}", 100 + n, 25.0)
    plan(leader, 30.0)
    assert leader.decide(30.0).publish is None
    return leader


def request_for_a_join(leader: Leader) -> PlanRequest:
    """Return the plan request at 50 s for a worker c that joined at 40 s."""
    live(leader, "c", "s9", 200, 40.0)
    assert leader.decide(40.0).plan_request is None
    request = leader.decide(50.0).plan_request
    assert request is not None
    return request


def test_nothing_is_decided_before_the_document_was_read() -> None:
    assert new_leader().decide(1000.0) == Decision()


def test_leader_writes_its_epoch_before_anything_else() -> None:
    leader = new_leader(term=7)
    leader.observe_document(first(3, "other"), 50, 0.0)
    decision = leader.decide(0.0)
    assert decision.publish is not None
    assert (decision.publish.epoch, decision.publish.writer, decision.publish.version) == (7, "me", 2)


def test_leader_with_a_term_steps_down_for_a_higher_epoch() -> None:
    leader = new_leader(term=3)
    leader.observe_document(first(3, "other"), 50, 0.0)
    assert leader.decide(0.0).deposed


def test_leader_without_terms_continues_from_the_documents_epoch() -> None:
    leader = new_leader(term=None)
    leader.observe_document(first(3, "other"), 50, 0.0)
    assert publish(leader, leader.decide(0.0), 0.0).epoch == 4
    leader.observe_document(Document(version=9, epoch=5, writer="other"), 99, 1.0)
    assert leader.decide(1.0).deposed


def test_deleted_document_is_not_recreated_while_a_worker_may_hold_by_it() -> None:
    leader = new_leader()
    leader.observe_document(None, 0, 0.0)
    live(leader, "w", "s", 5, 0.0, confirmed=12)
    assert leader.decide(0.0).publish is None
    assert leader.decide(6.0).writes == [Tombstone("w", "s", 5)]
    leader.sessions.observe("w", WorkerRecord(session="s", standing=Standing.ENDED), 6, 6.0)
    assert leader.decide(6.0).publish is not None


def test_cold_start_window_counts_from_process_start() -> None:
    leader = new_leader(since=10.0)
    leader.observe_document(None, 0, 20.0)
    publish(leader, leader.decide(20.0), 20.0)
    live(leader, "w", "s", 5, 20.0)
    assert leader.decide(39.9).plan_request is None
    request = leader.decide(40.0).plan_request
    assert request is not None
    assert request.cause is Cause.COLD_START


def test_plan_for_a_worker_that_has_left_is_not_used() -> None:
    leader = settled("a", "b")
    request = request_for_a_join(leader)
    leader.sessions.observe("c", WorkerRecord(session="s9", standing=Standing.ENDED), 201, 50.0)
    assert not leader.accept_plan(request, spread(request), 50.0)
    assert leader.decide(50.0).publish is None


def test_plan_that_could_not_be_written_is_published_again() -> None:
    leader = settled("a", "b")
    request = request_for_a_join(leader)
    leader.accept_plan(request, spread(request), 50.0)
    decision = leader.decide(50.0)
    assert decision.publish is not None
    assert decision.state is State.REBALANCING
    assert leader.decide(50.1).publish == decision.publish  # no answer: the same document again


def test_unanswered_write_is_found_by_reading() -> None:
    leader = settled("a", "b")
    request = request_for_a_join(leader)
    leader.accept_plan(request, spread(request), 50.0)
    written = leader.decide(50.0).publish
    leader.observe_document(written, 500, 51.0)
    assert leader.document == written
    assert leader.decide(51.0).state is State.STABLE


def test_older_document_is_ignored() -> None:
    leader = settled("a", "b")
    newest = leader.document
    leader.observe_document(first(1, "me"), 1, 40.0)
    leader.observe_document(None, 0, 40.0)
    assert leader.document is newest


def test_crash_ends_a_window_early_and_includes_the_new_worker() -> None:
    leader = settled("a", "b", "c")
    live(leader, "d", "s9", 200, 35.0)
    assert leader.decide(35.0).state is State.SCALING
    leader.sessions.observe("a", WorkerRecord(session="s0", standing=Standing.ENDED), 201, 36.0)
    decision = leader.decide(36.0)
    assert decision.plan_request is not None
    assert (decision.plan_request.cause, decision.plan_request.workers) == (Cause.CRASH, ("b", "c", "d"))
    assert decision.state is State.EMERGENCY


def test_crash_keeps_the_slot_of_a_restarting_worker() -> None:
    leader = settled("a", "b", "c", "d")
    leader.sessions.observe("b", WorkerRecord(session="s1", standing=Standing.RELEASED), 200, 35.0)
    leader.sessions.observe("a", WorkerRecord(session="s0", standing=Standing.ENDED), 201, 36.0)
    request = leader.decide(36.0).plan_request
    assert request is not None
    assert request.workers == ("b", "c", "d")


def test_worker_joining_after_a_restart_plan_waits_for_the_planned_window() -> None:
    leader = settled("a", "b", "c")
    for n, worker in enumerate("bc", 1):
        leader.sessions.observe(worker, WorkerRecord(session=f"s{n}", standing=Standing.RELEASED), 200 + n, 31.0)
    publish(leader, leader.decide(31.0), 31.0)  # this document records the detected restart
    live(leader, "a", "s0", 300, 60.0)
    decision = leader.decide(61.0)
    assert decision.plan_request is not None
    assert decision.plan_request.cause is Cause.RESTART
    leader.accept_plan(decision.plan_request, spread(decision.plan_request), 61.0)
    publish(leader, leader.decide(61.0), 61.0)
    live(leader, "d", "s9", 400, 61.0)
    assert leader.decide(61.0).plan_request is None
    assert leader.decide(70.9).plan_request is None
    live(leader, "a", "s0", 401, 70.9)
    request = leader.decide(71.0).plan_request
    assert request is not None
    assert request.cause is Cause.PLANNED


def test_join_is_planned_after_window_and_cooldown() -> None:
    leader = settled("a", "b")
    live(leader, "c", "s9", 200, 31.0)
    decision = leader.decide(31.0)
    assert decision.plan_request is None
    assert decision.wake_at == pytest.approx(32.0)  # a and b have not renewed for 6 s: decide again then
    assert leader.decide(40.9).plan_request is None
    assert leader.decide(41.0).plan_request is not None


def test_refresh_request_triggers_one_listing() -> None:
    leader = settled("a", "b")
    live(leader, "a", "s0", 300, 31.0, refreshes=1)
    assert leader.decide(31.0).refresh
    assert not leader.decide(31.0).refresh


def test_idle_leader_still_has_a_wakeup_time() -> None:
    leader = settled("a")
    assert leader.decide(30.0).wake_at < math.inf  # a's lease has to be checked again
