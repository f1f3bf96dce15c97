"""Where the records of a committed batch lie: its event names messages by id, and they were prepared earlier.

Looked for in the log itself, before the commit: where they were prepared, or where they were moved to if that segment
has gone since. Rare, and paid by whoever reads such rows from disk. Blocking: for I/O threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.core.events import BatchCommitted, BatchPrepared, Moved, decode_events
from heapline.core.position import PositionLayout, size_class
from heapline.core.record import ROW
from heapline.journal.reader import LogReader, Place
from heapline.journal.unit import Unit

I64 = npt.NDArray[np.int64]


def find_prepared(reader: LogReader, layout: PositionLayout, partition: int, event: BatchCommitted, before: int) -> I64:
    """The position of each message that the event of unit `before` attaches; -1 where there is none."""
    found: dict[int, int] = {}
    near = reader.locate(partition, id=int(event.ids.min()))
    for place in (near, None):  # what was moved lies where its id does not lead to
        _look(reader, layout, partition, set(event.ids.tolist()), place, before, found)
        if len(found) == len(event.ids):
            break
    return np.array([found.get(id, -1) for id in event.ids.tolist()], dtype=np.int64)


def _look(
    reader: LogReader, layout: PositionLayout, partition: int, ids: set[int], place: Place | None, before: int,
    found: dict[int, int],
) -> None:  # fmt: skip
    for unit in reader.read_units(place=place):
        if unit.number > before or len(found) == len(ids):
            return
        for frame in unit.frames:
            if frame.partition == partition and frame.first_id >= 0:
                for event in decode_events(frame.events, f"unit {unit.number}"):
                    if isinstance(event, BatchPrepared | Moved) and event.count:
                        _note(layout, unit, event, ids, found)


def _note(
    layout: PositionLayout, unit: Unit, event: BatchPrepared | Moved, ids: set[int], found: dict[int, int]
) -> None:
    ref = unit.blocks[event.block]
    rows: Any = unit.rows(ref)[event.start : event.start + event.count]
    sizes = rows["payload_len"].astype(np.int64) + rows["small_len"]
    at = unit.place(ref) + np.arange(event.start, event.start + event.count) * ROW.itemsize
    positions = layout.pack(unit.segment, at, size_class(sizes))
    for id, position in zip(rows["id"].tolist(), positions.tolist(), strict=True):
        if id in ids:
            found[id] = position
