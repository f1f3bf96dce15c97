"""Stale entries in heap and wheels are never delivered, fired, counted or kept for long.

The scenarios of the docstring of core/entries.py, by name, and those that the model tests found.
"""

from __future__ import annotations

import numpy as np
import pytest

from heapline.contract.message import Outgoing, from_ms
from heapline.core import entries
from heapline.core.entries import FROM_LEASE, Replay
from heapline.core.events import (
    KIND_NAMES,
    Acked,
    AnyEvent,
    DeadDeleted,
    DeadLettered,
    Expired,
    Extended,
    Fired,
    Grant,
    Leased,
    LeaseExpired,
    Moved,
    Nacked,
    Purged,
    Released,
    Replayed,
)  # fmt: skip
from heapline.core.heap.run_heap import RunHeap
from heapline.core.leases import POSITION
from tests.unit.core.partition_rig import Rig
from tests.unit.core.rig_journal import START

SECOND, DAY = 1000, 86_400_000


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def touched_five_one_five(rig: Rig) -> int:
    """A message with two equal entries in the heap, and one between them that is stale."""
    (a,) = rig.enqueue(Outgoing(b"", priority=5))
    rig.reschedule(a, priority=1)
    rig.reschedule(a, priority=5)
    return a


def test_message_rescheduled_there_and_back_is_delivered_once() -> None:
    rig = Rig()
    a = touched_five_one_five(rig)
    (b,) = rig.enqueue(Outgoing(b"", priority=5))
    assert rig.pop(9) == [a, b]
    assert rig.pop(9) == []
    rig.everywhere()


@pytest.mark.parametrize("back", ["release", "nack", "timeout", "replay"])
def test_message_popped_by_an_older_equal_entry_is_redelivered_once(back: str) -> None:
    rig = Rig()
    a = touched_five_one_five(rig)
    rig.pop(visibility=SECOND)
    if back == "release":
        rig.release(a)
    elif back == "nack":
        rig.nack(a, backoff=0)
    elif back == "timeout":
        rig.advance(SECOND)
        rig.tick()
        rig.advance_to(a)
        rig.tick()
    else:
        rig.bury(a)
        rig.replay_dead([a])
    rig.everywhere()
    assert rig.pop(9) == [a]
    assert rig.pop(9) == []
    rig.ack(a)
    assert rig.pop(9) == []
    rig.everywhere()


def test_message_moved_between_reschedules_is_delivered_once() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", priority=5))
    rig.pop()
    rig.nack(a, backoff=0)
    rig.reschedule(a, priority=1)
    rig.roll()
    rig.move([a])
    rig.reschedule(a, priority=5)
    rig.roll()
    rig.move([a])
    rig.everywhere()
    assert rig.pop(9) == [a]
    assert rig.p.entries.leases.by_id[a][POSITION] & 255 == 2, "attempts survive the move"
    assert rig.pop(9) == []
    rig.everywhere()


def test_timer_rescheduled_there_and_back_fires_once() -> None:
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b"", delay=1), Outgoing(b"", delay=1))
    due = rig.model.messages[a].due
    rig.reschedule(a, due=due + 5)
    rig.reschedule(a, due=due)
    rig.reschedule(a, due=due, wall=True)
    rig.reschedule(a, due=due)
    rig.advance(DAY)
    assert [e.ids.tolist() for e in rig.tick(limit=1) if isinstance(e, Fired)] == [[a], [b]]
    rig.everywhere()
    assert rig.pop(9) == [a, b]


def test_timer_with_many_equal_entries_fires_once_among_others() -> None:
    rig = Rig()
    ids = rig.enqueue(*(Outgoing(b"", delay=1) for _ in range(4)))
    due = rig.model.messages[ids[0]].due
    for _ in range(5):
        rig.reschedule(ids[1], due=due + 5)
        rig.reschedule(ids[1], due=due)
    rig.advance(DAY)
    (event,) = rig.tick()
    assert isinstance(event, Fired)
    assert event.ids.tolist() == ids
    rig.everywhere()


def test_heap_with_many_equal_entries_of_a_message_serves_it_once_among_others() -> None:
    for size in (1, 2, 4):
        rig = Rig()
        ids = rig.enqueue(*(Outgoing(b"", priority=5) for _ in range(4)))
        for _ in range(9):  # more than are kept one by one, so that they are in several runs
            rig.reschedule(ids[1], priority=9)
            rig.reschedule(ids[1], priority=5)
        assert rig.pop(size) + rig.pop(9) == ids
        rig.release(*ids)
        assert rig.purge() == 4
        rig.everywhere()


def test_tick_skips_due_rows_that_are_all_stale() -> None:
    rig = Rig()
    ids = rig.enqueue(*(Outgoing(b"", delay=1) for _ in range(20)), Outgoing(b"", delay=2))
    for id in ids[:20]:
        rig.cancel(id)
    rig.advance(10 * SECOND)
    (event,) = rig.tick(limit=3)
    assert isinstance(event, Fired)
    assert event.ids.tolist() == ids[20:]
    rig.everywhere()


