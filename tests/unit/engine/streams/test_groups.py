"""Consumer groups on an embedded broker: what members get, in which order, and what becomes of it."""

from __future__ import annotations

from typing import Any

from heapline.model import Outgoing
from heapline.streams import Fetched, StreamMessage
from heapline.testing import MemoryBroker

SMALL: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 256 << 10}


async def fetch(hl: MemoryBroker, member: str = "a", group: str = "g", session: str = "s", **more: Any) -> Fetched:
    return await hl.group_fetch("jobs", group, member, session=session, **more)


def rows(fetched: Fetched) -> list[StreamMessage]:
    return [row for batch in fetched.batches for row in batch.messages()]


def payloads(fetched: Fetched) -> list[bytes]:
    return [row.payload for row in rows(fetched)]


async def ack(hl: MemoryBroker, fetched: Fetched, member: str = "a", group: str = "g", session: str = "s") -> None:
    offsets = {}
    for batch in fetched.batches:
        offsets.setdefault(batch.partition, []).extend(batch.offsets.tolist())
    await hl.group_ack("jobs", group, member, offsets, session=session)


async def lag(hl: MemoryBroker, group: str = "g") -> int:
    return sum(offset.lag for offset in await hl.group_offsets("jobs", group))


async def test_a_group_gets_every_message_once_and_its_lag_becomes_zero() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", **SMALL)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        info = await hl.create_group("jobs", "g")
        assert info.lag == 10
        got = await fetch(hl)
        assert payloads(got) == [b"%d" % i for i in range(10)]
        assert got.partitions == [0]
        await hl.enqueue("jobs", b"10")
        more = await fetch(hl)
        assert payloads(more) == [b"10"]
        assert await lag(hl) == 11
        await ack(hl, more)
        assert await lag(hl) == 10
        await ack(hl, got)
        assert await lag(hl) == 0
        (offset,) = await hl.group_offsets("jobs", "g")
        assert offset.outstanding == 0


async def test_subscription_iterates_and_acks() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", **SMALL)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        got = []
        async with hl.subscribe("jobs", group="g", credits=3) as subscription:
            async for row in subscription:
                got.append(row.payload)
                await row.ack()
                if len(got) == 10:
                    break
            assert subscription.partitions == [0]
        assert got == [b"%d" % i for i in range(10)]
        assert await lag(hl) == 0
        assert (await hl.get_group("jobs", "g")).members == {}
