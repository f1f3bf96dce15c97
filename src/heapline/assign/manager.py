"""One worker of a crowd: claims an id, keeps its lease, takes part in leading, and holds what it is given.

It wires the parts that decide to the store, to the clock and to the user's hooks, with one task for each thing that
must not wait for the others: heartbeats, looking, electing, listing, watching, hooks. A session that somebody has
ended is followed by another one of the same process, under the same id if it can be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from heapline.assign.beating import Heart, SessionLost, within
from heapline.assign.board import Board
from heapline.assign.claiming import Claim, Claimer
from heapline.assign.config import Config
from heapline.assign.document import Document
from heapline.assign.election import ElectionAgent, KVElection
from heapline.assign.errors import (
    AssignError,
    BadConfig,
    ConnectionLost,
    ElectionFailed,
    ShutdownTimeout,
    StableIDExhausted,
    StartupTimeout,
)
from heapline.assign.hooks import HookRunner, Hooks
from heapline.assign.kv import KV, Entry
from heapline.assign.lookout import COALESCE, Lookout, event_within
from heapline.assign.member import Change, Member
from heapline.assign.metrics import MetricsCollector, NoMetrics
from heapline.assign.model import Assignment, Partition, State
from heapline.assign.office import Office
from heapline.assign.records import ASSIGNMENT_KEY, LEADER_KEY, WORKER_PREFIX
from heapline.assign.sources import PartitionSource
from heapline.assign.strategies import AssignmentStrategy, WeightedConsistentHashStrategy
from heapline.errors import HeaplineError
from heapline.logs import Log

log = Log("heapline.assign")


def boot_time() -> float:
    """Seconds that also pass while the machine sleeps: a lease ends then, too."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Manager:
    """
    >>> manager = Manager(Config(), kv, source, hooks=Hooks(on_assignment_changed=work_on))  # doctest: +SKIP
    >>> await manager.start()  # doctest: +SKIP
    """

    def __init__(
        self, config: Config, kv: KV, source: PartitionSource, *, strategy: AssignmentStrategy | None = None,
        election: ElectionAgent | None = None, hooks: Hooks | None = None, metrics: MetricsCollector | None = None,
        clock: Callable[[], float] = boot_time, new_session: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:  # fmt: skip
        self._config, self._kv, self._clock = config, kv, clock
        self._hooks = HookRunner(hooks or Hooks(), config.retry)
        self._board = Board(self._hooks, metrics or NoMetrics(), clock)
        self._claimer = Claimer(kv, config, clock, new_session)
        news = asyncio.Event()
        self._office = Office(
            config, kv, source, strategy or WeightedConsistentHashStrategy(),
            election or KVElection(kv, clock, new_session()), clock, self._board, news,
        )  # fmt: skip
        self._lookout = Lookout(config, kv, clock, self._board, self._office, news, self._see)
        self._member: Member | None = None
        self._heart: Heart | None = None
        self._began_at = 0.0
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._dropped = asyncio.Event()
        self._beat_wanted = asyncio.Event()
        self._beaten = asyncio.Condition()

    # --- what users ask

    @property
    def worker_id(self) -> str:
        """The stable id; empty while there is none."""
        return "" if self._member is None else self._member.worker

    @property
    def is_leader(self) -> bool:
        return self._office.is_leader

    @property
    def state(self) -> State:
        return self._board.state

    @property
    def assignment(self) -> Assignment:
        """What this worker holds now, by the newest document it knows."""
        member, now = self._member, self._clock()
        if member is None:
            return Assignment()
        held = {p: fence for p, fence in member.held.items() if member.holds(p, now)}
        fences = {p.id: fence for p, fence in held.items()}
        return Assignment(member.version, member.lifecycle, tuple(sorted(held)), fences)

    def holds(self, partition: Partition) -> bool:
        """Whether this worker holds a partition at this moment, by its own clock: ask right before what matters."""
        return self._member is not None and self._member.holds(partition, self._clock())

    def fence(self, partition: Partition) -> int | None:
        """A number that rises with every grant of this partition, for whatever the work writes to; None if it is not
        held now."""
        return None if self._member is None else self._member.fence(partition, self._clock())

    async def refresh_partitions(self) -> None:
        """The partitions have changed: have the leader list them anew. Returns when it has been told."""
        if self.is_leader:
            await self._office.list_partitions()
            return
        heart = self._heart
        if heart is None:
            raise ConnectionLost("this worker has no id now")
        heart.refreshes += 1
        wanted = heart.refreshes
        self._beat_wanted.set()
        try:
            async with asyncio.timeout(float(self._config.operation_timeout)), self._beaten:
                await self._beaten.wait_for(lambda: heart.refreshes_written >= wanted)
        except TimeoutError:
            raise ConnectionLost("the wish to refresh could not be written") from None

    # --- beginning and end

    async def start(self) -> None:
        """Claim an id, take part in the election, and wait for the first assignment."""
        if self.state is not State.INIT:
            raise BadConfig("a manager is started once: make a new one")
        self._board.to(State.CLAIMING_ID)
        self._tasks = [
            asyncio.create_task(self._hooks.run(self._next_change, self._finished), name="assign hooks"),
            asyncio.create_task(self._run(), name="assign sessions"),
        ]
        try:
            async with asyncio.timeout(float(self._config.startup_timeout)):
                await self._ready.wait()
        except TimeoutError:
            error = self._startup_error()
            await self._give_up()
            raise error from None
        except BaseException:
            await self._give_up()
            raise
        if self._is_closing:
            raise AssignError("stop() was called before the first assignment was there")

    def _startup_error(self) -> AssignError:
        last = self._board.last_error
        if self.state is State.CLAIMING_ID:
            if last is not None:
                return last if isinstance(last, ConnectionLost) else ConnectionLost(type(last).__name__)
            ids = list(self._config.worker_ids())
            return StableIDExhausted(ids[0], ids[-1])
        if self.state is State.ELECTION:
            return ElectionFailed("no answer" if last is None else str(last))
        return StartupTimeout(float(self._config.startup_timeout), self.state.name)

    async def _give_up(self) -> None:
        """A start that failed gives back what it can at once; the rest ends by itself."""
        if self._is_closing:
            return  # stop() sees to it, and takes its time
        with contextlib.suppress(TimeoutError, HeaplineError):
            await self._shut_down(min(float(self._config.shutdown_timeout), float(self._config.heartbeat_interval)))

    async def stop(self) -> None:
        """Drop everything through the hooks, give back the id and the lead. What cannot be dropped within
        shutdown_timeout is not given back: others get it when the lease has ended."""
        if self.state is State.SHUTDOWN:
            return
        seconds = float(self._config.shutdown_timeout)
        try:
            await self._shut_down(seconds)
        except TimeoutError:
            raise ShutdownTimeout(seconds, 0 if self._member is None else len(self._member.undropped)) from None

    async def _shut_down(self, seconds: float) -> None:
        self._board.to(State.SHUTDOWN)
        self._is_closing = True
        if self._member is not None:
            self._member.close()
        self._hooks.wake()
        self._ready.set()  # whoever waits in start() has waited in vain
        try:
            async with asyncio.timeout(seconds):
                if self._member is not None and not self._member.is_empty:
                    await self._dropped.wait()
                await self._release()
        finally:
            self._heart = None
            await self._end_tasks()

    async def _end_tasks(self) -> None:
        """A hook that does not let itself be cancelled is left alone: it holds nothing when the lease has ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            done, pending = await asyncio.wait(self._tasks, timeout=float(self._config.heartbeat_interval))
            for task in pending:
                log.warning("assign.task_goes_on", task=task.get_name())
            for task in done:
                if not task.cancelled():
                    task.exception()

    async def _release(self) -> None:
        if self._heart is not None:
            with contextlib.suppress(SessionLost):
                await self._heart.release()
        await self._office.resign()

    # --- sessions

    async def _run(self) -> None:
        while not self._is_closing:
            self._begin(await self._claim())
            try:
                async with asyncio.TaskGroup() as group:
                    for work in (self._beating, self._lookout.looking, self._electing, self._office.keep_listing):
                        group.create_task(work(), name=f"assign {work.__name__}")
                    for prefix in (ASSIGNMENT_KEY, LEADER_KEY, WORKER_PREFIX):
                        group.create_task(self._lookout.watching(prefix), name=f"assign watch {prefix}")
            except* SessionLost:
                await self._lose()
            except* Exception as errors:
                # Nothing should come here. If it does, this session cannot be trusted: the next one begins anew.
                self._board.tell(errors.exceptions[0])
                await self._lose()
                await asyncio.sleep(float(self._config.heartbeat_interval))

    async def _claim(self) -> Claim:
        self._board.to(State.CLAIMING_ID)
        preferred = None if self._member is None else self._member.worker
        tries = 0
        while True:
            claim = None
            try:
                claim = await within(float(self._config.operation_timeout), self._claimer.claim(preferred))
                self._board.last_error = None
            except Exception as error:
                self._board.tell(error)
            if claim is not None:
                return claim
            await asyncio.sleep(min(self._config.retry.delay(tries), float(self._config.heartbeat_interval)))
            tries += 1

    def _begin(self, claim: Claim) -> None:
        former = self._member
        if not self._lookout.written(claim.revision):
            log.warning("assign.store_is_new", worker=claim.worker)
        self._member = Member(claim.worker, claim.session, float(self._config.heartbeat_ttl), former)
        if self._is_closing:
            self._member.close()
        self._heart = Heart(self._kv, self._config, self._clock, self._member, claim)
        self._began_at = self._clock()
        self._board.has_assignment = False
        self._hooks.wake()
        log.info("assign.claimed", worker=claim.worker)
        self._board.to(State.ELECTION)

    async def _lose(self) -> None:
        assert self._member is not None
        self._member.lose()
        self._heart = None
        self._hooks.wake()
        log.warning("assign.session_lost", worker=self._member.worker)
        await self._office.resign()

    async def _beating(self) -> None:
        assert self._heart is not None
        assert self._member is not None
        heart, member = self._heart, self._member
        interval = float(self._config.heartbeat_interval)
        while True:
            next_at = self._clock() + interval
            stops_at = member.lease.stops_at
            self._beat_wanted.clear()
            entry: Entry | None = None
            try:
                entry = await heart.beat()
            except SessionLost:
                raise
            except Exception as error:
                self._board.tell(error)
            self._board.metrics.record_heartbeat(member.worker, entry is not None)
            if entry is None:
                await asyncio.sleep(min(interval, self._config.heartbeat_ttl / 12))
                continue
            self._lookout.feed(entry)
            if self._clock() >= stops_at:
                self._hooks.wake()  # they have been told to let go, meanwhile or before
            async with self._beaten:
                self._beaten.notify_all()
            self._heed(member)
            await event_within(self._beat_wanted, next_at - self._clock())

    def _heed(self, member: Member) -> None:
        """If a leader waits for a confirmation that we can give, it shall not wait for the next heartbeat."""
        if self._heart is not None and member.is_awaited(self._heart.confirmed):
            self._beat_wanted.set()

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
            self._dropped.set()
        if member.is_member and not self._board.has_assignment and not self._is_closing:
            self._board.settle()
            self._ready.set()
        return None, max(0.0, member.lease.stops_at - now) if member.held else None

    def _finished(self, change: Change) -> None:
        member = self._member
        assert member is not None
        added, removed = member.finish(change)
        self._board.metrics.record_assignment_change(added, removed, member.version)
        self._heed(member)

    def _see(self, document: Document) -> None:
        assert self._member is not None
        if self._member.see(document):
            self._hooks.wake()
            self._heed(self._member)

    # --- leading

    async def _electing(self) -> None:
        assert self._member is not None
        interval = float(self._config.heartbeat_interval)
        while True:
            self._lookout.elect_wanted.clear()
            try:
                if not self._is_closing:
                    await within(float(self._config.election_timeout), self._office.elect(self._member, self._began_at))
                if self.state is State.ELECTION:
                    self._board.to(State.WAITING_ASSIGNMENT)
                    self._hooks.wake()
            except Exception as error:
                self._board.tell(error if isinstance(error, AssignError) else ElectionFailed(type(error).__name__))
            await asyncio.sleep(min(COALESCE, interval))
            if self.is_leader:
                await asyncio.sleep(interval)
            else:
                await event_within(self._lookout.elect_wanted, interval)