def test_pops_of_any_size_skip_stale_entries() -> None:
    for size in (1, 2, 3, 7, 40):
        rig = Rig()
        ids = rig.enqueue(*(Outgoing(b"", priority=i // 3) for i in range(40)))
        for id in ids[1::3]:
            rig.cancel(id)
        for id in ids[2::3]:
            rig.reschedule(id, priority=100)
        popped: list[int] = []
        while got := rig.pop(size):
            popped += got
        assert popped == ids[0::3] + ids[2::3]
        rig.everywhere()


def test_purge_counts_a_message_with_several_entries_once() -> None:
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b""), Outgoing(b""))
    for _ in range(30):  # so that they are in several runs and chunks
        rig.reschedule(a, priority=9)
        rig.reschedule(a, priority=5)
        rig.reschedule(b, due=START + DAY)
        rig.reschedule(b, due=START + 2 * DAY)
    assert rig.purge() == 2
    rig.everywhere()


@pytest.mark.parametrize("how", ["pop", "purge", "sweep"])
def test_few_changed_messages_among_many_are_found(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heap of its usual size, where a batch is searched as columns."""
    rig = Rig()
    rig.p.entries.heap = RunHeap()
    ids = rig.enqueue(*(Outgoing(b"", priority=i % 7) for i in range(400)))
    for id in ids[::100]:
        for priority in (9, 0, 9, 3):
            rig.reschedule(id, priority=priority)
    for id in ids[50::100]:
        rig.cancel(id)
    if how == "purge":
        assert rig.purge() == 396
    elif how == "sweep":
        monkeypatch.setattr(entries, "GARBAGE_ROWS_MIN", -400)
        rig.p.maintain(rig.now, 1000)
        assert rig.p.entries.stale == 0
    assert len(rig.pop(500)) == (0 if how == "purge" else 396)
    rig.everywhere()


def test_next_snapshot_forgets_names_of_removed_runs() -> None:
    rig = Rig()
    for _ in range(5):
        rig.enqueue(*(Outgoing(b"", delay=1) for _ in range(3)), Outgoing(b""))
        rig.advance(DAY)
        rig.tick()
        rig.take_snapshot(blob_rows_min=1)
        assert rig.snapshot is not None
        names = set(rig.topic.blob_names.values())
        assert names == rig.snapshot.frozen.blobs.keys()
        rig.check(rig.thawed().partitions[0], look=True)
        rig.take_snapshot(blob_rows_min=1)
        assert set(rig.topic.blob_names.values()) == names, "a run keeps its name"
        rig.pop(9)


def test_ttl_from_before_a_reschedule_or_replay_is_ignored() -> None:
    rig = Rig(max_retries_default=0)
    a, b = rig.enqueue(Outgoing(b"", ttl=1), Outgoing(b"", ttl=1))
    rig.reschedule(a, due=rig.now.steady + DAY)
    rig.pop()
    rig.nack(b)
    rig.replay_dead([b], [rig.now.steady + DAY])
    rig.advance(SECOND)
    assert rig.tick() == []
    assert (rig.state_of(a), rig.state_of(b)) == ("delayed", "delayed")
    rig.everywhere()


def test_ttl_on_one_clock_does_not_end_at_the_same_time_of_the_other() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", ttl=5))
    rig.reschedule(a, due=START + SECOND)
    rig.reschedule(a, due=START + SECOND, wall=True)
    rig.set_wall(START - DAY)
    rig.advance(10 * SECOND)
    assert rig.tick() == []
    assert rig.state_of(a) == "delayed"
    rig.everywhere()


def test_expiry_of_a_reprioritised_message_stays_on_its_own_clock() -> None:
    """It was due by wall time, so its life ends by wall time, wherever it waits now."""
    rig = Rig(START + DAY)
    (a,) = rig.enqueue(Outgoing(b"", deliver_at=from_ms(rig.now.wall + SECOND), ttl=10))
    rig.advance(SECOND)
    rig.tick()
    rig.pop()
    rig.nack(a, backoff=3600 * SECOND)
    rig.reschedule(a, priority=1)
    rig.set_wall(rig.now.wall + 10 * SECOND)
    rig.tick()
    assert rig.state_of(a) == "expired"
    rig.everywhere()


def test_record_moved_after_its_message_was_removed_stays_dead() -> None:
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b""), Outgoing(b""))
    rig.cancel(a)
    rows = np.array([rig.records[id] for id in (a, b)])
    rig.roll()
    positions = rig.allot(rows)
    rig.emit(Moved(0, 0, 2), rows, positions)
    assert rig.p.entries.live.count(2) == 1
    rig.everywhere()


def test_delayed_message_that_was_reprioritised_is_delivered() -> None:
    """Its old timer and its new one become due together but have different keys."""
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
    """The end of its life is in the wheel twice, at the same time."""
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


def test_message_rescheduled_repeatedly_leaves_bounded_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "GARBAGE_ROWS_MIN", 8)
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
    assert len(p.entries.heap) + len(p.entries.delays) + len(p.entries.calendar) < 20
    assert max(len(p.entries.ttls), len(p.entries.ttls_wall)) < 20
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
        Fired(False, 1, column(7), column(0)),
        Fired(True, 1, count=1),
        Purged(5, START),
        Expired(column(7), column(0), bytes([FROM_LEASE]), column(), START),
    ],
    ids=lambda event: KIND_NAMES[type(event)],
)
def test_inconsistent_journal_is_reported(event: AnyEvent) -> None:
    rig = Rig()
    rig.enqueue(Outgoing(b""))
    with pytest.raises(Replay):
        rig.p.state.apply(event, START)
