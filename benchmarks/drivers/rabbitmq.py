"""Drives a RabbitMQ quorum queue: a batch of confirmed publishes in flight together, a consumer, one ack per batch.

Each turn consumes on its own channel, prefetches as many as it needs, and cancels before it acks, so that no
message waits at a consumer that has ended.
"""

from __future__ import annotations

import asyncio
import itertools

import aio_pika

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities

QUEUE = "bench"


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle([[message_of(p) for p in priorities(job.batch, seed)] for seed in range(8)])
    connection = await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{job.port}/")
    idle = []
    for _ in range(job.in_flight):
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=job.batch)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        idle.append((channel, queue))

    async def turn() -> int:
        channel, queue = idle.pop()
        publish = channel.default_exchange.publish
        await asyncio.gather(*(publish(message, routing_key=QUEUE) for message in next(batches)))
        taken: list[aio_pika.abc.AbstractIncomingMessage] = []
        complete = asyncio.Event()

        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            taken.append(message)
            if len(taken) == job.batch:
                complete.set()

        tag = await queue.consume(take)
        await complete.wait()
        await queue.cancel(tag)
        await max(taken, key=lambda message: message.delivery_tag or 0).ack(multiple=True)
        idle.append((channel, queue))
        return len(taken)

    try:
        return await window.measure(turn)
    finally:
        await connection.close()


def message_of(priority: int) -> aio_pika.Message:
    return aio_pika.Message(PAYLOAD, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, priority=priority % 256)


if __name__ == "__main__":
    drive(work)
