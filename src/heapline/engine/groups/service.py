"""Serve the consumer groups of one topic: fetches, acks and timeouts, decided in the runner's turns.

Theory of operation
-------------------
A turn first settles acks and nacks, those of many members together. It then handles timeouts (deliveries that time out,
members that are lost, partitions that are handed over), and then serves fetches. A fetch that finds no rows waits. It
is served again when a partition that it reads gets rows, when its group changes, or when its wait ends: no polling.

Rows come from pages that all groups share (page_reader.py). A page that is not in memory is read in a thread, and the
fetch is served again after the read: by then the group may have advanced, been reassigned, or been deleted.

*Every answer waits.* A row is delivered only when it is durable, and so is everything that the delivery depends on
(membership, failures). The delivery itself is not recorded. If all of that is durable already, the answer is sent
immediately.

An answer whose caller was cancelled is kept for the next fetch of the same session. A row whose record cannot be read
is never delivered: it becomes a dead letter of the group, and the group continues.
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import ConflictError, GroupNotFound, HeaplineError, RequestError, UnavailableError
from heapline.contract.stream import Fetched, StreamBatch
from heapline.core.events import AnyEvent, GroupAcked, GroupMembers
from heapline.core.groups.group import Group, Share
from heapline.core.groups.stream import StreamRows
from heapline.core.now import Now
from heapline.engine.committer import give, refuse
from heapline.engine.groups.member_calls import FetchCall, Loose, SettleCall, settle_all
from heapline.engine.groups.members import Sessions, assign
from heapline.engine.groups.page_reader import Reading
from heapline.engine.groups.pages import Page
from heapline.engine.groups.replies import Answering
from heapline.engine.loaded_topic import RunningTopic
from heapline.logs import Log

log = Log("heapline.engine")
I64 = npt.NDArray[np.int64]
INF = float("inf")
TIME_OUT_ROWS = 16384  # most deliveries per partition that time out in one turn
UNREADABLE = "record corrupt"


class StreamServing:
    def __init__(self, runner: RunningTopic) -> None:
        self._runner = runner
        self.sessions = Sessions(runner.name)
        self.inbox: list[FetchCall | SettleCall] = []  # for the next turn
        self._taken: list[FetchCall | SettleCall] = []  # calls of the turn in progress
        self.waiting: list[FetchCall] = []  # maybe on a topic whose last group was deleted meanwhile
        self.at_disk: set[FetchCall] = set()  # fetches that wait for a page to be read
        self._wakes: dict[str, float] = {}  # latest time at which each group must be checked
        self._units: dict[str, int] = {}  # the unit with the last event that a group's deliveries depend on
        self._totals: dict[int, int] = {}  # stream rows of a partition at the last check
        self._changed: set[str] = set()  # groups whose waiting members must be served again
        self._reading = Reading(runner, self)
        self._answering = Answering(runner, self)
        self.redelivered = self.timeouts = 0
        self.moved_on = 0  # cursors found below the log's start; the reclaimer counts those that it moves itself

    def installed(self) -> None:
        """Reset after the topic was loaded: pages and plans from before are invalid."""
        self._reading.clear()
        self._answering.clear()
        for known in (self._wakes, self._units, self._totals):
            known.clear()
        self._changed.update(call.group for call in self.waiting)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def fetch(self, call: FetchCall, wait: float) -> Fetched:
        runner = self._runner
        runner.check()
        self.inbox.append(call)
        if wait > 0:
            call.timer = asyncio.get_running_loop().call_later(wait, self._give_up, call)
        runner.plan()
        try:
            fetched: Fetched = await call.future
            return fetched
        except asyncio.CancelledError:
            if not call.future.cancelled() and call.future.exception() is None:
                # The call was answered, but its caller was cancelled before it received the answer.
                self._answering.keep(call, call.future.result().batches)
            raise
        finally:
            self.at_disk.discard(call)
            if call.timer is not None:
                call.timer.cancel()

    def _give_up(self, call: FetchCall) -> None:
        call.waits = False
        if self._runner.failure is not None:  # the next turn may be far away
            refuse(call.future, self._runner.failure)
        self._runner.plan()

    async def settle(self, call: SettleCall) -> None:
        self._runner.check()
        self.inbox.append(call)
        self._runner.plan()
        await call.future

    def leave(self, name: str, member: str, session: str, now: Now) -> None:
        """Remove a member from its group. Runs in a turn."""
        group = self.group(name)
        self.sessions.check(name, member, session, member in group.members.leases)
        event = group.decide_leave(member, assign, now.steady)
        if event is not None:
            self.emit(group, 0, event, now)
        self._hand_over(group, now)
        self.sessions.leave(name, member)
        self._answering.forget(name, member)
        for call in [c for c in (*self.waiting, *self.at_disk) if c.group == name and c.member == member]:
            give(call.future, Fetched([], [], group.members.generation))

    def noted(self, group: Group) -> None:
        """Register a group that was just created."""
        self._units[group.name] = self._runner.loaded.journal.open_unit_number
        self.look_again(group.name)

    def ended(self, name: str) -> None:
        """Clean up after a group was deleted; waiting fetches get their error in the next turn."""
        self.sessions.end_group(name)
        self.look_again(name)
        self._units.pop(name, None)
        self._answering.forget(name)
        if not self._runner.loaded.topic.groups:
            self._reading.clear()

    def group(self, name: str) -> Group:
        group = self._runner.loaded.topic.groups.by_name.get(name)
        if group is None:
            raise GroupNotFound(self._runner.name, name)
        return group

    def refuse_all(self, error: HeaplineError) -> None:
        for call in (*self.inbox, *self._taken, *self.waiting, *self.at_disk):
            refuse(call.future, error)
        self.inbox, self._taken, self.waiting = [], [], []

    def refuse_taken(self, error: HeaplineError) -> None:
        """Refuse the calls of a turn that failed."""
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
        calls = [call for call in self._taken if isinstance(call, FetchCall)]
        self._hear(calls, now)
        self._tick(now)
        fresh = self._fresh_partitions()
        if self.waiting:
            woken = [call for call in self.waiting if self._is_woken(call, fresh)]
            if woken:
                found = set(woken)
                self.waiting = [call for call in self.waiting if call not in found]
                self._taken += woken
                calls += woken
        self._changed.clear()
        for call in calls:
            self._serve(call, now)
        while self._changed and self.waiting:  # members joined: report the new assignment to the others
            changed, self._changed = self._changed, set()
            woken = [call for call in self.waiting if call.group in changed]
            self.waiting = [call for call in self.waiting if call.group not in changed]
            self._taken += woken
            for call in woken:
                self._serve(call, now)
        self._taken = []

    def _hear(self, calls: list[FetchCall], now: Now) -> None:
        """Renew the members of these calls: a caller is alive, however long the process was stalled."""
        for call in calls:
            group = self._runner.loaded.topic.groups.by_name.get(call.group)
            if group is not None and self.sessions.is_current(call.group, call.member, call.session):
                group.beat(call.member, now.steady)

    def _fresh_partitions(self) -> set[int]:
        """Return the partitions that got stream rows since the last check."""
        counts, totals = self._runner.loaded.topic.counts, self._totals
        fresh = {p for p in self._runner.loaded.topic.changed if counts[p].total != totals.get(p)}
        for p in fresh:
            totals[p] = counts[p].total
        return fresh

    def _is_woken(self, call: FetchCall, fresh: set[int]) -> bool:
        if call.future.done() or not call.waits or call.group in self._changed:
            return True
        group = self._runner.loaded.topic.groups.by_name.get(call.group)
        return group is None or any(group.members.may_hold(call.member, p) for p in fresh)

    def emit(self, group: Group, partition: int, event: AnyEvent, now: Now) -> None:
        runner = self._runner
        runner.loaded.emit(runner.loaded.topic.partitions[partition], event, now)
        if isinstance(event, GroupAcked):
            return  # no later delivery depends on it
        self._units[group.name] = runner.loaded.journal.open_unit_number
        self.look_again(group.name)
        if isinstance(event, GroupMembers):
            log.info(
                "partitions reassigned",
                topic=runner.name,
                group=group.name,
                generation=event.generation,
                members=len(event.members),
            )

    def rests_on(self, name: str) -> int:
        """Return the unit that must be durable before rows of the group are delivered."""
        return self._units.get(name, 0)

    def look_again(self, name: str) -> None:
        """Serve the waiting members of a changed group again and recompute when it must be checked."""
        self._changed.add(name)
        self._wakes.pop(name, None)

    # -- time ------------------------------------------------------------------------------------------------------

    def next_wake(self, now: Now) -> float:
        for group in self._runner.loaded.topic.groups:
            if group.name not in self._wakes:
                at = group.next_deadline(now.steady)
                self._wakes[group.name] = INF if at is None else at
        return min(self._wakes.values(), default=INF)

    def _tick(self, now: Now) -> None:
        groups = self._runner.loaded.topic.groups.by_name
        for name in [name for name, at in self._wakes.items() if at <= now.steady or name not in groups]:
            del self._wakes[name]
            if name in groups:
                self._let_time_pass(groups[name], now)

    def _let_time_pass(self, group: Group, now: Now) -> None:
        for call in self.waiting:
            if call.group == group.name and not call.future.done():
                group.beat(call.member, now.steady)  # a waiting member is alive
        for number in list(group.partitions):
            late = group.overdue(number, now.steady, TIME_OUT_ROWS)
            if len(late):
                self.timeouts += len(late)
                for event in group.decide_time_out(number, late, self.draw(len(late)), now.steady):
                    self.emit(group, number, event, now)
        gone = group.members.overdue(now.steady)
        expired = group.decide_expire(assign, now.steady)
        if expired is not None:
            self.emit(group, 0, expired, now)
            for member in gone:
                self.sessions.leave(group.name, member)
                self._answering.forget(group.name, member)
        self._hand_over(group, now)
        self._changed.add(group.name)  # a row may be due for redelivery

    def _hand_over(self, group: Group, now: Now) -> None:
        event = group.decide_hand_over(now.steady)
        if event is not None:
            self.emit(group, 0, event, now)

    def acked(self, group: Group, now: Now) -> None:
        """Hand over the revoked partitions whose outstanding rows are now settled."""
        if group.members.revoking():
            self._hand_over(group, now)

    def grown(self, now: Now) -> None:
        """Assign the added partitions of a grown topic to the members."""
        for group in self._runner.loaded.topic.groups:
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
            self._runner.loaded.committer.answer(lambda: refuse(call.future, error), (call.future,))

    def _enter(self, call: FetchCall, now: Now) -> Group:
        """Renew the member; it joins the group if it is not a member yet."""
        group = self.group(call.group)
        event = group.decide_join(call.member, assign, now.steady)
        took_over = self.sessions.enter(group.name, call.member, call.session)
        if event is not None:
            self.emit(group, 0, event, now)
        elif took_over:
            group.restarted(call.member, now.steady)
            self._answering.forget(group.name, call.member)
            self.look_again(group.name)
            self._hand_over(group, now)
        group.beat(call.member, now.steady)
        return group

    def _look(self, group: Group, call: FetchCall, now: Now) -> None:
        """Answer the call with the available rows, or let it wait."""
        parts: list[StreamBatch | Loose] = list(self._answering.left_over(group, call))
        pages: dict[int, Page] = {}
        missing: list[int] = []
        if call.max_messages and not parts:
            shares = self._take(group, call, now, pages, missing)
            for share in shares:
                parts += self._answering.split(group, share, pages.get(share.partition), now)
        if parts:
            self._answering.answer(call, group, parts)
            self._reading.ahead(group, missing)
        elif missing:
            self._reading.wait(call, group, missing)
        elif call.waits and self._answering.knows_generation(call, group.members.generation):
            self.waiting.append(call)
        else:
            self._answering.answer(call, group, [])

    def _take(self, group: Group, call: FetchCall, now: Now, pages: dict[int, Page], missing: list[int]) -> list[Share]:
        """Take rows of the partitions that the member reads, as far as their pages are in memory."""
        while True:
            rows: dict[int, StreamRows] = {}
            missing.clear()
            for number in group.members.reads(call.member):
                found = self._reading.page_at(group, number)
                if isinstance(found, Page):
                    pages[number], rows[number] = found, found.stream_rows()
                elif found is not None:
                    rows[number] = found
                elif group.partitions[number].cursor < self._runner.loaded.topic.partitions[number].state.offset:
                    missing.append(number)
            before = {number: group.partitions[number].cursor for number in rows}
            shares = group.take(call.member, call.max_messages, rows, now.steady, call.max_bytes)
            for number, page in pages.items():
                self._reading.passed(group, number, page)
            if shares:
                self._sooner(group, now)
                for share in shares:
                    if len(group.partitions[share.partition].failed):
                        self.redelivered += int(np.count_nonzero(share.attempts > 1))
                return shares
            if all(group.partitions[number].cursor == cursor for number, cursor in before.items()):
                return []

    def _sooner(self, group: Group, now: Now) -> None:
        """Plan a check for the earliest time at which the deliveries just made can time out."""
        if group.name in self._wakes:
            deadline = now.steady + round(group.config.ack_timeout * 1000)
            self._wakes[group.name] = min(self._wakes[group.name], deadline)
