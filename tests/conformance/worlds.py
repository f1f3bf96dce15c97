"""The brokers on which the contract is tested: how each is opened, closed and reopened, and its clock.

A new broker joins the suite by one class here and one line in `WORLDS`; no test knows which broker it talks to.
A world that cannot advance its broker's clock makes `advance` sleep and sets `controls_time`: tests that would take
minutes are then omitted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec

import heapline
from heapline import accelerator
from heapline.client.transports.http import HttpBroker
from heapline.client.transports.native import NativeBroker
from heapline.clock import SystemClock
from heapline.contract.broker import Broker
from heapline.contract.call import HERE
from heapline.contract.config import BrokerConfig
from heapline.contract.message import TopicStats
from heapline.contract.topics import Stats
from heapline.engine import EmbeddedBroker
from heapline.journal.disk import File, RealDisk, RealFile
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import GATHER_STEPS, ServerSettings
from heapline.sql.config import FEATURES
from heapline.testing.clock import FakeClock
from heapline.testing.memory import PATH, MemoryBroker
from heapline.testing.memory_disk import MemoryDisk
from tests.integration.raw_grpc import GrpcBroker
from tests.postgres import fresh_schema, shared_url
from tests.valkey import fresh_redis

Memory = Literal["snapshot", "journal"]


class World(Protocol):
    broker: Broker
    controls_time: bool
    log_is_bare: bool  # the log contains only what the test did: this client opens no epochs by itself
    ids_collide: bool  # messages of two topics may have the same integer
    features: frozenset[str]  # that its broker declares
    small: dict[str, Any]  # settings that make a topic cheap to create

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reopen(self, memory: Memory = "snapshot") -> Broker:
        """Close and reopen, from a snapshot or from the log alone if the broker has both."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let time pass, and wait until everything that became due has happened."""
        ...

    async def away(self, seconds: float) -> Broker:
        """Let time pass while the broker is closed."""
        ...

    def now(self) -> datetime:
        """The broker's wall time."""
        ...


class _UnsyncedFile(RealFile):
    def fdatasync(self) -> None:
        pass


class UnsyncedDisk(RealDisk):
    """Real files, nothing synced: the contract does not depend on power cuts, and this is faster.
    tests/unit/engine shows that answers wait for the sync, tests/simulation what a power cut leaves behind."""

    def open(self, path: str, *, write: bool = False) -> File:
        return _UnsyncedFile(path, os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC))

    def create(self, path: str) -> File:
        return _UnsyncedFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640))

    def fsync_dir(self, path: str) -> None:
        pass


class EmbeddedWorld:
    """`heapline.open` on a directory, with a clock that tests advance."""

    controls_time = True
    log_is_bare = True
    ids_collide = True
    features = EmbeddedBroker.features
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
            for _ in range(2):  # the first call is decided before the due events, the second after them
                await self.broker.stats(info.name)
        await self.engine.fire_schedules()

    @property
    def engine(self) -> EmbeddedBroker:
        """The broker whose clock is used."""
        return self.broker

    def now(self) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self.clock.wall_ms())


class GrpcWorld(EmbeddedWorld):
    """The broker behind a real socket: `GrpcBroker` uses a server in this process, so tests advance its clock."""

    async def start(self) -> None:
        config = msgspec.structs.replace(self.config, gather_steps=GATHER_STEPS)
        self.behind = EmbeddedBroker(str(self.directory), config=config, disk=UnsyncedDisk(), clock=self.clock)
        await self.behind.__aenter__()
        settings = ServerSettings(port=0, grpc_port=0, http_port=0, stop_grace=1.0, **self.settings())
        self.server = Server(self.behind, NoAuthGuard(), settings)
        await self.server.start()
        self.broker = await self.connect().__aenter__()  # type: ignore[attr-defined]

    def settings(self) -> dict[str, Any]:
        """Further settings of the server."""
        return {}

    def connect(self) -> Broker:
        return GrpcBroker(f"127.0.0.1:{self.server.grpc_port}")

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

    def connect(self) -> Broker:
        return heapline.connect(f"127.0.0.1:{self.server.port}", deadline=20.0)


