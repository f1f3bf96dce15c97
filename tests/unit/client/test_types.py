"""Type checkers know every method of a broker: `mypy --strict` rejects unknown names and wrong arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import heapline

ROOT = Path(heapline.__file__).parents[2]
PROGRAM = """
from datetime import timedelta

import heapline
from heapline.contract.sync_broker import SyncMessage

async def good(hl: heapline.Broker) -> None:
    await hl.create_topic("jobs", partitions=4, tick=1, ordering=heapline.aging(2), backoff=heapline.Backoff(base=3))
    await hl.update_topic("jobs", max_backlog=5)
    await hl.create_group("jobs", "g", start="latest", max_retries=3)
    result = await hl.enqueue("jobs", b"x", priority=5)
    result.message_id.lower()
    for message in await hl.pop("jobs", 10, wait=1.0):
        await message.ack()
    (await hl.stats("jobs")).ready + await hl.purge("jobs")
    hl.subscribe("jobs", group="g", credits=5, ack_timeout=3.0)
    await hl.create_schedule("s", topic="jobs", every=timedelta(hours=1), grace=timedelta(minutes=1), headers={})
    await hl.create_schedule("s", topic="jobs", cron="0 3 * * *", tz="UTC", misfire="all", makeup_max=5)

def good_sync() -> None:
    with heapline.connect_sync("localhost:7400") as hl:
        hl.create_topic("jobs", partitions=4, partition_weights={1: 2.0}).name.lower()
        hl.enqueue("jobs", b"x", priority=5).message_id.lower()
        for message in hl.pop("jobs", 10, wait=1.0):
            message.ack()
        for message in hl.consume("jobs"):
            message.ack()
        for batch in hl.consume_batches("jobs", 10):
            batch[0].ack()
            batch[1:].ack()
            b"".join(batch.payloads)
        hl.ack(hl.pop("jobs", 10, lazy=True))
        with hl.subscribe("jobs", group="g", member="m", credits=5, start="latest", max_retries=3) as rows:
            for row in rows:
                row.ack()
        next(hl.replay("jobs", partitions=[0], mode="fast", rate=5.0)).partition.real
        hl.create_schedule("s", topic="jobs", every=3.0, priority=3, ends=None).name.lower()
        with hl.consume("jobs").item() as item:
            found: SyncMessage = item
        hl.within(2).stats("jobs").ready + hl.purge("jobs")
    with heapline.open_sync("data") as local:
        local.pause_topic("jobs")

async def good_client() -> None:
    async with heapline.connect("localhost:7400") as hl:
        await hl.within(2).enqueue("jobs", b"x")
        async with hl.consume("jobs").item() as item:
            await item.nack(backoff=3.0)
        async for batch in hl.consume_batches("jobs"):
            await batch[0].ack()
            await batch[1:].ack()
        sum((await hl.pop("jobs", 10, lazy=True)).ids)

app = heapline.App()

@app.task(topic="mail")
async def send(number: int, text: str = "") -> None: ...

@app.task
def plain(number: int) -> None: ...

async def good_task() -> None:
    (await send.enqueue(1, text="x")).message_id.lower()
    await send.enqueue(1, "x", priority=-5, delay=3)
    send.enqueue_sync(1).message_id.lower()
    plain.enqueue_sync(1, idempotency_key="k", ttl=None)
    await send.enqueue_many([send.item(1), send.item(2, "x", priority=1)])

async def bad_task() -> None:
    await send.enqueue("x")  # bad
    await send.enqueue()  # bad
    await send.enqueue(1, nosuch=2)  # bad
    await send.enqueue(1, priority="high")  # bad
    send.enqueue_sync("x")  # bad
    plain.enqueue_sync(1, 2)  # bad
    send.item("x")  # bad

async def bad(hl: heapline.Broker) -> None:
    await hl.nosuch()  # bad
    await hl.create_topic("jobs", nosuch=5)  # bad
    await hl.update_topic("jobs", partitions="a")  # bad
    await hl.create_group("jobs", "g", ack_timeout="a")  # bad
    hl.subscribe("jobs", group="g", nosuch=5)  # bad
    await hl.create_schedule("s", topic="jobs", nosuch=5)  # bad
    await hl.create_schedule("s", topic="jobs", every=3, misfire="never")  # bad
    await hl.enqueue("jobs", "text")  # bad
    await hl.pop("jobs", timeout=3)  # bad
    (await hl.pop("jobs", lazy=True)).nosuch  # bad
    (await hl.pop("jobs")).payloads  # bad
    await hl.purge()  # bad
    await hl.stats("jobs", 1)  # bad
    (await hl.stats("jobs")).nosuch  # bad

def bad_sync() -> None:
    with heapline.connect_sync("localhost:7400") as hl:
        hl.nosuch()  # bad
        hl.create_topic("jobs", nosuch=5)  # bad
        hl.update_topic("jobs", partitions="a")  # bad
        hl.create_group("jobs", "g", nosuch=5)  # bad
        hl.subscribe("jobs", group="g", nosuch=5)  # bad
        hl.subscribe("jobs", group="g", credits="many")  # bad
        hl.replay("jobs", nosuch=5)  # bad
        hl.create_schedule("s", topic="jobs", makeup="a")  # bad
        hl.enqueue("jobs", "text")  # bad
        hl.pop("jobs", timeout=3)  # bad
        hl.within(2).nosuch()  # bad
        hl.pop("jobs")[0].nosuch()  # bad
    with heapline.open_sync("data") as local:
        local.nosuch()  # bad
        local.create_topic("jobs", ordering="loose")  # bad
        local.pause_topic(5)  # bad
"""


def test_mypy_accepts_known_methods_and_rejects_unknown_ones(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir",
         str(ROOT / ".mypy_cache"), "--follow-imports", "silent", str(tmp_path / "program.py")],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    rejected = {int(n) for n in re.findall(r"program\.py:(\d+): error", done.stdout)}
    assert rejected == {n for n, line in enumerate(PROGRAM.split("\n"), 1) if "# bad" in line}, done.stdout


def test_dir_and_help_show_the_methods_of_a_client() -> None:
    for client in (heapline.connect("localhost:7400"), heapline.connect_sync("localhost:7400")):
        assert {"enqueue", "pop", "ack", "stats", "create_schedule", "within", "consume"} <= set(dir(client))
        assert "Enqueue one message" in (client.enqueue.__doc__ or "")
