"""All schedules of a broker: what is due, what is next, and what has to be written down. It enqueues nothing itself.

Theory of operation. Each schedule has a *done* mark: every firing up to it is done with. Records move it forward (only
`rewind` moves it back), and what is owed follows from it and the time alone. `take_due` looks and changes nothing.
Whoever calls it does three things, in this order, for each schedule that it names:

    1. enqueue the messages, and wait until they are durable;
    2. make the record durable;
    3. `apply` the record.

A crash before 1 has been answered or before 2 leaves the mark where it was: the same firings are taken again, under
the same numbers (incarnation and moment), and the topic recognises those that it has: see engine/schedules/firing.py.
A crash after 2 is none. The other order would lose firings.

`set`, `pause`, `resume`, `delete` and `rewind` decide and apply at once; the record that they return must become
durable before anybody is answered (if it does not, throw the book away and read it again). They take effect from now
on: enqueue first what `take_one` says is still owed, else it is dropped. A book is rebuilt by `apply` alone, from
`from_state` on.

A clock that is set forward looks like an absence, and `misfire` decides. One that is set back makes schedules wait
until it has caught up with their marks: nothing fires twice. `ran_ahead` names those, and `rewind` lets one go on.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from heapline.errors import BadRequest, ResourceExhausted, ScheduleNotFound
from heapline.model import Outgoing
from heapline.schedules.cron import never
from heapline.schedules.definition import Schedule, check_schedule, schedule_name
from heapline.schedules.records import (
    BookState,
    Record,
    ScheduleDeleted,
    ScheduleFired,
    SchedulePaused,
    ScheduleResumed,
    ScheduleSet,
    ScheduleState,
)
from heapline.schedules.timetable import Timetable

R = TypeVar("R", bound=Record)
SCHEDULES_MAX = 100_000
#: Longest sleep that `next_wake` advises, so that a clock that was set is noticed.
LOOK_AGAIN_MS = 10_000


class Taken(NamedTuple):
    """What one schedule owes: enqueue `messages` to `topic`, then make `record` durable, then apply it."""

    name: str
    topic: str
    messages: list[Outgoing]  # empty if all were skipped: then there is only the record
    record: ScheduleFired
    missed: bool  # some firings were not in time, and `misfire` decided
    times: list[int]  # of the messages


class Standing(NamedTuple):
    """How a schedule stands."""

    state: ScheduleState
    next_ms: int | None  # its next firing; None if it is paused, over, or has a problem
    problem: str | None  # why it cannot fire: a zone that this machine does not know


class _Held:
    __slots__ = ("problem", "state", "table", "wake")

    def __init__(self, state: ScheduleState) -> None:
        self.state = state
        self.wake: int | None = None
        self.problem: str | None = None
        self.table: Timetable | None = None
        try:
            self.table = Timetable(state.schedule, state.anchor_ms)
        except BadRequest as error:  # it was good where it was made; a book must open here all the same
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
        # (wake, name); an entry is good if it is its schedule's present wake. Stale ones are met or swept.
        self._heap: list[tuple[int, str]] = []

    # -- changing --------------------------------------------------------------------------------------------------

    def set(self, schedule: Schedule, now: int) -> ScheduleSet | None:
        """Make a schedule, or change the one of that name; None if it is the same already.

        A changed one starts a new incarnation, which fires nothing at or before now; a pause goes on.
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
        """Let a schedule go on from now, though it is done further: after a clock that was ahead has been set right."""
        state = self._find(name).state
        return self._begin(state.schedule, state.anchor_ms, now, now)

    def outdo(self, name: str, incarnation: int, done: int, now: int) -> ScheduleSet:
        """Go on under a higher number than this one, which the topic knows and this book, an older copy, does not;
        firings up to `done` are done there."""
        state = self._find(name).state
        number = max(self._incarnations, incarnation) + 1
        return self._done(ScheduleSet(state.schedule, number, state.anchor_ms, max(done, state.done_ms), now))

    def pause(self, name: str, now: int) -> SchedulePaused | None:
        """Fire nothing until it is resumed; None if it is paused already."""
        state = self._find(name).state
        return None if state.paused_ms is not None else self._done(SchedulePaused(state.schedule.name, now))

    def resume(self, name: str, now: int) -> ScheduleResumed | None:
        """Go on; what fell due during the pause is not made up. None if it is not paused."""
        state = self._find(name).state
        if state.paused_ms is None:
            return None
        return self._done(ScheduleResumed(state.schedule.name, max(now, state.done_ms)))

    def delete(self, name: str) -> ScheduleDeleted:
        return self._done(ScheduleDeleted(self._find(name).state.schedule.name))

    def apply(self, record: Record) -> None:
        """Carry out what was recorded. One that came too late (of an incarnation that is over) changes nothing."""
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
        """When to call `take_due` again (at or before now: at once); None if nothing will ever fire."""
        while self._heap and self._is_stale(self._heap[0]):
            heappop(self._heap)
        return min(self._heap[0][0], now + LOOK_AGAIN_MS) if self._heap else None

    def take_due(self, now: int, limit: int = 1000) -> list[Taken]:
        """What is owed now, of the longest overdue first, up to about `limit` messages. It changes nothing: until the
        records are applied, the same is owed. If as much as `limit` came, there may be more."""
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
        """What one schedule owes; to be settled before it is changed, paused or deleted."""
        return self._owed(self._find(name), now, limit)

    def postpone(self, name: str, until: int) -> None:
        """Its messages could not be enqueued: leave it out of `take_due` until then, so that it holds up no others.
        It still owes them. This is not recorded."""
        held = self._held.get(schedule_name(name))
        if held is not None and held.wake is not None:
            held.wake = max(held.wake, until)
            self._push(held.wake, held)

    # -- telling ---------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Standing:
        held = self._find(name)
        return Standing(held.state, held.next_ms(), held.problem)

    def list_all(self, namespace: str | None = None) -> list[Standing]:
        """All of them, or those of a namespace, by name."""
        return [self.get(name) for name in sorted(self._held) if namespace in (None, name.partition("/")[0])]

    def names(self) -> list[str]:
        return sorted(self._held)

    def ran_ahead(self, now: int, slack_ms: int = 60_000) -> list[str]:
        """Schedules that are done with times which have not come yet: the clock was ahead and has been set back."""
        return [name for name, held in sorted(self._held.items()) if held.state.done_ms > now + slack_ms]

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def incarnations(self) -> int:
        """The last number that was given out."""
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

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, schedule: Schedule, anchor: int, done: int, now: int) -> ScheduleSet:
        if Timetable(schedule, anchor).next_fire(done) is None:
            if schedule.cron is not None and schedule.starts_ms is schedule.ends_ms is None:
                raise never(schedule.cron)
            raise BadRequest("the schedule never fires: no firing lies between now, starts and ends; move them")
        return self._done(ScheduleSet(schedule, self._incarnations + 1, anchor, done, now))

    def _done(self, record: R) -> R:
        self.apply(record)
        return record

    def _apply_set(self, record: ScheduleSet) -> None:
        self._incarnations = max(self._incarnations, record.incarnation)
        held = self._held.get(record.schedule.name)
        former = held.state if held else None
        state = ScheduleState(
            schedule=record.schedule, incarnation=record.incarnation, anchor_ms=record.anchor_ms,
            done_ms=record.done_ms, created_ms=former.created_ms if former else record.at_ms, changed_ms=record.at_ms,
            paused_ms=former.paused_ms if former else None, fired_ms=former.fired_ms if former else None,
            fired_count=former.fired_count if former else 0,
        )  # fmt: skip
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
