"""A pool of worker processes on real NATS servers: start, kill, pause and restart them, and read what they hold.

Their records remain when they have ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heapline.assign.manager import boot_time
from tests.integration.holding_record import Record, overlapping, seen_by_two
from tests.integration.nats_rig import Servers, pause, until

ROOT = Path(__file__).parents[2]
TAIL = 64 << 10
FRESH = 2.0  # seconds; an older sample proves nothing about now


class Worker:
    """One process and its record."""

    def __init__(self, name: str, directory: Path, settings: dict[str, Any]) -> None:
        self.name, self._path, self._log = name, directory / f"{name}.jsonl", directory / f"{name}.log"
        given = {**settings, "record": str(self._path)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.pool_worker", json.dumps(given)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def record(self) -> Record:
        return Record.read(self._path)

    def tail(self) -> Record:
        """Return the end of the record, for a quick check."""
        if not self._path.exists():
            return Record(self.name, [])
        with self._path.open("rb") as file:
            file.seek(max(0, self._path.stat().st_size - TAIL))
            whole = file.read().rpartition(b"\n")[0]
        lines = whole.splitlines()[1:] if len(whole) > TAIL // 2 else whole.splitlines()
        return Record(self.name, [json.loads(line) for line in lines])

    def has_started(self) -> bool:
        assert self.process.poll() is None, f"{self.name} has ended: {self._log.read_text(encoding='utf-8')[-2000:]}"
        return self.record.last("started") is not None

    def is_fresh(self) -> bool:
        found = self.tail().last("saw")
        return found is not None and boot_time() - found["t"] < FRESH

    def pause(self) -> None:
        pause(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.resume()
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop cleanly."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self._log.read_text(encoding="utf-8")[-2000:]


class Pool:
    """All worker processes, running and ended."""

    def __init__(self, directory: Path, servers: Servers, partitions: int, config: dict[str, Any]) -> None:
        self._directory = directory / "workers"
        self._directory.mkdir()
        self.partition_count = partitions
        self._settings = {
            "servers": servers.urls,
            "replicas": len(servers.nodes),
            "partitions": partitions,
            "config": config,
        }
        self.workers: list[Worker] = []  # running
        self.all: list[Worker] = []  # running and ended

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        there = [worker for worker in self.all if worker.process.poll() is None]
        if kind is not None and there:  # the test failed: have them log what they wait for
            for worker in there:
                worker.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
        for worker in self.all:
            if worker.process.poll() is None:
                worker.kill()

    def start(self, count: int) -> list[Worker]:
        new = [Worker(f"p{len(self.all) + n:03}", self._directory, self._settings) for n in range(count)]
        self.workers += new
        self.all += new
        return new

    def remove(self, worker: Worker) -> None:
        self.workers.remove(worker)

    def holders(self) -> dict[str, str]:
        """Return who holds what, by the workers' own last samples."""
        found: dict[str, str] = {}
        for worker in self.workers:
            tail = worker.tail()
            if worker.is_fresh():
                found.update(dict.fromkeys(tail.held_now(), tail.worker))
        return found

    def until_started(self) -> None:
        until(lambda: all(worker.has_started() for worker in self.workers), 120)

    def until_all_is_held(self, timeout: float = 120) -> float:
        """Wait until every partition is held again and return the seconds it took."""
        began = time.monotonic()
        until(lambda: len(self.holders()) == self.partition_count, timeout)
        return time.monotonic() - began

    def until_all_have_renewed(self, since: float) -> None:
        """Wait until every worker has renewed its lease after `since`, so the store answers again."""
        until(lambda: all((worker.tail().last("lease") or {"t": 0})["t"] > since for worker in self.workers), 120)

    def leader(self) -> Worker:
        """Return a worker that believes it leads."""
        found: list[Worker] = []

        def is_found() -> bool:
            found[:] = [w for w in self.workers if w.is_fresh() and (w.tail().last("saw") or {}).get("leads")]
            return bool(found)

        until(is_found)
        return found[0]

    def restart_one_by_one(self, workers: Sequence[Worker]) -> None:
        for worker in list(workers):
            self.remove(worker)
            worker.stop()
            [new] = self.start(1)
            until(new.has_started, 60)
            before, after = worker.record.worker, new.record.worker
            assert after == before, f"{before} came back as {after}"

    def stop(self) -> None:
        """Stop all workers cleanly, one after the other."""
        for worker in list(self.workers):
            self.remove(worker)
            worker.stop()

    def check(self) -> None:
        """Assert that no partition ever had two holders."""
        records = [worker.record for worker in self.all]
        assert sum(len(record.holdings()) for record in records) >= self.partition_count
        assert overlapping(records) == []
        assert seen_by_two(records) == []
