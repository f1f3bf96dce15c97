from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from heapline.contract.errors import SnapshotCorrupt, StaleEpoch, UnknownFormat
from heapline.core.dedup.sequences import SequenceWindow
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, NEW, NO_ID, STALE, Verdict, fingerprint


def seqs(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def prints(*values: int) -> Any:
    return np.array(values, dtype=np.uint32)


def opened(**private: int) -> SequenceWindow:
    window = SequenceWindow(**private)
    window.open("p", 1, 4, now=0)
    return window


def reloaded(window: SequenceWindow) -> SequenceWindow:
    return SequenceWindow.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(window.to_state())))


class Model:
    """Sequences of one producer in plain dicts; uses chunks only as the unit of expiry."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.rows: dict[int, tuple[int, int]] = {}
        self.times: dict[int, int] = {}
        self.answered = self.forgotten = 0

    def check(self, sequence: list[int], marks: list[int]) -> list[tuple[int, int, int]]:
        out, batch = [], dict[int, int]()
        for row, (seq, mark) in enumerate(zip(sequence, marks, strict=True)):
            if seq < self.answered:
                out.append((STALE, NO_ID, NO_ID))
            elif seq in self.rows:
                first, known = self.rows[seq]
                out.append((DUPLICATE if mark == known else CONFLICT, first, NO_ID))
            elif seq < self.forgotten:
                out.append((STALE, NO_ID, NO_ID))
            elif seq in batch:
                out.append((DUPLICATE if mark == marks[batch[seq]] else CONFLICT, NO_ID, batch[seq]))
            else:
                batch[seq] = row
                out.append((NEW, NO_ID, NO_ID))
        return out

    def record(self, seq: int, message_id: int, mark: int, now: int) -> None:
        self.rows[seq] = message_id, mark
        self.times[seq >> self.bits] = now

    def answer(self, below: int) -> None:
        self.answered = max(self.answered, below)
        self.rows = {seq: row for seq, row in self.rows.items() if seq >= self.answered}

    def expire(self, limit: int) -> None:
        for chunk in [c for c, at in self.times.items() if at <= limit]:
            del self.times[chunk]
            for seq in [s for s in self.rows if s >> self.bits == chunk]:
                del self.rows[seq]
                self.forgotten = max(self.forgotten, seq + 1)


def rows_of(verdict: Verdict) -> list[tuple[int, int, int]]:
    columns = verdict.status.tolist(), verdict.first_ids.tolist(), verdict.twins.tolist()
    return list(zip(*columns, strict=True))


class SequencesAgainstModel(RuleBasedStateMachine):
    @initialize(bits=st.integers(1, 4))
    def start(self, bits: int) -> None:
        self.window = SequenceWindow(_chunk_bits=bits)
        self.bits, self.now, self.next_id, self.top = bits, 0, 1, 0
        self.epoch = {"p": 1, "q": 1}
        self.models = {"p": Model(bits), "q": Model(bits)}
        for name in self.epoch:
            self.window.open(name, 1, 4, self.now)

    @rule(
        name=st.sampled_from("pq"),
        jumps=st.lists(st.integers(-12, 6), min_size=1, max_size=30) | st.just([0, *[1] * 40]) | st.just([0]),
        other=st.sampled_from([0, 0, 0, 1]),
        passed=st.integers(0, 20),
    )
    def enqueue(self, name: str, jumps: list[int], other: int, passed: int) -> None:
        self.now += passed
        asked = [max(0, self.top + jump) for jump in np.cumsum(jumps).tolist()]
        marks = [seq * 7 + (other if row % 3 == 0 else 0) for row, seq in enumerate(asked)]
        verdict = self.window.check(name, self.epoch[name], seqs(*asked), prints(*marks))
        assert rows_of(verdict) == self.models[name].check(asked, marks)
        assert verdict.all_new == (verdict.status == NEW).all()
        new = np.flatnonzero(verdict.status == NEW)
        ids = np.arange(self.next_id, self.next_id + len(new))
        self.next_id += len(new)
        self.window.record(name, self.epoch[name], seqs(*asked)[new], ids, prints(*marks)[new], self.now)
        for row, message_id in zip(new.tolist(), ids.tolist(), strict=True):
            self.models[name].record(asked[row], message_id, marks[row], self.now)
        self.top = max(self.top, *asked)
        assert len(self.window) == sum(len(model.rows) for model in self.models.values())

    @rule(name=st.sampled_from("pq"), back=st.integers(-5, 40))
    def answered(self, name: str, back: int) -> None:
        below = max(0, self.top - back)
        self.window.answered(name, self.epoch[name], below)
        self.models[name].answer(below)

    @rule(window_ms=st.integers(0, 60), passed=st.integers(0, 30))
    def expire(self, window_ms: int, passed: int) -> None:
        self.now += passed
        self.window.expire(self.now, window_ms)
        for model in self.models.values():
            model.expire(self.now - window_ms)

    @rule(name=st.sampled_from("pq"))
    def open_again(self, name: str) -> None:
        self.epoch[name] += 1
        self.window.open(name, self.epoch[name], 4, self.now)
        self.models[name] = Model(self.bits)

    @rule()
    def reload(self) -> None:
        self.window = reloaded(self.window)


TestSequencesAgainstModel = SequencesAgainstModel.TestCase


def test_duplicate_gets_the_first_id_and_another_payload_is_a_conflict() -> None:
    window = opened()
    window.record("p", 1, seqs(0, 1, 2), seqs(10, 11, 12), prints(5, 6, 7), now=0)
    verdict = window.check("p", 1, seqs(1, 2, 3), prints(6, 99, 8))
    assert verdict.status.tolist() == [DUPLICATE, CONFLICT, NEW]
    assert verdict.first_ids.tolist() == [11, 12, NO_ID]
    assert not verdict.all_new


def test_repeat_within_one_call_points_at_the_first_row() -> None:
    verdict = opened().check("p", 1, seqs(8, 3, 8, 3, 8), prints(1, 2, 1, 9, 1))
    assert verdict.status.tolist() == [NEW, NEW, DUPLICATE, CONFLICT, DUPLICATE]
    assert verdict.twins.tolist() == [NO_ID, NO_ID, 0, 1, 0]
    assert verdict.first_id(4, seqs(70, 71, 72, 73, 74)) == 70


@pytest.mark.parametrize("epoch", [1, 3])
def test_epoch_behind_or_ahead_of_the_current_is_refused(epoch: int) -> None:
    window = opened()
    window.open("p", 2, 4, now=0)
    for call in (
        lambda: window.check("p", epoch, seqs(0), prints(0)),
        lambda: window.record("p", epoch, seqs(0), seqs(1), prints(0), 0),
        lambda: window.answered("p", epoch, 5),
    ):
        with pytest.raises(StaleEpoch) as caught:
            call()
        assert caught.value.current == 2


def test_producer_that_was_never_opened_is_refused() -> None:
    with pytest.raises(StaleEpoch):
        opened().check("nobody", 1, seqs(0), prints(0))
    assert opened().epoch_of("nobody") is None
    assert opened().partitions_of("nobody") is None


def test_new_epoch_forgets_the_sequences_of_the_old_and_keeps_its_own_partition_count() -> None:
    window = opened()
    window.record("p", 1, seqs(0), seqs(10), prints(5), now=0)
    window.open("p", 2, 16, now=1)
    assert (window.epoch_of("p"), window.partitions_of("p"), len(window)) == (2, 16, 0)
    assert window.check("p", 2, seqs(0), prints(6)).all_new


def test_opening_the_current_epoch_again_changes_nothing_and_an_older_one_is_refused() -> None:
    window = opened()
    window.open("p", 2, 4, now=0)
    window.record("p", 2, seqs(0), seqs(10), prints(5), now=0)
    window.open("p", 2, 4, now=1)
    assert window.check("p", 2, seqs(0), prints(5)).status.tolist() == [DUPLICATE]
    with pytest.raises(StaleEpoch):
        window.open("p", 1, 4, now=2)


def test_answered_sequences_are_stale_even_if_they_were_never_seen() -> None:
    window = opened()
    window.record("p", 1, seqs(1, 5), seqs(10, 11), prints(0, 0), now=0)
    window.answered("p", 1, 5)
    window.answered("p", 1, 2)
    verdict = window.check("p", 1, seqs(1, 4, 5, 6), prints(0, 0, 0, 0))
    assert verdict.status.tolist() == [STALE, STALE, DUPLICATE, NEW]
    assert window.answered_below_of("p") == 5
    window.answered("p", 1, 1000)
    assert window.check("p", 1, seqs(999, 1000), prints(0, 0)).status.tolist() == [STALE, NEW]


def test_sequence_forgotten_by_age_is_stale_never_new() -> None:
    window = opened(_chunk_bits=2)
    window.record("p", 1, seqs(0, 1, 2), seqs(10, 11, 12), prints(0, 0, 0), now=0)
    window.record("p", 1, seqs(9), seqs(13), prints(0), now=50)
    assert window.expire(now=99, window_ms=100) == 0
    assert window.expire(now=100, window_ms=100) == 3
    window = reloaded(window)
    assert window.check("p", 1, seqs(1, 2, 3, 9), prints(0, 0, 0, 0)).status.tolist() == [STALE, STALE, NEW, DUPLICATE]


def test_negative_sequence_is_stale() -> None:
    assert opened().check("p", 1, seqs(-1), prints(0)).status.tolist() == [STALE]


def test_memory_of_answered_rows_is_reused() -> None:
    window = opened()
    for start in range(0, 16_000, 100):
        batch = np.arange(start, start + 100)
        window.record("p", 1, batch, batch + 1, batch.astype(np.uint32), now=0)
        window.answered("p", 1, start + 50)
    assert len(window) == 50
    assert window.nbytes < 10_000


def test_dense_sequences_take_less_than_16_bytes_each() -> None:
    window = opened()
    for start in range(0, 1 << 17, 1 << 12):
        batch = np.arange(start, start + (1 << 12))
        window.record("p", 1, batch, batch + 1, batch.astype(np.uint32), now=0)
    assert len(window) == 1 << 17
    assert window.nbytes / len(window) < 16


def test_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(UnknownFormat):
        SequenceWindow.from_state({**opened().to_state(), "version": 2})


@pytest.mark.parametrize("part", [2, 3, 4])
def test_damaged_snapshot_is_refused(part: int) -> None:
    window = opened()
    window.record("p", 1, seqs(0, 1, 2), seqs(10, 11, 12), prints(5, 6, 7), now=0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(window.to_state()))
    chunk = state["producers"][0][6][0]
    chunk[part] = chunk[part][:-1]
    with pytest.raises(SnapshotCorrupt):
        SequenceWindow.from_state(state)
    chunk[part] = chunk[part][: -(len(chunk[part]) % 4) or None][:-4]
    with pytest.raises(SnapshotCorrupt):
        SequenceWindow.from_state(state)


def test_fingerprint_is_32_bits_and_pinned_because_it_is_stored() -> None:
    assert [fingerprint(b""), fingerprint(b"hello")] == [0x38D394C2, 0x5C62DCFD]
    assert fingerprint(b"hello") < 1 << 32


def test_single_rows_out_of_order_are_all_found_with_their_own_ids() -> None:
    window = opened()
    order = [50, 10, 30, 60, 20, 40, 0]
    for seq in order:
        window.record("p", 1, seqs(seq), seqs(seq + 100), prints(seq + 7), now=0)
    for seq in order:
        assert rows_of(window.check("p", 1, seqs(seq), prints(seq + 7))) == [(DUPLICATE, seq + 100, NO_ID)]
        assert rows_of(window.check("p", 1, seqs(seq), prints(0))) == [(CONFLICT, seq + 100, NO_ID)]
    assert rows_of(window.check("p", 1, seqs(25), prints(0))) == [(NEW, NO_ID, NO_ID)]
    assert window.check("p", 1, seqs(*sorted(order)), prints(*(s + 7 for s in sorted(order)))).first_ids.tolist() == [
        seq + 100 for seq in sorted(order)
    ]


@pytest.mark.parametrize("again", [[3], [3, 4]])
def test_sequence_recorded_twice_keeps_its_first_id(again: list[int]) -> None:
    window = opened()
    window.record("p", 1, seqs(3, 9), seqs(10, 11), prints(5, 5), now=0)
    window.record("p", 1, seqs(*again), seqs(*(90 + seq for seq in again)), prints(*(6 for _ in again)), now=0)
    assert rows_of(window.check("p", 1, seqs(3), prints(5))) == [(DUPLICATE, 10, NO_ID)]
    assert len(window) == 1 + len(again)


def test_single_answered_sequence_is_stale_even_if_never_seen() -> None:
    window = opened()
    window.record("p", 1, seqs(1, 5), seqs(10, 11), prints(0, 0), now=0)
    window.answered("p", 1, 8)
    for seq in (1, 5, 7):
        assert rows_of(window.check("p", 1, seqs(seq), prints(0))) == [(STALE, NO_ID, NO_ID)]
    assert window.check("p", 1, seqs(8), prints(0)).all_new


def test_temporary_producer_keeps_its_last_use_across_a_reload_until_forgotten() -> None:
    window = opened()
    window.open("sdk-1", 1, 4, now=10)
    window.open("sdk-2", 1, 4, now=20)
    window.record("sdk-1", 1, seqs(0), seqs(100), prints(7), now=30)
    for each in (window, reloaded(window)):
        assert each.passing() == {"sdk-1": 30, "sdk-2": 20}
        each.forget(["sdk-1"])
        assert (each.epoch_of("sdk-1"), each.epoch_of("sdk-2"), each.epoch_of("p")) == (None, 1, 1)


def test_state_without_temporary_producers_is_read() -> None:
    state = opened().to_state()
    del state["passing"]
    assert SequenceWindow.from_state(state).epoch_of("p") == 1
