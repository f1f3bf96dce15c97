"""A worker: pops messages of an app's topics, best first, and runs their handlers, up to `concurrency` at a time.

It leases only as many messages as it has free slots, so no message waits here that another worker could run. With
several topics, each may have one leased message that waits for a slot, because waiting for work means to lease it.
Topics take turns for slots.

After `stop` it pops no more. Handlers may finish within `grace`; then they are cancelled and their messages released.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from heapline.client.tasks.broker_binding import Home
from heapline.client.tasks.execution import Runner, TaskTable, Threads, Totals
from heapline.client.tasks.leases import Lease, LeaseKeeper
from heapline.client.tasks.task import Task
from heapline.contract.broker import Broker
from heapline.contract.config import canonical_topic
from heapline.contract.errors import BadRequest, HeaplineError, TopicNotFound, UnavailableError
from heapline.contract.message import TopicInfo
from heapline.logs import Log

log = Log("heapline.worker")
POP_WAIT = 20.0  # seconds that one pop waits for work
POP_LEAST = 16  # slots that are worth a pop of their own
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds between tries to reach a broker; the last one repeats
CLOSE_SECONDS = 5.0  # for handlers that were cancelled at the end of the grace period


class WorkerApp(TaskTable, Protocol):
    """The tasks of a worker, their broker and their topics. An `App` is one."""

    @property
    def home(self) -> Home: ...
    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]: ...
    def topics(self) -> list[str]: ...
    async def make_topics(self, broker: Broker, topics: list[str]) -> list[TopicInfo]: ...
    async def make_or_raise(self, broker: Broker, topic: str) -> None: ...


class Slots:
    """The number of handlers that run at the same time. The longest waiting task gets the next free slot."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a slot."""
        if self.free and not self._waiting:
            self.free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.give()  # it had been granted already
            else:
                self._waiting.remove(mine)
            raise

    def take_free(self, most: int) -> int:
        """Take up to `most` slots that are free and that no task waits for; return how many."""
        count = 0 if self._waiting else min(self.free, most)
        self.free -= count
        return count

    def give(self, count: int = 1) -> None:
        for _ in range(count):
            while self._waiting and self._waiting[0].done():
                self._waiting.popleft()
            if self._waiting:
                self._waiting.popleft().set_result(None)
            else:
                self.free += 1


