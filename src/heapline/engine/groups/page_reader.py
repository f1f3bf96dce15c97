"""Provide the page at a group's cursor to its fetches, and let fetches wait while a page is read.

Rows of groups that keep up come from the tail in memory, a few at a time; more rows, or older ones, come from disk. A
thread reads a page while the fetch that needs it waits; the next page is read while a page is being processed. If the
log starts above a group's offset, the unread rows are deleted: the group is moved forward, and that is logged. A page
alone does not prove it: the log is checked at the group's own offset before anything is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heapline.contract.errors import CorruptionError, HeaplineError, RequestError, TopicReloading
from heapline.core.groups.group import Group
from heapline.core.groups.stream import StreamRows
from heapline.core.now import Now
from heapline.engine.committer import refuse
from heapline.engine.groups.fetch import FetchCall
from heapline.engine.groups.page_store import IN_TURN_ROWS, PageStore
from heapline.engine.groups.pages import Page
from heapline.engine.groups.start_offsets import count_below, goes_on_at, make_seen
from heapline.logs import Log

if TYPE_CHECKING:
    from heapline.engine.groups.service import StreamServing
    from heapline.engine.runner import TopicRunner

log = Log("heapline.engine")


class Reading:
    def __init__(self, runner: TopicRunner, serving: StreamServing) -> None:
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
        cursor, end = group.partitions[number].cursor, topic.partitions[number].offset
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
            end = self._runner.loaded.topic.partitions[number].offset
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
            refuse(call.future, self._told(problem, number))
        elif problem is None and read.result().end <= asked:
            self._runner.tasks.spawn(self._when_durable(call, number))
            return
        self._again(call)

    def _told(self, problem: BaseException, number: int) -> HeaplineError:
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
            refuse(call.future, self._told(error, number))
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
            self._runner.turns.plan()

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
            told = self._told(error, number)
            for call in waiting:
                refuse(call.future, told)
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
