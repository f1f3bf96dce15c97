"""Random interleavings of members, workers, time and kills in a group, against a naive model.

The model knows which member got which row until when, and what was acked. It checks that a row keeps its
offset; no member gets a row that another still holds; acked rows are never redelivered; first deliveries are in the
order of the stream; no row is missing; lag counts the unfinished rows.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.errors import DeliveryLost, MemberReplaced
from heapline.contract.message import Outgoing
from heapline.contract.stream import Fetched
from heapline.testing import HandClock, MemoryBroker

PARTITIONS = 3
MEMBERS = ("a", "b", "c")
CONFIG: dict[str, Any] = {
    "ack_timeout": 20.0, "member_lease": 15.0, "max_retries": 200,
    "backoff": {"base": 2.0, "factor": 1.0, "jitter": 0.0},
}  # fmt: skip
Row = tuple[int, int]  # partition, offset


class World:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.hl = MemoryBroker(self.clock)
        self.sessions = dict.fromkeys(MEMBERS, 0)
        self.used = dict.fromkeys(MEMBERS, 0)  # the most recent session
        self.held: dict[Row, tuple[str, int]] = {}  # -> member, until
        self.acked: set[Row] = set()
        self.given: dict[str, set[Row]] = {member: set() for member in MEMBERS}  # and not settled, by this session
        self.seen: dict[Row, int] = {}  # -> id
        self.enqueued: set[int] = set()
        self.cancelled: set[int] = set()
        self.waits: list[int] = []  # delayed messages that may not have fired yet

    async def start(self) -> None:
        await self.hl.__aenter__()
        await self.hl.create_topic("jobs", partitions=PARTITIONS, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        await self.hl.create_group("jobs", "g", **CONFIG)

    @property
    def now(self) -> int:
        return self.clock.boot_ms()

    def session(self, member: str) -> str:
        return f"{member}{self.sessions[member]}"

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def enqueue(self, n: int) -> None:
        delay = None if n % 3 else float(n % 30)
        messages = [Outgoing(b"x", key=str(n + i), delay=delay) for i in range(1 + n % 5)]
        ids = [result.id for result in await self.hl.enqueue_batch("jobs", messages)]
        self.enqueued.update(ids)
        if delay:
            self.waits += ids

    async def cancel(self, n: int) -> None:
        """Cancel delayed messages; only those that the group has not seen count as cancelled."""
        if self.waits:
            id = self.waits.pop(n % len(self.waits))
            info = await self.hl.get("jobs", id)
            if info.state == "delayed":
                await self.hl.cancel("jobs", id)
                self.cancelled.add(id)

    async def work(self, n: int) -> None:
        """A worker acks messages, which does not affect the group."""
        await self.hl.ack(await self.hl.pop("jobs", 1 + n % 4))

    async def pass_time(self, n: int) -> None:
        self.clock.advance((n % 90) / 10)
        for _ in range(5):
            await asyncio.sleep(0)

    async def fetch(self, n: int) -> None:
        member = MEMBERS[n % 3]
        self.note(member, await self.ask(member, n % 7 * 3))

    async def ask(self, member: str, count: int) -> Fetched:
        if self.used[member] != self.sessions[member]:
            self.forget(member)  # which reports that it restarted
            self.used[member] = self.sessions[member]
        return await self.hl.group_fetch("jobs", "g", member, session=self.session(member), max_messages=count)

    async def ack(self, n: int) -> None:
        await self.settle(*self.some(n), self.hl.group_ack, acks=True)

    async def nack(self, n: int) -> None:
        await self.settle(*self.some(n), self.hl.group_nack, acks=False)

    def some(self, n: int) -> tuple[str, list[Row]]:
        member = MEMBERS[n % 3]
        return member, [row for i, row in enumerate(sorted(self.given[member])) if (n >> (i % 7)) & 1]

    async def settle(self, member: str, some: list[Row], act: Any, acks: bool) -> None:
        offsets: dict[int, list[int]] = {}
        for partition, offset in some:
            offsets.setdefault(partition, []).append(offset)
        lost: set[Row] = set()
        try:
            await act("jobs", "g", member, offsets, session=self.session(member))
        except DeliveryLost as error:
            lost = set(zip(error.partitions, error.offsets, strict=True))
        for row in some:
            self.given[member].discard(row)
            if row not in lost:
                self.held.pop(row, None)
                if acks:
                    self.acked.add(row)

    async def restart_member(self, n: int) -> None:
        """Kill a member; with `again`, it returns under its name."""
        member = MEMBERS[n % 3]
        old = self.session(member)
        self.sessions[member] += 1
        self.given[member].clear()
        if n % 2:
            self.forget(member)
            self.note(member, await self.ask(member, 0))
            try:
                await self.hl.group_ack("jobs", "g", member, {0: [1]}, session=old)
            except (MemberReplaced, DeliveryLost):
                return

    async def leave(self, n: int) -> None:
        member = MEMBERS[n % 3]
        try:
            await self.hl.group_leave("jobs", "g", member, session=self.session(member))
        except MemberReplaced:
            return  # the session that died is still the current one
        self.forget(member)
        self.given[member].clear()

    async def kill(self, n: int) -> None:
        if n % 3 == 0:
            await self.hl.snapshot("jobs")
        for runner in self.hl.topics._all_runners():
            runner.is_closed = True  # the broker does nothing more, as after a kill
            if runner.turns._timer is not None:
                runner.turns._timer.cancel()
        self.hl.abandon()
        self.hl = MemoryBroker(self.clock, disk=self.hl.disk)
        await self.hl.__aenter__()

    # -- the model -------------------------------------------------------------------------------------------------

    def forget(self, member: str) -> None:
        for row in [row for row, (holder, _) in self.held.items() if holder == member]:
            del self.held[row]

    def note(self, member: str, fetched: Fetched) -> None:
        for batch in fetched.batches:
            for message in batch.messages():
                row = (message.partition, message.offset)
                assert row not in self.acked, "it was done"
                assert self.seen.setdefault(row, message.id) == message.id, "another message at the same offset"
                holder, until = self.held.get(row, (member, 0))
                assert holder == member or until <= self.now, f"{holder} still holds it"
                self.held[row] = (member, self.now + 20_000)
                self.given[member].add(row)

    async def check(self) -> None:
        ids = list(self.seen.values())
        assert len(ids) == len(set(ids)), "a message is in the stream once"
        for _ in range(5):
            await asyncio.sleep(0)  # due messages fire
        offsets = await self.hl.group_offsets("jobs", "g")
        due = len(self.enqueued - self.cancelled) - (await self.hl.stats("jobs")).delayed
        assert sum(offset.lag for offset in offsets) == due - len(self.acked)

    async def finish(self) -> None:
        """Let all members return and finish: no row may be missing."""
        self.clock.advance(40)
        for _ in range(60):
            for member in MEMBERS:
                self.note(member, await self.ask(member, 1000))
                await self.settle(member, list(self.given[member]), self.hl.group_ack, acks=True)
            await self.pass_time(85)
            if len(self.acked) == len(self.enqueued - self.cancelled):
                break
        assert set(self.seen.values()) == self.enqueued - self.cancelled
        assert self.acked == set(self.seen)
        assert sum(offset.lag for offset in await self.hl.group_offsets("jobs", "g")) == 0


OPS = (
    "enqueue", "enqueue", "fetch", "fetch", "fetch", "ack", "ack", "nack", "pass_time", "pass_time", "work", "cancel",
    "restart_member", "leave", "kill",
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 1000)), max_size=60))
def test_group_matches_the_model(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        world = World()
        await world.start()
        try:
            for name, n in steps:
                await getattr(world, name)(n)
                await world.check()
            await world.finish()
        finally:
            await world.hl.close()

    asyncio.run(run())


async def test_later_group_sees_the_same_stream_as_an_early_one() -> None:
    world = World()
    await world.start()
    for n in range(0, 60, 7):
        await world.enqueue(n)
        await world.pass_time(n * 13)
    await world.pass_time(89)
    early = [(r.partition, r.offset, r.id) for b in (await world.ask("a", 1000)).batches for r in b.messages()]
    await world.kill(1)
    fetched = await world.hl.group_fetch("jobs", "late", "m", session="s")
    late = [(r.partition, r.offset, r.id) for b in fetched.batches for r in b.messages()]
    assert sorted(late) == sorted(early)
    assert len(late) > 10
    for partition in range(PARTITIONS):
        assert [r for r in late if r[0] == partition] == sorted(r for r in early if r[0] == partition)
    await world.hl.close()
