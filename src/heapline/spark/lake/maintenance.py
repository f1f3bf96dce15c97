"""List and maintain a lake: join small files, drop old days, remove files that no commit names.

Needs no Spark. The end of the lake is stored apart from its rows (tables.py) and is not changed, so dropped rows are
not archived again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from heapline.contract.config import short
from heapline.contract.errors import BadRequest
from heapline.spark.lake.claims import LakeMoved
from heapline.spark.lake.files import DAY_OF
from heapline.spark.lake.tables import APP, LakeTable, delta, open_table, require_table, transactions

FILE_BYTES = 128 << 20  # target size of joined files
#: Files that no commit names are removed at this age. Younger ones may belong to a running archive, or to a reader that
#: opened an earlier version of the table.
VACUUM_HOURS = 7 * 24
_TRIES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class TopicInLake:
    """Rows and files of a topic in one table."""

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
    """The result of maintenance of one table."""

    view: str
    files_before: int
    files: int
    rows_dropped: int
    files_removed: int  # from disk


def contents(lake_dir: str | Path) -> list[TopicInLake]:
    """Return what is in a lake, by topic and view."""
    found: list[TopicInLake] = []
    for view in _views(lake_dir):
        table = require_table(lake_dir, view)
        files = table.files()
        for topic in sorted({file.topic for file in files} | known_topics(table)):
            mine = [file for file in files if file.topic == topic]
            days, extent = sorted({file.date for file in mine}), table.extent(topic)
            if extent is None and not mine:
                continue  # the topic was dropped
            found.append(
                TopicInLake(
                    topic=topic,
                    view=view,
                    rows=sum(f.rows for f in mine),
                    files=len(mine),
                    nbytes=sum(f.nbytes for f in mine),
                    days=len(days),
                    first_day=days[0] if days else None,
                    last_day=days[-1] if days else None,
                    incarnation=extent.incarnation if extent else 0,
                    ends=dict(extent.ends) if extent else {},
                )
            )
    return sorted(found, key=lambda topic: (topic.topic, topic.view))


def known_topics(table: LakeTable) -> set[str]:
    """Return the topics named by commits in the table's history, including topics without rows."""
    return {topic for commit in table.table.history() for topic in commit.get(APP, ())}


def maintain(
    lake_dir: str | Path,
    *,
    keep_days: int | None = None,
    compact: bool = True,
    file_bytes: int = FILE_BYTES,
    vacuum_hours: int | None = VACUUM_HOURS,
    today: date | None = None,
) -> list[Maintained]:
    """Join small files, drop days older than `keep_days`, and remove files that are no longer needed."""
    if keep_days is not None and keep_days < 1:
        raise BadRequest("keep_days must be 1 or more; today's rows are always kept")
    if vacuum_hours is not None and vacuum_hours < 0:
        raise BadRequest("vacuum_hours must be 0 or more")
    first = None if keep_days is None else (today or datetime.now(UTC).date()) - timedelta(days=keep_days - 1)

    def maintained(view: str) -> Maintained:
        before, dropped, removed = len(require_table(lake_dir, view).files()), 0, 0
        if first is not None:
            dropped = _retry_on_conflict(lake_dir, view, lambda found: _drop_before(found, first))
        if compact:
            _retry_on_conflict(lake_dir, view, lambda found: _compact(found, file_bytes))
        if vacuum_hours is not None:
            os.sync()  # the joined files must be durable before the originals are removed
            removed = len(_retry_on_conflict(lake_dir, view, lambda found: _vacuum(found, vacuum_hours)))
        return Maintained(view, before, len(require_table(lake_dir, view).files()), dropped, removed)

    return [maintained(view) for view in _views(lake_dir)]


def _drop_before(found: LakeTable, first: date) -> int:
    metrics = found.table.delete(f"date < '{first.isoformat()}'")
    return int(metrics.get("num_deleted_rows") or 0)


def _compact(found: LakeTable, file_bytes: int) -> None:
    properties = delta().WriterProperties(compression="ZSTD", compression_level=3)
    found.table.optimize.compact(target_size=file_bytes, writer_properties=properties)


def _vacuum(found: LakeTable, hours: int) -> list[str]:
    gone: list[str] = found.table.vacuum(
        retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True
    )
    return gone


def drop(lake_dir: str | Path, topic: str) -> int:
    """Remove all rows of a topic and its ends, so that the next archive begins where the journal does.

    Returns the number of rows.
    """
    topic = short(topic)
    dropped = [_retry_on_conflict(lake_dir, view, lambda found: _drop_topic(found, topic)) for view in _views(lake_dir)]
    if all(rows is None for rows in dropped):
        raise BadRequest(f"the lake at {os.fspath(lake_dir)!r} does not contain topic {topic!r}")
    return sum(rows or 0 for rows in dropped)


def _drop_topic(table: LakeTable, topic: str) -> int | None:
    """Remove rows and ends in one commit, so that no archive can commit in between."""
    extent, rows = table.extent(topic), sum(file.rows for file in table.files([topic]))
    if extent is None:
        return None
    gone = transactions(APP, topic, 0, dict.fromkeys(extent.ends, 0))
    properties = delta().CommitProperties(custom_metadata={APP: {topic: {"dropped": True}}}, app_transactions=gone)
    if rows:
        table.table.delete(f"topic = '{topic}'", commit_properties=properties)
    else:
        table.append([], properties)
    return rows


def _views(lake_dir: str | Path) -> list[str]:
    found = [view for view in DAY_OF if open_table(lake_dir, view) is not None]
    if not found:
        raise BadRequest(f"no lake exists at {os.fspath(lake_dir)!r}; create one with `heapline pipeline archive`")
    return found


def _retry_on_conflict(lake_dir: str | Path, view: str, act: Callable[[LakeTable], T]) -> T:
    """Run an action on the newest version, and again if an archive has committed meanwhile."""
    for _ in range(_TRIES):
        try:
            return act(require_table(lake_dir, view))
        except delta().exceptions.CommitFailedError as error:
            conflict = error
    raise LakeMoved(f"archives keep committing to the lake's {view}; try again when they pause ({conflict})")
