"""What concerns whole topics, out of tables of events: each table gives a few rows, and those of all are put together.

One row for every mark (marks.py; the rows of a commit are one) and one for everything else of a partition, told apart
by `kind`, which is null in the latter. What is counted adds up, so a table may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from heapline.spark.jobs.auditing.marks import KINDS, Mark, Reach
from heapline.spark.jobs.auditing.ranks import NEVER

_KEYS = ("topic", "partition", "kind", "batch_id", "details", "unit", "own")
_SUMS = {
    "rows": "sum", "first": "min", "last": "max", "named": "sum", "count": "max", "last_unit": "max",
    "first_lease": "min", "ahead": "max",
}  # fmt: skip


def gather(events: Any) -> Any:
    """A table with `_KEYS` and `_SUMS`, of a table with the columns of the view."""
    kind, offset, unit = events["kind"], events["offset"], events["unit"]
    is_mark = pc.is_in(kind, pa.array(KINDS))
    none = pa.scalar(None, pa.int64())
    facts = {
        "rows": pa.repeat(1, events.num_rows), "first": offset, "last": offset,
        "named": pc.cast(pc.is_valid(events["id"]), pa.int64()), "count": pc.cast(events["count"], pa.int64()),
        "last_unit": unit, "first_lease": pc.if_else(pc.equal(kind, "leased"), unit, none),
        "ahead": pc.subtract(_millis(events["wall_time"]), _millis(events["timestamp"])),
    }  # fmt: skip
    keys = {name: events[name] for name in _KEYS[:-1]}
    table = pa.table({**keys, "own": offset, **facts})
    marks, others = table.filter(is_mark), table.filter(pc.invert(is_mark))
    committed = pc.equal(marks["kind"], "batch_committed")
    marks = _with(marks, own=pc.if_else(committed, none, marks["own"]))
    # Grouping by columns that are all null would cost as much as by any: the others are put in afterwards.
    others = _summed(others, _KEYS[:2])
    nulls = {name: pa.nulls(others.num_rows, table.schema.field(name).type) for name in _KEYS[2:]}
    return pa.concat_tables([_summed(marks, _KEYS), _with(others, **nulls).select([*_KEYS, *_SUMS])])


def _millis(moments: Any) -> Any:
    """Moments are not before 1970, so what is cut off is what a floor would cut off."""
    return pc.divide(pc.cast(moments, pa.int64()), 1000)


def _with(table: Any, **columns: Any) -> Any:
    there = {name: table[name] for name in table.column_names}
    return pa.table({**there, **columns})


def _summed(table: Any, keys: Sequence[str]) -> Any:
    found = table.group_by(list(keys)).aggregate([*_SUMS.items()])
    made = [f"{name}_{how}" for name, how in _SUMS.items()]
    return found.select([*keys, *made]).rename_columns([*keys, *_SUMS])


def put_together(tables: Sequence[Any]) -> tuple[list[Mark], list[Reach]]:
    """What the tables add up to."""
    if not tables:
        return [], []
    rows = _summed(pa.concat_tables(tables), _KEYS).to_pylist()
    marks = [
        Mark(r["topic"], r["partition"], r["kind"], r["batch_id"], r["details"], r["unit"], r["first"], r["rows"],
             r["named"], r["count"] or 0)
        for r in rows if r["kind"] is not None
    ]  # fmt: skip
    return marks, _reaches(rows)


def _reaches(rows: Sequence[dict[str, Any]]) -> list[Reach]:
    found: dict[tuple[str, int], Reach] = {}
    for r in rows:
        lease = NEVER if r["first_lease"] is None else r["first_lease"]
        reach = Reach(
            r["topic"], r["partition"], r["rows"], r["first"], r["last"], r["last_unit"], lease, r["ahead"]
        )  # fmt: skip
        was = found.get((reach.topic, reach.partition), reach._replace(rows=0))
        found[reach.topic, reach.partition] = Reach(
            reach.topic, reach.partition, was.rows + reach.rows, min(was.first, reach.first),
            max(was.last, reach.last), max(was.last_unit, reach.last_unit), min(was.first_lease, reach.first_lease),
            max(was.wall_ahead, reach.wall_ahead),
        )  # fmt: skip
    return list(found.values())
