"""Idempotency keys that are unique in a namespace, whatever the topic, as MQueue's index makes them.

Topics have keys of their own (dedup.py), and the topics of a namespace may be in different shards. So a key is first
*claimed* for a topic, in the namespace's own shard, and then the topic stores the message with it. A key that another
topic has claimed is a repeat of the message there. If that topic has no such message, its enqueue failed, or is still
in progress: the claim can be taken over once it is ABANDONED_MS old.

So a message must not be stored under a claim that may have been taken over. The transaction that stores it, or prepares
it, checks that the claim is not older than VALID_MS, by the clock of the topic's database (`check_claim`). What is left
until ABANDONED_MS is for the statements between this check and the commit: the server ends a transaction whose node is
silent for 10 seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg

from heapline.contract.config import TopicConfig
from heapline.contract.errors import IdempotencyConflict, UnavailableError
from heapline.contract.ids import to_ulid
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import fingerprint
from heapline.sql.node import Node
from heapline.sql.placement import shard_of
from heapline.sql.shard import Shard, Turn
from heapline.sql.statements import statement

WINDOW_MS = round(TopicConfig().dedup_window * 1000)
VALID_MS = 60_000  # that a message may be stored after its key was claimed
ABANDONED_MS = 120_000  # after which a claim without a message can be taken over


class Wanted(NamedTuple):
    """A message that is to be enqueued with a key."""

    key: str
    topic: str
    payload: bytes


class Claims(NamedTuple):
    """The result of claiming several keys."""

    repeats: list[int | None]  # for each message: the id of one in another topic that it repeats
    claimed_at: dict[str, int]  # by topic, by the clock of its database, ms


class _Claim(NamedTuple):
    topic: str
    at: int


def check_claim(turn: Turn, claimed_at: Mapping[str, int] | None) -> None:
    """Raise UnavailableError if the claim of a topic's keys may have been taken over."""
    at = None if claimed_at is None else claimed_at.get(turn.topic.name)
    if at is not None and turn.now - at > VALID_MS:
        raise UnavailableError(
            f"the idempotency keys for topic {turn.topic.name!r} were claimed {(turn.now - at) // 1000} seconds ago, "
            "so nothing was stored; retry with the same keys"
        )


async def claim(node: Node, namespace: str, rows: Sequence[Wanted]) -> Claims:
    """Claim the keys of these messages.

    A key may be used for one topic among the rows. Raise IdempotencyConflict if the message of another topic has
    another payload, or is not stored yet.
    """
    claimed_at = await _read_times(node, {row.topic for row in rows})  # first: a claim may only seem older than it is
    shard = node.shards[shard_of(namespace, "", len(node.shards))]
    topics = {key_hash(row.key): row.topic for row in rows}
    claims, now = await _claim(shard, namespace, topics)
    others: dict[str, list[bytes]] = {}  # by the topic that has claimed them
    for hash, topic in topics.items():
        if claims[hash].topic != topic:
            others.setdefault(claims[hash].topic, []).append(hash)
    stored = [await _stored(node, topic, hashes) for topic, hashes in others.items()]
    known = {row["hash"]: row for found in stored for row in found}
    found: list[int | None] = []
    for row in rows:
        hash = key_hash(row.key)
        if claims[hash].topic == row.topic:
            found.append(None)
        elif hash in known and known[hash]["is_prepared"]:
            raise _in_progress(row, claims[hash])
        elif hash in known:
            found.append(_repeated(row, known[hash]))
        else:
            await _take_over(shard, namespace, row, hash, claims[hash], now)
            found.append(None)
    return Claims(found, claimed_at)


async def _read_times(node: Node, topics: set[str]) -> dict[str, int]:
    """Return the time of each topic's database."""
    times: dict[int, int] = {}
    found: dict[str, int] = {}
    for topic in topics:
        shard = node.home(topic).shard
        if shard.index not in times:
            async with shard.connection() as connection:
                times[shard.index] = (await shard.read_layout(connection)).now
        found[topic] = times[shard.index]
    return found


async def _stored(node: Node, topic: str, hashes: list[bytes]) -> list[Any]:
    """Return the keys that a topic has stored messages with, or has in a prepared batch."""
    home = node.home(topic)
    async with home.shard.connection() as connection:
        rows: list[Any] = await connection.fetch(statement("select_keys_of_topic"), *home.name, hashes)
    return rows


def _repeated(row: Wanted, stored: Any) -> int:
    """Return the id of the message that a row repeats."""
    if stored["print"] != fingerprint(row.payload):
        raise IdempotencyConflict(f"idempotency key {row.key!r}", to_ulid(stored["id"], stored["id_suffix"]))
    id: int = stored["id"]
    return id


async def _claim(shard: Shard, namespace: str, topics: dict[bytes, str]) -> tuple[dict[bytes, _Claim], int]:
    hashes = sorted(topics)  # in one order, so that two calls do not wait for each other

    async def work(connection: asyncpg.Connection) -> tuple[dict[bytes, _Claim], int]:
        now = (await shard.read_layout(connection)).now
        names = [topics[hash] for hash in hashes]
        rows = await connection.fetch(statement("claim_namespace_keys"), namespace, hashes, names, now, now + WINDOW_MS)
        return {row["hash"]: _Claim(row["topic"], row["at"]) for row in rows}, now

    return await shard.run(work)


async def _take_over(shard: Shard, namespace: str, row: Wanted, hash: bytes, claimed: _Claim, now: int) -> None:
    """Take a claim over from an enqueue that failed, or raise IdempotencyConflict: it may be in progress."""
    if claimed.at + ABANDONED_MS < now:
        async with shard.connection() as connection:
            values = namespace, hash, claimed.topic, claimed.at, row.topic, now
            if await connection.fetchval(statement("take_over_namespace_key"), *values):
                return
    raise _in_progress(row, claimed)


def _in_progress(row: Wanted, claimed: _Claim) -> IdempotencyConflict:
    return IdempotencyConflict(f"idempotency key {row.key!r}", f"(of topic {claimed.topic!r}, in progress)")
