"""Firings with crashes at every step, restarts, changes and clock jumps, against a walk by the minute.

The queue is a fake that keeps what it accepted and recognizes numbers. Records and snapshots are encoded and
decoded. All schedules make up everything they missed, so each firing must be present exactly once.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from heapline.contract.message import Outgoing
from heapline.contract.schedules import Schedule, make_schedule
from heapline.core.schedules.book import Book
from heapline.core.schedules.records import Record, decode_record, decode_state, encode_record, encode_state
from tests.unit.schedules.naive import DAY, MINUTE, Cron, Field, ms

NAMES = ["default/a", "default/b"]
ZONE = "Europe/Berlin"
START = ms("2026-10-24T22:00")  # clocks are set back three hours later


def field(text: str, *values: int) -> Field:
    return Field(text, frozenset(values))


ANY = field("*", *range(32)), field("*", *range(13)), field("*", *range(7))
CRONS = [
    Cron(field("*/20", 0, 20, 40), field("*", *range(24)), *ANY),
    Cron(field("30", 30), field("2", 2), *ANY),
    Cron(field("15,45", 15, 45), field("1-3", 1, 2, 3), *ANY),
    Cron(field("0", 0), field("*/6", 0, 6, 12, 18), *ANY),
]


@cache
def walked(cron: Cron) -> list[int]:
    """Walked once, over all days that a run can use."""
    return cron.walk(ZONE, START - 6 * DAY, START + 9 * DAY)


def walk(cron: Cron, after: int, until: int) -> list[int]:
    return walked(cron)[bisect_right(walked(cron), after) : bisect_right(walked(cron), until)]


class Crash(Exception):
    pass


class Expected(NamedTuple):
    """The model of one schedule."""

    cron: Cron
    done: int
    paused: bool = False


class FakeQueue:
    def __init__(self) -> None:
        self.numbers: set[tuple[str, int, int]] = set()
        self.accepted: list[tuple[str, int]] = []  # schedule, time

    def enqueue(self, name: str, incarnation: int, message: Outgoing) -> None:
        assert message.seq is not None
        number = name, incarnation, message.seq
        if number not in self.numbers:
            self.numbers.add(number)
            self.accepted.append((name, message.seq))


class ExactlyOnce(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = START
        self.queue = FakeQueue()
        self.snapshot = encode_state(Book().to_state())
        self.journal: list[bytes] = []
        self.book = Book()
        self.model: dict[str, Expected] = {}
        self.expected: set[tuple[str, int]] = set()
        for name, cron in zip(NAMES, CRONS, strict=False):
            self.write(self.book.set(self.schedule(name, cron), self.now))
            self.model[name] = Expected(cron, self.now)

    @staticmethod
    def schedule(name: str, cron: Cron, payload: bytes = b"") -> Schedule:
        return make_schedule(name, topic="t", cron=cron.text, tz=ZONE, misfire="all", makeup_max=1000, payload=payload)

    def write(self, record: Record | None) -> None:
        if record is not None:
            self.journal.append(encode_record(record))

    def restart(self) -> None:
        self.book = Book.from_state(decode_state(self.snapshot, "snapshot"))
        for data in self.journal:
            self.book.apply(decode_record(data, "journal"))

    def settle(self, steps: int | None, limit: int = 1000) -> None:
        """Enqueue, record, apply, in small steps; the process dies after this many of them."""
        left = steps

        def step() -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise Crash

        while taken := self.book.take_due(self.now, limit):
            for one in taken:
                for message in one.messages:
                    step()
                    self.queue.enqueue(one.name, one.record.incarnation, message)
                step()
                self.write(one.record)
                step()
                self.book.apply(one.record)
        for name, known in self.model.items():
            if not known.paused:
                fires = walk(known.cron, known.done, self.now)
                self.expected |= {(name, at) for at in fires}
                self.model[name] = known._replace(done=max([known.done, *fires]))

    @rule(minutes=st.integers(1, 400), seconds=st.integers(0, 59))
    def time_passes(self, minutes: int, seconds: int) -> None:
        self.now += minutes * MINUTE + seconds * 1000

    @rule(minutes=st.integers(1, 300))
    def clock_is_set_back(self, minutes: int) -> None:
        self.now -= minutes * MINUTE

    @rule(limit=st.sampled_from([1, 3, 1000]))
    def fire(self, limit: int) -> None:
        self.settle(None, limit)
        assert set(self.queue.accepted) == self.expected

    @rule(steps=st.integers(0, 12), limit=st.sampled_from([1, 3, 1000]))
    def fire_and_crash(self, steps: int, limit: int) -> None:
        try:
            self.settle(steps, limit)
        except Crash:
            self.restart()

    @rule()
    def restart_in_peace(self) -> None:
        before = self.book.to_state()
        self.restart()
        assert self.book.to_state() == before

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = encode_state(self.book.to_state())
        self.journal = []

    @rule(name=st.sampled_from(NAMES), cron=st.sampled_from(CRONS), payload=st.sampled_from([b"", b"new"]))
    def change(self, name: str, cron: Cron, payload: bytes) -> None:
        self.settle(None)
        record = self.book.set(self.schedule(name, cron, payload), self.now)
        self.write(record)
        if record is not None:
            known = self.model[name]
            self.model[name] = known._replace(cron=cron, done=max(known.done, self.now))

    @rule(name=st.sampled_from(NAMES))
    def pause_or_resume(self, name: str) -> None:
        self.settle(None)
        known = self.model[name]
        if known.paused:
            self.write(self.book.resume(name, self.now))
            self.model[name] = known._replace(paused=False, done=max(known.done, self.now))
        else:
            self.write(self.book.pause(name, self.now))
            self.model[name] = known._replace(paused=True)

    @invariant()
    def no_moment_fired_twice(self) -> None:
        assert len(set(self.queue.accepted)) == len(self.queue.accepted)

    @invariant()
    def nothing_fired_early_or_unasked(self) -> None:
        owed = {
            (name, at)
            for name, known in self.model.items()
            if not known.paused
            for at in walk(known.cron, known.done, self.now + 400 * MINUTE)
        }
        assert set(self.queue.accepted) <= self.expected | owed


ExactlyOnce.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestExactlyOnce = ExactlyOnce.TestCase
