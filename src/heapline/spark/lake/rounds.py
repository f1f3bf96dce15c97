"""One round of an archive: find what each table lacks, let tasks write it, and commit it on the driver.

The lake is read before the journal, and the commit is based on that version of the lake. If another writer commits in
between, only this round is lost; its files are in no commit and are removed by the next maintenance. Tasks read the log
themselves, so rows do not pass through the JVM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from heapline.contract.errors import GroupNotFound
from heapline.spark.lake.claims import Claim, JournalBehind, LakeMoved
from heapline.spark.lake.files import DAY_OF, NewFile, write_parts
from heapline.spark.lake.tables import LakeTable, check_same, ensure_table, missing_rows, open_table
from heapline.spark.offsets import Offsets, Subscription
from heapline.spark.options import ReadOptions
from heapline.spark.read_plan import ReadTask, plan, read
from heapline.spark.topic_log import Source

#: A group that is not used for some days no longer holds the journal (GroupConfig.unused_after), so an idle group is
#: moved to its own position again.
RENEW_SECONDS = 12 * 3600.0
PAUSE_SECONDS = 0.1  # before checking again a journal that seems to end too early; a server is asked every 0.05 s
_NEW_FILES = "view string, topic string, date string, path string, nbytes bigint, rows bigint, stats string"
Claims = dict[str, dict[str, Claim]]  # view -> topic -> rows to add


class GroupHold:
    """A consumer group that holds the journal until it is archived; moved after every commit.

    A group holds the journal from its position on, so retention deletes nothing that is not archived
    (docs/guide/streams.md). This needs a server. With a directory, only a reader lease holds what is being read, and
    nothing holds later rows.
    """

    def __init__(self, client: Any, group: str) -> None:
        self._client, self.group = client, group
        self._offsets: Offsets = {}
        self._used: dict[str, float] = {}  # by topic, as time.time() counts
        #: By topic and partition: rows that moving the group has added to the log since it was last archived.
        self.echo: Offsets = {}

    def move(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Hold the topic from these offsets on.

        The group may have been further on before: the lake decides which rows are needed, and a lake may be recreated.
        """
        if topic not in self._offsets:
            self._offsets[topic] = self._find(topic, offsets)
        self._reset(topic, {p: offset for p, offset in offsets.items() if self._offsets[topic].get(p) != offset})

    def renew(self) -> None:
        """Keep the group in use. Cheap to call often."""
        for topic, offsets in self._offsets.items():
            if time.time() - self._used[topic] >= RENEW_SECONDS:
                self._reset(topic, offsets)

    def _reset(self, topic: str, offsets: Mapping[int, int]) -> None:
        if offsets:
            self._client.reset_offsets(topic, self.group, to=dict(offsets))
            self._used[topic] = time.time()
        self.echo[topic] = dict.fromkeys(offsets, 1)
        self._offsets[topic] = {**self._offsets[topic], **offsets}

    def _find(self, topic: str, offsets: Mapping[int, int]) -> dict[int, int]:
        try:
            found = self._client.get_group(topic, self.group)
        except GroupNotFound:
            found = self._client.create_group(topic, self.group, start=dict(offsets))
        used = 0.0 if found.used_at is None else found.used_at.timestamp()
        self._used[topic] = used
        if not found.holding or time.time() - used >= RENEW_SECONDS:
            return {}  # so that the group is moved even if it is in the right position
        return {offset.partition: offset.committed for offset in found.offsets}


class Pending(NamedTuple):
    """A version of the tables, and the rows that they lack."""

    tables: dict[str, LakeTable]
    claims: Claims

    @property
    def rows(self) -> int:
        return sum(claim.rows for of_view in self.claims.values() for claim in of_view.values())

    @property
    def is_empty(self) -> bool:
        return not any(claim.rows or claim.lost for of_view in self.claims.values() for claim in of_view.values())

    def limited(self, rows: int) -> Pending:
        """Return at most about `rows` rows of each view, divided between its topics."""
        return Pending(self.tables, {view: _limited(of_view, rows) for view, of_view in self.claims.items()})


class Committed(NamedTuple):
    """The rows and files that a commit added to a table."""

    view: str
    claims: dict[str, Claim]
    files: list[NewFile]


