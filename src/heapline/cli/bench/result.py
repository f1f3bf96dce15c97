"""What was measured, and how it is told: rates and percentiles, next to what the bare machine does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import ROUNDED
from rich.table import Table

from heapline.cli.present import count
from heapline.cli.top.figures import millis

CAPTION = """\
Times are of one call; of a full cycle (enqueue, pop, ack); of a delivery from \
when it was due to when a waiting consumer had it. Next to: the rate as a multiple \
of what this machine did bare, in the same run; of a delivery its median time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, or one baseline."""

    name: str
    messages: int
    seconds: float
    samples: Sequence[float]  # seconds that each one took
    each: str  # what one sample is of
    calls: int = 1  # the bare calls that one message is worth, to compare with
    is_baseline: bool = False

    @property
    def rate(self) -> float:
        return self.messages / max(self.seconds, 1e-9)

    def plus(self, other: Measured) -> Measured:
        """The same, measured in two pieces."""
        return replace(
            self, messages=self.messages + other.messages, seconds=self.seconds + other.seconds,
            samples=[*self.samples, *other.samples],
        )  # fmt: skip

    def ms(self, percent: float) -> float | None:
        return None if not self.samples else percentile(self.samples, percent) * 1000


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that so many percent do not exceed.

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
    rows: list[Measured] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)  # name of a load -> name of the baseline it stands next to
    by_time: set[str] = field(default_factory=set)  # loads whose medians are compared, not their rates

    def ratio(self, load: Measured) -> float | None:
        """How many times its baseline: rates, or medians where it is about time."""
        base = next((row for row in self.rows if row.name == self.beside.get(load.name)), None)
        if base is None:
            return None
        if load.name in self.by_time:
            median, bare = load.ms(50), base.ms(50)
            return None if not bare or median is None else median / bare
        return load.rate * load.calls / base.rate if base.rate else None


def as_table(report: Report) -> Table:
    """Fits into 80 columns: a load names its baseline by a letter."""
    table = Table(
        title=f"{report.where}: messages of {count(report.size)} bytes, {report.concurrency} coroutines",
        title_justify="left", box=ROUNDED, caption=CAPTION, caption_justify="left",
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for name in ("messages/s", "p50", "p95", "p99", "next to"):
        table.add_column(name, justify="right", no_wrap=True)
    baselines = [row for row in report.rows if row.is_baseline]
    letters = {row.name: letter for row, letter in zip(baselines, "ABCDEFG", strict=False)}
    for row in report.rows:
        if not row.is_baseline:
            rate = "" if row.name in report.by_time else f"[bold green]{count(round(row.rate))}[/]"
            table.add_row(row.name, rate, *_times(row), _beside(report, row, letters))
    table.add_section()
    for row in baselines:
        table.add_row(f"{letters[row.name]}  {row.name}", count(round(row.rate)), *_times(row), "", style="dim")
    return table


def _times(row: Measured) -> list[str]:
    return [millis(row.ms(percent)) for percent in (50, 95, 99)]


def _beside(report: Report, row: Measured, letters: dict[str, str]) -> str:
    ratio = report.ratio(row)
    if ratio is None:
        return ""
    times = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    return f"{times}× {letters[report.beside[row.name]]}"


def as_json(report: Report) -> dict[str, Any]:
    def told(row: Measured) -> dict[str, Any]:
        found: dict[str, Any] = {"name": row.name, "messages": row.messages, "seconds": round(row.seconds, 3)}
        found["rate"] = round(row.rate, 1)
        found |= {f"p{percent}_ms": _rounded(row.ms(percent)) for percent in (50, 95, 99)}
        found["of_each"] = row.each
        if row.name in report.beside:
            kind = "time" if row.name in report.by_time else "rate"
            found["baseline"] = {"name": report.beside[row.name], "of": kind, "ratio": _rounded(report.ratio(row))}
        return found

    return {
        "where": report.where, "size": report.size, "concurrency": report.concurrency, "seconds": report.seconds,
        "loads": [told(row) for row in report.rows if not row.is_baseline],
        "baselines": [told(row) for row in report.rows if row.is_baseline],
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
