"""Prepared parts in one partition: invisible until committed, kept by journal and snapshot, attached as columns."""

from __future__ import annotations

import numpy as np
import pytest

from heapline.contract.errors import IdempotencyConflict, SnapshotCorrupt
from heapline.contract.message import Outgoing
from heapline.core import prepared
from heapline.core.entries import Replay
from heapline.core.events import EMPTY, BatchCommitted, ProducerRows
from heapline.core.prepared import Prepared, Share
from tests.unit.core.partition_rig import Rig

SECOND = 1000


def numbered(ids: list[int], seqs: list[int], prints: list[int] | None = None) -> Share:
    """A share whose messages carry sequences of producer "p"."""
    rows = np.zeros(len(ids), dtype=prepared.KEPT)
    rows["id"] = ids
    marks = np.array(prints or [0] * len(ids), dtype=np.uint32).tobytes()
    producers = [ProducerRows("p", 1, 0, np.arange(len(ids)), np.array(seqs, dtype=np.int64), marks)]
    column = np.array(ids, dtype=np.int64)
    return Share(["jobs"], b"", 0, rows, column, column, column, EMPTY, EMPTY, producers, None)


def held(**parts: Share) -> Prepared:
    found = Prepared()
    for part, share in parts.items():
        found._keep("b", part, share)
    return found


def test_prepared_messages_are_live_and_invisible_until_the_commit() -> None:
    rig = Rig()
    ids = rig.prepare("b", "1", Outgoing(b"x"), Outgoing(b"y", delay=1))
    assert rig.p.head() is None
    assert rig.p.next_wake_in(rig.now) is None
    assert rig.p.entries.prepared.count == 2
    rig.everywhere()
    assert rig.commit("b", ["1"]) == ids
    rig.everywhere()
    assert rig.pop(5) == ids[:1]


def test_commit_drops_parts_that_it_does_not_name() -> None:
    rig = Rig()
    rig.prepare("b", "loser", Outgoing(b"x"))
    winner = rig.prepare("b", "winner", Outgoing(b"x"))
    assert rig.commit("b", ["winner"]) == winner
    assert not rig.p.entries.prepared.batches
    rig.everywhere()


def test_commit_without_messages_here_drops_unnamed_parts_and_takes_a_row() -> None:
    rig = Rig()
    rig.prepare("b", "loser", Outgoing(b"x"))
    offset = rig.p.state.offset
    assert rig.commit("b", []) == []
    assert rig.p.state.offset == offset + 1
    rig.everywhere()


def test_messages_take_their_offsets_at_the_commit() -> None:
    rig = Rig()
    offset = rig.p.state.offset
    rig.prepare("b", "1", *[Outgoing(b"x")] * 5)
    assert rig.p.state.offset == offset + 1
    rig.commit("b", ["1"])
    assert rig.p.state.offset == offset + 6


def test_message_that_became_due_while_prepared_is_ready_after_a_tick() -> None:
    rig = Rig()
    (late, ended) = rig.prepare("b", "1", Outgoing(b"x", delay=1), Outgoing(b"x", ttl=1))
    rig.advance(5 * SECOND)
    rig.tick()
    rig.commit("b", ["1"])
    assert rig.p.next_wake_in(rig.now) == 0
    rig.tick()
    assert rig.pop(5) == [late]
    assert rig.model.messages[ended].state == "expired"
    rig.everywhere()


def test_equal_priorities_are_served_by_the_age_of_the_prepare() -> None:
    rig = Rig()
    (old,) = rig.prepare("b", "1", Outgoing(b"x"))
    (new,) = rig.enqueue(Outgoing(b"x"))
    rig.commit("b", ["1"])
    assert rig.pop(2) == [old, new]


def test_purge_does_not_affect_prepared_parts() -> None:
    rig = Rig()
    ids = rig.prepare("b", "1", Outgoing(b"x"))
    rig.enqueue(Outgoing(b"y"))
    assert rig.purge() == 1
    assert rig.commit("b", ["1"]) == ids


def test_rewritten_records_of_prepared_messages_are_found_at_the_commit() -> None:
    rig = Rig()
    ids = rig.prepare("b", "1", Outgoing(b"x"), Outgoing(b"y"))
    frozen = rig.p.entries.prepared.batches["b"]["1"].positions
    before = frozen.tolist()
    rig.roll()
    rig.move(ids[:1])
    assert frozen.tolist() == before, "a snapshot may be reading these"
    rig.everywhere()
    rig.commit("b", ["1"])
    rig.everywhere()


