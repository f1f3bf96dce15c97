"""What the partition promises, sentence by sentence; and what may be left lying about without being delivered.

Each test drives a real partition and the naive one together (`partition_rig`): a command whose outcome differs from
the naive one's fails by itself, and `check` compares everything else.
"""

from __future__ import annotations

import numpy as np
import pytest

from heapline.core import partition
from heapline.core.dedup import CONFLICT, DUPLICATE, NEW
from heapline.core.events import (
    KIND_NAMES, Acked, AnyEvent, DeadDeleted, DeadLettered, Expired, Extended, Fired, FiredCount, Grant, LeaseExpired,
    Leased, Moved, Nacked, Purged, Released, Replayed,
)  # fmt: skip
from heapline.core.idempotency import key_hash
from heapline.core.state import FROM_LEASE, Replay
from heapline.model import Now, Outgoing, from_ms
from tests.unit.core.naive import AGING_RATE
from tests.unit.core.partition_rig import START, Rig

SECOND, DAY = 1000, 86_400_000


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_delayed_message_that_was_reprioritised_is_delivered() -> None:
    """Its old timer and its new one fall due together, but carry different keys."""
    for old, new in ((5, 1), (1, 5)):
        rig = Rig()
        (a,) = rig.enqueue(Outgoing(b"", priority=old, delay=1))
        rig.reschedule(a, priority=new)
        rig.advance_to(a)
        rig.tick()
        rig.check(look=True)
        assert rig.pop() == [a]
        rig.check(look=True)


def test_reprioritised_message_with_ttl_expires_once() -> None:
    """The end of its life stands in the wheel twice, at the same moment."""
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b"", ttl=1), Outgoing(b""))
    rig.reschedule(a, priority=3)
    rig.advance(SECOND)
    (event,) = rig.tick()
    assert isinstance(event, Expired)
    assert event.ids.tolist() == [a]
    rig.check(look=True)
    assert rig.pop(5) == [b]


def test_leased_message_that_was_reprioritised_lapses_once() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", ttl=1))
    rig.reschedule(a, priority=3)
    rig.pop()
    rig.advance(SECOND)
    (event,) = rig.tick()
    assert isinstance(event, Expired)
    assert event.leased.tolist() == [a]


def test_each_lease_given_to_an_ack_is_judged_by_its_own_token() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b""))
    rig.pop()
    stale = rig.token(a)
    rig.release(a)
    rig.pop()
    good = rig.token(a)
    rig.ack(a)
    assert rig.ack(a, a, tokens=[stale, good]) == [a]
    assert rig.ack(a, a, tokens=[good, stale]) == [a]


def test_message_rescheduled_into_the_past_lives_its_ttl_from_now() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", ttl=10, delay=100))
    rig.reschedule(a, due=rig.now.wall - DAY, wall=True)
    assert rig.tick() == []
    rig.check(look=True)
    rig.advance(10 * SECOND - 1)
    assert rig.tick() == []
    rig.advance(1)
    rig.tick()
    assert rig.state_of(a) == "expired"


def test_message_rescheduled_over_and_over_leaves_bounded_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "GARBAGE_ROWS_MIN", 8)
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b"", ttl=100), Outgoing(b""))
    for i in range(60):
        rig.reschedule(a, priority=i % 7)
        rig.reschedule(a, due=rig.now.wall + 5000 + i % 7, wall=True)
        rig.reschedule(a, due=rig.now.steady + 5000 + i % 5)
        rig.reschedule(a, due=0)
        rig.p.maintain(rig.now, 1000)
        rig.check()
    p = rig.p
    assert len(p.heap) + len(p.delays) + len(p.calendar) < 20
    assert max(len(p.ttls), len(p.ttls_wall)) < 20
    rig.check(look=True)
    assert rig.pop(5) == [b, a]


@pytest.mark.parametrize(
    "event",
    [
        Leased(column(7), b"\1", [Grant(1, START + 1, None, None)], START, 1),
        Acked(column(7), column(0)),
        Nacked(column(7), column(0), column(0), None),
        LeaseExpired(column(7), column(0)),
        Released(column(7), column(0), 1),
        Extended(column(7), column(0), column(START)),
        DeadLettered(column(7), "boom", START, True),
        Replayed(column(7), column(0), column(0), 1),
        DeadDeleted(column(7)),
        Fired(column(7), column(0), False, 1),
        FiredCount(1, True, 1),
        Purged(5, START),
        Expired(column(7), column(0), bytes([FROM_LEASE]), column(), START),
    ],
    ids=lambda event: KIND_NAMES[type(event)],
)
def test_journal_that_does_not_fit_is_reported(event: AnyEvent) -> None:
    rig = Rig()
    rig.enqueue(Outgoing(b""))
    with pytest.raises(Replay):
        rig.p.apply(event, START)
