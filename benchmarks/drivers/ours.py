"""Drives a Heapline server with the wire client: the whole lifecycle, or `kind=enqueue` alone."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities
from heapline.client.transports.native import NativeBroker
from heapline.contract.message import Outgoing

TOPIC = "bench"


async def work(job: Job, window: Window) -> Outcome:
    credential = Path(job.options["key_file"]).read_text().strip()
    batches = itertools.cycle(
        [[Outgoing(PAYLOAD, priority) for priority in priorities(job.batch, seed)] for seed in range(8)]
    )
    async with NativeBroker(f"127.0.0.1:{job.port}", credential=credential) as hl:
        topic = job.options.get("topic", TOPIC)
        await hl.create_topic(topic)

        async def lifecycle() -> int:
            await hl.enqueue_batch(topic, next(batches))
            messages = await hl.pop(topic, job.batch)
            await hl.ack(messages)
            return len(messages)

        async def enqueue() -> int:
            return len(await hl.enqueue_batch(topic, next(batches)))

        return await window.measure(enqueue if job.options.get("kind") == "enqueue" else lifecycle)


if __name__ == "__main__":
    drive(work)
