"""Drives Heapline's tasks: batches enqueued and run in one process, with an empty handler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import heapline
from benchmarks.drivers.outstanding import Outstanding
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive

TEXT = PAYLOAD.hex()[: len(PAYLOAD)]  # arguments are JSON


async def work(job: Job, window: Window) -> Outcome:
    app = heapline.App(f"127.0.0.1:{job.port}", api_key=Path(job.options["key_file"]).read_text().strip())

    @app.task(topic=job.options["topic"])
    async def handle(payload: str) -> None:
        load.worked_off()

    batch = [TEXT] * job.batch
    load = Outstanding(job, lambda: handle.enqueue_many(batch))
    async with app:
        worker = app.worker(concurrency=int(job.options["concurrency"]))
        working = asyncio.create_task(worker.run())
        try:
            return await window.measure(load.turn)
        finally:
            worker.stop()
            await working


if __name__ == "__main__":
    drive(work)
