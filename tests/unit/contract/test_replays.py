"""A reader's checkpoint: the saved position is never past a row that is not finished."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

import heapline
from heapline.contract import replays
from heapline.contract.groups import pack_batch
from heapline.contract.replays import ReplayStep, deliver
from heapline.contract.stream import StreamBatch, StreamMessage

ENDS = {0: 100, 1: 100}


def batch(partition: int, *offsets: int) -> StreamBatch:
    column = np.array(offsets, dtype=np.int64)
    return StreamBatch(None, "jobs", partition, column, column, [b"x"] * len(offsets), column, column, column)


def step(batches: list[StreamBatch], positions: dict[int, int], ends: dict[int, int]) -> ReplayStep:
    return ReplayStep("jobs", positions, ends, [pack_batch(b) for b in batches])


async def steps() -> AsyncIterator[ReplayStep]:
    yield step([], {0: 0, 1: 0}, ENDS)
    yield step([batch(0, 1, 2), batch(1, 5), batch(0, 7)], {0: 9, 1: 6}, ENDS)
    yield step([], {0: 20, 1: 6}, ENDS)  # rows that the filter excluded
    yield step([batch(1, 8, 9)], {0: 20, 1: 30}, ENDS)


class Reader:
    """Read up to the n-th row; a row is finished when the next one is requested."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.kept: list[dict[int, int]] = []
        self.not_done: tuple[int, int] | None = None

    async def keep(self, positions: dict[int, int]) -> None:
        self.kept.append(dict(positions))
        if self.not_done is not None:
            partition, offset = self.not_done
            assert positions.get(partition, 0) <= offset

    async def read(self, stop_at: int, batches: bool = False) -> None:
        rows = deliver(steps(), self.keep, batches)
        number = 0
        async for row in rows:
            first = row.offset if isinstance(row, StreamMessage) else int(row.offsets[0])
            self.not_done = (row.partition, first)
            number += 1
            if number == stop_at:
                break
            self.done.append(self.not_done)
            self.not_done = None
        await rows.aclose()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def keep_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SAVE_ROWS", 1)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("stop_at", range(1, 8))
async def test_checkpoint_covers_exactly_the_finished_rows(stop_at: int, batches: bool) -> None:
    reader = Reader()
    await reader.read(stop_at, batches)
    last = reader.kept[-1] if reader.kept else {}
    for partition, offset in reader.done:
        assert last[partition] > offset
    if reader.not_done is None:
        assert last == {0: 20, 1: 30}, "at the end it is past the excluded rows too"


async def test_first_error_is_raised_instead_of_the_failed_checkpoint() -> None:
    async def broken() -> AsyncIterator[ReplayStep]:
        yield step([batch(0, 1)], {0: 2}, ENDS)
        raise heapline.UnavailableError("the stream broke")

    async def keep(positions: dict[int, int]) -> None:
        raise heapline.UnavailableError("and it cannot be saved")

    with pytest.raises(heapline.UnavailableError, match="and it cannot be saved"):
        [row async for row in deliver(broken(), keep, False)]
    replays.SAVE_ROWS = 1000
    with pytest.raises(heapline.UnavailableError, match="the stream broke"):
        [row async for row in deliver(broken(), keep, False)]


async def test_failed_checkpoint_of_a_stopped_reader_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def keep(positions: dict[int, int]) -> None:
        raise heapline.UnavailableError("the disk is full")

    replays.SAVE_ROWS = 1000
    rows = deliver(steps(), keep, False)
    for _ in range(2):
        await anext(rows)
    await rows.aclose()  # type: ignore[attr-defined]
    assert "not saved" in caplog.text
    assert "the disk is full" in caplog.text
