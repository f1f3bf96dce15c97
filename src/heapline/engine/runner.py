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
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from heapline.clock import Clock, SteadyClock
from heapline.config import BrokerConfig
from heapline.core.events import I64, AnyEvent, Resumed
from heapline.core.ids import partition_of
from heapline.core.partition import Decision, Partition
from heapline.engine.admission import Admission
from heapline.engine.calls import EnqueueCall
from heapline.engine.committer import GroupCommitter, give, refuse
from heapline.engine.counters import Counters
from heapline.engine.delivery import Delivery, PopCall
from heapline.engine.firing import INF, QUANTUM_ROWS, Firing
from heapline.engine.handover import Handover
from heapline.engine.io import Io
from heapline.engine.loading import Loaded, Loader
from heapline.engine.streams.serving import StreamServing
from heapline.engine.topic import Topic
from heapline.engine.upkeep import Upkeep
from heapline.errors import (
    Closed,
    ConflictError,
    CorruptionError,
    HeaplineError,
    RequestError,
    ResourceExhausted,
    StorageFull,
    TopicReloading,
    UnavailableError,
)  # fmt: skip
from heapline.journal.records import Records
from heapline.logs import Log
from heapline.model import Now

if TYPE_CHECKING:
    from heapline.broker import Broker

log = Log("heapline.engine")
T = TypeVar("T")

MAINTAIN_ROWS = 65536
MAINTAIN_FIRED = 4  # rows merged for each one fired while more are due: what comes in is merged about three times
ACT_ROWS = 16384  # leases acted on by one event
RELOAD_DOUBTS_MAX = 3  # times that damage is looked at again before the topic is refused
RELOAD_PAUSE, RELOAD_PAUSE_MAX = 0.05, 10.0  # seconds between tries to load a topic again
WALL_LOOK_MS = 1000  # how often wall time is looked at while something waits for it: it may jump


