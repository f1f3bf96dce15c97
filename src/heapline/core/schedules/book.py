"""All schedules of a broker: which are due, which are next, and which records to write. It does not enqueue messages.

Theory of operation. Each schedule has a *done* mark: every firing up to it is done. Records move it forward (only
`rewind` moves it back). The owed firings follow from the mark and the time alone. `take_due` reads and changes nothing.
Its caller does three things, in this order, for each schedule that it returns:

    1. enqueue the messages, and wait until they are durable;
    2. make the record durable;
    3. `apply` the record.

A crash before 1 is acknowledged or before 2 leaves the mark unchanged: the same firings are taken again under the same
numbers (incarnation and time), and the topic recognizes those that it has (see engine/schedules/firings.py). A crash
after 2 is harmless. The opposite order would lose firings.

`set`, `pause`, `resume`, `delete` and `rewind` decide and apply in one step. The record that they return must become
durable before the caller answers; if that fails, discard the book and load it again. They take effect from now on:
first enqueue the firings that `take_one` returns, or they are dropped. A book is rebuilt by `apply` alone, starting
from `from_state`.

A clock that is set forward looks like an absence, so `misfire` applies. If the clock is set back, schedules wait until
it reaches their marks again, so nothing fires twice. `ran_ahead` lists those schedules, and `rewind` lets one continue.
"""

from __future__ import annotations

from datetime import datetime
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from heapline.contract.config import short
from heapline.contract.errors import BadRequest, ResourceExhausted, ScheduleNotFound
from heapline.contract.message import Outgoing, from_ms
from heapline.contract.schedules import Schedule, ScheduleInfo, check_schedule, schedule_name
from heapline.core.schedules.records import (
    BookState,
    Record,
    ScheduleDeleted,
    ScheduleFired,
    SchedulePaused,
    ScheduleResumed,
    ScheduleSet,
    ScheduleState,
)
from heapline.core.schedules.timetable import Timetable

R = TypeVar("R", bound=Record)
SCHEDULES_MAX = 100_000
#: Longest sleep that `next_wake` returns, so that a changed clock is noticed.
LOOK_AGAIN_MS = 10_000
#: A schedule that is done this far ahead of the clock was fired by a clock that has since been set back.
AHEAD_MS = 60_000


class Taken(NamedTuple):
    """The firings that one schedule owes: enqueue `messages` to `topic`, make `record` durable, then apply it."""

    name: str
    topic: str
    messages: list[Outgoing]  # empty if all were skipped; then only the record is written
    record: ScheduleFired
    missed: bool  # some firings were late, and `misfire` decided
    times: list[int]  # firing times of the messages


class Standing(NamedTuple):
    """Current state of a schedule."""

    state: ScheduleState
    next_ms: int | None  # its next firing; None if it is paused, ended, or has a problem
    problem: str | None  # why it cannot fire: a time zone that this machine does not know


class _Held:
    __slots__ = ("problem", "state", "table", "wake")

    def __init__(self, state: ScheduleState) -> None:
        self.state = state
        self.wake: int | None = None
        self.problem: str | None = None
        self.table: Timetable | None = None
        try:
            self.table = Timetable(state.schedule, state.anchor_ms)
        except BadRequest as error:  # it was valid where it was created; the book must still open here
            self.problem = str(error)

    def next_ms(self) -> int | None:
        if self.table is None or self.state.paused_ms is not None:
            return None
        return self.table.next_fire(self.state.done_ms)


