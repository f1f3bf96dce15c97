"""One node's connection to Redis, and the names of its keys there.

Redis holds only what can be lost, except with `durability="redis"` (redis_buffer.py). It never blocks a call. A command
that takes longer than `COMMAND_SECONDS` fails with RedisDown, and from then on every command fails with it immediately,
until a probe in the background has reached the server again. A server that is full refuses commands, but is not down.

The client library is given no timeout for commands. With one, it waits for writes by `asyncio.wait_for`, which loses a
cancellation that arrives just as the write ends (Python 3.11). Loops that send commands would survive their node.

    try:
        count = await node.redis.run(lambda client: client.incr(rate_key("shop")))
    except RedisDown:
        ...  # continue without Redis

One database of a Redis server belongs to one deployment. Its id, which the first shard stores, is written to
DEPLOYMENT_KEY; with another id there, the node keeps away from Redis.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from heapline.contract.errors import BadRequest
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.sql")
T = TypeVar("T")
COMMAND_SECONDS = 1.0  # for a command, and for the connection if it needs a new one
PROBE_SECONDS = 0.5  # between attempts to reach a server that is down
CONNECTIONS_MAX = 64
DEPLOYMENT_KEY = "mqueue:deployment"
SETTINGS = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
_FAILURES = (RedisError, OSError, TimeoutError, ssl.SSLError)


class ForeignDatabase(Exception):
    def __init__(self, owner: str) -> None:
        super().__init__(f"deployment {owner} uses this database; choose another in the URL (redis://host:6379/1)")


class RedisDown(Exception):
    """Redis did not answer. Whether it executed the command is unknown."""


def rate_key(namespace: str) -> str:
    """Return the key of a namespace's rate limit."""
    return f"mqueue:rate:{namespace}"


def queue_key(shard: int, topic: int) -> str:
    """Return the key of the ready queue of a topic, given its incarnation: the places of its best messages."""
    return f"mqueue:queue:{shard}:{topic}"


def popped_key(shard: int, topic: int) -> str:
    """Return the key of the entries that were popped from a topic's ready queue a short time ago."""
    return f"mqueue:popped:{shard}:{topic}"


def filling_key(shard: int, topic: int) -> str:
    """Return the key that exists while a node fills the ready queue of a topic."""
    return f"mqueue:filling:{shard}:{topic}"


def buffer_key(shard: int) -> str:
    """Return the key of the enqueues for a shard that Redis has acknowledged and Postgres does not have yet."""
    return f"mqueue:buffer:{shard}"


class Redis:
    """Commands to Redis, behind a circuit breaker."""

    def __init__(self, url: str) -> None:
        try:
            self._client: Any = redis.asyncio.Redis.from_url(
                url,
                socket_connect_timeout=COMMAND_SECONDS,
                socket_timeout=None,
                retry=Retry(NoBackoff(), 0),
                max_connections=CONNECTIONS_MAX + 1,  # one for the probe
                protocol=2,
                client_name="heapline",
            )
        except (ValueError, RedisError) as error:
            raise BadRequest(f"redis must be a URL such as redis://host:6379/0 ({error})") from None
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)  # beyond that, the client library raises
        self.is_up = False
        self.failures_total = 0  # how often the circuit opened
        self._deployment = ""
        self._is_reported = False  # that it is down
        self._broke = asyncio.Event()
        self._tasks = OwnedTasks()

    async def open(self, deployment: str) -> None:
        """Try to connect once, and keep trying in the background. A server that is down is not an error."""
        self._deployment = deployment
        await self._probe()
        self._tasks.spawn(self._reconnect())

    async def close(self) -> None:
        await self._tasks.cancel()
        self.is_up = False
        await self._client.aclose()

    async def run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run commands on the client. Raise RedisDown if the server is down, or does not answer in time."""
        if not self.is_up:
            raise RedisDown("redis is down")
        try:
            async with asyncio.timeout(COMMAND_SECONDS), self._free:
                return await work(self._client)
        except OutOfMemoryError as error:
            raise RedisDown("redis is full; nothing was stored") from error
        except _FAILURES as error:
            self._break(error)
            raise RedisDown(str(error)) from error

    async def settings(self) -> dict[str, str]:
        """Return the server's persistence settings; nothing if this user may not read them."""

        async def read(client: Any) -> dict[str, str]:
            try:
                found: dict[str, str] = await client.config_get(*SETTINGS)
            except ResponseError:
                return {}
            return found

        return await self.run(read)

    def _break(self, error: BaseException) -> None:
        if self.is_up:
            self.is_up = False
            self.failures_total += 1
            self._report(error)
        self._broke.set()

    def _report(self, error: BaseException) -> None:
        """Log that the server is down, once per outage."""
        if not self._is_reported:
            self._is_reported = True
            log.warning("redis is down; continuing without it", error=str(error) or type(error).__name__)

    async def _reconnect(self) -> None:
        while True:
            if self.is_up:
                await self._broke.wait()
            await asyncio.sleep(PROBE_SECONDS)
            await self._probe()

    async def _probe(self) -> None:
        """Close the circuit if the server answers and belongs to this deployment."""
        self._broke.clear()
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                before = await self._claim()
            if before is not None and before.decode() != self._deployment:
                raise ForeignDatabase(before.decode())
        except (*_FAILURES, ForeignDatabase) as error:
            self._report(error)
        else:
            self.is_up, self._is_reported = True, False

    async def _claim(self) -> bytes | None:
        """Claim the database for this deployment. Return the deployment that has it, if any."""
        try:
            found: bytes | None = await self._client.set(DEPLOYMENT_KEY, self._deployment, nx=True, get=True)
        except OutOfMemoryError:  # it refuses to write, and can be read, so that it becomes emptier
            found = await self._client.get(DEPLOYMENT_KEY)
        return found
