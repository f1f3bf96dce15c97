"""Drives a Heapline server with batches through the SDK: the whole lifecycle, or `kind=enqueue` alone.

The same turns as ours.py, which has the thin wire client.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import heapline
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle(
        [[heapline.Outgoing(PAYLOAD, priority) for priority in priorities(job.batch, seed)] for seed in range(8)]
    )
    api_key, topic = Path(job.options["key_file"]).read_text().strip(), job.options["topic"]
    async with heapline.connect(f"127.0.0.1:{job.port}", api_key=api_key) as hl:
        await hl.create_topic(topic)

        async def lifecycle() -> int:
            await hl.enqueue_batch(topic, next(batches))
            messages = await hl.pop(topic, job.batch)
            await hl.ack(messages)
            return len(messages)

        async def enqueue() -> int:
            return len(await hl.enqueue_batch(topic, next(batches)))

        return await window.measure(enqueue if job.options["kind"] == "enqueue" else lifecycle)


if __name__ == "__main__":
    drive(work)