class Book:
    def __init__(self, schedules_max: int = SCHEDULES_MAX) -> None:
        self._max = schedules_max
        self._held: dict[str, _Held] = {}
        self._incarnations = 0
        # (wake, name). An entry is valid if it is its schedule's current wake. Stale ones are skipped or swept.
        self._heap: list[tuple[int, str]] = []

    # -- changes ---------------------------------------------------------------------------------------------------

    def set(self, schedule: Schedule, now: int) -> ScheduleSet | None:
        """Create or replace the schedule of that name. Return None if it is unchanged.

        A changed schedule starts a new incarnation, which fires nothing at or before now. A pause stays in force.
        """
        check_schedule(schedule)
        held = self._held.get(schedule.name)
        if held is None:
            if len(self._held) >= self._max:
                raise ResourceExhausted("the number of schedules", self._max)
            return self._begin(schedule, now, now, now)
        if held.state.schedule == schedule:
            return None
        kept = held.state.schedule.timing == schedule.timing
        return self._begin(schedule, held.state.anchor_ms if kept else now, max(now, held.state.done_ms), now)

    def rewind(self, name: str, now: int) -> ScheduleSet:
        """Continue a schedule from now although its mark is later, after a clock that was ahead has been corrected."""
        state = self._find(name).state
        return self._begin(state.schedule, state.anchor_ms, now, now)

    def outdo(self, name: str, incarnation: int, done: int, now: int) -> ScheduleSet:
        """Continue under an incarnation above the given one.

        The topic knows that incarnation, but this older copy of the book does not. Firings up to `done` are done in the
        topic.
        """
        state = self._find(name).state
        number = max(self._incarnations, incarnation) + 1
        return self._done(ScheduleSet(state.schedule, number, state.anchor_ms, max(done, state.done_ms), now))

    def pause(self, name: str, now: int) -> SchedulePaused | None:
        """Stop firing until the schedule is resumed. Return None if it is already paused."""
        state = self._find(name).state
        return None if state.paused_ms is not None else self._done(SchedulePaused(state.schedule.name, now))

    def resume(self, name: str, now: int) -> ScheduleResumed | None:
        """Resume firing without making up the firings missed during the pause. Return None if it is not paused."""
        state = self._find(name).state
        if state.paused_ms is None:
            return None
        return self._done(ScheduleResumed(state.schedule.name, max(now, state.done_ms)))

    def delete(self, name: str) -> ScheduleDeleted:
        return self._done(ScheduleDeleted(self._find(name).state.schedule.name))

    def apply(self, record: Record) -> None:
        """Apply a record. A late record of an earlier incarnation changes nothing."""
        if isinstance(record, ScheduleSet):
            self._apply_set(record)
            return
        held = self._held.get(record.name)
        if held is None:
            return
        if isinstance(record, ScheduleDeleted):
            del self._held[record.name]
            return
        state = held.state
        if isinstance(record, SchedulePaused):
            state = replace(state, paused_ms=record.at_ms)
        elif isinstance(record, ScheduleResumed):
            state = replace(state, paused_ms=None, done_ms=record.done_ms)
        elif record.incarnation == state.incarnation and record.until_ms > state.done_ms:
            fired = state.fired_ms if record.fired_ms is None else record.fired_ms
            count = state.fired_count + record.count
            state = replace(state, done_ms=record.until_ms, fired_ms=fired, fired_count=count)
        held.state = state
        self._plan(held)

    # -- firing ----------------------------------------------------------------------------------------------------

    def next_wake(self, now: int) -> int | None:
        """Return when to call `take_due` again (immediately if at or before now), or None if nothing will ever fire."""
        while self._heap and self._is_stale(self._heap[0]):
            heappop(self._heap)
        return min(self._heap[0][0], now + LOOK_AGAIN_MS) if self._heap else None

    def take_due(self, now: int, limit: int = 1000) -> list[Taken]:
        """Return the firings owed now, longest overdue first, up to about `limit` messages.

        It changes nothing: until the records are applied, the same firings are owed. If `limit` messages are returned,
        there may be more.
        """
        taken: list[Taken] = []
        met: dict[str, int] = {}
        while self._heap and self._heap[0][0] <= now and limit > 0:
            wake, name = heappop(self._heap)
            if name in met or self._is_stale((wake, name)):
                continue
            met[name] = wake
            one = self._owed(self._held[name], now, limit)
            if one is not None:
                taken.append(one)
                limit -= max(1, len(one.messages))
        for name, wake in met.items():
            heappush(self._heap, (wake, name))
        return taken

    def take_one(self, name: str, now: int, limit: int = 1000) -> Taken | None:
        """Return the firings that one schedule owes. Handle them before you change, pause or delete it."""
        return self._owed(self._find(name), now, limit)

    def postpone(self, name: str, until: int) -> None:
        """Exclude a schedule from `take_due` until then because its messages could not be enqueued.

        So it does not delay others. It still owes the messages. This is not recorded.
        """
        held = self._held.get(schedule_name(name))
        if held is not None and held.wake is not None:
            held.wake = max(held.wake, until)
            self._push(held.wake, held)

    # -- queries ---------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Standing:
        held = self._find(name)
        return Standing(held.state, held.next_ms(), held.problem)

    def list_all(self, namespace: str | None = None) -> list[Standing]:
        """Return all schedules, or those of a namespace, by name."""
        return [self.get(name) for name in sorted(self._held) if namespace in (None, name.partition("/")[0])]

    def names(self) -> list[str]:
        return sorted(self._held)

    def ran_ahead(self, now: int, slack_ms: int = 60_000) -> list[str]:
        """Return schedules that are done with times in the future: the clock was ahead and has been set back."""
        return [name for name, held in sorted(self._held.items()) if held.state.done_ms > now + slack_ms]

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def incarnations(self) -> int:
        """The last incarnation number that was assigned."""
        return self._incarnations

    def to_state(self) -> BookState:
        return BookState(
            incarnations=self._incarnations, schedules=[self._held[name].state for name in sorted(self._held)]
        )

    @classmethod
    def from_state(cls, state: BookState, schedules_max: int = SCHEDULES_MAX) -> Book:
        book = cls(schedules_max)
        book._incarnations = state.incarnations
        for one in state.schedules:
            held = book._held[one.schedule.name] = _Held(one)
            book._plan(held)
        return book

    # -- internals -------------------------------------------------------------------------------------------------

    def _begin(self, schedule: Schedule, anchor: int, done: int, now: int) -> ScheduleSet:
        if Timetable(schedule, anchor).next_fire(done) is None:
            if schedule.cron is not None and schedule.starts_ms is schedule.ends_ms is None:
                from heapline.contract.cron import never  # loads time zones, which few processes need

                raise never(schedule.cron)
            raise BadRequest("the schedule never fires: no firing is between now, starts and ends; change them")
        return self._done(ScheduleSet(schedule, self._incarnations + 1, anchor, done, now))

    def _done(self, record: R) -> R:
        self.apply(record)
        return record

    def _apply_set(self, record: ScheduleSet) -> None:
        self._incarnations = max(self._incarnations, record.incarnation)
        held = self._held.get(record.schedule.name)
        former = held.state if held else None
        state = ScheduleState(
            schedule=record.schedule,
            incarnation=record.incarnation,
            anchor_ms=record.anchor_ms,
            done_ms=record.done_ms,
            created_ms=former.created_ms if former else record.at_ms,
            changed_ms=record.at_ms,
            paused_ms=former.paused_ms if former else None,
            fired_ms=former.fired_ms if former else None,
            fired_count=former.fired_count if former else 0,
        )
        self._held[record.schedule.name] = held = _Held(state)
        self._plan(held)

    def _find(self, name: str) -> _Held:
        full = schedule_name(name)
        held = self._held.get(full)
        if held is None:
            raise ScheduleNotFound(full)
        return held

    def _owed(self, held: _Held, now: int, limit: int) -> Taken | None:
        state = held.state
        if held.table is None or state.paused_ms is not None:
            return None
        owed = held.table.owed(state.done_ms, now)
        if owed.until <= state.done_ms:
            return None
        times, until = owed.times, owed.until
        if len(times) > limit:
            times = times[:limit]
            until = times[-1]
        schedule = state.schedule
        messages = [schedule.message(at) for at in times]
        record = ScheduleFired(schedule.name, state.incarnation, until, times[-1] if times else None, len(times))
        return Taken(schedule.name, schedule.topic, messages, record, owed.missed, times)

    def _plan(self, held: _Held) -> None:
        held.wake = held.next_ms()
        if held.wake is not None:
            self._push(held.wake, held)

    def _push(self, wake: int, held: _Held) -> None:
        heappush(self._heap, (wake, held.state.schedule.name))
        if len(self._heap) > 2 * len(self._held) + 64:
            self._heap = [(h.wake, name) for name, h in self._held.items() if h.wake is not None]
            heapify(self._heap)

    def _is_stale(self, entry: tuple[int, str]) -> bool:
        held = self._held.get(entry[1])
        return held is None or held.wake != entry[0]


