"""One message from lease to answer: read it, run its handler, and say to the broker what came of it.

A handler ends by itself, or is stopped for one of three causes: its time is up, its lease is lost, the worker stops.
An async handler is cancelled. A thread cannot be: it is left behind (`abandoned`), and so is a coroutine that does not
heed its cancellation. Whatever is left behind keeps neither its lease nor its place in the worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from heapline.client.tasks import tracing
from heapline.client.tasks.encoding import Undecodable
from heapline.client.tasks.leases import Lease, LeaseKeeper
from heapline.client.tasks.middleware import Call, chain
from heapline.client.tasks.outcomes import ACK, LEAVE, Outcome
from heapline.client.tasks.threads import Threads
from heapline.errors import HeaplineError, LeaseLost, UnavailableError
from heapline.logs import Log

if TYPE_CHECKING:
    from heapline.client.tasks.app import App
    from heapline.client.tasks.task import Task

log = Log("heapline.worker")
HEED_SECONDS = 5.0  # for a cancelled coroutine to end, before it is left behind
ANSWER_PAUSES = (0.1, 0.3, 1.0, 3.0, 5.0)  # between tries to tell an unreachable broker; the last one repeats
Cause = Literal["timeout", "lost", "stop"]


@dataclass
class Totals:
    """What a worker has done so far."""

    done: int = 0
    retried: int = 0
    buried: int = 0
    released: int = 0
    timed_out: int = 0
    lost: int = 0  # leases that ended before the handler did, or before its answer arrived
    abandoned: int = 0  # runs left behind that have not ended yet
    seconds: float = field(default=0.0)  # spent in handlers


class Run:
    """One handler at work."""

    __slots__ = ("_free", "cause", "has_place", "is_left", "is_over", "lease", "task", "thread_runs", "timer")

    def __init__(self, lease: Lease, free: Callable[[], None]) -> None:
        self.lease = lease
        self._free = free
        self.has_place = True  # in the worker
        self.task: asyncio.Task[None] | None = None
        self.cause: Cause | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.thread_runs = False
        self.is_left = False
        self.is_over = False  # the handler has ended; its answer is on the way

    def give_place(self) -> None:
        if self.has_place:
            self.has_place = False
            self._free()

    def stop(self, cause: Cause) -> None:
        if self.cause is None and not self.is_over and self.task is not None:
            self.cause = cause
            self.task.cancel()


_current_run: contextvars.ContextVar[Run] = contextvars.ContextVar("heapline_run")


class Runner:
    def __init__(
        self, app: App, broker: Any, leases: LeaseKeeper, threads: Threads, *, answers_max: int,
        cancel_when_lost: bool = True, on_abandoned: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._app = app
        self._broker = broker
        self._leases = leases
        self._threads = threads
        self._cancel_when_lost = cancel_when_lost
        self._on_abandoned = on_abandoned
        self._answering, self._answers_max = 0, answers_max  # handlers that ended, whose answer is on its way
        self._rng = rng or random.Random()
        self._handle = chain([tracing.observe, *app.layers] if tracing.is_on() else app.layers, self._innermost)
        self._runs: dict[asyncio.Task[None], Run] = {}
        self.totals = Totals()

    @property
    def running(self) -> list[Run]:
        return list(self._runs.values())

    def start(self, lease: Lease, free: Callable[[], None]) -> None:
        run = Run(lease, free)
        run.task = asyncio.ensure_future(self._whole(run))
        self._runs[run.task] = run
        run.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._runs.pop(task)
        run.give_place()
        if run.is_left and not run.thread_runs:
            self.totals.abandoned -= 1  # a coroutine that has ended after all
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a run failed inside the worker", error=type(error).__name__)

    async def _whole(self, run: Run) -> None:
        try:
            outcome = await self._outcome(run)
        finally:
            run.is_over, run.lease.on_lost = True, None
            if run.timer is not None:
                run.timer.cancel()
        if run.is_left:
            return
        if self._answering < self._answers_max:
            run.give_place()  # the next one is fetched while this one is answered for
        self._answering += 1
        try:
            await self._answer(run.lease, outcome)
        finally:
            self._answering -= 1

    # -- what comes of it ------------------------------------------------------------------------------------------

    async def _outcome(self, run: Run) -> Outcome:
        message = run.lease.message
        task = self._app.find(message)
        if task is None:
            return self._unknown(message.headers)
        try:
            call = Call(task, message, task.codec.decode(message.payload))
        except Undecodable as error:
            return Outcome("bury", str(error)[:1000])
        loop = asyncio.get_running_loop()
        run.timer = loop.call_later(task.timeout, self._time_out, run, task)
        run.lease.on_lost = lambda: self._lose(run)
        if run.lease.is_lost:
            return LEAVE
        started = loop.time()
        _current_run.set(run)
        try:
            await self._handle(call)
        except asyncio.CancelledError as error:
            return self._cancelled(run, task, error)
        except (Exception, SystemExit) as error:  # sys.exit() in a handler ends that run, not the worker
            outcome = task.rules.decide(error, message.attempts, self._rng.random())
            tell = log.info if task.rules.expects(error) else log.exception  # a surprise comes with its traceback
            tell("a handler failed", task=task.name, message=message.message_id, act=outcome.act, why=outcome.reason)
            return outcome
        finally:
            self.totals.seconds += loop.time() - started
        return ACK

    def _unknown(self, headers: dict[str, str]) -> Outcome:
        """Another version of the app may know it, so it is tried again, after the topic's back-off."""
        from heapline.client.tasks.task import TASK

        name = headers.get(TASK)
        what = f"no task {name[:100]!r} in this app" if name else "no task is named, and the topic has not just one"
        return Outcome("bury" if self._app.unknown == "bury" else "nack", what)

    def _cancelled(self, run: Run, task: Task[..., Any], error: BaseException) -> Outcome:
        """Told to stop, or a CancelledError of the handler's own."""
        if run.cause is None:
            return task.rules.decide(RuntimeError("the handler was cancelled from within"), run.lease.message.attempts,
                                     self._rng.random())  # fmt: skip
        asyncio.current_task().uncancel()  # type: ignore[union-attr]
        if run.thread_runs:
            self._leave(run, f"its thread goes on ({run.cause})")
            return LEAVE
        if run.cause == "timeout":
            late = TimeoutError(f"the handler took longer than its timeout of {task.timeout:g} s")
            return task.rules.decide(late, run.lease.message.attempts, self._rng.random())
        return Outcome("release") if run.cause == "stop" else LEAVE

    # -- the causes ------------------------------------------------------------------------------------------------

    def _time_out(self, run: Run, task: Task[..., Any]) -> None:
        self.totals.timed_out += 1
        log.warning("a handler timed out", task=task.name, message=run.lease.message.message_id, timeout=task.timeout)
        self._leases.let_go(run.lease)
        run.stop("timeout")
        run.timer = asyncio.get_running_loop().call_later(HEED_SECONDS, self._leave, run, "it does not heed")

    def _lose(self, run: Run) -> None:
        self.totals.lost += 1
        log.warning("a lease was lost while its handler ran", message=run.lease.message.message_id)
        if self._cancel_when_lost and not run.thread_runs:
            run.stop("lost")

    def _leave(self, run: Run, why: str) -> None:
        """Its place goes to others; its lease runs out by itself."""
        if run.is_left:
            return
        run.is_left = True
        self._leases.let_go(run.lease)
        self.totals.abandoned += 1
        log.warning("a run is left behind", message=run.lease.message.message_id, why=why)
        run.give_place()
        self._on_abandoned()

    # -- the handler -----------------------------------------------------------------------------------------------

    async def _innermost(self, call: Call) -> Any:
        task = call.task
        if task.is_async:
            return await task.codec.call(call.arguments)
        run = _current_run.get()
        run.thread_runs = True
        result = await self._threads.run(lambda: task.codec.call(call.arguments), lambda: self._thread_ended(run))
        return await result if inspect.isawaitable(result) else result  # of a decorator that hides an async def

    def _thread_ended(self, run: Run) -> None:
        run.thread_runs = False
        if run.is_left:
            self.totals.abandoned -= 1
            log.info("a run that was left behind has ended", message=run.lease.message.message_id)

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _answer(self, lease: Lease, outcome: Outcome) -> None:
        """Tell the broker, again and again while it cannot be reached and the lease holds."""
        tries, loop = 0, asyncio.get_running_loop()
        try:
            while outcome.act != "leave":
                try:
                    await self._tell(lease, outcome)
                    break
                except LeaseLost:
                    self.totals.lost += not lease.is_lost
                    log.warning("an answer came after its lease had ended", message=lease.message.message_id)
                    break
                except UnavailableError:
                    if lease.is_lost or loop.time() >= lease.until:
                        break
                await asyncio.sleep(ANSWER_PAUSES[min(tries, len(ANSWER_PAUSES) - 1)])
                tries += 1
        except HeaplineError as error:
            log.error("a run cannot be answered", message=lease.message.message_id, error=type(error).__name__)
        finally:
            self._leases.let_go(lease)

    async def _tell(self, lease: Lease, outcome: Outcome) -> None:
        message, totals = lease.message, self.totals
        if outcome.act == "ack":
            await self._broker.ack(message)
            totals.done += 1
        elif outcome.act == "nack":
            await self._broker.nack(message, backoff=outcome.backoff, reason=outcome.reason)
            totals.retried += 1
        elif outcome.act == "bury":
            await self._broker.bury(message, reason=outcome.reason)
            totals.buried += 1
        else:
            await self._broker.release(message)
            totals.released += 1
