"""Pages for those who fetch: what lies at a group's cursor, and waiting for it to be read.

Rows that keep up with the log come from its last rows in memory, a few at a time; more of them, or older ones, from
disk. A page is read by a thread while the fetch that needs it waits; the next one while a page is worked on.
If the log begins above a group's place, what it has not read is gone: it is moved on, and that is logged. A page that
looks so only raises the question; the log itself is asked, at the group's own place, before anything is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heapline.core.group import Group
from heapline.core.stream import StreamRows
from heapline.engine.committer import refuse
from heapline.engine.streams.fetching import FetchCall
from heapline.engine.streams.page_store import IN_TURN_ROWS, PageStore
from heapline.engine.streams.pages import Page
from heapline.engine.streams.places import count_below, goes_on_at, make_seen
from heapline.errors import CorruptionError, HeaplineError, RequestError, TopicReloading
from heapline.logs import Log
from heapline.model import Now

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner
    from heapline.engine.streams.serving import StreamServing

log = Log("heapline.engine")


class Reading:
    def __init__(self, runner: TopicRunner, serving: StreamServing) -> None:
        self._runner, self._serving = runner, serving
        self._pages = PageStore(runner)
        #: (group, partition) that the log's start seems to have overtaken -> those who wait until that is known.
        self._moving: dict[tuple[str, int], list[FetchCall]] = {}

    def clear(self) -> None:
        self._pages.clear()
        self._moving.clear()

    def page_at(self, group: Group, number: int) -> Page | StreamRows | None:
        """What lies at the group's cursor, if it is in memory."""
        topic = self._runner.topic
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
            self._runner.committer.durable_unit
        )
        return None if many else self._pages.from_rows(number, rows)

    @property
    def _durable(self) -> int:
        return self._runner.committer.durable_unit

    def passed(self, group: Group, number: int, page: Page) -> None:
        """Let go of pages that all groups have passed, and have the next one read while this one is worked on."""
        cursor = group.partitions[number].cursor
        if cursor >= page.end:
            cursors = [g.partitions[number].cursor for g in self._runner.topic.groups if not g.config.observer]
            self._pages.drop_below(number, min(cursors))
        elif page.place is not None and 2 * (cursor - page.start) > page.end - page.start:
            tail = self._runner.topic.tails[number]
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
            tail = self._runner.topic.tails[number]
            end = self._runner.topic.partitions[number].offset
            rows = None if tail is None else tail.read(cursor, IN_TURN_ROWS, end)
            if rows is None or (tail is not None and rows.end <= tail.durable_end(self._durable)):
                self._pages.read(number, cursor, partial(self._have_page, call, number, cursor))
            else:
                self._pages.load(number, rows, partial(self._have_page, call, number, cursor))

    def ahead(self, group: Group, numbers: Sequence[int]) -> None:
        """Have pages read that somebody lacks who got others' rows: they take turns, in memory or not."""
        for number in numbers:
            cursor = group.partitions[number].cursor
            page = self._pages.find(number, cursor)
            if page is None:
                self._pages.read(number, cursor, _no_matter)
            elif page.first > cursor:
                self._overtaken(None, group.name, number)

    def _have_page(self, call: FetchCall, number: int, asked: int, read: asyncio.Future[Page]) -> None:
        """Read, or not: the call is served anew, and looks for itself."""
        if call.future.done() or not call.reading:
            return  # another page of its partitions came before
        problem = asyncio.CancelledError() if read.cancelled() else read.exception()
        if problem is not None and not isinstance(problem, RequestError):
            refuse(call.future, self._told(problem, number))
        elif problem is None and read.result().end <= asked:
            self._runner.spawn(self._when_durable(call, number))
            return
        self._again(call)

    def _told(self, problem: BaseException, number: int) -> HeaplineError:
        """What those who wait are told. Of a disk that does not read they hear that it passes, perhaps; the log says
        what it is."""
        if isinstance(problem, CorruptionError) or not isinstance(problem, HeaplineError | asyncio.CancelledError):
            log.error("a stream cannot be read", topic=self._runner.name, partition=number, error=str(problem))
        if isinstance(problem, HeaplineError):
            return problem
        return TopicReloading(self._runner.name, "its stream could not be read")

    async def _when_durable(self, call: FetchCall, number: int) -> None:
        """What lies at its place is not durable yet. It is when all is that has been decided until now; readers of the
        files see it when it is synced, which under the relaxed policies may take long."""
        try:
            await self._runner.call(lambda now: None)
            await make_seen(self._runner)
        except Exception as error:
            refuse(call.future, self._told(error, number))
        finally:
            self._again(call)

    def _again(self, call: FetchCall) -> None:
        if not call.reading:
            return  # it has been served meanwhile: twice would take rows that nobody gets
        call.reading = False
        self._serving.at_disk.discard(call)
        if self._runner.failure is not None and not call.waits:
            refuse(call.future, self._runner.failure)
        elif not call.future.done():
            self._serving.inbox.append(call)
            self._runner.plan_turn()

    def _overtaken(self, call: FetchCall | None, name: str, number: int) -> None:
        """A page looks as if the log began above the group's place."""
        waiting = self._moving.get((name, number))
        if waiting is None:
            waiting = self._moving[name, number] = []
            self._runner.spawn(self._look_and_move_on(name, number, waiting))
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
        """If the log goes on above the group's place, what it did not read is gone, and it goes on there too. If not,
        the page was wrong, and is read anew."""
        runner = self._runner
        groups = runner.topic.groups.by_name
        if name not in groups:
            return
        cursor = groups[name].partitions[number].cursor
        await make_seen(runner)
        first = await runner.read(goes_on_at, runner.journal.reader(), number, cursor)
        if first is None or first <= cursor:
            self._pages.forget(number, cursor)
            return
        count = await count_below(runner, number, first)

        def decide(now: Now) -> None:
            group = runner.topic.groups.by_name.get(name)
            if group is None or not cursor <= group.partitions[number].cursor < first:
                return  # it was put elsewhere meanwhile, where the log was not asked about
            self._serving.moved_on += 1
            log.warning(
                "rows of a group were reclaimed unread", topic=runner.name, group=name, partition=number, offset=first
            )
            self._serving.emit(group, number, group.partitions[number].decide_reset(first, count, now.steady), now)

        await runner.call(decide)


def _no_matter(_: Any) -> None:
    pass
