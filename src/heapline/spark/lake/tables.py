"""The lake's tables: how far each goes, and commits that only fit where it ends.

How far a table goes stands in Delta's own transaction identifiers, which outlive checkpoints, compaction and clean-up:
`heapline:TOPIC#PARTITION` has the end as its version, `heapline:TOPIC` the topic's incarnation. Every commit of a topic
carries them all. Delta lets no two commits with one identifier follow upon the same version of the table, so whoever
comes second is refused, looks again, and brings the rest.
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

from heapline.errors import BadRequest, ConflictError
from heapline.spark.lake.claims import Claim, Kept, LakeMoved, check_fits
from heapline.spark.lake.layout import PARTITIONED_BY, lake_path, namespace_of, table_schema
from heapline.spark.lake.writing import Written, sync_path

APP = "heapline"
#: Commits that touch nothing of ours (compaction, other topics) may come between as often as this.
RETRIES = 50
LAST_CHECKPOINT = "_last_checkpoint"  # Delta's own: where readers begin


def delta() -> Any:
    try:
        import deltalake
    except ImportError:
        raise ImportError("deltalake is not here: install it with `pip install 'heapline[lake]'`") from None
    return deltalake


class LakeFilesGone(ConflictError):
    """Files that were to be committed are not there any more."""


@dataclass(frozen=True)
class FileInLake:
    uri: str
    topic: str
    date: str
    nbytes: int
    rows: int


class LakeTable:
    """One table as it was when it was opened: what is read from it, and what is committed on top of it, rests on that
    version."""

    def __init__(self, view: str, root: str, table: Any) -> None:
        self.view, self.root, self.table = view, root, table

    @property
    def version(self) -> int:
        return int(self.table.version())

    def kept(self, topic: str) -> Kept | None:
        """How far it goes in a topic; None: it has nothing of it."""
        incarnation = self.table.transaction_version(f"{APP}:{topic}")
        if not incarnation:
            return None
        ends: dict[int, int] = {}
        while (end := self.table.transaction_version(f"{APP}:{topic}#{len(ends)}")) is not None:
            ends[len(ends)] = end
        return Kept(incarnation, ends)

    def files(self, topics: Sequence[str] | None = None) -> list[FileInLake]:
        import pyarrow as pa

        told = pa.table(self.table.get_add_actions(flatten=True)).to_pydict()
        found = []
        for number, path in enumerate(told["path"]):
            topic = told["partition.topic"][number]
            if topics is None or topic in topics:
                day, rows = told["partition.date"][number], told["num_records"][number]
                uri = f"{self.root}/{unquote(path)}"
                found.append(FileInLake(uri, topic, str(day), told["size_bytes"][number], rows or 0))
        return found

    def commit(self, claims: Mapping[str, Claim], files: Iterable[Written]) -> None:
        """All or nothing. LakeMoved if rows of a claim are there already, or got there meanwhile."""
        files = list(files)
        for topic, claim in claims.items():
            check_fits(topic, self.kept(topic), claim)
        self._check_there(files)
        properties = delta().CommitProperties(
            custom_metadata={APP: {topic: _told(claim) for topic, claim in claims.items()}},
            max_commit_retries=RETRIES, app_transactions=_transactions(claims),
        )  # fmt: skip
        self._commit([_added(file) for file in files], properties, claims)
        _sync_log(self.root, self.version - 1)

    def _check_there(self, files: Sequence[Written]) -> None:
        """Upkeep takes files of no commit for leftovers once they are old, whoever still means to commit them."""
        gone = [file.path for file in files if not os.path.exists(f"{self.root}/{file.path}")]
        if gone:
            raise LakeFilesGone(
                f"{len(gone)} of {len(files)} files that were to be committed to the lake's {self.view} were removed "
                f"meanwhile, such as {gone[0]}: nothing was committed, archive again. If `lake maintain` did it, give "
                "it a longer --vacuum than an archive takes"
            )

    def _commit(self, actions: list[Any], properties: Any, claims: Mapping[str, Claim]) -> None:
        try:
            self.table.create_write_transaction(
                actions, mode="append", schema=self.table.schema(), partition_by=list(PARTITIONED_BY),
                commit_properties=properties,
            )  # fmt: skip
        except delta().exceptions.CommitFailedError as error:
            now = open_table(os.path.dirname(self.root), self.view)
            if now is None or all(now.kept(topic) == self.kept(topic) for topic in claims):
                raise
            raise LakeMoved(f"the lake's {self.view} went on meanwhile: {error}") from None


def _sync_log(root: str, after: int) -> None:
    """The commits after this version to disk, and the checkpoints that Delta makes of them, with which readers begin:
    whoever is told of a commit may forget the rows elsewhere."""
    log = f"{root}/_delta_log"
    for name in os.listdir(log):
        number, _, kind = name.partition(".")
        is_whole = kind.endswith(("json", "parquet"))  # and not what somebody else is writing just now
        if name == LAST_CHECKPOINT or (is_whole and number.isdigit() and int(number) > after):
            sync_path(f"{log}/{name}")
    for folder in (log, root, os.path.dirname(root)):
        sync_path(folder)


def open_table(lake_dir: str | os.PathLike[str], view: str) -> LakeTable | None:
    """None: there is none yet."""
    root = f"{lake_path(os.fspath(lake_dir))}/{view}"
    if not delta().DeltaTable.is_deltatable(root):
        return None
    table = delta().DeltaTable(root)
    if table.metadata().partition_columns != list(PARTITIONED_BY):
        raise BadRequest(f"{root!r} is a Delta table, but none that `heapline pipeline archive` made")
    return LakeTable(view, root, table)


def make_table(lake_dir: str | os.PathLike[str], view: str) -> LakeTable:
    """The table, made if it is not there, and with the columns that the view has got since."""
    found = open_table(lake_dir, view)
    if found is not None and not _lacks(found):
        return found
    root = f"{lake_path(os.fspath(lake_dir))}/{view}"
    os.makedirs(root, exist_ok=True)
    with _alone(root):
        found = open_table(lake_dir, view)
        if found is None:
            _create(root, view)
        elif missing := _lacks(found):
            found.table.alter.add_columns(missing)
        _sync_log(root, -1)
    return need_table(lake_dir, view)


@contextlib.contextmanager
def _alone(root: str) -> Iterator[None]:
    """One at a time makes or alters a table. Delta would let two archives that begin together both do it, and the
    second would take the ground from under the first one's commit."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield
    finally:
        os.close(handle)


