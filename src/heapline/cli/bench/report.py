"""The result of `heapline bench`: rates and percentiles, compared with the baselines of the bare machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import ROUNDED
from rich.table import Table

from heapline.cli.output import count
from heapline.cli.top.columns import millis

CAPTION = """\
Times are of one call; of a full cycle (enqueue, pop, ack); of a delivery from \
its due time to its arrival at a waiting consumer. Compared: the rate as a multiple \
of the baseline's rate in the same run; for a delivery, its median time."""
PERCENTS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load, or one baseline."""

    name: str
    messages: int
    seconds: float
    samples: Sequence[float]  # seconds
    each: str  # what one sample measures
    calls: int = 1  # the bare calls that one message corresponds to
    is_baseline: bool = False

    @property
    def rate(self) -> float:
        return self.messages / max(self.seconds, 1e-9)

    def plus(self, other: Measurement) -> Measurement:
        """Join two parts of the same measurement."""
        messages, seconds = self.messages + other.messages, self.seconds + other.seconds
        return replace(self, messages=messages, seconds=seconds, samples=[*self.samples, *other.samples])

    def ms(self, percent: float) -> float | None:
        return None if not self.samples else percentile(self.samples, percent) * 1000


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that is not exceeded by this share of the samples.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0, 3.0, 2.0], 99)
    (2.0, 4.0)
    """
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


@dataclass(slots=True)
class Report:
    where: str
    size: int
    concurrency: int
    seconds: float
    rows: list[Measurement] = field(default_factory=list)
    baselines: dict[str, str] = field(default_factory=dict)  # name of a load -> name of its baseline
    by_time: set[str] = field(default_factory=set)  # loads that are compared by medians, not by rates

    def ratio(self, load: Measurement) -> float | None:
        """Return the load's rate, or its median time, as a multiple of its baseline's."""
        base = next((row for row in self.rows if row.name == self.baselines.get(load.name)), None)
        if base is None:
            return None
        if load.name in self.by_time:
            median, bare = load.ms(50), base.ms(50)
            return None if not bare or median is None else median / bare
        return load.rate * load.calls / base.rate if base.rate else None


def report_table(report: Report) -> Table:
    """Return a table for 80 columns, in which a load names its baseline by a letter."""
    title = f"{report.where}: messages of {count(report.size)} bytes, {report.concurrency} coroutines"
    table = Table(title=title, title_justify="left", box=ROUNDED, caption=CAPTION, caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("messages/s", "p50", "p95", "p99", "compared"):
        table.add_column(name, justify="right", no_wrap=True)
    baselines = [row for row in report.rows if row.is_baseline]
    letters = {row.name: letter for row, letter in zip(baselines, "ABCDEFG", strict=False)}
    for row in report.rows:
        if not row.is_baseline:
            rate = "" if row.name in report.by_time else f"[bold green]{count(round(row.rate))}[/]"
            table.add_row(row.name, rate, *_times(row), _comparison(report, row, letters))
    table.add_section()
    for row in baselines:
        table.add_row(f"{letters[row.name]}  {row.name}", count(round(row.rate)), *_times(row), "", style="dim")
    return table


def _times(row: Measurement) -> list[str]:
    return [millis(row.ms(percent)) for percent in PERCENTS]


def _comparison(report: Report, row: Measurement, letters: dict[str, str]) -> str:
    ratio = report.ratio(row)
    if ratio is None:
        return ""
    times = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    return f"{times}× {letters[report.baselines[row.name]]}"


def report_json(report: Report) -> dict[str, Any]:
    def row_json(row: Measurement) -> dict[str, Any]:
        fields: dict[str, Any] = {"name": row.name, "messages": row.messages, "seconds": round(row.seconds, 3)}
        fields["rate"] = round(row.rate, 1)
        fields |= {f"p{percent}_ms": _rounded(row.ms(percent)) for percent in PERCENTS}
        fields["of_each"] = row.each
        if row.name in report.baselines:
            kind = "time" if row.name in report.by_time else "rate"
            baseline = {"name": report.baselines[row.name], "of": kind, "ratio": _rounded(report.ratio(row))}
            fields["baseline"] = baseline
        return fields

    settings = {name: getattr(report, name) for name in ("where", "size", "concurrency", "seconds")}
    loads = [row_json(row) for row in report.rows if not row.is_baseline]
    return {**settings, "loads": loads, "baselines": [row_json(row) for row in report.rows if row.is_baseline]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
