"""Calls on a consumer group `g` of topic `jobs`, and what they return, for tests of groups."""

from __future__ import annotations

from typing import Any

from heapline.contract.message import Outgoing
from heapline.contract.stream import Fetched
from heapline.engine import EmbeddedBroker
from tests.unit.engine.rig import Rig

MANY = 40_000


async def fetch(hl: EmbeddedBroker, member: str = "a", **more: Any) -> Fetched:
    return await hl.group_fetch("jobs", "g", member, **{"session": "s", **more})


def payloads(fetched: Fetched) -> list[bytes]:
    return [bytes(payload) for batch in fetched.batches for payload in batch.payloads]


def offsets(fetched: Fetched) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for batch in fetched.batches:
        found.setdefault(batch.partition, []).extend(batch.offsets.tolist())
    return found


async def lag(rig: Rig) -> int:
    return sum(offset.lag for offset in await rig.hl.group_offsets("jobs", "g"))


async def fill(rig: Rig, count: int, payload: bytes = b"x") -> None:
    for start in range(0, count, 5000):
        await rig.hl.enqueue_batch("jobs", [Outgoing(payload)] * min(5000, count - start))
