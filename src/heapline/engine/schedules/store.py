"""Storage of schedules: an internal topic with one message per schedule, and the book in memory.

A message holds the complete state of one schedule (`BookState` with one entry). A change writes the new state and
cancels the previous message in one turn. If a crash separates the two, the later message wins on reading. Each message
contains the last incarnation number given out; when a schedule is deleted, a message without a schedule holds it. So
journal, group commit, snapshots, reclaiming, backups and `journal verify` work as for any topic.

`KeptBook` is the book together with its store: every value read from it is durable. A change is made in the book and
its write begins in the same step (`keep`), so writes have the order of the changes. A read waits for the writes in
progress. If a write fails, the state on disk is unknown: the book is discarded and read again (`know`) when all writes
in progress have ended. A done mark that is lost this way does no harm, because the topic knows which firings it has
(see firings.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.message import Outgoing
from heapline.contract.schedules import Schedule
from heapline.core.now import Now
from heapline.core.schedules.book import Book
from heapline.core.schedules.records import BookState, ScheduleState, decode_state, encode_state
from heapline.engine.columns import EnqueueCall
from heapline.engine.internal_topic import CONFIG, InternalTopic, cancel
from heapline.engine.runner import TopicRunner

NAME = "schedules"
STATE_BYTES = 4096  # upper bound of a state without payload, key and headers
_HEAD = ""  # key of the message without a schedule
_WHERE = "the journal of the schedules"
T = TypeVar("T")


def check_size(schedule: Schedule) -> None:
    texts = (schedule.key or "", schedule.fairness_key or "", *schedule.headers, *schedule.headers.values())
    size = len(schedule.payload) + sum(len(text.encode()) + 8 for text in texts)
    limit = CONFIG.max_payload_bytes - STATE_BYTES
    if size > limit:
        raise BadRequest(
            f"a schedule's message of {size} bytes is over the {limit} that are kept: store the rest elsewhere, and "
            "send where it is"
        )


class ScheduleStore:
    """Reads and writes schedules."""

    def __init__(self, topic: InternalTopic) -> None:
        self.topic = topic
        self._ids: dict[str, int] = {}  # schedule -> id of its message
        self._superseded: list[int] = []  # messages that a crash left over

    async def read(self) -> BookState:
        """Return everything on disk. No write may run meanwhile."""
        return self._latest([(id, decode_state(data, _WHERE)) for id, data in await self.topic.read()])

    def _latest(self, found: list[tuple[int, BookState]]) -> BookState:
        self._ids, self._superseded = {}, []
        states: dict[str, ScheduleState] = {}
        for id, kept in found:
            name = kept.schedules[0].schedule.name if kept.schedules else _HEAD
            if name in self._ids:
                self._superseded.append(self._ids[name])
            self._ids[name] = id
            states.update((state.schedule.name, state) for state in kept.schedules)
        numbers = [kept.incarnations for _, kept in found]
        return BookState(incarnations=max(numbers, default=0), schedules=list(states.values()))

    async def write(self, book: Book, names: Iterable[str]) -> None:
        """Write these schedules as the book has them when the write runs, or delete those that it no longer has."""
        runner, names = await self.topic.create(), list(names)
        await runner.bring(lambda now: self._decide(runner, book, names, now))

    def _decide(self, runner: TopicRunner, book: Book, names: list[str], now: Now) -> None:
        kept: dict[str, BookState] = {}
        for name in names:
            states = [book.get(name).state] if name in book else []
            kept[name if states else _HEAD] = BookState(incarnations=book.incarnations, schedules=states)
        calls = [EnqueueCall(runner.future(), message=Outgoing(encode_state(state))) for state in kept.values()]
        answers = [result for _, result in runner.loaded.admission.admit(calls, now)]
        for result in answers:
            if isinstance(result, Exception):
                raise result
        before = [self._ids.pop(name) for name in {*names, *kept} if name in self._ids]
        cancel(runner, [*before, *self._superseded], now)
        self._superseded = []
        self._ids |= {name: result.id for name, result in zip(kept, answers, strict=True)}


class KeptBook:
    def __init__(self, store: ScheduleStore) -> None:
        self.store = store
        self.book = Book()
        self._is_known = False  # whether the book matches the disk
        self._reading = asyncio.Lock()
        self._writes: set[asyncio.Future[bool]] = set()  # in progress; whether they succeeded
        self._put_off: dict[str, int] = {}  # schedule -> time of the next attempt, unless it succeeds first

    async def know(self) -> None:
        """Ensure that the book matches the disk, or raise."""
        if self._is_known:
            return
        async with self._reading:  # one task reads for all concurrent callers
            if self._is_known:
                return
            while self._writes:
                await asyncio.wait(self._writes)
            self.book, self._is_known = Book.from_state(await self.store.read()), True
            for name, until in self._put_off.items():
                self.book.postpone(name, until)

    async def keep(self, name: str) -> None:
        """Make a change durable. Call it in the same step as the change, so that no reload comes between."""
        write: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writes.add(write)
        succeeded = False
        try:
            await self.store.write(self.book, [name])
            succeeded = True
        finally:
            self._is_known = self._is_known and succeeded
            self._writes.discard(write)
            write.set_result(succeeded)

    async def look(self, look: Callable[[Book], T]) -> T:
        """Return the result of `look` on the book, or raise its error, once that state is durable."""
        while True:
            await self.know()
            error: HeaplineError | None = None
            try:
                found = look(self.book)
            except HeaplineError as problem:
                error = problem  # outlives the except block
            writes = list(self._writes)
            if writes:
                await asyncio.wait(writes)
            if all(write.result() for write in writes):
                if error is not None:
                    raise error
                return found

    def postpone(self, name: str, until: int) -> None:
        """Skip the schedule until `until`, even if the book is reloaded after a failed write."""
        self._put_off[name] = until
        self.book.postpone(name, until)

    def has_succeeded(self, name: str) -> None:
        """Stop skipping a schedule that succeeded or was deleted."""
        self._put_off.pop(name, None)
