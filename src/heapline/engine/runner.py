"""The runner of one topic: loads it, accepts its calls, reloads it after a failed write, and closes it.

Theory of operation
-------------------
Calls wait for the next *turn* (turns.py), which decides them together. While an I/O thread writes one unit, turns
continue and the next unit fills: this is group commit without a timer.

*Every answer waits.* An answer is sent when the log is durable up to the point of its decision, even if the decision
has no events (a duplicate, an empty pop): the state that it was read from may not be durable yet.

*A failed write poisons the topic.* All waiting callers get `TopicReloading`, the loaded topic is dropped, and the topic
is loaded again from disk. An fsync is never repeated.

One thread (the event loop's) runs all of this; only the log's commits, `prepare` and reads run elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, TypeVar

from heapline.clock import Clock, SteadyClock
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import (
    Closed,
    ConflictError,
    CorruptionError,
    HeaplineError,
    RequestError,
    ResourceExhausted,
    StorageFull,
    TopicReloading,
    UnavailableError,
)
from heapline.contract.leases import Leased, LeaseKeys, Settled
from heapline.core.events import I64
from heapline.core.now import Now
from heapline.core.rate import TokenBucket
from heapline.engine.columns import EnqueueCall
from heapline.engine.committer import give, refuse
from heapline.engine.counters import Counters
from heapline.engine.delivery import PopCall
from heapline.engine.groups.service import StreamServing
from heapline.engine.io import Io
from heapline.engine.loaded_topic import LoadedTopic, Loader, Recovered
from heapline.engine.maintenance import Maintenance
from heapline.engine.pop_replies import Handover, PopFuture
from heapline.engine.turns import SETTLED, Turns
from heapline.journal.records import Records
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.engine")
T = TypeVar("T")
InstallHook = Callable[["TopicRunner", Now], None]

RELOAD_DOUBTS_MAX = 3  # times that corruption is checked again before the topic is refused
RELOAD_PAUSE, RELOAD_PAUSE_MAX = 0.05, 10.0  # seconds between attempts to reload a topic


class TopicRunner:
    """Created by `open`, so it always has a loaded topic. While `failure` is set, that is the one before the failure;
    it serves nothing, and every call raises the failure."""

    def __init__(self, loader: Loader, io: Io, clock: Clock, config: BrokerConfig, recovered: Recovered) -> None:
        self.name = loader.name
        self.loader = loader
        self.io = io
        self.config = config
        self.counters = Counters()
        self.audit = recovered.audit  # the last one that was recorded
        self.steady = SteadyClock(clock, recovered.time, recovered.wall)  # a reload must not make time jump
        self._clock = clock
        self.loop = asyncio.get_running_loop()
        self.future: Callable[[], asyncio.Future[Any]] = self.loop.create_future
        self._reads: set[asyncio.Future[Any]] = set()
        self.failure: HeaplineError | None = None  # why the topic does not serve calls now
        self.is_closed = False
        self.is_suspended = False  # it reopens: calls wait
        self._end: HeaplineError = Closed()  # the error for calls after closing
        self.tasks = OwnedTasks()  # cancelled when the topic closes
        self.handover = Handover(self)
        self.streams = StreamServing(self)
        self.turns = Turns(self, self.handover, self.streams)
        self.plan = self.turns.plan  # not a method of its own: every enqueue, pop and ack calls it
        self.maintenance = Maintenance(self, self.streams)
        self.on_install: InstallHook | None = None  # runs before a loaded topic serves calls
        self.on_grown: InstallHook | None = lambda runner, now: runner.streams.grown(now)
        self.loaded = self._loaded(recovered, rate=None)

    # -- lifecycle -------------------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls, loader: Loader, io: Io, clock: Clock, config: BrokerConfig, on_install: InstallHook | None = None
    ) -> TopicRunner:
        """Load the topic and start to serve it."""
        recovered = await _load(loader, io)
        try:
            runner = cls(loader, io, clock, config, recovered)
            runner.on_install = on_install
            runner._begin()
        except BaseException:
            await io.run(recovered.journal.close)
            raise
        runner.tasks.spawn(runner.maintenance.run())
        runner.tasks.spawn(runner.maintenance.sync_at_intervals())
        return runner

    def _loaded(self, recovered: Recovered, rate: TokenBucket | None) -> LoadedTopic:
        slice = self.config.fire_slice
        return LoadedTopic(recovered, self.io, self.counters, self.steady.now, self.poison, fire_slice=slice, rate=rate)

    async def _load_again(self) -> None:
        """Replace the loaded topic. Totals continue, and a reload grants no extra rate."""
        recovered = await _load(self.loader, self.io)
        try:
            self.loaded = self._loaded(recovered, self.loaded.delivery.rate)
            self._begin()
        except BaseException:  # a reload is retried often and must not use up file descriptors
            await self.io.run(recovered.journal.close)
            raise

    def _begin(self) -> None:
        """Complete what a crash interrupted, then serve calls."""
        loaded = self.loaded
        self.streams.installed()
        if self.on_install is not None:
            self.on_install(self, self.steady.now())
        loaded.complete_groups(self.steady.now())
        loaded.topic.seal(loaded.journal, self.steady.now())  # before a group is created again: see groups/admin.py
        self.streams.grown(self.steady.now())
        self.failure = None
        self.plan()

    async def reopen(self) -> None:
        """Load the topic again on request, for settings that are fixed while a log is open. Calls wait."""
        # In its own task: a reload that is cancelled halfway would leave a topic that accepts calls and answers none.
        await self.tasks.run_to_completion(self._reopen())

    async def _reopen(self) -> None:
        self.is_suspended = True
        try:
            await self.loaded.committer.drain()
            if self.failure is not None:
                return  # already being reloaded
            self.loaded.committer.abandon(TopicReloading(self.name, "its settings change"))
            await self.loaded.committer.idle()
            try:
                await self._close_journal()
                await self._load_again()
            except Exception as error:
                self.poison(error)
        finally:
            self.is_suspended = False
            self.plan()

    async def _close_journal(self) -> None:
        journal = self.loaded.journal
        await self.io.run(journal.close)
        journal.cache.clear()  # on the event loop, not in the thread: topics that keep running share the budget

    def grew(self) -> None:
        """Adjust to a topic that got more partitions."""
        self.loaded.grew()
        if self.on_grown is not None:
            self.on_grown(self, self.steady.now())

    async def close(self, reason: HeaplineError | None = None) -> None:
        """Refuse new calls with `reason`, make all decisions durable, and release the files."""
        if self.is_closed:
            return
        self.is_closed = True
        self._end = reason or self._end
        self.turns.stop()
        self._refuse_all(self._end)
        await self.loaded.committer.drain()
        await self.loaded.committer.idle()
        await self.tasks.cancel()
        await self._close_journal()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    @property
    def is_serving(self) -> bool:
        return not self.is_closed and self.failure is None

    def check(self) -> None:
        """Raise the reason why the topic does not serve calls, if there is one."""
        if self.is_closed:
            raise self._end.with_traceback(None)
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # raised many times: it must not accumulate their frames

    # -- calls -----------------------------------------------------------------------------------------------------

    def enqueue(self, call: EnqueueCall) -> Awaitable[Any]:
        """Admit the call in the next turn; its result is available once it is durable."""
        if self.failure is not None or self.is_closed:
            self.check()
        if self.loaded.committer.queued_bytes and self._is_backed_up():
            return self._enqueue_later(call)
        self.turns.enqueues.append(call)
        self.plan()
        return call.future

    def _is_backed_up(self) -> bool:
        return self.loaded.committer.is_backed_up(self.config.uncommitted_bytes_max)

    async def _enqueue_later(self, call: EnqueueCall) -> Any:
        await self._wait_for_room()
        self.turns.enqueues.append(call)
        self.plan()
        return await call.future

    async def call(self, decide: Callable[[Now], T]) -> T:
        """Run a decision in the next turn and return its result once it is durable."""
        self.check()
        future = self.future()

        def run(now: Now) -> None:
            try:
                result = decide(now)
            except (RequestError, ConflictError, UnavailableError) as problem:
                error = problem  # outlives the except block
                self.loaded.committer.answer(lambda: refuse(future, error), (future,))
            else:
                self.loaded.committer.answer(lambda: give(future, result), (future,))

        self.turns.calls.append((run, future))
        self.plan()
        result: T = await future
        return result

    async def bring(self, decide: Callable[[Now], T]) -> T:
        """Like `call`, for calls that add records: wait for capacity as an enqueue does, and fail on a full disk."""
        self.check()
        if self._is_backed_up():
            await self._wait_for_room()

        def within(now: Now) -> T:
            if not self.loaded.journal.can_grow:
                self.loaded.committer.prepare_soon()
                raise StorageFull
            return decide(now)

        return await self.call(within)

    def act_now(self, decide: Callable[[Now], None]) -> asyncio.Future[Any]:
        """Apply a decision in the caller's own event-loop step, together with decisions in other topics.

        The future completes when the decision is durable. A topic that is being loaded does nothing: see `on_install`.
        """
        future = self.future()
        if self.is_suspended or not self.is_serving:
            refuse(future, self.failure or (self._end if self.is_closed else TopicReloading(self.name, "it reopens")))
            return future
        try:
            decide(self.steady.now())
        except Exception as error:
            log.exception("decision cannot be applied; topic will be reloaded", topic=self.name)
            self.poison(error)
            refuse(future, TopicReloading(self.name, repr(error)))
        else:
            self.loaded.committer.answer(lambda: give(future, None), (future,))
            self.plan()
        return future

    def ack(self, keys: LeaseKeys) -> Awaitable[Settled]:
        """Ack these leases in the next turn; the result is available once it is durable."""
        if self.failure is not None or self.is_closed:
            self.check()
        future = self.future()
        if keys.ids.nbytes:
            self.turns.acks.append((keys, future))
            self.plan()
        else:
            future.set_result(SETTLED)
        return future

    def pop(self, call: PopCall, wait: float) -> Awaitable[Leased]:
        """Serve the pop in the next turn, or in a later one within `wait` seconds."""
        if self.failure is not None or self.is_closed:
            self.check()
        call.began = perf_counter()
        self.turns.pops.append(call)
        if wait > 0:
            timer = self.loop.call_later(wait, self._give_up, call)
            call.future.add_done_callback(lambda _: timer.cancel())
        self.plan()
        return call.future

    def pop_future(self, request_id: str | None) -> PopFuture:
        future = PopFuture(loop=self.loop)
        future.handover, future.is_named = self.handover, request_id is not None
        return future

    def _give_up(self, call: PopCall) -> None:
        call.waits = False
        if self.failure is not None:  # the next turn may be far away
            refuse(call.future, self.failure)
        self.plan()

    async def _wait_for_room(self) -> None:
        limit = self.config.uncommitted_bytes_max
        try:
            await self.loaded.committer.wait_for_room(limit, self.config.uncommitted_wait)
        except TimeoutError:
            raise ResourceExhausted(f"bytes of topic {self.name!r} that wait for the disk", limit) from None
        self.check()

    def later(self, decide: Callable[[Now], None]) -> None:
        """Run a decision in the next turn; no caller waits for it."""
        self.turns.calls.append((decide, None))
        self.plan()

    def pop_again(self, call: PopCall) -> None:
        """Serve the same PopCall again, because its timer ends its wait."""
        self.turns.pops.appendleft(call)
        self.plan()

    # -- reads -----------------------------------------------------------------------------------------------------

    def load(self, positions: I64) -> asyncio.Future[Records]:
        """Read records from disk, in a thread."""
        return self.read(self.loaded.journal.load, positions)

    def read(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Read from the journal in a thread. No segment is deleted meanwhile."""
        future = self.io.run(function, *args)
        self._reads.add(future)
        future.add_done_callback(self._reads.discard)
        return future

    async def reads_done(self) -> None:
        """Wait for the reads in progress: their positions may be in a segment that has since been emptied."""
        if self._reads:
            await asyncio.wait(self._reads)

    # -- failures --------------------------------------------------------------------------------------------------

    def poison(self, cause: BaseException) -> None:
        """Fail all waiting calls after a failed write, and reload the state from disk."""
        if self.failure is not None:
            return
        log.error("write failed; reloading", topic=self.name, cause=repr(cause))
        self.failure = TopicReloading(self.name, str(cause) or repr(cause))
        self.counters.reloads += 1
        self.loaded.committer.abandon(self.failure)
        self.tasks.spawn(self._reload())

    async def _reload(self) -> None:
        await self.loaded.committer.idle()
        await self._close_journal()
        pause = RELOAD_PAUSE
        doubts = 0
        while True:
            try:
                await self._load_again()
                return
            except CorruptionError as error:
                doubts += 1
                if doubts > RELOAD_DOUBTS_MAX:  # a disk that failed once may return bad reads for a while
                    log.error("topic refused", topic=self.name, error=str(error))
                    self.failure = error
                    self._refuse_all(error)
                    return
                log.warning("reload found damage; will retry", topic=self.name, error=str(error))
            except Exception as error:
                log.error("reload failed", topic=self.name, error=repr(error), retry_in=pause)
                self.failure = TopicReloading(self.name, str(error) or repr(error))
                self._refuse_all(self.failure)  # reloading may take long
            await asyncio.sleep(pause)
            pause = min(2 * pause, RELOAD_PAUSE_MAX)

    def _refuse_all(self, error: HeaplineError) -> None:
        """Refuse all waiting calls."""
        self.streams.refuse_all(error)
        self.turns.refuse_all(error)


async def _load(loader: Loader, io: Io) -> Recovered:
    """Load the topic in a thread. Cancellation does not stop the thread, so wait for its end even then: the caller
    releases the directory next."""
    load = io.run(loader.load)
    try:
        return await asyncio.shield(load)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            (await load).journal.close()
        raise
