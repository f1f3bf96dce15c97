"""A data directory with every kind of content, and a digest of everything that must survive in it.

`fill` produces every state and every kind of event, with fixed time and fixed randomness, so that each call creates
the same directory. `digest` reads the directory's content through the public contract alone (it pops what is
ready, so call it last). Used by the corruption tests and by the format fixture.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import numpy as np

import heapline
from heapline.contract.config import BrokerConfig
from heapline.contract.ids import SUFFIX_BITS
from heapline.contract.message import from_ms
from heapline.engine import EmbeddedBroker
from tests.integration.ram import InlineIo, RamDisk

START = 1_767_225_600_000  # 2026-01-01 00:00 UTC, in ms
HOUR = 3600.0
#: No automatic background work: snapshots and reclaiming happen when `fill` calls them.
STILL = BrokerConfig(spare_segment_bytes=0, reclaim_interval=HOUR, snapshot_interval=HOUR, rewrite_below=0.9)


class FixedClock:
    """A clock that moves only when advanced."""

    def __init__(self, now: int = START) -> None:
        self.now = now

    def wall_ms(self) -> int:
        return self.now

    def boot_ms(self) -> int:
        return self.now - START + 1_000_000

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1000)


def broker(disk: RamDisk, clock: FixedClock, path: str = "/data") -> EmbeddedBroker:
    suffixes = random.Random(1)
    return EmbeddedBroker(
        path, config=STILL, disk=disk, io=InlineIo(), clock=clock, draw=np.random.default_rng(1).random,
        draw_id_suffix=lambda: suffixes.getrandbits(SUFFIX_BITS),
    )  # fmt: skip


def payload(number: int, length: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=64).digest()[: min(length, 64)].ljust(length, b".")


class Filler:
    """Fills one topic; remembers the id of every message, even of removed ones."""

    def __init__(self, hl: EmbeddedBroker, clock: FixedClock, topic: str) -> None:
        self.hl, self.clock, self.topic = hl, clock, topic
        self.ids: list[int] = []
        self._made = 0

    async def put(self, count: int, length: int = 40, **options: Any) -> list[int]:
        batch = [
            heapline.Outgoing(payload(n, length), priority=n * 7919 % 101 - 50, **options)
            for n in range(self._made, self._made + count)
        ]
        self._made += count
        ids = [answer.id for answer in await self.hl.enqueue_batch(self.topic, batch)]
        self.ids += ids
        return ids

    async def tick(self, seconds: float) -> None:
        """Let time pass, and wait until everything that became due has happened."""
        self.clock.advance(seconds)
        await self.hl.stats(self.topic)

    async def put_all_kinds(self) -> None:
        hl, topic = self.hl, self.topic
        await self.put(60)
        await self.put(12, key="customer-7", headers={"trace": "é-1"}, ttl=5 * HOUR)
        await self.put(10, delay=HOUR)
        await self.put(6, deliver_at=from_ms(self.clock.now) + timedelta(days=400))
        await self.put(5, delay=2.0)
        await self.put(4, ttl=3.0)
        await self.put(3, max_retries=0)
        one = await hl.enqueue(topic, b"only once", priority=-60, idempotency_key="order-1")
        two = await hl.enqueue(topic, b"", priority=2**63 - 1, idempotency_key="order-2", idempotency_scope="until_ack")
        self.ids += [one.id, two.id]
        epoch = await hl.open_producer(topic, "p1")
        numbered = await hl.enqueue(topic, b"numbered", producer_id="p1", epoch=epoch, seq=7, answered_below=3)
        self.ids.append(numbered.id)

    async def work(self) -> None:
        """Leases that end in every possible way."""
        hl = self.hl
        await self.tick(4.0)  # fires the short delays, ends the short ttls
        held = await hl.pop(self.topic, 24, visibility=20.0, holder="worker-1")
        await hl.ack(held[:8])
        await hl.nack(held[8:11], backoff=600.0, reason="downstream said no")
        await hl.nack(held[11:13])
        await hl.release(held[13:15])
        await hl.extend(held[15:17], HOUR)
        await hl.bury(held[17:20], reason="poison")
        await self.tick(25.0)  # the rest of the leases expire
        more = await hl.pop(self.topic, 9, visibility=2 * HOUR, request_id="pop-1")
        await hl.bury(more[:4], reason="poison too")

    async def by_hand(self) -> None:
        hl, topic = self.hl, self.topic
        dead = await hl.dlq_list(topic)
        await hl.dlq_replay(topic, [dead[0].id])
        await hl.dlq_delete(topic, [dead[1].id])
        waiting = await hl.peek(topic, 12)
        await hl.cancel(topic, waiting[0].id)
        await hl.reschedule(topic, waiting[1].id, priority=-99)
        await hl.reschedule(topic, waiting[2].id, delay=2 * HOUR)
        await hl.reschedule(topic, waiting[3].id, deliver_at=from_ms(self.clock.now) + timedelta(days=3), priority=3)
        delayed = await self.put(2, delay=HOUR)
        await hl.cancel(topic, delayed[0])


async def known(hl: EmbeddedBroker, topic: str, ids: Sequence[int]) -> dict[int, Any]:
    """Return what the broker reports for each id, or None for ids that it has forgotten."""
    reported = await asyncio.gather(*(hl.get(topic, id) for id in ids), return_exceptions=True)
    for answer in reported:
        if isinstance(answer, BaseException) and not isinstance(answer, heapline.MessageNotFound):
            raise answer
    return {id: None if isinstance(a, BaseException) else a for id, a in zip(ids, reported, strict=True)}


async def digest(hl: EmbeddedBroker, topic: str, ids: Sequence[int]) -> dict[str, Any]:
    """Return everything visible of a topic as plain values. Pops what is ready."""
    stats = await hl.stats(topic)
    popped = []
    if not stats.paused:
        popped = await hl.pop(topic, 100_000, visibility=HOUR, max_bytes=1 << 40, request_id="digest")
    taken = {m.id for m in popped}
    rest = await known(hl, topic, [id for id in ids if id not in taken])
    return {
        "stats": {s: getattr(stats, s) for s in ("ready", "delayed", "leased", "dead", "paused")},
        "offsets": [p.offset for p in stats.partitions],
        "ready": [_delivered(m) for m in popped],
        "others": {str(id): info and _shown(info) for id, info in rest.items()},
    }


def _delivered(m: heapline.Message) -> list[Any]:
    enqueued_ms = round(m.enqueued_at.timestamp() * 1000)
    return [m.id, m.priority, m.attempts, m.key, m.headers, m.partition, enqueued_ms, shown(m.payload)]


def _shown(info: heapline.MessageInfo) -> dict[str, Any]:
    facts = {f: getattr(info, f) for f in ("state", "priority", "attempts", "holder", "reason", "key", "headers")}
    for name in ("due_at", "enqueued_at", "expires_at", "deadline", "ended_at"):
        moment = getattr(info, name)
        facts[name] = None if moment is None else round(moment.timestamp() * 1000)
    facts["payload"] = None if info.payload is None else shown(info.payload)
    return facts


def shown(data: bytes) -> str:
    """Return a short, unique description of a payload."""
    return f"{len(data)}:{blake2b(data, digest_size=8).hexdigest()}"
