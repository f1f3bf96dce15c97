"""Parts of prepared batches in one shard: store a topic's share of a part, attach the named ones, drop the others.

Ids are minted, and the order and due times fixed, when a part is prepared. Its new messages are kept as columns in one
row, so that topics know nothing of them. Their idempotency keys and sequences are in doubt meanwhile, in tables of
their own, which every enqueue with such an identity reads first (dedup.py). So attaching needs no check and no lock of
a topic: no other message can have taken an identity since.

Preparing takes the batch's lock in shared mode, attaching takes it alone and leaves a row in `attached`. So a part that
arrives later (its node was paused, and the client has repeated the call) is refused and not attached a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import asyncpg
import msgspec

from heapline.contract.batches import Share
from heapline.contract.call import Context
from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, BatchDecided, IdempotencyConflict, ResourceExhausted
from heapline.contract.message import Enqueued
from heapline.sql.dedup import Identity, Judgement, Memory, Producer
from heapline.sql.home import Home
from heapline.sql.insert import IdConflict, insert
from heapline.sql.layout import Layout
from heapline.sql.namespace_keys import check_claim
from heapline.sql.node_id import NodeId
from heapline.sql.rows import BATCH_BYTES_MAX, NOTHING, NewRow, Stored, check_rows, rows_of_batch, values_of
from heapline.sql.shard import Shard, Turn, lock_key, read_config
from heapline.sql.statements import all_blocks, fill, statement

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class PartName(NamedTuple):
    """A part of a batch, and all topics that it has messages for."""

    batch: str
    part: str
    topics: tuple[str, ...]  # canonical, sorted


def begin_attach(shard: Shard, batch: str) -> str:
    """Return the statements that begin a transaction alone on a batch in this shard."""
    return fill(all_blocks()["begin_attach"], {"batch": str(batch_lock(shard, batch))})


def batch_lock(shard: Shard, batch: str) -> int:
    return lock_key(f"heapline {shard.schema} batch {batch}")


# -- prepare -----------------------------------------------------------------------------------------------------------


async def prepare(
    home: Home, name: PartName, share: Share, identity: Identity | None, context: Context
) -> list[Enqueued]:
    """Store a topic's share of a part, or return the earlier answer if it is stored."""
    rows = rows_of_batch(share.messages)
    size = sum(row.nbytes for row in rows)
    if size > BATCH_BYTES_MAX:
        raise BadRequest(
            f"part {name.part!r} takes {size} bytes in topic {home.name.canonical!r}, over the limit of "
            f"{BATCH_BYTES_MAX}; prepare several parts and name all of them in the commit"
        )
    digest = hashlib.blake2b(_encode([name.topics, identity, rows]), digest_size=16).digest()

    shard = home.shard

    async def work(connection: asyncpg.Connection) -> list[Enqueued]:
        turn = await shard.enter(connection, home.name)
        check_claim(turn, context.claimed_at)
        return await _Preparation(shard.node, turn, name, rows, identity, digest).run()

    locks = {"batch": str(batch_lock(shard, name.batch)), "topic": str(shard.lock_key(home.name))}
    return await shard.run(work, begin=fill(all_blocks()["begin_prepare"], locks))