def schedule_info(standing: Standing, trouble: str | None, now: int) -> ScheduleInfo:
    """Return the public form: seconds, datetimes and short names. `trouble` is why the last firing failed."""
    state, schedule = standing.state, standing.state.schedule
    problem = standing.problem or trouble
    if problem is None and state.done_ms > now + AHEAD_MS:
        done = from_ms(state.done_ms).isoformat(timespec="seconds")
        problem = f"the clock was set back; it fires after {done}, or now if you delete and recreate it"
    return ScheduleInfo(
        name=short(schedule.name),
        topic=short(schedule.topic),
        cron=schedule.cron,
        every=None if schedule.every_ms is None else schedule.every_ms / 1000,
        tz=None if schedule.cron is None else schedule.tz,
        starts=_instant(schedule.starts_ms),
        ends=_instant(schedule.ends_ms),
        misfire=schedule.misfire,
        grace=schedule.grace_ms / 1000,
        makeup_max=schedule.makeup_max,
        payload=schedule.payload,
        priority=schedule.priority,
        key=schedule.key,
        headers=schedule.headers,
        ttl=schedule.ttl,
        max_retries=schedule.max_retries,
        fairness_key=schedule.fairness_key,
        next_at=_instant(standing.next_ms),
        fired_at=_instant(state.fired_ms),
        fired_count=state.fired_count,
        paused_at=_instant(state.paused_ms),
        created_at=_instant(state.created_ms),
        changed_at=_instant(state.changed_ms),
        problem=problem,
    )


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else from_ms(ms)
