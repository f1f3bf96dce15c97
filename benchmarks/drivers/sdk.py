"""Drives a Heapline server, or an embedded broker on a `directory`, with batches through the public API.

`kind` is `lifecycle`, `lazy` (the same with lazy batches, if this version has them) or `enqueue` alone.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import heapline
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities


def has_lazy_batches() -> bool:
    return "lazy" in inspect.signature(heapline.Broker.pop).parameters


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle(
        [[heapline.Outgoing(PAYLOAD, priority) for priority in priorities(job.batch, seed)] for seed in range(8)]
    )
    kind, topic = job.options["kind"], job.options["topic"]
    pop_options: dict[str, Any] = {"lazy": True} if kind == "lazy" else {}
    async with broker_of(job) as hl:
        await hl.create_topic(topic, partitions=int(job.options.get("partitions", "1")))

        async def lifecycle() -> int:
            await hl.enqueue_batch(topic, next(batches))
            messages = await hl.pop(topic, job.batch, **pop_options)
            await hl.ack(messages)
            return len(messages)

        async def enqueue() -> int:
            return len(await hl.enqueue_batch(topic, next(batches)))

        return await window.measure(enqueue if kind == "enqueue" else lifecycle)


def broker_of(job: Job) -> Any:
    if "directory" in job.options:
        return heapline.open(job.options["directory"])
    api_key = Path(job.options["key_file"]).read_text().strip()
    return heapline.connect(f"127.0.0.1:{job.port}", api_key=api_key)


if __name__ == "__main__":
    drive(work)
