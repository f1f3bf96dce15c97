"""A worker's holdings, by the documents it has seen and its own clock."""

from __future__ import annotations

import msgspec

from heapline.assign.assignment import Document, Session
from heapline.assign.member import Change, Member
from heapline.assign.partitions import Partition

A, B = Partition(("a",)), Partition(("b",))


def document(version: int, holders: list[int], revoked: list[int] | None = None, fence: int = 1) -> Document:
    return Document(
        version=version,
        epoch=1,
        writer="leader",
        members={"w": "s"},
        workers=["w"],
        sessions=[Session("w", "s", 1), Session("x", "t", 2)],
        ids=["a", "b"],
        weights=[1, 1],
        targets=[0, 0],
        holders=holders,
        fences=[fence, fence],
        revoked=revoked or [0, 0],
    )


def member(now: float = 0.0) -> Member:
    made = Member("w", "s", ttl=6.0)
    made.lease.renewed(now)
    return made


def run_hook(worker: Member, now: float = 0.0) -> Change | None:
    """One hook that succeeds."""
    change = worker.next_change(now)
    if change is not None:
        worker.begin(change)
        worker.finish(change)
    return change


def test_partition_is_held_from_before_the_adding_to_after_the_removing_hook() -> None:
    worker = member()
    worker.observe(document(2, [0, 1]))
    assert not worker.holds(A, 0.0)
    change = worker.next_change(0.0)
    assert change == Change((A,), ())
    worker.begin(change)
    assert worker.holds(A, 0.0)
    worker.finish(change)
    worker.observe(document(3, [0, 1], [3, 0]))
    change = worker.next_change(0.0)
    assert change == Change((), (A,))
    worker.begin(change)
    assert worker.holds(A, 0.0)
    worker.finish(change)
    assert not worker.holds(A, 0.0)


def test_revocation_is_confirmed_only_after_the_hook() -> None:
    worker = member()
    worker.observe(document(2, [0, 1]))
    run_hook(worker)
    assert worker.confirmable() == 2
    worker.observe(document(3, [0, 1], [3, 0]))
    assert worker.confirmable() == 2
    assert not worker.is_awaited(2)
    run_hook(worker)
    assert worker.confirmable() == 3
    assert worker.is_awaited(2)
    assert not worker.is_awaited(3)


def test_older_document_is_ignored() -> None:
    worker = member()
    worker.observe(document(2, [0, 1]))
    run_hook(worker)
    worker.observe(document(3, [0, 1], [3, 0]))
    run_hook(worker)
    assert not worker.observe(document(2, [0, 1]))
    assert worker.next_change(0.0) is None


def test_member_that_cannot_renew_drops_early_and_holds_nothing_at_the_end() -> None:
    worker = member(now=100.0)
    worker.observe(document(2, [0, 0]))
    run_hook(worker, 100.0)
    assert worker.next_change(104.9) is None
    assert worker.next_change(105.0) == Change((), (A, B))
    assert worker.holds(A, 105.69)
    assert not worker.holds(A, 105.71)
    assert worker.fence(A, 105.71) is None


def test_member_adds_dropped_partitions_again_after_a_late_renewal() -> None:
    worker = member()
    worker.observe(document(2, [0, 1]))
    run_hook(worker)
    assert run_hook(worker, 5.0) == Change((), (A,))
    worker.lease.renewed(5.5)
    assert run_hook(worker, 5.6) == Change((A,), ())
    assert worker.fence(A, 5.6) == 1


def test_failed_hook_is_repeated_with_the_current_change() -> None:
    worker = member()
    worker.observe(document(2, [0, 0]))
    change = worker.next_change(0.0)
    assert change is not None
    worker.begin(change)  # and it failed
    worker.observe(document(3, [0, 1], [0, 0]))
    assert worker.next_change(0.0) == Change((A,), (B,))


def test_partition_with_a_new_fence_is_dropped_and_added_again() -> None:
    worker = member()
    worker.observe(document(2, [0, 1], fence=2))
    run_hook(worker)
    worker.observe(document(5, [0, 1], fence=5))
    assert run_hook(worker) == Change((), (A,))
    assert run_hook(worker) == Change((A,), ())
    assert worker.fence(A, 0.0) == 5


def test_new_session_first_drops_what_the_old_one_held() -> None:
    old = member()
    old.observe(document(2, [0, 1]))
    run_hook(old)
    old.lose()
    assert not old.holds(A, 0.0)
    new = Member("w", "s2", 6.0, old)
    new.lease.renewed(0.0)
    new.observe(msgspec.structs.replace(document(3, [0, 1]), sessions=[Session("w", "s2", 9), Session("x", "t", 2)]))
    assert not new.holds(A, 0.0)
    assert new.confirmable() == 0
    assert not new.is_empty
    assert run_hook(new) == Change((), (A,))
    assert new.confirmable() == 3
    assert run_hook(new) == Change((A,), ())


def test_closing_member_wants_nothing_whatever_is_granted() -> None:
    worker = member()
    worker.observe(document(2, [0, 0]))
    run_hook(worker)
    worker.close()
    assert run_hook(worker) == Change((), (A, B))
    assert worker.is_empty
    worker.observe(document(3, [0, 0]))
    assert worker.next_change(0.0) is None


def test_finish_counts_gained_and_lost_partitions() -> None:
    worker = member()
    worker.observe(document(2, [0, 0]))
    change = worker.next_change(0.0)
    assert change is not None
    worker.begin(change)
    assert worker.finish(change) == (2, 0)
    worker.observe(document(3, [0, 1]))
    change = worker.next_change(0.0)
    assert change is not None
    assert worker.finish(change) == (0, 1)
