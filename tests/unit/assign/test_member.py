"""What one worker may hold, by what it has seen and by its own clock."""

from __future__ import annotations

import msgspec

from heapline.assign.document import Document, Session
from heapline.assign.member import Change, Member
from heapline.assign.model import Partition

A, B = Partition(("a",)), Partition(("b",))


def document(version: int, holders: list[int], revoked: list[int] | None = None, fence: int = 1) -> Document:
    return Document(
        version=version, epoch=1, writer="leader", members={"w": "s"}, workers=["w"],
        sessions=[Session("w", "s", 1), Session("x", "t", 2)], ids=["a", "b"], weights=[1, 1], targets=[0, 0],
        holders=holders, fences=[fence, fence], revoked=revoked or [0, 0],
    )  # fmt: skip


def member(now: float = 0.0) -> Member:
    made = Member("w", "s", ttl=6.0)
    made.lease.renewed(now)
    return made


def do(who: Member, now: float = 0.0) -> Change | None:
    """One hook that succeeds."""
    change = who.next_change(now)
    if change is not None:
        who.begin(change)
        who.finish(change)
    return change


def test_holds_from_before_the_adding_hook_to_after_the_removing_one() -> None:
    who = member()
    who.see(document(2, [0, 1]))
    assert not who.holds(A, 0.0)
    change = who.next_change(0.0)
    assert change == Change((A,), ())
    who.begin(change)
    assert who.holds(A, 0.0)
    who.finish(change)
    who.see(document(3, [0, 1], [3, 0]))
    change = who.next_change(0.0)
    assert change == Change((), (A,))
    who.begin(change)
    assert who.holds(A, 0.0)
    who.finish(change)
    assert not who.holds(A, 0.0)


def test_confirms_a_revocation_only_after_the_hook() -> None:
    who = member()
    who.see(document(2, [0, 1]))
    do(who)
    assert who.confirmable() == 2
    who.see(document(3, [0, 1], [3, 0]))
    assert who.confirmable() == 2
    assert not who.is_awaited(2)
    do(who)
    assert who.confirmable() == 3
    assert who.is_awaited(2)
    assert not who.is_awaited(3)


def test_older_document_is_ignored() -> None:
    who = member()
    who.see(document(2, [0, 1]))
    do(who)
    who.see(document(3, [0, 1], [3, 0]))
    do(who)
    assert not who.see(document(2, [0, 1]))
    assert who.next_change(0.0) is None


def test_lets_go_early_when_it_cannot_renew_and_holds_nothing_at_the_end() -> None:
    who = member(now=100.0)
    who.see(document(2, [0, 0]))
    do(who, 100.0)
    assert who.next_change(104.9) is None
    assert who.next_change(105.0) == Change((), (A, B))
    assert who.holds(A, 105.69)
    assert not who.holds(A, 105.71)
    assert who.fence(A, 105.71) is None


def test_takes_up_again_what_it_let_go_when_it_could_renew_after_all() -> None:
    who = member()
    who.see(document(2, [0, 1]))
    do(who)
    assert do(who, 5.0) == Change((), (A,))
    who.lease.renewed(5.5)
    assert do(who, 5.6) == Change((A,), ())
    assert who.fence(A, 5.6) == 1


def test_hook_that_failed_is_told_again_with_what_is_true_by_then() -> None:
    who = member()
    who.see(document(2, [0, 0]))
    change = who.next_change(0.0)
    assert change is not None
    who.begin(change)  # and it failed
    who.see(document(3, [0, 1], [0, 0]))
    assert who.next_change(0.0) == Change((A,), (B,))


def test_grant_with_another_fence_is_dropped_and_taken_anew() -> None:
    who = member()
    who.see(document(2, [0, 1], fence=2))
    do(who)
    who.see(document(5, [0, 1], fence=5))
    assert do(who) == Change((), (A,))
    assert do(who) == Change((A,), ())
    assert who.fence(A, 0.0) == 5


def test_new_session_drops_what_the_old_one_held_before_it_takes_anything() -> None:
    old = member()
    old.see(document(2, [0, 1]))
    do(old)
    old.lose()
    assert not old.holds(A, 0.0)
    new = Member("w", "s2", 6.0, old)
    new.lease.renewed(0.0)
    new.see(msgspec.structs.replace(document(3, [0, 1]), sessions=[Session("w", "s2", 9), Session("x", "t", 2)]))
    assert not new.holds(A, 0.0)
    assert new.confirmable() == 0
    assert not new.is_empty
    assert do(new) == Change((), (A,))
    assert new.confirmable() == 3
    assert do(new) == Change((A,), ())


def test_closing_member_wants_nothing_whatever_it_is_granted() -> None:
    who = member()
    who.see(document(2, [0, 0]))
    do(who)
    who.close()
    assert do(who) == Change((), (A, B))
    assert who.is_empty
    who.see(document(3, [0, 0]))
    assert who.next_change(0.0) is None


def test_finish_counts_what_it_works_on_more_and_less() -> None:
    who = member()
    who.see(document(2, [0, 0]))
    change = who.next_change(0.0)
    assert change is not None
    who.begin(change)
    assert who.finish(change) == (2, 0)
    who.see(document(3, [0, 1]))
    change = who.next_change(0.0)
    assert change is not None
    assert who.finish(change) == (0, 1)
