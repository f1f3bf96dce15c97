"""Prepared batches over two topics in a real process that is killed: a batch is in both topics, or in neither."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import heapline

ORDERS, MAILS = 6, 4  # messages of one batch in each topic
WORK = """
import asyncio, sys, heapline
from heapline import Outgoing

async def main(path, journal, first):
    async with heapline.open(path) as hl:
        with open(journal, "a") as said:
            def say(word, number):
                print(word, number, file=said, flush=True)
            for number in range(first, first + 100_000):
                batch = f"b{number}"
                name = b"%d" % number
                whole = {"orders": [Outgoing(name)] * 3, "mails": [Outgoing(name)] * 4}
                await asyncio.gather(
                    hl.prepare_batch(batch, "1", whole),
                    hl.prepare_batch(batch, "2", [Outgoing(name, idempotency_key=f"{number}-{i}") for i in range(3)],
                                     topic="orders"),
                    hl.prepare_batch(batch, "lost", {"orders": [Outgoing(b"lost")], "mails": [Outgoing(b"lost")]}),
                )
                say("commits", number)
                assert await hl.commit_batch(batch, ["1", "2"]) == 10
                say("done", number)
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def run_and_kill(path: Path, said: Path, first: int, rng: random.Random) -> None:
    before = said.stat().st_size
    child = subprocess.Popen(
        [sys.executable, "-c", WORK, str(path), str(said), str(first)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    try:
        while said.stat().st_size < before + rng.randrange(200, 2000):  # until it is busy
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.random() / 100)
    finally:
        child.kill()
        child.communicate()


async def contents(hl: heapline.Broker, topic: str) -> Counter[bytes]:
    found = await hl.pop(topic, 100_000, max_bytes=1 << 30)
    await hl.release(found)
    return Counter(m.payload for m in found)


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.soak)])
async def test_batches_are_whole_after_kill_9_in_every_topic(tmp_path: Path, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    path, said = tmp_path / "data", tmp_path / "said"
    said.touch()
    async with heapline.open(path) as hl:
        await hl.create_topic("orders", partitions=3)
        await hl.create_topic("mails")
    first = 0
    for _ in range(rounds):
        await asyncio.to_thread(run_and_kill, path, said, first, rng)
        words = [line.split() for line in said.read_text().splitlines()]
        began = [int(number) for word, number in words if word == "commits"]
        done = {int(number) for word, number in words if word == "done"}
        async with heapline.open(path) as hl:
            in_doubt = began[-1]
            if in_doubt not in done:
                assert await hl.commit_batch(f"b{in_doubt}", ["1", "2"]) == 10, f"seed {seed}"
            orders, mails = await contents(hl, "orders"), await contents(hl, "mails")
            expected = set(began)
            assert orders == {b"%d" % n: ORDERS for n in expected}, f"seed {seed}"
            assert mails == {b"%d" % n: MAILS for n in expected}, f"seed {seed}"
            left = [b.batch_id for b in await hl.list_batches() if b.state == "undecided"]
            assert set(left) <= {f"b{in_doubt + 1}"}, f"seed {seed}"
            for batch_id in left:
                await hl.abort_batch(batch_id)
        first = began[-1] + 1
    assert first > rounds