class Rounds:
    def __init__(
        self,
        spark: Any,
        source: Source,
        options: Mapping[str, ReadOptions],
        lake: str,
        hold: GroupHold | None,
        subscription: Subscription,
        fail_on_loss: bool,
    ) -> None:
        self._spark, self._source, self._options, self._lake = spark, source, options, lake
        self._hold, self._subscription, self._fail_on_loss = hold, subscription, fail_on_loss

    def pending(self, goal: Offsets | None = None) -> Pending:
        """Return the rows that the lake lacks, up to the goal if there is one."""
        tables = {view: ensure_table(self._lake, view) for view in self._options}
        for may_retry in (True, False):
            self._subscription.refresh()
            try:
                return Pending(tables, {view: self._claims(table, goal) for view, table in tables.items()})
            except JournalBehind:
                if not may_retry:
                    raise
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def check(self) -> None:
        """Raise an error if the archive cannot continue this lake, before a group is created for it."""
        tables = self.pending().tables
        for log in self._subscription.logs.values():
            for table in tables.values():
                check_same(table, log)

    def _claims(self, table: LakeTable, goal: Offsets | None) -> dict[str, Claim]:
        found = {}
        for topic, log in self._subscription.logs.items():
            claim = missing_rows(table, log, fail_on_loss=self._fail_on_loss)
            found[topic] = claim if goal is None else claim.up_to(goal.get(topic, {}))
        return found

    def archive(self, pending: Pending) -> list[Committed]:
        """Write and commit all pending rows. Views that another writer has committed to meanwhile are skipped."""
        written = self._write(self._plan(pending))
        commits = []
        for view, table in pending.tables.items():
            claims = {topic: claim for topic, claim in pending.claims[view].items() if claim.rows or claim.lost}
            files = [file for file in written if file.view == view]
            if not claims:
                continue
            try:
                table.commit(claims, files)
            except LakeMoved:
                continue
            commits.append(Committed(view, claims, files))
        return commits

    def _plan(self, pending: Pending) -> list[tuple[str, ReadTask]]:
        """Return the tasks of all views. A log has one hold, so it starts at the first of its tasks."""
        tasks: list[tuple[str, ReadTask]] = []
        for topic, log in self._subscription.logs.items():
            mine = [
                (view, task)
                for view in pending.tables
                if (claim := pending.claims[view].get(topic)) and claim.rows
                for task in plan(log, claim.ranges, self._options[view])
            ]
            if mine:
                log.hold(min(task.start for _, task in mine))
            tasks += mine
        return tasks

    def _write(self, tasks: list[tuple[str, ReadTask]]) -> list[NewFile]:
        if not tasks:
            return []
        run = _task_function(self._source, self._options, self._lake, tasks)
        rows = self._spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(run, _NEW_FILES).collect()
        return [NewFile(*row) for row in rows]

    def hold(self) -> None:
        """Hold the journal from the end of the lake, in the view that is furthest behind.

        Views that another archive writes count too, if the lake has the topic in them.
        """
        if self._hold is None:
            return
        mine = [ensure_table(self._lake, view) for view in self._options]
        others = [table for view in DAY_OF if view not in self._options and (table := open_table(self._lake, view))]
        for topic, log in self._subscription.logs.items():
            starts = log.starts()
            ends = [starts if (extent := table.extent(topic)) is None else extent.ends for table in mine]
            ends += [extent.ends for table in others if (extent := table.extent(topic)) is not None]
            self._hold.move(
                topic, {p: max(start, min(known.get(p, 0) for known in ends)) for p, start in starts.items()}
            )

    def renew(self) -> None:
        if self._hold is not None:
            self._hold.renew()

    def is_news(self, pending: Pending) -> bool:
        """Whether there is more than the events of moving our own group; otherwise every round would cause another."""
        echo = {} if self._hold is None else self._hold.echo
        return any(
            end - start > echo.get(topic, {}).get(partition, 0)
            for of_view in pending.claims.values()
            for topic, claim in of_view.items()
            for partition, (start, end) in claim.ranges.items()
        )


def _limited(claims: Mapping[str, Claim], limit: int) -> dict[str, Claim]:
    waiting = sum(claim.rows for claim in claims.values())
    if waiting <= limit:
        return dict(claims)
    return {topic: claim.limited(-(-limit * claim.rows // waiting)) for topic, claim in claims.items()}


def _task_function(
    source: Source, options: Mapping[str, ReadOptions], lake: str, tasks: list[tuple[str, ReadTask]]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for Spark's tasks that reads and writes the tasks whose numbers it receives."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                view, task = tasks[number]
                files = write_parts(f"{lake}/{view}", view, task.topic.topic, read(source, task, options[view]))
                if files:
                    columns = [pa.array(column) for column in zip(*files, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns, NewFile._fields)

    return run