class NativeWorld(GrpcWorld):
    """The broker over the native wire, without the SDK's wrappers."""

    def connect(self) -> Broker:
        return NativeBroker(f"127.0.0.1:{self.server.port}")


class HttpWorld(GrpcWorld):
    """The broker over HTTP/JSON."""

    def connect(self) -> Broker:
        return HttpBroker(f"http://127.0.0.1:{self.server.http_port}")


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


#: The database's clock in tests: it advances only when the test advances it.
HAND_CLOCK = """
CREATE TABLE hand_clock (ms bigint NOT NULL);
INSERT INTO hand_clock VALUES (0);
CREATE OR REPLACE FUNCTION clock_ms() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT ms FROM hand_clock';
"""
#: Empty a schema to what a migration creates; deleting a few rows takes a tenth of the time of creating the tables.
CLEAN = """
DELETE FROM topics; DELETE FROM nodes; DELETE FROM ready; DELETE FROM delayed; DELETE FROM lease; DELETE FROM dead;
DELETE FROM ended; DELETE FROM idempotency_keys; DELETE FROM producers; DELETE FROM sequences; DELETE FROM schedules;
DELETE FROM prepared; DELETE FROM prepared_keys; DELETE FROM prepared_sequences; DELETE FROM decisions;
DELETE FROM attached; DELETE FROM sinks; DELETE FROM flushed_units;
SELECT setval('ready_turn', 0), setval('lease_turn', 0);
"""


class SqlWorld:
    """`heapline.sql.open` on databases that the tests of this process share, with a clock that tests advance."""

    controls_time = True
    log_is_bare = True
    ids_collide = False
    features = FEATURES
    small: ClassVar[dict[str, Any]] = {"max_payload_bytes": 64 << 10}
    shards = 1
    #: The databases of the worlds with this number of shards, created for the first test.
    databases: ClassVar[dict[int, list[str]]] = {}

    def __init__(self, directory: Path) -> None:
        self.settings: dict[str, Any] = {}
        self.broker: Any
        self.behind: Any  # the Postgres broker itself
        self.admins: list[Any] = []
        self.ms = 1767225600000  # 2026, as in the other worlds

    async def start(self) -> None:
        import asyncpg

        if self.shards not in self.databases:
            self.databases[self.shards] = [await self._make_database(shard) for shard in range(self.shards)]
        for url in self.databases[self.shards]:
            admin = await asyncpg.connect(url, server_settings={"search_path": "heapline"})
            await admin.execute(CLEAN)
            self.admins.append(admin)
        await self._move_clock(0)
        await self._open()

    async def _make_database(self, shard: int) -> str:
        import asyncpg

        from heapline.sql.migrations import migrate

        name = fresh_schema()
        connection = await asyncpg.connect(shared_url())
        await connection.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
        await connection.close()
        url = shared_url(name)
        connection = await asyncpg.connect(url, server_settings={"search_path": "heapline"})
        await migrate(connection, "heapline", shard, self.shards)
        await connection.execute(HAND_CLOCK)
        await connection.close()
        return url

    async def _open_node(self) -> Any:
        import heapline.sql

        broker = heapline.sql.open(self.databases[self.shards], **self.settings)
        broker.node.clock = HandClock()
        return await broker.__aenter__()

    async def _open(self) -> None:
        self.broker = self.behind = await self._open_node()

    async def _close(self) -> None:
        await self.broker.close()

    async def stop(self) -> None:
        await self._close()
        for admin in self.admins:
            await admin.close()

    async def reopen(self, memory: Memory = "snapshot") -> Broker:
        await self._close()
        await self._open()
        return self.broker  # type: ignore[no-any-return]

    async def away(self, seconds: float) -> Broker:
        await self._close()
        await self._move_clock(seconds)
        await self._open()
        await self.advance(0)
        return self.broker  # type: ignore[no-any-return]

    async def advance(self, seconds: float) -> None:
        await self._move_clock(seconds)
        await self._tick(self.behind)

    async def _tick(self, node: Any) -> None:
        await node.node.tick()
        await node.fire_schedules()

    async def _move_clock(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)
        for admin in self.admins:
            await admin.execute("UPDATE hand_clock SET ms = $1", self.ms)

    def now(self) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self.ms)