class _Preparation:
    def __init__(
        self,
        node: NodeId,
        turn: Turn,
        name: PartName,
        rows: list[NewRow],
        identity: Identity | None,
        digest: bytes,
    ) -> None:
        self._node = node
        self._turn, self._name, self._rows, self._identity, self._digest = turn, name, rows, identity, digest

    async def run(self) -> list[Enqueued]:
        turn, (batch, part, _) = self._turn, self._name
        known = await turn.connection.fetchrow(statement("select_prepared"), batch, part, turn.topic.id)
        if known is not None:
            return self._repeated(known)
        if await turn.connection.fetchval(statement("was_attached"), batch):
            raise BatchDecided(batch, "was committed")
        check_rows(self._rows, turn.topic.config, turn.topic.name, atomic=True)
        memory = Memory(turn, self._rows, self._identity)
        judgement = await memory.judge(batch)
        await self._limit(judgement)
        if judgement.errors:
            raise judgement.errors[min(judgement.errors)]
        return await self._insert(memory, judgement)

    def _repeated(self, known: Any) -> list[Enqueued]:
        results = _decode(known["results"], type=list[tuple[int, bool]])
        topic = self._turn.topic
        if known["digest"] != self._digest:
            identity = f"part {self._name.part!r} of batch {self._name.batch!r}"
            raise IdempotencyConflict(identity, topic.ulid(results[0][0]) if results else "(none)")
        return [Enqueued(id, duplicate, None, topic.id_suffix) for id, duplicate in results]

    async def _limit(self, judgement: Judgement) -> None:
        topic = self._turn.topic
        limit = topic.config.max_backlog
        if limit:
            stored = await self._turn.connection.fetchval(statement("count_backlog"), topic.id)
            if stored + len(judgement.new) > limit:
                raise ResourceExhausted(f"max_backlog of topic {topic.name!r}", limit)

    async def _insert(self, memory: Memory, judgement: Judgement) -> list[Enqueued]:
        turn, topic, new = self._turn, self._turn.topic, judgement.new
        minted = self._node.mint(len(new), turn.now, turn.node_until)
        ids = dict(zip(new, minted, strict=True))
        rows = [values_of(self._rows[i], id, topic.ordering, turn.now) for i, id in ids.items()]
        columns = [list(column) for column in zip(*rows, strict=True)] if rows else list(NOTHING)
        results: list[tuple[int, bool]] = []
        for row in range(len(self._rows)):
            first = judgement.duplicate_of(row, ids)
            results.append((ids[row], False) if first is None else (first, True))
        identity = self._identity or (None, None, None)
        await turn.connection.execute(
            statement("insert_prepared"),
            self._name.batch,
            self._name.part,
            topic.id,
            topic.name,
            list(self._name.topics),
            self._digest,
            turn.now,
            len(new),
            *identity,
            _encode(results),
            _encode(columns),
        )
        await memory.record_in_doubt(ids, self._name.batch, self._name.part)
        return [Enqueued(id, duplicate, None, topic.id_suffix) for id, duplicate in results]


# -- decide ------------------------------------------------------------------------------------------------------------


class PartView(NamedTuple):
    """A topic's share of a part."""

    part: str
    topic: str
    topics: tuple[str, ...]
    messages: int


async def view(connection: asyncpg.Connection, batch: str) -> list[PartView]:
    rows = await connection.fetch(statement("parts_of_batch"), batch)
    return [PartView(row["part"], row["name"], tuple(row["topics"]), row["messages"]) for row in rows]


async def left_out(connection: asyncpg.Connection, batch: str, parts: Sequence[str]) -> set[int]:
    """Return the ids of messages that repeat an identity of an earlier named part.

    Raise IdempotencyConflict if their payloads differ.
    """
    keys = await connection.fetch(statement("keys_of_batch"), batch, parts)
    sequences = await connection.fetch(statement("sequences_of_batch"), batch, parts)
    order = {part: i for i, part in enumerate(parts)}
    repeated = _repeats(keys, order, lambda row: (row["topic"], row["hash"]), batch)
    return repeated | _repeats(
        sequences, order, lambda row: (row["topic"], row["producer"], row["epoch"], row["seq"]), batch
    )


def _repeats(rows: Iterable[Any], order: dict[str, int], identity: Callable[[Any], Any], batch: str) -> set[int]:
    first: dict[Any, Any] = {}  # the first row of each identity
    found: set[int] = set()
    for row in sorted(rows, key=lambda row: (order[row["part"]], row["id"])):
        kept = first.setdefault(identity(row), row)
        if kept["print"] != row["print"]:
            raise IdempotencyConflict(f"an identity in two named parts of batch {batch!r}", str(row["id"]))
        if kept is not row:
            found.add(row["id"])
    return found


