"""The table in which lifecycles are kept: a Delta table, and commits that only fit where it ends.

Messages that are over are added once and never touched again. Those that are not are a few files, which each commit
replaces: it adds the rows that a run made and removes the open ones that they were made of, all at once. How far the
table goes stands in Delta's transaction identifiers, which outlive checkpoints: `lifecycles:TOPIC#PARTITION` has the
offset as its version, `lifecycles:TOPIC` the topic's incarnation. A commit fits only upon the version that it was made
from; so of two runs at once the second is refused, and a run that was killed has left nothing but files that no
commit names (`vacuum` removes them).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from heapline.errors import BadRequest, ConflictError

APP = "lifecycles"
PARTITIONED_BY = ("topic", "is_over")
_ARROW = {"string": "string", "int": "int32", "bigint": "int64", "boolean": "bool_"}


class TableMoved(ConflictError):
    """Somebody else has brought the table further meanwhile: run again."""


class Kept(NamedTuple):
    """How far a topic's lifecycles go."""

    incarnation: int
    ends: dict[int, int]  # by partition


class OpenFile(NamedTuple):
    path: str
    nbytes: int


class LifecycleTable:
    """One version of the table."""

    def __init__(self, root: str, columns: Mapping[str, str]) -> None:
        """`columns`: name -> type as Spark's SQL spells it."""
        self.root, self._columns = os.path.abspath(root), dict(columns)
        self._delta = _deltalake()
        self._table = self._delta.DeltaTable(self.root) if self._delta.DeltaTable.is_deltatable(self.root) else None

    @property
    def exists(self) -> bool:
        return self._table is not None

    def kept(self, topic: str, partitions: int) -> Kept | None:
        """None: the table has nothing of this topic."""
        if self._table is None:
            return None
        incarnation = self._table.transaction_version(f"{APP}:{topic}")
        if incarnation is None:
            return None
        versions = {p: self._table.transaction_version(f"{APP}:{topic}#{p}") for p in range(partitions)}
        return Kept(incarnation, {p: version for p, version in versions.items() if version is not None})

    def files(self, topic: str | None = None, over: bool | None = None) -> dict[tuple[str, bool], list[OpenFile]]:
        """By topic and whether its messages are over."""
        found: dict[tuple[str, bool], list[OpenFile]] = {}
        if self._table is None:
            return found
        import pyarrow as pa

        for row in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
            name, is_over = row["partition.topic"], row["partition.is_over"]
            if topic in (None, name) and over in (None, is_over):
                found.setdefault((name, is_over), []).append(OpenFile(row["path"], row["size_bytes"]))
        return found

    def folder(self) -> str:
        """A new one for the files of a run."""
        return f"data/{time.time_ns():x}-{os.urandom(4).hex()}"

    def commit(self, topic: str, folder: str, kept: Kept) -> int:
        """Take the files of a run in, for the open ones of this topic; rows that were taken in."""
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import CommitProperties, RemoveAction, Transaction

        table = self._table or self._create()
        if self._table is None and table.transaction_version(f"{APP}:{topic}") is not None:
            # Somebody else has made it meanwhile: what is there now is not what this run began with, which was nothing.
            raise TableMoved(f"the lifecycles of {topic!r} were begun by somebody else meanwhile: run again")
        now = int(time.time() * 1000)
        added, rows = self._added(topic, folder, now)
        open_ones = self.files(topic, over=False).get((topic, False), [])
        removed = [
            RemoveAction(file.path, True, now, file.nbytes, {"topic": topic, "is_over": "false"}) for file in open_ones
        ]
        reached = [Transaction(f"{APP}:{topic}#{p}", end) for p, end in kept.ends.items()]
        said = CommitProperties(
            app_transactions=[Transaction(f"{APP}:{topic}", kept.incarnation), *reached], max_commit_retries=0
        )
        try:
            table.create_write_transaction(
                [*added, *removed], "append", table.schema(), list(PARTITIONED_BY), commit_properties=said
            )
        except CommitFailedError as error:
            raise TableMoved(f"the lifecycles of {topic!r} have gone on meanwhile: run again ({error})") from None
        return rows

    def _create(self) -> Any:
        import pyarrow as pa

        kinds = {name: getattr(pa, kind)() for name, kind in _ARROW.items()} | {"timestamp": pa.timestamp("us", "UTC")}
        schema = pa.schema([(name, kinds[kind]) for name, kind in self._columns.items()])
        return self._delta.DeltaTable.create(
            self.root, schema, mode="ignore", partition_by=list(PARTITIONED_BY), name="heapline lifecycles"
        )

    def _added(self, topic: str, folder: str, now: int) -> tuple[list[Any], int]:
        import pyarrow.parquet as pq
        from deltalake.transaction import AddAction

        found, total = [], 0
        for word in ("true", "false"):
            place = f"{folder}/is_over={word}"
            for name in sorted(os.listdir(f"{self.root}/{place}") if os.path.isdir(f"{self.root}/{place}") else ()):
                if not name.endswith(".parquet"):
                    continue
                path = f"{self.root}/{place}/{name}"
                _sync(path)
                rows = pq.read_metadata(path).num_rows
                values = {"topic": topic, "is_over": word}
                stats = json.dumps({"numRecords": rows})
                found.append(AddAction(f"{place}/{name}", os.path.getsize(path), values, now, True, stats))
                total += rows
        return found, total


def _sync(path: str) -> None:
    """On disk before the commit that names it is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _deltalake() -> Any:
    try:
        import deltalake
    except ImportError:
        raise BadRequest("deltalake is not here: install it with `pip install 'heapline[lake]'`") from None
    return deltalake
