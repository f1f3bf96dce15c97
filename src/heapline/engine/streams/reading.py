"""Pages for those who fetch: what lies at a group's cursor, and waiting for it to be read.

Rows that keep up with the log come from its last rows in memory, a few at a time; more of them, or older ones, from
disk. A page is read by a thread while the fetch that needs it waits; the next one while a page is worked on.
If the log begins above a group's place, what it has not read is gone: it is moved on, and that is logged.
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
from heapline.engine.streams.places import count_below, make_seen
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
        self._moving: set[tuple[str, int]] = set()  # (group, partition) that the log's start has overtaken

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
                self._overtaken(call, group.name, number, page.first)
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
                self._overtaken(None, group.name, number, page.first)

    def _have_page(self, call: FetchCall, number: int, asked: int, read: asyncio.Future[Page]) -> None:
        """Read, or not: the call is served anew, and looks for itself."""
        if call.future.done() or not call.reading:
            return  # another page of its partitions came before
        problem = asyncio.CancelledError() if read.cancelled() else read.exception()
        if isinstance(problem, CorruptionError):
            log.error("a stream cannot be read", topic=self._runner.name, partition=number, error=str(problem))
            refuse(call.future, problem)
        elif problem is not None and not isinstance(problem, RequestError):
            refuse(call.future, TopicReloading(self._runner.name, "its stream could not be read"))
        elif problem is None and read.result().end <= asked:
            self._runner.spawn(self._when_durable(call))
            return
        self._again(call)

    async def _when_durable(self, call: FetchCall) -> None:
        """What lies at its place is not durable yet. It is when all is that has been decided until now; readers of the
        files see it when it is synced, which under the relaxed policies may take long."""
        try:
            await self._runner.call(lambda now: None)
            await make_seen(self._runner)
        except HeaplineError as error:
            refuse(call.future, error)
        self._again(call)

    def _again(self, call: FetchCall | None) -> None:
        if call is None:
            return
        call.reading = False
        self._serving.at_disk.discard(call)
        if self._runner.failure is not None and not call.waits:
            refuse(call.future, self._runner.failure)
        elif not call.future.done():
            self._serving.inbox.append(call)
            self._runner.plan_turn()

    def _overtaken(self, call: FetchCall | None, name: str, number: int, first: int) -> None:
        """The log begins above the group's place: what it did not read is gone. It goes on at the beginning."""
        if (name, number) in self._moving:
            if call is None:
                return
            self._runner.later(lambda now: self._again(call))
            return
        self._moving.add((name, number))

        async def move() -> None:
            try:
                await self._move_on(name, number, first)
            except HeaplineError as error:
                if call is not None:
                    refuse(call.future, error)
            finally:
                self._moving.discard((name, number))
                self._again(call)

        self._runner.spawn(move())

    async def _move_on(self, name: str, number: int, first: int) -> None:
        count = await count_below(self._runner, number, first)

        def decide(now: Now) -> None:
            group = self._runner.topic.groups.by_name.get(name)
            if group is not None and group.partitions[number].cursor < first:
                log.warning(
                    "rows of a group were reclaimed unread", topic=self._runner.name, group=name, partition=number
                )
                self._serving.emit(group, number, group.partitions[number].decide_reset(first, count, now.steady), now)

        await self._runner.call(decide)


def _no_matter(_: Any) -> None:
    pass
