"""Pages at the groups' cursors: cached pages, reads in progress, and fetches that wait for them.

`PageStore` has the pages that groups share. Each read is done once for all callers. A page comes from the tail if the
records are in memory too, otherwise from disk, in a thread. Least recently used pages are dropped first; pages that
every group has passed are dropped immediately. Lookups are by partition and offset.

`Reading` provides the page at a group's cursor to its fetches. Rows of groups that keep up come from the tail in
memory, a few at a time; more rows, or older ones, come from disk. A thread reads a page while the fetch that needs it
waits; the next page is read while a page is being processed. If the log starts above a group's offset, the unread rows
are deleted: the group is moved forward, and that is logged. A page alone does not prove it: the log is checked at the
group's own offset before anything is recorded.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from heapline.contract.errors import CorruptionError, HeaplineError, RequestError, TopicReloading
from heapline.core.groups.group import Group
from heapline.core.groups.stream import StreamRows
from heapline.core.now import Now
from heapline.engine.committer import refuse
from heapline.engine.groups.member_calls import FetchCall, GroupServing
from heapline.engine.groups.pages import PAGE_ROWS, Page, PageBuilder, read_page
from heapline.engine.groups.start_offsets import count_below, goes_on_at, make_seen
from heapline.engine.loaded_topic import RunningTopic
from heapline.journal.reader import LogReader, Place
from heapline.journal.records import Records
from heapline.logs import Log

PAGES_BYTES_MAX = 48 << 20  # per topic; one page has up to about 10 MiB
PAGES_MAX = 512
OVERLAP_MAX = 4  # pages to check: few overlap
IN_TURN_ROWS = 1024  # most rows assembled within a turn; a thread assembles larger pages
log = Log("heapline.engine")


class PageStore:
    def __init__(self, runner: RunningTopic) -> None:
        self._runner = runner
        self._pages: OrderedDict[tuple[int, int], Page] = OrderedDict()  # by partition and start; last used last
        self._starts: dict[int, list[int]] = {}
        self._nbytes = 0
        self._reads: dict[tuple[int, int], asyncio.Future[Page]] = {}
        self._places: dict[tuple[int, int], Place] = {}  # (partition, offset) -> location of the unit after a page
        self._readers: list[LogReader] = []

    # -- in memory -------------------------------------------------------------------------------------------------

    def find(self, partition: int, offset: int) -> Page | None:
        starts = self._starts.get(partition)
        if not starts:
            return None
        behind = bisect_right(starts, offset)
        for start in reversed(starts[max(0, behind - OVERLAP_MAX) : behind]):
            page = self._pages[partition, start]
            if offset < page.end:
                self._pages.move_to_end((partition, start))
                return page
        return None

    def add(self, page: Page) -> None:
        if page.end <= page.start:
            return
        key = (page.partition, page.start)
        known = self._pages.pop(key, None)
        if known is None:
            insort(self._starts.setdefault(page.partition, []), page.start)
        else:
            self._nbytes -= known.nbytes
        self._pages[key] = page
        self._nbytes += page.nbytes
        while len(self._pages) > 1 and (self._nbytes > PAGES_BYTES_MAX or len(self._pages) > PAGES_MAX):
            self._drop(*next(iter(self._pages)))

    def drop_below(self, partition: int, offset: int) -> None:
        """Drop pages and places below an offset that every group has passed."""
        for start in [s for s in self._starts.get(partition, ()) if self._pages[partition, s].end <= offset]:
            self._drop(partition, start)
        for key in [key for key in self._places if key[0] == partition and key[1] < offset]:
            del self._places[key]

    def forget(self, partition: int, offset: int) -> None:
        """Forget the pages that contain this offset, and the place of one that starts there, to read it again."""
        for start in [s for s in self._starts.get(partition, ()) if s <= offset < self._pages[partition, s].end]:
            self._drop(partition, start)
        self._places.pop((partition, offset), None)

    def _drop(self, partition: int, start: int) -> None:
        self._nbytes -= self._pages.pop((partition, start)).nbytes
        self._starts[partition].remove(start)

    def clear(self) -> None:
        """Drop everything, because the topic was reloaded or has no groups left."""
        self._pages.clear()
        self._starts.clear()
        self._places.clear()
        self._readers.clear()
        self._nbytes = 0

    # -- building pages --------------------------------------------------------------------------------------------

    def from_rows(self, partition: int, rows: StreamRows) -> Page | None:
        """Return a page of rows in memory, or None if some of their records are not in memory."""
        journal = self._runner.loaded.journal
        records, missing = journal.cached(rows.rows.positions)
        if len(missing):
            return None
        page = page_of(self._runner, partition, rows, records)
        self.add(page)
        return page

    def read(self, partition: int, offset: int, then: Callable[[asyncio.Future[Page]], None]) -> None:
        """Start reading the page at `offset`. If the read succeeds, the page is in the store when `then` is called."""
        # A page that starts shortly before probably contains the offset; if not, the caller asks again.
        near = [key for key in self._reads if key[0] == partition and 0 <= offset - key[1] < PAGE_ROWS]
        future = self._reads[near[0]] if near else self._begin((partition, offset))
        future.add_done_callback(then)

    def load(self, partition: int, rows: StreamRows, then: Callable[[asyncio.Future[Page]], None]) -> None:
        """Like `read`, for rows in memory that may not be durable yet and lack some of their records."""
        runner = self._runner
        journal, positions = runner.loaded.journal, rows.rows.positions
        records, missing = journal.cached(positions)  # records not written yet are only in memory

        def work() -> Page:
            records.fill(missing, journal.load(positions[missing]))
            return page_of(runner, partition, rows, records)

        future = runner.read(work)

        def done(_: asyncio.Future[Page]) -> None:
            if journal is runner.loaded.journal and not future.cancelled() and future.exception() is None:
                self.add(future.result())

        future.add_done_callback(done)
        future.add_done_callback(then)

    def _begin(self, key: tuple[int, int]) -> asyncio.Future[Page]:
        runner = self._runner
        journal, reader = (
            runner.loaded.journal,
            self._readers.pop() if self._readers else runner.loaded.journal.reader(),
        )
        durable_only = runner.loaded.topic.config.fsync == "commit"
        place = self._places.get(key)

        def read() -> Page:
            layout = journal.layout
            return read_page(reader, layout, journal.load, *key, place=place, durable_only=durable_only)

        future = self._reads[key] = runner.read(read)

        def done(_: asyncio.Future[Page]) -> None:
            del self._reads[key]
            if journal is not runner.loaded.journal or future.cancelled() or future.exception() is not None:
                return
            self._readers.append(reader)
            page = future.result()
            self.add(page)
            if page.place is not None:
                self._places[page.partition, page.end] = page.place

        future.add_done_callback(done)
        return future


def page_of(runner: RunningTopic, partition: int, rows: StreamRows, records: Records) -> Page:
    """Build a page from rows whose records were read."""
    builder = PageBuilder(None, runner.loaded.journal.layout, runner.loaded.journal.load, partition, rows.start)
    builder.end = rows.end
    if len(rows.rows.offsets):
        builder.add_records(rows.rows, records)
    return builder.page()


class Reading:
    def __init__(self, runner: RunningTopic, serving: GroupServing) -> None:
        self._runner, self._serving = runner, serving
        self._pages = PageStore(runner)
        #: (group, partition) that the log's start seems to have passed -> the fetches that wait for the check.
        self._moving: dict[tuple[str, int], list[FetchCall]] = {}

    def clear(self) -> None:
        self._pages.clear()
        self._moving.clear()

    def page_at(self, group: Group, number: int) -> Page | StreamRows | None:
        """Return the page or rows at the group's cursor if they are in memory."""
        topic = self._runner.loaded.topic
        cursor, end = group.partitions[number].cursor, topic.partitions[number].state.offset
        page = self._pages.find(number, cursor)
        if page is not None:
            return page if page.first <= cursor else None
        tail = topic.tails[number]
        rows = None if tail is None or cursor >= end else tail.read(cursor, IN_TURN_ROWS, end)
        if rows is None or not len(rows.rows.offsets):
            return rows
        assert tail is not None
        many = len(rows.rows.offsets) == IN_TURN_ROWS and rows.end <= tail.durable_end(
            self._runner.loaded.committer.durable_unit
        )
        return None if many else self._pages.from_rows(number, rows)

    @property
    def _durable(self) -> int:
        return self._runner.loaded.committer.durable_unit

    def passed(self, group: Group, number: int, page: Page) -> None:
        """Drop pages that all groups have passed, and prefetch the next page while this one is processed."""
        cursor = group.partitions[number].cursor
        if cursor >= page.end:
            cursors = [g.partitions[number].cursor for g in self._runner.loaded.topic.groups if not g.config.observer]
            self._pages.drop_below(number, min(cursors))
        elif page.place is not None and 2 * (cursor - page.start) > page.end - page.start:
            tail = self._runner.loaded.topic.tails[number]
            if tail is not None and page.end < tail.start and self._pages.find(number, page.end) is None:
                self._pages.read(number, page.end, _no_matter)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, call: FetchCall, group: Group, numbers: Sequence[int]) -> None:
        call.reading = True
        self._serving.at_disk.add(call)
        for number in numbers:
            cursor = group.partitions[number].cursor
            page = self._pages.find(number, cursor)
            if page is not None and page.first > cursor:
                self._overtaken(call, group.name, number)
                continue
            tail = self._runner.loaded.topic.tails[number]
            end = self._runner.loaded.topic.partitions[number].state.offset
            rows = None if tail is None else tail.read(cursor, IN_TURN_ROWS, end)
            if rows is None or (tail is not None and rows.end <= tail.durable_end(self._durable)):
                self._pages.read(number, cursor, partial(self._have_page, call, number, cursor))
            else:
                self._pages.load(number, rows, partial(self._have_page, call, number, cursor))

    def ahead(self, group: Group, numbers: Sequence[int]) -> None:
        """Start reading the pages that a served fetch lacked, so that its partitions take turns, in memory or not."""
        for number in numbers:
            cursor = group.partitions[number].cursor
            page = self._pages.find(number, cursor)
            if page is None:
                self._pages.read(number, cursor, _no_matter)
            elif page.first > cursor:
                self._overtaken(None, group.name, number)

    def _have_page(self, call: FetchCall, number: int, asked: int, read: asyncio.Future[Page]) -> None:
        """Serve the call again after a read, successful or not; it looks up the page itself."""
        if call.future.done() or not call.reading:
            return  # another page of its partitions was read before
        problem = asyncio.CancelledError() if read.cancelled() else read.exception()
        if problem is not None and not isinstance(problem, RequestError):
            refuse(call.future, self._error_of(problem, number))
        elif problem is None and read.result().end <= asked:
            self._runner.tasks.spawn(self._when_durable(call, number))
            return
        self._again(call)

    def _error_of(self, problem: BaseException, number: int) -> HeaplineError:
        """Return the error for the waiting fetches. A failed disk read becomes TopicReloading; the log has the
        cause."""
        if isinstance(problem, CorruptionError) or not isinstance(problem, HeaplineError | asyncio.CancelledError):
            log.error("a stream cannot be read", topic=self._runner.name, partition=number, error=str(problem))
        if isinstance(problem, HeaplineError):
            return problem
        return TopicReloading(self._runner.name, "its stream could not be read")

    async def _when_durable(self, call: FetchCall, number: int) -> None:
        """Wait until the rows at the fetch's offset are durable, then serve it again. They are durable once everything
        decided so far is. File readers see them after a sync, which may take long under the relaxed policies."""
        try:
            await self._runner.call(lambda now: None)
            await make_seen(self._runner)
        except Exception as error:
            refuse(call.future, self._error_of(error, number))
        finally:
            self._again(call)

    def _again(self, call: FetchCall) -> None:
        if not call.reading:
            return  # served meanwhile; serving it twice would take rows that no caller receives
        call.reading = False
        self._serving.at_disk.discard(call)
        if self._runner.failure is not None and not call.waits:
            refuse(call.future, self._runner.failure)
        elif not call.future.done():
            self._serving.inbox.append(call)
            self._runner.plan()

    def _overtaken(self, call: FetchCall | None, name: str, number: int) -> None:
        """Check the log, because a page suggests that it starts above the group's offset."""
        waiting = self._moving.get((name, number))
        if waiting is None:
            waiting = self._moving[name, number] = []
            self._runner.tasks.spawn(self._look_and_move_on(name, number, waiting))
        if call is not None:
            waiting.append(call)

    async def _look_and_move_on(self, name: str, number: int, waiting: list[FetchCall]) -> None:
        try:
            await self._move_on(name, number)
        except Exception as error:
            problem = self._error_of(error, number)
            for call in waiting:
                refuse(call.future, problem)
        finally:
            if self._moving.get((name, number)) is waiting:
                del self._moving[name, number]
            for call in waiting:
                self._again(call)

    async def _move_on(self, name: str, number: int) -> None:
        """Move the group to where the log continues, if that is above the group's offset: its unread rows are deleted.
        Otherwise the page was wrong and is read again."""
        runner = self._runner
        groups = runner.loaded.topic.groups.by_name
        if name not in groups:
            return
        cursor = groups[name].partitions[number].cursor
        await make_seen(runner)
        first = await runner.read(goes_on_at, runner.loaded.journal.reader(), number, cursor)
        if first is None or first <= cursor:
            self._pages.forget(number, cursor)
            return
        count = await count_below(runner, number, first)

        def decide(now: Now) -> None:
            group = runner.loaded.topic.groups.by_name.get(name)
            if group is None or not cursor <= group.partitions[number].cursor < first:
                return  # the group was moved meanwhile to an offset that was not checked
            self._serving.moved_on += 1
            log.warning(
                "rows of a group were reclaimed unread", topic=runner.name, group=name, partition=number, offset=first
            )
            self._serving.emit(group, number, group.partitions[number].decide_reset(first, count, now.steady), now)

        await runner.call(decide)


def _no_matter(_: Any) -> None:
    pass
