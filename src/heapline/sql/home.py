"""A topic as the handlers see it: its name, its shard, and the timekeeper to notify of changes."""

from __future__ import annotations

from heapline.contract.config import TopicConfig
from heapline.contract.errors import CorruptionError
from heapline.sql.buffer import WriteBuffer, is_buffered
from heapline.sql.counters import Counters
from heapline.sql.redis_buffer import BufferDown
from heapline.sql.shard import EVERY_ANSWER, Name, Shard
from heapline.sql.timekeeper import Timekeeper


class Home:
    """The location of a topic, which may not exist there."""

    def __init__(
        self, shard: Shard, name: Name, counters: Counters, timekeeper: Timekeeper, buffer: WriteBuffer | None = None
    ) -> None:
        self.shard, self.name, self.counters, self._timekeeper = shard, name, counters, timekeeper
        self.buffer = buffer  # of enqueues; None: they go to the database

    async def flush(self, required: bool = True) -> None:
        """Wait until the database has what this node has acknowledged for the topic.

        If it is in Redis, and Redis is down, raise BufferDown; if the log is damaged or belongs to another process,
        CorruptionError. Unless it is required, continue without it.
        """
        try:
            if self.buffer is not None:
                await self.buffer.flusher.flush(self.name.canonical)
        except (BufferDown, CorruptionError):
            if required:
                raise

    async def durability(self, config: TopicConfig) -> str:
        """Return what an answer on the topic promises."""
        if self.buffer is None or not is_buffered(config):
            return self.shard.durability
        own = await self.buffer.flusher.durability()
        return own if own != EVERY_ANSWER else self.shard.durability

    def forget(self) -> None:
        """Let enqueues read the topic's settings again."""
        if self.buffer is not None:
            self.buffer.forget(self.name)

    def wake(self) -> None:
        """Wake pops that wait for this topic, on all nodes."""
        self.shard.wakeups.wake(self.name.canonical)

    def expect(self, at: int) -> None:
        """Let the timekeeper act at this time (ms, by the database's clock)."""
        self._timekeeper.expect(at)
