"""The process that is killed: producers and workers on a directory, forever, recording every call in a file.

    python -m tests.integration.killer DIRECTORY SIDE_FILE RUN SEED

Each line of the side file is one JSON array, written by one write(2) to a file opened with O_APPEND, so a kill leaves
complete lines. A call is recorded before it is made ("begin") and when it was answered ("done"), before anything else
happens: a call with "done" was answered, one with only a "begin" may or may not have happened.
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

KEPT, LEAN = "kept", "lean"  # a topic whose whole log is kept, and one that is reclaimed as it goes
BACKOFF = heapline.Backoff(base=0.05, factor=1.5, max=0.2, jitter=0.2)
TOPICS: dict[str, dict[str, Any]] = {
    KEPT: {"partitions": 1, "retention": 3600.0},
    LEAN: {"partitions": 3},
}
BROKER = {"snapshot_bytes": 1 << 18, "snapshot_interval": 0.4, "reclaim_interval": 0.1, "spare_segment_bytes": 1 << 20}
WAITING_MAX = 600  # producers pause above this, so that messages are also processed to the end


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Notes:
    def __init__(self, path: str, run: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        self._run = run
        self._calls = 0

    def begin(self, what: str, topic: str, facts: Any) -> int:
        self._calls += 1
        self._write("begin", self._calls, what, topic, facts)
        return self._calls

    def done(self, call: int, what: str, topic: str, facts: Any) -> None:
        self._write("done", call, what, topic, facts)

    def _write(self, *line: Any) -> None:
        os.write(self._fd, json.dumps([self._run, *line], separators=(",", ":")).encode() + b"\n")


async def produce(hl: heapline.Broker, notes: Notes, topic: str, name: str, draw: random.Random) -> None:
    number = 0
    while True:
        stats = await hl.stats(topic)
        if stats.ready + stats.delayed > WAITING_MAX:
            await asyncio.sleep(0.02)
            continue
        number += 1
        batch = f"{name}.{number}"
        delay = round(draw.uniform(0.03, 0.4), 3) if draw.random() < 0.25 else None
        size = draw.choice([1, 2, 7, 30, 90])
        pad = b"." * draw.choice([0, 20, 300, 2000])
        messages = [
            heapline.Outgoing(f"{batch}.{i} ".encode() + pad, draw.randrange(20), delay=delay, key=str(draw.random()))
            for i in range(size)
        ]
        call = notes.begin("enqueue", topic, [batch, size, delay, now_ms()])
        answers = await hl.enqueue_batch(topic, messages)
        notes.done(call, "enqueue", topic, [answer.id for answer in answers])


async def work(hl: heapline.Broker, notes: Notes, topic: str, name: str, draw: random.Random) -> None:
    while True:
        visibility = draw.choice([0.15, 0.5, 1.2])
        call = notes.begin("pop", topic, name)
        popped = await hl.pop(topic, draw.choice([1, 5, 40]), visibility=visibility, wait=0.1, holder=name)
        deadlines = [round(m.deadline.timestamp() * 1000) for m in popped]
        rows = [
            [m.id, m.token, m.attempts, m.priority, deadline, deadline - round(visibility * 1000), tag_of(m.payload)]
            for m, deadline in zip(popped, deadlines, strict=True)
        ]
        notes.done(call, "pop", topic, [now_ms(), rows])
        if popped:
            await finish(hl, notes, topic, popped, draw)


def tag_of(payload: bytes) -> str:
    return payload.partition(b" ")[0].decode()


async def finish(
    hl: heapline.Broker, notes: Notes, topic: str, popped: list[heapline.Message], draw: random.Random
) -> None:
    """End these leases in one of the possible ways, or let them expire."""
    how = draw.choices(["ack", "nack", "release", "bury", "extend", "leave"], [60, 8, 8, 3, 8, 6])[0]
    if how == "leave":
        return
    if how == "extend":
        await carry_out(hl, notes, topic, "extend", popped)
        how = "ack"
    if draw.random() < 0.1:
        await asyncio.sleep(0.2)  # some leases have ended before
    await carry_out(hl, notes, topic, how, popped)


async def carry_out(hl: Any, notes: Notes, topic: str, how: str, messages: list[heapline.Message]) -> None:
    call = notes.begin(how, topic, [[m.id, m.token] for m in messages])
    lost: list[int] = []
    try:
        await (hl.extend(messages, 1.0) if how == "extend" else getattr(hl, how)(messages))
    except heapline.LeaseLost as error:
        lost = error.lost
    notes.done(call, how, topic, [lost, [[m.id, round(m.deadline.timestamp() * 1000)] for m in messages]])


async def replay(hl: heapline.Broker, notes: Notes, topic: str) -> None:
    while True:
        await asyncio.sleep(0.15)
        call = notes.begin("replay", topic, None)
        notes.done(call, "replay", topic, await hl.dlq_replay(topic))


async def main(directory: str, side: str, run: int, seed: int) -> None:
    draw, notes = random.Random(seed), Notes(side, run)
    async with heapline.open(directory, **BROKER) as hl, asyncio.TaskGroup() as group:
        for topic, config in TOPICS.items():
            await hl.create_topic(
                topic,
                **config,
                backoff=BACKOFF,
                max_retries_default=4,
                segment_bytes=1 << 20,
                max_payload_bytes=1 << 16,
            )
        notes.begin("open", "", None)
        for topic in TOPICS:
            for i in range(2):
                group.create_task(produce(hl, notes, topic, f"{run}.p{i}", random.Random(draw.random())))
            for i in range(4):
                group.create_task(work(hl, notes, topic, f"{run}.w{i}", random.Random(draw.random())))
            group.create_task(replay(hl, notes, topic))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
