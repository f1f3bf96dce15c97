"""A node of the Postgres broker that works until it is killed, and records the answers it received.

Run as a program: `python -m tests.integration.sql_node URL SCHEMA RECORD SEED SETTINGS`. SETTINGS are in JSON: further
settings of the node, `k` of the topic, and `repeats` (batches with keys that its predecessor has sent).

Each line of the record is one JSON list. Lines that begin with "asks" are written before a call, the others after its
answer. A killed process loses nothing that it has written to the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import Any

import heapline
import heapline.sql

TOPIC = "jobs"
VISIBILITY = 1.0
NODE_LEASE = 5.0
BACKOFF = heapline.Backoff(base=0)


class Record:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *facts: Any) -> None:
        os.write(self._file, json.dumps([*facts, time.monotonic()]).encode() + b"\n")


async def produce(hl: heapline.Broker, record: Record, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(1 << 30):
        tags = [f"{seed}.{number}.{i}" for i in range(rng.randint(1, 20))]
        has_keys = rng.random() < 0.5
        record.write("asks enqueue", tags, has_keys)
        await enqueue(hl, record, rng, tags, has_keys)


async def enqueue(hl: heapline.Broker, record: Record, rng: random.Random, tags: list[str], has_keys: bool) -> None:
    """Enqueue messages. Those with keys are repeated until they are acknowledged."""
    messages = [
        heapline.Outgoing(
            tag.encode(),
            priority=rng.randrange(100),
            delay=0.2 if rng.random() < 0.2 else None,
            idempotency_key=tag if has_keys else None,
        )
        for tag in tags
    ]
    while True:
        try:
            results = await hl.enqueue_batch(TOPIC, messages)
        except heapline.UnavailableError:  # the outcome is unknown
            await asyncio.sleep(0.05)
            if has_keys:
                continue
            return
        record.write("enqueued", tags, [r.id for r in results])
        return


async def consume(hl: Any, record: Record, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        began = time.monotonic()
        try:
            messages = await hl.pop(TOPIC, rng.randint(1, 20), visibility=VISIBILITY, wait=0.5)
        except heapline.UnavailableError:
            await asyncio.sleep(0.05)
            continue
        record.write("popped", [[m.payload.decode(), m.id, m.token, m.deadline.timestamp()] for m in messages], began)
        record.write("prefetched", hl.node.counters(TOPIC).prefetched)
        kept = [m for m in messages if rng.random() < 0.9]  # the other leases expire
        record.write("asks ack", [m.payload.decode() for m in kept])
        try:
            await hl.ack(kept)
            lost: set[int] = set()
        except heapline.LeaseLost as error:
            lost = set(error.lost)
        except heapline.UnavailableError:
            continue
        record.write("acked", [m.payload.decode() for m in kept if m.id not in lost])


async def main(url: str, schema: str, path: str, seed: int, settings: dict[str, Any]) -> None:
    record, k, repeats = Record(path), settings.pop("k", 1), settings.pop("repeats", [])
    async with heapline.sql.open([url], schema=schema, node_lease=NODE_LEASE, **settings) as hl:
        await hl.create_topic(TOPIC, backoff=BACKOFF, max_retries_default=250, k=k)
        record.write("open")
        for tags in repeats:
            await enqueue(hl, record, random.Random(seed), tags, True)
        async with asyncio.TaskGroup() as tasks:
            for i in range(2):
                tasks.create_task(produce(hl, record, seed * 10 + i))
                tasks.create_task(consume(hl, record, seed * 10 + i))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5])))
