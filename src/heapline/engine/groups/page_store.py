"""Pages that groups share: cached pages, and reads in progress, each done once for all callers.

A page comes from the tail if the records are in memory too, otherwise from disk, in a thread. Least recently used pages
are dropped first; pages that every group has passed are dropped immediately. Lookups are by partition and offset. This
module does not know which group gets which rows of a page.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from heapline.core.groups.stream import StreamRows
from heapline.engine.groups.pages import PAGE_ROWS, Page, PageBuilder, read_page
from heapline.journal.reader import LogReader, Place
from heapline.journal.records import Records

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

PAGES_BYTES_MAX = 48 << 20  # per topic; one page has up to about 10 MiB
PAGES_MAX = 512
OVERLAP_MAX = 4  # pages to check: few overlap
IN_TURN_ROWS = 1024  # most rows assembled within a turn; a thread assembles larger pages


class PageStore:
    def __init__(self, runner: TopicRunner) -> None:
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


def page_of(runner: TopicRunner, partition: int, rows: StreamRows, records: Records) -> Page:
    """Build a page from rows whose records were read."""
    builder = PageBuilder(None, runner.loaded.journal.layout, runner.loaded.journal.load, partition, rows.start)
    builder.end = rows.end
    if len(rows.rows.offsets):
        builder.add_records(rows.rows, records)
    return builder.page()
