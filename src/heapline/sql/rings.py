"""Turn the rings: open fresh slots, move the last rows out of old ones, and truncate these.

A closed slot with many rows stays where it is as long as enough others are empty. Then the oldest one is emptied into
the open slot of the *cold* ring, in steps that are as short as any other move. Cold slots may be large, and their limit
grows with the backlog. So the first ring turns at SLOT_BYTES, whatever the backlog is. A message moves once into the
cold ring, and within it when slots that have lost most of their rows are merged.

Leases that are the last of their slot move as well when few slots are empty: one that is extended for hours would keep
its slot from being truncated, and eight of them the ring from turning.

Any node does it. A slot that is in use is tried again later: no call waits for this longer than the lock timeout of
50 ms (queries/).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import asyncpg

from heapline.sql.delayed import past_slots
from heapline.sql.layout import (
    COLUMNS,
    ENDED_MS,
    ENDED_SLOTS,
    LONG_LEASES,
    READY_SLOTS,
    SLOTS,
    Layout,
    of_columns,
)
from heapline.sql.statements import all_blocks, fill, statement

if TYPE_CHECKING:
    from heapline.sql.shard import Shard

SLOT_BYTES = 4 << 20  # size at which a slot of `ready` or `lease` is closed
COLD_BYTES = 16 << 20  # size at which a cold slot is closed, or COLD_SHARE of all ready messages if that is more
COLD_SHARE = 0.25
SEQUENCES_BYTES = 1 << 20  # size at which a slot of `sequences` is closed
LEASE_SHARE = 1 / 6  # of all leases, up to which a slot of `lease` stays open if that is more than SLOT_BYTES
SPARE = {"ready": 8, "cold": 2, "lease": 2}  # slots that are kept empty
COUNTS_BYTES = 128 << 10  # size at which a slot of `counts` is closed, besides COUNT_BYTES for each topic
COUNT_BYTES = 100
FIRST = {"cold": READY_SLOTS}  # a ring whose slots are slots of `ready`, and its first one
FULL_RINGS = ("ready", "cold", "lease", "counts", "sequences")  # those that turn when a slot is full
VAIN_MAX = 3  # empty slots of `ready` that pops may look into
SURVIVORS_MAX = 4000  # rows of a closed slot of `ready` that are moved to the open one; more of them stay
MOVED_MAX = 2000  # rows that are moved to a cold slot in one transaction, which locks their slot
MOVED_BYTES = 4 << 20  # of payloads that are moved in one transaction; one message may have more
LEASE_COLUMNS = f"{COLUMNS}, token, holder, request, until, started"


class Rings:
    def __init__(
        self,
        shard: Shard,
        slot_bytes: int = SLOT_BYTES,
        counts_bytes: int = COUNTS_BYTES,
        pause: float = 0.0,
        cold_bytes: int = COLD_BYTES,
        sequences_bytes: int = SEQUENCES_BYTES,
    ) -> None:
        self._shard, self._slot_bytes, self._cold_bytes = shard, slot_bytes, cold_bytes
        self._counts_bytes, self._sequences_bytes = counts_bytes, sequences_bytes
        self._pause = pause  # seconds after which a slot that had too many rows is tried again
        self._tried: dict[str, float] = {}  # table -> when it had too many

    async def turn(self) -> None:
        """Open and reclaim slots where that is due, in all rings."""
        await self.advance()
        await self.sweep()

    async def advance(self) -> None:
        """Open and reclaim slots of the rings that turn when they are full. One statement, if nothing is due."""
        while await self._advance_all():
            continue  # rows were moved out of a slot, and others may have been filled meanwhile

    async def _advance_all(self) -> bool:
        """Do what is due now. Return whether rows of a slot with many were moved, so that more may be due."""
        async with self._shard.connection() as connection:
            row = await connection.fetchrow(
                statement("look", sizes=statement("slot_sizes")),
                [table for ring in FULL_RINGS for table in _tables(ring)],
            )
        layout = Layout(*(row[name] for name in Layout._fields))
        sizes: dict[str, list[int]] = {}
        start = 0
        for ring in FULL_RINGS:
            sizes[ring] = row["sizes"][start : start + SLOTS[ring]]
            start += SLOTS[ring]
        ready = sizes["ready"] + sizes["cold"]
        cold_bytes = max(self._cold_bytes, round(COLD_SHARE * sum(ready)))
        lease_bytes = max(self._slot_bytes, round(LEASE_SHARE * sum(sizes["lease"])))
        for ring, limit in (("ready", self._slot_bytes), ("cold", cold_bytes), ("lease", lease_bytes)):
            await self._advance(ring, layout, sizes[ring], limit)
        if _in_vain(layout, ready) >= VAIN_MAX:
            find = partial(self._find_live, opened=layout.open("ready"))
            await self._unless_busy(partial(self._shard.run_alone, find))
        counts_bytes = self._counts_bytes + COUNT_BYTES * row["topics"]
        await self._fold("counts", ("fold_counts",), sizes["counts"], row["counts_turn"], counts_bytes)
        folds = ("fold_producers", "move_unanswered")
        await self._fold("sequences", folds, sizes["sequences"], row["sequences_turn"], self._sequences_bytes)
        return await self._make_room(layout, sizes)

    async def _advance(self, ring: str, layout: Layout, sizes: list[int], limit: int) -> None:
        if sizes[layout.open(ring)] >= limit and 0 in sizes:
            await self._unless_busy(partial(self._open_next, ring, limit))
        for slot, size in enumerate(sizes):
            last = self._tried.get(table_of(ring, slot))
            if size and slot != layout.open(ring) and (last is None or time.monotonic() >= last + self._pause):
                await self._reclaim(ring, slot)

    async def sweep(self) -> None:
        """Truncate slots whose time is over."""
        await self._forget_ended()
        await self._empty_delayed()

    async def _look(self, ring: str) -> tuple[Layout, list[int]]:
        """Return how far the rings have turned, and the bytes of each slot of one."""
        async with self._shard.connection() as connection:
            return await self._shard.read_layout(connection), await slot_sizes(connection, ring)

    async def _make_room(self, layout: Layout, sizes: dict[str, list[int]]) -> bool:
        """Move some rows out of a closed slot where few are empty. Return whether that was done."""
        is_moved = False
        for ring, spare in SPARE.items():
            if sizes[ring].count(0) < spare:
                others = [(layout.turn(ring) + step) % SLOTS[ring] for step in range(1, SLOTS[ring])]
                used = [slot for slot in others if sizes[ring][slot]]  # the oldest is the first
                slot = min(used, key=sizes[ring].__getitem__) if ring == "cold" else used[0]
                is_moved |= await self._unless_busy(partial(self._move_some, ring, slot, layout))
        return is_moved

    async def _move_some(self, ring: str, slot: int, layout: Layout) -> None:
        """Move rows of a closed slot to the open cold one, or to the long leases. Truncate it after the last ones."""
        source = table_of(ring, slot)

        async def work(connection: asyncpg.Connection) -> None:
            layout = await self._shard.read_layout(connection)
            target = LONG_LEASES if ring == "lease" else layout.open_cold
            if layout.open(ring) == slot or target is None:
                return  # another node was faster
            table, columns = ("lease", LEASE_COLUMNS) if ring == "lease" else ("ready", COLUMNS)
            await connection.execute(statement("short_lock_timeout"))
            await connection.execute(statement("lock_slot", table=source))
            move = statement("move_rows", source=source, target=f"{table}_{target}", slot=str(target), columns=columns)
            await connection.execute(move, MOVED_MAX, MOVED_BYTES)
            if not await connection.fetchval(statement("count_slot", table=source), 1):
                await connection.execute(statement("truncate_slot", table=source))

        async def open_cold(connection: asyncpg.Connection) -> None:
            layout = await self._shard.read_layout(connection)
            await self._find_live(connection, READY_SLOTS + layout.open("cold"))

        if ring != "lease" and layout.open_cold is None:
            await self._shard.run_alone(open_cold)
        await self._shard.run(work)

    async def _open_next(self, ring: str, limit: int) -> None:
        """Open the next empty slot if the open one is full."""

        async def work(connection: asyncpg.Connection) -> None:
            turn, sizes = (await self._shard.read_layout(connection)).turn(ring), await slot_sizes(connection, ring)
            if sizes[turn % len(sizes)] < limit:
                return  # another node was faster
            later = [turn + step for step in range(1, len(sizes)) if not sizes[(turn + step) % len(sizes)]]
            if later:
                if ring != "lease":  # before the turn: setting a sequence is never rolled back
                    await self._find_live(connection, later[0] % len(sizes) + FIRST.get(ring, 0))
                await connection.execute(statement("turn_ring"), f"{ring}_turn", later[0])

        await self._shard.run_alone(work)

    async def _find_live(self, connection: asyncpg.Connection, opened: int) -> None:
        """Record which slots of `ready` have rows, or will have as they are open. No other transaction runs."""
        layout = await self._shard.read_layout(connection)
        sizes = await slot_sizes(connection, "ready") + await slot_sizes(connection, "cold")
        used = {slot for slot, size in enumerate(sizes) if size} | {opened, layout.open("ready")}
        await connection.execute(statement("turn_ring"), "ready_live", sum(1 << slot for slot in used))

    async def _reclaim(self, ring: str, slot: int) -> None:
        """Truncate a closed slot if it has few rows (`ready`, which are moved) or none (`lease`)."""
        table, most = table_of(ring, slot), 0 if ring == "lease" else SURVIVORS_MAX
        count, size = statement("count_slot", table=table), statement("slot_bytes", table=table)

        async def work(connection: asyncpg.Connection) -> None:
            layout = await self._shard.read_layout(connection)
            if layout.open(ring) == slot:
                return
            if await connection.fetchval(count, most + 1) > most or await connection.fetchval(size, most) > MOVED_BYTES:
                self._tried[table] = time.monotonic()
                return
            self._tried.pop(table, None)
            await connection.execute(statement("short_lock_timeout"))
            await connection.execute(statement("lock_slot", table=table))
            if await connection.fetchval(count, most + 1) > most:
                return
            if most:
                target = str(layout.open("ready"))
                move = statement("move_survivors", source=table, target=f"ready_{target}", slot=target, columns=COLUMNS)
                await connection.execute(move)
            await connection.execute(statement("truncate_slot", table=table))

        await self._unless_busy(partial(self._shard.run, work))

    async def _forget_ended(self) -> None:
        """Truncate the slots of `ended` and `acked` that are opened next, unless they were open a short time ago.

        They were if the clock was set back. Then they are opened again as they are.
        """

        async def work(connection: asyncpg.Connection, ring: str, slot: int) -> None:
            table, before = f"{ring}_{slot}", (await self._shard.read_layout(connection)).now
            last = await connection.fetchval(statement("last_removal", table=table))
            if last is not None and last > before - (ENDED_SLOTS - 2) * ENDED_MS:
                return
            await connection.execute(statement("short_lock_timeout"))
            await connection.execute(statement("lock_slot", table=table))
            layout = await self._shard.read_layout(connection)
            # Else this node was paused meanwhile, or the clock was set.
            if layout.next_ended == slot and layout.now // ENDED_MS == before // ENDED_MS:
                await connection.execute(statement("truncate_slot", table=table))

        for ring in ("ended", "acked"):
            layout, sizes = await self._look(ring)
            slot = layout.next_ended
            if sizes[slot]:
                await self._unless_busy(partial(self._shard.run, partial(work, ring=ring, slot=slot)))

    async def _empty_delayed(self) -> None:
        """Truncate the slots of `delayed` whose period is over.

        A message in one that is not due yet was too far in the future for all slots. It moves to another one.
        """
        layout, sizes = await self._look("delayed")

        async def work(connection: asyncpg.Connection, table: str) -> None:
            await connection.execute(of_columns("move_undue", delayed=table), layout.now, SURVIVORS_MAX)
            count = statement("count_slot", table=table)
            if await connection.fetchval(count, 1):
                return
            await connection.execute(statement("short_lock_timeout"))
            await connection.execute(statement("lock_slot", table=table))
            if not await connection.fetchval(count, 1):
                await connection.execute(statement("truncate_slot", table=table))

        for slot in past_slots(layout.now):
            if sizes[slot]:
                await self._unless_busy(partial(self._shard.run, partial(work, table=f"delayed_{slot}")))

    async def _fold(self, ring: str, folds: Sequence[str], sizes: list[int], turn: int, limit: int) -> None:
        """Open the next slot if one is full, and move what is needed of the closed ones there."""
        if sizes[turn % len(sizes)] > limit and not sizes[(turn + 1) % len(sizes)]:
            async with self._shard.connection() as connection:
                turn = await connection.fetchval(statement("turn_ring"), f"{ring}_turn", turn + 1)
        target = turn % len(sizes)

        async def work(connection: asyncpg.Connection, slot: int) -> None:
            source = table_of(ring, slot)
            tables = {"source": source, "target": table_of(ring, target), "slot": str(target)}
            await connection.execute(statement("short_lock_timeout"))
            await connection.execute(statement("lock_slot", table=source))
            for fold in folds:
                block = all_blocks()[fold]
                await connection.execute(fill(block, {k: v for k, v in tables.items() if f"{{{k}}}" in block}))
            await connection.execute(statement("truncate_slot", table=source))

        for slot, size in enumerate(sizes):
            if size and slot != target:
                await self._unless_busy(partial(self._shard.run, partial(work, slot=slot)))

    async def _unless_busy(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Return whether the work was done. If not, its slots are in use, and it is tried again at the next turn."""
        try:
            await work()
        except asyncpg.LockNotAvailableError:
            return False
        return True


def _in_vain(layout: Layout, sizes: list[int]) -> int:
    """Return how many slots of `ready` pops look into though they are empty."""
    return sum(layout.ready_live >> slot & 1 for slot, size in enumerate(sizes) if not size)


async def slot_sizes(connection: asyncpg.Connection, ring: str) -> list[int]:
    return [row["bytes"] for row in await connection.fetch(statement("slot_sizes"), _tables(ring))]


def _tables(ring: str) -> list[str]:
    return [table_of(ring, slot) for slot in range(SLOTS[ring])]


def table_of(ring: str, slot: int) -> str:
    return f"ready_{FIRST[ring] + slot}" if ring in FIRST else f"{ring}_{slot}"
