"""Text and HTML for reports: numbers as people read them, untrusted text made safe, and one page of sections.

Keys, reasons and topic names come from producers. Characters that a terminal would obey, that reverse the writing
direction, or that XML forbids are shown as escapes.

A page is a single file with no scripts, fonts or pictures from elsewhere, and its content security policy forbids them.
It is also well-formed XML, so tests can parse it strictly. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000
LONGEST = 80  # characters of untrusted text


def printable(text: str, longest: int = LONGEST) -> str:
    """Escape characters that are not printable, and shorten the text.

    >>> printable("tea\\x1b[31m"), printable("x" * 9, longest=5)
    ('tea\\\\x1b[31m', 'xxxx…')
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def count(number: int) -> str:
    """Format an integer.

    >>> count(200000)
    '200 000'
    """
    return f"{number:,}".replace(",", " ")


def amount(value: float) -> str:
    """Format a number that may have decimals.

    >>> amount(1234.5), amount(12.34), amount(0.5), amount(3.0)
    ('1 234', '12.3', '0.5', '3')
    """
    return count(round(value)) if abs(value) >= 100 else f"{value:.3g}"


def duration(ms: float | None) -> str:
    """Format a duration in ms.

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
    raise AssertionError("unreachable")


def moment(ms: float) -> str:
    """Format a time in ms since 1970.

    >>> moment(0)
    '1970-01-01 00:00:00Z'
    """
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def share(part: float, whole: float) -> str:
    """Format a percentage.

    >>> share(1, 3), share(0, 0), share(1, 1000), share(1, 9999)
    ('33 %', '–', '0.1 %', '< 0.1 %')
    """
    if not whole:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


@dataclass(frozen=True)
class Section:
    title: str
    note: str  # one or two sentences that explain the numbers
    names: tuple[str, ...]  # of the columns
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()  # right-aligned columns
    plot: str = ""  # an <svg>, if there is one


STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6470; --paper: #ffffff; --rule: #d9dde3; --bar: #2a6fb0;
  --s0: #1f66ad; --s1: #b3530a; --s2: #2a7d3f; --s3: #8a3fa8; --s4: #a3243b; --s5: #4c5564; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b1; --paper: #14171b; --rule: #343b45;
  --bar: #5aa2e0; --s0: #6db3f2; --s1: #f0a35e; --s2: #72c98a; --s3: #cf9be6; --s4: #f28b9b; --s5: #b4bdc9; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 46rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .2rem; }
p { margin: .2rem 0 .8rem; color: var(--soft); overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; font-size: 13px; font-family: inherit; overflow: visible; }
svg text { fill: var(--ink); } .grid { stroke: var(--rule); } .range { stroke: var(--soft); stroke-width: 2; }
.bar { fill: var(--bar); } .line { fill: none; stroke-width: 2; } .goal { stroke: var(--ink); stroke-dasharray: 2 4; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); stroke-dasharray: 7 3; } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); stroke-dasharray: 2 3; } .s4 { stroke: var(--s4); stroke-dasharray: 10 3 2 3; }
.s5 { stroke: var(--s5); stroke-dasharray: 4 4; } .mark { stroke-dasharray: none; stroke-width: 1.5; }
.mark.s0 { fill: var(--s0); } .mark.s1 { fill: var(--s1); } .mark.s2 { fill: var(--s2); } .mark.s3 { fill: var(--s3); }
.mark.s4 { fill: var(--s4); } .mark.s5 { fill: var(--s5); }
.wide { overflow-x: auto; max-height: 26rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .9rem; min-width: 60%; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; vertical-align: top; }
th, .right { white-space: nowrap; } .right { text-align: right; } @media print { .wide { max-height: none; } }
"""


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    body = "".join(_section(section) for section in sections)
    return (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>{_escaped(title)}</title><style>{STYLE}</style></head><body><main>\n"
        f"<h1>{_escaped(title)}</h1><p>{_escaped(lead)}</p>\n{body}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    head = "".join(f'<th scope="col"{_side(i, section)}>{_escaped(n)}</th>' for i, n in enumerate(section.names))
    rows = "".join(
        "<tr>" + "".join(f"<td{_side(i, section)}>{_escaped(cell)}</td>" for i, cell in enumerate(row)) + "</tr>\n"
        for row in section.rows
    )
    title = _escaped(section.title)
    # A scrollable region must be reachable with the keyboard, and then needs a label.
    table = (
        f'<div class="wide" tabindex="0" role="region" aria-label="{title}, as a table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>"
    )
    return f"<section><h2>{title}</h2><p>{_escaped(section.note)}</p>\n{section.plot}\n{table}</section>\n"


def _side(index: int, section: Section) -> str:
    return ' class="right"' if index in section.right else ""


def _escaped(text: str) -> str:
    return escape(printable(text, 1000))
