"""What is in a lake, and keeping it in order: small files joined, old days dropped, files of no commit removed.

Needs no Spark. None of it touches how far the lake goes: that stands apart from the rows (tables.py), so what was
dropped is not archived again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from heapline.errors import BadRequest
from heapline.spark.lake.claims import LakeMoved
from heapline.spark.lake.layout import DAY_OF, PARTITIONED_BY
from heapline.spark.lake.tables import APP, LakeTable, delta, need_table, open_table
from heapline.spark.options import plain_topic

FILE_BYTES = 128 << 20  # what small files are joined to
#: Files that are in no commit are removed when they are this old: younger ones may be of an archive that runs, or are
#: read by somebody who opened the table before.
VACUUM_HOURS = 7 * 24
_TRIES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class TopicInLake:
    """What one table has of a topic."""

    topic: str
    view: str
    rows: int
    files: int
    nbytes: int
    days: int
    first_day: str | None
    last_day: str | None
    incarnation: int
    ends: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Maintained:
    """What was done to one table."""

    view: str
    files_before: int
    files: int
    rows_dropped: int
    files_removed: int  # from disk


def contents(lake_dir: str | Path) -> list[TopicInLake]:
    """What is in a lake, by topic and view."""
    found: list[TopicInLake] = []
    for view in _views(lake_dir):
        table = need_table(lake_dir, view)
        files = table.files()
        for topic in sorted({file.topic for file in files} | known_topics(table)):
            mine = [file for file in files if file.topic == topic]
            days, kept = sorted({file.date for file in mine}), table.kept(topic)
            if kept is None and not mine:
                continue  # it was dropped
            found.append(
                TopicInLake(
                    topic, view, sum(f.rows for f in mine), len(mine), sum(f.nbytes for f in mine), len(days),
                    days[0] if days else None, days[-1] if days else None, kept.incarnation if kept else 0,
                    dict(kept.ends) if kept else {},
                )
            )  # fmt: skip
    return sorted(found, key=lambda topic: (topic.topic, topic.view))


def known_topics(table: LakeTable) -> set[str]:
    """Of which commits tell that are still in the table's history: also such that have no rows."""
    return {topic for commit in table.table.history() for topic in commit.get(APP, ())}


def maintain(
    lake_dir: str | Path, *, keep_days: int | None = None, compact: bool = True, file_bytes: int = FILE_BYTES,
    vacuum_hours: int | None = VACUUM_HOURS, today: date | None = None,
) -> list[Maintained]:  # fmt: skip
    """Join small files, drop days that are older than `keep_days`, and remove files that nobody needs any more."""
    if keep_days is not None and keep_days < 1:
        raise BadRequest("keep_days is 1 or more: today's rows are always kept")
    if vacuum_hours is not None and vacuum_hours < 0:
        raise BadRequest("vacuum_hours is 0 or more")
    return [
        _maintained(lake_dir, view, keep_days, compact, file_bytes, vacuum_hours, today) for view in _views(lake_dir)
    ]


def _maintained(
    lake_dir: str | Path, view: str, keep_days: int | None, compact: bool, file_bytes: int, vacuum_hours: int | None,
    today: date | None,
) -> Maintained:  # fmt: skip
    before, dropped, removed = len(need_table(lake_dir, view).files()), 0, 0
    if keep_days is not None:
        first = (today or datetime.now(UTC).date()) - timedelta(days=keep_days - 1)
        told = _repeated(lake_dir, view, lambda found: found.table.delete(f"date < '{first.isoformat()}'"))
        dropped = int(told.get("num_deleted_rows") or 0)
    if compact:
        _repeated(lake_dir, view, lambda found: _compacted(found, file_bytes))
    if vacuum_hours is not None:
        os.sync()  # what took the place of files is on disk before they go
        removed = len(_repeated(lake_dir, view, lambda found: _vacuumed(found, vacuum_hours)))
    return Maintained(view, before, len(need_table(lake_dir, view).files()), dropped, removed)


def _compacted(found: LakeTable, file_bytes: int) -> None:
    properties = delta().WriterProperties(compression="ZSTD", compression_level=3)
    found.table.optimize.compact(target_size=file_bytes, writer_properties=properties)


def _vacuumed(found: LakeTable, hours: int) -> list[str]:
    gone: list[str] = found.table.vacuum(
        retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True
    )
    return gone


def drop(lake_dir: str | Path, topic: str) -> int:
    """Remove all rows of a topic, and what is known of how far it goes: the next archive begins where the journal does.
    How many rows that were."""
    topic = plain_topic(topic)
    dropped = [_repeated(lake_dir, view, lambda found: _dropped(found, topic)) for view in _views(lake_dir)]
    if all(rows is None for rows in dropped):
        raise BadRequest(f"the lake at {os.fspath(lake_dir)!r} has nothing of topic {topic!r}")
    return sum(rows or 0 for rows in dropped)


def _dropped(table: LakeTable, topic: str) -> int | None:
    """Rows and ends in one commit, which no archive's can come between."""
    kept, rows = table.kept(topic), sum(file.rows for file in table.files([topic]))
    if kept is None:
        return None
    transaction = delta().Transaction
    gone = [transaction(f"{APP}:{topic}", 0), *(transaction(f"{APP}:{topic}#{p}", 0) for p in kept.ends)]
    properties = delta().CommitProperties(custom_metadata={APP: {topic: {"dropped": True}}}, app_transactions=gone)
    if rows:
        table.table.delete(f"topic = '{topic}'", commit_properties=properties)
    else:
        table.table.create_write_transaction(
            [], mode="append", schema=table.table.schema(), partition_by=list(PARTITIONED_BY),
            commit_properties=properties,
        )  # fmt: skip
    return rows


def _views(lake_dir: str | Path) -> list[str]:
    found = [view for view in DAY_OF if open_table(lake_dir, view) is not None]
    if not found:
        raise BadRequest(f"there is no lake at {os.fspath(lake_dir)!r}: `heapline pipeline archive` makes one")
    return found


def _repeated(lake_dir: str | Path, view: str, act: Callable[[LakeTable], T]) -> T:
    """On the newest version, again should an archive have committed meanwhile."""
    for _ in range(_TRIES):
        try:
            return act(need_table(lake_dir, view))
        except delta().exceptions.CommitFailedError as error:
            conflict = error
    raise LakeMoved(f"archives keep committing to the lake's {view}: try again when they pause ({conflict})")
