"""The README's tour from nothing to a worker that loses nothing in kill -9, typed as a newcomer would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import heapline

pytestmark = pytest.mark.slow

TASKS = """
import asyncio
from dataclasses import dataclass

import heapline

app = heapline.App()


@dataclass
class Order:
    id: int
    email: str


@app.task(topic="mail", timeout=60, retry_on={ConnectionError: heapline.Backoff(base=5)}, bury_on=(ValueError,))
async def send(order: Order) -> None:
    await asyncio.sleep(0.1)
    print(f"mail to {order.email}", flush=True)
"""
ONE = 'from tasks import *; print(send.enqueue_sync(Order(0, "ann@example.org"), priority=-5).message_id)'
MANY = 'from tasks import *; send.enqueue_many_sync([Order(n, f"user{n}@example.org") for n in range(1, 60)])'


class Home:
    """A newcomer's directory, and the processes started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {
            **os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1]), "PYTHONUNBUFFERED": "1",
            "HEAPLINE_API_KEY_FILE": "data/admin.key",
        }  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.path / log).open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "heapline", *arguments], cwd=self.path, env=self.environment, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.started.append(process)
        return process

    def python(self, program: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program], cwd=self.path, env=self.environment, capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout  # fmt: skip

    def said(self, log: str) -> str:
        return (self.path / log).read_text()

    def until(self, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (found := holds()):
            assert time.monotonic() < deadline, [(p.name, p.read_text()) for p in self.path.glob("*.log")]
            time.sleep(0.05)
        return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    for process in home.started:
        process.kill()
        process.wait()


def test_tour_from_nothing_to_a_worker_that_loses_nothing(home: Home) -> None:
    (home.path / "tasks.py").write_text(TASKS)
    home.start("serve.log", "serve", "--data", "./data", "--port", "0", "--grpc-port", "0", "--http-port", "0")
    port = home.until(lambda: re.search(r"Heapline on port (\d+)", home.said("serve.log")))[1]
    home.environment["HEAPLINE_URL"] = f"localhost:{port}"
    home.python(MANY)
    assert re.fullmatch(r"[0-9A-Z]{26}\n", home.python(ONE))

    flags = ("worker", "tasks:app", "--concurrency", "2", "--visibility", "2")
    worker = home.start("first.log", *flags)
    home.until(lambda: home.said("first.log").count("mail to") >= 5)
    mails = re.findall(r"mail to (\S+)", home.said("first.log"))
    assert "ann@example.org" in mails[:2]  # the most urgent one is first
    worker.send_signal(signal.SIGKILL)
    worker.wait()

    second = home.start("second.log", *flags)
    wanted = {"ann@example.org", *(f"user{n}@example.org" for n in range(1, 60))}
    both = ("first.log", "second.log")
    home.until(lambda: {mail for log in both for mail in re.findall(r"mail to (\S+)", home.said(log))} == wanted)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0
    repeated = sum(home.said(log).count("mail to") for log in both) - len(wanted)
    assert repeated <= 2  # at most those in progress
