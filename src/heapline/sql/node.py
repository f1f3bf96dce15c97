"""State that the handlers of one node share: its shards, counters and waiting pops."""

from __future__ import annotations

import asyncio
import contextlib
from functools import lru_cache, partial

from heapline.clock import Clock, SystemClock
from heapline.contract.config import parse_topic
from heapline.contract.errors import Closed
from heapline.journal.disk import Disk, RealDisk
from heapline.owned_tasks import OwnedTasks
from heapline.sql.buffer import BatchFlusher, WriteBuffer
from heapline.sql.config import SqlConfig
from heapline.sql.counters import Counters, Firings
from heapline.sql.flusher import Flusher
from heapline.sql.home import Home
from heapline.sql.placement import shard_of
from heapline.sql.pops import PopQueue
from heapline.sql.ready_queue import ReadyQueue
from heapline.sql.redis import Redis
from heapline.sql.redis_buffer import RedisFlusher
from heapline.sql.shard import CLOSE_SECONDS, Name, Shard
from heapline.sql.timekeeper import Timekeeper
from heapline.sql.unit_store import UnitStore
from heapline.sql.wal import Wal, WalDirectory

QUEUES_MAX = 10_000  # topics whose ready queue is remembered


class Node:
    def __init__(self, config: SqlConfig) -> None:
        self.config = config
        self.shards = [Shard(index, config) for index in range(len(config.postgres))]
        self.timekeepers = [Timekeeper(shard, config, self.counters) for shard in self.shards]
        self.redis = None if config.redis is None else Redis(config.redis)
        self.clock: Clock = SystemClock()
        self.buffers: list[WriteBuffer | None] = [None] * len(self.shards)
        self.redis_flushers: list[RedisFlusher] = []  # one per shard, if Redis is used
        self.disk: Disk = RealDisk()
        self._wal: WalDirectory | None = None
        self.tasks = OwnedTasks()
        self._counters: dict[str, Counters] = {}  # by topic
        self._pops: dict[str, PopQueue] = {}  # by topic, while pops wait
        self.ready_queues: dict[str, ReadyQueue] = {}  # by topic, of those that had pops
        self.scheduling = [asyncio.Lock() for _ in self.shards]  # held by the one firing or change of a schedule
        self.firings = Firings()
        self.is_open = False

    async def open(self) -> None:
        """Connect to all shards and start what runs in the background."""
        ends = await asyncio.gather(*(shard.open() for shard in self.shards), return_exceptions=True)
        for error in filter(None, ends):
            raise error
        if self.redis is not None:
            await self._open_redis(self.redis)
        if self.config.wal is not None:
            self._wal = WalDirectory(self.disk, self.config.wal)
            await self._open_wal(self._wal)
        for timekeeper in self.timekeepers:
            timekeeper.start()
        self.is_open = True

    async def _open_redis(self, redis: Redis) -> None:
        """Connect, and start to flush what any node has left there."""
        await redis.open(self.shards[0].deployment)
        config = self.config
        for index, shard in enumerate(self.shards):
            store = UnitStore(shard, self.timekeepers[index])
            flusher = RedisFlusher(shard, redis, store, self.clock, config.poll_interval, config.slow_mode)
            self.redis_flushers.append(flusher)
            if config.policy == "redis":
                self.buffers[index] = WriteBuffer(shard, flusher, self.clock, config.poll_interval)
            flusher.start()

    async def _open_wal(self, directory: WalDirectory) -> None:
        """Open the log of each shard, and start to flush what an earlier process left there."""
        config = self.config
        await asyncio.to_thread(directory.open, self.shards[0].deployment, len(self.shards))
        for index, shard in enumerate(self.shards):
            identity, path = directory.identity, directory.log_path(index)
            wal = Wal(directory.disk, path, identity.logs[index], identity.owners, self.clock.wall_ms)
            store = UnitStore(shard, self.timekeepers[index])
            flusher = Flusher(shard, wal, store, self.clock, config.poll_interval, config.wal_keep)
            self.buffers[index] = WriteBuffer(shard, flusher, self.clock, config.poll_interval)
            await flusher.open()

    async def _close_buffers(self) -> None:
        """Move to Postgres what this node has acknowledged, and stop."""
        buffers = [buffer for buffer in self.buffers if buffer is not None]
        await asyncio.gather(*(buffer.drain(self.config.drain_seconds) for buffer in buffers))
        flushers: list[BatchFlusher] = [buffer.flusher for buffer in buffers]
        flushers += [flusher for flusher in self.redis_flushers if flusher not in flushers]
        await asyncio.gather(*(flusher.close() for flusher in flushers))
        if self._wal is not None:
            self._wal.close()

    async def close(self) -> None:
        self.is_open = False
        for queue in list(self._pops.values()):
            queue.close(Closed())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.tasks.join()
        await self.tasks.cancel()
        await self._close_buffers()
        await asyncio.gather(*(timekeeper.close() for timekeeper in self.timekeepers))
        if self.redis is not None:
            await self.redis.close()
        await asyncio.gather(*(shard.close() for shard in self.shards))

    async def tick(self) -> None:
        """Do everything that is due by now; for clocks that tests advance."""
        for buffer in filter(None, self.buffers):
            await buffer.flusher.flush_all()
            buffer.forget()
        for timekeeper in self.timekeepers:
            await timekeeper.tick()
        for shard in self.shards:
            shard.wakeups.wake_all()

    def home(self, topic: str) -> Home:
        """Return the shard and name of a topic."""
        if not self.is_open:
            raise Closed
        name = parsed(topic)
        index = shard_of(*name, len(self.shards))
        return Home(
            self.shards[index], name, self.counters(name.canonical), self.timekeepers[index], self.buffers[index]
        )

    def flushers(self) -> list[tuple[int, BatchFlusher]]:
        """Return what moves enqueues to Postgres, by shard: that of the policy, or else that of Redis."""
        found: dict[int, BatchFlusher] = dict(enumerate(self.redis_flushers))
        found |= {index: buffer.flusher for index, buffer in enumerate(self.buffers) if buffer is not None}
        return sorted(found.items())

    def counters(self, topic: str) -> Counters:
        found = self._counters.get(topic)
        if found is None:
            found = self._counters[topic] = Counters()
        return found

    def all_counters(self) -> list[tuple[str, Counters]]:
        """Return the counters of the topics that this node has used, by topic."""
        return list(self._counters.items())

    def pops(self, home: Home) -> PopQueue:
        """Return the queue of pops on a topic."""
        topic = home.name.canonical
        found = self._pops.get(topic)
        if found is None:
            on_idle = partial(self._pops.pop, topic, None)
            queue = self._ready_queue(home)
            found = self._pops[topic] = PopQueue(home, self.tasks, self.config.poll_interval, on_idle, queue)
        return found

    def _ready_queue(self, home: Home) -> ReadyQueue | None:
        topic = home.name.canonical
        if self.redis is not None and topic not in self.ready_queues:
            if len(self.ready_queues) >= QUEUES_MAX:
                self.ready_queues.clear()
            self.ready_queues[topic] = ReadyQueue(self.redis, home, self.tasks)
        return self.ready_queues.get(topic)


@lru_cache(8192)
def parsed(topic: str) -> Name:
    return Name(*parse_topic(topic))