class Worker:
    def __init__(
        self,
        app: WorkerApp,
        *,
        concurrency: int = 16,  # handlers that run at the same time
        topics: list[str] | None = None,  # None: the topics of all the app's tasks
        visibility: float = 30.0,  # seconds of a lease; extended at a third of it while the handler runs
        grace: float = 30.0,  # seconds that handlers may take after stop()
        cancel_when_lost: bool = True,  # cancel a handler whose lease is lost: another worker may run it
        abandoned_max: int | None = None,  # abandoned runs after which it stops; None: twice concurrency
        report_interval: float = 60.0,  # seconds between log lines
    ) -> None:
        if not (isinstance(concurrency, int) and 1 <= concurrency <= 10_000):
            raise BadRequest(f"concurrency must be an integer from 1 to 10000, got {concurrency!r}")
        for name, seconds in (("visibility", visibility), ("report_interval", report_interval)):
            if not seconds > 0:
                raise BadRequest(f"{name} must be a number of seconds over 0, got {seconds!r}")
        if not grace >= 0:
            raise BadRequest(f"grace must be a number of seconds from 0, got {grace!r}")
        self._app = app
        self.topics = _chosen(app, topics)
        self._visibility = visibility
        self._grace = grace
        self._cancel_when_lost = cancel_when_lost
        self._abandoned_max = 2 * concurrency if abandoned_max is None else abandoned_max
        self._report_interval = report_interval
        self.slots = Slots(concurrency)
        # Pop for one half of the slots while the other half runs; otherwise worker and broker would take turns.
        self._pops_at_once = 2 if len(self.topics) == 1 and concurrency >= 2 * POP_LEAST else 1
        self._stopping = asyncio.Event()
        self._runner: Runner | None = None
        self._holder = f"{socket.gethostname()[:100]}:{os.getpid()}"
        self._last: tuple[float, Totals] = (0.0, Totals())
        self.is_worn_out = False  # it stopped because too many runs were abandoned

    @property
    def totals(self) -> Totals:
        return self._runner.totals if self._runner is not None else Totals()

    @property
    def running(self) -> int:
        """Handlers that run, or whose messages are being settled."""
        return len(self._runner.running) if self._runner is not None else 0

    def stop(self) -> None:
        """Pop no more, let handlers finish, and end. Call it in the worker's own event loop."""
        self._stopping.set()

    async def run(self) -> Totals:
        """Work until stopped, and return the counts."""
        for task in self._app.tasks.values():
            task.codec.check()
        home = self._app.home
        shared = home.is_open_here()  # by other code of this loop
        broker = await home.open_here()
        threads = Threads(self.slots.count)
        leases = LeaseKeeper(broker, self._visibility)
        self._runner = Runner(
            self._app,
            broker,
            leases,
            threads,
            answers_max=self.slots.count,
            cancel_when_lost=self._cancel_when_lost,
            on_abandoned=self._one_more,
        )
        keeping = asyncio.ensure_future(leases.keep())
        reporting = asyncio.ensure_future(self._report_regularly())
        try:
            await self._unless_stopped([asyncio.ensure_future(self._reached(broker))])
            if not self._stopping.is_set():
                takers = [self._take(broker, leases, topic) for topic in self.topics * self._pops_at_once]
                await self._unless_stopped([asyncio.ensure_future(taker) for taker in takers])
            await self._finish()
        finally:
            try:
                await self._stop_what_runs()  # even if this was cancelled
            finally:
                await _cancel([keeping, reporting])
                threads.close()
                if not shared:
                    await home.close_here()
        return self.totals

    async def _reached(self, broker: Any) -> None:
        """Create missing topics. Wait for a broker that cannot be reached yet."""
        for tries in count():
            try:
                self._warn_of_short_leases(await self._app.make_topics(broker, self.topics))
                return
            except UnavailableError as error:
                await self._pause(tries, error)

    def _warn_of_short_leases(self, there: list[TopicInfo]) -> None:
        """Warn about tasks whose timeout is longer than a lease can last."""
        longest = {info.name: info.config.lease_max for info in there}
        for task in self._app.tasks.values():
            lease_max = longest.get(canonical_topic(task.topic))
            if lease_max is not None and lease_max < task.timeout and task.topic in self.topics:
                log.warning(
                    "task may outlast its lease; raise its topic's lease_max, or lower its timeout",
                    task=task.name,
                    timeout=task.timeout,
                    topic=task.topic,
                    lease_max=lease_max,
                )

    async def _pause(self, tries: int, error: HeaplineError) -> None:
        seconds = PAUSES[min(tries, len(PAUSES) - 1)]
        log.warning("broker does not answer; will retry", seconds=seconds, error=type(error).__name__)
        await asyncio.sleep(seconds)

    async def _unless_stopped(self, work: list[asyncio.Future[Any]]) -> None:
        """Wait until one of them ends or fails, or the worker is stopped. Cancel the others."""
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*work, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([*work, stopping])
        for task in done - {stopping}:
            if (error := task.exception()) is not None:
                log.error("worker cannot pop messages; stopping", error=type(error).__name__)
                await self._finish()
                raise error

    # -- popping ----------------------------------------------------------------------------------------------------

    async def _take(self, broker: Any, leases: LeaseKeeper, topic: str) -> None:
        tries = 0
        while not self._stopping.is_set():  # in case a broker swallows the cancellation
            try:
                try:
                    await self._take_some(broker, leases, topic)
                    tries = 0
                except TopicNotFound:
                    await self._app.make_or_raise(broker, topic)
            except UnavailableError as error:
                await self._pause(tries, error)
                tries += 1

    async def _take_some(self, broker: Any, leases: LeaseKeeper, topic: str) -> None:
        """Take a slot, and then pop messages for it and all other free slots, or for half of the slots at most if the
        other half has its own pop."""
        await self.slots.take()
        places = 1 + self.slots.take_free(-(-self.slots.count // self._pops_at_once) - 1)
        alone = len(self.topics) == 1  # no other topic wants the slots, so they may wait for work
        found: list[Any] = []
        try:
            found = await self._pop(broker, topic, places, POP_WAIT if alone else 0)
        finally:
            self.slots.give(places - len(found))
        for message in found:
            self._start(leases.hold(message))
        if not found and not alone:
            await self._wait_for_one(broker, leases, topic)

    async def _wait_for_one(self, broker: Any, leases: LeaseKeeper, topic: str) -> None:
        for message in await self._pop(broker, topic, 1, POP_WAIT):
            lease = leases.hold(message)
            try:
                await self.slots.take()
            except asyncio.CancelledError:
                leases.let_go(lease)
                with suppress(HeaplineError):
                    await broker.release(message)
                raise
            if lease.is_lost:
                self.slots.give()
            else:
                self._start(lease)

    async def _pop(self, broker: Any, topic: str, count: int, wait: float) -> list[Any]:
        found: list[Any] = await broker.pop(topic, count, visibility=self._visibility, wait=wait, holder=self._holder)
        return found

    def _start(self, lease: Lease) -> None:
        assert self._runner is not None
        self._runner.start(lease, self.slots.give)

    def _one_more(self) -> None:
        """Stop if too many runs were abandoned: a new process is better than this one."""
        if self.totals.abandoned >= self._abandoned_max and not self.is_worn_out:
            log.error("too many abandoned runs; stopping", abandoned=self.totals.abandoned)
            self.is_worn_out = True
            self.stop()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        assert self._runner is not None
        if not (tasks := [run.task for run in self._runner.running if run.task is not None]):
            return
        log.info("finishing running handlers", running=len(tasks), grace=self._grace)
        await asyncio.wait(tasks, timeout=self._grace)
        await self._stop_what_runs()

    async def _stop_what_runs(self) -> None:
        assert self._runner is not None
        for run in self._runner.running:
            run.stop("stop")
        if left := [run.task for run in self._runner.running if run.task is not None]:
            await asyncio.wait(left, timeout=CLOSE_SECONDS)

    # -- reporting ---------------------------------------------------------------------------------------------------

    async def _report_regularly(self) -> None:
        self._last = (time.monotonic(), Totals())
        while True:
            await asyncio.sleep(self._report_interval)
            if self.totals != self._last[1]:
                self.report()

    def report(self) -> str:
        """Log and return a line about the time since the last one."""
        now, totals = time.monotonic(), self.totals
        then, before = self._last
        elapsed = max(now - then, 1e-9)
        self._last = (now, Totals(**vars(totals)))
        done = totals.done - before.done
        mean = (totals.seconds - before.seconds) / max(1, done)
        line = (
            f"{done} done ({done / elapsed:.1f}/s, {mean:.3f} s each), "
            f"{totals.retried - before.retried} retried, {totals.buried - before.buried} buried, "
            f"{self.running} running, {totals.abandoned} abandoned"
        )
        log.info(line)
        return line


def _chosen(app: WorkerApp, topics: list[str] | None) -> list[str]:
    known = app.topics()
    if not known:
        raise BadRequest("this app has no tasks; declare some with @app.task in a module that is imported")
    for topic in topics or ():
        if topic not in known:
            raise BadRequest(f"no task of this app is on topic {topic!r}; its topics are {', '.join(known)}")
    return list(dict.fromkeys(topics)) if topics else known


async def _cancel(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
