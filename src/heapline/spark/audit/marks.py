"""Events that concern a topic and not one of its messages: purges, throttling, settings, prepared batches.

A `Mark` is one such event (the rows of a commit are one event). A `Reach` describes the rows of one partition. There
are few of both, however many events there are. They are collected before messages are judged, and every task knows
them. Each table of events yields one row per mark and one row for everything else of a partition, whose `kind` is null.
Counts add up, so a table of events may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from heapline.contract.config import TopicConfig
from heapline.spark.audit.ranks import NEVER, Exclusion

KINDS = ("purged", "throttled", "config_changed", "batch_prepared", "batch_committed", "batch_aborted")


class Mark(NamedTuple):
    topic: str
    partition: int
    kind: str
    batch_id: str | None
    details: str | None
    unit: int
    offset: int  # of its first row
    rows: int
    named: int  # rows that name a message
    messages: int  # messages that it counts without naming them

    def fields(self) -> dict[str, Any]:
        """Return the event's details."""
        found: dict[str, Any] = msgspec.json.decode(self.details or "{}")
        return found


class Reach(NamedTuple):
    topic: str
    partition: int
    rows: int
    first: int  # offset
    last: int
    last_unit: int
    first_lease: int  # unit; NEVER: there is none
    wall_ahead: int  # ms that the machine's clock was ahead of the journal's


def exclusions_of(marks: Sequence[Mark], reaches: Sequence[Reach]) -> list[Exclusion]:
    """Return when partitions of a topic may have been excluded from pops.

    Unless the events begin with the topic, it is unknown whether a partition was excluded at their start. It was not
    once it delivered a message or was included again.
    """
    found: list[Exclusion] = []
    for reach in reaches:
        mine = sorted(
            (m for m in marks if m.kind == "throttled" and m.partition == reach.partition), key=lambda mark: mark.offset
        )
        since = None if reach.first == 0 else -1
        if since is not None and reach.first_lease < NEVER and (not mine or reach.first_lease < mine[0].unit):
            found.append(Exclusion(reach.partition, since, reach.first_lease))
            since = None
        for mark in mine:
            if mark.fields()["throttled"]:
                since = mark.unit if since is None else since
            else:
                found.append(Exclusion(reach.partition, mark.unit if since is None else since, mark.unit))
                since = None
        if since is not None:
            found.append(Exclusion(reach.partition, since, NEVER - 1))
    return found


def settings_of(marks: Sequence[Mark], now: TopicConfig | None) -> tuple[list[TopicConfig], int]:
    """Return all settings that were in force, and the unit from which on they are known.

    The settings before the first recorded change are unknown.
    """
    changes = sorted((m for m in marks if m.kind == "config_changed"), key=lambda m: m.unit)
    found = [msgspec.convert(m.fields()["config"], TopicConfig) for m in changes]
    since = changes[0].unit + 1 if changes else -1
    return ([*found, now] if now is not None and not found else found) or [], since


_KEYS = ("topic", "partition", "kind", "batch_id", "details", "unit", "own")
_SUMS = {
    "rows": "sum", "first": "min", "last": "max", "named": "sum", "count": "max", "last_unit": "max",
    "first_lease": "min", "ahead": "max",
}  # fmt: skip


def collect_marks(events: Any) -> Any:
    """Return a table with `_KEYS` and `_SUMS`, from a table with the columns of the view."""
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
    # Grouping by columns that are all null is expensive, so these columns are added afterwards.
    others = _summed(others, _KEYS[:2])
    nulls = {name: pa.nulls(others.num_rows, table.schema.field(name).type) for name in _KEYS[2:]}
    return pa.concat_tables([_summed(marks, _KEYS), _with(others, **nulls).select([*_KEYS, *_SUMS])])


def _millis(moments: Any) -> Any:
    """Return ms. Times are not before 1970, so truncation equals floor."""
    return pc.divide(pc.cast(moments, pa.int64()), 1000)


def _with(table: Any, **columns: Any) -> Any:
    there = {name: table[name] for name in table.column_names}
    return pa.table({**there, **columns})


def _summed(table: Any, keys: Sequence[str]) -> Any:
    found = table.group_by(list(keys)).aggregate([*_SUMS.items()])
    made = [f"{name}_{how}" for name, how in _SUMS.items()]
    return found.select([*keys, *made]).rename_columns([*keys, *_SUMS])


def merge_marks(tables: Sequence[Any]) -> tuple[list[Mark], list[Reach]]:
    """Merge tables of `collect_marks`."""
    if not tables:
        return [], []
    table = pa.concat_tables(tables)
    marks = [
        Mark._make([*(row[name] for name in (*_KEYS[:-1], "first", "rows", "named")), row["count"] or 0])
        for row in _summed(table, _KEYS).to_pylist()
        if row["kind"] is not None
    ]
    reaches = []
    for row in _summed(table, _KEYS[:2]).to_pylist():
        known = (row[name] for name in ("topic", "partition", "rows", "first", "last", "last_unit"))
        first_lease = NEVER if row["first_lease"] is None else row["first_lease"]
        reaches.append(Reach._make([*known, first_lease, row["ahead"]]))
    return marks, reaches
