"""Where a broker lives while the contract is tried on it: how it is opened, closed and opened again, and its time.

A new broker joins the suite by one class here and one line in `WORLDS`; no test knows which broker it talks to.
A world that cannot steer its broker's time lets `advance` sleep and says so in `controls_time`: what would take
minutes is then left out.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec

import heapline
from heapline.client.transports.grpc import GrpcBroker
from heapline.client.transports.http import HttpBroker
from heapline.contract.broker import Broker
from heapline.contract.config import BrokerConfig
from heapline.engine import EmbeddedBroker
from heapline.journal.disk import File, RealDisk, RealFile
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import GATHER_STEPS, ServerSettings
from heapline.testing.clock import FakeClock
from heapline.testing.memory import PATH, MemoryBroker
from heapline.testing.memory_disk import MemoryDisk

Memory = Literal["snapshot", "journal"]


class World(Protocol):
    broker: Broker
    controls_time: bool
    log_is_bare: bool  # nothing stands in the log but what was asked for: this client opens no epochs of its own
    small: dict[str, Any]  # settings that make a topic cheap to create

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reopen(self, memory: Memory = "snapshot") -> Broker:
        """Close and open again, from what it likes to remember by or from its log alone, where it knows the two."""
        ...

    async def advance(self, seconds: float) -> None:
        """Time passes, and what it brings about has happened."""
        ...

    async def away(self, seconds: float) -> Broker:
        """Time passes while the broker is closed."""
        ...

    def now(self) -> datetime:
        """The broker's wall time."""
        ...


class _UnsyncedFile(RealFile):
    def fdatasync(self) -> None:
        pass


class UnsyncedDisk(RealDisk):
    """Real files, nothing synced: what the contract says does not depend on power cuts, and the suite is quicker.
    That answers wait for the sync is shown in tests/unit/engine, what a power cut leaves behind in tests/simulation."""

    def open(self, path: str, *, write: bool = False) -> File:
        return _UnsyncedFile(path, os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC))

    def create(self, path: str) -> File:
        return _UnsyncedFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640))

    def fsync_dir(self, path: str) -> None:
        pass


class EmbeddedWorld:
    """`heapline.open` on a directory, with a clock that is moved by hand."""

    controls_time = True
    log_is_bare = True
    small: ClassVar[dict[str, Any]] = {"segment_bytes": 1 << 20, "max_payload_bytes": 64 << 10}

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "data"
        self.clock = FakeClock()
        self.config = BrokerConfig(spare_segment_bytes=0, reclaim_interval=0.05)
        self.broker: EmbeddedBroker

    async def start(self) -> None:
        self.broker = EmbeddedBroker(
            str(self.directory), config=self.config, disk=UnsyncedDisk(), clock=self.clock
        )  # fmt: skip
        await self.broker.__aenter__()

    async def stop(self) -> None:
        await self.broker.close()

    async def reopen(self, memory: Memory = "snapshot") -> Broker:
        await self.stop()
        if memory == "journal":
            for folder in self.directory.glob("topics/*/*/snapshots"):
                shutil.rmtree(folder)
                folder.mkdir()
        await self.start()
        return self.broker

    async def away(self, seconds: float) -> Broker:
        await self.stop()
        self.clock.advance(seconds)
        await self.start()
        await self.advance(0)
        return self.broker

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for info in await self.broker.list_topics():
            for _ in range(2):  # the first call is decided before what time brings, the second after it
                await self.broker.stats(info.name)
        await self.engine.fire_schedules()

    @property
    def engine(self) -> EmbeddedBroker:
        """The broker that keeps the time."""
        return self.broker

    def now(self) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self.clock.wall_ms())


