"""The journal compared with its basic operations, in the same process, on the same disk and bytes.

Commits are compared with one raw pwrite + fdatasync of the same bytes into an equally zero-filled file, in alternating
rounds; recovery with reading and checksumming the same files. Figures are medians; a ratio of 1 is as fast as the basic
operation. Commits are timed without `prepare`, which runs between them; a separate row has both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from crc32c import crc32c

from heapline.core.record import size_class
from heapline.journal import Block, File, Journal, RealDisk, make_block, new_rows, scan
from heapline.journal.disk import Buffer
from heapline.journal.records import CacheBudget
from heapline.journal.segment import segment_path
from heapline.journal.unit import Frame

Figure = dict[str, Any]
SEGMENT_BYTES = 64 << 20
MESSAGES = 1000
PAYLOAD = bytes(range(256))


def run(quick: bool, directory: str) -> Iterator[Figure]:
    yield from blocks(40 if quick else 400)
    yield from commits(f"{directory}/commits", 1 << 20, 40 if quick else 200)
    yield from commits(f"{directory}/small", 4 << 10, 150 if quick else 1000)
    yield from reading(f"{directory}/reading", 96 if quick else 400, 5 if quick else 20)


def figure(name: str, value: float, unit: str, baseline: float, ratio: float, target: str | None, met: bool) -> Figure:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": round(baseline, 3),
        "ratio": round(ratio, 3),
        "target": target,
        "met": bool(met) if target else None,
    }


def timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def sample_block(first_id: int = 1, count: int = MESSAGES, payload: bytes = PAYLOAD) -> Block:
    rows = new_rows(count)
    rows["id"] = np.arange(first_id, first_id + count)
    return make_block(rows, None, [payload] * count)


def blocks(rounds: int) -> Iterator[Figure]:
    """The baseline is one checksum per payload and one join."""
    rows, payloads = new_rows(MESSAGES), [bytes(PAYLOAD) for _ in range(MESSAGES)]
    smalls = [b"key-%06d" % n for n in range(MESSAGES)]
    ours, with_keys, bare = [], [], []
    for _ in range(rounds):
        ours.append(timed(lambda: make_block(rows, None, payloads)))
        with_keys.append(timed(lambda: make_block(rows, smalls, payloads)))
        bare.append(timed(lambda: (list(map(crc32c, payloads)), b"".join(payloads))))
    base = median(bare) / MESSAGES * 1e6
    for name, times in (("make_block, 1000 × 256 B", ours), ("make_block, 1000 × 256 B with keys", with_keys)):
        value = median(times) / MESSAGES * 1e6
        yield figure(name, value, "µs/message", base, base / value, "≤ 1 µs", value <= 1)


def commits(path: str, unit_bytes: int, rounds: int) -> Iterator[Figure]:
    disk = RealDisk()
    Journal.create(disk, path, incarnation=1, segment_bytes=SEGMENT_BYTES)
    journal, units = Journal.open(disk, path)
    assert not list(units)
    raw = disk.create(f"{path}/raw")
    raw.zero(0, (rounds + 1) * unit_bytes)
    raw.fdatasync()
    block = sample_block(count=1, payload=bytes(unit_bytes - 1024 - unit_bytes // 100))
    ours, bare, both = [], [], []
    for number in range(rounds):
        journal.room(block.nbytes + 100)
        journal.add_block(block)
        journal.add_frames([Frame(0, number, 1, b"events", number)])
        unit = journal.seal(number, number)
        assert unit is not None
        parts, _ = unit.encode(prev_crc=0, durable_end=0, flags=0, seed=0)
        journal.take_sealed()
        prepared = timed(journal.prepare) if journal.wants_prepare else 0.0
        write_bare = partial(write_and_sync, raw, parts, number * unit_bytes)
        if number % 2:
            bare.append(timed(write_bare))
        ours.append(timed(partial(journal.commit, unit)))
        if not number % 2:
            bare.append(timed(write_bare))
        both.append(ours[-1] + prepared)
    raw.close()
    journal.close()
    value, base = median(ours) * 1e3, median(bare) * 1e3
    size = f"{unit_bytes >> 10} KiB"
    yield figure(f"commit of {size}", value, "ms", base, base / value, "≥ 0.7×", base / value >= 0.7)
    mean, mean_base = sum(both) / rounds * 1e3, sum(bare) / rounds * 1e3
    yield figure(f"commit of {size} and prepare, mean", mean, "ms", mean_base, mean_base / mean, None, True)


def write_and_sync(file: File, parts: Sequence[Buffer], at: int) -> None:
    file.pwritev(parts, at)
    file.fdatasync()


def reading(path: str, megabytes: int, rounds: int) -> Iterator[Figure]:
    disk = RealDisk()
    Journal.create(disk, path, incarnation=1, segment_bytes=SEGMENT_BYTES)
    journal, units = Journal.open(disk, path, policy="os", cache_budget=CacheBudget(4 << 20))
    assert not list(units)
    positions = fill(journal, megabytes)
    used = sum(unit.header.nbytes for unit in scan(disk, path)) / 1e6
    numbers = range(1, 2 + megabytes // 64)
    ours, bare = [], []
    for _ in range(rounds):
        bare.append(timed(lambda: [read_and_sum(disk, segment_path(path, n)) for n in numbers]))
        ours.append(timed(lambda: [unit.number for unit in scan(disk, path)]))
    read = sum(disk.open(segment_path(path, n)).size() for n in numbers) / 1e6
    value, base = used / median(ours), read / median(bare)
    yield figure("recovery scan", value, "MB/s", base, value / base, "≥ 300 MB/s", value >= 300)
    yield from records(journal, positions, rounds)
    journal.close()


def fill(journal: Journal, megabytes: int) -> list[np.ndarray[Any, Any]]:
    """Units of three batches each, about 1 MB."""
    found = []
    for number in range(megabytes):
        for part in range(3):
            block = sample_block(first_id=(3 * number + part) * MESSAGES)
            journal.room(block.nbytes + 100)
            segment, at = journal.add_block(block)
            journal.add_frames([Frame(part, number * MESSAGES, MESSAGES, b"events", number)])
            classes = size_class(np.full(MESSAGES, len(PAYLOAD)))
            found.append(journal.layout.pack(segment, at + 80 * np.arange(MESSAGES), classes, 0))
        journal.seal(number, number)
        if journal.wants_prepare:
            journal.prepare()
        for unit in journal.take_sealed():
            journal.commit(unit)
    return found


def read_and_sum(disk: RealDisk, path: str) -> int:
    file = disk.open(path)
    crc = 0
    for at in range(0, file.size(), 8 << 20):
        crc = crc32c(file.pread(8 << 20, at), crc)
    file.close()
    return crc


def records(journal: Journal, positions: list[np.ndarray[Any, Any]], rounds: int) -> Iterator[Figure]:
    """A batch by position, from memory and from disk (page cache), compared with slicing payloads from a buffer."""
    buffer = bytes(len(PAYLOAD) * MESSAGES)
    size = len(PAYLOAD)
    bare = [timed(lambda: [buffer[i : i + size] for i in range(0, len(buffer), size)]) for _ in range(20 * rounds)]
    base = median(bare) / MESSAGES * 1e6
    hot = [timed(lambda: journal.cached(positions[-1])) for _ in range(20 * rounds)]
    early = positions[: min(len(positions) // 2, 20 * rounds)]
    cold = [timed(partial(journal.load, batch)) for batch in early]
    assert not len(journal.cached(positions[-1])[1])
    assert len(journal.cached(positions[0])[1]) == MESSAGES
    for name, times in (("1000 records from memory", hot), ("1000 records from disk, checked", cold)):
        value = median(times) / MESSAGES * 1e6
        yield figure(name, value, "µs/message", base, base / value, None, True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        for found in run(True, scratch):
            print(json.dumps(found, ensure_ascii=False))
