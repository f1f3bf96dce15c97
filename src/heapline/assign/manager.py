"""One worker of a pool: it claims an id, keeps its lease, takes part in leading, and holds its assigned partitions.

The manager connects the deciding parts to the store, the clock and the user's hooks. It runs one task for each activity
that must not wait for the others: heartbeat, polling, election, listing, watching, hooks. If another process ends its
session, the manager begins a new one, under the same id if possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

from heapline.assign.assignment import ASSIGNMENT_KEY, Assignment, Document
from heapline.assign.cancellation import on_loop, wait_for_event, within
from heapline.assign.config import Config, seconds
from heapline.assign.election import LEADER_KEY, ElectionAgent, KVElection
from heapline.assign.errors import (
    AssignError,
    BadConfig,
    ConnectionLost,
    ElectionFailed,
    ShutdownTimeout,
    StableIDExhausted,
    StartupTimeout,
)
from heapline.assign.heartbeat import Heartbeat, SessionLost
from heapline.assign.hooks import HookRunner, Hooks
from heapline.assign.kv import KV, Entry
from heapline.assign.leadership import Leadership
from heapline.assign.logger import Logger, log_to
from heapline.assign.member import Change, Member
from heapline.assign.metrics import MetricsCollector, NoMetrics
from heapline.assign.partitions import Partition, PartitionSource
from heapline.assign.states import State
from heapline.assign.status import Status
from heapline.assign.strategies import StatelessStrategy, WeightedConsistentHashStrategy
from heapline.assign.watcher import COALESCE, Watcher
from heapline.assign.worker_ids import WORKER_PREFIX, Claim, Claimer
from heapline.contract.errors import HeaplineError


def boot_time() -> float:
    """Return seconds that also pass while the machine sleeps, because leases end during sleep, too."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Manager:
    """One worker of a pool.

    >>> manager = Manager(Config(), kv, source, hooks=Hooks(on_assignment_changed=work_on))  # doctest: +SKIP
    >>> await manager.start()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: Config,
        kv: KV,
        source: PartitionSource,
        *,
        strategy: StatelessStrategy | None = None,
        election: ElectionAgent | None = None,
        hooks: Hooks | None = None,
        metrics: MetricsCollector | None = None,
        logger: Logger | logging.Logger | None = None,
        clock: Callable[[], float] = boot_time,
        new_session: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._config, self._kv, self._clock = config, kv, clock
        self._log = log_to(logger)
        self._hooks = HookRunner(hooks or Hooks(), config.retry, self._log)
        self._status = Status(self._hooks, metrics or NoMetrics(), clock, self._log)
        self._claimer = Claimer(kv, config, clock, new_session)
        wakeup = asyncio.Event()
        self._leadership = Leadership(
            config,
            kv,
            source,
            strategy or WeightedConsistentHashStrategy(),
            election or KVElection(kv, clock, new_session()),
            clock,
            self._status,
            wakeup,
        )
        self._watcher = Watcher(config, kv, clock, self._status, self._leadership, wakeup, self._observe_document)
        self._member: Member | None = None
        self._heartbeat: Heartbeat | None = None
        self._began_at = 0.0
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None  # set by start()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._all_dropped = asyncio.Event()
        self._renewal_wanted = asyncio.Event()
        self._renewed = asyncio.Condition()

    # --- queries

    @property
    def worker_id(self) -> str:
        """The stable worker id; empty while the worker has none."""
        return "" if self._member is None else self._member.worker

    @property
    def is_leader(self) -> bool:
        return self._leadership.is_leader

    @property
    def state(self) -> State:
        return self._status.state

    @property
    def assignment(self) -> Assignment:
        """The partitions this worker holds now, by the newest document it knows. Any thread may read it."""
        member, now = self._member, self._clock()
        if member is None:
            return Assignment()
        held = member.held_at(now)
        fences = {p.id: fence for p, fence in held.items()}
        return Assignment(member.version, member.lifecycle, tuple(sorted(held)), fences)

    def holds(self, partition: Partition) -> bool:
        """Return whether this worker holds a partition now, on its own clock.

        Call it right before each critical operation.
        """
        return self._member is not None and self._member.holds(partition, self._clock())

    def fence(self, partition: Partition) -> int | None:
        """Return a number that rises with every grant of this partition, or None if it is not held now.

        Pass it to the systems that the work writes to.
        """
        return None if self._member is None else self._member.fence(partition, self._clock())

    async def refresh_partitions(self) -> None:
        """Have the leader list the partitions again because they have changed. Returns when the request is stored.

        It may be called from any thread, concurrently, as in `asyncio.run(manager.refresh_partitions())`.
        """
        if self._loop is None:
            raise ConnectionLost("this worker has not started")
        await on_loop(self._loop, self._refresh_partitions)

    async def _refresh_partitions(self) -> None:
        if self.is_leader:
            await self._leadership.list_partitions()
            return
        heartbeat = self._heartbeat
        if heartbeat is None:
            raise ConnectionLost("this worker has no id at present")
        heartbeat.refreshes += 1
        wanted = heartbeat.refreshes
        self._renewal_wanted.set()
        try:
            async with asyncio.timeout(self._config.operation_timeout), self._renewed:
                await self._renewed.wait_for(lambda: heartbeat.refreshes_written >= wanted)
        except TimeoutError:
            raise ConnectionLost("the refresh request could not be written") from None

    # --- start and stop

    async def start(self) -> None:
        """Claim an id, take part in the election, and wait for the first assignment."""
        if self.state is not State.INIT:
            raise BadConfig("a manager can be started only once; create a new one")
        self._loop = asyncio.get_running_loop()
        self._status.change_to(State.CLAIMING_ID)
        self._tasks = [
            asyncio.create_task(self._hooks.run(self._next_change, self._change_finished), name="assign hooks"),
            asyncio.create_task(self._run(), name="assign sessions"),
        ]
        try:
            async with asyncio.timeout(self._config.startup_timeout):
                await self._ready.wait()
            if self._member is None and not self._is_closing:
                raise TimeoutError  # the claim has failed for good
        except TimeoutError:
            error = self._startup_error()
            await self._abort_start()
            raise error from None
        except BaseException:
            await self._abort_start()
            raise
        if self._is_closing:
            raise AssignError("stop() was called before the first assignment arrived")

    def _startup_error(self) -> AssignError:
        last = self._status.last_error
        if self.state is State.CLAIMING_ID:
            if last is not None:
                is_own = isinstance(last, (ConnectionLost, StableIDExhausted))
                return last if is_own else ConnectionLost(type(last).__name__)  # type: ignore[return-value]
            ids = list(self._config.worker_ids())
            return StableIDExhausted(ids[0], ids[-1])
        if self.state is State.ELECTION:
            return ElectionFailed("no answer" if last is None else str(last))
        return StartupTimeout(self._config.startup_timeout, self.state.name)

    async def _abort_start(self) -> None:
        """Release quickly what a failed start has claimed; the rest expires."""
        if self._is_closing:
            return  # stop() is already releasing everything
        with contextlib.suppress(TimeoutError, HeaplineError):
            await self._shut_down(min(self._config.shutdown_timeout, self._config.heartbeat_interval))

    async def stop(self, timeout: float | str | None = None) -> None:  # noqa: ASYNC109 - it limits a part of the work
        """Drop all partitions through the hooks, then release the id and the leadership.

        Partitions that cannot be dropped within `timeout` (default: shutdown_timeout) are not released: other workers
        get them when the lease ends.
        """
        limit = self._config.shutdown_timeout if timeout is None else seconds(timeout, "timeout")
        if self.state is State.SHUTDOWN:
            return
        try:
            await self._shut_down(limit)
        except TimeoutError:
            raise ShutdownTimeout(limit, 0 if self._member is None else len(self._member.undropped)) from None

    async def _shut_down(self, limit: float) -> None:
        self._status.change_to(State.SHUTDOWN)
        self._is_closing = True
        if self._member is not None:
            self._member.close()
        self._hooks.wake()
        self._ready.set()  # wakes a pending start(), which then raises
        try:
            async with asyncio.timeout(limit):
                if self._member is not None and not self._member.is_empty:
                    await self._all_dropped.wait()
                await self._release()
        finally:
            self._heartbeat = None
            await self._end_tasks()

    async def _end_tasks(self) -> None:
        """Cancel all tasks.

        A hook that ignores cancellation is abandoned; it holds nothing once the lease has ended.
        """
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            done, pending = await asyncio.wait(self._tasks, timeout=self._config.heartbeat_interval)
            for task in pending:
                self._log.warning("assign.task_still_running", task=task.get_name())
            for task in done:
                if not task.cancelled():
                    task.exception()

    async def _release(self) -> None:
        if self._heartbeat is not None:
            with contextlib.suppress(SessionLost):
                await self._heartbeat.release()
        await self._leadership.resign()

    # --- sessions

    async def _run(self) -> None:
        while not self._is_closing:
            try:
                claim = await self._claim()
            except Exception:  # of the first claim: start() raises it
                self._ready.set()
                return
            self._begin_session(claim)
            try:
                async with asyncio.TaskGroup() as group:
                    for work in (
                        self._heartbeat_loop,
                        self._watcher.poll_loop,
                        self._election_loop,
                        self._leadership.listing_loop,
                    ):
                        group.create_task(work(), name=f"assign {work.__name__}")
                    for prefix in (ASSIGNMENT_KEY, LEADER_KEY, WORKER_PREFIX):
                        group.create_task(self._watcher.watch_loop(prefix), name=f"assign watch {prefix}")
            except* SessionLost:
                await self._end_session()
            except* Exception as errors:
                # Not expected. If it happens, this session cannot be trusted, so a new one begins.
                self._status.report_error(errors.exceptions[0])
                await self._end_session()
                await asyncio.sleep(self._config.heartbeat_interval)

    async def _claim(self) -> Claim:
        self._status.change_to(State.CLAIMING_ID)
        is_first, preferred = self._member is None, "" if self._member is None else self._member.worker
        retry, interval = self._config.retry, self._config.heartbeat_interval
        tries = failures = 0
        while True:
            delay = min(retry.delay(tries), interval)
            try:
                claim = await within(self._config.operation_timeout, self._claimer.claim(preferred or None))
                self._status.last_error = None
                if claim is not None:
                    return claim
            except Exception as error:
                self._status.report_error(error)
                if is_first:
                    if failures >= retry.max_retries or isinstance(error, StableIDExhausted):
                        raise
                    delay = retry.delay(failures)
                failures += 1
            await asyncio.sleep(delay)
            tries += 1

    def _begin_session(self, claim: Claim) -> None:
        former = self._member
        if not self._watcher.note_write(claim.revision):
            self._log.warning("assign.store_recreated", worker=claim.worker)
        self._member = Member(claim.worker, claim.session, self._config.heartbeat_ttl, former)
        if self._is_closing:
            self._member.close()
        self._heartbeat = Heartbeat(self._kv, self._config, self._clock, self._member, claim, self._log)
        self._began_at = self._clock()
        self._status.has_assignment = False
        self._hooks.wake()
        self._log.info("assign.claimed", worker=claim.worker)
        self._status.change_to(State.ELECTION)

    async def _end_session(self) -> None:
        assert self._member is not None
        self._member.lose()
        self._heartbeat = None
        self._hooks.wake()
        self._log.warning("assign.session_lost", worker=self._member.worker)
        await self._leadership.resign()

    async def _heartbeat_loop(self) -> None:
        assert self._heartbeat is not None
        assert self._member is not None
        heartbeat, member = self._heartbeat, self._member
        interval = self._config.heartbeat_interval
        while True:
            next_at = self._clock() + interval
            stops_at = member.lease.stops_at
            self._renewal_wanted.clear()
            entry: Entry | None = None
            try:
                entry = await heartbeat.renew()
            except SessionLost:
                raise
            except Exception as error:
                self._status.report_error(error)
            self._status.metrics.record_heartbeat(member.worker, entry is not None)
            if entry is None:
                await asyncio.sleep(min(interval, self._config.heartbeat_ttl / 12))
                continue
            self._watcher.observe(entry)
            if self._clock() >= stops_at:
                self._hooks.wake()  # the hooks have dropped the partitions, or are about to
            async with self._renewed:
                self._renewed.notify_all()
            self._confirm_soon(member)
            await wait_for_event(self._renewal_wanted, next_at - self._clock())

    def _confirm_soon(self, member: Member) -> None:
        """Renew immediately if a leader waits for a confirmation that can be given now."""
        if self._heartbeat is not None and member.is_awaited(self._heartbeat.confirmed):
            self._renewal_wanted.set()

    # --- hooks

    def _next_change(self) -> tuple[Change | None, float | None]:
        member, now = self._member, self._clock()
        if member is None:
            return None, None
        change = member.next_change(now)
        if change is not None:
            member.begin(change)
            return change, None
        if member.is_empty and self._is_closing:
            self._all_dropped.set()
        if member.is_member and not self._status.has_assignment and not self._is_closing:
            self._status.settle()
            self._ready.set()
        return None, max(0.0, member.lease.stops_at - now) if member.held else None

    def _change_finished(self, change: Change) -> None:
        member = self._member
        assert member is not None
        added, removed = member.finish(change)
        self._status.metrics.record_assignment_change(added, removed, member.version)
        self._confirm_soon(member)

    def _observe_document(self, document: Document) -> None:
        assert self._member is not None
        if self._member.observe(document):
            self._hooks.wake()
            self._confirm_soon(self._member)

    # --- election

    async def _election_loop(self) -> None:
        assert self._member is not None
        interval = self._config.heartbeat_interval
        while True:
            self._watcher.elect_wanted.clear()
            try:
                if not self._is_closing:
                    await self._leadership.elect(self._member, self._began_at)
                if self.state is State.ELECTION:
                    self._status.change_to(State.WAITING_ASSIGNMENT)
                    self._hooks.wake()
            except Exception as error:
                self._status.report_error(
                    error if isinstance(error, AssignError) else ElectionFailed(type(error).__name__)
                )
            await asyncio.sleep(min(COALESCE, interval))
            if self.is_leader:
                await asyncio.sleep(interval)
            else:
                await wait_for_event(self._watcher.elect_wanted, interval)
