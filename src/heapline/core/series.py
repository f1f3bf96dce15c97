"""Depths and rates of the last 24 hours in a fixed number of bytes, coarser with age.

A point is a row of numbers at a time: depths as they were then, and sums since the point before. There are three tiers
of points, 10 s, 1 min and 10 min apart; each fills the next. A point is added only if something has changed, so where
points are missing, depths were as in the point before and nothing was done. An idle series has no arrays.

Times are wall time, which may be set back: points after the new time are dropped, because a chart has one time axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

STEP = 10  # seconds between two samples
TIERS = ((STEP, 180), (60, 180), (600, 144))  # seconds of a point, points: half an hour, 3 hours, 24 hours
DEPTHS = ("ready", "delayed", "leased", "dead")
SUMS = ("enqueued", "done", "failed")
FIELDS = ("time", *DEPTHS, *SUMS, "oldest_wait")
_SUM_FROM, _WAIT = 1 + len(DEPTHS), len(FIELDS) - 1
MAX = (1 << 32) - 1
DAY = 86_400
Points = npt.NDArray[np.uint32]


class Sample(NamedTuple):
    """A sample of one time. `totals` only grow, in the order of SUMS."""

    depths: tuple[int, ...]
    totals: tuple[int, ...]
    oldest_wait: int  # seconds; 0: nothing is ready


class _Ring:
    def __init__(self, size: int) -> None:
        self._rows = np.zeros((size, len(FIELDS)), dtype=np.uint32)
        self._count = 0  # points ever added
        self._is_cut = False  # points were overwritten before it was replaced

    def add(self, row: Sequence[int]) -> None:
        self._rows[self._count % len(self._rows)] = row
        self._count += 1

    @property
    def has_lost(self) -> bool:
        return self._is_cut or self._count > len(self._rows)

    def points(self) -> Points:
        size, at = len(self._rows), self._count % len(self._rows)
        return self._rows[:at] if self._count < size else np.concatenate((self._rows[at:], self._rows[:at]))

    def replace(self, points: Points, has_lost: bool) -> None:
        self._is_cut = has_lost
        self._count = min(len(points), len(self._rows))
        if self._count:
            self._rows[: self._count] = points[-self._count :]


class Series:
    def __init__(self) -> None:
        self._rings: list[_Ring] | None = None  # None: nothing has changed yet
        self._open: list[list[int] | None] = [None] * (len(TIERS) - 1)  # points of coarser tiers, not complete yet
        self._last: Sample | None = None
        self.is_changed = False  # since `to_bytes`

    @property
    def nbytes(self) -> int:
        return 0 if self._rings is None else sum(ring._rows.nbytes for ring in self._rings)

    def add(self, time: int, sample: Sample) -> None:
        """Add a sample at a wall time in seconds."""
        last = self._last or sample._replace(totals=(0,) * len(SUMS))
        self._last = sample
        if sample == last:
            return
        sums = [max(0, now - before) for now, before in zip(sample.totals, last.totals, strict=True)]
        row = [min(value, MAX) for value in (time, *sample.depths, *sums, sample.oldest_wait)]
        rings = self._rings = self._rings or [_Ring(size) for _, size in TIERS]
        newest = rings[0].points()
        if len(newest) and newest[-1, 0] >= time:
            self._drop_from(time)
        rings[0].add(row)
        self._fill(1, row)
        self.is_changed = True

    def _fill(self, tier: int, row: list[int]) -> None:
        """Add a point to a coarser tier, and what that completes to the next."""
        assert self._rings is not None
        if tier == len(TIERS):
            return
        step, current = TIERS[tier][0], self._open[tier - 1]
        if current is not None and current[0] // step == row[0] // step:
            sums = [min(MAX, a + b) for a, b in zip(current[_SUM_FROM:_WAIT], row[_SUM_FROM:_WAIT], strict=True)]
            self._open[tier - 1] = [*row[:_SUM_FROM], *sums, max(current[_WAIT], row[_WAIT])]
            return
        if current is not None:
            self._rings[tier].add(current)
            self._fill(tier + 1, current)
        self._open[tier - 1] = list(row)

    def _drop_from(self, time: int) -> None:
        for ring in self._rings or ():
            points = ring.points()
            ring.replace(points[points[:, 0] < time].copy(), ring.has_lost)
        self._open = [row if row is not None and row[0] < time else None for row in self._open]

    def points(self, since: int) -> tuple[Points, list[int]]:
        """Return the points after `since`, oldest first, and how many seconds each stands for: the finest known."""
        rings = self._rings or []
        found: list[tuple[int, Points]] = []  # seconds of a point, points; newest first
        end = MAX
        for (step, _), ring, (coarser, _), rest in zip(TIERS, rings, TIERS[1:], rings[1:], strict=False):
            points = ring.points()
            found.append((step, points[points[:, 0] < end]))
            if len(found[-1][1]):
                # If points were overwritten, the oldest are only a part of a coarser point, which has them all.
                end = int(found[-1][1][0, 0]) // coarser * coarser
                if ring.has_lost and (rest.points()[:, 0] // coarser * coarser == end).any():
                    end += coarser
                    found = [(size, kept[kept[:, 0] >= end]) for size, kept in found]
        if rings:
            points = rings[-1].points()
            found.append((TIERS[-1][0], points[points[:, 0] < end]))
        found = [(step, points[points[:, 0] > since]) for step, points in reversed(found)]
        steps = [step for step, points in found for _ in range(len(points))]
        return np.concatenate([np.zeros((0, len(FIELDS)), np.uint32), *(points for _, points in found)]), steps

    # -- storage ---------------------------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        """Return what a file keeps: for each tier its points and whether it lost some; the points not complete yet."""
        self.is_changed = False
        return [[(ring.points().tobytes(), ring.has_lost) for ring in self._rings or ()], self._open]

    @classmethod
    def from_state(cls, state: list[Any]) -> Series:
        """Read what `to_state` returned; raise ValueError if it is something else."""
        series = cls()
        tiers, series._open = state
        if tiers:
            series._rings = [_Ring(size) for _, size in TIERS]
            for ring, (points, has_lost) in zip(series._rings, tiers, strict=True):
                ring.replace(np.frombuffer(points, np.uint32).reshape(-1, len(FIELDS)), has_lost)
        if len(series._open) != len(TIERS) - 1:
            raise ValueError("number of tiers differs")
        for row in series._open:
            if row is not None and [type(value) for value in row] != [int] * len(FIELDS):
                raise ValueError("a point has other fields")
        return series
