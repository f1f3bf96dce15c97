"""Durations, sizes and moments as people type them, and durations as they are shown. Knows nothing of queues.

What cannot be read raises BadParameter, so that the command line says which option it was. Whether a value makes sense
(a lease of a year, a delay of zero) is not decided here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)")
_SIZE = re.compile(r"([0-9]+)\s*([kmg]i?b?|b)?", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}
_LARGEST_FIRST = (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


def duration(text: str) -> float:
    """
    >>> duration("1h30m"), duration("250ms"), duration("45")
    (5400.0, 0.25, 45.0)
    """
    text = str(text).strip().lower()  # typer also sends defaults through here, which may be numbers
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if not re.fullmatch(rf"({_DURATION.pattern})+", text):
        raise typer.BadParameter(
            f"{text!r} is no duration: write 30s, 5m, 1h30m, 2d or 250ms; a bare number is seconds"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def span(seconds: float) -> str:
    """As `duration` would read it, to the millisecond and in at most two units.

    >>> span(5400), span(0.25), span(43200), span(0)
    ('1h30m', '250ms', '12h', '0s')
    """
    left, parts = round(seconds * 1000), []
    for unit, ms in _LARGEST_FIRST:
        if left >= ms and unit != "w":
            parts.append(f"{left // ms}{unit}")
            left %= ms
    return "".join(parts[:2]) or "0s"


def nbytes(text: str) -> int:
    """
    >>> nbytes("64MiB"), nbytes("512k"), nbytes("4096")
    (67108864, 524288, 4096)
    """
    found = _SIZE.fullmatch(str(text).strip())
    unit = (found[2] or "").lower() if found else ""
    if not found or unit in ("kb", "mb", "gb"):
        raise typer.BadParameter(f"{text!r} is no size: write 4096, 64KiB, 16MiB or 1GiB (K, M, G mean the same)")
    return int(found[1]) << _SHIFTS[unit.rstrip("b").rstrip("i")]


def moment(text: str) -> datetime:
    """
    >>> moment("2030-01-31T12:00:00Z").isoformat()
    '2030-01-31T12:00:00+00:00'
    """
    try:
        found = datetime.fromisoformat(str(text).strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no moment: write it as 2030-01-31T12:00:00Z, or with an offset as +02:00"
        ) from None
    if found.tzinfo is None:
        raise typer.BadParameter(f"{text!r} names no time zone: add Z for UTC, or an offset as +02:00")
    return found


def past(text: str) -> datetime:
    """A moment, or a duration: that long ago."""
    try:
        return datetime.now(UTC) - timedelta(seconds=duration(text))
    except typer.BadParameter:
        pass
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is longer ago than time is counted") from None
    try:
        return moment(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}; or how long ago, as 90m or 2d") from None


def pair(text: str) -> tuple[str, str]:
    """
    >>> pair("trace=ab=c")
    ('trace', 'ab=c')
    """
    name, equals, value = str(text).partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is no pair: write NAME=VALUE")
    return name, value
