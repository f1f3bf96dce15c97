"""Drives a JetStream work queue: a batch of publishes in flight together, a fetch, a double ack for each message."""

from __future__ import annotations

import asyncio

import nats
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive

SUBJECT, DURABLE = "bench", "workers"
LEASE_S = 30
FETCH_S = 1.0
ANSWER_S = 30.0


async def work(job: Job, window: Window) -> Outcome:
    client = await nats.connect(f"nats://127.0.0.1:{job.port}")
    js = client.jetstream(timeout=ANSWER_S)
    storage, retention = StorageType.FILE, RetentionPolicy.WORK_QUEUE
    await js.add_stream(StreamConfig(name=SUBJECT, subjects=[SUBJECT], storage=storage, retention=retention))
    config = ConsumerConfig(
        durable_name=DURABLE, ack_policy=AckPolicy.EXPLICIT, ack_wait=LEASE_S, max_ack_pending=1_000_000
    )
    await js.add_consumer(SUBJECT, config)
    idle = [await js.pull_subscribe_bind(DURABLE, SUBJECT) for _ in range(job.in_flight)]

    async def turn() -> int:
        await asyncio.gather(*(js.publish(SUBJECT, PAYLOAD) for _ in range(job.batch)))
        subscription = idle.pop()
        try:
            messages = await subscription.fetch(job.batch, timeout=FETCH_S)
        except TimeoutError:
            messages = []  # other tasks fetched and acked them
        finally:
            idle.append(subscription)
        await asyncio.gather(*(message.ack_sync(ANSWER_S) for message in messages))
        return len(messages)

    try:
        return await window.measure(turn)
    finally:
        await client.close()


if __name__ == "__main__":
    drive(work)
