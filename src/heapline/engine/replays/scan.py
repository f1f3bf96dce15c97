"""One pass over the journal for all partitions of a replay: their stream rows in the order of the units.

Units are written one after the other, so their order is the order of time across partitions, and the order of offsets
within a partition. A unit is read once, however many partitions have rows in it. Blocking: use it in I/O threads. This
module does not know which rows are wanted.

The stream contains a record's position at the time when its row was written. A live message's record may be rewritten
to another segment after it fired. If its old position is deleted, the partition that still has the message knows the
current one (`find_moved`). A record that is not found this way is deleted and stays `bad`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from heapline.contract.errors import BadRequest
from heapline.contract.stream import Payloads
from heapline.core.events import I64
from heapline.core.record import PositionLayout
from heapline.engine.delivery import split_small
from heapline.engine.groups.pages import Load, Page, PageBuilder
from heapline.engine.replays.requests import Ranges
from heapline.engine.runner import TopicRunner
from heapline.journal.reader import LogReader, Place
from heapline.journal.unit import Unit

STRETCH_ROWS = 4096
STRETCH_BYTES = 4 << 20


class Run(NamedTuple):
    """Adjacent rows of one partition in the merged order: [first, last) of its page."""

    partition: int
    first: int
    last: int


class Stretch(NamedTuple):
    pages: dict[int, Page]
    records: dict[int, Any]  # partition -> the record rows of its page
    runs: list[Run]
    positions: dict[int, int]  # where to continue, for all partitions of the replay


class _Gathering(PageBuilder):
    """A page builder that is fed unit by unit."""

    def add(self, unit: Unit) -> tuple[int, int]:
        """Add a unit. Return the range of its rows in the page."""
        before = self._count
        self._scan_unit(unit)
        return before, self._count

    @property
    def rows(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._bytes + self._bytes_elsewhere

    def records(self) -> Any:
        """Return the record rows of the page, once the page is built."""
        return np.concatenate([part.rows for part in self._parts])


class MergedScan:
    """Reads stretch by stretch; `positions` starts at the ranges' starts and ends at their ends."""

    def __init__(self, reader: LogReader, layout: PositionLayout, load: Load, ranges: Ranges) -> None:
        self._reader, self._layout, self._load = reader, layout, load
        self._ends = {p: end for p, (_, end) in ranges.items()}
        self.positions = {p: start for p, (start, _) in ranges.items()}
        self._place: Place | None = None
        self.began_in: int | None = None  # the segment in which the last stretch starts

    @property
    def is_done(self) -> bool:
        return all(self.positions[p] >= end for p, end in self._ends.items())

    @property
    def segment(self) -> int | None:
        """The segment that is read next, once the scan has started."""
        return None if self._place is None else self._place[0]

    def read(self, rows_max: int = STRETCH_ROWS, bytes_max: int = STRETCH_BYTES) -> Stretch:
        """Return the next stretch. It may have no rows, but it advances unless the replay is done."""
        builders = {
            p: _Gathering(self._reader, self._layout, self._load, p, self.positions[p])
            for p, end in self._ends.items()
            if self.positions[p] < end
        }
        place = self._place or self._locate(builders)
        self.began_in = None if place is None else place[0]
        runs: list[Run] = []
        if place is not None and builders:
            try:
                self._scan(builders, place, runs, rows_max, bytes_max)
            except BadRequest:
                self._place = None  # reclaimed meanwhile: the next read reports where the log starts
                raise
        for p, builder in builders.items():
            self.positions[p] = min(max(self.positions[p], builder.end), self._ends[p])
        if place is None:  # the log no longer has rows of these partitions
            self.positions.update(self._ends)
        pages = {p: builder.page() for p, builder in builders.items() if builder.rows}
        records = {p: builders[p].records() for p in pages}
        return Stretch(pages, records, runs, dict(self.positions))

    def _locate(self, builders: dict[int, _Gathering]) -> Place | None:
        places = [self._reader.locate(p, offset=self.positions[p]) for p in builders]
        return min((place for place in places if place is not None), default=None)

    def _scan(
        self, builders: dict[int, _Gathering], place: Place, runs: list[Run], rows_max: int, bytes_max: int
    ) -> None:
        waiting = dict(builders)
        for unit in self._reader.read_units(place=place):
            for p in sorted({frame.partition for frame in unit.frames} & waiting.keys()):
                first, last = builders[p].add(unit)
                if last > first:
                    _lengthen(runs, Run(p, first, last))
                if builders[p].end >= self._ends[p]:
                    del waiting[p]
            self._place = (unit.segment, unit.end)
            gathered = builders.values()
            if not waiting or sum(b.rows for b in gathered) >= rows_max or sum(b.nbytes for b in gathered) >= bytes_max:
                return
        # The log ended before the ranges did: a segment was reclaimed in between, or the ends were never durable.
        raise BadRequest(f"the log ends before offset {min(self._ends[p] for p in waiting)}: start again")


