"""The runner of one topic: gathers calls into turns, turns into units, and answers when a unit is durable.

Theory of operation
-------------------
A *turn* takes everything that was asked since the last one, in this order: enqueues, acks and other calls on leases,
calls by hand, what time has brought about, and then pops, so that a pop sees all of it. Each decision is applied at
once and its events join the open unit; answers wait. While one unit is being written by an I/O thread, turns go on and
the next unit gathers: this is group commit without a timer.

*Every answer waits.* An answer is given when the journal is durable up to the point at which it was decided, also
one without events of its own (a duplicate, an empty pop): the state it was read from may not be durable yet.

*A failed write poisons the topic.* Nobody who waits gets an answer other than `TopicReloading`, the state is thrown
away, and the topic is loaded again from what is on disk. An fsync is never repeated.

One thread (the event loop's) runs all of this; only `Journal.commit`, `prepare` and reads run elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import structlog

from heapline.clock import Clock, SteadyClock
from heapline.config import BrokerConfig
from heapline.core.events import AnyEvent, DeadLettered, Expired, LeaseExpired, Resumed
from heapline.core.ids import partition_of
from heapline.core.partition import Decision, Partition
from heapline.engine.admission import Admission, EnqueueCall
from heapline.engine.delivery import Delivery, PopCall, build_messages
from heapline.engine.io import Io
from heapline.engine.loading import Loaded, Loader
from heapline.engine.topic import Topic
from heapline.engine.upkeep import Upkeep
from heapline.errors import Closed, CorruptionError, HeaplineError, ResourceExhausted, StorageFull, TopicReloading
from heapline.journal.unit import SealedUnit
from heapline.model import Message, Now

if TYPE_CHECKING:
    from heapline.broker import Broker

log = structlog.get_logger("heapline.engine")
T = TypeVar("T")

MAINTAIN_ROWS = 65536
RELOAD_PAUSE, RELOAD_PAUSE_MAX = 0.05, 10.0  # seconds between tries to load a topic again
WALL_LOOK_MS = 1000  # how often wall time is looked at while something waits for it: it may jump


class Counters:
    """Totals since the topic was opened."""

    def __init__(self) -> None:
        self.acked = self.nacked = self.timeouts = self.dead = self.expired = 0
        self.commits = self.bytes_written = self.reloads = self.corrupt = 0


class TopicRunner:
    def __init__(self, loader: Loader, io: Io, clock: Clock, config: BrokerConfig, broker: Broker) -> None:
        self.name = loader.name
        self.loader = loader
        self.io = io
        self.config = config
        self.counters = Counters()
        self._clock = clock
        self._broker = broker
        self._inbox: list[EnqueueCall] = []
        self._acks: list[tuple[list[int], list[int], asyncio.Future[Any]]] = []
        self._calls: list[tuple[Callable[[Now], None], asyncio.Future[Any] | None]] = []
        self._pops: deque[PopCall] = deque()
        self._answers: deque[tuple[int, Callable[[], None], Sequence[asyncio.Future[Any]]]] = deque()
        self._queue: deque[SealedUnit] = deque()
        self._committing: SealedUnit | None = None
        self._between: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._preparing = False
        self._turn_planned = False
        self._timer: asyncio.TimerHandle | None = None
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._failure: HeaplineError | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wakes: list[float] = []
        self._dirty: set[int] = set()
        self.upkeep = Upkeep(self)
        self.snapshot_unit = 0
        self.bytes_since_snapshot = 0

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._install(await self.io.run(self.loader.load))
        self.spawn(self.upkeep.run())
        if self.topic.config.fsync == "interval":
            self.spawn(self.upkeep.sync_at_intervals(self.topic.config.fsync_interval))

    def _install(self, loaded: Loaded) -> None:
        self.topic: Topic = loaded.topic
        self.journal = loaded.journal
        self.snapshots = loaded.snapshots
        self.snapshot_unit = loaded.snapshot_unit
        self.bytes_since_snapshot = 0
        self.steady = SteadyClock(self._clock, loaded.time)
        self.admission = Admission(self.topic, self.journal)
        self.delivery = Delivery(self.topic, self.journal)
        self._wakes = [0.0] * len(self.topic.partitions)
        self._failure = None
        self._plan_turn()
        self._prepare_soon()

    async def close(self, reason: HeaplineError | None = None) -> None:
        """Refuse what is new (for that reason), make durable what was decided, give the files back."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._refuse_all(reason or Closed())
        while self._failure is None and (self._committing or self._preparing or self._queue or self._open):
            self._pump()
            await asyncio.sleep(0 if self._committing is None else 0.001)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "journal"):
            await self.io.run(self.journal.close)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this topic's own, cancelled when it closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def _open(self) -> bool:
        return hasattr(self, "topic") and self.topic.has_open_unit

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    @property
    def is_serving(self) -> bool:
        return not self._closed and self._failure is None

    def check(self) -> None:
        if self._closed:
            raise Closed
        if self._failure is not None:
            raise self._failure

    # -- asking ----------------------------------------------------------------------------------------------------

    def future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def enqueue(self, call: EnqueueCall) -> Any:
        self.check()
        if self._backed_up:
            await self._wait_for_room()
        self._inbox.append(call)
        self._plan_turn()
        return await call.future

    async def call(self, decide: Callable[[Now], T]) -> T:
        """Run a decision in the next turn; its result is the answer, once durable."""
        self.check()
        future = self.future()

        def run(now: Now) -> None:
            try:
                result = decide(now)
            except HeaplineError as problem:
                error = problem  # outlives the except block
                self._answer(lambda: _refuse(future, error), (future,))
            else:
                self._answer(lambda: _give(future, result), (future,))

        self._calls.append((run, future))
        self._plan_turn()
        result: T = await future
        return result

    async def ack(self, ids: list[int], tokens: list[int]) -> list[int]:
        """Ack these leases; the ids that were not held."""
        self.check()
        future = self.future()
        self._acks.append((ids, tokens, future))
        self._plan_turn()
        lost: list[int] = await future
        return lost

    async def pop(self, call: PopCall, wait: float) -> Any:
        self.check()
        self._pops.append(call)
        if wait > 0:
            call.timer = asyncio.get_running_loop().call_later(wait, self._give_up, call)
        self._plan_turn()
        try:
            return await call.future
        finally:
            if call.timer is not None:
                call.timer.cancel()

    def _give_up(self, call: PopCall) -> None:
        call.waits = False
        self._plan_turn()

    @property
    def _uncommitted(self) -> int:
        queued = sum(unit.nbytes for unit in self._queue)
        return queued + self.journal.open_bytes + (self._committing.nbytes if self._committing else 0)

    @property
    def _backed_up(self) -> bool:
        if not self._queue:
            return False
        return self._uncommitted > self.config.uncommitted_bytes_max

    async def _wait_for_room(self) -> None:
        future: asyncio.Future[None] = self.future()
        self._room_waiters.append(future)
        try:
            await asyncio.wait_for(future, self.config.uncommitted_wait)
        except TimeoutError:
            limit = self.config.uncommitted_bytes_max
            raise ResourceExhausted(f"bytes of topic {self.name!r} that wait for the disk", limit) from None
        self.check()

    # -- turns -----------------------------------------------------------------------------------------------------

    def _plan_turn(self) -> None:
        if not self._turn_planned and not self._closed:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if self._failure is not None or self._closed:
            return
        now = self.steady.now()
        calls, self._inbox = self._inbox, []
        acks, self._acks = self._acks, []
        runs, self._calls = self._calls, []
        try:
            if calls:
                self._admit(calls, now)
            if acks:
                self._ack_all(acks, now)
            for run, _ in runs:
                run(now)
            more = self._tick(now)
            if self._pops:
                self._serve(now)
        except Exception as error:
            # A bug, or a journal that does not take what was decided: what is in memory can no longer be trusted.
            log.exception("a turn failed", topic=self.name)
            self._poison(error)
            for future in [c.future for c in calls] + [a[2] for a in acks] + [f for _, f in runs if f is not None]:
                _refuse(future, TopicReloading(self.name, repr(error)))
            return
        self._pump()
        self._maintain(now)
        if more:
            self._plan_turn()
        else:
            self._plan_wake(now)

    def _admit(self, calls: list[EnqueueCall], now: Now) -> None:
        if not self.journal.can_grow:
            for call in calls:
                _refuse(call.future, StorageFull())
            self._prepare_soon()
            return
        answers = self.admission.admit(calls, now)
        self._touch_all()

        def answer() -> None:
            for future, result in answers:
                if isinstance(result, Exception):
                    _refuse(future, result)
                else:
                    _give(future, result)

        self._answer(answer, [future for future, _ in answers])

    def _ack_all(self, acks: list[tuple[list[int], list[int], asyncio.Future[Any]]], now: Now) -> None:
        """All acks of a turn as one: one event a partition."""
        ids, tokens, _ = acks[0]
        if len(acks) > 1:
            ids = [id for ack in acks for id in ack[0]]
            tokens = [token for ack in acks for token in ack[1]]
            if len(set(ids)) < len(ids):  # one message acked by two: they need not hold the same lease
                for ack in acks:
                    self._ack_all([ack], now)
                return
        self.counters.acked += len(ids)
        lost: list[int] = []
        for partition, part_ids, part_tokens in self.by_partition(ids, tokens):
            lost += self.emit_decision(partition, partition.decide_ack(part_ids, part_tokens), now)
        missing = set(lost)

        def answer() -> None:
            for ack_ids, _, future in acks:
                _give(future, [id for id in ack_ids if id in missing] if missing else [])

        self._answer(answer, [future for _, _, future in acks])

    def emit(self, partition: Partition, event: AnyEvent, now: Now) -> None:
        self.topic.emit(self.journal, partition, event, now)
        self._dirty.add(partition.number)
        self._count(event)

    def emit_decision(self, partition: Partition, decision: Decision, now: Now) -> Sequence[int]:
        for event in decision.events:
            self.emit(partition, event, now)
        return decision.lost

    def _count(self, event: AnyEvent) -> None:
        if isinstance(event, LeaseExpired):
            self.counters.timeouts += len(event.ids)
        elif isinstance(event, DeadLettered):
            self.counters.dead += len(event.ids)
        elif isinstance(event, Expired):
            self.counters.expired += len(event.ids)

    def _touch_all(self) -> None:
        self._dirty.update(range(len(self.topic.partitions)))

    def _tick(self, now: Now) -> bool:
        """What time has brought about, in slices; True if more is due."""
        if self.topic.paused_until is not None and now.wall >= self.topic.paused_until:
            self._resume(now)
        left = self.config.fire_slice
        for number, wake in enumerate(self._wakes):
            if wake > now.steady:
                continue
            partition = self.topic.partitions[number]
            while left > 0:
                events = partition.decide_tick(now, left, self.topic.take_seq)
                if not events:
                    self._dirty.add(number)
                    break
                for event in events:
                    left -= event.rows()
                    self.emit(partition, event, now)
            if left <= 0:
                return True
        return False

    def _resume(self, now: Now) -> None:
        self.emit(self.topic.partitions[0], Resumed(), now)

    def _serve(self, now: Now) -> None:
        calls = [call for call in self._pops if not call.future.done()]
        self._pops.clear()
        served: list[PopCall] = []
        if not self.topic.paused and calls:
            served = self.delivery.serve(calls, now)
            if served:
                self._touch_all()
        if served:
            self._read(served)
        got = set(map(id, served))
        for call in calls:
            if id(call) in got:
                continue
            if call.waits:
                self._pops.append(call)
            else:
                self._answer(partial(self._give_nothing, call), (call.future,))

    def _give_nothing(self, call: PopCall) -> None:
        limit = self.topic.config.max_inflight
        if limit and self.topic.leased >= limit and self.topic.ready and not self.topic.paused:
            _refuse(call.future, ResourceExhausted(f"max_inflight of topic {self.name!r}", limit))
        else:
            _give(call.future, [])

    def _read(self, calls: list[PopCall]) -> None:
        """Get the records while the leases are being made durable: those of all pops of a turn at once."""
        positions = np.array([p for call in calls for p in call.positions], dtype=np.int64)
        records, missing = self.journal.cached(positions)
        load = self.io.run(self.journal.load, positions[missing]) if len(missing) else None

        def hand_over(_: Any = None) -> None:
            if load is not None:
                if load.cancelled() or load.exception() is not None:
                    for call in calls:
                        _refuse(call.future, TopicReloading(self.name, f"records could not be read: {load}"))
                    return
                records.fill(missing, load.result())
            messages = build_messages(calls, records, self.topic, self._broker)
            start = 0
            for call in calls:
                end = start + len(call.ids)
                bad = [i - start for i in records.bad if start <= i < end] if records.bad else []
                self._hand_over(call, messages[start:end], bad)
                start = end
            for fact in records.bad.values():
                log.error("record corrupt", topic=self.name, path=fact.path, offset=fact.offset, detail=fact.detail)

        def deliver() -> None:
            if load is None or load.done():
                hand_over()
            else:
                load.add_done_callback(hand_over)

        self._answer(deliver, [call.future for call in calls])

    def _hand_over(self, call: PopCall, messages: list[Message], bad: list[int]) -> None:
        if bad:
            self._set_aside(call, bad)
            messages = [m for i, m in enumerate(messages) if i not in bad]
        if call.future.done():  # the one who asked has gone: give the messages back at once
            self._give_back(call)
        elif messages:
            call.future.set_result(messages)
        else:  # all of them were damaged and have been set aside: look again
            again = PopCall(
                call.future, call.max_messages, call.max_bytes, call.visibility_ms, call.holder, None, call.waits
            )  # fmt: skip
            self._pops.appendleft(again)
            self._plan_turn()

    def _give_back(self, call: PopCall) -> None:
        def decide(now: Now) -> None:
            for partition, ids, tokens in self.by_partition(call.ids, call.tokens):
                decision = partition.decide_release(ids, tokens, now, self.topic.take_seq(len(ids)))
                self.emit_decision(partition, decision, now)

        self._calls.append((decide, None))
        self._plan_turn()

    def _set_aside(self, call: PopCall, bad: list[int]) -> None:
        """Records that do not check are never delivered: they become dead letters."""
        self.counters.corrupt += len(bad)
        bad_ids, bad_tokens = [call.ids[i] for i in bad], [call.tokens[i] for i in bad]

        def decide(now: Now) -> None:
            for partition, ids, tokens in self.by_partition(bad_ids, bad_tokens):
                decision = partition.decide_bury(ids, tokens, now, "record corrupt", keep=True)
                self.emit_decision(partition, decision, now)

        self._calls.append((decide, None))
        self._plan_turn()

    def by_partition(self, ids: list[int], tokens: list[int]) -> list[tuple[Partition, list[int], list[int]]]:
        partitions = self.topic.partitions
        if len(partitions) == 1:
            return [(partitions[0], ids, tokens)]
        columns = np.array([ids, tokens], dtype=np.int64)
        owners = partition_of(columns[0])
        order = owners.argsort(kind="stable")
        numbers, starts = np.unique(owners[order], return_index=True)
        pieces = np.split(columns[:, order], starts[1:], axis=1)
        return [
            (partitions[n if n < len(partitions) else 0], *piece.tolist())  # an id of nowhere is held nowhere
            for n, piece in zip(numbers.tolist(), pieces, strict=True)
        ]  # fmt: skip

    # -- time ------------------------------------------------------------------------------------------------------

    def _plan_wake(self, now: Now) -> None:
        for number in self._dirty:
            partition = self.topic.partitions[number]
            wait = partition.next_wake_in(now)
            if wait is not None and (len(partition.calendar) or len(partition.ttls_wall)):
                wait = min(wait, WALL_LOOK_MS)
            self._wakes[number] = float("inf") if wait is None else now.steady + wait
        self._dirty.clear()
        wake = min(self._wakes)
        if self.topic.paused_until is not None:
            wake = min(wake, now.steady + min(WALL_LOOK_MS, max(0, self.topic.paused_until - now.wall)))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake != float("inf"):
            delay = max(0.0, wake - now.steady) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._plan_turn)

    def _maintain(self, now: Now) -> None:
        for number in self._dirty:
            self.topic.partitions[number].maintain(now, MAINTAIN_ROWS)

    # -- commits ---------------------------------------------------------------------------------------------------

    def _answer(self, give: Callable[[], None], futures: Sequence[asyncio.Future[Any]]) -> None:
        """Give an answer once everything decided so far is durable; `futures` are whose answer it is."""
        waits_for = self.journal.open_unit_number - (not self.topic.has_open_unit)
        if waits_for <= self.durable_unit:
            give()
        else:
            self._answers.append((waits_for, give, futures))

    @property
    def durable_unit(self) -> int:
        """Under a relaxed policy: written, which is all that policy promises."""
        return self.journal.written_unit

    def _pump(self) -> None:
        """Keep the writer busy: seal and hand over a unit whenever it is idle."""
        if self._committing is not None or self._preparing or self._failure is not None:
            return
        if self._between:
            self._run_between()
            return
        self._queue.extend(self.journal.take_sealed())
        if not self._queue and self.topic.has_open_unit:
            self.topic.seal(self.journal, self.steady.now())
            self._queue.extend(self.journal.take_sealed())
        if self._queue:
            unit = self._committing = self._queue.popleft()
            self.io.run(self.journal.commit, unit).add_done_callback(self._committed)
        elif self.journal.wants_prepare:
            self._prepare_soon()

    def _committed(self, done: asyncio.Future[None]) -> None:
        unit, self._committing = self._committing, None
        if done.cancelled() or done.exception() is not None:
            self._poison(done.exception() or RuntimeError("the write was cancelled"))
            return
        assert unit is not None
        self.counters.commits += 1
        self.counters.bytes_written += unit.nbytes
        self.bytes_since_snapshot += unit.nbytes
        if self.journal.wants_prepare:
            self._prepare_soon()
        else:
            self._pump()
        durable = self.durable_unit
        answers = self._answers
        while answers and answers[0][0] <= durable:
            answers.popleft()[1]()
        while self._room_waiters and not self._backed_up:
            _give(self._room_waiters.popleft(), None)

    def _prepare_soon(self) -> None:
        if self._committing is None and not self._preparing:
            self._preparing = True
            self.io.run(self.journal.prepare).add_done_callback(self._prepared)

    async def between_commits(self, work: Callable[[], T]) -> T:
        """Run blocking work on the journal that must not meet a commit."""
        future = self.future()
        self._between.append((work, future))
        self._pump()
        result: T = await future
        return result

    def _run_between(self) -> None:
        work, future = self._between.popleft()
        self._preparing = True

        def done(ran: asyncio.Future[Any]) -> None:
            if not ran.cancelled() and ran.exception() is None:
                _give(future, ran.result())
            else:
                _refuse(future, ran.exception() or Closed())
            self._prepared(ran)

        self.io.run(work).add_done_callback(done)

    def _prepared(self, done: asyncio.Future[Any]) -> None:
        self._preparing = False
        if done.cancelled() or done.exception() is not None:
            self._poison(done.exception() or RuntimeError("cancelled"))
            return
        self._pump()

    def _poison(self, cause: BaseException) -> None:
        """A write failed: whoever waits gets no answer, and the state is read back from disk."""
        log.error("write failed, reloading", topic=self.name, cause=repr(cause))
        error = TopicReloading(self.name, str(cause) or repr(cause))
        self._failure = error
        self.counters.reloads += 1
        self._queue.clear()
        waiting, self._answers = self._answers, deque()
        for _, _, futures in waiting:
            for future in futures:
                _refuse(future, error)
        while self._room_waiters:
            _give(self._room_waiters.popleft(), None)  # they look at the failure themselves
        self.spawn(self._reload())

    async def _reload(self) -> None:
        await self.io.run(self.journal.close)
        pause = RELOAD_PAUSE
        while True:
            try:
                self._install(await self.io.run(self.loader.load))
                return
            except CorruptionError as error:
                log.error("topic refused", topic=self.name, error=str(error))
                self._failure = error
                self._refuse_all(error)
                return
            except OSError as error:
                log.error("reload failed", topic=self.name, error=str(error), retry_in=pause)
                self._failure = TopicReloading(self.name, str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, RELOAD_PAUSE_MAX)

    def _refuse_all(self, error: HeaplineError) -> None:
        """Nothing that waits can be served."""
        for call in self._inbox:
            _refuse(call.future, error)
        for pop in self._pops:
            _refuse(pop.future, error)
        for _, waiting in self._calls:
            if waiting is not None:
                _refuse(waiting, error)
        for _, _, future in self._acks:
            _refuse(future, error)
        self._acks.clear()
        self._inbox.clear()
        self._pops.clear()
        self._calls.clear()


def _give(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