class GrpcWorld(EmbeddedWorld):
    """The same broker behind a real socket: `GrpcBroker` talks to a server of this process, so time can be steered."""

    async def start(self) -> None:
        config = msgspec.structs.replace(self.config, gather_steps=GATHER_STEPS)
        self.behind = EmbeddedBroker(str(self.directory), config=config, disk=UnsyncedDisk(), clock=self.clock)
        await self.behind.__aenter__()
        settings = ServerSettings(grpc_port=0, http_port=0, stop_grace=1.0)
        self.server = Server(self.behind, NoAuthGuard(), settings)
        await self.server.start()
        self.broker = await self.connect(f"127.0.0.1:{self.server.grpc_port}").__aenter__()  # type: ignore[attr-defined]

    def connect(self, target: str) -> Broker:
        return GrpcBroker(target)

    async def stop(self) -> None:
        await self.broker.close()
        await self.server.stop()
        await self.behind.close()

    @property
    def engine(self) -> EmbeddedBroker:
        return self.behind


class ConnectWorld(GrpcWorld):
    """`heapline.connect`, to the same server."""

    log_is_bare = False

    def connect(self, target: str) -> Broker:
        return heapline.connect(target, deadline=20.0)


class HttpWorld(GrpcWorld):
    """The same over HTTP/JSON."""

    async def start(self) -> None:
        await super().start()
        await self.broker.close()
        self.broker = await HttpBroker(f"http://127.0.0.1:{self.server.http_port}").__aenter__()  # type: ignore[assignment]


class MemoryWorld(EmbeddedWorld):
    """The broker that users test with: no files, no threads."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.disk = MemoryDisk()

    async def start(self) -> None:
        self.broker = MemoryBroker(self.clock, disk=self.disk, reclaim_interval=self.config.reclaim_interval)
        await self.broker.__aenter__()

    async def reopen(self, memory: Memory = "snapshot") -> Broker:
        await self.stop()
        if memory == "journal":
            top = f"{PATH}/topics"
            for namespace in self.disk.listdir(top):
                for folder in self.disk.listdir(f"{top}/{namespace}"):
                    self.disk.remove_tree(f"{top}/{namespace}/{folder}/snapshots")
                    self.disk.mkdir(f"{top}/{namespace}/{folder}/snapshots")
        await self.start()
        return self.broker


WORLDS: dict[str, Callable[[Path], World]] = {
    "embedded": EmbeddedWorld, "memory": MemoryWorld, "grpc": GrpcWorld, "connect": ConnectWorld, "http": HttpWorld,
}  # fmt: skip

Picture = dict[str, Any]


async def picture(hl: Broker, topic: str = "jobs") -> Picture:
    """All that can be seen of a topic, to be compared before and after a call that must change nothing."""
    stats = await hl.stats(topic)
    return {
        "counts": (stats.ready, stats.delayed, stats.leased, stats.dead, stats.paused),
        "offsets": await hl.offsets(topic),
        "waiting": await hl.peek(topic, 1000),
        "dead": await hl.dlq_list(topic, 1000),
        "config": next(info.config for info in await hl.list_topics() if info.name == topic),
    }


async def put(hl: Broker, *priorities: int, topic: str = "jobs", **options: Any) -> list[int]:
    """Enqueue one message a priority, its payload the priority as text; returns the ids."""
    results = await hl.enqueue_batch(
        topic, [heapline.Outgoing(str(p).encode(), priority=p, **options) for p in priorities]
    )
    return [result.id for result in results]


async def take(hl: Broker, topic: str = "jobs", **options: Any) -> heapline.Message:
    """Pop the one message that must be there."""
    messages = await hl.pop(topic, 1, **options)
    assert messages, "nothing to pop"
    return messages[0]


async def all_fired(hl: Broker, topic: str = "jobs") -> None:
    """A herd of timers that are all due fires in slices: wait for the last."""
    async with asyncio.timeout(30):
        while (await hl.stats(topic)).delayed:  # noqa: ASYNC110 - nothing tells the end of it
            await asyncio.sleep(0)


async def drain(hl: Broker, topic: str = "jobs") -> list[bytes]:
    """Payloads of all that is ready, in the order in which single pops give them; all acked."""
    payloads: list[bytes] = []
    while messages := await hl.pop(topic):
        payloads += [m.payload for m in messages]
        await hl.ack(messages)
    return payloads
