"""Drives procrastinate: batches deferred in one statement, 64 jobs at a time, a separate database for each run."""

from __future__ import annotations

import asyncio

import psycopg
from procrastinate import App, PsycopgConnector

from benchmarks.drivers.outstanding import Outstanding
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive

CONCURRENCY = 64
QUEUE = "bench"
TEXT = PAYLOAD.hex()[: len(PAYLOAD)]  # its arguments are JSON


async def work(job: Job, window: Window) -> Outcome:
    server = f"host=127.0.0.1 port={job.port} user=postgres"
    async with await psycopg.AsyncConnection.connect(f"{server} dbname=postgres", autocommit=True) as connection:
        await connection.execute("DROP DATABASE IF EXISTS bench_procrastinate WITH (FORCE)")
        await connection.execute("CREATE DATABASE bench_procrastinate")
    app = App(connector=PsycopgConnector(conninfo=f"{server} dbname=bench_procrastinate"))

    @app.task(queue=QUEUE)
    async def handle(payload: str) -> None:
        load.worked_off()

    concurrency = int(job.options.get("concurrency", CONCURRENCY))
    batch = [{"payload": TEXT}] * job.batch
    load = Outstanding(job, lambda: handle.batch_defer_async(*batch))
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        worker = asyncio.create_task(
            app.run_worker_async(queues=[QUEUE], concurrency=concurrency, install_signal_handlers=False)
        )
        try:
            return await window.measure(load.turn)
        finally:
            worker.cancel()
            await asyncio.wait([worker])


if __name__ == "__main__":
    drive(work)
