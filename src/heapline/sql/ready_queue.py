"""The ready queue of one topic in Redis: which messages the next pops take, over all nodes.

*Entries are hints.* A prefetched message stays in `ready`. Its entry in Redis is only its place in the order, so
nothing has to be returned if Redis, a node or an entry is lost, and all calls see the message as ready. A pop takes
entries from Redis and leases these messages by their ids. Postgres decides: the message must still be ready, the topic
must not be paused, and at most `depth_of` ready messages that are not taken may be better. So an entry that Redis
brings back after a failover leases nothing, and it does not matter how old the queue is, or how many nodes filled it.

*Filling.* The queue has no process of its own. After a pop that was fully served from the database, or that left the
queue half empty, this node reads the best messages again and replaces the queue, except for entries that were popped
within POPPED_MS: a transaction may be leasing them. A key in Redis keeps the other nodes from filling the queue at the
same time. Entries that are not taken expire after KEEP_MS. Topics without pops cost nothing.

Pops go to the database as before if the queue has fewer entries than they want, and while Redis is down. Topics whose
order is strict (`k = 1`), or whose leases are limited (`max_inflight`), are not prefetched.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

from heapline.contract.config import TopicConfig
from heapline.contract.errors import HeaplineError
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.home import Home
from heapline.sql.layout import Place
from heapline.sql.redis import Redis, RedisDown, filling_key, popped_key, queue_key
from heapline.sql.shard import Topic

log = Log("heapline.sql")
DEPTH_MAX = 1000  # entries of a topic
KEEP_MS = 5000  # that entries are kept
POPPED_MS = 1000  # in which a popped entry is not prefetched again
FILL_MS = 20  # in which at most one node fills a queue
VAIN_MAX = 8  # takes in a row that leased nothing, until the queue is dropped
#: Pops the best ARGV[1] entries of KEYS[1] and records them in KEYS[2]. If there are fewer, it deletes the queue: the
#: best messages are leased from the database, and with them these. Returns how many are left, and the entries.
POP = """
local left = redis.call('ZCARD', KEYS[1]) - ARGV[1]
if left < 0 then
  redis.call('UNLINK', KEYS[1])
  return {0, {}}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local popped = redis.call('ZPOPMIN', KEYS[1], ARGV[1])
local entries = {}
for i = 1, #popped, 2 do
  redis.call('ZADD', KEYS[2], now, popped[i])
  entries[#entries + 1] = popped[i]
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return {left, entries}
"""
#: Removes the entries from ARGV[2] on from KEYS[1], and records them in KEYS[2] as popped.
REMOVE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 2, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[i])
  redis.call('ZADD', KEYS[2], now, ARGV[i])
end
redis.call('PEXPIRE', KEYS[2], ARGV[1])
"""
#: Replaces the entries of KEYS[1] by those from ARGV[3] on, except those that KEYS[2] says were popped in the last
#: ARGV[1] ms. Returns how many there are now.
FILL = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[1])
redis.call('UNLINK', KEYS[1])
for i = 3, #ARGV do
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then redis.call('ZADD', KEYS[1], 0, ARGV[i]) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""
_SIGN = 1 << 63  # turns the order of int64 into that of bytes
_PLACE = struct.Struct(">QQQ")


def depth_of(config: TopicConfig) -> int:
    """Return how many messages of a topic are prefetched at most, over all nodes."""
    return 0 if config.max_inflight else min(config.k - 1, DEPTH_MAX)


def pack_place(place: Place) -> bytes:
    """Return an entry: its bytes have the order of places."""
    return _PLACE.pack(*(number + _SIGN for number in place))


def unpack_place(entry: bytes) -> Place:
    return Place(*(number - _SIGN for number in _PLACE.unpack(entry)))


