"""Limits on what one call of a search reads, and searches beside a queue at work."""

from __future__ import annotations

import pytest

from heapline import Outgoing
from heapline.engine import search
from tests.unit.engine.rig import opened
from tests.unit.engine.test_maintenance import churn, reclaim


async def test_call_reads_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CALL_RECORDS", 50)
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % n) for n in range(300)])
        page = await rig.hl.search_messages("jobs", "299")
        reads, found = [page.read], len(page.items)
        while page.cursor is not None:
            page = await rig.hl.search_messages("jobs", "299", cursor=page.cursor)
            reads.append(page.read)
            found += len(page.items)
        assert found == 1
        assert reads == sorted(reads)
        assert reads[-1] == page.total == 300
        assert max(b - a for a, b in zip([0, *reads], reads, strict=False)) < 2 * 50 + 64


async def test_call_reads_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CALL_BYTES", 400_000)
    monkeypatch.setattr(search, "STEP_BYTES", 100_000)
    async with opened() as rig:
        for _ in range(4):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 50_000)] * 10)
        page = await rig.hl.search_messages("jobs", "y")
        assert page.cursor is not None
        assert page.read < 40


async def test_segment_that_is_reclaimed_between_pages_hides_nothing_else() -> None:
    async with opened() as rig:
        first = [(await rig.hl.enqueue("jobs", b"found", priority=50)).id for _ in range(2)]
        page = await rig.hl.search_messages("jobs", "found", limit=1)
        assert page.cursor is not None
        for _ in range(2):
            await churn(rig)
            await reclaim(rig)
        last = (await rig.hl.enqueue("jobs", b"found", priority=50)).id
        assert rig.runner().maintenance.segments_reclaimed_total
        found = [row.message.id for row in page.items]
        while page.cursor is not None:
            page = await rig.hl.search_messages("jobs", "found", cursor=page.cursor)
            found += [row.message.id for row in page.items]
        assert {first[1], last} <= set(found)  # a record that was moved forward may be found again
