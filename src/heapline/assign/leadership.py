"""A worker's part in leading: take part in the election, and execute the leader's decisions during a term.

A term ends on this worker's own clock if it was not renewed. leader.py decides. Every write is a compare-and-set on the
state that the decision was based on; a write that fails or gets no answer leaves the matter to the next decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from heapline.assign.assignment import ASSIGNMENT_KEY, Document
from heapline.assign.cancellation import within
from heapline.assign.config import Config
from heapline.assign.election import ElectionAgent, NumberedElection
from heapline.assign.errors import AssignmentVersionMismatch, ElectionFailed
from heapline.assign.kv import KV, Conflict, Entry, decode_record, encode_record
from heapline.assign.leader import Decision, Leader, PlanRequest
from heapline.assign.leases import GUARD, Bar, Tombstone
from heapline.assign.member import Member
from heapline.assign.metrics import MetricsCollector
from heapline.assign.partitions import Partition, PartitionSource, validated
from heapline.assign.status import Status
from heapline.assign.strategies import StatelessStrategy, affinity, assign_checked
from heapline.assign.worker_ids import WORKER_PREFIX, Standing, WorkerRecord, worker_key

T = TypeVar("T")

ROUNDS_MAX = 20  # decisions executed without a pause
VIRTUAL_NODES = 150  # per worker, the usual number
#: Larger plans, in partitions plus virtual nodes, run in a thread so that heartbeats are not delayed.
IN_THREAD_FROM = 20_000


class LeaderExecutor:
    """Executes the decisions of one term on the store and with the strategy."""

    def __init__(
        self,
        kv: KV,
        config: Config,
        clock: Callable[[], float],
        leader: Leader,
        strategy: StatelessStrategy,
        metrics: MetricsCollector,
    ) -> None:
        self._kv, self._config, self._clock, self._strategy = kv, config, clock, strategy
        self._timeout = config.store_timeout
        self._metrics, self.leader = metrics, leader

    # --- reading

    async def list_workers(self) -> None:
        entries = await within(self._timeout, self._kv.entries(WORKER_PREFIX))
        for entry in entries:
            self.observe(entry)
        self.leader.sessions.note_listing({entry.key.removeprefix(WORKER_PREFIX) for entry in entries}, self._clock())

    def observe(self, entry: Entry, seen_at: float | None = None) -> bool:
        """Note a worker's key. Return whether it may require action."""
        record = decode_record(entry.value, WorkerRecord)
        if record is None:
            return False
        worker = entry.key.removeprefix(WORKER_PREFIX)
        return self.leader.sessions.observe(
            worker, record, entry.revision, self._clock() if seen_at is None else seen_at
        )

    # --- executing

    async def execute(self, decision: Decision) -> bool:
        """Execute a decision. Return whether something changed, so that it is worth deciding again."""
        for write in decision.writes:
            await (self._write_tombstone(write) if isinstance(write, Tombstone) else self._write_bar(write))
        if decision.writes:
            return True  # the set of live workers may have changed
        if decision.publish is not None:
            return await self._publish(decision.publish)
        if decision.plan_request is not None:
            await self._plan(decision.plan_request)
            return True
        return False

    async def _write_tombstone(self, tombstone: Tombstone) -> None:
        confirmed = self.leader.sessions.confirmed(tombstone.worker, tombstone.session)
        record = WorkerRecord(session=tombstone.session, standing=Standing.ENDED, confirmed=confirmed)
        key, ttl = worker_key(tombstone.worker), self._config.worker_id_ttl
        try:
            revision = await within(
                self._timeout, self._kv.update(key, encode_record(record), tombstone.revision, ttl=ttl)
            )
        except Conflict:
            entry = await within(self._timeout, self._kv.get(key))
            if entry is not None:
                self.observe(entry)
            return
        self.leader.sessions.observe(tombstone.worker, record, revision, self._clock())

    async def _write_bar(self, bar: Bar) -> None:
        record = WorkerRecord(standing=Standing.BARRED)
        key, ttl = worker_key(bar.worker), self._config.worker_id_ttl
        try:
            revision = await within(self._timeout, self._kv.create(key, encode_record(record), ttl=ttl))
        except Conflict:
            return  # the key exists after all; the next listing shows it
        self.leader.sessions.observe(bar.worker, record, revision, self._clock())

    async def _publish(self, document: Document) -> bool:
        value, over = document.encode(), self.leader.revision
        try:
            writing = self._kv.update(ASSIGNMENT_KEY, value, over) if over else self._kv.create(ASSIGNMENT_KEY, value)
            revision = await within(self._timeout, writing)
        except Conflict:
            entry = await within(self._timeout, self._kv.get(ASSIGNMENT_KEY))
            found = None if entry is None else Document.decode(entry.value)
            if entry is None or found is None or entry.revision <= over:
                # Usually a stale reading; if it persists, the document was deleted.
                raise AssignmentVersionMismatch(document.version - 1, 0 if found is None else found.version) from None
            self.leader.observe_document(found, entry.revision, self._clock())
            return True
        self.leader.published(document, revision, self._clock())
        return True

    async def _plan(self, request: PlanRequest) -> None:
        began = time.perf_counter()
        arguments = (self._strategy, request.workers, request.partitions, request.previous)
        if len(request.partitions) + VIRTUAL_NODES * len(request.workers) > IN_THREAD_FROM:
            targets = await asyncio.to_thread(assign_checked, *arguments)
        else:
            targets = assign_checked(*arguments)
        self.leader.accept_plan(request, targets, self._clock())
        self._metrics.record_assignment_calculation_time(time.perf_counter() - began)
        self._metrics.record_affinity_score(affinity(request.previous, targets))


