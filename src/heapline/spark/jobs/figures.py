"""How figures read, and how foreign text is made harmless before it is shown: the same in a terminal and on a page.

Keys, reasons and names of topics come from whoever sent messages. What a terminal would obey, what turns the direction
of writing round, and what no XML may hold is shown by its number. Knows neither Spark nor HTML.
"""

from __future__ import annotations

from datetime import UTC, datetime

_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000
LONGEST = 80  # characters of foreign text


def harmless(text: str, longest: int = LONGEST) -> str:
    """
    >>> harmless("tea\\x1b[31m"), harmless("x" * 9, longest=5)
    ('tea\\\\x1b[31m', 'xxxx…')
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def count(number: int) -> str:
    """
    >>> count(200000)
    '200 000'
    """
    return f"{number:,}".replace(",", " ")


def amount(value: float) -> str:
    """A number that need not be whole, as short as it is still telling.

    >>> amount(1234.5), amount(12.34), amount(0.5), amount(3.0)
    ('1 234', '12.3', '0.5', '3')
    """
    return count(round(value)) if abs(value) >= 100 else f"{value:.3g}"


def duration(ms: float | None) -> str:
    """
    >>> duration(None), duration(0), duration(0.25), duration(12), duration(2500), duration(90_000)
    ('–', '0 ms', '0.25 ms', '12 ms', '2.5 s', '1m 30s')
    >>> duration(7_200_000), duration(100 * 3_600_000), duration(59_990), duration(3_599_900)
    ('2h', '4d 4h', '1m', '1h')
    """
    if ms is None:
        return "–"
    if ms < _SECOND:
        return f"{ms:.3g} ms" if ms < 10 else f"{ms:.0f} ms"
    if ms < _MINUTE and (text := f"{ms / _SECOND:.3g}") != "60":
        return f"{text} s"
    for large, small, names in ((_MINUTE, _SECOND, "ms"), (_HOUR, _MINUTE, "hm"), (_DAY, _HOUR, "dh")):
        many, few = divmod(round(ms / small), large // small)
        if large == _DAY or many * large < {_MINUTE: _HOUR, _HOUR: _DAY}[large]:
            return f"{many}{names[0]}" + (f" {few}{names[1]}" if few else "")
    raise AssertionError("days have no end")


def moment(ms: float) -> str:
    """
    >>> moment(0)
    '1970-01-01 00:00:00Z'
    """
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def share(part: float, whole: float) -> str:
    """
    >>> share(1, 3), share(0, 0), share(1, 1000), share(1, 9999)
    ('33 %', '–', '0.1 %', '< 0.1 %')
    """
    if not whole:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"
