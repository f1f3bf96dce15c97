"""After any calls on groups, snapshot and journal restore exactly the state that was acknowledged."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import numpy as np
import pytest

from heapline.contract.errors import HeaplineError
from heapline.contract.message import Outgoing
from heapline.contract.stream import Fetched
from heapline.engine.topic import Topic
from tests.unit.engine.rig import Rig, opened
from tests.unit.engine.stream_rig import reported

MEMBERS = ("a", "b", "c")
CONFIG: dict[str, Any] = {"ack_timeout": 5.0, "max_retries": 1, "member_lease": 8.0}


class Walk:
    """Random steps by members of one group and others, on a topic that may grow."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.random = rig, Random(seed)
        self.out: list[tuple[str, str, int, int]] = []  # group, member, partition, offset

    async def step(self) -> None:
        kinds = (
            self.enqueue, self.enqueue, self.pass_time, self.fetch, self.fetch, self.fetch, self.settle, self.settle,
            self.reset, self.letters, self.leave, self.snapshot, self.grow, self.delete, self.reschedule, self.work,
        )  # fmt: skip
        with contextlib.suppress(HeaplineError):
            await self.random.choice(kinds)()

    async def enqueue(self) -> None:
        r = self.random
        some = [
            Outgoing(b"x" * r.randrange(50), key=str(r.randrange(9)), delay=r.choice((None, None, 1.0, 4.0)))
            for _ in range(r.randrange(1, 12))
        ]
        await self.rig.hl.enqueue_batch("jobs", some)

    async def pass_time(self) -> None:
        self.rig.clock.advance(self.random.choice((0.5, 2.0, 6.0)))
        await self.rig.hl.list_groups("jobs")
        await self.rig.hl.list_groups("jobs")

    async def fetch(self) -> None:
        group, member = self.random.choice("gh"), self.random.choice(MEMBERS)
        got: Fetched = await self.rig.hl.group_fetch(
            "jobs", group, member, session="s", max_messages=self.random.randrange(0, 20), config=CONFIG
        )
        self.out += [(group, member, b.partition, o) for b in got.batches for o in b.offsets.tolist()]

    async def settle(self) -> None:
        if not self.out:
            return
        group, member, *_ = self.random.choice(self.out)
        mine = [row for row in self.out if row[:2] == (group, member) and self.random.random() < 0.6]
        self.out = [row for row in self.out if row not in mine]
        offsets: dict[int, list[int]] = {}
        for _, _, partition, offset in mine:
            offsets.setdefault(partition, []).append(offset)
        act = self.rig.hl.group_ack if self.random.random() < 0.6 else self.rig.hl.group_nack
        await act("jobs", group, member, offsets, session="s")

    async def reset(self) -> None:
        if self.random.random() < 0.3:
            end = self.rig.runner().loaded.topic.partitions[0].state.offset
            to: Any = self.random.choice(("earliest", "latest", {0: self.random.randrange(end + 1)}))
            await self.rig.hl.reset_offsets("jobs", "g", to=to)

    async def letters(self) -> None:
        act = self.random.choice((self.rig.hl.group_dead_replay, self.rig.hl.group_dead_delete))
        await act("jobs", self.random.choice("gh"))

    async def leave(self) -> None:
        await self.rig.hl.group_leave("jobs", self.random.choice("gh"), self.random.choice(MEMBERS), session="s")

    async def snapshot(self) -> None:
        if self.random.random() < 0.5:
            await self.rig.hl.snapshot("jobs")

    async def grow(self) -> None:
        if self.random.random() < 0.1:
            count = len(self.rig.runner().loaded.topic.partitions)
            await self.rig.hl.update_topic("jobs", partitions=min(4, count + 1))

    async def delete(self) -> None:
        if self.random.random() < 0.2:
            await self.rig.hl.delete_group("jobs", "h")

    async def reschedule(self) -> None:
        ids = [id for p in self.rig.runner().loaded.topic.partitions for id in p.entries.waiting()[0].tolist()]
        if ids:
            delay = self.random.choice((0.0, 3.0))
            await self.rig.hl.reschedule("jobs", self.random.choice(ids), delay=delay)

    async def work(self) -> None:
        popped = await self.rig.hl.pop("jobs", self.random.randrange(1, 6))
        await (self.rig.hl.ack if self.random.random() < 0.5 else self.rig.hl.nack)(popped)


async def facts(rig: Rig) -> dict[str, Any]:
    """Return the state on which later decisions depend: without how far the committed offset passed unrelated rows."""
    topic: Topic = rig.runner().loaded.topic
    streams = [(await reported(rig.runner(), p.number)).offsets for p in topic.partitions]
    found: dict[str, Any] = {
        "totals": [count.total for count in topic.counts],
        "pins": [sorted(pins.to_state()) for pins in topic.following.pins],
        "commits": [sorted(pins.to_state()) for pins in topic.following.commits],
        "offsets": [p.state.offset for p in topic.partitions],
    }
    for group in topic.groups:
        members = group.members
        found[group.name] = (
            group.config, group.used_at, members.generation, sorted(members.leases), sorted(members.owners.items()),
            sorted(members.targets.items()),
        )  # fmt: skip
        for number, place in group.partitions.items():
            rows = streams[number]
            undone = rows[(rows >= place.committed) & ~place.done.contains(rows)]
            failed = place.failed.to_state()
            lag = place.lag(topic.counts[number].total)
            assert lag == len(undone) + int(place.failed.back.sum())
            assert np.isin(place.fresh.offsets(), undone).all()
            found[f"{group.name}/{number}"] = (undone.tolist(), failed, sorted(place.dead.items()), lag)
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_recovered_groups_equal_those_in_memory(seed: int) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        walk = Walk(rig, seed)
        for _ in range(8):
            for _ in range(12):
                await walk.step()
            await rig.hl.list_groups("jobs")  # everything is durable
            live = await facts(rig)
            after = Rig(rig.disk.crash())
            after.clock = rig.clock
            await after.open()
            assert await facts(after) == live
            await after.hl.close()
