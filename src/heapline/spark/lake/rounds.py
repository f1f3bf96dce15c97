"""One round of an archive: what each table lacks, written by tasks and committed by the driver.

The lake is looked at first and the journal after it, and what is committed rests on that look at the lake. If somebody
else committed in between, the round is lost and nothing else; its files are in no commit and go with the next upkeep.
Tasks read the log by themselves, so rows do not pass through the JVM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from heapline.spark.lake.claims import Claim, JournalBehind, LakeMoved, claim_of
from heapline.spark.lake.holding import GroupHold
from heapline.spark.lake.layout import DAY_OF
from heapline.spark.lake.sameness import check_same
from heapline.spark.lake.tables import LakeTable, make_table, open_table
from heapline.spark.lake.writing import Written, write_parts
from heapline.spark.log import Source
from heapline.spark.options import ReadOptions
from heapline.spark.planning import Work, plan, read
from heapline.spark.positions import Offsets, Subscription

PAUSE_SECONDS = 0.1  # before a second look at a journal that seems to end too early: a server is asked every 0.05 s
_FOUND = "view string, topic string, date string, path string, nbytes bigint, rows bigint, stats string"
Claims = dict[str, dict[str, Claim]]  # view -> topic -> what is to be brought


class Look(NamedTuple):
    """The tables as they were, and what they lacked."""

    tables: dict[str, LakeTable]
    claims: Claims

    @property
    def rows(self) -> int:
        return sum(claim.rows for of_view in self.claims.values() for claim in of_view.values())

    @property
    def is_whole(self) -> bool:
        """Nothing is to be brought."""
        return not any(claim.rows or claim.lost for of_view in self.claims.values() for claim in of_view.values())

    def limited(self, rows: int) -> Look:
        """At most about so many rows of each view, shared between its topics."""
        return Look(self.tables, {view: _limited(of_view, rows) for view, of_view in self.claims.items()})


class Brought(NamedTuple):
    """What a commit put into a table."""

    view: str
    claims: dict[str, Claim]
    files: list[Written]


class Rounds:
    def __init__(
        self, spark: Any, source: Source, options: Mapping[str, ReadOptions], lake: str, hold: GroupHold | None,
        subscription: Subscription, fail_on_loss: bool,
    ) -> None:  # fmt: skip
        self._spark, self._source, self._options, self._lake = spark, source, options, lake
        self._hold, self._subscription, self._fail_on_loss = hold, subscription, fail_on_loss

    def look(self, goal: Offsets | None = None) -> Look:
        """What is to be brought, up to the goal if there is one."""
        tables = {view: make_table(self._lake, view) for view in self._options}
        for patient in (True, False):
            self._subscription.look()
            try:
                return Look(tables, {view: self._claims(table, goal) for view, table in tables.items()})
            except JournalBehind:
                if not patient:
                    raise
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def check(self) -> None:
        """Raises if nothing of this can be: told before a group is made for it."""
        tables = self.look().tables
        for log in self._subscription.logs.values():
            for table in tables.values():
                check_same(table, log)

    def _claims(self, table: LakeTable, goal: Offsets | None) -> dict[str, Claim]:
        found = {}
        for topic, log in self._subscription.logs.items():
            starts = log.starts()
            journal = {p: (starts[p], end) for p, end in log.ends().items()}
            kept, incarnation = table.kept(topic), log.ref.incarnation
            claim = claim_of(topic, kept, incarnation, journal, fail_on_loss=self._fail_on_loss)
            found[topic] = claim if goal is None else claim.up_to(goal.get(topic, {}))
        return found

    def bring(self, look: Look) -> list[Brought]:
        """Write and commit all that was claimed. A view that somebody else was faster with is left out."""
        written = self._written(self._planned(look))
        found = []
        for view, table in look.tables.items():
            claims = {topic: claim for topic, claim in look.claims[view].items() if claim.rows or claim.lost}
            files = [file for file in written if file.view == view]
            if not claims:
                continue
            try:
                table.commit(claims, files)
            except LakeMoved:
                continue
            found.append(Brought(view, claims, files))
        return found

    def _planned(self, look: Look) -> list[tuple[str, Work]]:
        """The pieces of all views. A log has one hold, so it is put where the first of its pieces begins."""
        work: list[tuple[str, Work]] = []
        for topic, log in self._subscription.logs.items():
            mine = [
                (view, piece) for view in look.tables if (claim := look.claims[view].get(topic)) and claim.rows
                for piece in plan(log, claim.ranges, self._options[view])
            ]  # fmt: skip
            if mine:
                log.hold(min(piece.start for _, piece in mine))
            work += mine
        return work

    def _written(self, work: list[tuple[str, Work]]) -> list[Written]:
        if not work:
            return []
        task = _task(self._source, self._options, self._lake, work)
        rows = self._spark.range(0, len(work), 1, len(work)).mapInArrow(task, _FOUND).collect()
        return [Written(*row) for row in rows]

    def hold(self) -> None:
        """Hold the journal from where the lake ends, in the view that is furthest behind: also in one that somebody
        else archives, if the lake has that of the topic."""
        if self._hold is None:
            return
        mine = [make_table(self._lake, view) for view in self._options]
        others = [table for view in DAY_OF if view not in self._options and (table := open_table(self._lake, view))]
        for topic, log in self._subscription.logs.items():
            starts = log.starts()
            ends = [starts if (kept := table.kept(topic)) is None else kept.ends for table in mine]
            ends += [kept.ends for table in others if (kept := table.kept(topic)) is not None]
            self._hold.move(
                topic, {p: max(start, min(known.get(p, 0) for known in ends)) for p, start in starts.items()}
            )

    def renew(self) -> None:
        if self._hold is not None:
            self._hold.renew()

    def is_news(self, look: Look) -> bool:
        """Whether there is more than what moving our own group has written: else every round would cause the next."""
        echo = {} if self._hold is None else self._hold.echo
        return any(
            end - start > echo.get(topic, {}).get(partition, 0)
            for of_view in look.claims.values() for topic, claim in of_view.items()
            for partition, (start, end) in claim.ranges.items()
        )  # fmt: skip


def _limited(claims: Mapping[str, Claim], limit: int) -> dict[str, Claim]:
    waiting = sum(claim.rows for claim in claims.values())
    if waiting <= limit:
        return dict(claims)
    return {topic: claim.limited(-(-limit * claim.rows // waiting)) for topic, claim in claims.items()}


def _task(
    source: Source, options: Mapping[str, ReadOptions], lake: str, work: list[tuple[str, Work]]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task does: the pieces whose numbers it gets, read and written. It tells of the files."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                view, piece = work[number]
                found = write_parts(f"{lake}/{view}", view, piece.topic.topic, read(source, piece, options[view]))
                if found:
                    columns = [pa.array(column) for column in zip(*found, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns, Written._fields)

    return task
