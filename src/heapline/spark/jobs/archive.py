"""`archive`: the log into the lake, each row once, up to now or for as long as it grows.

There is no checkpoint: the lake itself says what is in it (lake/claims.py). So a driver that dies, a second one beside
it, or a round that is done again can neither double nor lose a row. What a round does is in lake/rounds.py; here is how
rounds follow each other, and what is told of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heapline.errors import BadRequest
from heapline.spark.lake.claims import LakeMoved
from heapline.spark.lake.holding import GroupHold
from heapline.spark.lake.layout import check_views, lake_path, stored_columns
from heapline.spark.lake.rounds import Brought, Look, Rounds
from heapline.spark.lake.tables import delta
from heapline.spark.options import ReadOptions, parse_options
from heapline.spark.positions import Subscription
from heapline.spark.sources import settled, source_of

GROUP = "archive"
VIEWS = ("messages", "events")
#: Rows of the log that one round takes of a view. More make files larger, fewer show progress sooner.
ROUND_ROWS = 4_000_000
CONFLICTS_MAX = 100  # rounds in a row that somebody else was faster with
NAP_SECONDS = 0.2  # how late a run that follows may notice that it is to end


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
    conflicts: int  # rounds in which somebody else was faster
    seconds: float
    group: str | None  # that holds the journal; None: nothing does

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True)
class Progress:
    """How far a run is, in rows of the log, which count once for each view."""

    done: int
    total: int


def archive(
    spark: Any, where: Mapping[str, str], topic: str | Sequence[str] | None = None, lake_dir: str | Path = "lake", *,
    pattern: str | None = None, views: Sequence[str] = VIEWS, available_now: bool = True, trigger: float = 10.0,
    group: str | None = GROUP, fail_on_loss: bool = True, round_rows: int = ROUND_ROWS,
    on_progress: Callable[[Progress], None] = lambda progress: None, until: Callable[[], bool] = lambda: False,
) -> ArchiveResult:  # fmt: skip
    """Bring into the lake what it lacks of these topics.

    With `available_now` up to where the log is when it starts; otherwise on and on, every `trigger` seconds, until
    `until()` says so. With a server the consumer group `group` holds the journal for it; None: nothing does.
    """
    which = _which(topic, pattern)
    check_views(tuple(views))
    if round_rows < 1 or trigger < 0:
        raise BadRequest("round_rows is a number over 0, trigger a number of seconds")
    delta()  # that it is missing is told before anything is made
    options = {view: _read_options(where, which, view, fail_on_loss) for view in views}
    told = options[views[0]]
    source = source_of(told)
    with ExitStack() as stack:
        subscription = Subscription(source, told.which)
        stack.callback(subscription.close)
        subscription.find()
        subscription.hold_all()
        held = None if group is None or told.target.path is not None else GroupHold(told.target, group)
        if held is not None:
            stack.enter_context(held)
        rounds = Rounds(spark, source, options, lake_path(lake_dir), held, subscription, fail_on_loss)
        run = _Run(rounds, subscription, round_rows, on_progress)
        run.follow(None if available_now else trigger, until)
    return run.result(None if held is None else group)


def _which(topic: str | Sequence[str] | None, pattern: str | None) -> dict[str, str]:
    if (topic is None) == (pattern is None):
        raise BadRequest("say which topics: topic, a list of them, or pattern")
    if pattern is not None:
        return {"subscribePattern": pattern}
    return {"subscribe": topic if isinstance(topic, str) else ",".join(topic or ())}


def _read_options(where: Mapping[str, str], which: dict[str, str], view: str, fail_on_loss: bool) -> ReadOptions:
    columns = ",".join(column.name for column in stored_columns(view))
    loss = "true" if fail_on_loss else "false"
    given = {**where, **which, "view": view, "columns": columns, "failOnDataLoss": loss}
    return settled(parse_options(given, streaming=False))


class _Run:
    def __init__(
        self, rounds: Rounds, subscription: Subscription, round_rows: int, on_progress: Callable[[Progress], None]
    ) -> None:
        self._rounds, self._subscription = rounds, subscription
        self._round_rows, self._on_progress = round_rows, on_progress
        self._counts: dict[tuple[str, str], Archived] = {}
        self._commits = self._conflicts = self._done = 0
        self._started = time.monotonic()

    def follow(self, every: float | None, until: Callable[[], bool]) -> None:
        """Round by round; without `every`, up to where the log is now."""
        goal = self._subscription.ends() if every is None else None
        self._rounds.check()
        self._rounds.hold()
        in_a_row = 0
        while not until():
            begun = time.monotonic()
            look = self._rounds.look(goal)
            self._note_ends(look)
            if look.is_whole and every is None:
                return
            if not look.is_whole and (every is None or self._rounds.is_news(look)):
                in_a_row = 0 if self._round(look) else in_a_row + 1
                if in_a_row > CONFLICTS_MAX:
                    raise LakeMoved(
                        "others keep committing the rows that this run brings to the lake: leave it to them"
                    )
                if every is None or look.rows > self._round_rows:
                    continue
            self._rounds.renew()
            _nap(begun + (every or 0), until)
            self._subscription.find()

    def _round(self, look: Look) -> bool:
        """Whether it brought anything."""
        some = look.limited(self._round_rows)
        brought = self._rounds.bring(some)
        moved = sum(claim.rows for commit in brought for claim in commit.claims.values())
        self._commits += len(brought)
        self._conflicts += len(brought) < sum(any(c.rows or c.lost for c in v.values()) for v in some.claims.values())
        self._count(brought)
        self._done += moved
        self._on_progress(Progress(self._done, self._done + look.rows - moved))
        if brought:
            self._rounds.hold()
        return bool(brought)

    # -- what is told ----------------------------------------------------------------------------------------------

    def _count(self, brought: Iterable[Brought]) -> None:
        for view, claims, files in brought:
            for topic, claim in claims.items():
                mine = [file for file in files if file.topic == topic]
                was = self._counts[topic, view]
                self._counts[topic, view] = Archived(
                    topic, view, was.rows + sum(file.rows for file in mine), was.files + len(mine),
                    was.nbytes + sum(file.nbytes for file in mine), claim.ends,
                )  # fmt: skip

    def _note_ends(self, look: Look) -> None:
        """Of what has nothing new, too."""
        for view, claims in look.claims.items():
            for topic, claim in claims.items():
                was = self._counts.get((topic, view), Archived(topic, view))
                starts = {partition: start for partition, (start, _) in claim.ranges.items()}
                self._counts[topic, view] = Archived(topic, view, was.rows, was.files, was.nbytes, starts)

    def result(self, group: str | None) -> ArchiveResult:
        tables = tuple(self._counts[key] for key in sorted(self._counts))
        return ArchiveResult(tables, self._commits, self._conflicts, time.monotonic() - self._started, group)


def _nap(moment: float, until: Callable[[], bool]) -> None:
    while (left := moment - time.monotonic()) > 0 and not until():
        time.sleep(min(left, NAP_SECONDS))
