"""The pops of one topic on this node. They are served in order of arrival, together in one transaction.

While there is a ready queue (ready_queue.py), calls take its messages first, in transactions that run beside each other
and beside those of other nodes. Calls that get none lease from the database, alone on the topic. A pop that finds
nothing keeps its place and waits for a wakeup, the next poll, or its deadline. The leases of a pop whose caller was
cancelled are released immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any

from heapline.contract.errors import HeaplineError
from heapline.contract.leases import Leased
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.claims import (
    TRIES,
    PopCall,
    claim_best,
    exclusive_names,
    lease,
    leased_messages,
    place_of,
    take_entries,
)
from heapline.sql.home import Home
from heapline.sql.layout import in_slots
from heapline.sql.ready_queue import ReadyQueue
from heapline.sql.retries import release
from heapline.sql.settlement import hold, settle
from heapline.sql.shard import Topic, Turn

log = Log("heapline.sql")
CALLS_PER_TRANSACTION = 64
TAKES_MAX = 4  # transactions at a time that take from the ready queue of one topic


class PopQueue:
    def __init__(
        self,
        home: Home,
        tasks: OwnedTasks,
        poll_interval: float,
        on_idle: Callable[[], object],
        ready_queue: ReadyQueue | None,
    ) -> None:
        self._home, self._tasks, self._poll_interval, self._on_idle = home, tasks, poll_interval, on_idle
        self._ready_queue = ready_queue  # None: without Redis
        self._takes = 0  # transactions that take from it now
        self._calls: list[PopCall] = []
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def pop(self, call: PopCall, wait: float) -> Leased:
        self._calls.append(call)
        self._woken.set()
        if self._task is None:
            self._task = self._tasks.spawn(self._run())
        timer = asyncio.get_running_loop().call_later(wait, self._stop_waiting, call) if call.waits else None
        try:
            return await call.future
        except asyncio.CancelledError:
            if not call.future.cancelled() and call.future.exception() is None and call.rows:
                self._tasks.spawn(self._give_back(call.rows))  # cancelled after the answer, before it was received
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if call.future.cancelled():
                self._woken.set()

    def close(self, error: HeaplineError) -> None:
        """Refuse all calls. A turn in progress completes, and releases what it has leased."""
        for call in self._calls:
            if not call.future.done():
                call.future.set_exception(error)
        self._woken.set()

    def _stop_waiting(self, call: PopCall) -> None:
        """Answer a call in its next turn, which is scheduled now."""
        call.waits = False
        self._woken.set()

    async def _run(self) -> None:
        wakeups, topic = self._home.shard.wakeups, self._home.name.canonical
        wakeups.add(topic, self._woken)
        try:
            while self._drop_answered():
                self._woken.clear()
                await self._turn()
                if self._drop_answered():
                    await self._sleep()
        finally:
            wakeups.remove(topic, self._woken)
            self._task = None
            self._on_idle()

    def _drop_answered(self) -> bool:
        """Forget calls that were answered or cancelled. Return whether any are left."""
        self._calls = [call for call in self._calls if not call.future.done()]
        return bool(self._calls)

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(self._poll_interval):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _turn(self) -> None:
        calls, has_more = [call for call in self._calls if not call.is_taking], True
        queue = self._ready_queue
        fresh = [call for call in calls if call.tries_left]
        if queue is not None and fresh and await queue.has_entries(fresh[0].max_messages):
            self._take_beside(queue, fresh)
            calls = [call for call in calls if not call.tries_left]
        for start in range(0, len(calls), CALLS_PER_TRANSACTION):
            some = calls[start : start + CALLS_PER_TRANSACTION]
            has_more = await self._serve(some, self._lease(some, has_more))

    def _take_beside(self, queue: ReadyQueue, calls: list[PopCall]) -> None:
        """Serve calls from the ready queue in the background. Those that are too many wait until a take ends."""
        while calls and self._takes < TAKES_MAX:
            sums = accumulate(call.max_messages for call in calls[:CALLS_PER_TRANSACTION])
            count = max(1, sum(queue.serves(total) for total in sums))
            some, calls = calls[:count], calls[count:]
            self._takes += 1
            for call in some:
                call.is_taking = True
            self._tasks.spawn(self._take_and_wake(queue, some))

    async def _take_and_wake(self, queue: ReadyQueue, calls: list[PopCall]) -> None:
        try:
            await self._serve(calls, self._take(queue, calls))
        finally:
            self._takes -= 1
            for call in calls:
                call.is_taking = False
            self._woken.set()

    async def _serve(self, calls: list[PopCall], transaction: Awaitable[bool]) -> bool:
        """Run a transaction that serves calls. Return whether there may be more messages."""
        try:
            return await transaction
        except Exception as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)
            if not isinstance(error, HeaplineError):
                log.exception("pop failed", topic=self._home.name.canonical)
            return False

    async def _take(self, queue: ReadyQueue, calls: list[PopCall]) -> bool:
        """Serve calls from the ready queue, in one transaction."""
        began = perf_counter()
        entries = await queue.pop(sum(call.max_messages for call in calls))
        if not entries:
            for call in calls:
                call.tries_left = 0
            return True
        for call in calls:
            call.entries, entries = entries[: call.max_messages], entries[call.max_messages :]
        alone = {name for call in calls for name in exclusive_names(call)}
        serve = partial(lease, home=self._home, calls=calls, claim=take_entries)
        turn, _ = await self._home.shard.share_topic(self._home.name, serve, alone)
        queue.learn(turn.topic)
        served = [call for call in calls if call.rows]
        for call in calls:
            call.tries_left = call.tries_left - 1 if call.error is None else 0
        self._home.counters.prefetched += sum(len(call.rows) for call in served)
        await queue.taken(len(served))
        await self._answer_all(served, turn.topic, began)
        return True

    async def _lease(self, calls: list[PopCall], has_more: bool) -> bool:
        """Serve calls from the database, in one transaction. Return whether there may be more messages."""
        shard, began = self._home.shard, perf_counter()
        epoch = shard.floors.epoch
        await self._home.flush(required=False)
        serve = partial(lease, home=self._home, calls=calls, claim=claim_best, has_more=has_more)
        turn, has_more = await shard.in_topic(self._home.name, serve)
        for call in calls:
            call.tries_left = TRIES
            if call.taken is not None:
                shard.floors.raise_to(turn.topic.id, turn.layout.turns, call.taken, epoch)
        if self._ready_queue is not None:
            self._ready_queue.learn(turn.topic)
            if has_more and self._ready_queue.serves(calls[0].max_messages):
                self._ready_queue.leased([place_of(row) for call in calls for row in call.rows])
        await self._answer_all(calls, turn.topic, began)
        return has_more

    async def _answer_all(self, calls: Sequence[PopCall], topic: Topic, began: float) -> None:
        unwanted: list[Any] = []
        for call in calls:
            if call.future.done():
                unwanted += call.rows
            else:
                self._answer(call, topic, began)
        if unwanted:
            await self._give_back(unwanted)  # before the next turn, whose calls are to find them

    def _answer(self, call: PopCall, topic: Topic, began: float) -> None:
        if call.rows:
            counters = self._home.counters
            counters.leased += len(call.rows)
            counters.pop.add(perf_counter() - max(began, call.began))
            self._home.expect(min(row["until"] for row in call.rows))
            call.future.set_result(Leased(topic.name, leased_messages(call.rows), topic.id_suffix))
        elif call.waits:
            return
        elif call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(Leased(topic.name, id_suffix=topic.id_suffix))

    async def _give_back(self, rows: Sequence[Any]) -> None:
        """Release leases that no caller received."""

        async def work(turn: Turn) -> None:
            async def end(slot: int, ids: list[int], tokens: list[int]) -> set[int]:
                held = await hold(turn.connection, slot, turn.topic.id, ids, tokens)
                await settle(
                    turn.connection,
                    turn.layout,
                    slot,
                    turn.topic.id,
                    turn.topic.config,
                    release(held, turn.now),
                    returned_attempts=-1,
                )
                return {one.id for one in held}

            await in_slots([r["id"] for r in rows], [r["token"] for r in rows], end)

        try:
            await self._home.shard.in_topic(self._home.name, work, locked=False)
        except HeaplineError as error:
            log.warning("leases not released; they will expire", error=str(error), count=len(rows))
        self._home.wake()
