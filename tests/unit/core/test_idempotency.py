import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.core.dedup.idempotency import PENDING, UNTIL_ACK, WINDOW, KeyWindow, key_hash
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, NEW, NO_ID, Verdict


def column(values: Any, dtype: Any = np.int64) -> Any:
    return np.array(list(values), dtype=dtype)


def record(window: KeyWindow, keys: list[bytes], first_id: int, scope: int = WINDOW, expires_at: int = 100) -> None:
    n = len(keys)
    ids = np.arange(first_id, first_id + n)
    window.record(keys, ids, column([7] * n, np.uint32), column([scope] * n, np.int8), column([expires_at] * n))


def verdict_of(window: KeyWindow, key: bytes, now: int = 0, mark: int = 7) -> tuple[int, int]:
    verdict = window.check([key], column([mark], np.uint32), now)
    return verdict.status.item(0), verdict.first_ids.item(0)


def reloaded(window: KeyWindow, **private: int) -> KeyWindow:
    return KeyWindow.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(window.to_state())), **private)


def rows_of(verdict: Verdict) -> list[tuple[int, int, int]]:
    columns = verdict.status.tolist(), verdict.first_ids.tolist(), verdict.twins.tolist()
    return list(zip(*columns, strict=True))


def hash_of(number: int) -> bytes:
    """Hashes that often share their upper half, as random ones never would."""
    digest = hashlib.blake2b(str(number // 3).encode(), digest_size=8).digest()
    return digest + hashlib.blake2b(str(number).encode(), digest_size=8).digest()


class KeysAgainstModel(RuleBasedStateMachine):
    @initialize(recent=st.integers(1, 6), at_once=st.sampled_from([4, 16, 64]))
    def start(self, recent: int, at_once: int) -> None:
        self.private = {"_recent_max": recent, "_at_once_max": at_once}
        self.window = KeyWindow(**self.private)
        self.model: dict[bytes, tuple[int, int, int, int]] = {}  # hash -> id, fingerprint, scope, expiry
        self.now, self.next_id = 1000, 1

    def known(self, key: bytes) -> tuple[int, int, int, int] | None:
        entry = self.model.get(key)
        return None if entry is None or (entry[2] == WINDOW and entry[3] <= self.now) else entry

    def expected(self, keys: list[bytes], marks: list[int]) -> list[tuple[int, int, int]]:
        out, batch = [], dict[bytes, int]()
        for row, (key, mark) in enumerate(zip(keys, marks, strict=True)):
            entry = self.known(key)
            if entry is not None:
                out.append((DUPLICATE if entry[1] == mark else CONFLICT, entry[0], NO_ID))
            elif key in batch:
                out.append((DUPLICATE if marks[batch[key]] == mark else CONFLICT, NO_ID, batch[key]))
            else:
                batch[key] = row
                out.append((NEW, NO_ID, NO_ID))
        return out

    @rule(
        numbers=st.lists(st.integers(0, 60), min_size=1, max_size=12),
        scopes=st.sampled_from([[WINDOW], [WINDOW], [WINDOW, PENDING, UNTIL_ACK], [UNTIL_ACK]]),
        other=st.sampled_from([0, 0, 0, 1]),
        passed=st.integers(0, 5),
        ttl=st.integers(1, 40),
    )
    def enqueue(self, numbers: list[int], scopes: list[int], other: int, passed: int, ttl: int) -> None:
        self.now += passed
        keys = [hash_of(number) for number in numbers]
        marks = [number + (other if row % 2 else 0) for row, number in enumerate(numbers)]
        verdict = self.window.check(keys, column(marks, np.uint32), self.now)
        assert rows_of(verdict) == self.expected(keys, marks)
        assert verdict.all_new == (verdict.status == NEW).all()
        new = np.flatnonzero(verdict.status == NEW).tolist()
        given_scopes = [scopes[row % len(scopes)] for row in new]
        ids = list(range(self.next_id, self.next_id + len(new)))
        expiries = [self.now + ttl + row for row in new]
        self.next_id += len(new)
        marks = [marks[row] for row in new]
        self.window.record(
            [keys[row] for row in new],
            column(ids),
            column(marks, np.uint32),
            column(given_scopes, np.int8),
            column(expiries),
        )
        for row, *entry in zip(new, ids, marks, given_scopes, expiries, strict=True):
            self.model[keys[row]] = tuple(entry)  # type: ignore[assignment]

    @rule(number=st.integers(0, 60))
    def ask_one(self, number: int) -> None:
        key = hash_of(number)
        assert rows_of(self.window.check([key], column([number], np.uint32), self.now)) == self.expected(
            [key], [number]
        )

    @rule(back=st.lists(st.integers(1, 12), max_size=5), is_gone=st.booleans())
    def lease_or_finish(self, back: list[int], is_gone: bool) -> None:
        ids = {max(0, self.next_id - b) for b in back}
        (self.window.gone if is_gone else self.window.leased)(column(sorted(ids)))
        ended = (PENDING, UNTIL_ACK) if is_gone else (PENDING,)
        self.model = {k: e for k, e in self.model.items() if not (e[0] in ids and e[2] in ended)}

    @rule(passed=st.integers(0, 40))
    def expire(self, passed: int) -> None:
        self.now += passed
        self.window.expire(self.now)

    @rule()
    def reload(self) -> None:
        self.window = reloaded(self.window, **self.private)

    @invariant()
    def tells_until_when_it_remembers(self) -> None:
        if hasattr(self, "window"):
            known = [entry for entry in map(self.known, self.model) if entry is not None]
            assert self.window.expires_max >= max((e[3] for e in known if e[2] == WINDOW), default=0)
            assert self.window.holds_any == any(e[2] != WINDOW for e in known)

    def teardown(self) -> None:
        if hasattr(self, "window"):
            keys = [hash_of(number) for number in range(61)]
            verdict = self.window.check(keys, column(range(61), np.uint32), self.now)
            assert rows_of(verdict) == self.expected(keys, list(range(61)))
            assert len(self.window) >= sum(self.known(key) is not None for key in self.model)


TestKeysAgainstModel = KeysAgainstModel.TestCase

A, B = key_hash("a"), key_hash("b")


def test_key_hash_is_pinned_because_it_is_stored() -> None:
    assert A.hex() == "27c35e6e9373877f29e562464e46497e"
    assert len(key_hash("\u00e9" * 1000)) == 16


def test_repeated_key_gets_the_first_id_and_another_payload_is_a_conflict() -> None:
    window = KeyWindow()
    record(window, [A], 5)
    assert verdict_of(window, A) == (DUPLICATE, 5)
    assert verdict_of(window, A, mark=8) == (CONFLICT, 5)
    assert verdict_of(window, B) == (NEW, NO_ID)


def test_window_key_is_free_again_at_its_expiry_and_not_before() -> None:
    window = KeyWindow()
    record(window, [A], 5, expires_at=100)
    assert verdict_of(window, A, now=99) == (DUPLICATE, 5)
    assert verdict_of(window, A, now=100) == (NEW, NO_ID)


@pytest.mark.parametrize("recent", [1, 2, 100])
def test_key_recorded_again_after_expiry_wins_over_its_old_row(recent: int) -> None:
    window = KeyWindow(_recent_max=recent)
    record(window, [A, B], 5, expires_at=100)
    assert verdict_of(window, A, now=150) == (NEW, NO_ID)
    record(window, [A], 9, expires_at=250)
    for _ in range(3):
        assert verdict_of(window, A, now=200) == (DUPLICATE, 9)
        window.expire(200)
        window = reloaded(window)


def test_pending_key_is_free_when_leased_and_until_ack_key_when_removed() -> None:
    window = KeyWindow()
    record(window, [A], 5, PENDING, expires_at=0)
    record(window, [B], 6, UNTIL_ACK, expires_at=0)
    assert verdict_of(window, A, now=10**12) == (DUPLICATE, 5)
    window.leased(column([5, 6, 7]))
    assert verdict_of(window, A) == (NEW, NO_ID)
    assert verdict_of(window, B) == (DUPLICATE, 6)
    window.gone(column([5, 6, 7]))
    assert verdict_of(window, B) == (NEW, NO_ID)


def test_pending_key_of_a_message_cancelled_before_its_lease_is_free() -> None:
    window = KeyWindow()
    record(window, [A], 5, PENDING)
    window.gone(column([5]))
    assert verdict_of(window, A) == (NEW, NO_ID)
    assert len(window) == 0


def test_leases_and_acks_do_not_end_a_window_key() -> None:
    window = KeyWindow()
    record(window, [A], 5)
    record(window, [B], 6, UNTIL_ACK)
    window.leased(column([5, 6]))
    window.gone(column([5, 6]))
    assert verdict_of(window, A) == (DUPLICATE, 5)


def many(start: int, n: int) -> list[bytes]:
    return [key_hash(str(i)) for i in range(start, start + n)]


def test_million_scale_shape_keeps_few_runs_and_few_bytes() -> None:
    """Scaled down by its thresholds: after a thousand flushes there must not be a thousand runs to search."""
    window = KeyWindow(_recent_max=32, _at_once_max=256)
    for start in range(0, 32_000, 32):
        record(window, many(start, 32), start, expires_at=100)
    assert len(window._runs) <= 16
    assert len(window) == 32_000
    verdict = window.check(many(0, 32_000), column([7] * 32_000, np.uint32), 0)
    assert (verdict.status == DUPLICATE).all()
    assert verdict.first_ids.tolist() == list(range(32_000))


def test_memory_of_expired_keys_is_freed_in_bounded_steps() -> None:
    window = KeyWindow(_recent_max=64, _at_once_max=256)
    for start in range(0, 6_400, 64):
        record(window, many(start, 64), start, expires_at=100 if start % 256 else 1000)
    held = len(window)
    for _ in range(50):
        window.expire(500)
    assert len(window) < held / 2
    assert verdict_of(window, many(0, 1)[0], now=500) == (DUPLICATE, 0)
    for _ in range(50):
        window.expire(1000)
    assert len(window) == 0


def test_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(UnknownFormat):
        KeyWindow.from_state({**KeyWindow().to_state(), "version": 9})


def test_damaged_snapshot_is_refused() -> None:
    window = KeyWindow()
    record(window, many(0, 10), 5)
    for damage in (
        lambda run: run.pop(),
        lambda run: run.insert(2, run.pop(2)[:-8]),
        lambda run: run.insert(0, run.pop(0)[::-1]),
    ):
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(window.to_state()))
        damage(state["runs"][0])
        with pytest.raises(SnapshotCorrupt):
            KeyWindow.from_state(state)


@pytest.mark.parametrize("recent", [1, 2, 8])
def test_recovery_that_only_records_also_keeps_the_later_row_of_a_key(recent: int) -> None:
    """Replaying the journal calls record without check, so the older row is not dropped by time."""
    window = KeyWindow(_recent_max=recent)
    record(window, [A], 5, expires_at=100)
    record(window, [A], 9, expires_at=250)
    record(window, [B, key_hash("c"), key_hash("d")], 20, expires_at=250)
    assert verdict_of(window, A, now=150) == (DUPLICATE, 9)
    assert rows_of(window.check([B, A], column([7, 7], np.uint32), 150)) == [
        (DUPLICATE, 20, NO_ID),
        (DUPLICATE, 9, NO_ID),
    ]


def test_run_may_expire_while_it_is_merged() -> None:
    window = KeyWindow(_recent_max=500, _at_once_max=8)
    record(window, many(0, 600), 0, expires_at=100)
    record(window, many(600, 500), 600, expires_at=1000)
    record(window, many(1100, 1), 1100, expires_at=1000)
    assert window._merge is not None
    window.expire(200)
    assert window._merge is None
    assert len(window) < 550  # a first slice was merged before the time was set
    verdict = window.check(many(0, 1101), column([7] * 1101, np.uint32), 200)
    assert verdict.status.tolist() == [NEW] * 600 + [DUPLICATE] * 501
