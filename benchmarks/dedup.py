"""The cost of recognizing repeated enqueues, in memory and time, compared with a plain dict that does the same.

The dicts are the obvious first solution: {sequence: id} and {key hash: id}, without fingerprints, expiry or
snapshots. Memory is counted by tracemalloc on both sides; rates are single-threaded rows per second.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from heapline.core.dedup.idempotency import KeyWindow
from heapline.core.dedup.sequences import SequenceWindow

BATCH = 1000
Run = Callable[[], Any]


def run(quick: bool) -> Iterator[dict[str, Any]]:
    sequences, keys = (1_000_000, 200_000) if quick else (5_000_000, 1_000_000)
    yield _memory("bytes per open sequence", sequences, lambda: _fill_sequences(sequences), _sequence_dict, 16)
    yield _memory("bytes per idempotency key", keys, lambda: _fill_keys(keys), _key_dict, 48)
    yield from _sequence_rates(sequences // 5)
    yield from _key_rates(keys)


def _result(name: str, value: float, unit: str, baseline: float, target: float, less_is_better: bool) -> dict[str, Any]:
    met = value <= target if less_is_better else value >= target
    return {
        "name": f"dedup: {name}",
        "value": round(value, 2),
        "unit": unit,
        "baseline": round(baseline, 2),
        "ratio": round(value / baseline, 3),
        "target": target,
        "met": bool(met),
    }


def _memory(name: str, n: int, build: Run, build_dict: Callable[[int], Any], target: float) -> dict[str, Any]:
    ours = _bytes_of(build)
    few = min(n, 200_000)  # a dict under tracemalloc is slow to fill, and costs the same per row
    return _result(name, ours / n, "bytes", _bytes_of(lambda: build_dict(few)) / few, target, less_is_better=True)


def _bytes_of(build: Run) -> int:
    tracemalloc.start()
    try:
        kept = build()
        used = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return used


def _fill_sequences(n: int) -> SequenceWindow:
    window = SequenceWindow()
    window.open("p", 1, 1, 0)
    for start in range(0, n, BATCH):
        seqs = np.arange(start, start + BATCH)
        window.record("p", 1, seqs, seqs + (1 << 60), seqs.astype(np.uint32), 0)
    return window


def _hashes(n: int) -> list[bytes]:
    blob = np.random.default_rng(1).bytes(16 * n)
    return [blob[i : i + 16] for i in range(0, len(blob), 16)]


def _fill_keys(n: int, batch: int = BATCH) -> KeyWindow:
    window = KeyWindow()
    marks, scopes = np.zeros(batch, np.uint32), np.zeros(batch, np.int8)
    expires = np.full(batch, 1 << 40)
    rng = np.random.default_rng(1)
    for start in range(0, n, batch):
        blob = rng.bytes(16 * batch)
        hashes = [blob[i : i + 16] for i in range(0, len(blob), 16)]
        window.record(hashes, np.arange(start, start + batch), marks, scopes, expires)
    return window


def _sequence_dict(n: int) -> dict[int, int]:
    return {seq: (1 << 60) + seq for seq in range(n)}


def _key_dict(n: int) -> dict[bytes, int]:
    return {key: (1 << 60) + row for row, key in enumerate(_hashes(n))}


def _rate(rows: int, work: Run) -> float:
    start = time.perf_counter()
    work()
    return rows / (time.perf_counter() - start)


def _sequence_rates(n: int) -> Iterator[dict[str, Any]]:
    plain = _rate(n, lambda: _dict_pass(_sequence_batches(n)))
    for name, batch, rows, target in (("batches of 1000", BATCH, n, 1e9 / 150), ("one by one", 1, n // 50, 1e5)):
        value = _rate(rows, partial(_sequence_pass, rows, batch))
        yield _result(f"sequences checked and recorded, {name}", value, "rows/s", plain, round(target), False)


def _sequence_batches(n: int) -> Iterator[tuple[list[int], list[int]]]:
    for start in range(0, n, BATCH):
        yield list(range(start, start + BATCH)), list(range(start, start + BATCH))


def _dict_pass(batches: Iterator[tuple[list[Any], list[int]]]) -> None:
    seen: dict[Any, int] = {}
    for keys, ids in batches:
        for key, message_id in zip(keys, ids, strict=True):
            if key not in seen:
                seen[key] = message_id


def _sequence_pass(n: int, batch: int) -> None:
    window = SequenceWindow()
    window.open("p", 1, 1, 0)
    for start in range(0, n, batch):
        seqs = np.arange(start, start + batch)
        marks = seqs.astype(np.uint32)
        if window.check("p", 1, seqs, marks).all_new:
            window.record("p", 1, seqs, seqs, marks, 0)


def _key_rates(n: int) -> Iterator[dict[str, Any]]:
    window = _fill_keys(n)
    new = _hashes(n // 10 + BATCH)[::-1]
    new = [key[::-1] for key in new]
    batches = [new[start : start + BATCH] for start in range(0, n // 10, BATCH)]
    known = dict.fromkeys(_hashes(n), 1)
    plain = _rate(n // 10, lambda: [[key in known for key in batch] for batch in batches])
    marks = np.zeros(BATCH, np.uint32)
    value = _rate(n // 10, lambda: [window.check(batch, marks, 0) for batch in batches])
    yield _result("keys checked, batches of 1000", value, "rows/s", plain, round(1e9 / 1500), False)
    value = _rate(BATCH, lambda: [window.check([key], marks[:1], 0) for key in new[:BATCH]])
    yield _result("keys checked, one by one", value, "rows/s", plain, round(1e6 / 25), False)
    start = time.perf_counter()
    _fill_keys(n)
    value = n / (time.perf_counter() - start)
    start = time.perf_counter()
    _key_dict(n)
    yield _result("keys recorded, batches of 1000", value, "rows/s", n / (time.perf_counter() - start), 500_000, False)


if __name__ == "__main__":
    for line in run(quick=False):
        print(json.dumps(line))
