"""The audit finds what a broken choice would do, and acquits what was right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.engine.heads import Heads
from heapline.model import Outgoing
from heapline.testing.rank_audit import ranks


async def _work(path: Path, partitions: int, seed: int) -> list[int]:
    """Random work on a topic; the ranks of all its leases."""
    rng = random.Random(seed)
    async with heapline.open(str(path), spare_segment_bytes=0) as hl:
        await hl.create_topic("jobs", partitions=partitions, segment_bytes=1 << 20, fsync="os")
        held: list[heapline.Message] = []
        for _ in range(120):
            what = rng.random()
            if what < 0.4:
                count = rng.randrange(1, 12)
                await hl.enqueue_batch(
                    "jobs", [Outgoing(b"", rng.randrange(30), key=str(rng.random())) for _ in range(count)]
                )
            elif what < 0.75:
                held += await hl.pop("jobs", rng.choice([1, 3, 8]))
            elif held:
                some = [held.pop(rng.randrange(len(held))) for _ in range(min(len(held), 3))]
                act = rng.choice(["ack", "release", "nack"])
                if act == "nack":
                    await hl.nack(some, backoff=0)
                else:
                    await getattr(hl, act)(some)
            if rng.random() < 0.05:
                await hl.set_partition_throttled("jobs", rng.randrange(partitions), rng.random() < 0.5)
        found = await ranks(hl, "jobs")
        assert len(found) >= (await hl.stats("jobs")).leased_total
        return [r.rank for r in found]


@pytest.mark.parametrize("seed", range(4))
async def test_with_k_1_every_lease_was_of_the_best_message(tmp_path: Path, seed: int) -> None:
    found = await _work(tmp_path / "d", 5, seed)
    assert len(found) > 50
    assert set(found) == {1}


async def test_the_audit_finds_a_choice_that_forgets_a_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Heads._owners

    def without_the_best(self: Heads, full: Any, want: int) -> list[int]:
        owners = whole(self, full, want)
        return owners[1:] or owners

    monkeypatch.setattr(Heads, "_owners", without_the_best)
    assert max(await _work(tmp_path / "d", 5, 1)) > 1
