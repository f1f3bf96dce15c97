"""One worker process that records what it holds: `python -m tests.integration.pool_worker`.

The record has one JSON line per event, written immediately, so SIGKILL loses nothing: leases as the manager knows them,
partitions added and dropped with their fences, and regular samples of `holds`. Times are the machine's clock since
boot, which all processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import Any

from heapline.assign.config import Config
from heapline.assign.hooks import Hooks
from heapline.assign.manager import Manager, boot_time
from heapline.assign.metrics import NoMetrics
from heapline.assign.nats_kv import NatsKV
from heapline.assign.partitions import Partition, StaticSource
from heapline.assign.states import State

SAMPLE_INTERVAL = 0.1  # seconds between two samples of what is held


class Recorder(NoMetrics):
    """Records the manager's metrics and hook calls with their times."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.manager: Manager
        self._removed: Sequence[Partition] = ()

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, "t": boot_time(), **facts}).encode() + b"\n")

    def lease(self) -> None:
        member = self.manager._member
        if member is not None:
            self.write("lease", worker=member.worker, session=member.session, ends_at=member.lease.ends_at)

    def record_heartbeat(self, worker_id: str, success: bool) -> None:
        if success:
            self.lease()

    def record_assignment_change(self, added: int, removed: int, version: int) -> None:
        # The manager has forgotten them by now, so they were held until here.
        self.write("drop", partitions=[partition.id for partition in self._removed])
        self._removed = ()

    async def changed(self, added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        self.lease()
        self.write("add", partitions={p.id: self.manager.fence(p) for p in added})
        await asyncio.sleep(random.uniform(0, 0.02))  # a real hook takes a while
        self._removed = removed

    def state(self, before: State, after: State) -> None:
        self.write("state", state=after.name)

    def error(self, error: Exception) -> None:
        self.write("error", error=type(error).__name__, detail=str(error))

    async def sample_loop(self, partitions: Sequence[Partition]) -> None:
        while True:
            before = boot_time()
            held = [partition.id for partition in partitions if self.manager.holds(partition)]
            self.write("saw", partitions=held, before=before, leads=self.manager.is_leader)
            await asyncio.sleep(SAMPLE_INTERVAL)


def print_tasks() -> None:
    """Log what every task waits for, for a test that timed out."""
    for task in asyncio.all_tasks():
        task.print_stack()


async def main(settings: dict[str, Any]) -> None:
    recorder = Recorder(settings["record"])
    partitions = [Partition((f"tool{n // 4}", f"chamber{n % 4}")) for n in range(settings["partitions"])]
    hooks = Hooks(on_assignment_changed=recorder.changed, on_state_changed=recorder.state, on_error=recorder.error)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print_tasks)
    async with await NatsKV.connect(settings["servers"], bucket="pool", replicas=settings["replicas"]) as kv:
        config = Config.from_dict(settings["config"])
        recorder.manager = manager = Manager(config, kv, StaticSource(partitions), hooks=hooks, metrics=recorder)
        recorder.write("born", pid=os.getpid())
        looking = asyncio.create_task(recorder.sample_loop(partitions))
        await manager.start()
        recorder.write("started", worker=manager.worker_id)
        await stop.wait()
        try:
            await manager.stop()
            recorder.write("stopped", worker=manager.worker_id)
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
