"""One HTML page out of sections, each a plot with its table: all in one file, which asks nobody for anything.

No script, no font, no picture from elsewhere; the page says so to the browser, so that even something that slipped in
would not run. It is XML as well, which lets a test read it strictly. All text goes through `harmless` and is escaped.
What the sections say is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from heapline.spark.jobs.figures import harmless


@dataclass(frozen=True)
class Section:
    title: str
    note: str  # what the figures mean, in a sentence or two
    names: tuple[str, ...]  # of the columns
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()  # columns of figures
    plot: str = ""  # an <svg>, if a picture says more


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
        f"<title>{_said(title)}</title><style>{STYLE}</style></head><body><main>\n"
        f"<h1>{_said(title)}</h1><p>{_said(lead)}</p>\n{body}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    head = "".join(f'<th scope="col"{_side(i, section)}>{_said(n)}</th>' for i, n in enumerate(section.names))
    rows = "".join(
        "<tr>" + "".join(f"<td{_side(i, section)}>{_said(cell)}</td>" for i, cell in enumerate(row)) + "</tr>\n"
        for row in section.rows
    )
    title = _said(section.title)
    # What scrolls must be reachable from the keyboard, and then needs a name.
    table = (
        f'<div class="wide" tabindex="0" role="region" aria-label="{title}, as a table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>"
    )
    return f"<section><h2>{title}</h2><p>{_said(section.note)}</p>\n{section.plot}\n{table}</section>\n"


def _side(index: int, section: Section) -> str:
    return ' class="right"' if index in section.right else ""


def _said(text: str) -> str:
    return escape(harmless(text, 1000))
