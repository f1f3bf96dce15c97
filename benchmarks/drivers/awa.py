"""Drives awa: COPY in, 256 workers in this process by default, a separate database for each run."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg
from awa import AsyncClient

from benchmarks.drivers.outstanding import Outstanding
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive

WORKERS = 256
QUEUE = "bench"
TEXT = PAYLOAD.hex()[: len(PAYLOAD)]  # its arguments are JSON


@dataclass
class Message:
    payload: str


async def work(job: Job, window: Window) -> Outcome:
    server = f"postgresql://postgres@127.0.0.1:{job.port}"
    connection = await asyncpg.connect(f"{server}/postgres")
    await connection.execute("DROP DATABASE IF EXISTS bench_awa WITH (FORCE)")
    await connection.execute("CREATE DATABASE bench_awa")
    await connection.close()
    client = AsyncClient(f"{server}/bench_awa")
    await client.migrate()
    batch = [Message(TEXT)] * job.batch
    load = Outstanding(job, lambda: client.enqueue_many_copy(batch, queue=QUEUE))

    @client.task(Message, queue=QUEUE)
    async def handle(message: object) -> None:
        load.worked_off()

    await client.start([(QUEUE, int(job.options.get("concurrency", WORKERS)))])
    try:
        return await window.measure(load.turn)
    finally:
        await client.shutdown()
        await client.close()


if __name__ == "__main__":
    drive(work)