class Leadership:
    """Requests, renews and releases leadership. Sets `wakeup` when there may be something to do."""

    def __init__(
        self,
        config: Config,
        kv: KV,
        source: PartitionSource,
        strategy: StatelessStrategy,
        election: ElectionAgent,
        clock: Callable[[], float],
        status: Status,
        wakeup: asyncio.Event,
    ) -> None:
        self._config, self._kv, self._source, self._strategy = config, kv, source, strategy
        self._election, self._clock, self._status, self._wakeup = election, clock, status, wakeup
        self._timeout = config.store_timeout  # for reads; an election agent has election_timeout
        self._until = -math.inf
        self._partitions: tuple[Partition, ...] | None = None
        self._executor: LeaderExecutor | None = None
        # The current leader's worker key, and when that revision was first seen.
        self._observed_leader: tuple[Entry, float] | None = None
        self.acquired = asyncio.Event()  # set while this worker leads
        self.listing_wanted = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        return self._executor is not None and self._clock() < self._until

    @property
    def is_new(self) -> bool:
        """Whether the term has just begun and nothing was read yet."""
        return self._executor is not None and self._executor.leader.document is None

    @property
    def document(self) -> Document | None:
        return None if self._executor is None else self._executor.leader.document

    # --- the election

    async def elect(self, member: Member, since: float) -> None:
        """Renew the leadership or request it. `since` is when this process started."""
        sent_at = self._clock()
        lease = self._config.heartbeat_ttl
        if self.is_leader:
            try:
                await self._ask(self._election.renew_leadership())
                if not await self._ask(self._election.is_leader()):
                    raise ElectionFailed("another worker leads")
            except ElectionFailed:
                await self.resign()
                raise
            self._until = sent_at + lease * (1 - GUARD)
            return
        await self.resign()
        sent_at = self._clock()
        if await self._ask(self._election.request_leadership(member.worker, lease)):
            self._until = sent_at + lease * (1 - GUARD)
            self._begin_term(member, since)

    async def _ask(self, call: Awaitable[T]) -> T:
        return await within(self._config.election_timeout, call)

    def _begin_term(self, member: Member, since: float) -> None:
        term = self._election.epoch if isinstance(self._election, NumberedElection) else None
        leader = Leader(self._config, member.session, since, term)
        if self._partitions is not None:
            leader.observe_partitions(self._partitions)
        metrics = self._status.metrics
        self._executor = LeaderExecutor(self._kv, self._config, self._clock, leader, self._strategy, metrics)
        if self._observed_leader is not None:
            self._executor.observe(*self._observed_leader)
            self._observed_leader = None
        self._status.log.info("assign.leads", worker=member.worker)
        self._status.note_leader(member.worker)
        self.acquired.set()
        self.listing_wanted.set()
        self._wakeup.set()

    async def resign(self) -> None:
        """End the term and release the leadership."""
        if self._executor is None:
            return
        self._executor, self._until = None, -math.inf
        self.acquired.clear()
        self._status.leave_leader_state()
        self._status.note_leader("")
        with contextlib.suppress(Exception):  # the leadership also ends by time, whatever an agent raises
            await self._ask(self._election.release_leadership())

    # --- reading

    async def read_workers(self, document: Document | None) -> None:
        """Read all workers' keys if leading, otherwise the leader's key.

        A follower that succeeds the leader then already knows how long the leader has been silent, and need not wait
        for another lease.
        """
        if self._executor is not None:
            await self._executor.list_workers()
        elif document is not None and (leader := document.written_by()) is not None:
            entry = await within(self._timeout, self._kv.get(worker_key(leader)))
            last = None if self._observed_leader is None else self._observed_leader[0]
            if entry is not None and (last is None or last.key != entry.key or last.revision < entry.revision):
                self._observed_leader = (entry, self._clock())

    def observe_worker(self, entry: Entry) -> None:
        if self._executor is not None and self._executor.observe(entry):
            self._wakeup.set()

    def observe_document(self, document: Document | None, revision: int) -> None:
        if self._executor is not None:
            self._executor.leader.observe_document(document, revision, self._clock())
            self._wakeup.set()

    async def list_partitions(self) -> None:
        """List the partitions, with as many retries as configured. Raise the last error."""
        self._partitions = partitions = await self._listed()
        if self._executor is not None:
            self._executor.leader.observe_partitions(partitions)
            self._wakeup.set()

    async def _listed(self) -> tuple[Partition, ...]:
        retry, failures = self._config.retry, 0
        while True:
            try:
                return validated(await within(self._config.operation_timeout, self._source.list_partitions()))
            except Exception as error:
                if failures >= retry.max_retries:
                    raise
                self._status.report_error(error)
            await asyncio.sleep(retry.delay(failures))
            failures += 1

    async def listing_loop(self) -> None:
        """List partitions when a term begins and when a worker requests it."""
        while True:
            await self.listing_wanted.wait()
            self.listing_wanted.clear()
            if self._executor is None:
                continue
            try:
                await self.list_partitions()
            except Exception as error:
                self._status.report_error(error)
                await asyncio.sleep(self._config.retry.max_delay)
                self.listing_wanted.set()

    # --- running the term

    async def run_leader(self) -> float:
        """Do everything that can be done now. Return when to decide again."""
        for _ in range(ROUNDS_MAX):
            executor = self._executor
            if executor is None:
                return math.inf
            decision = executor.leader.decide(self._clock())
            if decision.deposed and isinstance(self._election, NumberedElection):
                assert executor.leader.document is not None
                self._election.stay_above(executor.leader.document.epoch)
            if decision.deposed or not self.is_leader:
                await self.resign()
                return math.inf
            if decision.refresh:
                self.listing_wanted.set()
            self._status.set_leader_state(decision.state)
            if not await executor.execute(decision):
                return decision.wake_at
        return self._clock()
