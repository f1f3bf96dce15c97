"""Keep lifecycles up to date: a Delta table with one row per message, extended by each run with the newer events.

A run reads only new events and the rows of messages that have not ended. It writes new rows for those and for new
messages. Executors write the files, so they must share the directory.

Messages that have ended are added once and never changed. The others are a few files that each commit replaces: in one
step it adds the rows of a run and removes the open rows they were made from. The end of the table is stored in Delta's
transaction identifiers, which survive checkpoints: `lifecycles:TOPIC#PARTITION` has the offset as its version,
`lifecycles:TOPIC` the topic's incarnation. A commit succeeds only on the version that it was made from. So the second
of two concurrent runs is rejected, and a killed run leaves only files that no commit names (`vacuum` removes them).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from pyspark.sql import functions as F

from heapline.contract.config import short
from heapline.contract.errors import BadRequest, ConflictError
from heapline.spark.jobs.lake import in_ranges, journal_rows, offset_ranges, topic_rows
from heapline.spark.jobs.lifecycles import COLUMNS, MARK_NEEDS, NEEDS, lifecycles
from heapline.spark.lake.claims import Extent
from heapline.spark.lake.files import sync_path
from heapline.spark.lake.tables import append_actions, delta, transactions
from heapline.spark.schema import arrow_types
from heapline.spark.target import subscribed
from heapline.spark.topic_log import DataLost

APP = "lifecycles"
PARTITIONED_BY = ("topic", "is_over")
_TYPES = {
    "partition": "int", "attempts": "int", "retries": "int", "lease_expiries": "int", "is_over": "boolean",
    "topic": "string", "message_id": "string", "outcome": "string", "reason": "string", "batch_id": "string",
}  # fmt: skip
TYPES = {name: _TYPES.get(name, "timestamp" if name.endswith("_at") else "bigint") for name in COLUMNS}
STORED = [name for name in COLUMNS if name not in PARTITIONED_BY]


@dataclass(frozen=True)
class KeptResult:
    topic: str
    events: int  # new rows of the log
    rows: int  # rows written, for new and for changed messages
    ends: Mapping[int, int]  # by partition: the end of the table


def keep_lifecycles(
    spark: Any, where: Mapping[str, str] | None, topic: str, out_dir: str, *, lake: str | None = None
) -> KeptResult:
    """Update the table in `out_dir`. Events that the journal no longer has are read from the `lake`, if given."""
    name = short(topic)
    table = LifecycleTable(out_dir, TYPES)
    incarnation, starts, ends = _available(spark, where, name, lake)
    extent = table.extent(name, max(ends, default=-1) + 1)
    if extent is not None and extent.incarnation != incarnation:
        raise BadRequest(f"topic {name!r} was deleted and created again; keep its lifecycles in another directory")
    done = {} if extent is None else extent.ends
    if lake is not None and where is not None and any(starts[p] > done.get(p, 0) for p in ends):
        starts = _starts_with_lake(spark, where, name, lake, ends)
    first = {p: starts[p] if extent is None else done.get(p, 0) for p in ends}
    lost = [p for p in ends if starts[p] > first[p]]
    if lost:
        remedy = "use a lake" if lake is None else "the lake lacks them too, so start another table"
        raise DataLost(f"events of topic {name!r} in partitions {lost} were reclaimed before they were read; {remedy}")
    new = sum(ends[p] - first[p] for p in ends)
    if not new:
        return KeptResult(name, 0, 0, done)
    events, marks = _new_events(spark, where, name, lake, first, ends)
    before = read_lifecycles(spark, out_dir, topic=name, over=False) if extent is not None else None
    folder = table.new_folder()
    with _micros(spark):
        rows = lifecycles(events, before, marks).select(*STORED, "is_over")
        rows.write.partitionBy("is_over").parquet(f"{table.root}/{folder}")
    written = table.commit(name, folder, Extent(incarnation, ends))
    return KeptResult(name, new, written, ends)


def _available(
    spark: Any, where: Mapping[str, str] | None, topic: str, lake: str | None
) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return the topic's incarnation, and the first offset and the end of each partition."""
    if where is None:
        if lake is None:
            raise BadRequest("no source of events; give options of the format heapline, or a lake")
        found = offset_ranges(topic_rows(spark, None, lake, topic, columns=("partition", "offset")))
        return 0, {p: first for p, (first, _) in found.items()}, {p: end for p, (_, end) in found.items()}
    with subscribed(where, subscribe=topic, view="events") as (subscription, _):
        log = subscription.logs[topic]
        return log.ref.incarnation, dict(log.starts()), dict(log.ends())


def _starts_with_lake(
    spark: Any, where: Mapping[str, str], topic: str, lake: str, ends: Mapping[int, int]
) -> dict[int, int]:
    """Return where lake and journal together begin. Only needed if the journal alone does not go back far enough."""
    found = offset_ranges(topic_rows(spark, where, lake, topic, columns=("partition", "offset")))
    return {p: found[p][0] if p in found else end for p, end in ends.items()}


def _new_events(
    spark: Any,
    where: Mapping[str, str] | None,
    topic: str,
    lake: str | None,
    first: dict[int, int],
    ends: dict[int, int],
) -> tuple[Any, Any]:
    if lake is None:
        assert where is not None
        events = journal_rows(spark, where, topic, columns=NEEDS, start=first, end=ends)
        return events, journal_rows(spark, where, topic, columns=MARK_NEEDS, start=first, end=ends)
    new = in_ranges({p: (first[p], end) for p, end in ends.items()})
    events = topic_rows(spark, where, lake, topic, columns=NEEDS).where(new)
    return events, events


