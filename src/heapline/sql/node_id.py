"""The node's part of message ids: a number from 0 to 1023, leased in the shard's table `nodes`.

Ids are Snowflakes: milliseconds, node, sequence (core/ids.py). Two nodes with one number could mint the same id, so
the lease is read in the transaction that stores the ids, by the database's clock: a node that was paused past its lease
gets no id. A number whose lease ran out is free only GRACE_MS later, and ids are never minted more than AHEAD_MS_MAX
ahead of the clock, so the next owner's ids are above all that the last one minted. A transaction that read its time
before the number was leased gets no id either: its ids could be among those of the last owner.

If the clock is set back by more than AHEAD_MS_MAX, the ids of a node are ahead of it, and the node leases another
number. The end of a lease is never set back, so the old number stays reserved until the clock has passed all its ids.
"""

from __future__ import annotations

import asyncio
import uuid

import asyncpg

from heapline.contract.errors import ResourceExhausted
from heapline.core.ids import IdMaker, unix_ms_of
from heapline.logs import Log
from heapline.sql.statements import statement

log = Log("heapline.sql")
GRACE_MS = 10_000
AHEAD_MS_MAX = 5_000
NODES_MAX = 1024


class NodeIdLost(Exception):
    """The lease of the node id has ended; the transaction must be repeated under a new one."""


class NodeId:
    def __init__(self, lease_seconds: float) -> None:
        self._lease_ms = round(lease_seconds * 1000)
        self.owner = uuid.uuid4()
        self.number = -1
        self._since = 0  # when it was leased, ms by the database's clock
        self._maker = IdMaker(0)
        self._replacing = asyncio.Lock()

    async def lease(self, connection: asyncpg.Connection) -> None:
        """Lease a number that no other node has."""
        async with connection.transaction():
            await connection.execute(statement("lock_nodes"), "heapline nodes")
            row = await connection.fetchrow(statement("free_node"), GRACE_MS, AHEAD_MS_MAX)
            if row is None:
                raise ResourceExhausted("nodes of this shard", NODES_MAX)
            values = row["node"], self.owner, self._lease_ms, row["last_id"]
            until = await connection.fetchval(statement("lease_node"), *values)
        self.number, self._since = row["node"], until - self._lease_ms
        self._maker = IdMaker(row["node"], row["last_id"])

    async def replace(self, connection: asyncpg.Connection, lost: int) -> None:
        """Lease another number instead of the one that was lost, unless another call has done so."""
        async with self._replacing:
            if self.number == lost:
                await self.lease(connection)

    async def renew(self, connection: asyncpg.Connection) -> None:
        """Extend the lease. If it has ended, lease another number."""
        number = self.number
        if await connection.fetchval(statement("renew_node"), number, self.owner, self._lease_ms) is None:
            log.warning("node id lost; leasing another", node=number)
            await self.replace(connection, number)

    async def release(self, connection: asyncpg.Connection) -> None:
        """Release the number. The highest id is stored, so the next owner can continue above it immediately."""
        await connection.execute(statement("release_node"), self.number, self.owner, self._maker.last)

    def give_up(self) -> None:
        """Stop using the number; the next transaction leases another."""
        self.number = -1

    def mint(self, count: int, now: int, until: int | None) -> list[int]:
        """Return new ids. `until` is the end of the lease as the transaction read it."""
        if until is None or not self._since <= now < until:
            raise NodeIdLost
        ahead = unix_ms_of(self._maker.last) - now
        if ahead > AHEAD_MS_MAX:
            log.warning("message ids are ahead of the database's clock; leasing another node id", ahead_ms=ahead)
            raise NodeIdLost
        ids: list[int] = self._maker.take(count, now).tolist()
        return ids
