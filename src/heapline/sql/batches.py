"""Batches over several topics: the calls, decisions, and cleanup of batches that were left undecided.

A batch is committed when its decision is a row in the first shard. Parts in the first shard are attached in that very
transaction, so with one shard a commit is atomic. Other shards follow, each in one transaction, before the commit is
answered. Shards that have none of the named parts may be down: what they have of others is dropped later. If the
process is killed between them, or a shard is down, the next commit of the same batch or any node's sweep attaches the
rest: what is decided stays decided. An abort needs no decision, because dropping parts makes nothing visible.

Decisions on one batch, and on one sink, take turns by advisory locks in the first shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import asyncpg

from heapline.contract import batches
from heapline.contract.call import Context, Count, Page, page_of
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import BatchDecided, Closed, HeaplineError, UnavailableError, UnknownPart
from heapline.contract.message import BatchInfo, SinkInfo, from_ms
from heapline.contract.messages import pack_enqueued
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql import prepared
from heapline.sql.enqueue import identity_of
from heapline.sql.handlers import handles
from heapline.sql.insert import IdConflict
from heapline.sql.node import Node
from heapline.sql.prepared import Attached, PartName, PartView
from heapline.sql.shard import Shard, lock_key
from heapline.sql.statements import statement

log = Log("heapline.sql")
SWEEP_SECONDS = 5.0
SWEEP_PAGE = 1000  # batches
TIMEOUT_MS = round(BrokerConfig().batch_timeout * 1000)
RETENTION_MS = round(BrokerConfig().decision_retention * 1000)


class Decided(NamedTuple):
    """A committed batch, as its commit answers."""

    parts: list[str]
    messages: int
    topics: list[str]
    here: Attached | None = None  # what was attached in the first shard


# -- prepare -----------------------------------------------------------------------------------------------------------


@handles(batches.PrepareBatch)
async def prepare_batch(node: Node, command: batches.PrepareBatch, context: Context) -> batches.Prepared:
    homes = [node.home(share.topic) for share in command.shares]
    await _refuse_late(node, command)
    for home in homes:
        await home.shard.read_topic(home.name)  # raises before anything is stored
    name = PartName(command.batch_id, command.part, tuple(sorted(home.name.canonical for home in homes)))
    shares = []
    for home, share in zip(homes, command.shares, strict=True):
        results = await prepared.prepare(home, name, share, identity_of(command), context)
        suffix = max((result.id_suffix for result in results), default=0)
        shares.append(batches.PreparedShare(home.name.canonical, pack_enqueued(results, suffix)))
    return batches.Prepared([] if command.without_results else shares)


async def _refuse_late(node: Node, command: batches.PrepareBatch) -> None:
    """Raise BatchDecided if the batch, or its version of the sink, was committed."""
    async with node.shards[0].connection() as connection:
        decided = await connection.fetchrow(statement("select_decision"), command.batch_id)
        last = None if command.sink is None else await connection.fetchrow(statement("select_sink"), command.sink)
    if decided is not None:
        raise BatchDecided(command.batch_id, "was committed")
    if last is not None and command.version is not None and command.version <= last["version"]:
        text = f"is version {command.version} of sink {command.sink!r}, and version {last['version']} was committed"
        raise BatchDecided(command.batch_id, text)


# -- commit ------------------------------------------------------------------------------------------------------------


@handles(batches.CommitBatch)
async def commit_batch(node: Node, command: batches.CommitBatch, context: Context) -> Count:
    _check_open(node)
    parts = list(dict.fromkeys(command.parts))

    async def work(connection: asyncpg.Connection) -> Decided:
        return await _Commit(node, connection, command.batch_id, parts, command.sink, command.version).run()

    home = node.shards[0]
    decided = await home.run(work, begin=prepared.begin_attach(home, command.batch_id))
    _report(node, home, decided.here)
    needed = {node.home(topic).shard for topic in decided.topics}
    for shard in node.shards[1:]:
        try:
            await _attach(node, shard, command.batch_id, decided.parts)
        except UnavailableError as error:
            if shard in needed:
                raise
            log.warning("parts left out of a batch are dropped later", shard=shard.index, error=str(error))
    return Count(decided.messages)


class _Commit:
    """A commit in its transaction on the first shard, which has the batch's lock.

    It asks the other shards before it takes the rings' lock, so that a slow one does not keep the rings from turning.
    """

    def __init__(
        self,
        node: Node,
        connection: asyncpg.Connection,
        batch: str,
        parts: list[str],
        sink: str | None,
        version: int | None,
    ) -> None:
        self._node, self._connection, self._batch, self._parts = node, connection, batch, parts
        self._sink, self._version = sink, version

    async def run(self) -> Decided:
        shard = self._node.shards[0]
        mine = await self._connection.fetchrow(statement("select_decision"), self._batch)
        if self._sink is not None:
            await _lock(shard, self._connection, f"sink {self._sink}")
            last = await self._connection.fetchrow(statement("select_sink"), self._sink)
            if last is not None and self._version is not None and self._version <= last["version"]:
                if mine is None:
                    await self._drop()
                return Decided([], last["messages"] if self._version == last["version"] else 0, [])
            if mine is not None:
                raise BatchDecided(self._batch, "was committed, but not as this version of this sink")
        if mine is None:
            return await self._decide()
        if set(mine["parts"]) != set(self._parts):
            raise BatchDecided(self._batch, f"was committed with other parts ({len(mine['parts'])} of them)")
        here = await prepared.attach(shard, self._connection, self._batch, mine["parts"])
        return Decided(mine["parts"], mine["messages"], mine["topics"], here)

    async def _drop(self) -> None:
        await prepared.drop(self._connection, self._batch)
        for shard in self._node.shards[1:]:
            with contextlib.suppress(UnavailableError):  # parts that stay undecided are dropped later
                await _drop(shard, self._batch)

    async def _decide(self) -> Decided:
        views, messages, away = await self._views()
        shares: dict[str, dict[str, PartView]] = {}
        for view in views:
            shares.setdefault(view.part, {})[view.topic] = view
        for part in self._parts:
            found = shares.get(part, {})
            if not found or any(set(view.topics) != found.keys() for view in found.values()):
                raise away or UnknownPart(self._batch, part)
        topics = sorted({view.topic for view in views if view.part in set(self._parts)})
        shard = self._node.shards[0]
        now = (await shard.read_layout(self._connection)).now
        values = self._batch, self._parts, messages, topics, self._sink, self._version, now
        await self._connection.execute(statement("insert_decision"), *values)
        if self._sink is not None:
            sink = self._sink, self._version, self._batch, messages, topics, now
            await self._connection.execute(statement("upsert_sink"), *sink)
        here = await prepared.attach(shard, self._connection, self._batch, self._parts)
        return Decided(self._parts, messages, topics, here)

    async def _views(self) -> tuple[list[PartView], int, UnavailableError | None]:
        """Return the shares of the batch in all shards that can be reached, and how many messages the named parts have.

        If a shard is away, its error is returned too. It may have no share: each one names all topics of its part.
        """
        away: UnavailableError | None = None
        views = await prepared.view(self._connection, self._batch)
        leaves = len(await prepared.left_out(self._connection, self._batch, self._parts))
        for shard in self._node.shards[1:]:
            try:
                async with shard.connection() as connection:
                    views += await prepared.view(connection, self._batch)
                    leaves += len(await prepared.left_out(connection, self._batch, self._parts))
            except UnavailableError as error:
                away = error
        named = set(self._parts)
        return views, sum(view.messages for view in views if view.part in named) - leaves, away


async def _attach(node: Node, shard: Shard, batch: str, parts: Sequence[str]) -> None:
    async def work(connection: asyncpg.Connection) -> Attached:
        return await prepared.attach(shard, connection, batch, parts)

    _report(node, shard, await shard.run(work, begin=prepared.begin_attach(shard, batch)))


def _report(node: Node, shard: Shard, attached: Attached | None) -> None:
    """Wake pops, now that messages are visible."""
    if attached is None:
        return
    for topic in attached.topics:
        shard.wakeups.wake(topic)
    if attached.deadline is not None:
        node.timekeepers[shard.index].expect(attached.deadline)


async def _lock(shard: Shard, connection: asyncpg.Connection, what: str) -> None:
    await connection.execute(statement("lock_until_commit"), lock_key(f"heapline {shard.schema} {what}"))


async def _drop(shard: Shard, batch: str) -> set[str]:
    async def work(connection: asyncpg.Connection) -> set[str]:
        return await prepared.drop(connection, batch)

    return await shard.run(work)


def _check_open(node: Node) -> None:
    if not node.is_open:
        raise Closed


# -- other calls -------------------------------------------------------------------------------------------------------


@handles(batches.AbortBatch)
async def abort_batch(node: Node, command: batches.AbortBatch, context: Context) -> Count:
    _check_open(node)
    return Count(len(await _abort(node, command.batch_id)))


async def _abort(node: Node, batch: str) -> set[str]:
    """Drop all parts of a batch that was not committed, and return their names."""
    shard = node.shards[0]

    async def work(connection: asyncpg.Connection) -> set[str]:
        if await connection.fetchrow(statement("select_decision"), batch) is not None:
            raise BatchDecided(batch, "was committed")
        parts = await prepared.drop(connection, batch)
        for other in node.shards[1:]:
            parts |= await _drop(other, batch)
        return parts

    return await shard.run(work, begin=prepared.begin_attach(shard, batch))


@handles(batches.ForgetBatch)
async def forget_batch(node: Node, command: batches.ForgetBatch, context: Context) -> None:
    """Forget a decision that every shard has applied. One that is not applied yet is forgotten after its retention."""
    _check_open(node)
    for shard in node.shards:
        async with shard.connection() as connection:
            if await prepared.view(connection, command.batch_id):
                return
    async with node.shards[0].connection() as connection:
        await connection.execute(statement("delete_decision"), command.batch_id)
    await _forget_attached(node, [command.batch_id])


async def _forget_attached(node: Node, batches: Sequence[str]) -> None:
    """Let batches be prepared again whose decisions were forgotten."""
    for shard in node.shards:
        async with shard.connection() as connection:
            await connection.execute(statement("delete_attached"), batches)


@handles(batches.ListBatches)
async def list_batches(node: Node, command: batches.ListBatches, context: Context) -> Page[BatchInfo]:
    _check_open(node)
    found: dict[str, BatchInfo] = {}
    shares = await asyncio.gather(*(_rows(shard, "list_prepared") for shard in node.shards))
    undecided: dict[str, list[Any]] = {}
    for row in (row for share in shares for row in share):
        undecided.setdefault(row["batch"], []).append(row)
    for batch, rows in undecided.items():
        parts: dict[str, dict[str, int]] = {}
        for row in rows:
            parts.setdefault(row["part"], {})[row["name"]] = row["messages"]
        messages, since = sum(row["messages"] for row in rows), min(row["at"] for row in rows)
        found[batch] = BatchInfo(
            batch_id=batch, state="undecided", parts=parts, messages=messages, since=from_ms(since)
        )
    for row in await _rows(node.shards[0], "list_decisions"):
        found[row["batch"]] = BatchInfo(
            batch_id=row["batch"],
            state="committed",
            parts={part: {} for part in row["parts"]},
            messages=row["messages"],
            since=from_ms(row["at"]),
        )
    return page_of(found.values(), command.cursor, command.limit, attrgetter("batch_id"))


async def _rows(shard: Shard, name: str) -> list[Any]:
    async with shard.connection() as connection:
        rows: list[Any] = await connection.fetch(statement(name))
    return rows


@handles(batches.ListSinks)
async def list_sinks(node: Node, command: batches.ListSinks, context: Context) -> Page[SinkInfo]:
    _check_open(node)
    infos = [
        SinkInfo(
            name=row["name"],
            version=row["version"],
            batch_id=row["batch"],
            messages=row["messages"],
            topics=row["topics"],
            committed_at=from_ms(row["at"]),
        )
        for row in await _rows(node.shards[0], "list_sinks")
    ]
    return page_of(infos, command.cursor, command.limit)


@handles(batches.ForgetSink)
async def forget_sink(node: Node, command: batches.ForgetSink, context: Context) -> batches.Known:
    _check_open(node)
    async with node.shards[0].connection() as connection:
        settled = [row["batch"] for row in await connection.fetch(statement("decisions_of_sink"), command.name)]
    await Sweeper(node).sweep()  # these decisions are forgotten too, so each must be attached

    async def work(connection: asyncpg.Connection) -> tuple[bool, list[str]]:
        await _lock(node.shards[0], connection, f"sink {command.name}")
        decisions = await connection.fetch(statement("delete_decisions"), settled)
        known = bool(await connection.fetchval(statement("delete_sink"), command.name))
        return known, [row["batch"] for row in decisions]

    known, forgotten = await node.shards[0].run(work)
    await _forget_attached(node, forgotten)
    return batches.Known(known)


# -- batches that were left --------------------------------------------------------------------------------------------


class Sweeper:
    """Attaches what was decided and not attached, and aborts what stayed undecided for too long. Every node does."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tasks = OwnedTasks()

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except HeaplineError as error:
                log.warning("batches not swept; will retry", error=str(error))
            except Exception:  # a failed sweep must not stop those that follow
                log.exception("batches not swept; will retry")

    async def sweep(self) -> None:
        """Settle what each shard has. Raise if one is away, once the others are done: decisions are kept for it."""
        node, home = self._node, self._node.shards[0]
        away: UnavailableError | None = None
        for shard in node.shards:
            try:
                await self._settle_all(shard)
            except UnavailableError as error:
                away = error
        if away is not None:
            raise away
        async with home.connection() as connection:
            now = (await home.read_layout(connection)).now
            await connection.execute(statement("delete_old_decisions"), now - RETENTION_MS)
        for shard in node.shards:
            async with shard.connection() as connection:
                now = (await shard.read_layout(connection)).now
                await connection.execute(statement("delete_old_attached"), now - 2 * RETENTION_MS)

    async def _settle_all(self, shard: Shard) -> None:
        """Settle all batches that were prepared before this began: a decision without its batch is forgotten later."""
        home = self._node.shards[0]
        async with home.connection() as connection:
            now = (await home.read_layout(connection)).now
        at, batch, is_last = -1, "", False
        conflict: IdConflict | None = None
        while not is_last:
            async with shard.connection() as connection:
                rows = await connection.fetch(statement("prepared_batches"), at, batch, SWEEP_PAGE)
            async with home.connection() as connection:
                decided = await connection.fetch(statement("select_decided"), [row["batch"] for row in rows])
            parts = {row["batch"]: row["parts"] for row in decided}
            for batch, at in rows:
                try:
                    await self._settle(shard, batch, parts.get(batch), is_late=at + TIMEOUT_MS < now)
                except IdConflict as error:  # the batches after this one do not depend on it
                    conflict = error
            is_last = len(rows) < SWEEP_PAGE or at > now
        if conflict is not None:
            raise conflict

    async def _settle(self, shard: Shard, batch: str, parts: Sequence[str] | None, *, is_late: bool) -> None:
        if parts is not None:
            await _attach(self._node, shard, batch, parts)
        elif is_late:
            log.warning("undecided batch timed out; its parts are dropped", batch=batch)
            await _abort(self._node, batch)