def _create(root: str, view: str) -> None:
    delta().DeltaTable.create(
        root, delta().Schema.from_arrow(table_schema(view)), mode="ignore", partition_by=list(PARTITIONED_BY),
        name=f"heapline_{view}", description=f"What Heapline's log says, view {view}",
    )  # fmt: skip


def _lacks(found: LakeTable) -> list[Any]:
    """Views grow by columns. Rows that are there have nothing in them."""
    wanted = delta().Schema.from_arrow(table_schema(found.view)).fields
    there = {field.name for field in found.table.schema().fields}
    return [field for field in wanted if field.name not in there]


def need_table(lake_dir: str | os.PathLike[str], view: str) -> LakeTable:
    found = open_table(lake_dir, view)
    if found is None:
        raise BadRequest(
            f"there is no lake with {view} at {os.fspath(lake_dir)!r}: `heapline pipeline archive` makes it"
        )
    return found


def _told(claim: Claim) -> dict[str, Any]:
    """What the commit says of itself in Delta's history."""
    told: dict[str, Any] = {
        "incarnation": claim.incarnation, "ranges": {str(p): list(r) for p, r in claim.ranges.items()},
    }  # fmt: skip
    return {**told, "lost": {str(p): list(r) for p, r in claim.lost.items()}} if claim.lost else told


def _transactions(claims: Mapping[str, Claim]) -> list[Any]:
    transaction = delta().Transaction
    found = []
    for topic, claim in claims.items():
        found.append(transaction(f"{APP}:{topic}", claim.incarnation))
        found += [transaction(f"{APP}:{topic}#{partition}", end) for partition, end in claim.ends.items()]
    return found


def _added(file: Written) -> Any:
    from deltalake.transaction import AddAction

    values = {"namespace": namespace_of(file.topic), "topic": file.topic, "date": file.date}
    return AddAction(file.path, file.nbytes, values, int(time.time() * 1000), True, file.stats)
