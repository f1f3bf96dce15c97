"""Power cuts while a unit with a worker's acks and its next leases is written: all of it counts, or nothing.

The unit has several sectors, of which a cut leaves any subset.
"""

from __future__ import annotations

import asyncio

import pytest

from heapline.contract.config import BrokerConfig
from heapline.contract.message import Outgoing
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.node import Node
from tests.unit.engine.test_growth import WRITES

BATCH = 100
DRAWS = 24  # of the sectors that a cut leaves, for each point of the cut


def segments(disk: FakeDisk) -> dict[str, bytes]:
    return {path: bytes(inode.data) for path, inode in disk.walk() if path.endswith(".seg") and "/_system/" not in path}


class Scene:
    """A worker that holds leases on some messages acks them and requests others."""

    def __init__(self, seed: int, gather_steps: int, disk: FakeDisk | None = None) -> None:
        self.node = Node(seed, BrokerConfig(spare_segment_bytes=0, gather_steps=gather_steps))
        if disk is not None:
            self.node.disk = disk
        self.commits = 0
        self.steps: list[int] = []  # disk operations that write
        self.answered: set[str] = set()
        self.before: dict[str, bytes] = {}

    async def prepare(self) -> None:
        hl = self.node.hl
        await hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1024)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, i) for i in range(2 * BATCH)])

    async def work(self, cut: int | None) -> None:
        hl, disk = self.node.hl, self.node.disk
        held = await hl.pop("jobs", BATCH, visibility=36_000.0)
        commits = (await hl.stats("jobs")).log.commits_total
        self.before, start = segments(disk), disk.steps
        disk.on_step = lambda operation, path: (  # type: ignore[method-assign]
            self.steps.append(disk.steps - start - 1) if operation in WRITES else None
        )
        disk.cut_power_in(cut)
        ack = asyncio.ensure_future(hl.ack(held))
        ack.add_done_callback(lambda done: done.cancelled() or self.answered.add("ack"))
        assert len(await hl.pop("jobs", BATCH, visibility=36_000.0)) == BATCH
        self.answered.add("pop")
        await ack
        self.commits = (await hl.stats("jobs")).log.commits_total - commits

    async def check(self, found: list[tuple[int, int]]) -> None:
        """Return how many of the first messages are removed, and how many of the others are leased."""
        stats = await self.node.hl.stats("jobs")
        gone = 2 * BATCH - stats.ready - stats.leased
        found.append((gone, stats.leased - (BATCH - gone)))


@pytest.mark.parametrize("gather_steps", [0, 4])
def test_torn_unit_with_acks_and_leases_counts_in_full_or_not_at_all(gather_steps: int) -> None:
    made = Scene(1, gather_steps)
    assert made.node.live(lambda: [made.prepare()]) == "done"
    whole = Scene(1, gather_steps, made.node.disk.crash())
    assert whole.node.live(lambda: [whole.work(None)]) == "done"
    assert whole.commits == 1, "the acks and the leases share a unit"
    found: list[tuple[int, int]] = []
    torn = 0
    for cut in whole.steps:
        for seed in range(DRAWS):
            scene = Scene(seed, gather_steps, made.node.disk.crash())
            if scene.node.live(lambda scene=scene, cut=cut: [scene.work(cut)]) != "crash":  # type: ignore[misc]
                continue  # the operation was after the work
            is_touched = segments(scene.node.disk) != scene.before
            scene.node.live(lambda scene=scene: [scene.check(found)])  # type: ignore[misc]
            assert found[-1] in ((0, 0), (BATCH, BATCH))
            if scene.answered:
                assert found[-1] == (BATCH, BATCH)
            torn += is_touched and found[-1] == (0, 0)
    assert {(0, 0), (BATCH, BATCH)} <= set(found)
    assert torn >= 3, "some cuts left part of the unit"
