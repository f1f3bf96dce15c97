"""Handlers of enqueues."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from heapline.contract import messages
from heapline.contract.call import Context
from heapline.contract.errors import HeaplineError, ResourceExhausted, UnavailableError
from heapline.contract.message import Enqueued
from heapline.contract.messages import numbered, pack_enqueued
from heapline.logs import Log
from heapline.sql.dedup import Identity, Judgement, Memory, open_producer
from heapline.sql.handlers import handles
from heapline.sql.home import Home
from heapline.sql.insert import IdConflict, insert
from heapline.sql.namespace_keys import check_claim
from heapline.sql.node import Node
from heapline.sql.rows import NewRow, check_batch_bytes, check_rows, place_rows, row_of_command, rows_of_batch
from heapline.sql.shard import Turn
from heapline.sql.statements import statement

log = Log("heapline.sql")
CHUNK_BYTES = 3 << 20  # a batch that is not atomic is stored in pieces of this size


def identity_of(command: Any) -> Identity | None:
    if command.producer_id is None:
        return None
    return Identity(command.producer_id, command.epoch, command.answered_below or 0)


@handles(messages.Enqueue)
async def enqueue(node: Node, command: messages.Enqueue, context: Context) -> Enqueued:
    home = node.home(command.topic)
    (result,) = await _store(home, [row_of_command(command)], True, identity_of(command), context)
    return result


@handles(messages.EnqueueBatch)
async def enqueue_batch(node: Node, command: messages.EnqueueBatch, context: Context) -> messages.EnqueuedBatch:
    home, rows = node.home(command.topic), rows_of_batch(numbered(command.messages, command.first_seq))
    if not rows:
        topic = (await home.shard.read_topic(home.name)).topic
        return pack_enqueued([], topic.id_suffix)
    if command.atomic:
        check_batch_bytes(rows)
        pieces = [rows]
    else:
        pieces = split(rows)
    results: list[Enqueued] = []
    for piece in pieces:
        try:
            results += await _store(home, piece, command.atomic, identity_of(command), context)
        except UnavailableError as error:
            if command.atomic or not results:
                raise
            # Other pieces of the batch are stored.
            results += [Enqueued(0, error=error.with_traceback(None))] * len(piece)
    return pack_enqueued(results, max(result.id_suffix for result in results))


def split(rows: Sequence[NewRow]) -> list[list[NewRow]]:
    """Divide rows into pieces of at most about CHUNK_BYTES."""
    pieces: list[list[NewRow]] = [[]]
    size = 0
    for row in rows:
        if pieces[-1] and size + row.nbytes > CHUNK_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(row)
        size += row.nbytes
    return pieces


@handles(messages.OpenProducer)
async def handle_open_producer(node: Node, command: messages.OpenProducer, context: Context) -> messages.Opened:
    home = node.home(command.topic)

    async def work(turn: Turn) -> int:
        return await open_producer(turn, command.producer_id)

    return messages.Opened(await home.shard.in_topic(home.name, work))


class _Limited(Exception):
    """The topic has a limit that counts what is stored, so its enqueues take turns."""


async def _store(
    home: Home, rows: list[NewRow], atomic: bool, identity: Identity | None, context: Context
) -> list[Enqueued]:
    """Store rows in one transaction and return a result for each."""
    began = perf_counter()
    deadline: int | None = None
    has_identities = identity is not None or any(row.idempotency_key is not None for row in rows)
    if home.buffer is not None and not has_identities:
        buffered = await home.buffer.enqueue(home.name, rows, atomic)
        if buffered is not None:
            _count(home, buffered, began)
            return buffered

    limited = home.shard.limited
    locked = has_identities or home.name in limited

    async def work(turn: Turn) -> list[Enqueued]:
        if not turn.topic.config.max_backlog:
            limited.discard(home.name)
        elif not locked:
            raise _Limited
        check_claim(turn, context.claimed_at)
        nonlocal deadline
        call = _Call(home, turn, rows, atomic, identity)
        results = await call.store()
        deadline = call.deadline
        return results

    try:
        results = await home.shard.in_topic(home.name, work, locked=locked)
    except _Limited:  # its lock must be taken as the transaction begins, before that of the rings
        limited.add(home.name)
        return await _store(home, rows, atomic, identity, context)
    except IdConflict:
        home.shard.node.give_up()
        raise
    home.wake()
    if deadline is not None:
        home.expect(deadline)
    _count(home, results, began)
    return results


def _count(home: Home, results: Sequence[Enqueued], began: float) -> None:
    counters = home.counters
    counters.enqueue.add(perf_counter() - began)
    counters.duplicates += sum(result.duplicate for result in results)
    counters.enqueued += sum(not result.duplicate and result.error is None for result in results)


class _Call:
    """One enqueue in its transaction."""

    def __init__(self, home: Home, turn: Turn, rows: list[NewRow], atomic: bool, identity: Identity | None) -> None:
        self._home, self._turn, self._rows, self._atomic, self._identity = home, turn, rows, atomic, identity
        self.deadline: int | None = None  # when time alone changes something about the stored messages

    async def store(self) -> list[Enqueued]:
        turn, topic = self._turn, self._turn.topic
        invalid = check_rows(self._rows, topic.config, topic.name, self._atomic)
        good = [i for i in range(len(self._rows)) if i not in invalid]
        rows = [self._rows[i] for i in good]
        memory = Memory(turn, rows, self._identity)
        judgement = await memory.judge()
        if topic.config.max_backlog:
            await self._limit(judgement)
        if self._atomic and judgement.errors:
            raise judgement.errors[min(judgement.errors)]
        new = judgement.new
        ids = dict(zip(new, self._home.shard.node.mint(len(new), turn.now, turn.node_until), strict=True))
        await self._insert([rows[i] for i in new], list(ids.values()))
        await memory.record(ids)
        results = iter([self._result(i, judgement, ids) for i in range(len(rows))])
        return [self._refused(invalid[i]) if i in invalid else next(results) for i in range(len(self._rows))]

    async def _limit(self, judgement: Judgement) -> None:
        """Refuse rows beyond max_backlog. Only new rows count: a repeat is answered however full the topic is."""
        topic = self._turn.topic
        stored = await self._turn.connection.fetchval(statement("count_backlog"), topic.id)
        room = max(0, topic.config.max_backlog - stored)
        new = judgement.new
        if len(new) > room:
            error = ResourceExhausted(f"max_backlog of topic {topic.name!r}", topic.config.max_backlog)
            judgement.refuse(new if self._atomic else new[room:], error)

    async def _insert(self, rows: list[NewRow], ids: list[int]) -> None:
        turn = self._turn
        ready, delayed = place_rows(rows, ids, turn.topic.ordering, turn.now)
        await insert(turn.connection, turn.layout, turn.topic.id, ready, delayed, turn.topic.config)
        ends = [end for end in ready.expires if end is not None]
        self.deadline = min(delayed.dues + ends, default=None)

    def _result(self, row: int, judgement: Judgement, ids: dict[int, int]) -> Enqueued:
        if row in judgement.errors:
            return self._refused(judgement.errors[row])
        suffix = self._turn.topic.id_suffix
        first = judgement.duplicate_of(row, ids)
        return Enqueued(ids[row] if first is None else first, first is not None, None, suffix)

    def _refused(self, error: HeaplineError) -> Enqueued:
        return Enqueued(0, error=error, id_suffix=self._turn.topic.id_suffix)
