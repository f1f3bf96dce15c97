"""Listing leases and workers when there are very many: a turn looks at a bounded part, and none is lost between two."""

from __future__ import annotations

from typing import Any

import pytest

from heapline import Outgoing
from heapline.contract.inspection import HeldLease, ListLeases, ListWorkers
from heapline.engine import held_leases
from tests.unit.engine.rig import opened


@pytest.mark.parametrize("scanned", [1, 3, 10, 1000])
@pytest.mark.parametrize("limit", [1, 4, 100])
async def test_leases_of_a_holder_are_found_part_by_part(
    monkeypatch: pytest.MonkeyPatch, scanned: int, limit: int
) -> None:
    monkeypatch.setattr(held_leases, "SCANNED", scanned)
    async with opened(topic={"partitions": 3}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 60)
        for holder in ("many", "rare", "many", "many", "rare"):
            await rig.hl.pop("jobs", 9 if holder == "many" else 2, holder=holder)
            rig.clock.advance(0.002)
        whole = await rig.hl.list_leases("jobs")
        for holder, count in (("many", 27), ("rare", 4), ("nobody", 0)):
            found: list[HeldLease] = []
            cursor = None
            while True:
                page = await rig.hl.do(ListLeases("jobs", holder, cursor, limit))
                assert len(page.items) <= limit
                found += page.items
                cursor = page.cursor
                if cursor is None:
                    break
            assert found == [lease for lease in whole if lease.holder == holder]
            assert len(found) == count


async def test_number_of_turns_for_a_rare_holder_grows_with_the_leases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_leases, "SCANNED", 100)
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 1000)
        await rig.hl.pop("jobs", 999, holder="many")
        await rig.hl.pop("jobs", 1, holder="rare")
        turns = 0
        runner = rig.hl.topics.runner("jobs")
        call = runner.call

        async def counted(work: Any) -> Any:
            nonlocal turns
            turns += 1
            return await call(work)

        monkeypatch.setattr(runner, "call", counted)
        assert len((await rig.hl.do(ListLeases("jobs", "rare"))).items) == 1
        assert turns == 10


async def test_page_of_workers_describes_no_more_than_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    described = 0

    def worker_info(**fields: Any) -> Any:
        nonlocal described
        described += 1
        return info(**fields)

    info = held_leases.WorkerInfo
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 50)
        for n in range(50):
            await rig.hl.pop("jobs", 1, holder=f"w{n:02}")
        monkeypatch.setattr(held_leases, "WorkerInfo", worker_info)
        names: list[str] = []
        cursor = None
        while True:
            page = await rig.hl.do(ListWorkers(cursor, 7))
            names += [worker.holder for worker in page.items]
            cursor = page.cursor
            if cursor is None:
                break
        assert names == [f"w{n:02}" for n in range(50)]
        assert described <= 8 * 8