@contextmanager
def _micros(spark: Any) -> Iterator[None]:
    """Write times in microseconds, which every Delta reader understands."""
    name = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(name)
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before)


def read_lifecycles(spark: Any, out_dir: str, *, topic: str | None = None, over: bool | None = None) -> Any:
    """Return the table as a DataFrame with the columns of `lifecycles`."""
    table = LifecycleTable(out_dir, TYPES)
    if not table.exists:
        raise BadRequest(f"{out_dir!r} does not contain lifecycles")
    schema = ", ".join(f"`{name}` {TYPES[name]}" for name in STORED)
    parts = []
    for (name, is_over), files in table.files(None if topic is None else short(topic), over).items():
        rows = spark.read.schema(schema).parquet(*(f"{table.root}/{file.path}" for file in files))
        parts.append(rows.withColumns({"topic": F.lit(name), "is_over": F.lit(is_over)}).select(*COLUMNS))
    empty = spark.createDataFrame([], ", ".join(f"`{name}` {kind}" for name, kind in TYPES.items()))
    return reduce(lambda a, b: a.unionByName(b), parts, empty)


class TableMoved(ConflictError):
    """Another run has updated the table meanwhile; run again."""


class TableFile(NamedTuple):
    path: str
    nbytes: int


class LifecycleTable:
    """One version of the table."""

    def __init__(self, root: str, columns: Mapping[str, str]) -> None:
        """`columns` maps names to types as Spark's SQL spells them."""
        self.root, self._columns = os.path.abspath(root), dict(columns)
        self._table = delta().DeltaTable(self.root) if delta().DeltaTable.is_deltatable(self.root) else None

    @property
    def exists(self) -> bool:
        return self._table is not None

    def extent(self, topic: str, partitions: int) -> Extent | None:
        """Return where the table ends for a topic, or None if it has nothing of it."""
        if self._table is None:
            return None
        incarnation = self._table.transaction_version(f"{APP}:{topic}")
        if incarnation is None:
            return None
        versions = {p: self._table.transaction_version(f"{APP}:{topic}#{p}") for p in range(partitions)}
        return Extent(incarnation, {p: version for p, version in versions.items() if version is not None})

    def files(self, topic: str | None = None, over: bool | None = None) -> dict[tuple[str, bool], list[TableFile]]:
        """Return the files by topic and whether their messages have ended."""
        found: dict[tuple[str, bool], list[TableFile]] = {}
        if self._table is None:
            return found
        import pyarrow as pa

        for row in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
            name, is_over = row["partition.topic"], row["partition.is_over"]
            if topic in (None, name) and over in (None, is_over):
                found.setdefault((name, is_over), []).append(TableFile(row["path"], row["size_bytes"]))
        return found

    def new_folder(self) -> str:
        """Return a new folder for the files of a run."""
        return f"data/{time.time_ns():x}-{os.urandom(4).hex()}"

    def commit(self, topic: str, folder: str, extent: Extent) -> int:
        """Replace the topic's open files with the files of a run; return the number of rows added."""
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import CommitProperties, RemoveAction

        table = self._table or self._create()
        if self._table is None and table.transaction_version(f"{APP}:{topic}") is not None:
            # Another run has created the table, but this run started from an empty one.
            raise TableMoved(f"another run has created the lifecycles of {topic!r} meanwhile; run again")
        now = int(time.time() * 1000)
        added, rows = self._added(topic, folder, now)
        open_files = self.files(topic, over=False).get((topic, False), [])
        removed = [
            RemoveAction(file.path, True, now, file.nbytes, {"topic": topic, "is_over": "false"}) for file in open_files
        ]
        ends = transactions(APP, topic, extent.incarnation, extent.ends)
        properties = CommitProperties(app_transactions=ends, max_commit_retries=0)
        try:
            append_actions(table, [*added, *removed], PARTITIONED_BY, properties)
        except CommitFailedError as error:
            raise TableMoved(f"another run has updated the lifecycles of {topic!r}; run again ({error})") from None
        return rows

    def _create(self) -> Any:
        import pyarrow as pa

        types = arrow_types()
        schema = pa.schema([(name, types[kind]) for name, kind in self._columns.items()])
        return delta().DeltaTable.create(
            self.root, schema, mode="ignore", partition_by=list(PARTITIONED_BY), name="heapline lifecycles"
        )

    def _added(self, topic: str, folder: str, now: int) -> tuple[list[Any], int]:
        import pyarrow.parquet as pq
        from deltalake.transaction import AddAction

        actions, total = [], 0
        for word in ("true", "false"):
            part = f"{folder}/is_over={word}"
            for name in sorted(os.listdir(f"{self.root}/{part}") if os.path.isdir(f"{self.root}/{part}") else ()):
                if not name.endswith(".parquet"):
                    continue
                path = f"{self.root}/{part}/{name}"
                sync_path(path)  # the file must be durable before the commit that names it
                rows = pq.read_metadata(path).num_rows
                values = {"topic": topic, "is_over": word}
                stats = json.dumps({"numRecords": rows})
                actions.append(AddAction(f"{part}/{name}", os.path.getsize(path), values, now, True, stats))
                total += rows
        return actions, total
