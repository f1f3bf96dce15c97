"""Seeded members of consumer groups: they fetch, ack in any order, nack, leave, restart and forget their rows.

A member's rows outlive the node, as with real ones: after a crash it acks rows that another member may have
by then. At the end `GroupDrainer` reads every group to its end. All calls are in the history.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from heapline.contract.stream import Fetched, GroupOffset
from tests.simulation.clients import Client

GROUPS = ("g0", "g1")
ROUNDS_MAX = 200
HELD_MAX = 300


class Row(NamedTuple):
    """A row that a member received."""

    partition: int
    offset: int
    id: int
    attempts: int
    payload: bytes


class Member(Client):
    """A member of one group in all topics."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.group = GROUPS[int(self.name[-1]) % len(GROUPS)]
        self._session = 0
        self._held: dict[str, list[Row]] = {}

    @property
    def session(self) -> str:
        return f"{self.name}-{self._session}"

    async def act(self, topic: str) -> None:
        rng, held = self.rng, self._held.setdefault(topic, [])
        kind = rng.choice(("fetch", "fetch", "ack", "ack", "ack", "nack", "offsets", "leave", "restart", "forget"))
        if kind in ("ack", "nack") and held:
            count = rng.choice((1, 3, len(held), len(held)))
            chosen = rng.sample(held, min(count, len(held)))
            await (self.ack if kind == "ack" else self.nack)(topic, chosen)
        elif kind == "offsets":
            work = self.node.hl.group_offsets(topic, self.group)
            await self.call("group_offsets", topic, work, _places, group=self.group)
        elif kind == "leave" and rng.random() < 0.3:
            leaving = self.node.hl.group_leave(topic, self.group, self.name, session=self.session)
            await self.call("group_leave", topic, leaving, group=self.group)
            held.clear()
        elif kind == "restart" and rng.random() < 0.3:
            self._session += 1
            self._held.clear()
        elif kind == "forget" and rng.random() < 0.3:
            held.clear()  # they time out
        elif len(held) < HELD_MAX:
            await self.fetch(topic, rng.choice((1, 5, 50)), wait=rng.choice((0.0, 0.0, 0.5)))

    async def fetch(self, topic: str, count: int, wait: float = 0.0) -> list[Row]:
        work = self.node.hl.group_fetch(
            topic, self.group, self.name, session=self.session, max_messages=count, wait=wait
        )
        call = await self.call("group_fetch", topic, work, _rows, group=self.group)
        rows: list[Row] = call.result if call.outcome == "ok" else []
        self._held.setdefault(topic, []).extend(rows)
        return rows

    async def ack(self, topic: str, rows: list[Row]) -> None:
        work = self.node.hl.group_ack(topic, self.group, self.name, _offsets(rows), session=self.session)
        await self._settle("group_ack", topic, rows, work)

    async def nack(self, topic: str, rows: list[Row]) -> None:
        work = self.node.hl.group_nack(topic, self.group, self.name, _offsets(rows), session=self.session)
        await self._settle("group_nack", topic, rows, work)

    async def _settle(self, verb: str, topic: str, rows: list[Row], work: Any) -> None:
        places = [(row.partition, row.offset) for row in rows]
        await self.call(verb, topic, work, group=self.group, rows=places)
        gone = set(places)
        self._held[topic] = [row for row in self._held[topic] if (row.partition, row.offset) not in gone]


class GroupDrainer(Member):
    """Reads a group to its end when all faults are over."""

    async def run(self) -> None:
        for topic in self.topics:
            for _ in range(ROUNDS_MAX):
                rows = await self.fetch(topic, 1000, wait=1.0)
                if rows:
                    await self.ack(topic, rows)
                    continue
                places = await self.node.hl.group_offsets(topic, self.group)
                if not sum(place.lag for place in places):
                    break
                await asyncio.sleep(1.0)
            else:
                raise AssertionError(f"group {self.group} of {topic} does not finish: {places}")
            self.node.history.note(f"group {self.group} of {topic} has read all")


async def make_groups(hl: Any, topic: str) -> None:
    for name in GROUPS:
        await hl.create_group(topic, name, ack_timeout=5.0, member_lease=5.0, max_retries=250)


def _offsets(rows: list[Row]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(row.partition, []).append(row.offset)
    return found


def _rows(fetched: Fetched) -> list[Row]:
    return [
        Row(message.partition, message.offset, message.id, message.attempts, message.payload)
        for batch in fetched.batches
        for message in batch.messages()
    ]


def _places(offsets: list[GroupOffset]) -> dict[int, int]:
    return {offset.partition: offset.committed for offset in offsets}
