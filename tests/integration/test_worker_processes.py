"""Real `heapline worker` processes on a real server: killed with -9 at random, drained, reloaded, orphaned."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.transports.native import NativeBroker
from tests.integration.test_server_kill import Process as Server

pytestmark = pytest.mark.slow
SOURCE = str(Path(heapline.__file__).parents[1])

TASKS = """
import asyncio, json, os, time
import heapline

app = heapline.App()

def record(what, call):
    m = call.message
    line = {"what": what, "id": m.id, "token": m.token, "at": time.time(), "until": m.deadline.timestamp()}
    file = os.open("record.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps(line).encode() + b"\\n")  # one write: whole, or not there
    os.close(file)

async def beats(call):
    while True:
        await asyncio.sleep(0.1)
        record("beat", call)  # which tells how far the lease goes by now

@app.middleware
async def recorded(call, following):
    record("start", call)
    beating = asyncio.ensure_future(beats(call))
    try:
        result = await following(call)
    except BaseException:
        record("stop", call)
        raise
    finally:
        beating.cancel()
    record("end", call)
    return result

@app.task(topic="jobs", retry_on={OSError: 0.1})
async def work(seconds: float) -> None:
    await asyncio.sleep(seconds)

@app.task(topic="jobs")
def plain(seconds: float) -> None:
    time.sleep(seconds)
"""


class Worker:
    """`heapline worker tasks:app …` in a directory."""

    def __init__(self, home: Path, target: str, *flags: str) -> None:
        self.home, self._target, self._flags = home, target, flags
        self.said = ""

    async def __aenter__(self) -> Worker:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "heapline", "worker", "tasks:app", *self._flags, cwd=self.home,
            env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1", "HEAPLINE_URL": self._target},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self._reading = asyncio.ensure_future(self._read())
        return self

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said += line.decode()

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 60)
        self._reading.cancel()

    @property
    def children(self) -> list[int]:
        """All processes that were started."""
        return [int(pid) for pid in re.findall(r"at once, process (\d+)", self.said)]


async def until(holds: Callable[[], Any], reported: Callable[[], str] = str, seconds: float = 60) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - other processes send no event
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"it did not happen; the worker's output:\n{reported()}") from None


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[Path, str, NativeBroker]]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "tasks.py").write_text(TASKS)
    async with Server(tmp_path / "data", "--insecure-everybody") as server, NativeBroker(server.target) as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20, backoff={"base": 0.0}, max_retries_default=250)
        yield home, server.target, broker


def records(home: Path) -> list[dict[str, Any]]:
    path = home / "record.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(home: Path, what: str) -> int:
    return sum(record["what"] == what for record in records(home))


async def enqueue(broker: heapline.Broker, task: str, *seconds: float) -> list[int]:
    headers = {"heapline-task": task, "content-type": "application/json"}
    messages = [heapline.Outgoing(json.dumps({"seconds": s}).encode(), headers=headers) for s in seconds]
    return [answer.id for answer in await broker.enqueue_batch("jobs", messages)]


def check_one_at_a_time(found: list[dict[str, Any]]) -> None:
    """Within a lease no other worker has the message: the next run begins after its end or after a dead one's lease."""
    lives: defaultdict[int, dict[int, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for record in found:
        lives[record["id"]][record["token"]][record["what"]] = record  # the last heartbeat
    for of_message in lives.values():
        runs = sorted(of_message.values(), key=lambda run: run["start"]["at"])
        for before, after in pairwise(runs):
            over = before.get("end") or before.get("stop")
            until = (before.get("beat") or before["start"])["until"]  # a starved worker may work beyond its lease
            free_at = min(over["at"], until) if over else until
            assert after["start"]["at"] >= free_at - 0.005, (before, after)


async def test_work_of_killed_workers_is_redelivered_to_one_worker(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with served(tmp_path) as (home, target, broker):
        ids = await enqueue(broker, "work", *(rng.choice([0.0, 0.02, 0.1, 1.2]) for _ in range(120)))
        ids += await enqueue(broker, "plain", *(rng.choice([0.0, 0.05, 0.9]) for _ in range(60)))
        flags = ("--processes", "3", "--concurrency", "4", "--visibility", "1.5", "--grace", "20")
        async with Worker(home, target, *flags) as worker:
            await until(lambda: len(worker.children) >= 3, lambda: worker.said)
            killed: set[int] = set()
            for _ in range(6):
                before = len(records(home))
                await until(lambda n=before: len(records(home)) > n or count(home, "end") >= 150, lambda: worker.said)
                alive = [pid for pid in worker.children if pid not in killed]
                if alive:
                    killed.add(victim := rng.choice(alive))
                    os.kill(victim, signal.SIGKILL)
                await asyncio.sleep(rng.uniform(0.05, 0.5))
            await until(lambda: ends(home) == set(ids), lambda: worker.said)
            worker.process.terminate()
            assert await asyncio.wait_for(worker.process.wait(), 60) == 0, worker.said
        assert len(killed) >= 3
        assert "a worker process ended (signal 9); starting another" in worker.said
        stats = await broker.stats("jobs")
        assert (stats.ready, stats.delayed, stats.dead) == (0, 0, 0)
        found = records(home)
        assert len([r for r in found if r["what"] == "start"]) > len(
            ids
        )  # some ran again, so the test proves something
        check_one_at_a_time(found)


async def test_terminated_worker_finishes_running_messages_only(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, broker):
        await enqueue(broker, "work", 1.0, 1.0, 1.0)
        await enqueue(broker, "plain", 1.0)
        async with Worker(home, target, "--concurrency", "2") as worker:
            await until(lambda: count(home, "start") == 2, lambda: worker.said)
            worker.process.terminate()
            assert await asyncio.wait_for(worker.process.wait(), 60) == 0, worker.said
        assert (count(home, "start"), count(home, "end")) == (2, 2)
        stats = await broker.stats("jobs")
        assert (stats.ready, stats.leased) == (2, 0)
        assert "finishing running handlers" in worker.said
        assert "stopped: 2 done in all" in worker.said


async def test_second_signal_stops_a_worker_immediately(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, broker):
        await enqueue(broker, "work", 1000.0)
        async with Worker(home, target, "--grace", "1000") as worker:
            await until(lambda: count(home, "start") == 1, lambda: worker.said)
            worker.process.send_signal(signal.SIGINT)
            await until(lambda: "finishing running handlers" in worker.said, lambda: worker.said)
            worker.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(worker.process.wait(), 30) == 1
            await until(lambda: "second signal: exiting now" in worker.said, lambda: worker.said)
        assert (await broker.stats("jobs")).leased == 1  # redelivered when its lease ends


STUBBORN = """
@app.task(topic="jobs")
async def stubborn(seconds: float) -> None:
    while True:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            pass
"""


async def test_terminated_worker_ends_even_if_a_handler_ignores_cancellation(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, broker):
        (home / "tasks.py").write_text(TASKS + STUBBORN)
        await enqueue(broker, "stubborn", 1000.0)
        async with Worker(home, target, "--grace", "0.5") as worker:
            await until(lambda: count(home, "start") == 1, lambda: worker.said)
            worker.process.terminate()
            assert await asyncio.wait_for(worker.process.wait(), 40) == 0, worker.said
        assert "a handler does not end; its message will be redelivered when its lease ends" in worker.said
        assert (await broker.stats("jobs")).leased == 1


async def test_worker_logs_its_tasks_and_reports_counts_on_sigusr1(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, broker):
        async with Worker(home, target) as worker:
            await enqueue(broker, "work", 0.0, 0.0)
            await until(lambda: count(home, "end") == 2, lambda: worker.said)
            worker.process.send_signal(signal.SIGUSR1)
            await until(lambda: "0 retried, 0 buried" in worker.said, lambda: worker.said)
        assert f"heapline worker tasks:app on {target}, 16 handlers at once" in worker.said
        assert "jobs: work, plain" in worker.said


async def test_sigusr1_does_not_kill_worker_processes_during_startup(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, _), Worker(home, target, "--processes", "2") as worker:
        tasks = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
        await until(lambda: len(tasks.read_text().split()) == 2, lambda: worker.said)
        async with asyncio.timeout(60):
            while len(worker.children) < 2:
                worker.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(0.02)
        assert "a worker process ended" not in worker.said


async def test_changed_source_is_reloaded_by_processes_that_finish_first(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, broker):
        async with Worker(home, target, "--reload") as worker:
            await enqueue(broker, "work", 1.0)
            await until(lambda: count(home, "start") == 1, lambda: worker.said)
            (home / "tasks.py").write_text(TASKS.replace('record("end"', 'record("new end"'))
            await until(lambda: len(worker.children) == 2, lambda: worker.said)
            assert count(home, "end") == 1  # by the old code, before the new one began
            await enqueue(broker, "work", 0.0)
            await until(lambda: count(home, "new end") == 1, lambda: worker.said)
        assert "tasks.py changed; restarting workers" in worker.said


async def test_workers_finish_and_exit_when_their_watcher_is_killed(tmp_path: Path) -> None:
    async with served(tmp_path) as (home, target, broker):
        async with Worker(home, target, "--processes", "2") as worker:
            await until(lambda: len(worker.children) == 2, lambda: worker.said)
            await enqueue(broker, "work", 0.5)
            await until(lambda: count(home, "start") == 1, lambda: worker.said)
            worker.process.kill()
            await until(lambda: not any(map(_is_alive, worker.children)), lambda: worker.said)
        assert count(home, "end") == 1
        stats = await broker.stats("jobs")
        assert (stats.ready, stats.leased) == (0, 0)


async def test_worker_survives_a_killed_and_restarted_server(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "tasks.py").write_text(TASKS)
    async with Server(tmp_path / "data", "--insecure-everybody") as server, NativeBroker(server.target) as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20, backoff={"base": 0.0})
        ids = await enqueue(broker, "work", *[0.05] * 60)
        async with Worker(home, server.target, "--concurrency", "2", "--visibility", "2") as worker:
            await until(lambda: count(home, "end") >= 5, lambda: worker.said)
            server.process.kill()
            await server.process.wait()
            port = server.target.rpartition(":")[2]
            async with Server(tmp_path / "data", "--insecure-everybody", "--port", port):
                done = set[int]()
                await until(lambda: done.update(ends(home)) or done == set(ids), lambda: worker.said)
                worker.process.terminate()
                assert await asyncio.wait_for(worker.process.wait(), 60) == 0, worker.said
    check_one_at_a_time(records(home))


def ends(home: Path) -> set[int]:
    return {record["id"] for record in records(home) if record["what"] == "end"}


async def test_killed_worker_on_its_own_directory_continues_its_work(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS.replace("heapline.App()", 'heapline.App("./data")'))
    async with heapline.open(tmp_path / "data") as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20, backoff={"base": 0.0})
        ids = await enqueue(broker, "plain", *[0.1] * 20)
    flags = ("--concurrency", "2", "--visibility", "1")
    async with Worker(tmp_path, "", *flags) as worker:
        await until(lambda: count(tmp_path, "end") >= 5, lambda: worker.said)
        worker.process.kill()
        await worker.process.wait()
    async with Worker(tmp_path, "", *flags) as worker:
        await until(lambda: ends(tmp_path) == set(ids), lambda: worker.said)
    assert worker.process.returncode == 0
    check_one_at_a_time(records(tmp_path))


FORK = """
import os, sys
from tasks import work

children = []
for n in range(2):
    if (pid := os.fork()) == 0:
        work.enqueue_sync(2.0 + n)
        os._exit(0)
    children.append(pid)
work.enqueue_sync(4.0)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


async def test_forked_children_open_their_own_connections(tmp_path: Path) -> None:
    """Like gunicorn's with --preload: the app is imported before the fork and used after it."""
    async with served(tmp_path) as (home, target, broker):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FORK, cwd=home, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": SOURCE, "HEAPLINE_URL": target},
        )  # fmt: skip
        out, errors = await asyncio.wait_for(process.communicate(), 60)
        assert out == b"[0, 0]\n", errors.decode()
        payloads = sorted(m.payload or b"" for m in await broker.peek("jobs"))
        assert payloads == [b'{"seconds":%s}' % n for n in (b"2.0", b"3.0", b"4.0")]


def _is_alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
