"""Plots as SVG: lines over time or numbers, horizontal bars, and percentiles as dots on a line.

Each plot is one <svg> element for an HTML page, without scripts. Colors are classes that the page's style sheet defines
for light and dark mode. Series also differ in dash and shape, so nothing depends on color alone. Every plot has a title
and a description for screen readers, and every marker has a tooltip with its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from heapline.spark.jobs.pages import amount, duration, printable

WIDTH, LEFT, RIGHT, TOP = 720, 64, 16, 34
ROW = 24  # height of a bar, or of a line of dots
DURATION_TICKS = (1, 10, 100, 1e3, 1e4, 6e4, 6e5, 3.6e6, 3.6e7, 8.64e7, 8.64e8, 8.64e9)  # ms
_DAY = 86400
_STEPS = (  # seconds
    1, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200,
    _DAY, 7 * _DAY, 30 * _DAY, 365 * _DAY, 3650 * _DAY, 36500 * _DAY,
)  # fmt: skip
KINDS = 6  # classes s0 … s5; the seventh series looks like the first


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]  # by x


class Axis(NamedTuple):
    """Maps values to pixels."""

    low: float
    high: float
    ticks: Sequence[float]
    shown: Callable[[float], str]
    is_log: bool = False

    def at(self, value: float, size: float) -> float:
        low, high, value = (_log(v) if self.is_log else v for v in (self.low, self.high, value))
        return size * (value - low) / (high - low or 1)


def _log(value: float) -> float:
    return math.log10(max(value, 1.0))


def number_axis(highest: float) -> Axis:
    """Return an axis from 0 to a round number.

    >>> list(number_axis(7).ticks), list(number_axis(0).ticks)
    ([0, 2, 4, 6, 8], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    highest = highest if highest > 1e-300 else 1.0  # a smaller one has no logarithm of its quarter
    unit = 10 ** math.floor(math.log10(highest / 4))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m * 4 >= highest * 0.999)
    ticks = [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]
    return Axis(0, ticks[-1], ticks, amount)


def duration_axis(highest: float) -> Axis:
    """Return a logarithmic axis in milliseconds that begins at 1 ms.

    >>> list(duration_axis(900).ticks)
    [1, 10, 100, 1000.0]
    """
    last = next((i for i, t in enumerate(DURATION_TICKS) if t >= highest), len(DURATION_TICKS) - 1)
    ticks = DURATION_TICKS[: max(last, 1) + 1]
    return Axis(1, max(ticks[-1], highest), ticks, duration, is_log=True)


