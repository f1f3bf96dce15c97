"""The turns of one topic: collect the waiting calls, decide them together, and plan the next turn.

A *turn* handles all calls since the last one, in this order: enqueues, acks and other calls on leases, administrative
calls, timeouts and timers, and then pops, so that a pop sees all of it. Each decision is applied immediately and its
events join the open unit; answers wait for the committer. Waiting calls outlive a reload: the next turn decides them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from heapline.contract.columns import unpack, unpack_joined
from heapline.contract.errors import HeaplineError, ResourceExhausted, StorageFull, TopicReloading
from heapline.contract.leases import Leased, LeaseKeys, Settled
from heapline.core.events import Resumed
from heapline.core.now import Now
from heapline.engine.columns import EnqueueCall
from heapline.engine.committer import give, refuse
from heapline.engine.delivery import PopCall
from heapline.engine.groups.service import StreamServing
from heapline.engine.loaded_topic import RunningTopic
from heapline.engine.partition_upkeep import PartitionUpkeep
from heapline.engine.pop_replies import Handover
from heapline.engine.timers import INF
from heapline.logs import Log

log = Log("heapline.engine")
SETTLED = Settled()  # no lease was lost

WALL_CHECK_MS = 1000  # how often to check wall time while something waits for it: it may jump

AckCall = tuple[LeaseKeys, asyncio.Future[Any]]


class Turns:
    def __init__(self, runner: RunningTopic, handover: Handover, streams: StreamServing) -> None:
        self._runner, self._handover, self._streams = runner, handover, streams
        self._loop = asyncio.get_running_loop()
        # Calls that wait for the next turn:
        self.enqueues: list[EnqueueCall] = []
        self.acks: list[AckCall] = []
        self.calls: list[tuple[Callable[[Now], None], asyncio.Future[Any] | None]] = []
        self.pops: deque[PopCall] = deque()
        self._taken: list[PopCall] = []  # pops of the turn in progress
        self._is_planned = False
        self._upkeep = PartitionUpkeep(runner, lambda: self._is_planned)
        self._steps, self._has_waited = 0, False  # state of collecting calls for the next turn
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = INF  # steady ms

    def plan(self) -> None:
        """Schedule a turn, because a call arrived or something became due."""
        if not self._is_planned and not self._runner.is_closed:
            self._is_planned = True
            self._loop.call_soon(self._run)

    def stop(self) -> None:
        """Plan no turn without a call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, INF

    def refuse_all(self, error: HeaplineError) -> None:
        """Refuse all waiting calls."""
        for call in self.enqueues:
            refuse(call.future, error)
        for pop in self.pops:
            refuse(pop.future, error)
        for _, waiting in self.calls:
            if waiting is not None:
                refuse(waiting, error)
        for _, future in self.acks:
            refuse(future, error)
        self.acks.clear()
        self.enqueues.clear()
        self.pops.clear()
        self.calls.clear()

    # -- one turn --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._is_planned = False
        runner = self._runner
        if runner.failure is not None or runner.is_closed or runner.is_suspended:
            return
        if self._gathers() if runner.config.gather_steps else self._awaits_pops():
            return
        now = runner.steady.now()
        enqueues, self.enqueues = self.enqueues, []
        acks, self.acks = self.acks, []
        calls, self.calls = self.calls, []
        self._taken = []
        try:
            self._decide(enqueues, acks, calls, now)
        except Exception as error:
            # A bug, or a log that rejects a decision: the in-memory state can no longer be trusted.
            log.exception("a turn failed", topic=runner.name)
            runner.poison(error)
            reason = TopicReloading(runner.name, repr(error))
            self._streams.refuse_taken(reason)
            futures = [call.future for call in enqueues] + [future for _, future in acks]
            futures += [pop.future for pop in self._taken] + [future for _, future in calls if future is not None]
            for future in futures:
                refuse(future, reason)
            return
        self._plan_wake(now)

    def _decide(
        self,
        enqueues: list[EnqueueCall],
        acks: list[AckCall],
        calls: list[tuple[Callable[[Now], None], asyncio.Future[Any] | None]],
        now: Now,
    ) -> None:
        loaded, streams = self._runner.loaded, self._streams
        if enqueues:
            self._admit(enqueues, now)
        if acks:
            self._ack_all(acks, now)
        for run, _ in calls:
            run(now)
        if enqueues or acks or calls:
            loaded.firing.asked_at = now.steady
        fired = self._tick(now)
        if self.pops:
            self._serve(now)
        if loaded.topic.following.groups.by_name or streams.inbox or streams.waiting:
            streams.turn(now)
        if loaded.topic.config.min_freshness:
            loaded.delivery.heads.refresh(now.steady)  # head ages count from now, whether or not a caller pops
        loaded.committer.pump()
        self._upkeep.after_turn(now, sum([call.count for call in enqueues]), fired)

    def _gathers(self) -> bool:
        """Return whether to delay the turn so that more calls join it. While the disk is busy this delays no answer,
        because the decisions of this turn are written afterwards anyway. The delay is limited to one write."""
        committer = self._runner.loaded.committer
        if committer.is_writing and not self._has_waited:
            self._has_waited = True
            committer.when_free(self.plan)
            return True
        self._steps += 1
        if self._steps < self._runner.config.gather_steps:
            self.plan()
            return True
        self._steps, self._has_waited = 0, False
        return False

    def _awaits_pops(self) -> bool:
        """Return whether to delay a turn of acks by one step of the event loop. A consumer that acks a message requests
        the next one a step later, and together they need one commit instead of two. While the disk is busy they meet
        in the next unit anyway."""
        has_waited, self._has_waited = self._has_waited, False
        if has_waited or not self.acks or self.pops or self.enqueues or self.calls:
            return False
        if not self._runner.loaded.committer.is_writing:
            self._has_waited = True
            self.plan()
        return self._has_waited

    def _admit(self, calls: list[EnqueueCall], now: Now) -> None:
        loaded = self._runner.loaded
        if not loaded.journal.can_grow:
            for call in calls:
                refuse(call.future, StorageFull())
            loaded.committer.prepare_soon()
            return
        answers = loaded.admission.admit(calls, now)

        def answer() -> None:
            now, latencies = perf_counter(), []
            for call, result in answers:
                if call.future.done():
                    continue
                if isinstance(result, Exception):
                    call.future.set_exception(result)
                else:
                    call.future.set_result(result)
                    latencies.append(now - call.began)
            self._runner.counters.enqueue.add(*latencies)

        loaded.committer.answer(answer, [call.future for call in calls])

    def _ack_all(self, acks: list[AckCall], now: Now) -> None:
        """Apply all acks of a turn together: one event per partition."""
        ids = unpack_joined([keys.ids for keys, _ in acks])
        tokens = unpack_joined([keys.tokens for keys, _ in acks])
        if len(acks) > 1 and len(set(ids)) < len(ids):  # two calls ack one message, and may hold different leases
            for ack in acks:
                self._ack_all([ack], now)
            return
        loaded = self._runner.loaded
        lost: list[int] = []
        for partition, part_ids, part_tokens in loaded.topic.by_partition(ids, tokens):
            lost += loaded.emit_decision(partition, partition.decide_ack(part_ids, part_tokens), now)
        missing = set(lost)

        def answer() -> None:
            for keys, future in acks:
                if not future.done():
                    lost_here = [id for id in unpack(keys.ids) if id in missing] if missing else None
                    future.set_result(Settled(lost_here) if lost_here else SETTLED)

        loaded.committer.answer(answer, [future for _, future in acks])

    def _tick(self, now: Now) -> int:
        """Handle due timers and timeouts in slices. Return the number of rows."""
        loaded, counters = self._runner.loaded, self._runner.counters
        topic, firing = loaded.topic, loaded.firing
        if topic.paused_until is not None and now.wall >= topic.paused_until:
            loaded.emit(topic.partitions[0], Resumed(), now)
        wake = firing.wakes.next()
        if wake <= now.steady:
            counters.late.add((now.steady - wake) / 1000)
            firing.wakes.come(now.steady)
        if not firing.wakes.line:
            return 0
        unit, wanted = loaded.journal.open_unit_number, sum([pop.max_messages for pop in self.pops])
        allowance = firing.allowance(now, unit, loaded.committer.is_writing, wanted)
        return firing.fire(now, allowance, loaded.emit)

    def _serve(self, now: Now) -> None:
        loaded = self._runner.loaded
        calls = [call for call in self.pops if not call.future.done()]
        self.pops.clear()
        self._taken = calls
        served = loaded.delivery.serve(calls, now)
        if served:
            for call in served:
                if not call.began:  # it has waited for a message
                    call.began = perf_counter()
            self._handover.read(served)
        if len(served) == len(calls):
            return
        got = set(map(id, served))
        for call in calls:
            if id(call) in got:
                continue
            if call.waits and call.refusal is None:
                call.began = 0.0
                self.pops.append(call)
            else:
                loaded.committer.answer(self._nothing(call), (call.future,))

    def _nothing(self, call: PopCall) -> Callable[[], None]:
        """Return the answer to a pop that got no message, as this turn decides it."""
        topic = self._runner.loaded.topic
        limit = topic.config.max_inflight
        refusal = call.refusal
        if refusal is None and limit and topic.leased >= limit and topic.ready and not topic.paused:
            refusal = ResourceExhausted(f"max_inflight of topic {topic.name!r}", limit)
        if refusal is not None:
            return partial(refuse, call.future, refusal)
        return partial(give, call.future, Leased(topic.name))

    # -- the next turn ---------------------------------------------------------------------------------------------

    def _plan_wake(self, now: Now) -> None:
        """Plan the next turn without a call: when something becomes due, or when more due rows can fire."""
        loaded = self._runner.loaded
        topic, wakes = loaded.topic, loaded.firing.wakes
        for number in topic.changed:
            partition = topic.partitions[number]
            wait = partition.next_wake_in(now)
            if wait is not None and (len(partition.entries.calendar) or len(partition.entries.ttls_wall)):
                wait = min(wait, WALL_CHECK_MS)
            wakes.plan(number, INF if wait is None else now.steady + wait)
        for number, deadline in topic.granted:
            wakes.plan_by(number, deadline)
        topic.changed.clear()
        topic.granted.clear()
        if wakes.line:
            if loaded.committer.is_writing:
                loaded.committer.when_free(self.plan)
            else:
                self.plan()
        wake = wakes.next()
        if topic.paused_until is not None:
            wake = min(wake, now.steady + min(WALL_CHECK_MS, max(0, topic.paused_until - now.wall)))
        if topic.following.groups.by_name:
            wake = min(wake, self._streams.next_wake(now))
        if self.pops and (room_in := loaded.delivery.next_room_in(now)) is not None:
            wake = min(wake, now.steady + room_in)
        if wake < self._timer_at:
            self._set_timer(wake, now)

    def _set_timer(self, wake: float, now: Now) -> None:
        """Plan a turn at `wake`. An earlier timer is kept: its turn plans the next one. Most leases are acked in time,
        and a timer that followed each of them would cost 4 µs per turn."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, wake - now.steady) / 1000, self._come)
        self._timer_at = wake

    def _come(self) -> None:
        self._timer, self._timer_at = None, INF
        self.plan()
