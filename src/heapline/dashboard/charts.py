"""Lines over time, from the depths and rates that the broker keeps of the last day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from heapline.contract.inspection import StatsSeries, TopicSeries
from heapline.dashboard.caller import Caller
from heapline.dashboard.page import Place

SPANS = {"15m": ("15 minutes", 900), "1h": ("1 hour", 3600), "24h": ("24 hours", 86_400)}
TABLE_ROWS = 12


@dataclass(frozen=True)
class Chart:
    """Lines with one time axis. `times` are Unix seconds."""

    title: str
    unit: str
    names: Sequence[str]
    colors: Sequence[str]  # tokens of app.css
    times: Sequence[int]
    lines: Sequence[Sequence[float]]

    @property
    def points(self) -> str:
        return msgspec.json.encode([self.times, *self.lines]).decode()

    @property
    def rows(self) -> list[tuple[datetime, list[float]]]:
        """The last points, for the table beside the lines."""
        first = max(0, len(self.times) - TABLE_ROWS)
        times = self.times[first:]
        return [
            (datetime.fromtimestamp(at, UTC), [line[first + i] for line in self.lines]) for i, at in enumerate(times)
        ][::-1]


async def read_series(caller: Caller, topic: str | None, place: Place) -> TopicSeries:
    """Return the series of one topic, or of all, for the time span of the page."""
    _, seconds = SPANS[place.choice("span", *SPANS)]
    return await caller.do(StatsSeries(topic, datetime.now(UTC) - timedelta(seconds=seconds)))


def rates_of(series: TopicSeries) -> Chart:
    times, rows = _without_gaps(series, ("enqueued", "done"), per_second=True)
    return Chart("Messages", "per second", ("in", "done"), ("--ready", "--ok"), times, rows)


def waits_of(series: TopicSeries) -> Chart:
    times, rows = _without_gaps(series, ("oldest_wait",), per_second=False)
    return Chart("Longest wait", "seconds", ("oldest ready message",), ("--warn",), times, rows)


def depths_of(series: TopicSeries) -> Chart:
    times, rows = _without_gaps(series, ("ready", "leased", "dead"), per_second=False)
    return Chart("Depth", "messages", ("ready", "leased", "dead"), ("--ready", "--leased", "--dead"), times, rows)


def _without_gaps(
    series: TopicSeries, names: Sequence[str], *, per_second: bool
) -> tuple[list[int], list[list[float]]]:
    """Return times and lines. Where points are missing, nothing was done, and depths were as before."""
    times: list[int] = []
    rows: list[list[float]] = [[] for _ in names]
    columns: list[list[int]] = [getattr(series, name) for name in names]
    end = int(datetime.now(UTC).timestamp()) // 10 * 10
    for i, at in enumerate(series.times):
        began = at - series.seconds[i]
        if times and began > times[-1] + 1:
            for gap in sorted({times[-1] + 1, began}):
                _append(times, rows, gap, [0.0 if per_second else row[-1] for row in rows])
        scale = series.seconds[i] if per_second else 1
        _append(times, rows, at, [round(column[i] / scale, 3) for column in columns])
    if times and end > times[-1] + 2 * series.interval:
        for gap in (times[-1] + 1, end):
            _append(times, rows, gap, [0.0 if per_second else row[-1] for row in rows])
    return times, rows


def _append(times: list[int], rows: list[list[float]], at: int, values: Sequence[float]) -> None:
    times.append(at)
    for row, value in zip(rows, values, strict=True):
        row.append(value)
