"""The synthetic load of `heapline demo --serve`: a small company's topics, with work, failures and one forgotten queue.

Tests and the pictures in docs/dashboard.md use the same load. It is the same on every run, except for time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import typer

import heapline
from heapline import Backoff, Outgoing
from heapline.contract.errors import HeaplineError

TICK = 0.5  # seconds between enqueues
PORTS = (7400, 7410, 7480)  # native, gRPC and HTTP, as `heapline serve` has them
CUSTOMERS = ("acme", "globex", "initech", "umbrella", "hooli")
FAILURES = {
    "mail": "smtplib.SMTPRecipientsRefused: 550 5.1.1 mailbox unavailable",
    "webhooks": """Traceback (most recent call last):
  File "/srv/venv/lib/python3.13/site-packages/heapline/client/tasks/worker.py", line 210, in _run
    return await handler(message)
  File "/srv/app/tasks/webhooks.py", line 41, in deliver
    response.raise_for_status()
  File "/srv/venv/lib/python3.13/site-packages/httpx/_models.py", line 829, in raise_for_status
    raise HTTPStatusError(message, request=request, response=self)
httpx.HTTPStatusError: Server error '502 Bad Gateway' for url 'https://hooks.example/in'""",
    "thumbnails": "PIL.UnidentifiedImageError: cannot identify image file 'upload-8841.heic'",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One topic of the load."""

    topic: str
    enqueued: float  # per second
    workers: int  # each takes one message at a time
    seconds: float = 0.05  # that a worker takes for one
    failing: float = 0.0  # share of the messages that fail
    delayed: float = 0.0  # share that is due later
    backlog: int = 0  # messages before anything runs
    settings: dict[str, Any] = field(default_factory=dict)


ONCE = {"max_retries_default": 1, "backoff": Backoff(base=1.0, max=5.0)}
LINES = (
    Line(topic="mail", enqueued=18.0, workers=2, failing=0.01, delayed=0.1, settings=ONCE),
    Line(topic="invoices", enqueued=4.0, workers=1, delayed=0.5, settings={"partitions": 4}),
    Line(topic="thumbnails", enqueued=12.0, workers=1, seconds=0.09, failing=0.03, settings=ONCE),
    Line(topic="webhooks", enqueued=9.0, workers=2, failing=0.08, settings={"fairness": "keys", **ONCE}),
    Line(topic="search-index", enqueued=6.0, workers=1, settings={"ordering": heapline.aging(0.5)}),
    Line(topic="billing/charges", enqueued=2.0, workers=1, seconds=0.2),
    Line(topic="exports", enqueued=0.5, workers=1, seconds=0.5, backlog=214),
    Line(topic="reports", enqueued=0.2, workers=0, backlog=640),
)


async def run(hl: Any) -> None:
    """Create the topics and work on them until cancelled."""
    random_ = random.Random(7)
    for line in LINES:
        await hl.create_topic(line.topic, **line.settings)
        for first in range(0, line.backlog, 1000):
            waiting = min(1000, line.backlog - first)
            await hl.enqueue_batch(line.topic, [_message(line, random_, now=True) for _ in range(waiting)])
    with contextlib.suppress(HeaplineError):  # brokers without schedules or groups
        await hl.create_schedule("nightly-report", topic="reports", cron="0 3 * * *", tz="Europe/Berlin")
        await hl.create_schedule("heartbeat", topic="mail", every=60.0)
        await hl.create_group("mail", "analytics")
    herd = datetime.now(UTC) + timedelta(minutes=40)
    await hl.enqueue_batch("invoices", [Outgoing(b"{}", deliver_at=herd) for _ in range(1200)])
    async with asyncio.TaskGroup() as tasks:
        for line in LINES:
            tasks.create_task(_produce(hl, line))
            for number in range(line.workers):
                tasks.create_task(_consume(hl, line, f"{line.topic.rpartition('/')[2]}-worker-{number + 1}"))
        await hl.pause_topic("exports")


def _message(line: Line, random_: random.Random, now: bool = False) -> Outgoing:
    customer = random_.choice(CUSTOMERS)
    body = {"customer": customer, "number": random_.randrange(10_000)}
    return Outgoing(
        json.dumps(body).encode(),
        priority=random_.choice((0, 1, 5, 5, 5, 10, 20)),
        key=customer if "partitions" in line.settings else None,
        fairness_key=customer if "fairness" in line.settings else None,
        delay=random_.choice((30.0, 600.0, 3000.0, 50_000.0)) if not now and random_.random() < line.delayed else None,
        headers={"heapline-task": f"{line.topic.replace('/', '.')}.run", "tenant": customer},
    )


async def _produce(hl: Any, line: Line) -> None:
    random_, owed = random.Random(line.topic), 0.0
    while True:
        owed += line.enqueued * TICK
        if owed >= 1:
            await hl.enqueue_batch(line.topic, [_message(line, random_) for _ in range(int(owed))])
            owed -= int(owed)
        await asyncio.sleep(TICK)


async def _consume(hl: Any, line: Line, name: str) -> None:
    random_ = random.Random(name)
    while True:
        for message in await hl.pop(line.topic, 1, wait=10.0, holder=name):
            await asyncio.sleep(line.seconds)
            if random_.random() < line.failing:
                await message.nack(reason=FAILURES[line.topic])
            else:
                await message.ack()


# -- heapline demo --serve ---------------------------------------------------------------------------------------------


def serve_demo(data: Path) -> None:
    """Serve a directory in another process, and run the load on it until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise the server would outlive this process
    ports = _ports()
    flags = [
        part
        for flag, port in zip(("--port", "--grpc-port", "--http-port"), ports, strict=True)
        for part in (flag, str(port))
    ]
    command = [sys.executable, "-m", "heapline", "serve", "--data", str(data), *flags]
    with subprocess.Popen(command) as server:
        try:
            asyncio.run(_load(data, server, ports))
        except KeyboardInterrupt:
            typer.echo("stopping")
        finally:
            server.send_signal(signal.SIGTERM)


def _ports() -> list[int]:
    """Return the usual ports, or others if one of them is in use, for example by your own server."""
    with contextlib.ExitStack() as held:
        try:
            for port in PORTS:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return list(PORTS)
        except OSError:
            found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
            return [listener.getsockname()[1] for listener in found]


async def _load(data: Path, server: subprocess.Popen[bytes], ports: list[int]) -> None:
    key_file = data / "admin.key"
    while not key_file.exists():
        if server.poll() is not None:
            raise typer.Exit(server.returncode)  # it has said why
        await asyncio.sleep(0.1)
    async with heapline.connect(f"127.0.0.1:{ports[0]}", api_key=key_file.read_text().strip()) as hl:
        await hl.list_topics()  # the server is ready
        where = f"--to 127.0.0.1:{ports[0]} --url http://127.0.0.1:{ports[2]} --key-file {key_file}"
        typer.echo(f"  log in with:  heapline dashboard {where}")
        await run(hl)


if __name__ == "__main__":  # on a server that runs already: ADDRESS KEY-FILE

    async def _main(target: str, key: str) -> None:
        async with heapline.connect(target, api_key=key) as hl:
            await run(hl)

    asyncio.run(_main(sys.argv[1], Path(sys.argv[2]).read_text().strip()))
