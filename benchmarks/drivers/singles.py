"""Drives one message a call: `enqueue`, `async for`, `ack`; through the SDK, or on a `directory` without a server.

All coroutines take from one consumption. As many are enqueued as are taken, so a turn always ends.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import heapline
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities


async def work(job: Job, window: Window) -> Outcome:
    topic, some_priorities = job.options["topic"], itertools.cycle(priorities(1000))
    async with broker_of(job) as hl:
        await hl.create_topic(topic)
        async with heapline.consume(hl, topic) as messages:

            async def turn() -> int:
                await hl.enqueue(topic, PAYLOAD, priority=next(some_priorities))
                async for message in messages:
                    await message.ack()
                    return 1
                return 0

            return await window.measure(turn)


def broker_of(job: Job) -> Any:
    if "directory" in job.options:
        return heapline.open(job.options["directory"])
    api_key = Path(job.options["key_file"]).read_text().strip()
    return heapline.connect(f"127.0.0.1:{job.port}", api_key=api_key)


if __name__ == "__main__":
    drive(work)
