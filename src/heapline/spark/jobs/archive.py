"""The job `archive`: copy the log to the lake, each row once, up to now or continuously.

There is no checkpoint: the lake itself records what it has (lake/claims.py). So a driver that dies, a second driver, or
a repeated round can neither duplicate nor lose a row. lake/rounds.py does one round; this module runs rounds and
reports them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heapline.contract.errors import BadRequest
from heapline.spark.lake.claims import LakeMoved
from heapline.spark.lake.files import check_views, lake_path, stored_columns
from heapline.spark.lake.rounds import Committed, GroupHold, Pending, Rounds
from heapline.spark.lake.tables import delta
from heapline.spark.offsets import Subscription
from heapline.spark.options import ReadOptions, parse_options
from heapline.spark.target import client_of, resolve, source_of

GROUP = "archive"
VIEWS = ("messages", "events")
#: Rows of the log per view and round. More make larger files, fewer show progress sooner.
ROUND_ROWS = 4_000_000
CONFLICTS_MAX = 100  # consecutive rounds in which another writer was faster
POLL_SECONDS = 0.2  # how often a continuous run checks `until`


@dataclass(frozen=True)
class Archived:
    """Rows of one view of a topic that were archived, and the current ends of the lake."""

    topic: str
    view: str
    rows: int = 0
    files: int = 0
    nbytes: int = 0
    ends: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ArchiveResult:
    tables: tuple[Archived, ...]
    commits: int
    conflicts: int  # rounds in which another writer was faster
    seconds: float
    group: str | None  # the group that holds the journal, if any

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True)
class Progress:
    """The progress of a run in rows of the log, which count once for each view."""

    done: int
    total: int


def archive(
    spark: Any,
    where: Mapping[str, str],
    topic: str | Sequence[str] | None = None,
    lake_dir: str | Path = "lake",
    *,
    pattern: str | None = None,
    views: Sequence[str] | None = None,
    available_now: bool = True,
    trigger: float = 10.0,
    group: str | None = GROUP,
    fail_on_loss: bool = True,
    round_rows: int = ROUND_ROWS,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    until: Callable[[], bool] = lambda: False,
) -> ArchiveResult:
    """Copy what the lake lacks of these topics.

    With `available_now`, stop at the current end of the log; otherwise run a round every `trigger` seconds until
    `until()` returns True. With a server, the consumer group `group` holds the journal; with None, nothing does.
    Without `views`, both are copied; a broker without a journal has events alone, and no groups.
    """
    selection = _topic_options(topic, pattern)
    if views is not None:
        check_views(tuple(views))
    if round_rows < 1 or trigger < 0:
        raise BadRequest("round_rows must be over 0, and trigger must be a number of seconds from 0 on")
    delta()  # report a missing package before anything is created
    first = _read_options(where, selection, "events", fail_on_loss)
    source = source_of(first)
    with ExitStack() as stack:
        subscription = Subscription(source, first.selection)
        stack.callback(subscription.close)
        subscription.find()
        subscription.hold_all()
        has_journal = all(log.ref.has_journal for log in subscription.logs.values())
        chosen = tuple(views or (VIEWS if has_journal else ("events",)))
        options = {view: _read_options(where, selection, view, fail_on_loss) for view in chosen}
        held = None
        if group is not None and first.target.path is None and has_journal:
            held = GroupHold(stack.enter_context(client_of(first.target)), group)
        rounds = Rounds(spark, source, options, lake_path(lake_dir), held, subscription, fail_on_loss)
        run = _Run(rounds, subscription, round_rows, on_progress)
        run.run(None if available_now else trigger, until)
    return run.result(None if held is None else group)


def _topic_options(topic: str | Sequence[str] | None, pattern: str | None) -> dict[str, str]:
    if (topic is None) == (pattern is None):
        raise BadRequest("no topics selected; give a topic, a list of topics, or a pattern")
    if pattern is not None:
        return {"subscribePattern": pattern}
    return {"subscribe": topic if isinstance(topic, str) else ",".join(topic or ())}


def _read_options(where: Mapping[str, str], topics: dict[str, str], view: str, fail_on_loss: bool) -> ReadOptions:
    columns = ",".join(column.name for column in stored_columns(view))
    loss = "true" if fail_on_loss else "false"
    given = {**where, **topics, "view": view, "columns": columns, "failOnDataLoss": loss}
    return resolve(parse_options(given, streaming=False))


class _Run:
    def __init__(
        self, rounds: Rounds, subscription: Subscription, round_rows: int, on_progress: Callable[[Progress], None]
    ) -> None:
        self._rounds, self._subscription = rounds, subscription
        self._round_rows, self._on_progress = round_rows, on_progress
        self._counts: dict[tuple[str, str], Archived] = {}
        self._commits = self._conflicts = self._done = 0
        self._started = time.monotonic()

    def run(self, every: float | None, until: Callable[[], bool]) -> None:
        """Run rounds every `every` seconds; without it, up to the current end of the log."""
        goal = self._subscription.ends() if every is None else None
        self._rounds.check()
        self._rounds.hold()
        conflicts = 0
        while not until():
            started = time.monotonic()
            pending = self._rounds.pending(goal)
            self._note_ends(pending)
            if pending.is_empty and every is None:
                return
            if not pending.is_empty and (every is None or self._rounds.is_news(pending)):
                conflicts = 0 if self._round(pending) else conflicts + 1
                if conflicts > CONFLICTS_MAX:
                    raise LakeMoved("other archives keep committing the rows of this run to the lake; stop one of them")
                if every is None or pending.rows > self._round_rows:
                    continue
            self._rounds.renew()
            _sleep(started + (every or 0), until)
            self._subscription.find()

    def _round(self, pending: Pending) -> bool:
        """Run one round; return whether it committed anything."""
        part = pending.limited(self._round_rows)
        commits = self._rounds.archive(part)
        rows = sum(claim.rows for commit in commits for claim in commit.claims.values())
        self._commits += len(commits)
        self._conflicts += len(commits) < sum(any(c.rows or c.lost for c in v.values()) for v in part.claims.values())
        self._count(commits)
        self._done += rows
        self._on_progress(Progress(self._done, self._done + pending.rows - rows))
        if commits:
            self._rounds.hold()
        return bool(commits)

    # -- the result ------------------------------------------------------------------------------------------------

    def _count(self, commits: Iterable[Committed]) -> None:
        for view, claims, files in commits:
            for topic, claim in claims.items():
                mine = [file for file in files if file.topic == topic]
                before = self._counts[topic, view]
                self._counts[topic, view] = Archived(
                    topic,
                    view,
                    rows=before.rows + sum(file.rows for file in mine),
                    files=before.files + len(mine),
                    nbytes=before.nbytes + sum(file.nbytes for file in mine),
                    ends=claim.ends,
                )

    def _note_ends(self, pending: Pending) -> None:
        """Record the ends of all tables, including those with nothing new."""
        for view, claims in pending.claims.items():
            for topic, claim in claims.items():
                before = self._counts.get((topic, view), Archived(topic, view))
                starts = {partition: start for partition, (start, _) in claim.ranges.items()}
                self._counts[topic, view] = replace(before, ends=starts)

    def result(self, group: str | None) -> ArchiveResult:
        tables = tuple(self._counts[key] for key in sorted(self._counts))
        return ArchiveResult(tables, self._commits, self._conflicts, time.monotonic() - self._started, group)


def _sleep(end: float, until: Callable[[], bool]) -> None:
    while (left := end - time.monotonic()) > 0 and not until():
        time.sleep(min(left, POLL_SECONDS))
