"""The waiting and dead messages of a topic as columns: one fixed-size row per message, for readers of the whole state.

`pin` captures a point-in-time state of a running topic: one turn only takes references to it, as for a snapshot, and an
I/O thread builds the rows from them, so the queue is not blocked. `stored` builds the same from a directory: the newest
valid snapshot, then the journal up to the watermark, without writing. Either way the state is the one at a known offset
in every partition, and all of it is durable.

Records are not read here: a row has the position of its record. A reader that needs the record later must hold the
journal. Prepared messages are not in the queue yet, and have no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.config import TopicConfig
from heapline.core.entries import DEAD, DELAYED, LEASED, READY
from heapline.core.leases import DEADLINE, HOLDER, POSITION
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.wheel.timing_wheel import Timers
from heapline.engine.recovery import apply_units, newest_state, stored_snapshots
from heapline.engine.snapshot_state import Frozen, freeze, thaw
from heapline.engine.topic import Topic
from heapline.journal.disk import Disk
from heapline.journal.reader import LogReader
from heapline.journal.unit import Unit

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

STATE = np.dtype(
    [
        ("id", "<i8"), ("position", "<i8"),
        ("due", "<i8"),  # ms, of delayed messages
        ("deadline", "<i8"),  # ms, of leased messages
        ("died_at", "<i8"),  # ms, of dead messages
        ("priority", "<i8"), ("expires", "<i8"),  # where they differ from the record: see `own`
        ("holder", "<i4"), ("reason", "<i4"),  # number of the text; -1: none
        ("state", "u1"),  # READY, DELAYED, LEASED or DEAD, as in core/entries.py
        ("own", "u1"),
    ]
)  # fmt: skip
OWN_PRIORITY, OWN_EXPIRY = 1, 2
Rows = npt.NDArray[Any]


class StateRows(NamedTuple):
    """Rows of a state, sorted by the positions of their records."""

    incarnation: int
    at: int  # wall ms of the state
    segment_bytes: int
    ends: list[int]  # by partition: the state contains all rows below this offset
    rows: Rows
    texts: list[str]


async def pin(runner: TopicRunner, dead: bool) -> StateRows:
    """Return the current state; it is durable when this returns."""

    def capture(now: Now) -> tuple[Frozen, list[int], int]:
        topic = runner.loaded.topic
        topic.seal(runner.loaded.journal, now)
        unit = runner.loaded.journal.open_unit_number - 1
        return freeze(topic, unit), [p.state.offset for p in topic.partitions], now.wall

    frozen, ends, wall = await runner.call(capture)
    topic = Topic(
        runner.name, runner.loaded.topic.config, Now(wall, wall), runner.loader.draw, runner.loaded.topic.id_suffix
    )

    def build() -> StateRows:
        blobs = {name: memoryview(np.concatenate(columns).tobytes()) for name, columns in frozen.blobs.items()}
        thaw(topic, frozen.encode(), blobs, wall, wall, runner.name)
        return _rows_of(topic, dead, runner.loader.incarnation, wall, ends)

    return await runner.io.run(build)


def stored(disk: Disk, folder: str, name: str, incarnation: int, config: TopicConfig, dead: bool) -> StateRows:
    """Return the state in a directory, up to its watermark. The caller must already hold the segments."""
    reader = LogReader(disk, folder)
    now = reader.watermark().time
    fresh = partial(Topic, name, config, Now(now, now), _no_draw)
    topic, after = newest_state(disk, folder, stored_snapshots(disk, folder), fresh, now)
    mark = reader.watermark()
    wall = mark.time

    def units() -> Iterator[Unit]:
        nonlocal wall
        for unit in reader.read_units(start_unit=after + 1):
            yield unit
            wall = unit.wall

    apply_units(topic, units() if after < mark.visible else (), folder, after)
    return _rows_of(topic, dead, incarnation, wall, [p.state.offset for p in topic.partitions])


def _no_draw(count: int) -> npt.NDArray[np.float64]:
    raise AssertionError("nothing is decided here")


# -- rows ------------------------------------------------------------------------------------------------------------


class _Texts:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        return -1 if text is None else self.numbers.setdefault(text, len(self.numbers))


def _rows_of(topic: Topic, dead: bool, incarnation: int, at: int, ends: list[int]) -> StateRows:
    texts = _Texts()
    parts = [np.zeros(0, dtype=STATE)]
    for partition in topic.partitions:
        found = [_dead_rows(partition, texts)] if dead else [*_waiting(partition), _leased(partition, texts)]
        rows = np.concatenate(found)
        _note_own(partition, rows)
        if not dead:
            _note_reasons(partition.entries.reasons, rows, texts)
        parts.append(rows)
    rows = np.concatenate(parts)
    rows = rows[np.argsort(rows["position"], kind="stable")]
    return StateRows(incarnation, at, topic.config.segment_bytes, ends, rows, list(texts.numbers))


def _made(state: int, ids: Any, positions: Any) -> Rows:
    rows = np.zeros(len(ids), dtype=STATE)
    rows["id"], rows["position"], rows["state"] = ids, positions, state
    rows["holder"] = rows["reason"] = -1
    return rows


def _waiting(p: Partition) -> Iterator[Rows]:
    seen: set[int] = set()
    for run in (*p.entries.heap.runs(), *p.entries.parked.runs()):
        keys, ids, positions = run.rest()
        good = p.entries.good_ready(keys, ids, positions, seen)
        yield _made(READY, ids[good], positions[good])
    for wheel, wall in ((p.entries.delays, False), (p.entries.calendar, True)):
        for chunk in wheel.chunks():
            timers = Timers(*(column[chunk.start :] for column in chunk.columns()))
            good = p.entries.good_delayed(timers, wall, seen)
            rows = _made(DELAYED, timers.ids[good], timers.positions[good])
            rows["due"] = timers.dues[good]
            yield rows


def _leased(p: Partition, texts: _Texts) -> Rows:
    leases = list(p.entries.leases.by_id.values())
    rows = _made(LEASED, list(p.entries.leases.by_id), [lease[POSITION] for lease in leases])
    rows["deadline"] = [lease[DEADLINE] for lease in leases]
    rows["holder"] = [texts.number(lease[HOLDER]) for lease in leases]
    return rows


def _dead_rows(p: Partition, texts: _Texts) -> Rows:
    letters = p.entries.dead.rows()
    rows = _made(DEAD, letters.ids, letters.positions)
    rows["died_at"] = letters.ats
    rows["reason"] = [texts.number(reason) for reason in letters.reasons.tolist()]
    return rows


def _among(rows: Rows, ids: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Return (row, id) of the rows whose id is in `ids`."""
    if not ids:
        return []
    at = np.flatnonzero(np.isin(rows["id"], np.fromiter(ids, np.int64, len(ids))))
    return list(zip(at.tolist(), rows["id"][at].tolist(), strict=True))


def _note_own(p: Partition, rows: Rows) -> None:
    for at, id in _among(rows, p.entries.touched):
        touched = p.entries.touched[id]
        rows["expires"][at], rows["own"][at] = touched.expires, OWN_EXPIRY
        if touched.priority is not None:
            rows["priority"][at], rows["own"][at] = touched.priority, OWN_EXPIRY | OWN_PRIORITY


def _note_reasons(reasons: Mapping[int, str], rows: Rows, texts: _Texts) -> None:
    for at, id in _among(rows, reasons):
        rows["reason"][at] = texts.number(reasons[id])
