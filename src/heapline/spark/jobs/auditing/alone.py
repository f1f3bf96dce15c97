"""The audit of a table in this process, without Spark: for a few million events, and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from heapline.spark.jobs.auditing import histories as H
from heapline.spark.jobs.auditing.concluding import Standing, conclude, known, rank
from heapline.spark.jobs.auditing.marks import KINDS, Mark, Reach
from heapline.spark.jobs.auditing.ranks import NEVER
from heapline.spark.jobs.auditing.steps import Steps, from_arrow, joined
from heapline.spark.jobs.auditing.verdicts import AuditResult


def audit_table(
    events: Any, configs: Mapping[str, Any], *, closing: Mapping[str, Mapping[int, Standing]] | None = None,
    opening: Steps | None = None, examples_max: int = 10,
) -> AuditResult:  # fmt: skip
    """`events`: an Arrow table with the columns `steps.NEEDS` of the view. `configs`: settings by topic."""
    names = sorted(set(events["topic"].to_pylist()))
    rows = events.select([*_COLUMNS, "timestamp", "wall_time"]).to_pylist()
    facts = known(names, _marks(rows), _reaches(rows), configs, closing, opened=opening is not None)
    steps = from_arrow(events, {name: number for number, name in enumerate(names)})
    if opening is not None:
        steps = joined([steps, opening])
    looked = [H.look(steps.take(steps.topic == n), n, t, examples_max) for n, t in enumerate(facts.topics)]
    ranked = [
        rank(part.intervals, part.topic, order, examples_max)
        for part, order in zip(looked, facts.orders, strict=True) if order is not None and part.intervals is not None
    ]  # fmt: skip
    return conclude(facts, looked, ranked, examples_max)


_COLUMNS = ("topic", "partition", "kind", "batch_id", "details", "unit", "offset", "id", "count")


def _marks(rows: list[dict[str, Any]]) -> list[Mark]:
    found: dict[tuple[Any, ...], Mark] = {}
    for row in rows:
        if row["kind"] in KINDS:
            own = None if row["kind"] == "batch_committed" else row["offset"]
            said: list[Any] = [row[name] for name in _COLUMNS[:6]]
            key = (*said, own)
            mark = found.get(key) or Mark._make([*said, row["offset"], 0, 0, row["count"] or 0])
            first, named = min(mark.offset, row["offset"]), mark.named + (row["id"] is not None)
            found[key] = mark._replace(offset=first, rows=mark.rows + 1, named=named)
    return list(found.values())


def _reaches(rows: list[dict[str, Any]]) -> list[Reach]:
    by_place: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_place.setdefault((row["topic"], row["partition"]), []).append(row)
    return [_reach(place, mine) for place, mine in by_place.items()]


def _reach(place: tuple[str, int], rows: list[dict[str, Any]]) -> Reach:
    offsets = np.array([row["offset"] for row in rows])
    first_lease = min((row["unit"] for row in rows if row["kind"] == "leased"), default=NEVER)
    ahead = max(round((row["wall_time"] - row["timestamp"]).total_seconds() * 1000) for row in rows)
    last_unit = max(row["unit"] for row in rows)
    return Reach(*place, len(rows), int(offsets.min()), int(offsets.max()), last_unit, first_lease, ahead)
