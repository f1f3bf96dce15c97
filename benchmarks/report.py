"""The output formats of a run: a table for people, JSON lines for programs, Markdown for docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Row
from benchmarks.ratios import regressed_from

PEER_COLUMNS = ("peer", "version", "what is durable when it answers")
COLUMNS = ("what", "measured", "baseline", "ratio", "target", "met")
JSON_KEYS = ("name", "value", "unit", "baseline", "ratio", "target", "met")


def json_line(row: Row) -> str:
    return json.dumps({key: getattr(row, key) for key in JSON_KEYS}, ensure_ascii=False)


def figure(value: float | None, unit: str | None = None) -> str:
    if value is None:
        return "–"
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}" if unit else shown


def cells(row: Row, kept: dict[str, float]) -> list[str]:
    before = regressed_from(row, kept)
    marker = f" regression (was {figure(before)}×)" if before is not None else ""
    met = ("missing" if row.about else "error") if row.error else {True: "yes", False: "NO", None: "–"}[row.met]
    return [
        row.name,
        figure(row.value, row.unit),
        figure(row.baseline, row.unit),
        ("–" if row.ratio is None else f"{figure(row.ratio)}×") + marker,
        "–" if row.target is None else str(row.target),
        met,
    ]


def print_table(rows: Sequence[Row], kept: dict[str, float], console: Console) -> None:
    table = Table(header_style="bold")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 0 < index < 4 else "left")
    for row in rows:
        bad = row.error or row.met is False or regressed_from(row, kept) is not None
        style = "red" if bad else "green" if row.met else ""
        table.add_row(
            *(Text(cell, style=style if index == 5 or bad else "") for index, cell in enumerate(cells(row, kept)))
        )
    console.print(table)


def peer_cells(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Show each peer once; for a missing one, the reason."""
    found = {}
    for row in rows:
        if row.about:
            why = f"missing: {row.error}" if row.error else row.about["durability"]
            found[row.about["peer"]] = (row.about["peer"], row.about.get("version") or "–", why)
    return list(found.values())


def print_peers(rows: Sequence[Row], console: Console) -> None:
    if not (peers := peer_cells(rows)):
        return
    table = Table(header_style="bold")
    for column in PEER_COLUMNS:
        table.add_column(column)
    for peer in peers:
        table.add_row(*(Text(cell) for cell in peer))
    console.print(table)


def markdown(rows: Sequence[Row], kept: dict[str, float], title: str) -> str:
    lines = [f"{title}, {datetime.now(UTC):%d %B %Y}. {machine(Path.cwd())}", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|--:|--:|--:|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row, kept)) + " |" for row in rows]
    if peers := peer_cells(rows):
        lines += ["", "| " + " | ".join(PEER_COLUMNS) + " |", "|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in peer) + " |" for peer in peers]
    return "\n".join(lines)


def machine(directory: Path) -> str:
    """Describe the machine for readers of the figures, without its name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{cpu_model()}, {os.cpu_count()} cores, {memory:.0f} GiB RAM; {platform.system()} {platform.release()}; "
        f"{platform.python_implementation()} {platform.python_version()}; {filesystem_of(directory)}; "
        f"load average {os.getloadavg()[0]:.1f}."
    )


def cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


def filesystem_of(directory: Path) -> str:
    """Return the type of the file system that contains the directory: the deepest mount above it."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown file system"
    above = [(len(where), kind) for where, kind in mounts if directory.resolve().is_relative_to(where)]
    return max(above)[1] if above else "unknown file system"
