"""Turns, slots and parking, promise by promise. Whole histories are in test_fair_model, the contract in
tests/conformance/test_fairness.py."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.config import TopicConfig
from heapline.contract.message import Outgoing
from heapline.core.entries import Replay
from heapline.core.events import Acked, Enqueued, Grant, Leased
from heapline.core.fairness import turns
from heapline.core.fairness.keys import NO_KEY, KeyHashes, hash_of
from heapline.core.fairness.turns import FairShare
from heapline.core.heap.run_heap import RunHeap
from heapline.core.now import Now
from heapline.core.order import TURN_MAX, Ordering
from heapline.core.partition import Partition
from heapline.core.record import after_delivery, attempts_column
from heapline.engine.columns import Columns
from heapline.engine.duplicates import give_turns
from heapline.engine.topic import Topic
from tests.unit.core.naive import NaiveTurns
from tests.unit.core.partition_rig import Rig
from tests.unit.core.rig_journal import START, middle

NOW = Now(START, START)


def column(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


class Line:
    """A partition without a model, for many messages."""

    def __init__(self, **config: Any) -> None:
        self.topic = Topic("jobs", TopicConfig(fairness="keys", **config), NOW, middle)
        self.topic.settle()
        self.p: Partition = self.topic.partitions[0]
        self._at = 512

    def enqueue(self, key: str | None, count: int, priority: int = 0) -> list[int]:
        columns = Columns([Outgoing(b"", priority, fairness_key=key)] * count)
        rows, _ = columns.fill(*NOW)
        rows["id"] = self.p.state.ids.take(count, NOW.steady)
        hashes = give_turns(self.p, rows, columns)
        positions = self.topic.layout.pack(1, self._at + np.arange(count) * 16, 0)
        self._at += count * 16
        self.p.state.apply(Enqueued(0, 0, count, 1), NOW.steady, rows, positions, hashes)
        ids: list[int] = rows["id"].tolist()
        return ids

    def pop(self, count: int = 1) -> list[int]:
        rows = self.p.eligible(count)
        if not len(rows.ids):
            return []
        grant = Grant(len(rows.ids), NOW.steady + 1000, None, None)
        attempts = attempts_column(after_delivery(rows.positions))
        self.p.state.apply(self.p.decide_lease(rows.ids, attempts, [grant], NOW, 1), NOW.steady)
        ids: list[int] = rows.ids.tolist()
        return ids

    def ack(self, ids: list[int]) -> None:
        tokens = [self.p.entries.leases.by_id[id][0] for id in ids]
        self.p.state.apply(Acked(column(*ids), column(*tokens)), NOW.steady)


# -- turns -------------------------------------------------------------------------------------------------------------

BATCHES = st.lists(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), min_size=1, max_size=8), max_size=12)


@given(BATCHES, st.lists(st.integers(0, 20), max_size=12), st.booleans())
def test_turns_of_batches_are_those_of_messages_one_by_one(batches: Any, served: list[int], prune: bool) -> None:
    fair, again, naive = FairShare(), FairShare(), NaiveTurns()
    given_turns: list[tuple[int, int]] = []
    with mock.patch.object(turns, "_TABLE_MIN", 0 if prune else 1024):
        for number, batch in enumerate(batches):
            priorities, keys = column(*(p for p, _ in batch)), column(*(k for _, k in batch))
            taken = fair.take(priorities, keys)
            assert taken.tolist() == [naive.take(p, str(k)) for p, k in batch]
            again.observe(Ordering.with_turns(priorities, taken), keys)
            given_turns += zip(priorities.tolist(), taken.tolist(), strict=True)
            if number < len(served):  # any of the ready messages is leased
                priority, turn = given_turns[served[number] % len(given_turns)]
                for share in (fair, again):
                    share.advance(column(Ordering.with_turns(priority, turn)))
                naive.served(priority, turn)
        probe = column(-1, 0, 1, 0), column(0, 1, 2, 3)
        thawed = FairShare()
        thawed.load_state(fair.to_state())
        expected = [naive.take(p, str(k)) for p, k in zip(*(c.tolist() for c in probe), strict=True)]
        assert fair.take(*probe).tolist() == again.take(*probe).tolist() == thawed.take(*probe).tolist() == expected


@settings(max_examples=30)
@given(
    queues=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    served=st.integers(0, 600),
    chunk=st.integers(1, 50),
)
def test_new_key_is_served_in_turn_despite_long_queues_of_others(queues: list[int], served: int, chunk: int) -> None:
    line = Line()
    for number, length in enumerate(queues):
        line.enqueue(f"old {number}", length)
    while served > 0 and (ids := line.pop(min(chunk, served))):
        line.ack(ids)
        served -= len(ids)
    mine = set(line.enqueue("new", 10))
    pops = 0
    while mine:
        ids = line.pop()
        mine -= set(ids)
        pops += 1
    assert pops <= 11 * (len(queues) + 1)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), min_size=1, max_size=8))
def test_keys_with_waiting_messages_are_served_equally(batches: list[tuple[str, int]]) -> None:
    line = Line()
    owner: dict[int, str] = {}
    for key, count in batches:
        owner |= dict.fromkeys(line.enqueue(key, count), key)
    left = Counter(owner.values())
    served: Counter[str] = Counter()
    for _ in range(len(owner)):
        (id,) = line.pop()
        served[owner[id]] += 1
        left[owner[id]] -= 1
        waiting = [served[key] for key in left if left[key]]
        assert not waiting or max(waiting) - min(waiting) <= 1


def test_turns_stop_at_the_highest_and_never_reach_the_priority() -> None:
    fair = FairShare()
    fair.observe(column((0 << 42) | (TURN_MAX - 1)), column(7))
    turns = fair.take(column(0, 0, 0), column(7, 7, 7))
    assert turns.tolist() == [TURN_MAX] * 3
    assert (Ordering.with_turns(column(-1, 0, 0), turns) >> 42).tolist() == [-1, 0, 0]


def test_turns_below_virtual_time_are_forgotten() -> None:
    with mock.patch.object(turns, "_TABLE_MIN", 16):
        line = Line()
        fair = line.p.fairness.share
        assert fair is not None
        for start in range(0, 2000, 100):
            for number in range(start, start + 20):
                line.enqueue(f"tenant {number}", 1)
                line.enqueue("one", 1, priority=number)
            while ids := line.pop(1000):
                line.ack(ids)
            line.p.maintain(NOW, 1000)
            assert fair.entries <= 80, "keys whose turns are past, and priorities without messages"
    assert len(line.p.entries.key_hashes or ()) == 0


def test_priority_in_use_is_not_forgotten() -> None:
    with mock.patch.object(turns, "_TABLE_MIN", 4):
        line = Line()
        line.enqueue("a", 3)
        line.pop(2)
        for number in range(1, 50):
            line.enqueue("a", 1, priority=-number)
            line.ack(line.pop(1))
            line.p.maintain(NOW, 1000)
            line.enqueue("a", 1)
        assert (line.p.eligible(100).keys & TURN_MAX).tolist() == list(range(3, 53))


def test_an_active_key_takes_about_90_bytes() -> None:
    fair = FairShare()
    count = 5_000
    hashes = np.arange(1, count + 1, dtype=np.int64) << 40
    tracemalloc.start()
    fair.take(np.zeros(count, dtype=np.int64), hashes)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fair.entries == count
    assert used / count < 140


def test_rank_counts_priorities_only_where_keys_take_turns() -> None:
    assert Ordering("max", turns=True).rank_key(Ordering.with_turns(~5, 77)) == ~5
    assert Ordering("max", turns=True).priority(Ordering.with_turns(~5, 77)) == 5
    assert Ordering("min").rank_key(1 << 50) == 1 << 50


# -- parking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", [1_000, 30_000])
def test_blocked_messages_are_searched_once(blocked: int) -> None:
    """The work of pops does not grow with the number of blocked messages."""
    line = Line(max_inflight_per_key=1)
    line.enqueue("blocked", blocked)
    line.enqueue("free", 1)
    assert len(line.pop(2)) == 2  # both keys are at their limit
    assert line.pop() == []
    others = [line.enqueue(f"key {i}", 1)[0] for i in range(50)]
    looked = 0
    peek = RunHeap.peek

    def counting(heap: RunHeap, n: int) -> Any:
        nonlocal looked
        rows = peek(heap, n)
        looked += len(rows.ids)
        return rows

    work = line.p.entries.heap.work
    with mock.patch.object(RunHeap, "peek", counting):
        for _ in others:
            ids = line.pop()
            line.ack(ids)
        for _ in range(50):
            assert line.pop() == []
    assert looked <= 4 * len(others)
    assert line.p.entries.heap.work - work <= 100 * len(others)
    assert line.p.entries.blocked == blocked - 1


def test_equal_entries_of_a_rescheduled_message_do_not_keep_another_one_parked() -> None:
    rig = Rig(fairness="keys", max_inflight_per_key=2)
    first, second, moved, last = rig.enqueue(*[Outgoing(b"", fairness_key="a")] * 4)
    assert rig.pop(4) == [first, second]
    rig.reschedule(moved, due=rig.now.steady)  # immediately: it keeps its turn
    rig.check(look=True)  # parks it again, next to its old entry
    rig.ack(first)
    rig.ack(second)
    assert rig.pop(4) == [moved, last]
    rig.everywhere()


def test_message_behind_an_expired_one_is_unparked() -> None:
    rig = Rig(fairness="keys", max_inflight_per_key=1)
    first, _, last = rig.enqueue(
        Outgoing(b"", fairness_key="a"), Outgoing(b"", fairness_key="a", ttl=1.0), Outgoing(b"", fairness_key="a")
    )
    assert rig.pop(3) == [first]
    rig.check(look=True)
    rig.ack(first)
    rig.advance(2000)
    rig.tick()
    assert rig.pop(3) == [last]
    rig.everywhere()


@pytest.mark.parametrize("few", [1, 256])
def test_record_of_a_parked_message_can_be_moved(few: int) -> None:
    with mock.patch("heapline.core.fairness.keys.FEW_ROWS_MAX", few):
        rig = Rig(fairness="keys", max_inflight_per_key=1)
        ids = rig.enqueue(*[Outgoing(b"", fairness_key="a")] * 4)
        assert rig.pop(4) == ids[:1]
        rig.nack(ids[0], backoff=0)
        rig.pop(4)
        rig.check(look=True)
        assert rig.p.entries.blocked == 3
        rig.roll()
        rig.move(ids[1:3])
        rig.check()
        rig.ack(ids[0])
        rig.everywhere()


def test_journal_that_leased_a_message_past_one_without_a_key_does_not_replay() -> None:
    line = Line()
    line.enqueue(None, 1)
    (wanted,) = line.enqueue("a", 1)
    grants = [Grant(1, NOW.steady + 1000, None, None)]
    with pytest.raises(Replay, match="leased messages that were not first"):
        line.p.state.apply(Leased(column(wanted), b"\x01", grants, NOW.steady, 1), NOW.steady)


def test_journal_that_leased_past_a_blocked_message_and_then_that_one_replays() -> None:
    rig = Rig(fairness="keys", max_inflight_per_key=1)
    a1, a2, b1, b2 = rig.enqueue(*(Outgoing(b"", fairness_key=key) for key in "aabb"))
    assert rig.pop(2) == [a1, b1]
    rig.ack(b1)
    assert rig.pop(2) == [b2]
    rig.everywhere()
    rig.ack(a1)
    assert rig.pop(2) == [a2]
    rig.everywhere()


@pytest.mark.parametrize("limit_now", [0, 1, 3])
def test_journal_replays_whatever_the_limit_is_now(limit_now: int) -> None:
    rig = Rig(fairness="keys", max_inflight_per_key=1)
    rig.enqueue(*(Outgoing(b"", fairness_key=key) for key in "aaaaaabbb"))
    for _ in range(3):
        ids = rig.pop(9)
        assert len(ids) == 2
        rig.ack(ids[0])
        rig.release(ids[1])
    rig.configure(max_inflight_per_key=limit_now)
    rig.everywhere()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 60), max_size=6)), max_size=20),
    st.booleans(),
)
def test_key_hashes_agree_with_a_dict(steps: list[tuple[int, list[int]]], compact: bool) -> None:
    with mock.patch("heapline.core.fairness.keys._GONE_MIN", 0 if compact else 1024):
        found, model, id = KeyHashes(), dict[int, int](), 0
        for count, gone in steps:
            new = {id + i + 1: (id + i) % 7 for i in range(count)}
            id += count
            found.append(column(*new), column(*new.values()))
            model |= new
            leave = sorted(model.keys() & set(gone))
            found.forget(column(*leave))
            for i in leave:
                del model[i]
            assert len(found) == len(model)
            assert found.of(column(*model)).tolist() == list(model.values())
            ids, hashes, is_gone = found.to_state()
            again = KeyHashes.from_state([ids.tobytes(), hashes.tobytes(), is_gone.tobytes()])
            assert (len(again), again.of(column(*model)).tolist()) == (len(model), list(model.values()))
        assert found.of_one(id + 1) == NO_KEY


def test_hash_of_a_fairness_key_never_changes() -> None:
    assert hash_of(b"tenant") == -6_932_175_856_843_967_324
    assert hash_of(b"") != NO_KEY


# -- off ---------------------------------------------------------------------------------------------------------------


def test_topic_without_fairness_keeps_no_fairness_state() -> None:
    topic = Topic("jobs", TopicConfig(), NOW, middle)
    (p,) = topic.partitions
    assert (topic.fair, p.fairness, p.entries.key_hashes) == (None, None, None)
    rows, smalls = Columns([Outgoing(b"x", 3, "k")]).fill(*NOW)
    assert give_turns(p, rows, Columns([Outgoing(b"x", 3, "k")])) is None
    assert (rows["turn"].tolist(), rows["fairness_len"].tolist(), smalls) == ([0], [0], [b"k"])