class TopicRunner:
    def __init__(self, loader: Loader, io: Io, clock: Clock, config: BrokerConfig, broker: Broker) -> None:
        self.name = loader.name
        self.loader = loader
        self.io = io
        self.config = config
        self.counters = Counters()
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._inbox: list[EnqueueCall] = []
        self._acks: list[tuple[list[int], list[int], asyncio.Future[Any]]] = []
        self._calls: list[tuple[Callable[[Now], None], asyncio.Future[Any] | None]] = []
        self._pops: deque[PopCall] = deque()
        self._reads: set[asyncio.Future[Any]] = set()
        self._taken: list[PopCall] = []  # by the turn that is under way
        self._turn_planned = False
        self._steps, self._waited = 0, False  # of gathering calls for the next turn
        self._timer: asyncio.TimerHandle | None = None
        self._failure: HeaplineError | None = None
        self._closed = False
        self._end: HeaplineError = Closed()  # what those hear who come when it is closed
        self._suspended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.upkeep = Upkeep(self)
        self.handover = Handover(self, broker)
        self.streams = StreamServing(self)
        self.on_install: Callable[[TopicRunner, Now], None] | None = None  # runs before a loaded topic serves anybody
        self.on_grown: Callable[[TopicRunner, Now], None] | None = lambda runner, now: runner.streams.grown(now)
        self.snapshot_unit = 0
        self.segment_sizes: dict[str, int] = {}  # as `stats` last found them, by file name
        self._bytes_at_snapshot = 0

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._install(await self._load())
        self.spawn(self.upkeep.run())
        self.spawn(self.upkeep.sync_at_intervals())

    async def reopen(self) -> None:
        """Load the topic again, on purpose: for settings that are fixed while a journal is open. Calls wait."""
        # In a task of its own: half of it would leave a topic that takes calls and answers none.
        await asyncio.shield(self.spawn(self._reopen()))

    async def _reopen(self) -> None:
        self._suspended = True
        try:
            await self.committer.drain()
            if self._failure is not None:
                return  # it is being reloaded anyway
            self.committer.abandon(TopicReloading(self.name, "its settings change"))
            await self.committer.idle()
            try:
                await self._close_journal()
                self._install(await self._load())
            except Exception as error:
                self._poison(error)
        finally:
            self._suspended = False
            self._plan_turn()

    async def _close_journal(self) -> None:
        await self.io.run(self.journal.close)
        self.journal.cache.clear()  # here, not in the thread: the budget is shared with topics that go on

    async def _load(self) -> Loaded:
        """Load the topic in a thread. A thread does not stop when nobody waits for it any more: then its end is
        awaited all the same, because whoever cancels goes on to give the directory away."""
        load = self.io.run(self.loader.load)
        try:
            return await asyncio.shield(load)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                (await load).journal.close()
            raise

    def _install(self, loaded: Loaded) -> None:
        if hasattr(self, "committer"):
            self._keep_totals()
        self.topic: Topic = loaded.topic
        self.journal = loaded.journal
        self.snapshots = loaded.snapshots
        if not hasattr(self, "steady"):  # a reload must not make time jump: leases would end early, or last
            self.steady = SteadyClock(self._clock, loaded.time, loaded.wall)
        self.topic.opened(self.steady.now())
        self.committer = GroupCommitter(self.topic, self.journal, self.io, self.steady.now, self._poison)
        self.committer.latency = self.counters.commit
        self.note_snapshot(loaded.snapshot_unit)
        self.admission = Admission(self.topic, self.journal)
        rate = self.delivery.rate if hasattr(self, "delivery") else None  # a reload lets out no more than was left
        self.delivery: Delivery = Delivery(self.topic, self.journal, rate)
        self.delivery.retune(self.steady.now())
        self.firing = Firing(self.topic, self.config.fire_slice, self.counters.fired)
        self.streams.installed()
        if self.on_install is not None:
            self.on_install(self, self.steady.now())
        self.complete_groups(self.steady.now())
        self.topic.seal(self.journal, self.steady.now())  # before a group is made anew: see streams/admin.py
        self.streams.grown(self.steady.now())
        self._failure = None
        self._plan_turn()

    def complete_groups(self, now: Now) -> None:
        """Record what is missing of groups: the topic has grown, or a crash came in between."""
        if self.topic.groups:
            for number, event in self.topic.groups.decide_rest(len(self.topic.partitions), now.steady):
                self.emit(self.topic.partitions[number], event, now)

    def _keep_totals(self) -> None:
        """Loaded again: totals go on."""
        counters = self.counters
        counters.commits += self.committer.commits
        counters.bytes_written += self.committer.bytes_written
        counters.enqueued += self.admission.enqueued
        counters.duplicates += self.admission.duplicates
        counters.leased += self.delivery.leased

    def grew(self) -> None:
        """The topic has more partitions than it had."""
        self.firing.wakes.grow(len(self.topic.partitions))
        self.admission.measure()
        if self.on_grown is not None:
            self.on_grown(self, self.steady.now())

    def note_snapshot(self, unit: int) -> None:
        self.snapshot_unit = unit
        self._bytes_at_snapshot = self.committer.bytes_written

    @property
    def bytes_since_snapshot(self) -> int:
        return self.committer.bytes_written - self._bytes_at_snapshot

    async def close(self, reason: HeaplineError | None = None) -> None:
        """Refuse what is new (for that reason), make durable what was decided, give the files back."""
        if self._closed:
            return
        self._closed = True
        self._end = reason or self._end
        if self._timer is not None:
            self._timer.cancel()
        self._refuse_all(self._end)
        if hasattr(self, "committer"):
            await self.committer.drain()
            await self.committer.idle()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "journal"):
            await self._close_journal()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this topic's own, cancelled when it closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    @property
    def is_serving(self) -> bool:
        return not self._closed and self._failure is None

    @property
    def failure(self) -> HeaplineError | None:
        """Why it does not serve just now."""
        return self._failure

    def check(self) -> None:
        if self._closed:
            raise self._end.with_traceback(None)
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # raised many times: it must not gather all their frames

    # -- asking ----------------------------------------------------------------------------------------------------

    def future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    async def enqueue(self, call: EnqueueCall) -> Any:
        self.check()
        began = perf_counter()
        if self.committer.is_backed_up(self.config.uncommitted_bytes_max):
            await self._wait_for_room()
        self._inbox.append(call)
        self._plan_turn()
        answer = await call.future
        self.counters.enqueue.add(perf_counter() - began)
        return answer

    async def call(self, decide: Callable[[Now], T]) -> T:
        """Run a decision in the next turn; its result is the answer, once durable."""
        self.check()
        future = self.future()

        def run(now: Now) -> None:
            try:
                result = decide(now)
            except (RequestError, ConflictError, UnavailableError) as problem:
                error = problem  # outlives the except block
                self.committer.answer(lambda: refuse(future, error), (future,))
            else:
                self.committer.answer(lambda: give(future, result), (future,))

        self._calls.append((run, future))
        self._plan_turn()
        result: T = await future
        return result

    async def bring(self, decide: Callable[[Now], T]) -> T:
        """`call` for what brings records: like an enqueue it waits for room, and is refused when the disk is full."""
        self.check()
        if self.committer.is_backed_up(self.config.uncommitted_bytes_max):
            await self._wait_for_room()

        def within(now: Now) -> T:
            if not self.journal.can_grow:
                self.committer.prepare_soon()
                raise StorageFull
            return decide(now)

        return await self.call(within)

    def act_now(self, decide: Callable[[Now], None]) -> asyncio.Future[Any]:
        """Carry something out in the caller's own step, so that it happens together with the same in other topics.

        The answer comes when it is durable. A topic that is being loaded does nothing: see `on_install`.
        """
        future = self.future()
        if self._suspended or not self.is_serving:
            refuse(future, self._failure or (self._end if self._closed else TopicReloading(self.name, "it reopens")))
            return future
        try:
            decide(self.steady.now())
        except Exception as error:
            log.exception("what was decided cannot be carried out", topic=self.name)
            self._poison(error)
            refuse(future, TopicReloading(self.name, repr(error)))
        else:
            self.committer.answer(lambda: give(future, None), (future,))
            self._plan_turn()
        return future

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
        call.began = perf_counter()
        self._pops.append(call)
        if wait > 0:
            call.timer = asyncio.get_running_loop().call_later(wait, self._give_up, call)
        self._plan_turn()
        try:
            answer = await call.future
            if call.ids:
                self.counters.pop.add(perf_counter() - call.began)
            return answer
        except asyncio.CancelledError:
            if not call.future.cancelled() and call.future.exception() is None:
                self.handover.give_back(call)  # cancelled between the answer and the one who asked
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()

    def _give_up(self, call: PopCall) -> None:
        call.waits = False
        if self._failure is not None:  # there may be no turn for long
            refuse(call.future, self._failure)
        self._plan_turn()

    async def _wait_for_room(self) -> None:
        limit = self.config.uncommitted_bytes_max
        try:
            await self.committer.wait_for_room(limit, self.config.uncommitted_wait)
        except TimeoutError:
            raise ResourceExhausted(f"bytes of topic {self.name!r} that wait for the disk", limit) from None
        self.check()

    # -- turns -----------------------------------------------------------------------------------------------------

    def plan_turn(self) -> None:
        """Somebody asks for something."""
        self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._turn_planned and not self._closed:
            self._turn_planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if self._failure is not None or self._closed or self._suspended:
            return
        if self.config.gather_steps and self._gathers():
            return
        now = self.steady.now()
        calls, self._inbox = self._inbox, []
        acks, self._acks = self._acks, []
        runs, self._calls = self._calls, []
        self._taken = []
        try:
            if calls:
                self._admit(calls, now)
            if acks:
                self._ack_all(acks, now)
            for run, _ in runs:
                run(now)
            if calls or acks or runs:
                self.firing.note_asking(now)
            fired = self._tick(now)
            if self._pops:
                self._serve(now)
            if self.topic.groups or self.streams.asked:
                self.streams.turn(now)
            if self.topic.config.min_freshness:
                self.delivery.heads.refresh(now.steady)  # they stand from now on, whether or not somebody looks
            self.committer.pump()
            self._maintain(now, fired)
        except Exception as error:
            # A bug, or a journal that does not take what was decided: what is in memory can no longer be trusted.
            log.exception("a turn failed", topic=self.name)
            self._poison(error)
            self.streams.refuse_taken(TopicReloading(self.name, repr(error)))
            futures = [call.future for call in calls] + [future for _, _, future in acks]
            futures += [pop.future for pop in self._taken] + [future for _, future in runs if future is not None]
            for future in futures:
                refuse(future, TopicReloading(self.name, repr(error)))
            return
        self._plan_wake(now)

    def _gathers(self) -> bool:
        """Whether the turn is put off for more calls to join it. While the disk is busy that delays no answer, since
        all that a turn decides now is written after that; but one write long, so that nothing is put off for ever."""
        if self.committer.is_writing and not self._waited:
            self._waited = True
            self.committer.when_free(self._plan_turn)
            return True
        self._steps += 1
        if self._steps < self.config.gather_steps:
            self._plan_turn()
            return True
        self._steps, self._waited = 0, False
        return False

    def _admit(self, calls: list[EnqueueCall], now: Now) -> None:
        if not self.journal.can_grow:
            for call in calls:
                refuse(call.future, StorageFull())
            self.committer.prepare_soon()
            return
        answers = self.admission.admit(calls, now)

        def answer() -> None:
            for future, result in answers:
                if isinstance(result, Exception):
                    refuse(future, result)
                else:
                    give(future, result)

        self.committer.answer(answer, [future for future, _ in answers])

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
        lost: list[int] = []
        for partition, part_ids, part_tokens in self.by_partition(ids, tokens):
            lost += self.emit_decision(partition, partition.decide_ack(part_ids, part_tokens), now)
        missing = set(lost)

        def answer() -> None:
            for ack_ids, _, future in acks:
                give(future, [id for id in ack_ids if id in missing] if missing else [])

        self.committer.answer(answer, [future for _, _, future in acks])

    def emit(self, partition: Partition, event: AnyEvent, now: Now) -> None:
        self.topic.emit(self.journal, partition, event, now)
        self.counters.count(event)

    def emit_decision(self, partition: Partition, decision: Decision, now: Now) -> Sequence[int]:
        for event in decision.events:
            self.emit(partition, event, now)
        return decision.lost

    def _tick(self, now: Now) -> int:
        """What time has brought about, in slices; how many rows."""
        if self.topic.paused_until is not None and now.wall >= self.topic.paused_until:
            self._resume(now)
        wake = self.firing.wakes.next()
        if wake <= now.steady:
            self.counters.late.add((now.steady - wake) / 1000)
        if not self.firing.is_due(now):
            return 0
        unit, wanted = self.journal.open_unit_number, sum([pop.max_messages for pop in self._pops])
        allowance = self.firing.allowance(now, unit, self.committer.is_writing, wanted)
        return self.firing.fire(now, allowance, self.emit)

    def _resume(self, now: Now) -> None:
        self.emit(self.topic.partitions[0], Resumed(), now)

    def _serve(self, now: Now) -> None:
        calls = [call for call in self._pops if not call.future.done()]
        self._pops.clear()
        self._taken = calls
        served = self.delivery.serve(calls, now)
        if served:
            for call in served:
                call.began = call.began or perf_counter()
            self.handover.read(served)
        got = set(map(id, served))
        for call in calls:
            if id(call) in got:
                continue
            if call.waits:
                call.began = 0.0
                self._pops.append(call)
            else:
                self.committer.answer(partial(self._give_nothing, call), (call.future,))

    def _give_nothing(self, call: PopCall) -> None:
        limit = self.topic.config.max_inflight
        if limit and self.topic.leased >= limit and self.topic.ready and not self.topic.paused:
            refuse(call.future, ResourceExhausted(f"max_inflight of topic {self.name!r}", limit))
        else:
            give(call.future, [])

    def load(self, positions: I64) -> asyncio.Future[Records]:
        """Read records from disk, in a thread."""
        return self.read(self.journal.load, positions)

    def read(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Read something of the journal in a thread: no segment goes meanwhile."""
        future = self.io.run(function, *args)
        self._reads.add(future)
        future.add_done_callback(self._reads.discard)
        return future

    async def reads_done(self) -> None:
        """Wait for the reads under way: their positions may lie in a segment that has since been emptied."""
        if self._reads:
            await asyncio.wait(self._reads)

    def later(self, decide: Callable[[Now], None]) -> None:
        """Run a decision in the next turn; nobody waits for it."""
        self._calls.append((decide, None))
        self._plan_turn()

    def pop_again(self, call: PopCall) -> None:
        """The same one, because its timer ends its waiting."""
        self._pops.appendleft(call)
        self._plan_turn()

    def by_partition(self, ids: list[int], tokens: list[int]) -> list[tuple[Partition, list[int], list[int]]]:
        """The leases of each partition; many of them in slices, since one event must fit into the smallest segment."""
        if len(ids) > ACT_ROWS:
            cuts = range(0, len(ids), ACT_ROWS)
            return [part for c in cuts for part in self.by_partition(ids[c : c + ACT_ROWS], tokens[c : c + ACT_ROWS])]
        partitions = self.topic.partitions
        if len(partitions) == 1 or not ids:
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
        """Plan the next turn that nobody asks for: when something falls due, or when more of what is due may fire."""
        wakes = self.firing.wakes
        for number in self.topic.changed:
            partition = self.topic.partitions[number]
            wait = partition.next_wake_in(now)
            if wait is not None and (len(partition.calendar) or len(partition.ttls_wall)):
                wait = min(wait, WALL_LOOK_MS)
            wakes.plan(number, INF if wait is None else now.steady + wait)
        self.topic.changed.clear()
        if wakes.line:
            if self.committer.is_writing:
                self.committer.when_free(self._plan_turn)
            else:
                self._plan_turn()
        wake = wakes.next()
        if self.topic.paused_until is not None:
            wake = min(wake, now.steady + min(WALL_LOOK_MS, max(0, self.topic.paused_until - now.wall)))
        if self.topic.groups:
            wake = min(wake, self.streams.next_wake(now))
        if self._pops and (room_in := self.delivery.next_room_in(now)) is not None:
            wake = min(wake, now.steady + room_in)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake != INF:
            delay = max(0.0, wake - now.steady) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._plan_turn)

    def _maintain(self, now: Now, fired: int) -> None:
        """Housekeeping of what this turn has changed; as little as keeps up while a herd fires."""
        budget = MAINTAIN_ROWS
        if self.firing.wakes.line:
            budget = min(budget, MAINTAIN_FIRED * (fired + QUANTUM_ROWS))
        for number in self.topic.changed:
            self.topic.partitions[number].maintain(now, budget)

    # -- failing ---------------------------------------------------------------------------------------------------

    def _poison(self, cause: BaseException) -> None:
        """A write failed: whoever waits gets no answer, and the state is read back from disk."""
        if self._failure is not None:
            return
        log.error("write failed, reloading", topic=self.name, cause=repr(cause))
        self._failure = TopicReloading(self.name, str(cause) or repr(cause))
        self.counters.reloads += 1
        self.committer.abandon(self._failure)
        self.spawn(self._reload())

    async def _reload(self) -> None:
        await self.committer.idle()
        await self._close_journal()
        pause = RELOAD_PAUSE
        doubts = 0
        while True:
            try:
                self._install(await self._load())
                return
            except CorruptionError as error:
                doubts += 1
                if doubts > RELOAD_DOUBTS_MAX:  # a disk that failed once may read badly for a while
                    log.error("topic refused", topic=self.name, error=str(error))
                    self._failure = error
                    self._refuse_all(error)
                    return
                log.warning("reload found damage, looking again", topic=self.name, error=str(error))
            except Exception as error:
                log.error("reload failed", topic=self.name, error=repr(error), retry_in=pause)
                self._failure = TopicReloading(self.name, str(error) or repr(error))
                self._refuse_all(self._failure)  # it may take long
            await asyncio.sleep(pause)
            pause = min(2 * pause, RELOAD_PAUSE_MAX)

    def _refuse_all(self, error: HeaplineError) -> None:
        """Nothing that waits can be served."""
        self.streams.refuse_all(error)
        for call in self._inbox:
            refuse(call.future, error)
        for pop in self._pops:
            refuse(pop.future, error)
        for _, waiting in self._calls:
            if waiting is not None:
                refuse(waiting, error)
        for _, _, future in self._acks:
            refuse(future, error)
        self._acks.clear()
        self._inbox.clear()
        self._pops.clear()
        self._calls.clear()
