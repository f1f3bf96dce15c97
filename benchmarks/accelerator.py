"""The accelerator compared with its twins: each function alone, and embedded lifecycles with and without it.

The baseline is the function in Python, and the lifecycle on the functions in Python, measured alternately in the same
process. All figures are CPU time. The directory is on a disk, as everywhere; waiting for it costs no CPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

import heapline
from benchmarks.engine import PAYLOAD, Figure, figure
from heapline import accelerator
from heapline.accelerator import native, twins
from heapline.core import leases
from heapline.core.record import ROW
from heapline.journal import block, records, sectors

assert {block, leases, records, sectors}  # importing them registers the twins

SIZES = (1, 100, 1600)  # 1600 messages are a turn of 16 batches of 100


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    if native is None:
        raise RuntimeError(f"the accelerator is {accelerator.description()}; run `python hatch_build.py`")
    for size in SIZES:
        for name, call in calls(size).items():
            yield compare(name, size, call, quick)
    for name, batch, callers, count in (
        ("batches of 100, 16 in flight", 100, 16, 300),
        ("batches of 1000, 4 in flight", 1000, 4, 60),
        ("one message a call, 256 in flight", 1, 256, 10_000),
    ):
        yield lifecycle(name, directory, batch, callers, count, 3 if quick else 9)


Call = Callable[[Any], Callable[[], object]]


def calls(size: int) -> dict[str, Call]:
    """Return one call per function, given the version to measure."""
    rows, payloads = block.new_rows(size), [bytes(PAYLOAD) for _ in range(size)]
    data = twins["lay_out"](rows, None, payloads)[0]
    which, offsets = np.zeros(size, np.int64), np.random.default_rng(1).permutation(size) * ROW.itemsize
    unit = bytearray(data + bytes(-len(data) % 512))
    ids, tokens = list(range(1 << 40, (1 << 40) + size)), list(range(5000, 5000 + size))

    def lease(kind: Any) -> Callable[[], object]:
        held = kind()

        def grant_and_end() -> None:
            held.grant(ids, 5000, ids, ids, 1 << 41, 1 << 41, "worker")
            held.held(ids, tokens)
            held.first_current(ids, 0, 1 << 41)
            held.end(ids)

        return grant_and_end

    return {
        "lay_out": lambda function: lambda: function(rows, None, payloads),
        "cut_records": lambda function: lambda: function([data], which, offsets),
        "sector_table": lambda function: lambda: function([unit], len(unit) // 512),
        "LeaseMap": lease,
    }


def compare(name: str, size: int, call: Call, quick: bool) -> Figure:
    ours, theirs = call(getattr(native, name)), call(twins[name])
    repeats = max(5, (4000 if quick else 20_000) // size)
    found = [(per_message(ours, repeats, size), per_message(theirs, repeats, size)) for _ in range(5)]
    in_c, in_python = (median(column) for column in zip(*found, strict=True))
    return figure(
        f"{name} of {size} × 256 B", in_c, "µs/message", in_python, in_python / in_c, "≥ 1×", in_python >= in_c
    )


def per_message(action: Callable[[], object], repeats: int, size: int) -> float:
    action()
    start = process_time()
    for _ in range(repeats):
        action()
    return (process_time() - start) / repeats / size * 1e6


def lifecycle(name: str, directory: Path, batch: int, callers: int, count: int, rounds: int) -> Figure:
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for on in found:
            accelerator.use(on)
            path = directory / f"{random.getrandbits(40):x}"
            found[on].append(asyncio.run(cpu_per_message(str(path), batch, callers, count)))
    accelerator.use(True)
    with_it, without = median(found[True]), median(found[False])
    return figure(
        f"lifecycle with the accelerator: {name}", with_it, "µs/message", without, without / with_it, "≥ 1×",
        without >= with_it,
    )  # fmt: skip


async def cpu_per_message(path: str, batch: int, callers: int, count: int) -> float:
    """Return the CPU time per message of `count` batches, each enqueued, popped and acked."""
    async with heapline.open(path, spare_segment_bytes=1 << 26) as hl:
        await hl.create_topic("jobs")
        messages = [heapline.Outgoing(PAYLOAD, random.getrandbits(40)) for _ in range(batch)]
        left = 0

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if batch == 1:
                    await hl.enqueue("jobs", PAYLOAD, priority=left)
                    [message] = await hl.pop("jobs")
                    await message.ack()
                else:
                    await hl.enqueue_batch("jobs", messages)
                    await hl.ack(await hl.pop("jobs", batch))

        async def measure(batches: int) -> float:
            nonlocal left
            left = batches
            start = process_time()
            await asyncio.gather(*(client() for _ in range(callers)))
            return process_time() - start

        await measure(2 * callers)  # to warm up
        spent = await measure(count)
        await hl.delete_topic("jobs")
    return spent / (count * batch) * 1e6
