"""Idempotency keys that are unique in a namespace, whatever the topic, as MQueue's index makes them.

Topics have keys of their own (dedup.py), and the topics of a namespace may be in different shards. So a key is first
*claimed* for a topic, in the namespace's own shard, and then the topic stores the message with it. A key that another
topic has claimed is a repeat of the message there. If that topic has no such message, its enqueue failed, or is still
in progress: the claim can be taken over once it is older than any enqueue takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg

from heapline.contract.config import TopicConfig
from heapline.contract.errors import IdempotencyConflict
from heapline.contract.ids import to_ulid
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import fingerprint
from heapline.sql.node import Node
from heapline.sql.placement import shard_of
from heapline.sql.shard import Shard
from heapline.sql.statements import statement

WINDOW_MS = round(TopicConfig().dedup_window * 1000)
ABANDONED_MS = 120_000  # four times as long as a statement may take


class Wanted(NamedTuple):
    """A message that is to be enqueued with a key."""

    key: str
    topic: str
    payload: bytes


class _Claim(NamedTuple):
    topic: str
    at: int


async def claim(node: Node, namespace: str, rows: Sequence[Wanted]) -> list[int | None]:
    """Claim the keys of these messages. Return the id of the message that each one repeats in another topic, or None.

    A key may be used for one topic among the rows. Raise IdempotencyConflict if the message of another topic has
    another payload, or is not stored yet.
    """
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
        elif hash in known:
            found.append(_repeated(row, known[hash]))
        else:
            await _take_over(shard, namespace, row, hash, claims[hash], now)
            found.append(None)
    return found


async def _stored(node: Node, topic: str, hashes: list[bytes]) -> list[Any]:
    """Return the keys that a topic has stored messages with."""
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
    raise IdempotencyConflict(f"idempotency key {row.key!r}", f"(of topic {claimed.topic!r}, in progress)")