class InTurns(Broker):
    """Nodes behind a load balancer: each command goes to the next one. Totals are those of all nodes."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.nodes, self._next = nodes, itertools.cycle(nodes)

    def do(self, command: Any, context: Any = HERE, /) -> Any:
        if isinstance(command, Stats):
            return self._stats(command, context)
        return next(self._next).do(command, context)

    async def _stats(self, command: Stats, context: Any) -> TopicStats:
        found = [await node.do(command, context) for node in self.nodes]
        totals = [name for name in TopicStats.__struct_fields__ if name.endswith("_total")]
        summed = {name: sum(getattr(stats, name) for stats in found) for name in totals}
        return msgspec.structs.replace(found[0], **summed)  # type: ignore[no-any-return]

    def stream(self, feed: Any, context: Any = HERE, /) -> Any:
        return next(self._next).stream(feed, context)

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()


class LongSqlNodesWorld(SqlWorld):
    """Three nodes at the same time on three databases."""

    shards = 3
    #: The clock does not advance, so all ids have the same milliseconds and the node decides their order; calls to
    #: several nodes are served in any order; and latencies are those of one node.
    not_run: ClassVar[frozenset[str]] = frozenset(
        {"test_equal_priorities_are_served_in_order_of_arrival", "test_producer_object_continues_after_a_restart",
         "test_ids_continue_after_a_restart", "test_part_of_a_committed_or_skipped_version_is_rejected",
         "test_concurrent_pops_get_the_best_messages_in_call_order", "test_waiting_pops_are_served_in_call_order",
         "test_stats_count_how_long_enqueues_pops_and_commits_took"}
    )  # fmt: skip

    async def _open(self) -> None:
        self.broker = self.behind = InTurns([await self._open_node() for _ in range(3)])

    async def _tick(self, node: Any) -> None:
        for one in node.nodes:
            await super()._tick(one)


class SqlNodesWorld(LongSqlNodesWorld):
    """Two nodes, for two modules that nodes must agree on; opening nine pools takes half a second of CPU per test."""

    modules: ClassVar[frozenset[str]] = frozenset({"test_leases", "test_retries"})


class ServedSqlWorld(SqlWorld):
    """The Postgres broker behind a server, over the native wire."""

    #: The server adds little to a broker that has its own tests, so these parts of the suite must do.
    modules: ClassVar[frozenset[str]] = frozenset(
        {"test_batch", "test_dead_letters", "test_pop", "test_prepared_batches", "test_schedules"}
    )
    #: The client repeats a cancelled pop by its request id, to release what the first one may have leased. The repeat
    #: may lease a message that arrives meanwhile, and then releases it.
    not_run: ClassVar[frozenset[str]] = frozenset({"test_cancelled_wait_leases_nothing"})

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    async def _open(self) -> None:
        await super()._open()
        settings = ServerSettings(data=self.directory, port=0, grpc_port=0, http_port=0, stop_grace=0.0)
        self.server = Server(self.behind, NoAuthGuard(), settings)
        await self.server.start()
        self.broker = await NativeBroker(f"127.0.0.1:{self.server.port}").__aenter__()

    async def _close(self) -> None:
        await self.broker.close()
        await self.server.stop()
        await self.behind.close()


class PureWorld(EmbeddedWorld):
    """`heapline.open` without the accelerator: the same broker on the functions in Python."""

    async def start(self) -> None:
        accelerator.use(False)
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        if accelerator.native is not None:
            accelerator.use(True)


class HandClock(SystemClock):
    """The clock of a node whose database has a HAND_CLOCK: it never advances between two reads of that one."""

    def boot_ms(self) -> int:
        return 0


#: The tests of what the policies change in the write and read paths of the Postgres broker.
PATHS = frozenset(
    {"test_batch", "test_by_id", "test_enqueue", "test_leases", "test_limits", "test_order", "test_pause_and_purge",
     "test_pop", "test_restart", "test_stats", "test_time"}
)  # fmt: skip


class SqlWalWorld(SqlWorld):
    """The Postgres broker with a write-ahead log, and topics that use it."""

    small: ClassVar[dict[str, Any]] = {"max_payload_bytes": 64 << 10, "k": 100}
    modules = PATHS

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.settings = {"wal": str(directory / "wal")}


class LongSqlRedisWorld(SqlWalWorld):
    """The Postgres broker with a ready queue in Redis. Pops of up to 49 messages take from it, in no strict order."""

    modules = PATHS - {"test_order"} | {"test_retries"}
    #: A message that arrives or is redelivered after others were prefetched may be served after them.
    not_run: ClassVar[frozenset[str]] = frozenset(
        {"test_expired_lease_returns_message_at_its_original_priority", "test_pause_stops_only_delivery"}
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.settings["redis"] = fresh_redis()


class SqlRedisWorld(LongSqlRedisWorld):
    """The ready queue, for the modules that depend on it most."""

    modules = frozenset({"test_pause_and_purge", "test_pop", "test_retries"})


class LongSqlRedisBufferWorld(LongSqlRedisWorld):
    """The Postgres broker with Redis instead of the log: Redis acknowledges enqueues."""

    modules = frozenset({"test_enqueue", "test_leases", "test_pause_and_purge", "test_restart"})

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.settings = {"redis": self.settings["redis"], "durability": "redis"}


class SqlRedisBufferWorld(LongSqlRedisBufferWorld):
    """The buffer in Redis, for the modules that depend on it most."""

    modules = frozenset({"test_enqueue", "test_pause_and_purge"})


WORLDS: dict[str, Callable[[Path], World]] = {
    "embedded": EmbeddedWorld, "pure": PureWorld, "memory": MemoryWorld, "grpc": GrpcWorld, "connect": ConnectWorld,
    "http": HttpWorld,
    "native": NativeWorld,
    "sql": SqlWorld, "sql-nodes": SqlNodesWorld, "sql-wal": SqlWalWorld,
    "sql-redis": SqlRedisWorld, "sql-redis-buffer": SqlRedisBufferWorld,
    "served-sql": ServedSqlWorld,
}  # fmt: skip
#: Worlds of `make soak`.
LONG_WORLDS: dict[str, Callable[[Path], World]] = {
    "sql-nodes-long": LongSqlNodesWorld, "sql-redis-long": LongSqlRedisWorld,
    "sql-redis-buffer-long": LongSqlRedisBufferWorld,
}  # fmt: skip

Picture = dict[str, Any]


async def picture(hl: Broker, topic: str = "jobs") -> Picture:
    """Everything visible of a topic, to compare before and after a call that must change nothing."""
    stats = await hl.stats(topic)
    return {
        "counts": (stats.ready, stats.delayed, stats.leased, stats.dead, stats.paused),
        "offsets": await hl.offsets(topic) if await has_feature(hl, "log") else {},
        "waiting": await hl.peek(topic, 1000),
        "dead": await hl.dlq_list(topic, 1000),
        "config": next(info.config for info in await hl.list_topics() if info.name == topic),
    }


async def has_feature(hl: Broker, feature: str) -> bool:
    return feature in (await hl.describe()).features


async def put(hl: Broker, *priorities: int, topic: str = "jobs", **options: Any) -> list[int]:
    """Enqueue one message per priority with the priority as payload; return the ids."""
    results = await hl.enqueue_batch(
        topic, [heapline.Outgoing(str(p).encode(), priority=p, **options) for p in priorities]
    )
    return [result.id for result in results]


async def take(hl: Broker, topic: str = "jobs", **options: Any) -> heapline.Message:
    """Pop the only ready message."""
    messages = await hl.pop(topic, 1, **options)
    assert messages, "nothing to pop"
    return messages[0]


async def all_fired(hl: Broker, topic: str = "jobs") -> None:
    """A herd of timers that are all due fires in slices: wait for the last."""
    async with asyncio.timeout(30):
        while (await hl.stats(topic)).delayed:  # noqa: ASYNC110 - nothing tells the end of it
            await asyncio.sleep(0)


async def drain(hl: Broker, topic: str = "jobs") -> list[bytes]:
    """Pop and ack everything that is ready, one by one; return the payloads."""
    payloads: list[bytes] = []
    while messages := await hl.pop(topic):
        payloads += [m.payload for m in messages]
        await hl.ack(messages)
    return payloads
