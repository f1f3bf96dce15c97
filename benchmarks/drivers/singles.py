"""Drives one message per call: `enqueue`, `async for`, `ack`; through the SDK, or on a `directory` without a server.

All coroutines share one consumer. As many messages are enqueued as consumed, so a turn always ends.
"""

from __future__ import annotations

import itertools

import heapline
from benchmarks.drivers.sdk import broker_of
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


if __name__ == "__main__":
    drive(work)
