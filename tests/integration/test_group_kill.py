"""Members of a group as processes that are killed with -9 while partitions move, over gRPC.

According to the members' own records: every row was processed and acked, no row was held by two at the same time, and
first deliveries were in the order of their partition.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

import heapline
from heapline import Outgoing
from tests.integration.server_process import Process
from tests.integration.test_sdk_processes import free_port

pytestmark = pytest.mark.slow
SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}
ROWS, KILLS, PARTITIONS, MEMBERS = 1200, 5, 4, 3
ACK_TIMEOUT = 4.0
SLACK = 1.5  # the longest time that a row may wait in its member before it is recorded


class Note(NamedTuple):
    at: float
    member: str  # one run of a member
    what: str
    row: tuple[int, int]
    attempts: int


class Members:
    def __init__(self, target: str, directory: Path) -> None:
        self._target, self._directory = target, directory
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._lives = 0
        self.starts: dict[str, list[float]] = defaultdict(list)  # name -> when each of its runs began

    async def start(self, name: str) -> None:
        self._lives += 1
        self.starts[name].append(time.monotonic())
        log = self._directory / f"{name}.{self._lives}.log"
        self._running[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.group_member", self._target, name, str(log), str(ACK_TIMEOUT),
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(60):
            while not (log.exists() and log.read_bytes()):  # noqa: ASYNC110 - nothing tells when it has joined
                await asyncio.sleep(0.02)

    def names(self) -> list[str]:
        return sorted(self._running)

    async def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        await process.wait()

    async def kill_all(self) -> None:
        for name in list(self._running):
            await self.kill(name)

    def notes(self) -> list[Note]:
        found = []
        for path in self._directory.glob("*.log"):
            for line in path.read_text(encoding="ascii").splitlines():
                what, at, *facts = line.split()
                if len(facts) >= 2:
                    attempts = int(facts[2]) if what == "got" else 0
                    found.append(Note(float(at), path.stem, what, (int(facts[0]), int(facts[1])), attempts))
        return sorted(found)


async def test_members_killed_during_rebalances_lose_nothing_and_hold_nothing_twice(tmp_path: Path) -> None:
    chance = random.Random(7)
    logs = tmp_path / "logs"
    logs.mkdir()
    async with (
        Process(tmp_path / "data", "--insecure-everybody") as server,
        heapline.connect(server.target) as hl,
        asyncio.timeout(150),
    ):
        await hl.create_topic("jobs", partitions=PARTITIONS, **SMALL)
        members = Members(server.target, logs)
        feeding = asyncio.ensure_future(feed(hl))
        try:
            await asyncio.gather(*(members.start(f"m{n}") for n in range(MEMBERS)))
            for number in range(KILLS):
                await asyncio.sleep(chance.uniform(0.1, 0.5))
                victim = chance.choice(members.names())
                await members.kill(victim)
                await members.start(victim if number % 2 else f"new{number}")
            await feeding
            while (info := await hl.get_group("jobs", "g")).lag:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.1)
        finally:
            feeding.cancel()
            await members.kill_all()
    assert sum(o.dead for o in info.offsets) == 0
    notes = members.notes()
    check_all_worked_on(notes)
    check_none_held_twice(notes, members.starts)
    check_first_deliveries_in_order(notes)


async def test_server_killed_under_a_subscription_loses_no_row(tmp_path: Path) -> None:
    flags = ("--insecure-everybody", "--port", str(free_port()))
    seen: set[tuple[int, int]] = set()
    acked: set[tuple[int, int]] = set()
    kills = 0
    async with asyncio.timeout(120):
        server = await Process(tmp_path / "data", *flags).__aenter__()
        async with heapline.connect(server.target, deadline=60) as hl:
            await hl.create_topic("jobs", partitions=2, **SMALL)
            await hl.enqueue_batch("jobs", [Outgoing(b"%d" % n, key=f"k{n}") for n in range(600)])
            async with hl.subscribe("jobs", group="g", member="m", credits=50, ack_timeout=5.0) as rows:
                async for row in rows:
                    seen.add(place := (row.partition, row.offset))
                    if len(seen) == 300 and not kills:
                        kills += 1
                        await server.kill()
                        server = await Process(tmp_path / "data", *flags).__aenter__()
                    try:
                        await row.ack()
                        acked.add(place)
                    except heapline.DeliveryLost:
                        continue
                    if len(acked) == 600:
                        break
            assert (await hl.get_group("jobs", "g")).lag == 0
        await server.kill()
    assert len(seen) == len(acked) == 600


async def feed(hl: heapline.Broker) -> None:
    for start in range(0, ROWS, 40):
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % n, key=f"k{n}") for n in range(start, start + 40)])
        await asyncio.sleep(0.1)


def check_all_worked_on(notes: list[Note]) -> None:
    assert len({note.row for note in notes if note.what == "acking"}) == ROWS
    assert len({note.member for note in notes}) > MEMBERS, "no member returned"


def check_none_held_twice(notes: list[Note], starts: dict[str, list[float]]) -> None:
    """A row is delivered to another member only after its lease has ended, or after its holder's name was taken."""
    holder: dict[tuple[int, int], Note] = {}
    done: set[tuple[int, int]] = set()
    for note in notes:
        if note.what == "acked":
            done.add(note.row)
        elif note.what == "got":
            before = holder.get(note.row)
            name = before.member.split(".")[0] if before is not None else ""
            is_replaced = before is not None and any(before.at < start < note.at for start in starts[name])
            if before is not None and name != note.member.split(".")[0] and not is_replaced:
                assert note.at >= before.at + ACK_TIMEOUT - SLACK, (before, note)
            assert note.row not in done, f"{note} was acked before"
            holder[note.row] = note


def check_first_deliveries_in_order(notes: list[Note]) -> None:
    seen: set[tuple[int, int]] = set()
    last: dict[int, int] = defaultdict(lambda: -1)
    for note in notes:
        if note.what == "got" and note.attempts == 1 and note.row not in seen:
            partition, offset = note.row
            assert offset > last[partition], note
            last[partition] = offset
        seen.add(note.row)