class Attached(NamedTuple):
    """The topics in which messages became visible, and when time alone changes something about these messages."""

    topics: set[str]
    deadline: int | None


async def attach(shard: Shard, connection: asyncpg.Connection, batch: str, parts: Sequence[str]) -> Attached:
    """Make the named parts of a batch visible and drop the others. Doing it again changes nothing.

    The transaction has the batch's lock (`begin_attach`).
    """
    layout = await shard.lock_rings(connection)
    rows = await connection.fetch(statement("hold_parts"), batch)
    named = [row for row in rows if row["part"] in set(parts)]
    leaves = await left_out(connection, batch, parts) if named else set()
    deadlines: list[int] = []
    for row in named:
        columns = Stored(*_decode(row["content"]))
        config = read_config(row["config"])[0]
        deadlines += await _insert(connection, layout, row["topic"], config, columns, leaves, batch)
        if row["producer"] is not None:
            await _commit_sequences(connection, layout, batch, row, leaves)
    if named:
        await connection.execute(statement("delete_replaced_keys"), batch, parts, layout.now)
        await connection.execute(statement("commit_keys"), batch, parts, list(leaves))
    await drop(connection, batch)
    await connection.execute(statement("insert_attached"), batch, layout.now)
    return Attached({row["name"] for row in named}, min(deadlines, default=None))


async def _insert(
    connection: asyncpg.Connection,
    layout: Layout,
    topic: int,
    config: TopicConfig,
    columns: Stored,
    leaves: set[int],
    batch: str,
) -> list[int]:
    """Store messages, and return the times at which something happens to them."""
    now = layout.now
    kept = [i for i, id in enumerate(columns.ids) if id not in leaves]
    ready = [i for i in kept if columns.dues[i] <= now]
    delayed = [i for i in kept if columns.dues[i] > now]
    try:
        await insert(connection, layout, topic, _pick(columns, ready), _pick(columns, delayed), config, batch)
    except IdConflict as error:
        # The ids were answered when the part was prepared. So they stay, and the other message must go first.
        what = f"ids of batch {batch!r} are in use by other messages of this shard ({' '.join(error.reason.split())})"
        raise IdConflict(
            f"{what}, so nothing was changed here; find them with SELECT * FROM items WHERE id = …, "
            "ack or cancel them, then commit the batch again"
        ) from error
    ends = [end for i in ready if (end := columns.expires[i]) is not None]
    return [columns.dues[i] for i in delayed] + ends


def _pick(columns: Stored, rows: list[int]) -> Stored:
    picked: list[Any] = [[column[i] for i in rows] for column in columns]
    return Stored(*picked)


async def _commit_sequences(
    connection: asyncpg.Connection, layout: Layout, batch: str, row: Any, leaves: set[int]
) -> None:
    """Record the sequences of a share, unless its producer has begun another epoch since."""
    topic, producer, epoch = row["topic"], row["producer"], row["epoch"]
    found = await connection.fetchrow(statement("select_producer"), topic, producer)
    known, answered = None if found is None else Producer(*found), row["answered"] or 0
    if known is not None and known.epoch > epoch:
        return
    if known is None or known.epoch < epoch:
        await connection.execute(statement("upsert_producer"), topic, producer, epoch, answered, 0, layout.now)
    else:
        answered = max(answered, known.answered_below)
    values = batch, row["part"], topic, list(leaves), layout.now, answered
    await connection.execute(statement("commit_sequences"), *values)


async def drop(connection: asyncpg.Connection, batch: str) -> set[str]:
    """Remove all parts of a batch, and return their names."""
    rows = await connection.fetch(statement("delete_prepared"), batch)
    await connection.execute(statement("delete_prepared_keys"), batch)
    await connection.execute(statement("delete_prepared_sequences"), batch)
    return {row["part"] for row in rows}
