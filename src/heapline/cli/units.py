"""Parse durations, sizes, times and stream positions as people type them.

A value that cannot be parsed raises BadParameter, so that the command line names its option. Whether a value makes
sense (a lease of a year, a delay of zero) is not decided here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import typer

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)")
_SIZE = re.compile(r"([0-9]+)\s*([kmg]i?b?|b)?", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}
_LARGEST_FIRST = (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_OFFSETS = re.compile(r"\d{1,18}[:=]\d{1,18}(,\d{1,18}[:=]\d{1,18})*\Z")
POSITION_HELP = (
    "earliest, latest, a time such as 2030-01-31T12:00:00Z, how long ago such as 2h, an offset such as 120, or offsets "
    "by partition such as 0:120,1:80"
)


def duration(text: str) -> float:
    """Return seconds.

    >>> duration("1h30m"), duration("250ms"), duration("45")
    (5400.0, 0.25, 45.0)
    """
    text = str(text).strip().lower()  # typer also passes defaults through here, which may be numbers
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if not re.fullmatch(rf"({_DURATION.pattern})+", text):
        raise typer.BadParameter(
            f"{text!r} is not a duration; use a form such as 30s, 5m, 1h30m, 2d or 250ms (a bare number means seconds)"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def span(seconds: float) -> str:
    """Return a form that `duration` can read, to the millisecond and in at most two units.

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
    match = _SIZE.fullmatch(str(text).strip())
    unit = (match[2] or "").lower() if match else ""
    if not match or unit in ("kb", "mb", "gb"):
        raise typer.BadParameter(f"{text!r} is not a size; use 4096, 64KiB, 16MiB or 1GiB (K, M and G mean the same)")
    return int(match[1]) << _SHIFTS[unit.rstrip("b").rstrip("i")]


def instant(text: str) -> datetime:
    """
    >>> instant("2030-01-31T12:00:00Z").isoformat()
    '2030-01-31T12:00:00+00:00'
    """
    try:
        parsed = datetime.fromisoformat(str(text).strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time; use a form such as 2030-01-31T12:00:00Z, or an offset such as +02:00 instead of Z"
        ) from None
    if parsed.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone; add Z for UTC, or an offset such as +02:00")
    return parsed


def past(text: str) -> datetime:
    """Parse a time, or a duration that means how long ago."""
    try:
        return datetime.now(UTC) - timedelta(seconds=duration(text))
    except typer.BadParameter:
        pass
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is too long ago") from None
    try:
        return instant(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}; or how long ago, such as 90m or 2d") from None


def position(text: Any) -> Any:
    """Parse a position in the stream of a topic: a name, an offset, offsets by partition, or a time.

    >>> position("latest"), position("120"), position("0:120,3:7")
    ('latest', 120, {0: 120, 3: 7})
    """
    text = str(text).strip()
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if _OFFSETS.match(text):
        pairs = (re.split("[:=]", part) for part in text.split(","))
        return {int(partition): int(offset) for partition, offset in pairs}
    try:
        return past(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is not a position in a stream; use {POSITION_HELP}") from None


def pair(text: str) -> tuple[str, str]:
    """
    >>> pair("trace=ab=c")
    ('trace', 'ab=c')
    """
    name, equals, value = str(text).partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not a pair; use NAME=VALUE")
    return name, value
