"""Templates, and how pages show numbers, durations and times.

A page's template marks the parts that change while it is open, with `{% call parts.part(id) %}` around an element of
that id. Rendering collects them, so that the same template serves the whole page and what a stream sends.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jinja2
from markupsafe import Markup

from heapline.contract.message import TopicAudit

THIN = "\u202f"  # between groups of digits
SPACE = "\u00a0"  # before a unit
UNKNOWN = "–"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Parts:
    """The parts of one rendering by element id, and for each list the ids of its rows in order."""

    def __init__(self) -> None:
        self.html: dict[str, str] = {}
        self.order: dict[str, list[str]] = {}

    def part(self, name: str, caller: Callable[[], Markup]) -> Markup:
        html = caller()
        self.html[name] = str(html).strip()
        return html

    def row(self, rows: str, name: str, caller: Callable[[], Markup]) -> Markup:
        """A part that is a row of the element `rows`, in which rows come, go and change places."""
        self.order.setdefault(rows, []).append(name)
        return self.part(name, caller)

    def rows(self, rows: str) -> str:
        """Declare an element with rows, even if it has none now. Return its id."""
        self.order.setdefault(rows, [])
        return rows


def count(number: int | float | None) -> str:
    """Return a count: exact up to 9 999, then with three digits and a unit.

    >>> count(9999), count(12_600), count(5_200_000), count(None)
    ('9\\u202f999', '12.6\\xa0k', '5.2\\xa0M', '–')
    """
    if number is None:
        return UNKNOWN
    if abs(number) < 10_000:
        return f"{number:,.0f}".replace(",", THIN)
    scale, unit = next((scale, unit) for scale, unit in UNITS if abs(number) >= scale * 0.9995)
    scaled = number / scale
    text = f"{scaled:.1f}" if abs(scaled) < 99.95 else f"{scaled:.0f}"
    return f"{text.removesuffix('.0')}{SPACE}{unit}"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "lease"), counted(2, "lease")
    ('1 lease', '2 leases')
    """
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def exact(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}".replace(",", THIN)


def rate(per_second: float | None) -> str:
    """Return a rate with two significant figures.

    >>> rate(0.042), rate(7.31), rate(83.2), rate(1234.0), rate(0.0)
    ('0.042', '7.3', '83', '1\\u202f200', '0')
    """
    if per_second is None:
        return UNKNOWN
    if per_second < 0.0005:
        return "0"
    rounded = float(f"{per_second:.2g}")
    return count(rounded) if rounded >= 10 else f"{rounded:g}"


def duration(seconds: float | None) -> str:
    """Return a duration in one unit.

    >>> duration(0.034), duration(42), duration(660), duration(9000), duration(400_000)
    ('34\\xa0ms', '42\\xa0s', '11\\xa0min', '2.5\\xa0h', '4.6\\xa0d')
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}{SPACE}ms"
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + f"{SPACE}s"
    if seconds < 90:
        return f"{seconds:.0f}{SPACE}s"
    if seconds < 5400:
        return f"{seconds / 60:.0f}{SPACE}min"
    hours = seconds / 3600
    scaled, unit = (hours, "h") if hours < 72 else (hours / 24, "d")
    return f"{scaled:.1f}".removesuffix(".0") + f"{SPACE}{unit}"


def age(seconds: float | None) -> str:
    """Return how long something lasts already: in whole seconds, because finer ones would change all the time."""
    return UNKNOWN if seconds is None else f"0{SPACE}s" if seconds < 1 else duration(int(seconds))


def coarse(seconds: float | None) -> str:
    """Return how long ago something happened that happens all the time: in minutes."""
    return UNKNOWN if seconds is None else f"under 1{SPACE}min" if seconds < 60 else duration(max(90, seconds))


def size(number: int | bytes | None) -> str:
    """Return a number of bytes, or that of a payload, in decimal units."""
    if number is None:
        return UNKNOWN
    if isinstance(number, bytes):
        number = len(number)
    for scale, unit in UNITS:
        if number >= scale:
            return f"{number / scale:.1f}".removesuffix(".0") + f"{SPACE}{unit}B"
    return f"{number}{SPACE}B"


def when(instant: datetime | None) -> str:
    """Return a time of the 24-hour clock. The page's foot names its zone, UTC."""
    return UNKNOWN if instant is None else instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def clock(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%H:%M")


def since(instant: datetime | None) -> float | None:
    """Return the seconds from an instant until now; negative ones if it is ahead."""
    return None if instant is None else (datetime.now(UTC) - instant).total_seconds()


def audited(found: TopicAudit) -> str:
    """Return what an audit found, in a line.

    >>> at = datetime(2030, 1, 31, 12, tzinfo=UTC)
    >>> audited(TopicAudit(until=at, recorded_at=at, messages=9, early=2, refuted=["not_early", "rank"]))
    '0 lost, 0 doubled, 2 early, 2 promises broken'
    """
    broken = f", {counted(len(found.refuted), 'promise')} broken" if found.refuted else ""
    return f"{count(found.lost)} lost, {count(found.doubled)} doubled, {count(found.early)} early{broken}"


def make_environment(**shared: Any) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("heapline.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "count": count,
        "exact": exact,
        "rate": rate,
        "duration": duration,
        "age": age,
        "coarse": coarse,
        "size": size,
        "when": when,
        "clock": clock,
        "since": since,
        "audited": audited,
    }
    environment.globals |= shared
    return environment
