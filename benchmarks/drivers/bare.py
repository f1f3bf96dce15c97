"""Drives the bare frame server with calls and answers as large as ours: the floor under any durable queue."""

from __future__ import annotations

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive
from benchmarks.server.bare_server import connected

NUMBER = 8


async def work(job: Job, window: Window) -> Outcome:
    enqueue, enqueued = bytes(job.batch * (len(PAYLOAD) + NUMBER)), job.batch * NUMBER
    popped = job.batch * (len(PAYLOAD) + 4 * NUMBER)
    ack = bytes(job.batch * 2 * NUMBER)
    client = await connected(job.port)

    async def turn() -> int:
        await client.call(enqueue, enqueued)
        if job.options.get("kind") != "enqueue":
            await client.call(bytes(NUMBER), popped)
            await client.call(ack, 0)
        return job.batch

    return await window.measure(turn)


if __name__ == "__main__":
    drive(work)
