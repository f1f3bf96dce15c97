"""`python -m benchmarks report`: draw the published tables as bars next to their peers, one SVG file each.

It reads the rows "…, next to PEER" of docs/benchmarks.md, so charts and tables cannot differ. Each peer has two bars:
its own, and Heapline's in the rounds that alternated with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
ROW = re.compile(
    r"^\| (?P<what>lifecycle|tasks), [^|]*, next to (?P<peer>[a-z][a-z-]*)(?P<cpu>: CPU of [^|]+)? "
    r"\| (?P<ours>[\d,.e+-]+) (?P<unit>[^|]+) \| (?P<theirs>[\d,.e+-]+) [^|]+ \|"
)
#: The beginning of a row's name, and whether it is about CPU → the file and its title.
CHARTS = {
    ("lifecycle", False): ("peers-rate.svg", "Lifecycles per second (more is better)"),
    ("lifecycle", True): ("peers-cpu.svg", "CPU time per lifecycle, server and client (less is better)"),
    ("tasks", False): ("tasks-rate.svg", "Tasks per second (more is better)"),
    ("tasks", True): ("tasks-cpu.svg", "CPU time per task, server and worker (less is better)"),
}
NOT_PEERS = {"the"}  # "next to the wire client"
WIDTH, LEFT, RIGHT = 720, 130, 150
BAR, GAP, TOP = 16, 14, 66
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .ours { fill: #0969da } .theirs { fill: #8c959f }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .ours { fill: #4493f8 } .theirs { fill: #6e7681 }
  }
"""


class Pair(NamedTuple):
    peer: str
    ours: float
    theirs: float
    unit: str


def pairs_of(page: str) -> dict[tuple[str, bool], list[Pair]]:
    """Return the rows next to peers, by chart, in the order of the page."""
    found: dict[tuple[str, bool], list[Pair]] = {}
    for line in page.splitlines():
        row = ROW.match(line)
        if row and row["peer"] not in NOT_PEERS:
            ours, theirs = (float(row[side].replace(",", "")) for side in ("ours", "theirs"))
            chart = found.setdefault((row["what"], row["cpu"] is not None), [])
            chart.append(Pair(row["peer"], ours, theirs, row["unit"]))
    return found


def svg(title: str, pairs: list[Pair]) -> str:
    """Return bars on one scale from zero, labeled with their values."""
    scale = (WIDTH - LEFT - RIGHT) / max(max(pair.ours, pair.theirs) for pair in pairs)
    height = TOP + len(pairs) * (2 * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" width="{WIDTH}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="10" y="22">{escape(title)}</text>',
        '<rect class="ours" x="10" y="36" width="12" height="12"/><text x="28" y="47">Heapline</text>',
        '<rect class="theirs" x="110" y="36" width="12" height="12"/><text x="128" y="47">the peer, same run</text>',
    ]
    for number, pair in enumerate(pairs):
        top = TOP + number * (2 * BAR + GAP)
        lines.append(f'<text x="{LEFT - 10}" y="{top + BAR + 5}" text-anchor="end">{escape(pair.peer)}</text>')
        for kind, value, at in (("ours", pair.ours, top), ("theirs", pair.theirs, top + BAR)):
            lines += bar(kind, value, pair.unit, at, scale)
    return "\n".join([*lines, "</svg>", ""])


def bar(kind: str, value: float, unit: str, top: int, scale: float) -> Iterator[str]:
    width = max(value * scale, 1.0)
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    yield f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR - 2}"/>'
    yield f'<text x="{LEFT + width + 6:.1f}" y="{top + BAR - 4}">{shown} {escape(unit)}</text>'


def draw(page: Path = PAGE) -> list[Path]:
    """Write one file for each chart that the page has rows for; return the files."""
    directory = page.parent / "benchmarks"
    directory.mkdir(exist_ok=True)
    written = []
    for key, pairs in pairs_of(page.read_text(encoding="utf-8")).items():
        name, title = CHARTS[key]
        (directory / name).write_text(svg(title, pairs), encoding="utf-8")
        written.append(directory / name)
    return written
