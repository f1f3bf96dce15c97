"""The lake's Delta tables: where each one ends, commits that continue at that end, and which journal it is from.

The end of a table is stored in Delta's own transaction identifiers, which survive checkpoints, compaction and clean-up:
`heapline:TOPIC#PARTITION` has the end as its version, `heapline:TOPIC` the topic's incarnation. Every commit of a topic
carries all of them. Delta rejects the second of two commits that use the same identifier on the same version of the
table; that writer then reads the table again and writes the rest.

An incarnation distinguishes the topics of one broker, not those of two brokers or those before and after a data
directory was recreated. So `check_same` compares one row that both the journal and the table should have.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from heapline.contract.errors import BadRequest, ConflictError
from heapline.contract.message import from_ms
from heapline.spark.lake.claims import Claim, Extent, LakeMoved, check_continues, claim_of
from heapline.spark.lake.files import PARTITIONED_BY, NewFile, lake_path, namespace_of, sync_path, table_schema
from heapline.spark.topic_log import TopicLog

APP = "heapline"
#: How many unrelated commits (compaction, other topics) may come in between.
RETRIES = 50
LAST_CHECKPOINT = "_last_checkpoint"  # Delta's file that readers start with


def delta() -> Any:
    try:
        import deltalake
    except ImportError:
        raise ImportError("deltalake is not installed; run `pip install 'heapline[lake]'`") from None
    return deltalake


class LakeFilesGone(ConflictError):
    """Files that were to be committed no longer exist."""


@dataclass(frozen=True)
class FileInLake:
    uri: str
    topic: str
    date: str
    nbytes: int
    rows: int


class LakeTable:
    """One version of a table. What is read from it and committed to it is based on that version."""

    def __init__(self, view: str, root: str, table: Any) -> None:
        self.view, self.root, self.table = view, root, table

    @property
    def version(self) -> int:
        return int(self.table.version())

    def extent(self, topic: str) -> Extent | None:
        """Return what the table has of a topic, or None if it has nothing."""
        incarnation = self.table.transaction_version(f"{APP}:{topic}")
        if not incarnation:
            return None
        ends: dict[int, int] = {}
        while (end := self.table.transaction_version(f"{APP}:{topic}#{len(ends)}")) is not None:
            ends[len(ends)] = end
        return Extent(incarnation, ends)

    def files(self, topics: Sequence[str] | None = None) -> list[FileInLake]:
        import pyarrow as pa

        actions = pa.table(self.table.get_add_actions(flatten=True)).to_pydict()
        found = []
        for number, path in enumerate(actions["path"]):
            topic = actions["partition.topic"][number]
            if topics is None or topic in topics:
                day, rows = actions["partition.date"][number], actions["num_records"][number]
                uri = f"{self.root}/{unquote(path)}"
                found.append(FileInLake(uri, topic, str(day), actions["size_bytes"][number], rows or 0))
        return found

    def commit(self, claims: Mapping[str, Claim], files: Iterable[NewFile]) -> None:
        """Commit files atomically. Raises LakeMoved if another writer has committed rows of a claim."""
        files = list(files)
        for topic, claim in claims.items():
            check_continues(topic, self.extent(topic), claim)
        self._check_there(files)
        ends = [t for topic, claim in claims.items() for t in transactions(APP, topic, claim.incarnation, claim.ends)]
        properties = delta().CommitProperties(
            custom_metadata={APP: {topic: _metadata(claim) for topic, claim in claims.items()}},
            max_commit_retries=RETRIES,
            app_transactions=ends,
        )
        self._commit([_added(file) for file in files], properties, claims)
        _sync_log(self.root, self.version - 1)

    def append(self, actions: list[Any], properties: Any) -> None:
        append_actions(self.table, actions, PARTITIONED_BY, properties)

    def _check_there(self, files: Sequence[NewFile]) -> None:
        """Raise an error if files are missing: maintenance removes old files that no commit names."""
        gone = [file.path for file in files if not os.path.exists(f"{self.root}/{file.path}")]
        if gone:
            raise LakeFilesGone(
                f"nothing was committed: {len(gone)} of {len(files)} new files for the lake's {self.view} were "
                f"removed, such as {gone[0]}. Archive again. If `lake maintain` removed them, use a --vacuum that is "
                "longer than an archive takes"
            )

    def _commit(self, actions: list[Any], properties: Any, claims: Mapping[str, Claim]) -> None:
        try:
            self.append(actions, properties)
        except delta().exceptions.CommitFailedError as error:
            now = open_table(os.path.dirname(self.root), self.view)
            if now is None or all(now.extent(topic) == self.extent(topic) for topic in claims):
                raise
            raise LakeMoved(f"another writer has committed to the lake's {self.view}: {error}") from None


def _sync_log(root: str, after: int) -> None:
    """Sync the commits after this version, and the checkpoints that Delta made of them.

    The journal may delete rows as soon as their commit is reported, so the commit must be durable before.
    """
    log = f"{root}/_delta_log"
    for name in os.listdir(log):
        number, _, kind = name.partition(".")
        is_complete = kind.endswith(("json", "parquet"))  # not a file that is being written
        if name == LAST_CHECKPOINT or (is_complete and number.isdigit() and int(number) > after):
            sync_path(f"{log}/{name}")
    for folder in (log, root, os.path.dirname(root)):
        sync_path(folder)


def open_table(lake_dir: str | os.PathLike[str], view: str) -> LakeTable | None:
    """Return the table, or None if it does not exist yet."""
    root = f"{lake_path(os.fspath(lake_dir))}/{view}"
    if not delta().DeltaTable.is_deltatable(root):
        return None
    table = delta().DeltaTable(root)
    if table.metadata().partition_columns != list(PARTITIONED_BY):
        raise BadRequest(f"{root!r} is a Delta table that `heapline pipeline archive` did not create")
    return LakeTable(view, root, table)


def ensure_table(lake_dir: str | os.PathLike[str], view: str) -> LakeTable:
    """Return the table. Create it if it does not exist, and add columns that are new in the view."""
    found = open_table(lake_dir, view)
    if found is not None and not _missing_columns(found):
        return found
    root = f"{lake_path(os.fspath(lake_dir))}/{view}"
    os.makedirs(root, exist_ok=True)
    with _locked(root):
        found = open_table(lake_dir, view)
        if found is None:
            _create(root, view)
        elif missing := _missing_columns(found):
            found.table.alter.add_columns(missing)
        _sync_log(root, -1)
    return require_table(lake_dir, view)


@contextlib.contextmanager
def _locked(root: str) -> Iterator[None]:
    """Let one process at a time create or alter a table.

    Delta would let two archives that start together both do it, and the second would invalidate the first one's commit.
    """
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the process ends, however it ends
        yield
    finally:
        os.close(handle)


def _create(root: str, view: str) -> None:
    delta().DeltaTable.create(
        root,
        delta().Schema.from_arrow(table_schema(view)),
        mode="ignore",
        partition_by=list(PARTITIONED_BY),
        name=f"heapline_{view}",
        description=f"Heapline's log, view {view}",
    )


def _missing_columns(found: LakeTable) -> list[Any]:
    """Return the columns that the view has and the table lacks. They are null in existing rows."""
    wanted = delta().Schema.from_arrow(table_schema(found.view)).fields
    there = {field.name for field in found.table.schema().fields}
    return [field for field in wanted if field.name not in there]


def require_table(lake_dir: str | os.PathLike[str], view: str) -> LakeTable:
    """Return the table. Raises BadRequest if it does not exist."""
    found = open_table(lake_dir, view)
    if found is None:
        raise BadRequest(
            f"no lake with {view} exists at {os.fspath(lake_dir)!r}; create it with `heapline pipeline archive`"
        )
    return found


def missing_rows(table: LakeTable | None, log: TopicLog, *, fail_on_loss: bool = True) -> Claim:
    """Return the rows of a topic that a table lacks, up to the durable end of the journal."""
    starts, topic = log.starts(), log.ref.topic
    journal = {p: (starts[p], end) for p, end in log.ends().items()}
    extent = None if table is None else table.extent(topic)
    return claim_of(topic, extent, log.ref.incarnation, journal, fail_on_loss=fail_on_loss)


def _metadata(claim: Claim) -> dict[str, Any]:
    """Return the commit's metadata for Delta's history."""
    ranges = {str(p): list(r) for p, r in claim.ranges.items()}
    metadata: dict[str, Any] = {"incarnation": claim.incarnation, "ranges": ranges}
    return {**metadata, "lost": {str(p): list(r) for p, r in claim.lost.items()}} if claim.lost else metadata


def append_actions(table: Any, actions: list[Any], partitioned_by: Sequence[str], properties: Any) -> None:
    """Commit actions to a Delta table."""
    table.create_write_transaction(
        actions,
        mode="append",
        schema=table.schema(),
        partition_by=list(partitioned_by),
        commit_properties=properties,
    )


def transactions(app: str, topic: str, incarnation: int, ends: Mapping[int, int]) -> list[Any]:
    """Return the transaction identifiers that store the end of a topic."""
    versions = {f"{app}:{topic}": incarnation, **{f"{app}:{topic}#{p}": end for p, end in ends.items()}}
    return [delta().Transaction(name, version) for name, version in versions.items()]


def _added(file: NewFile) -> Any:
    from deltalake.transaction import AddAction

    values = {"namespace": namespace_of(file.topic), "topic": file.topic, "date": file.date}
    return AddAction(file.path, file.nbytes, values, int(time.time() * 1000), True, file.stats)


LATEST_DAY = "9999-12-31"


class OtherJournal(BadRequest):
    """A row of the journal differs from the lake's row at the same offset."""


