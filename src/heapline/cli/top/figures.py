"""Numbers, ages and little pictures that fit into a narrow column: pure functions from values to text."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
UNITS = "kMGTPE"


def short(number: float | None) -> str:
    """At most five characters; exact up to 9999.

    >>> [short(n) for n in (0, 0.25, 9999, 12345, 999_950, 1_234_567, None)]
    ['0', '0.2', '9999', '12.3k', '1.00M', '1.23M', '–']
    """
    if number is None:
        return "–"
    if number < 9.95 and number != int(number):
        return f"{number:.1f}"
    if number < 9999.5:
        return str(round(number))
    value = float(number)
    for unit in UNITS:
        value /= 1000
        if value < 9.995:
            return f"{value:.2f}{unit}"
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
    return "many"


def age(seconds: float | None) -> str:
    """At most five characters.

    >>> [age(s) for s in (0.04, 9.94, 59.7, 192, 7500, 273_600, None)]
    ['40ms', '9.9s', '1m00', '3m12', '2h05', '3d04', '–']
    """
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes}m{whole % 60:02d}"
    if days < 1:
        return f"{hours}h{minutes % 60:02d}"
    return f"{days}d{hours % 24:02d}" if days < 100 else f"{days}d"


def millis(ms: float | None) -> str:
    """
    >>> [millis(ms) for ms in (0.25, 12.0, 1500, None)]
    ['0.2 ms', '12 ms', '1.5 s', '–']
    """
    if ms is None:
        return "–"
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as one line of blocks, the newest on the right; what is not known is left blank.

    >>> sparkline([None, 0, 1, 4, 8], 6)
    '  ▁▁▄█'
    """
    return chart(values, width, 1)[0]


def chart(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """The same over several lines, the uppermost first. Nothing but a zero stands on the ground line alone."""
    if width < 1:
        return [""] * height
    shown = [None] * max(0, width - len(values)) + list(values[-width:])
    highest = max((value for value in shown if value), default=0.0)
    eighths = [_eighths(value, highest, height * 8) for value in shown]
    rows = range(height - 1, -1, -1)
    return ["".join(BLOCKS[min(8, max(0, level - row * 8))] for level in eighths) for row in rows]


def _eighths(value: float | None, highest: float, room: int) -> int:
    if value is None:
        return 0
    return max(1, round(value / highest * room)) if highest else 1


def bar(share: float, width: int) -> str:
    """
    >>> bar(0.5, 5), bar(0.001, 5)
    ('██▌', '▏')
    """
    eighths = round(share * width * 8)
    full, rest = divmod(max(1, eighths) if share > 0 else 0, 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()


def percentile_ms(bounds_ms: Sequence[float], counts: Sequence[int], percent: float) -> float | None:
    """From a histogram, spread evenly within a bucket; above the last bound nothing is known but that bound.

    >>> percentile_ms([1.0, 2.0], [50, 50, 0], 75)
    1.5
    """
    wanted, seen = sum(counts) * percent / 100, 0.0
    if not wanted:
        return None
    low = 0.0
    for high, count in zip(bounds_ms, counts, strict=False):
        if count and seen + count >= wanted:
            return low + (high - low) * (wanted - seen) / count
        seen, low = seen + count, high
    return low
