"""Groups on a rig without the calls for them: tests read the log side's state directly.

`reported` is the stream as a reader of the journal sees it; memory must agree with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from heapline.contract.config import GroupConfig
from heapline.core.events import AnyEvent, decode_events
from heapline.core.groups.deliveries import Columns, join_columns
from heapline.core.groups.group import Groups
from heapline.core.groups.stream import stream_of
from heapline.core.now import Now
from heapline.engine.runner import TopicRunner


async def make_group(
    runner: TopicRunner, name: str = "g", at: list[tuple[int, int]] | None = None, **fields: Any
) -> None:
    """Add a group in every partition, at these (offset, count), or from the beginning."""
    starts = [(number, *(at[number] if at else (0, 0))) for number in range(len(runner.loaded.topic.partitions))]
    await record(runner, lambda now: Groups.decide_create(name, GroupConfig(**fields), starts, now.steady))


async def record(runner: TopicRunner, decide: Any) -> None:
    """Record events: `decide(now)` returns (partition, event) pairs."""

    def run(now: Now) -> None:
        for number, event in decide(now):
            runner.loaded.emit(runner.loaded.topic.partitions[number], event, now)

    await runner.call(run)


async def ack_below(runner: TopicRunner, offset: int, partition: int = 0, name: str = "g") -> None:
    """Let the group read from its position and ack all rows below an offset."""
    offsets = runner.loaded.topic.groups.by_name[name].partitions[partition]
    tail = runner.loaded.topic.tails[partition]
    assert tail is not None

    def decide(now: Now) -> list[tuple[int, AnyEvent]]:
        page = tail.read(offsets.cursor, 1 << 20, offset)
        assert page is not None
        taken = offsets.take(1 << 20, page, now.steady, now.steady + 30_000)
        event, lost = offsets.decide_ack(taken.rows.offsets, now.steady)
        assert not len(lost)
        return [(partition, event)] if event is not None else []

    await record(runner, decide)


async def reported(runner: TopicRunner, partition: int = 0) -> Columns:
    """Return the stream rows of a partition according to its journal, from its start on."""
    return await runner.io.run(partial(_reported, runner, partition))


def _reported(runner: TopicRunner, partition: int) -> Columns:
    parts: list[Columns] = []
    for unit in runner.loaded.journal.reader().read_units():
        for frame in unit.frames:
            if frame.partition == partition:
                offset = frame.first_offset
                for event in decode_events(frame.events, "test"):
                    rows, positions, _ = runner.loaded.topic._records(unit, event)
                    parts.append(stream_of(event, offset, rows, positions))
                    offset += event.rows()
    return join_columns(parts)


def as_lists(columns: Columns) -> list[list[int]]:
    return [np.asarray(column).tolist() for column in columns]
