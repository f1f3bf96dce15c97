"""Drives the Postgres broker: one node with its default number of connections."""

from __future__ import annotations

import itertools

import asyncpg

import heapline.sql
from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities
from heapline.contract.message import Outgoing

SCHEMA = "heapline"


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle([[Outgoing(PAYLOAD, priority=p) for p in priorities(job.batch, s)] for s in range(8)])
    names = job.options.get("databases", "postgres").split(",")
    urls = [f"postgresql://postgres@127.0.0.1:{job.port}/{name}" for name in names]
    topics = job.options.get("topics", "bench").split(",")
    if not job.options.get("keep"):
        for url in urls:
            connection = await asyncpg.connect(url)
            await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            await connection.close()
    async with heapline.sql.open(urls, schema=SCHEMA) as hl:
        for topic in topics:
            await hl.create_topic(topic, retention=float(job.options.get("retention", 0)))
            stored = (await hl.stats(topic)).ready
            for _ in range(stored, int(job.options.get("backlog", 0)), job.batch):
                await hl.enqueue_batch(topic, next(batches))
        turns = itertools.cycle(topics)

        async def turn() -> int:
            topic = next(turns)
            await hl.enqueue_batch(topic, next(batches))
            messages = await hl.pop(topic, job.batch)
            await hl.ack(messages)
            return len(messages)

        return await window.measure(turn)


if __name__ == "__main__":
    drive(work)
