"""`archive`: the log into the lake, exactly once, as it is or for as long as it grows.

In every round the driver looks how far the lake goes, plans what the journal has beyond that, lets tasks write it as
Parquet files, and commits these. There is no checkpoint: the lake itself says what is in it (lake/claims.py), so a
driver that dies, another one beside it or a round that is repeated can neither double nor lose a row. Tasks read the
log themselves, from the directory or the server, so rows never pass through the JVM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heapline.errors import BadRequest
from heapline.spark.lake.claims import Claim, JournalBehind, LakeMoved, claim_of
from heapline.spark.lake.holding import GroupHold
from heapline.spark.lake.layout import check_views, lake_path, stored_columns
from heapline.spark.lake.tables import LakeTable, delta, make_table
from heapline.spark.lake.writing import Written, write_parts
from heapline.spark.log import Source
from heapline.spark.options import ReadOptions, parse_options
from heapline.spark.planning import Work, plan, read
from heapline.spark.positions import Offsets, Subscription
from heapline.spark.sources import settled, source_of

GROUP = "archive"
VIEWS = ("messages", "events")
#: Rows of the log that one round takes of a view. More make files larger, fewer show progress sooner.
ROUND_ROWS = 4_000_000
PAUSE_SECONDS = 0.1  # before a second look at a journal that seems to end too early; a server is asked every 0.05 s
CONFLICTS_MAX = 100  # in a row, each of them a commit of somebody else's
_FOUND = "view string, topic string, date string, path string, nbytes bigint, rows bigint, stats string"


@dataclass(frozen=True)
class Archived:
    """What was archived of one view of a topic, and how far the lake goes now."""

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
    conflicts: int  # rounds that somebody else was faster with
    seconds: float
    group: str | None  # that holds the journal; None: nothing does

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True)
class Progress:
    """How far a run is: rows of the log, counted once for each view."""

    done: int
    total: int
    rows: int  # that were written


def archive(
    spark: Any, where: Mapping[str, str], topic: str | Sequence[str] | None = None, lake_dir: str | Path = "lake", *,
    pattern: str | None = None, views: Sequence[str] = VIEWS, available_now: bool = True, trigger: float = 10.0,
    group: str | None = GROUP, fail_on_loss: bool = True, round_rows: int = ROUND_ROWS,
    on_progress: Callable[[Progress], None] | None = None, until: Callable[[], bool] = lambda: False,
) -> ArchiveResult:  # fmt: skip
    """Bring into the lake what it lacks of these topics. With `available_now` up to where the log is when it starts,
    otherwise on and on, every `trigger` seconds, until `until()` says so. With a server the consumer group `group`
    holds the journal for it; None: none does."""
    which = _which(topic, pattern)
    check_views(tuple(views))
    if round_rows < 1 or trigger < 0:
        raise BadRequest("round_rows is a number over 0, trigger one of seconds")
    delta()  # what is missing is told before anything is made
    runs = _Run(spark, dict(where), which, lake_path(lake_dir), tuple(views), fail_on_loss, round_rows, group)
    with runs:
        runs.follow(None if available_now else trigger, on_progress, until)
    return runs.result()


def _which(topic: str | Sequence[str] | None, pattern: str | None) -> dict[str, str]:
    if (topic is None) == (pattern is None):
        raise BadRequest("say which topics: topic, a list of them, or pattern")
    if pattern is not None:
        return {"subscribePattern": pattern}
    return {"subscribe": topic if isinstance(topic, str) else ",".join(topic or ())}


class _Run:
    def __init__(
        self, spark: Any, where: dict[str, str], which: dict[str, str], lake: str, views: tuple[str, ...],
        fail_on_loss: bool, round_rows: int, group: str | None,
    ) -> None:  # fmt: skip
        self._spark, self._lake, self._views = spark, lake, views
        self._fail_on_loss, self._round_rows = fail_on_loss, round_rows
        self._options = {view: _read_options(where, which, view, fail_on_loss) for view in views}
        options = self._options[views[0]]
        self._source = source_of(options)
        self._subscription = Subscription(self._source, options.which)
        self._target, self._group = options.target, group if options.target.path is None else None
        self._hold: GroupHold | None = None
        self._counts: dict[tuple[str, str], Archived] = {}
        self._commits = self._conflicts = 0
        self._started = time.monotonic()

    def __enter__(self) -> _Run:
        with ExitStack() as stack:
            stack.callback(self._subscription.close)
            self._subscription.find()
            self._subscription.hold_all()
            if self._group is not None:
                self._hold = stack.enter_context(GroupHold(self._target, self._group))
                self._move_group(self._tables())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def follow(
        self, every: float | None, on_progress: Callable[[Progress], None] | None, until: Callable[[], bool]
    ) -> None:
        """Round by round; without `every`, up to where the log is now."""
        goal = self._subscription.ends() if every is None else None
        done = conflicts = 0
        while not until():
            begun = time.monotonic()
            tables = self._tables()
            claims = self._claims(tables, goal)
            left = sum(claim.rows for of_view in claims.values() for claim in of_view.values())
            if not left and every is None:
                self._note_ends(claims)
                return
            if left and (every is None or self._is_news(claims)):
                some = {v: {t: self._limited(c, of_view) for t, c in of_view.items()} for v, of_view in claims.items()}
                moved = self._round(tables, some)
                conflicts = 0 if moved else conflicts + 1
                if conflicts > CONFLICTS_MAX:
                    raise LakeMoved(
                        "others keep committing to the lake the rows that this run brings: leave it to them"
                    )
                done += moved
                if on_progress is not None:
                    on_progress(Progress(done, done + left - moved, sum(c.rows for c in self._counts.values())))
                if moved < left:
                    continue
            if every is not None:
                self._wait(begun + every, until)
                self._subscription.find()

    @staticmethod
    def _wait(moment: float, until: Callable[[], bool]) -> None:
        while (left := moment - time.monotonic()) > 0 and not until():
            time.sleep(min(left, 0.2))

    def _limited(self, claim: Claim, of_view: Mapping[str, Claim]) -> Claim:
        """Its share of a round."""
        waiting = sum(other.rows for other in of_view.values())
        if waiting <= self._round_rows:
            return claim
        return claim.limited(max(1, self._round_rows * claim.rows // waiting)) if claim.rows else claim

    def _is_news(self, claims: Mapping[str, Mapping[str, Claim]]) -> bool:
        """Whether there is more than what moving our own group has written: else every round would cause the next."""
        echo = {} if self._hold is None else self._hold.echo
        return any(
            end - start > echo.get(topic, {}).get(partition, 0)
            for of_view in claims.values() for topic, claim in of_view.items()
            for partition, (start, end) in claim.ranges.items()
        )  # fmt: skip

    def _tables(self) -> dict[str, LakeTable]:
        return {view: make_table(self._lake, view) for view in self._views}

    def _claims(self, tables: Mapping[str, LakeTable], goal: Offsets | None) -> dict[str, dict[str, Claim]]:
        """What each table lacks, up to the goal. The lake was looked at before the journal, so that is never behind."""
        self._subscription.look()
        try:
            return {view: self._claims_of(table, goal) for view, table in tables.items()}
        except JournalBehind:
            time.sleep(PAUSE_SECONDS)
            self._subscription.look()
            return {view: self._claims_of(table, goal) for view, table in tables.items()}

    def _claims_of(self, table: LakeTable, goal: Offsets | None) -> dict[str, Claim]:
        found = {}
        for topic, log in self._subscription.logs.items():
            starts, kept = log.starts(), table.kept(topic)
            journal = {p: (starts[p], end) for p, end in log.ends().items()}
            claim = claim_of(topic, kept, log.ref.incarnation, journal, fail_on_loss=self._fail_on_loss)
            if goal is not None:
                wanted = goal.get(topic, {})
                cut = {p: (s, max(s, min(e, wanted.get(p, s)))) for p, (s, e) in claim.ranges.items()}
                claim = Claim(claim.incarnation, cut, claim.lost)
            found[topic] = claim
        return found

    def _round(self, tables: Mapping[str, LakeTable], claims: Mapping[str, Mapping[str, Claim]]) -> int:
        """Write and commit these. How many rows of the log got into the lake by that."""
        work = [(view, piece) for view in self._views for piece in self._planned(view, claims[view])]
        written = self._written(work)
        moved = 0
        for view, table in tables.items():
            bringing = {topic: claim for topic, claim in claims[view].items() if claim.rows or claim.lost}
            if not bringing:
                continue
            files = [file for file in written if file.view == view]
            try:
                table.commit(bringing, files)
            except LakeMoved:
                self._conflicts += 1
                continue
            self._commits += 1
            moved += sum(claim.rows for claim in bringing.values())
            self._count(view, bringing, files)
        if moved:
            self._move_group(self._tables())
        return moved

    def _planned(self, view: str, claims: Mapping[str, Claim]) -> Iterator[Work]:
        for topic, claim in claims.items():
            if claim.rows:
                yield from plan(self._subscription.logs[topic], claim.ranges, self._options[view])

    def _written(self, work: list[tuple[str, Work]]) -> list[Written]:
        if not work:
            return []
        task = _task(self._source, self._options, self._lake, work)
        rows = self._spark.range(0, len(work), 1, len(work)).mapInArrow(task, _FOUND).collect()
        return [Written(*row) for row in rows]

    def _move_group(self, tables: Mapping[str, LakeTable]) -> None:
        if self._hold is None:
            return
        for topic, log in self._subscription.logs.items():
            ends = [kept.ends for table in tables.values() if (kept := table.kept(topic)) is not None]
            starts = log.starts()
            if len(ends) < len(tables):
                ends.append(starts)
            places = {p: max(start, min(known.get(p, start) for known in ends)) for p, start in starts.items()}
            self._hold.move(topic, places)

    # -- what is told ----------------------------------------------------------------------------------------------

    def _count(self, view: str, claims: Mapping[str, Claim], files: Iterable[Written]) -> None:
        for topic, claim in claims.items():
            mine = [file for file in files if file.topic == topic]
            was = self._counts.get((topic, view), Archived(topic, view))
            self._counts[topic, view] = Archived(
                topic, view, was.rows + sum(f.rows for f in mine), was.files + len(mine),
                was.nbytes + sum(f.nbytes for f in mine), claim.ends,
            )  # fmt: skip

    def _note_ends(self, claims: Mapping[str, Mapping[str, Claim]]) -> None:
        """Of what had nothing new, too."""
        for view, of_view in claims.items():
            for topic, claim in of_view.items():
                starts = {partition: start for partition, (start, _) in claim.ranges.items()}
                was = self._counts.get((topic, view), Archived(topic, view))
                self._counts[topic, view] = Archived(topic, view, was.rows, was.files, was.nbytes, starts)

    def result(self) -> ArchiveResult:
        tables = tuple(self._counts[key] for key in sorted(self._counts))
        took = time.monotonic() - self._started
        return ArchiveResult(tables, self._commits, self._conflicts, took, self._group)


def _read_options(where: dict[str, str], which: dict[str, str], view: str, fail_on_loss: bool) -> ReadOptions:
    columns = ",".join(column.name for column in stored_columns(view))
    loss = "true" if fail_on_loss else "false"
    given = {**where, **which, "view": view, "columns": columns, "failOnDataLoss": loss}
    return settled(parse_options(given, streaming=False))


def _task(
    source: Source, options: Mapping[str, ReadOptions], lake: str, work: list[tuple[str, Work]]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task does: the pieces whose numbers it gets, read and written. It tells of the files."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                view, piece = work[number]
                rows = read(source, piece, options[view])
                found = write_parts(f"{lake}/{view}", view, piece.topic.topic, rows)
                if found:
                    columns = [pa.array(column) for column in zip(*found, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns, Written._fields)

    return task