def test_key_of_a_prepared_message_is_in_doubt_for_others_and_known_after_the_commit() -> None:
    rig = Rig()
    (id,) = rig.prepare("b", "1", Outgoing(b"x", idempotency_key="k"))
    assert rig._doubts(["k"], None) == {0: "b"}
    assert rig._doubts(["k"], "b") == {}
    rig.commit("b", ["1"])
    assert rig._doubts(["k"], None) == {}
    assert rig.enqueue(Outgoing(b"x", idempotency_key="k")) == []  # the rig checks that the key has this id
    assert rig.model.keys["k"].id == id


def test_key_of_an_aborted_part_is_free_again() -> None:
    rig = Rig()
    rig.prepare("b", "1", Outgoing(b"x", idempotency_key="k"))
    rig.abort("b")
    rig.everywhere()
    assert len(rig.enqueue(Outgoing(b"other", idempotency_key="k"))) == 1


def test_second_named_part_with_the_same_key_is_omitted() -> None:
    rig = Rig()
    first = rig.prepare("b", "1", Outgoing(b"x", idempotency_key="k"))
    rig.prepare("b", "2", Outgoing(b"x", idempotency_key="k"))
    assert rig.commit("b", ["1", "2"]) == first
    rig.everywhere()


def test_commit_of_contradictory_parts_is_refused() -> None:
    rig = Rig()
    rig.prepare("b", "1", Outgoing(b"x", idempotency_key="k"))
    rig.prepare("b", "2", Outgoing(b"other", idempotency_key="k"))
    assert rig.commit("b", ["1", "2"]) == []
    rig.everywhere()
    assert len(rig.commit("b", ["2"])) == 1


def test_sequences_are_in_doubt_for_others_only() -> None:
    found = held(one=numbered([1, 2, 3], [10, 11, 12]))
    seqs = np.array([9, 11, 12], dtype=np.int64)
    assert found.seqs_in_doubt("p", 1, seqs, "other") == {1: "b", 2: "b"}
    assert found.seqs_in_doubt("p", 1, seqs, "b") == {}
    assert found.seqs_in_doubt("p", 2, seqs, None) == {}
    found.drop("b")
    assert found.seqs_in_doubt("p", 1, seqs, None) == {}


def test_duplicates_by_sequence_are_omitted_in_the_order_of_the_names() -> None:
    found = held(one=numbered([1, 2], [10, 11]), two=numbered([3, 4], [11, 12]))
    assert found.twins("b", ["one", "two"]) == [3]
    assert found.twins("b", ["two", "one"]) == [2]
    assert found.twins("b", ["one"]) == []
    contradicting = held(one=numbered([1], [10], [5]), two=numbered([3], [10], [6]))
    with pytest.raises(IdempotencyConflict):
        contradicting.twins("b", ["one", "two"])


def test_share_without_some_messages_keeps_the_identities_of_the_others() -> None:
    share = numbered([1, 2, 3], [10, 11, 12]).only(np.array([True, False, True]))
    (rows,) = share.producers
    assert (share.ids.tolist(), rows.index.tolist(), rows.seqs.tolist()) == ([1, 3], [0, 1], [10, 12])


def test_large_commit_is_several_events_that_replay_from_any_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "COMMIT_BYTES_MAX", 1)
    rig = Rig()
    ids = [id for part in "123" for id in rig.prepare("b", part, Outgoing(b"x"), Outgoing(b"y"))]
    events = rig.p.entries.prepared.decide_commit("b", ["1", "2", "3"], (), rig.take_seq, rig.now.steady)
    assert [event.more for event in events] == [True, True, False]
    rig.p.place_in_stream(events[0])
    rig.emit(events[0])
    # Killed here: the rest is decided again, and nothing is attached twice.
    shares = rig.replayed().partitions[0].entries.prepared
    rest = shares.decide_commit("b", ["1", "2", "3"], (), rig.take_seq, rig.now.steady)
    assert [id for event in rest for id in event.ids.tolist()] == ids[2:]
    for event in rest:
        rig.p.place_in_stream(event)
        rig.emit(event)
    assert rig.p.eligible(10).ids.tolist() == ids
    assert not rig.p.entries.prepared.batches


def test_commit_of_unprepared_messages_does_not_replay() -> None:
    rig = Rig()
    with pytest.raises(Replay, match="batch_committed"):
        rig.p.state.apply(BatchCommitted(EMPTY, "b", [], 1, 0, False), 0)
    rig.prepare("b", "1", Outgoing(b"x"))
    with pytest.raises(Replay, match="others"):
        rig.p.state.apply(BatchCommitted(np.array([5]), "b", ["1"], 1, 0, False), 0)


def test_snapshot_of_prepared_parts_that_does_not_decode_is_damage() -> None:
    with pytest.raises(SnapshotCorrupt):
        Prepared.from_state([["b", "1", [["jobs"], b"", 0, [b"123"], [[], None]]]])
