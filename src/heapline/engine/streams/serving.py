"""Serving the consumer groups of one topic: fetches, acks and what time brings about, decided in the runner's turns.

Theory of operation
-------------------
A turn first settles acks and nacks, those of many members together; then lets time pass (deliveries that time out,
members that are gone, partitions that are handed over); then serves fetches. A fetch that finds nothing waits. It is
looked at again when a partition that it reads got rows, when its group changed, or when its time is over: nobody polls.

Rows come from pages that all groups share (page_store.py). A page that is not in memory is read in a thread, and the
fetch is served anew when it is there: by then the group may have moved on, changed hands, or gone.

*Every answer waits.* A row is handed out only when it is durable, and so is what the hand-out rests on (who is a
member, what has failed); the hand-out itself is not recorded. Where all of that is durable already, the answer goes out
at once.

An answer that nobody takes any more (its caller was cancelled) is kept for the next fetch of the same session.
A row whose record cannot be read is never delivered: it becomes one of the group's dead letters, and the group goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.core.events import AnyEvent, GroupAcked, GroupMembers
from heapline.core.group import Group, Share
from heapline.core.stream import StreamRows
from heapline.engine.committer import give, refuse
from heapline.engine.streams.fetching import FetchCall, Loose, SettleCall, only, split_share
from heapline.engine.streams.page_store import IN_TURN_ROWS, PageStore, page_of
from heapline.engine.streams.pages import Page, cut_records
from heapline.engine.streams.places import count_below
from heapline.engine.streams.sessions import Sessions
from heapline.engine.streams.settling import settle_all
from heapline.engine.streams.spreading import assign
from heapline.errors import (
    ConflictError,
    CorruptionError,
    GroupNotFound,
    HeaplineError,
    RequestError,
    TopicReloading,
    UnavailableError,
)  # fmt: skip
from heapline.journal.records import BadRecord, Records
from heapline.logs import Log
from heapline.model import Now
from heapline.streams import Fetched, StreamBatch

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

log = Log("heapline.engine")
I64 = npt.NDArray[np.int64]
INF = float("inf")
TIME_OUT_ROWS = 16384  # deliveries of a partition that time out in one turn
UNREADABLE = "record corrupt"


class StreamServing:
    def __init__(self, runner: TopicRunner) -> None:
        self._runner = runner
        self.pages = PageStore(runner)
        self.sessions = Sessions(runner.name)
        self.inbox: list[FetchCall | SettleCall] = []  # for the next turn
        self._taken: list[FetchCall | SettleCall] = []  # by the turn that is under way
        self._waiting: list[FetchCall] = []
        self._told: dict[tuple[str, str], tuple[str, int]] = {}  # (group, member) -> session, generation
        self._wakes: dict[str, float] = {}  # when each group must be looked at, or before
        self._units: dict[str, int] = {}  # the unit with the last event of a group that hand-outs rest on
        self._totals: dict[int, int] = {}  # stream rows of a partition at the last look
        self._changed: set[str] = set()  # groups whose waiting members are to be looked at
        self._unsent: dict[tuple[str, str], tuple[str, list[StreamBatch]]] = {}
        self._moving: set[tuple[str, int]] = set()  # (group, partition) that the log's start has overtaken
        self.redelivered = self.timeouts = 0

    def installed(self) -> None:
        """The topic was loaded: nothing that was read or planned before holds."""
        self.pages.clear()
        for known in (self._wakes, self._units, self._totals, self._unsent):
            known.clear()
        self._moving.clear()
        self._changed.update(call.group for call in self._waiting)

    # -- asking ----------------------------------------------------------------------------------------------------

    async def fetch(self, call: FetchCall, wait: float) -> Fetched:
        runner = self._runner
        runner.check()
        self.inbox.append(call)
        if wait > 0:
            call.timer = asyncio.get_running_loop().call_later(wait, self._give_up, call)
        runner.plan_turn()
        try:
            fetched: Fetched = await call.future
            return fetched
        except asyncio.CancelledError:
            if not call.future.cancelled() and call.future.exception() is None:
                self._keep(call, call.future.result().batches)  # cancelled between the answer and the one who asked
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()

    def _give_up(self, call: FetchCall) -> None:
        call.waits = False
        if self._runner.failure is not None:  # there may be no turn for long
            refuse(call.future, self._runner.failure)
        self._runner.plan_turn()

    async def settle(self, call: SettleCall) -> None:
        self._runner.check()
        self.inbox.append(call)
        self._runner.plan_turn()
        await call.future

    def leave(self, name: str, member: str, session: str, now: Now) -> None:
        """In a turn."""
        group = self.group(name)
        self.sessions.check(name, member, session)
        event = group.decide_leave(member, assign, now.steady)
        if event is not None:
            self.emit(group, 0, event, now)
        self._hand_over(group, now)
        self.sessions.leave(name, member)
        self._unsent.pop((name, member), None)
        self._told.pop((name, member), None)
        for call in [c for c in self._waiting if c.group == name and c.member == member]:
            self._waiting.remove(call)
            give(call.future, Fetched([], [], group.members.generation))

    def noted(self, group: Group) -> None:
        """It was just made."""
        self._units[group.name] = self._runner.journal.open_unit_number
        self.look_again(group.name)

    def ended(self, name: str) -> None:
        """It was just deleted: those who wait are told when they are looked at."""
        self.sessions.end_group(name)
        self.look_again(name)
        self._units.pop(name, None)
        for known in (self._told, self._unsent):
            for key in [key for key in known if key[0] == name]:
                del known[key]
        if not self._runner.topic.groups:
            self.pages.clear()

    def group(self, name: str) -> Group:
        group = self._runner.topic.groups.by_name.get(name)
        if group is None:
            raise GroupNotFound(self._runner.name, name)
        return group

    def refuse_all(self, error: HeaplineError) -> None:
        for call in (*self.inbox, *self._taken, *self._waiting):
            refuse(call.future, error)
        self.inbox, self._taken, self._waiting = [], [], []

    def refuse_taken(self, error: HeaplineError) -> None:
        """The turn failed."""
        for call in self._taken:
            if not (isinstance(call, FetchCall) and call.reading):
                refuse(call.future, error)
        self._taken = []

    # -- turns -----------------------------------------------------------------------------------------------------

    def turn(self, now: Now) -> None:
        self._taken, self.inbox = self.inbox, []
        settles = [call for call in self._taken if isinstance(call, SettleCall)]
        if settles:
            settle_all(self, self._runner, settles, now)
        self._tick(now)
        fresh = self._fresh_partitions()
        calls = [call for call in self._taken if isinstance(call, FetchCall)]
        if self._waiting:
            woken = [call for call in self._waiting if self._is_woken(call, fresh)]
            if woken:
                self._waiting = [call for call in self._waiting if call not in woken]
                self._taken += woken
                calls += woken
        self._changed.clear()
        for call in calls:
            self._serve(call, now)
        while self._changed and self._waiting:  # members joined: the others are told
            changed, self._changed = self._changed, set()
            woken = [call for call in self._waiting if call.group in changed]
            self._waiting = [call for call in self._waiting if call.group not in changed]
            for call in woken:
                self._serve(call, now)
        self._taken = []

    def _fresh_partitions(self) -> set[int]:
        """Those that got stream rows since the last look."""
        counts, totals = self._runner.topic.counts, self._totals
        fresh = {p for p in self._runner.topic.changed if counts[p].total != totals.get(p)}
        for p in fresh:
            totals[p] = counts[p].total
        return fresh

    def _is_woken(self, call: FetchCall, fresh: set[int]) -> bool:
        if call.future.done() or not call.waits or call.group in self._changed:
            return True
        group = self._runner.topic.groups.by_name.get(call.group)
        return group is None or bool(fresh and any(p in fresh for p in group.members.reads(call.member)))

    def emit(self, group: Group, partition: int, event: AnyEvent, now: Now) -> None:
        runner = self._runner
        runner.emit(runner.topic.partitions[partition], event, now)
        if isinstance(event, GroupAcked):
            return  # nothing that is handed out later rests on it
        self._units[group.name] = runner.journal.open_unit_number
        self.look_again(group.name)
        if isinstance(event, GroupMembers):
            log.info(
                "partitions spread anew", topic=runner.name, group=group.name, generation=event.generation,
                members=len(event.members),
            )  # fmt: skip

    def look_again(self, name: str) -> None:
        """A group is not what it was: those who wait are served anew, and when it must be looked at is planned anew."""
        self._changed.add(name)
        self._wakes.pop(name, None)

    # -- time ------------------------------------------------------------------------------------------------------

    def next_wake(self, now: Now) -> float:
        for group in self._runner.topic.groups:
            if group.name not in self._wakes:
                at = group.next_deadline(now.steady)
                self._wakes[group.name] = INF if at is None else at
        return min(self._wakes.values(), default=INF)

    def _tick(self, now: Now) -> None:
        groups = self._runner.topic.groups.by_name
        for name in [name for name, at in self._wakes.items() if at <= now.steady or name not in groups]:
            del self._wakes[name]
            if name in groups:
                self._let_time_pass(groups[name], now)

    def _let_time_pass(self, group: Group, now: Now) -> None:
        for call in self._waiting:
            if call.group == group.name and not call.future.done():
                group.beat(call.member, now.steady)  # it is here
        for number in list(group.partitions):
            late = group.overdue(number, now.steady, TIME_OUT_ROWS)
            if len(late):
                self.timeouts += len(late)
                for event in group.decide_time_out(number, late, self.draw(len(late)), now.steady):
                    self.emit(group, number, event, now)
        expired = group.decide_expire(assign, now.steady)
        if expired is not None:
            self.emit(group, 0, expired, now)
        self._hand_over(group, now)
        self._changed.add(group.name)  # a row may have fallen due again

    def _hand_over(self, group: Group, now: Now) -> None:
        event = group.decide_hand_over(now.steady)
        if event is not None:
            self.emit(group, 0, event, now)

    def acked(self, group: Group, now: Now) -> None:
        """What was waited for may be done: partitions that are given up change hands."""
        if group.members.revoking():
            self._hand_over(group, now)

    def grown(self, now: Now) -> None:
        """The topic has more partitions: members share them too."""
        for group in self._runner.topic.groups:
            event = group.decide_respread(assign, now.steady)
            if event is not None:
                self.emit(group, 0, event, now)

    def draw(self, count: int) -> npt.NDArray[np.float64]:
        return self._runner.loader.draw(count)

    # -- fetches ---------------------------------------------------------------------------------------------------

    def _serve(self, call: FetchCall, now: Now) -> None:
        if call.future.done():
            return
        try:
            group = self._enter(call, now)
            self._look(group, call, now)
        except (RequestError, ConflictError, UnavailableError) as problem:
            error = problem  # outlives the except block
            self._runner.committer.answer(lambda: refuse(call.future, error), (call.future,))

    def _enter(self, call: FetchCall, now: Now) -> Group:
        """A sign of life; the member joins if it is none yet."""
        group = self.group(call.group)
        took_over = self.sessions.enter(group.name, call.member, call.session)
        event = group.decide_join(call.member, assign, now.steady)
        if event is not None:
            self.emit(group, 0, event, now)
        elif took_over:
            group.restarted(call.member, now.steady)
            self._unsent.pop((group.name, call.member), None)
            self.look_again(group.name)
        group.beat(call.member, now.steady)
        return group

    def _look(self, group: Group, call: FetchCall, now: Now) -> None:
        """Give the call what there is for it, or let it wait."""
        parts: list[StreamBatch | Loose] = list(self._left_over(group, call))
        pages: dict[int, Page] = {}
        missing: list[int] = []
        if call.max_messages and not parts:
            shares = self._take(group, call, now, pages, missing)
            for share in shares:
                parts += self._split(group, share, pages.get(share.partition), now)
        if parts:
            self._answer(call, group, parts)
        elif missing:
            self._wait_for_pages(call, group, missing)
        elif call.waits and self._told.get((group.name, call.member)) == (call.session, group.members.generation):
            self._waiting.append(call)
        else:
            self._answer(call, group, [])

    def _take(self, group: Group, call: FetchCall, now: Now, pages: dict[int, Page], missing: list[int]) -> list[Share]:
        """Rows of the partitions that the member reads, as far as their pages are in memory."""
        while True:
            rows: dict[int, StreamRows] = {}
            missing.clear()
            for number in group.members.reads(call.member):
                found = self._page_at(group, number)
                if isinstance(found, Page):
                    pages[number], rows[number] = found, found.stream_rows()
                elif found is not None:
                    rows[number] = found
                elif group.partitions[number].cursor < self._runner.topic.partitions[number].offset:
                    missing.append(number)
            before = {number: group.partitions[number].cursor for number in rows}
            shares = group.take(call.member, call.max_messages, rows, now.steady, call.max_bytes)
            for number, page in pages.items():
                self._passed(group, number, page)
            if shares:
                self._sooner(group, now)
                for share in shares:
                    if len(group.partitions[share.partition].failed):
                        self.redelivered += int(np.count_nonzero(share.attempts > 1))
                return shares
            if all(group.partitions[number].cursor == cursor for number, cursor in before.items()):
                return []

    def _page_at(self, group: Group, number: int) -> Page | StreamRows | None:
        """What lies at the group's cursor, if it is in memory."""
        topic = self._runner.topic
        cursor, end = group.partitions[number].cursor, topic.partitions[number].offset
        page = self.pages.find(number, cursor)
        if page is not None:
            return page if page.first <= cursor else None
        tail = topic.tails[number]
        rows = None if tail is None or cursor >= end else tail.read(cursor, IN_TURN_ROWS, end)
        if rows is None or not len(rows.rows.offsets):
            return rows
        assert tail is not None
        many = len(rows.rows.offsets) == IN_TURN_ROWS and rows.end <= tail.durable_end(self._durable)
        return None if many else self.pages.from_rows(number, rows)

    @property
    def _durable(self) -> int:
        return self._runner.committer.durable_unit

    def _passed(self, group: Group, number: int, page: Page) -> None:
        """Let go of pages that all groups have passed, and have the next one read while this one is worked on."""
        cursor = group.partitions[number].cursor
        if cursor >= page.end:
            cursors = [g.partitions[number].cursor for g in self._runner.topic.groups if not g.config.observer]
            self.pages.drop_below(number, min(cursors))
        elif page.place is not None and 2 * (cursor - page.start) > page.end - page.start:
            tail = self._runner.topic.tails[number]
            if tail is not None and page.end < tail.start and self.pages.find(number, page.end) is None:
                self.pages.read(number, page.end, _no_matter)

    def _sooner(self, group: Group, now: Now) -> None:
        """Deliveries that just went out end at the earliest then."""
        if group.name in self._wakes:
            deadline = now.steady + round(group.config.ack_timeout * 1000)
            self._wakes[group.name] = min(self._wakes[group.name], deadline)

    # -- waiting for pages -----------------------------------------------------------------------------------------

    def _wait_for_pages(self, call: FetchCall, group: Group, numbers: Sequence[int]) -> None:
        call.reading = True
        for number in numbers:
            cursor = group.partitions[number].cursor
            page = self.pages.find(number, cursor)
            if page is not None and page.first > cursor:
                self._overtaken(call, group.name, number, page.first)
                continue
            tail = self._runner.topic.tails[number]
            end = self._runner.topic.partitions[number].offset
            rows = None if tail is None else tail.read(cursor, IN_TURN_ROWS, end)
            if rows is None or (tail is not None and rows.end <= tail.durable_end(self._durable)):
                self.pages.read(number, cursor, partial(self._have_page, call, number, cursor))
            else:
                self.pages.load(number, rows, partial(self._have_page, call, number, cursor))

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
            # What lies there is not durable yet. It is when all is that has been decided until now.
            self._runner.committer.answer(partial(self._again, call), (call.future,))
            self._runner.plan_turn()
            return
        self._again(call)

    def _again(self, call: FetchCall) -> None:
        call.reading = False
        if self._runner.failure is not None and not call.waits:
            refuse(call.future, self._runner.failure)
        elif not call.future.done():
            self.inbox.append(call)
            self._runner.plan_turn()

    def _overtaken(self, call: FetchCall, name: str, number: int, first: int) -> None:
        """The log begins above the group's place: what it did not read is gone. It goes on at the beginning."""
        if (name, number) in self._moving:
            self._runner.later(lambda now: self._again(call))
            return
        self._moving.add((name, number))

        async def move() -> None:
            try:
                await self.move_on(name, number, first)
            finally:
                self._moving.discard((name, number))
                self._again(call)

        self._runner.spawn(move())

    async def move_on(self, name: str, number: int, first: int) -> None:
        count = await count_below(self._runner, number, first)

        def decide(now: Now) -> None:
            group = self._runner.topic.groups.by_name.get(name)
            if group is not None and group.partitions[number].cursor < first:
                log.warning(
                    "rows of a group were reclaimed unread", topic=self._runner.name, group=name, partition=number
                )
                self.emit(group, number, group.partitions[number].decide_reset(first, count, now.steady), now)

        await self._runner.call(decide)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _split(self, group: Group, share: Share, page: Page | None, now: Now) -> list[StreamBatch | Loose]:
        loose, batch, bad = split_share(share, page, self._runner.name)
        if len(bad):
            self._set_aside(group.name, share.partition, bad, now)
            self._tell_bad([] if page is None else list(page.bad.values()))
        return [part for part in (loose, batch) if part is not None]

    def _answer(self, call: FetchCall, group: Group, parts: list[StreamBatch | Loose]) -> None:
        runner = self._runner
        reads, generation = group.members.reads(call.member), group.members.generation
        loose = [part for part in parts if isinstance(part, Loose)]
        finish = partial(self._finish, call, parts, sorted(reads), generation)
        if not loose:
            deliver: Callable[[], None] = partial(finish, None)
        else:
            positions = np.concatenate([part.rows.positions for part in loose])
            records, missing = runner.journal.cached(positions)
            if not len(missing):
                deliver = partial(finish, records)
            else:
                load = runner.load(positions[missing])
                deliver = partial(_after, load, partial(self._loaded, call, finish, records, missing))
        if self._rests_on_durable(group, parts):
            deliver()
        else:
            runner.committer.answer(deliver, (call.future,))

    def _rests_on_durable(self, group: Group, parts: list[StreamBatch | Loose]) -> bool:
        durable, tails = self._durable, self._runner.topic.tails
        if self._units.get(group.name, 0) > durable:
            return False
        for part in parts:
            tail = tails[part.partition]
            offsets = part.rows.offsets if isinstance(part, Loose) else part.offsets
            if tail is None or int(offsets[-1]) >= tail.durable_end(durable):
                return False
        return True

    def _loaded(
        self, call: FetchCall, finish: Callable[[Records], None], records: Records, missing: I64,
        load: asyncio.Future[Records],
    ) -> None:  # fmt: skip
        if load.cancelled() or load.exception() is not None:
            refuse(call.future, TopicReloading(self._runner.name, "records could not be read"))
            return
        records.fill(missing, load.result())
        finish(records)

    def _finish(
        self, call: FetchCall, parts: list[StreamBatch | Loose], reads: list[int], generation: int,
        records: Records | None,
    ) -> None:  # fmt: skip
        batches: list[StreamBatch] = []
        start = 0
        for part in parts:
            if isinstance(part, StreamBatch):
                batches.append(part)
                continue
            assert records is not None
            end = start + len(part.attempts)
            batches += self._build(call.group, part, cut_records(records, start, end))
            start = end
        if call.future.done():
            self._keep(call, batches)
            return
        self._told[call.group, call.member] = (call.session, generation)
        call.future.set_result(Fetched(batches, reads, generation))

    def _build(self, group: str, part: Loose, records: Records) -> list[StreamBatch]:
        offsets = part.rows.offsets
        page = page_of(
            self._runner, part.partition, StreamRows(part.rows, int(offsets[0]), int(offsets[-1]) + 1), records
        )
        share = Share(part.partition, part.rows, part.attempts)
        _, batch, bad = split_share(share, page, self._runner.name)
        if len(bad):
            self._tell_bad(list(page.bad.values()))
            self._runner.later(lambda now: self._set_aside(group, part.partition, bad, now))
        return [] if batch is None else [batch]

    def _set_aside(self, name: str, number: int, offsets: I64, now: Now) -> None:
        """Rows whose record cannot be read become dead letters of the group, whatever its retries."""
        group = self._runner.topic.groups.by_name.get(name)
        if group is None:
            return
        config = msgspec.structs.replace(group.config, max_retries=0)
        draws = self.draw(len(offsets))
        events, _ = group.partitions[number].decide_fail(offsets, draws, UNREADABLE, now.steady, config)
        self._runner.counters.corrupt += len(offsets)
        for event in events:
            self.emit(group, number, event, now)

    def _tell_bad(self, facts: list[BadRecord]) -> None:
        for fact in facts:
            log.error("record corrupt", topic=self._runner.name, path=fact.path, offset=fact.offset, detail=fact.detail)

    # -- what nobody took ------------------------------------------------------------------------------------------

    def _keep(self, call: FetchCall, batches: list[StreamBatch]) -> None:
        if batches:
            _, kept = self._unsent.get((call.group, call.member), ("", []))
            self._unsent[call.group, call.member] = (call.session, kept + batches)

    def _left_over(self, group: Group, call: FetchCall) -> list[StreamBatch]:
        """What an earlier fetch of the session was to get, as far as it is still the member's."""
        if not self._unsent or not call.max_messages:
            return []
        session, batches = self._unsent.pop((group.name, call.member), ("", []))
        if session != call.session:
            return []
        found = []
        for batch in batches:
            if group.members.may_hold(call.member, batch.partition):
                order = np.argsort(batch.offsets, kind="stable")
                held = np.zeros(len(batch), dtype=np.bool_)
                held[order] = group.partitions[batch.partition].held(batch.offsets[order])
                if held.any():
                    found.append(batch if held.all() else only(batch, held))
        return found


def _after(load: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
    if load.done():
        then(load)
    else:
        load.add_done_callback(then)


def _no_matter(_: Any) -> None:
    pass
