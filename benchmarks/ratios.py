"""Stores the ratios of an earlier run, so that a regression shows. Quick runs are compared with quick runs only.

CPU time decides: a rate with a row for its CPU is not saved, nor is a percentile of waiting time. Both vary with the
disk and with other work on the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import Row

PERCENTILE = re.compile(r"\bp\d\d\b")
KEPT = Path(__file__).with_name("ratios.json")

#: A ratio may get this much worse before it counts as a regression: shared machines vary by as much.
TOLERANCE = 0.30


def key_of(suite: str, quick: bool) -> str:
    return f"{suite}-quick" if quick else suite


def load(key: str, path: Path = KEPT) -> dict[str, float]:
    kept: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return kept.get(key, {})


def save(key: str, rows: Iterable[Row], path: Path = KEPT, *, is_whole: bool = False) -> None:
    """Save these rows' ratios. Those of rows that did not run stay unchanged, unless a whole suite ran."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    fresh = {row.name: float(f"{row.ratio:.4g}") for row in comparable(rows) if row.ratio is not None}
    kept[key] = fresh if is_whole else {**kept.get(key, {}), **fresh}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose ratios can be saved."""
    rows = list(rows)
    steady = steady_names(row.name for row in rows)
    return [row for row in rows if row.ratio is not None and row.name in steady]


def unguarded(rows: Iterable[Row], kept: dict[str, float]) -> list[str]:
    """Return the names of rows that can be compared, but whose ratio was never saved."""
    return [row.name for row in comparable(rows) if row.name not in kept]


def absent(rows: Iterable[Row], kept: dict[str, float], peers_left_out: Iterable[str]) -> list[str]:
    """Return the names whose ratio is saved but not among these rows of a suite, except those next to other peers."""
    measured = {row.name for row in rows if row.ratio is not None}
    others = [f"next to {peer}" for peer in peers_left_out]
    return [
        name for name in kept if name not in measured and not any(name.partition(":")[0].endswith(o) for o in others)
    ]


def steady_names(names: Iterable[str]) -> set[str]:
    """Return the rows without rates that have a row for their CPU, and without percentiles."""
    given = set(names)
    decided_by_cpu = {name.partition(": CPU")[0] for name in given if ": CPU" in name}
    return {name for name in given - decided_by_cpu if not PERCENTILE.search(name)}


def regressed_from(row: Row, kept: dict[str, float]) -> float | None:
    """Return the saved ratio, if this row's is worse by more than the tolerance."""
    before = kept.get(row.name)
    if before is None or row.ratio is None:
        return None
    keep = 1 - TOLERANCE
    worse = row.ratio < before * keep if row.better == "higher" else row.ratio * keep > before
    return before if worse else None
