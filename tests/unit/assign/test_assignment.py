"""The steps by which the assignment document may change, one by one and against a naive model of all workers."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.assign.assignment import FORMAT, NO_WORKER, Document, Facts, Lifecycle, Plan, advance, first
from heapline.assign.member import Member
from heapline.assign.partitions import Partition
from heapline.contract.errors import UnknownFormat

A, B, C = Partition(("a",)), Partition(("b",)), Partition(("c",), weight=5)


class Known:
    """Facts that a test sets."""

    def __init__(self, **sessions: str) -> None:
        self.live = {worker: (session, 1) for worker, session in sessions.items()}
        self.ended: set[tuple[str, str]] = set()
        self.confirmed: dict[tuple[str, str], int] = {}

    def facts(self) -> Facts:
        return Facts(self.live, lambda *who: who in self.ended, lambda *who: self.confirmed.get(who, 0))

    def plan(self, **targets: list[Partition]) -> Plan:
        return Plan(targets, {worker: self.live[worker] for worker in targets})


def step(document: Document, known: Known, plan: Plan | None = None) -> Document:
    after = advance(document, known.facts(), document.epoch, document.writer, plan)
    assert after is not None
    return after


def start(known: Known, **targets: list[Partition]) -> Document:
    return step(first(1, "leader"), known, known.plan(**targets))


def test_first_plan_grants_immediately_with_the_version_as_fence() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B, C])
    assert document.grants("w", "s1") == {A: 2}
    assert document.grants("x", "s2") == {B: 2, C: 2}
    assert [p.weight for p in document.partitions()] == [1, 1, 5]


def test_no_change_makes_no_version() -> None:
    known = Known(w="s1")
    document = start(known, w=[A])
    assert advance(document, known.facts(), 1, "leader") is None


def test_new_leader_writes_the_document_even_if_nothing_changes() -> None:
    known = Known(w="s1")
    document = start(known, w=[A])
    after = advance(document, known.facts(), 2, "other")
    assert after is not None
    assert (after.version, after.epoch, after.writer) == (3, 2, "other")
    assert after.grants("w", "s1") == {A: 2}


def test_move_is_revoked_first_and_granted_after_confirmation() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A, B], x=[])
    document = step(document, known, known.plan(w=[A], x=[B]))
    assert document.grants("w", "s1") == {A: 2}
    assert document.grants("x", "s2") == {}
    assert document.waits_for("w", "s1") == 3
    known.confirmed["w", "s1"] = 2  # an older confirmation does not cover this move
    assert advance(document, known.facts(), 1, "leader") is None
    known.confirmed["w", "s1"] = 3
    document = step(document, known)
    assert document.grants("x", "s2") == {B: 4}
    assert document.waits_for("w", "s1") == 0


def test_ended_session_counts_as_confirmed() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A, B], x=[])
    document = step(document, known, known.plan(w=[A], x=[B]))
    known.ended.add(("w", "s1"))
    del known.live["w"]
    document = step(document, known)
    assert document.grants("x", "s2") == {B: 4}


def test_crashed_workers_partitions_are_granted_in_the_plans_version() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B])
    known.ended.add(("w", "s1"))
    del known.live["w"]
    document = step(document, known, known.plan(x=[A, B]))
    assert document.grants("x", "s2") == {A: 3, B: 2}


def test_revocation_is_not_undone_but_confirmed_and_granted_again() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B])
    document = step(document, known, known.plan(w=[], x=[A, B]))
    document = step(document, known, known.plan(w=[A], x=[B]))
    assert document.grants("w", "s1") == {}
    known.confirmed["w", "s1"] = 3
    document = step(document, known)
    assert document.grants("w", "s1") == {A: 5}


def test_worker_returning_under_its_id_gets_its_partitions_without_a_plan() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B])
    known.ended.add(("w", "s1"))
    known.live["w"] = ("s9", 50)
    document = step(document, known)
    assert document.members == {"w": "s9", "x": "s2"}
    assert document.grants("w", "s9") == {A: 3}


def test_new_session_waits_for_the_end_of_the_previous_one() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B])
    known.live["w"] = ("s9", 50)
    document = step(document, known)
    assert document.members["w"] == "s9"
    assert document.grants("w", "s9") == {}
    known.ended.add(("w", "s1"))
    assert step(document, known).grants("w", "s9") == {A: 4}


def test_stopped_workers_slot_is_kept_while_the_plan_is_in_force() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B])
    known.ended.add(("w", "s1"))
    del known.live["w"]
    assert advance(document, known.facts(), 1, "leader") is None
    assert document.plan() == {"w": [A], "x": [B]}


def test_removed_partition_is_dropped_by_its_holder_before_it_is_forgotten() -> None:
    known = Known(w="s1")
    document = start(known, w=[A, B])
    document = step(document, known, known.plan(w=[A]))
    assert document.ids == ["a", "b"]
    assert document.targets[1] == NO_WORKER
    assert document.grants("w", "s1") == {A: 2}
    known.confirmed["w", "s1"] = 3
    assert step(document, known).ids == ["a"]


def test_revisions_of_all_named_sessions_are_kept() -> None:
    known = Known(w="s1", x="s2")
    known.live["x"] = ("s2", 17)
    document = start(known, w=[A], x=[])
    assert [(s.worker, s.session, s.revision) for s in document.sessions] == [("w", "s1", 1), ("x", "s2", 17)]


def test_document_round_trips_through_encoding() -> None:
    known = Known(w="s1", x="s2")
    document = start(known, w=[A], x=[B, C])
    assert Document.decode(document.encode()) == document
    assert document.lifecycle is Lifecycle.COLD_START


@pytest.mark.parametrize("value", [b"", b"\x02rest"])
def test_unknown_document_format_is_rejected(value: bytes) -> None:
    with pytest.raises(UnknownFormat):
        Document.decode(value)


def test_five_thousand_partitions_take_less_than_fifty_kilobytes() -> None:
    workers = {f"worker-{n}": f"{n:016x}" for n in range(64)}
    known = Known(**workers)
    share: dict[str, list[Partition]] = {worker: [] for worker in workers}
    for n in range(5000):
        share[f"worker-{n % 64}"].append(Partition((f"tool{n // 4:04}", f"chamber{n % 4}")))
    assert len(start(known, **share).encode()) < 50_000


@given(st.randoms(use_true_random=False))
def test_no_partition_is_ever_held_by_two_workers(rng: random.Random) -> None:
    """Workers see old and new documents in any order, drop late and confirm late; a leader plans at random."""
    partitions = [Partition((str(n),)) for n in range(4)]
    members = {f"w{n}": Member(f"w{n}", f"s{n}", ttl=1e9) for n in range(3)}
    for member in members.values():
        member.lease.renewed(0.0)
    known = Known(**{worker: member.session for worker, member in members.items()})
    documents = [first(1, "leader")]
    for _ in range(60):
        kind = rng.choice(("plan", "move", "see", "see", "hook", "hook", "confirm"))
        member = members[rng.choice(list(members))]
        if kind == "plan":
            shares: dict[str, list[Partition]] = {worker: [] for worker in members}
            for partition in partitions:
                shares[rng.choice(list(members))].append(partition)
            documents.append(step(documents[-1], known, known.plan(**shares)))
        elif kind == "move":
            documents.append(advance(documents[-1], known.facts(), 1, "leader") or documents[-1])
        elif kind == "see":
            member.observe(rng.choice(documents))
        elif kind == "hook" and (change := member.next_change(1.0)) is not None:
            member.begin(change)
            if rng.random() < 0.8:
                member.finish(change)
        elif kind == "confirm":
            known.confirmed[member.worker, member.session] = member.confirmable()
        held = [p for each in members.values() for p in each.held]
        assert len(held) == len(set(held))


def test_superseded_session_is_named_with_its_own_revision() -> None:
    """With revision 0, a reading from before the session would be taken for its end."""
    known = Known(w="s1")
    plan = Plan({"w": [A]}, {"w": ("s1", 7)})
    known.live["w"] = ("s2", 9)
    document = step(first(1, "leader"), known, plan)
    assert [(each.session, each.revision) for each in document.sessions] == [("s1", 7)]


def test_document_records_each_holders_lease_length() -> None:
    """A later leader may never see the record of a session whose end it has to wait for."""
    facts = Facts({"w": ("s1", 7)}, lambda *who: False, lambda *who: 0, lambda *who: 30.0)
    document = advance(first(1, "leader"), facts, 1, "leader", Plan({"w": [A]}, {"w": ("s1", 7)}))
    assert document is not None
    assert [each.ttl for each in Document.decode(document.encode()).sessions] == [30.0]
    later = advance(document, Facts({}, lambda *who: False, lambda *who: 0), 2, "other")
    assert later is not None
    assert [each.ttl for each in later.sessions] == [30.0]


def test_document_without_session_ttls_is_read() -> None:
    known = Known(w="s1")
    document = start(known, w=[A])
    plain = msgspec.msgpack.decode(zlib.decompress(document.encode()[1:]))
    plain["sessions"] = [session[:3] for session in plain["sessions"]]
    old = FORMAT + zlib.compress(msgspec.msgpack.encode(plain))
    assert [each.ttl for each in Document.decode(old).sessions] == [0.0]
