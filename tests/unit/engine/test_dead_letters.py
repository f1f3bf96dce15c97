"""Dead letters in bulk: slices of bounded size, whose cost does not depend on how many letters there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import heapline
from heapline.contract.dead_letters import LETTER_BYTES, ListDeadLetters
from heapline.contract.message import DlqFilter
from heapline.core.dead_letters import CHUNK_ROWS, DeadLetters, Letter, Place
from heapline.core.record import size_bound
from heapline.engine import dead_letters
from tests.unit.engine.rig import Rig, opened


async def bury(rig: Rig, count: int, payload: bytes = b"x", reason: str = "boom") -> list[int]:
    """Enqueue messages and make them dead letters; return their ids in the order of their deaths."""
    batch = [heapline.Outgoing(payload) for _ in range(count)]
    await rig.hl.enqueue_batch("jobs", batch)
    messages = await rig.hl.pop("jobs", count, max_bytes=1 << 30)
    assert len(messages) == count
    await rig.hl.bury(messages, reason=reason)
    rig.clock.advance(0.01)
    return sorted(m.id for m in messages)


class Visits:
    """Counts the letters that are read in order from the partitions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        after = DeadLetters.after

        def counted(letters: DeadLetters, place: Place) -> Iterator[Letter]:
            for letter in after(letters, place):
                self.rows += 1
                yield letter

        monkeypatch.setattr(DeadLetters, "after", counted)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("count", [400, 4000])
async def test_page_reads_as_many_letters_as_it_returns(
    monkeypatch: pytest.MonkeyPatch, count: int, partitions: int
) -> None:
    async with opened(topic={"partitions": partitions}) as rig:
        ids = [id for _ in range(count // 200) for id in await bury(rig, 200)]
        visits = Visits(monkeypatch)
        cursor, listed = None, []
        for page_number in range(1, 5):
            page = await rig.hl.do(ListDeadLetters("jobs", 50, cursor))
            cursor, listed = page.cursor, listed + [info.id for info in page.items]
            assert visits.rows <= page_number * (51 + partitions)
        assert listed == ids[:200]


async def test_pages_with_a_filter_do_not_read_the_same_letters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        for number in range(20):
            await bury(rig, 100, reason="rare" if number % 10 == 9 else "boom")
        visits = Visits(monkeypatch)
        cursor, pages = None, []
        while cursor is not None or not pages:
            page = await rig.hl.do(ListDeadLetters("jobs", 50, cursor, heapline.DlqFilter(reason="rare")))
            cursor = page.cursor
            pages.append(len(page.items))
        assert pages == [50] * 4
        assert visits.rows <= 2000 + 4 * dead_letters.SLICE


async def test_page_is_bounded_in_bytes_even_without_payloads() -> None:
    async with opened() as rig:
        ids = await bury(rig, 100, b"", reason="r" * 1000)
        page = await rig.hl.do(ListDeadLetters("jobs", 1 << 31, None, None, 10 * (LETTER_BYTES + 1000)))
        assert [info.id for info in page.items] == ids[:10]
        page = await rig.hl.do(ListDeadLetters("jobs", 1 << 31, page.cursor, None, 1))
        assert [info.id for info in page.items] == ids[10:11]


async def test_slice_reads_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        for _ in range(15):
            await bury(rig, 4, bytes(200 << 10))
        journal = rig.runner().loaded.journal
        cached, read = journal.cached, []

        def noted(positions: Any) -> Any:
            read.append(int(size_bound(positions).sum()))
            return cached(positions)

        monkeypatch.setattr(journal, "cached", noted)
        assert await rig.hl.dlq_replay("jobs") == 60
        assert len(read) > 3
        assert max(read) <= dead_letters.SLICE_BYTES


async def test_replay_takes_slices_in_order_and_skips_letters_that_die_meanwhile() -> None:
    async with opened(topic={"partitions": 3}) as rig:
        ids = [id for _ in range(6) for id in await bury(rig, 200)]
        slices = dead_letters.find(rig.runner(), None, None)
        found = [id for _, id, _ in await anext(slices)]
        late = await bury(rig, 5)
        async for letters in slices:
            assert len(letters) <= dead_letters.SLICE
            found += [id for _, id, _ in letters]
        assert found == ids
        assert await rig.hl.dlq_delete("jobs", where=heapline.DlqFilter()) == 1205
        assert await rig.hl.dlq_delete("jobs", late) == 0


async def test_requested_letters_come_in_order_and_skip_what_is_not_dead() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        ids = [id for _ in range(8) for id in await bury(rig, 100)]
        waiting = (await rig.hl.enqueue("jobs", b"x")).id
        wanted = [*reversed(ids[100:]), waiting, ids[100], 0, (1 << 63) - 1]
        found = [id async for letters in dead_letters.find(rig.runner(), wanted, None) for _, id, _ in letters]
        assert found == ids[100:]
        assert await rig.hl.dlq_replay("jobs", wanted) == 700
        assert [info.id for info in await rig.hl.dlq_list("jobs", 1000)] == ids[:100]


async def test_letters_survive_a_snapshot_with_their_order_and_reasons() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        ids = await bury(rig, 1500) + await bury(rig, 30, reason="bang")
        await rig.hl.snapshot("jobs")
        before = await rig.hl.dlq_list("jobs", 2000)
        assert [info.id for info in before] == ids
        await rig.reopen()
        assert await rig.hl.dlq_list("jobs", 2000) == before
        positions = np.concatenate([p.entries.dead.rows().positions for p in rig.runner().loaded.topic.partitions])
        assert len(np.unique(positions)) == 1530


async def test_count_and_groups_include_letters_beyond_the_part_that_one_turn_counts() -> None:
    """A turn that ends with a chunk is followed by one whose first chunk has nothing left."""
    async with opened() as rig:
        pieces = dead_letters.TALLY_CHUNKS + 2
        for _ in range(pieces):
            await bury(rig, CHUNK_ROWS, reason="it failed")
        dead = pieces * CHUNK_ROWS
        assert (await rig.hl.dlq_count("jobs")).count == dead
        assert (await rig.hl.dlq_count("jobs", DlqFilter(reason="failed"))).count == dead
        found = await rig.hl.dlq_groups("jobs")
        assert ([group.count for group in found.items], found.count) == ([dead], dead)