class ReadyQueue:
    """One node's view of the queue."""

    def __init__(self, redis: Redis, home: Home, tasks: OwnedTasks) -> None:
        self._redis, self._home, self._tasks = redis, home, tasks
        self._topic: int | None = None  # the topic's incarnation, once it is known
        self._depth = 0  # entries of a full queue
        self._is_warm = False  # it had entries when this node last used it
        self._size = 0  # entries after the last fill, as far as this node knows
        self._vain = 0  # takes in a row that leased nothing
        self._is_filling = False

    def learn(self, topic: Topic) -> None:
        """Remember the topic as a transaction found it."""
        self._topic, self._depth = topic.id, depth_of(topic.config)

    def serves(self, count: int) -> bool:
        """Whether pops that want `count` messages together are worth prefetching for."""
        return 2 * count <= self._depth

    async def has_entries(self, count: int) -> bool:
        """Whether a pop that wants `count` messages should try the queue."""
        if not self.serves(count):
            return False
        if not self._is_warm:
            try:
                self._is_warm = await self.depth() > 0
            except RedisDown:
                return False
        return self._is_warm

    async def pop(self, count: int) -> list[Place]:
        """Remove the best `count` entries, or return none of them if there are fewer."""
        if self._topic is None or not self.serves(count):
            return []
        keys = self._keys(self._topic)
        try:
            left, entries = await self._redis.run(lambda client: client.eval(POP, 2, *keys, count, POPPED_MS))
        except RedisDown:
            left, entries = 0, []
        self._is_warm = bool(entries)
        self._size = max(self._size, left + len(entries))
        if entries and 2 * left < self._size:
            self.fill()
        return [unpack_place(entry) for entry in entries]

    def _keys(self, topic: int) -> tuple[str, str]:
        """Return the keys of the queue, and of the entries that were popped a short time ago."""
        shard = self._home.shard.index
        return queue_key(shard, topic), popped_key(shard, topic)

    async def taken(self, count: int) -> None:
        """Drop the queue if its entries turn out to be old: its last takes leased nothing."""
        self._vain = 0 if count else self._vain + 1
        if self._vain >= VAIN_MAX and self._topic is not None:
            self._vain = 0
            await self._drop(self._topic)

    async def _drop(self, topic: int) -> None:
        key, self._is_warm = queue_key(self._home.shard.index, topic), False
        try:
            await self._redis.run(lambda client: client.unlink(key))
        except RedisDown:
            return  # its entries expire

    def leased(self, places: Sequence[Place]) -> None:
        """Remove the entries of messages that were leased from the database, and fill the queue if it is empty."""
        if self._depth and self._redis.is_up:
            self._tasks.spawn(self._remove(places))
            if not self._is_warm:
                self.fill()

    async def _remove(self, places: Sequence[Place]) -> None:
        keys, entries = self._keys(self._topic or 0), map(pack_place, places)
        with contextlib.suppress(RedisDown):  # the entries lease nothing
            await self._redis.run(lambda client: client.eval(REMOVE, 2, *keys, POPPED_MS, *entries))

    def fill(self) -> None:
        """Fill the queue in the background."""
        if self._depth and self._redis.is_up and not self._is_filling:
            self._is_filling = True
            self._tasks.spawn(self._fill())

    async def _fill(self) -> None:
        try:
            if await self._redis.run(self._claim_filling):
                topic, places = await self._best()
                if places:
                    await self._replace(topic, places)
        except RedisDown:
            return  # pops lease from the database
        except HeaplineError as error:
            log.warning("ready queue not filled", topic=self._home.name.canonical, error=str(error))
        finally:
            self._is_filling = False

    async def _claim_filling(self, client: Any) -> bool:
        """Keep other nodes from filling the queue for a short time. Return False if another one does it."""
        key = filling_key(self._home.shard.index, self._topic or 0)
        return bool(await client.set(key, b"", nx=True, px=FILL_MS))

    async def _best(self) -> tuple[int, list[Place]]:
        """Return the topic's incarnation, and the places of its best messages."""
        shard = self._home.shard
        async with shard.connection() as connection:
            turn = await shard.enter(connection, self._home.name)
            self.learn(turn.topic)
            if turn.topic.is_paused or not self._depth:
                return turn.topic.id, []
            floors = zip(*shard.floors.of(turn.topic.id, turn.layout.turns), strict=True)
            rows = await connection.fetch(turn.layout.best(), turn.topic.id, turn.now, self._depth, *floors)
            return turn.topic.id, [Place(*row) for row in rows]

    async def _replace(self, topic: int, places: Sequence[Place]) -> None:
        """Make these the queue's only entries."""
        keys, entries = self._keys(topic), map(pack_place, places)
        count = await self._redis.run(lambda client: client.eval(FILL, 2, *keys, POPPED_MS, KEEP_MS, *entries))
        self._is_warm, self._size = count > 0, count

    async def depth(self) -> int:
        """Return the number of entries. Raise RedisDown."""
        if self._topic is None:
            return 0
        key = queue_key(self._home.shard.index, self._topic)
        found: int = await self._redis.run(lambda client: client.zcard(key))
        return found