def _lengthen(runs: list[Run], run: Run) -> None:
    if runs and runs[-1].partition == run.partition:
        runs[-1] = runs[-1]._replace(last=run.last)
    else:
        runs.append(run)


async def find_moved(runner: TopicRunner, stretch: Stretch) -> Stretch:
    """Return the same stretch, with the records that were found."""
    bad = {p: page for p, page in stretch.pages.items() if page.bad}
    if not bad:
        return stretch
    pages, records = dict(stretch.pages), dict(stretch.records)
    for p, page in bad.items():
        at = np.array(sorted(page.bad), dtype=np.int64)
        ids = page.rows.ids[at]
        order = ids.argsort()
        found = await runner.call(
            lambda now, p=p, ids=ids[order]: runner.loaded.topic.partitions[p].entries.positions_of(ids)  # type: ignore[misc]
        )
        there = found >= 0
        if there.any():
            rows = at[order][there]
            pages[p], records[p] = _with_moved(page, records[p], rows, await runner.load(found[there]))
    return stretch._replace(pages=pages, records=records)


def _with_moved(page: Page, rows: Any, at: I64, loaded: Any) -> tuple[Page, Any]:
    rows = rows.copy()
    keys, headers, fairness = (_filled(c, len(page)) for c in (page.keys, page.headers, page.fairness_keys))
    starts, ends, priorities = page.payloads.starts.copy(), page.payloads.ends.copy(), page.priorities.copy()
    enqueued, bad, pieces = page.enqueued_ms.copy(), dict(page.bad), [bytes(page.payloads.data)]
    end = len(pieces[0])
    for i, row in enumerate(at.tolist()):
        record = loaded.rows[i]
        if i in loaded.bad or int(record["id"]) != int(page.rows.ids[row]):
            continue
        rows[row] = record
        priorities[row] = priorities[row] or record["priority"]  # a reschedule stores its own priority beside its row
        enqueued[row] = record["enqueued_at"]
        small = loaded.smalls[i], int(record["key_len"]), int(record["fairness_len"]), int(record["flags"])
        keys[row], fairness[row], headers[row] = split_small(*small)
        starts[row], end = end, end + len(loaded.payloads[i])
        ends[row] = end
        pieces.append(loaded.payloads[i])
        del bad[row]
    moved = {
        "priorities": priorities,
        "enqueued_ms": enqueued,
        "payloads": Payloads(memoryview(b"".join(pieces)), starts, ends),
        "keys": _used(keys),
        "headers": _used(headers),
        "fairness_keys": _used(fairness),
        "bad": bad,
    }
    return Page(**{**page._asdict(), **moved}), rows  # not _replace, which needs len() to be the number of fields


def _filled(column: list[Any] | None, count: int) -> list[Any]:
    return [None] * count if column is None else list(column)


def _used(column: list[Any]) -> list[Any] | None:
    return column if any(value is not None for value in column) else None
