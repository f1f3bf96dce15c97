"""Drives Celery: tasks sent one by one, as it has no batches; its worker below this process, with two more below it.

Its queue shows how many are done: those neither in the list nor unacknowledged.
Reading that fifty times per second costs the worker nothing.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from celery import Celery
from redis.asyncio import Redis

from benchmarks.drivers.outstanding import Outstanding
from benchmarks.drivers.proc import cpu_seconds
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive

BROKER = "BENCHMARK_BROKER"
PROCESSES = 2
LOOK_S = 0.02
TEXT = PAYLOAD.hex()[: len(PAYLOAD)]  # arguments are JSON

app = Celery("benchmarks.drivers.celery", broker=os.environ.get(BROKER))
app.conf.update(
    task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True,
    # As many as our worker has slots: it runs these while it requests more.
    worker_prefetch_multiplier=32,
)  # fmt: skip


@app.task(name="handle")
def handle(payload: str) -> None:
    pass


class Queue:
    """Celery's data in Redis."""

    def __init__(self, port: int) -> None:
        self._redis = Redis(port=port)

    async def clear(self) -> None:
        await self._redis.flushall()

    async def left(self) -> int:
        pipe = self._redis.pipeline(transaction=True)
        pipe.llen("celery").hlen("unacked")
        waiting, unacked = await pipe.execute()
        return int(waiting) + int(unacked)

    async def close(self) -> None:
        await self._redis.aclose()


async def work(job: Job, window: Window) -> Outcome:
    url = f"redis://127.0.0.1:{job.port}/0"
    app.conf.broker_url = url
    queue, thread, sent, seen = Queue(job.port), ThreadPoolExecutor(1), 0, 0
    await queue.clear()

    def send() -> None:
        nonlocal sent
        for _ in range(job.batch):
            handle.delay(TEXT)
            sent += 1

    load = Outstanding(job, lambda: asyncio.get_running_loop().run_in_executor(thread, send))

    async def watch() -> None:
        nonlocal seen
        while True:
            before = sent
            for _ in range(before - await queue.left() - seen):
                load.worked_off()
                seen += 1
            await asyncio.sleep(LOOK_S)

    command = [
        sys.executable, "-m", "celery", "-A", "benchmarks.drivers.celery", "worker", "--pool", "prefork",
        "--concurrency", str(PROCESSES), "--loglevel", "ERROR", "--without-gossip", "--without-mingle",
        "--without-heartbeat",
    ]  # fmt: skip
    worker = subprocess.Popen(command, env={**os.environ, BROKER: url}, stdout=sys.stderr)
    watching = asyncio.create_task(watch())
    try:
        await load.turn()  # it is ready when it has run some
        before = cpu_seconds(worker.pid)
        outcome = await window.measure(load.turn)
        return replace(outcome, client_cpu_s=outcome.client_cpu_s + cpu_seconds(worker.pid) - before)
    finally:
        watching.cancel()
        worker.terminate()
        worker.wait(20)
        await queue.close()


if __name__ == "__main__":
    drive(work)
