"""Power cut at every write of rewriting, snapshots and deleting, with groups: no live message, no row that a group
has not passed and no dead letter is lost, and interrupted work is done at the next check."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.config import BrokerConfig
from heapline.contract.message import Outgoing
from heapline.engine.broker import EmbeddedBroker
from heapline.engine.runner import TopicRunner
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.node import Node
from tests.unit.engine.test_growth import Steps

CONFIG = BrokerConfig(spare_segment_bytes=0, reclaim_interval=36_000.0, snapshot_interval=1e9)
BULK = b"x" * 120_000
YEAR = 366 * 86400.0


def runner_of(hl: EmbeddedBroker) -> TopicRunner:
    return hl.topics._runners["jobs"]


def segments(node: Node) -> list[int]:
    names = [path.rpartition("/")[2] for path, _ in node.disk.walk() if path.endswith(".seg")]
    return sorted(int(name.removesuffix(".seg")) for name in names)


async def take(hl: EmbeddedBroker, group: str, limit: int, nack: bytes = b"-") -> list[bytes]:
    """Fetch up to `limit` rows for a member of the group; ack all except those that begin like `nack`."""
    got: list[bytes] = []
    while len(got) < limit:
        fetched = await hl.group_fetch("jobs", group, "m", session="s", max_messages=limit - len(got))
        if not fetched.batches:
            break
        for batch in fetched.batches:
            rows = batch.messages()
            got += [row.payload[:8] for row in rows]
            for call, how in ((hl.group_nack, True), (hl.group_ack, False)):
                chosen = [row.offset for row in rows if row.payload.startswith(nack) == how]
                if chosen:
                    await call("jobs", group, "m", {batch.partition: chosen}, session="s")
    await hl.group_leave("jobs", group, "m", session="s")
    return got


class Scene:
    """A journal whose first segment is dead except for a few messages and dead letters, and whose second a slow group
    needs; and the maintenance that rewrites the first and deletes it."""

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.alive: dict[int, bytes] = {}
        self.expected: list[bytes] = []  # rows that the slow group has left

    async def prepare(self, node: Node) -> None:
        hl = node.hl
        await hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=128 << 10, **self.config)
        await hl.create_group("jobs", "slow")
        await hl.create_group("jobs", "quick", max_retries=0)
        for i in range(3):
            kept = {"priority": 100} if i else {"delay": YEAR}
            self.alive[(await hl.enqueue("jobs", b"alive-%d" % i, **kept)).id] = b"alive-%d" % i  # type: ignore[arg-type]
        await hl.enqueue_batch("jobs", [Outgoing(b"bad-%d" % i, priority=-1) for i in range(3)])
        await hl.ack(await hl.pop("jobs", 3))
        await self._churn(hl, 10)
        await hl.enqueue_batch("jobs", [Outgoing(b"fired-%d" % i, priority=-1, delay=30.0) for i in range(3)])
        assert len(await take(hl, "slow", 14)) == 14
        node.clock.advance(31)
        await hl.ack(await hl.pop("jobs", 3))
        await self._churn(hl, 12)
        self.expected = [b"1:%d" % i for i in range(9, 10)]
        self.expected += [b"fired-%d" % i for i in range(3)] + [b"2:%d" % i for i in range(12)]
        await take(hl, "quick", 1000, nack=b"bad")
        await hl.snapshot("jobs")
        self._rounds = 2

    _rounds = 0

    async def _churn(self, hl: EmbeddedBroker, count: int) -> None:
        self._rounds += 1
        for i in range(count):
            name = b"%d:%d" % (self._rounds, i)
            await hl.enqueue("jobs", name.ljust(8) + BULK, priority=-100)
            await hl.ack(await hl.pop("jobs"))

    async def maintenance(self, node: Node) -> None:
        hl = node.hl
        for _ in range(2):
            for _ in range(2):
                await hl.enqueue("jobs", b"mark", priority=-100)
                await hl.ack(await hl.pop("jobs"))
                await hl.snapshot("jobs")
            await runner_of(hl).maintenance.reclaim()

    async def check(self, node: Node, overtaken: bool = False) -> None:
        hl = node.hl
        await self._check_kept(hl)
        (place,) = await hl.group_offsets("jobs", "slow")
        assert place.committed >= (await hl.offsets("jobs"))[0][0] or not overtaken
        got = [payload.strip() for payload in await take(hl, "slow", 1000)]
        assert place.lag == len(got)
        rows = [payload for payload in got if payload != b"mark"]
        if overtaken:
            assert rows == self.expected[len(self.expected) - len(rows) :]
        else:
            assert rows == self.expected
        (place,) = await hl.group_offsets("jobs", "slow")
        assert place.lag == 0
        await take(hl, "quick", 1000, nack=b"bad")
        await self.maintenance(node)  # the interrupted work is done now
        await self._check_kept(hl)
        assert segments(node)[0] > 1

    async def _check_kept(self, hl: EmbeddedBroker) -> None:
        for id, payload in self.alive.items():
            assert (await hl.get("jobs", id)).payload == payload
        letters = [letter.payload for letter in await hl.group_dead_list("jobs", "quick")]
        assert letters == [b"bad-0", b"bad-1", b"bad-2"]
        ready = [message.payload for message in await hl.peek("jobs", 100)]
        assert [p for p in ready if p != b"mark"] == [b"alive-1", b"alive-2"]


def node_on(disk: FakeDisk | None) -> Node:
    node = Node(3, CONFIG)
    if disk is not None:
        node.disk = disk
        node.clock.advance(31)
    return node


@pytest.mark.parametrize("config", [{}, {"fsync": "os"}, {"retention_hard_bytes": 2 << 20}], ids=str)
def test_power_cut_during_maintenance_loses_no_live_or_unread_row(
    config: dict[str, Any],
) -> None:
    scene, steps, overtaken = Scene(**config), Steps(), "retention_hard_bytes" in config
    made = node_on(None)
    assert made.live(lambda: [scene.prepare(made)]) == "done"
    assert len(segments(made)) >= 3
    whole = node_on(made.disk.crash())
    steps.watch(whole)
    assert whole.live(lambda: [scene.maintenance(whole)]) == "done"
    assert segments(whole)[0] > 1, "the cuts below include the deletion"
    cuts = list(steps)
    whole.live(lambda: [scene.check(whole, overtaken)])
    for step in cuts:
        node = node_on(made.disk.crash())
        node.disk.cut_power_in(step)
        assert node.live(lambda node=node: [scene.maintenance(node)]) == "crash"  # type: ignore[misc]
        node.live(lambda node=node: [scene.check(node, overtaken)])  # type: ignore[misc]