def check_same(table: LakeTable, log: TopicLog) -> None:
    """Raise OtherJournal unless the journal is the one that the table was made from.

    Compares the first readable row whose unit and time the journal's index knows, in the table of events only. Rows of
    a day before the lake's first day cannot be compared, because maintenance may have dropped that day.
    """
    extent = table.extent(log.ref.topic)
    if extent is None or table.view != "events":
        return
    index, starts = log.index(), log.starts()
    for partition, end in extent.ends.items():
        mine = index.of(partition)
        # The journal may have rows below its start that are not readable, so the lake may lack them.
        shown = mine[mine["first_offset"] >= starts.get(partition, 0)]
        if len(shown) and int(shown["first_offset"][0]) < end:
            _compare(table, log.ref.topic, partition, shown[0])
            return


def _compare(table: LakeTable, topic: str, partition: int, entry: Any) -> None:
    import pyarrow.dataset as ds

    offset, unit, at = int(entry["first_offset"]), int(entry["unit"]), from_ms(int(entry["time"]))
    files, day = table.files([topic]), at.date().isoformat()
    if day < min((file.date for file in files), default=LATEST_DAY):
        return
    near = [file.uri for file in files if file.date == day]
    wanted = (ds.field("partition") == partition) & (ds.field("offset") == offset)
    rows = ds.dataset(near).to_table(columns=["unit", "timestamp"], filter=wanted).to_pylist() if near else []
    if rows != [{"unit": unit, "timestamp": at}]:
        raise OtherJournal(
            f"row {offset} of partition {partition} of topic {topic!r} differs from the lake's: the journal is from "
            "another broker, or its data directory was recreated. Archive it to another lake, or remove the topic's "
            f"rows from this one: heapline pipeline lake drop --topic {topic}"
        )
