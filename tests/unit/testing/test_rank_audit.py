"""The rank audit detects wrong choices and accepts correct ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heapline
from heapline.contract.config import TopicConfig
from heapline.contract.message import LogEvent, LogFrame, Outgoing
from heapline.engine.local_spine import Heads
from tests.simulation.rank_audit import RankAudit, ranks


async def _work(path: Path, partitions: int, seed: int, **config: Any) -> list[int]:
    """Random work on a topic; return the ranks of all its leases."""
    rng = random.Random(seed)
    fair = config.get("fairness") == "keys"

    def fresh(count: int) -> list[Outgoing]:
        keys = [rng.choice(("a", "b", None)) if fair else None for _ in range(count)]
        return [Outgoing(b"", rng.randrange(30), key=str(rng.random()), fairness_key=key) for key in keys]

    async with heapline.open(str(path), spare_segment_bytes=0) as hl:
        await hl.create_topic("jobs", partitions=partitions, segment_bytes=1 << 20, fsync="os", **config)
        held: list[heapline.Message] = []
        batches: list[str] = []
        for turn in range(160):
            what = rng.random()
            if what < 0.4:
                await hl.enqueue_batch("jobs", fresh(rng.randrange(1, 12)))
            elif what < 0.5:
                await hl.prepare_batch(f"b{turn}", "1", fresh(rng.randrange(1, 5)), topic="jobs")
                batches.append(f"b{turn}")
            elif what < 0.55 and batches:
                await hl.commit_batch(batches.pop(0), ["1"])
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


FAIR = {"fairness": "keys"}


@pytest.mark.parametrize("config", [{}, FAIR, {**FAIR, "max_inflight_per_key": 3}], ids=["plain", "fair", "limited"])
@pytest.mark.parametrize("seed", range(2))
async def test_with_k_1_every_lease_was_of_the_best_message(tmp_path: Path, seed: int, config: dict[str, Any]) -> None:
    found = await _work(tmp_path / "d", 5, seed, **config)
    assert len(found) > 50
    assert set(found) == {1}


async def test_messages_of_a_batch_count_from_its_commit_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heads, "_owners", lambda self, full, want: full.tolist()[:1])
    async with heapline.open(str(tmp_path / "d"), spare_segment_bytes=0) as hl:
        await hl.create_topic("jobs", partitions=2, segment_bytes=1 << 20)
        await hl.enqueue_batch("jobs", [Outgoing(b"", 5, key=str(i)) for i in range(20)])
        await hl.prepare_batch("b", "1", [Outgoing(b"", 1, key=str(i)) for i in range(20)], topic="jobs")
        await hl.ack(await hl.pop("jobs"))
        assert [r.rank for r in await ranks(hl, "jobs")] == [1], "a prepared message is not better"
        await hl.commit_batch("b", ["1"])
        mine = (await hl.stats("jobs")).partitions[0].ready
        await hl.ack(await hl.pop("jobs", mine))
        assert max(r.rank for r in await ranks(hl, "jobs")) > 1


def _event(kind: str, ids: list[int], seq: int, **columns: Any) -> LogEvent:
    arrays = {name: np.array(values, dtype=np.int64) for name, values in {"ids": ids, **columns}.items()}
    return LogEvent(kind=kind, offset=0, row_count=len(ids), columns={**arrays, "seq": seq})


def _enqueued(priorities: dict[int, int], seq: int) -> LogEvent:
    zeros = [0] * len(priorities)
    rows = {"priority": [*priorities.values()], "enqueued_at": zeros, "due": zeros, "flags": zeros}
    return _event("enqueued", [*priorities], seq, **rows)


def _frame(unit: int, *events: LogEvent) -> LogFrame:
    return LogFrame(
        topic="jobs", partition=0, unit=unit, offset=0, row_count=len(events), time_ms=0, wall_ms=0, events=events
    )


@pytest.mark.parametrize(
    ("old", "new", "due", "leased", "rank"),
    [(7, 1, 0, 1, 1), (7, 1, 0, 2, 2), (3, 9, 0, 2, 1), (3, 9, 0, 1, 2), (3, 3, 50, 2, 1)],
    ids=["leased-as-best", "passed-over", "made-worse", "leased-though-worse", "delayed"],
)
@pytest.mark.parametrize("unit_count", [1, 2])
def test_reschedule_counts_from_its_sequence_on(
    old: int, new: int, due: int, leased: int, rank: int, unit_count: int
) -> None:
    """Message 2 has priority 5. Message 1 is rescheduled from `old` to `new`; then one of them is leased."""
    audit = RankAudit(TopicConfig())
    audit.unit([_frame(1, _enqueued({1: old, 2: 5}, 1))])
    moved, lease = _event("rescheduled", [1], 2, keys=[new], dues=[due]), _event("leased", [leased], 3)
    for unit, events in enumerate([[moved, lease]] if unit_count == 1 else [[moved], [lease]], 2):
        audit.unit([_frame(unit, *events)])
    assert [(r.id, r.rank) for r in audit.ranked] == [(leased, rank)]


@pytest.mark.parametrize("leased", [1, 2])
def test_lease_before_a_reschedule_in_its_unit_is_ranked_by_the_old_priority(leased: int) -> None:
    audit = RankAudit(TopicConfig())
    audit.unit([_frame(1, _enqueued({1: 8, 2: 7, 3: 9}, 1))])
    events = [_event("leased", [leased], 2), _event("rescheduled", [3], 3, keys=[1], dues=[0])]
    audit.unit([_frame(2, *events, _event("leased", [3], 4))])
    assert [(r.id, r.rank) for r in audit.ranked] == [(leased, 3 - leased), (3, 1)]


@pytest.mark.parametrize("config", [{}, FAIR], ids=["plain", "fair"])
async def test_audit_finds_a_choice_that_forgets_a_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    whole = Heads._owners

    def without_the_best(self: Heads, full: Any, want: int) -> list[int]:
        owners = whole(self, full, want)
        return owners[1:] or owners

    monkeypatch.setattr(Heads, "_owners", without_the_best)
    assert max(await _work(tmp_path / "d", 5, 1, **config)) > 1