def time_axis(low: float, high: float) -> Axis:
    """Return an axis of milliseconds since 1970, with ticks at round UTC times."""
    step = next((s for s in _STEPS if (high - low) / 1000 / s <= 7), _STEPS[-1]) * 1000
    first = math.ceil(low / step) * step
    ticks: list[float] = [first + i * step for i in range(int((high - first) // step) + 1)] or [low]
    form = "%Y-%m-%d" if step >= 86400_000 else "%d %H:%M" if high - low > 86400_000 else "%H:%M:%S"
    if step % 60_000 == 0 and form == "%H:%M:%S":
        form = "%H:%M"
    return Axis(low, max(high, low + 1), ticks, lambda ms: datetime.fromtimestamp(ms / 1000, UTC).strftime(form))


def lines(
    name: str,
    title: str,
    summary: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    goal: float | None = None,
    x_name: str = "",
    y_name: str = "",
    height: int = 260,
) -> str:
    """Draw lines. `name` is an id that is unique on the page; a `goal` is a horizontal line."""
    bottom = height - 40
    width, tall = WIDTH - LEFT - RIGHT, bottom - TOP

    def pixel(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + x.at(point[0], width), bottom - y.at(point[1], tall)

    drawn = [_legend([s.name for s in series])]
    for tick in y.ticks:
        v = bottom - y.at(tick, tall)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{v:.1f}" y2="{v:.1f}"/>')
        drawn.append(_text(LEFT - 6, v + 4, y.shown(tick), "end"))
    for tick in x.ticks:
        drawn.append(_text(LEFT + x.at(tick, width), bottom + 16, x.shown(tick), "middle"))
    drawn.append(_text(LEFT + width / 2, height - 6, x_name, "middle"))
    drawn.append(_text(4, TOP - 10, y_name, "start"))
    if goal is not None:
        v = bottom - y.at(goal, tall)
        drawn.append(f'<line class="goal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{v:.1f}" y2="{v:.1f}"/>')
        drawn.append(_text(WIDTH - RIGHT, v - 4, f"goal {y.shown(goal)}", "end"))
    for index, line in enumerate(series):
        pixels = [pixel(point) for point in line.points]
        drawn.append(f'<polyline class="line s{index % KINDS}" points="{_path(pixels)}"/>')
        if len(pixels) <= 40:
            for (px, py), point in zip(pixels, line.points, strict=True):
                hint = f"{line.name}, {x.shown(point[0])}: {y.shown(point[1])}"
                drawn.append(_mark(index, px, py, hint))
    return _svg(name, title, summary, height, drawn)


def bars(name: str, title: str, summary: str, items: Sequence[tuple[str, float, str]]) -> str:
    """Draw horizontal bars from (label, value, value as text)."""
    axis = number_axis(max((value for _, value, _ in items), default=0))
    left = 210
    width = WIDTH - left - 110
    drawn = []
    for index, (label, value, shown) in enumerate(items):
        top = 8 + index * ROW
        label = printable(label, 26)
        size = max(axis.at(value, width), 1)
        drawn.append(_text(left - 8, top + 15, label, "end"))
        drawn.append(
            f'<rect class="bar" x="{left}" y="{top + 3}" width="{size:.1f}" height="{ROW - 8}">'
            f"{_hint(f'{label}: {shown}')}</rect>"
        )
        drawn.append(_text(left + size + 6, top + 15, shown, "start"))
    return _svg(name, title, summary, 16 + ROW * len(items), drawn)


def ranges(
    name: str, title: str, summary: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """Draw a row of dots for each row of values, which are durations in ms on a logarithmic axis."""
    axis = duration_axis(max((max(values) for _, values in rows), default=0))
    left = 130
    width = WIDTH - left - RIGHT - 20
    bottom = TOP + ROW * len(rows)
    drawn = [_legend(names)]
    for tick in axis.ticks:
        h = left + axis.at(tick, width)
        drawn.append(f'<line class="grid" x1="{h:.1f}" x2="{h:.1f}" y1="{TOP}" y2="{bottom}"/>')
        drawn.append(_text(h, bottom + 16, axis.shown(tick), "middle"))
    for index, (label, values) in enumerate(rows):
        v = TOP + ROW * index + ROW / 2
        pixels = [left + axis.at(value, width) for value in values]
        drawn.append(_text(left - 12, v + 4, printable(label, 20), "end"))
        drawn.append(f'<line class="range" x1="{min(pixels):.1f}" x2="{max(pixels):.1f}" y1="{v:.1f}" y2="{v:.1f}"/>')
        for kind, (h, value) in enumerate(zip(pixels, values, strict=True)):
            drawn.append(_mark(kind, h, v, f"{label}, {names[kind]}: {duration(value)}"))
    return _svg(name, title, summary, bottom + 26, drawn)


def _svg(name: str, title: str, summary: str, height: int, drawn: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby={quoteattr(f"{name}-t {name}-d")}>'
        f"<title id={quoteattr(f'{name}-t')}>{escape(printable(title))}</title>"
        f"<desc id={quoteattr(f'{name}-d')}>{escape(printable(summary, 400))}</desc>"
        + "".join(part for part in drawn if part)
        + "</svg>"
    )


def _legend(names: Sequence[str]) -> str:
    """Draw the legend in a row along the top."""
    drawn, h = [], 200.0  # to the right of the name of the vertical axis
    for index, name in enumerate(names):
        name = printable(name, 24)
        drawn += [_mark(index, h, 12, ""), _text(h + 9, 16, name, "start")]
        h += 26 + 7.2 * len(name)
    return "".join(drawn) if len(names) > 1 else ""


def _mark(kind: int, h: float, v: float, hint: str) -> str:
    """Draw a marker. The first four series have different shapes."""
    style, inner = f'class="mark s{kind % KINDS}"', _hint(hint)
    if kind % 4 == 0:
        return f'<circle {style} cx="{h:.1f}" cy="{v:.1f}" r="4">{inner}</circle>'
    if kind % 4 == 1:
        return f'<rect {style} x="{h - 4:.1f}" y="{v - 4:.1f}" width="8" height="8">{inner}</rect>'
    triangle, diamond = [(0, -5), (5, 4), (-5, 4)], [(0, -5), (5, 0), (0, 5), (-5, 0)]
    points = _path([(h + x, v + y) for x, y in (triangle if kind % 4 == 2 else diamond)])
    return f'<polygon {style} points="{points}">{inner}</polygon>'


def _hint(text: str) -> str:
    return f"<title>{escape(printable(text, 160))}</title>" if text else ""


def _path(pixels: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{h:.1f},{v:.1f}" for h, v in pixels)


def _text(h: float, v: float, text: str, anchor: str) -> str:
    return f'<text x="{h:.1f}" y="{v:.1f}" text-anchor="{anchor}">{escape(printable(text))}</text>' if text else ""
