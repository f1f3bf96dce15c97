"""Run the handler of one message, and settle the message.

A handler ends, or is stopped for one of three causes: its timeout, a lost lease, or a worker that stops. An async
handler is cancelled. A thread cannot be cancelled, so it is abandoned, and so is a coroutine that ignores its
cancellation. An abandoned run keeps neither its lease nor its slot in the worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from heapline.client.tasks import tracing
from heapline.client.tasks.arguments import Undecodable
from heapline.client.tasks.leases import Lease, LeaseKeeper
from heapline.client.tasks.outcomes import ACK, LEAVE, Outcome
from heapline.client.tasks.task import TASK, Call, Middleware, Task, chain
from heapline.contract.errors import HeaplineError, LeaseLost, UnavailableError
from heapline.contract.message import Message
from heapline.logs import Log

log = Log("heapline.worker")
HEED_SECONDS = 5.0  # for a cancelled coroutine to end before it is abandoned
ANSWER_PAUSES = (0.1, 0.3, 1.0, 3.0, 5.0)  # seconds between tries to settle a message; the last one repeats
Cause = Literal["timeout", "lost", "stop"]


class TaskTable(Protocol):
    """The tasks that a runner can run, and their middleware. An `App` is one."""

    @property
    def layers(self) -> Sequence[Middleware]: ...
    @property
    def unknown(self) -> Literal["retry", "bury"]: ...
    def find(self, message: Message) -> Task[..., Any] | None: ...


@dataclass
class Totals:
    """Counts of a worker since it started."""

    done: int = 0
    retried: int = 0
    buried: int = 0
    released: int = 0
    timed_out: int = 0
    lost: int = 0  # leases that ended before the handler did, or before its message was settled
    abandoned: int = 0  # abandoned runs that have not ended yet
    seconds: float = field(default=0.0)  # spent in handlers


class Run:
    """One handler that runs."""

    __slots__ = ("_free", "cause", "has_place", "is_left", "is_over", "lease", "task", "thread_runs", "timer")

    def __init__(self, lease: Lease, free: Callable[[], None]) -> None:
        self.lease = lease
        self._free = free
        self.has_place = True  # a slot in the worker
        self.task: asyncio.Task[None] | None = None
        self.cause: Cause | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.thread_runs = False
        self.is_left = False
        self.is_over = False  # the handler has ended, and its message is being settled

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
        self,
        tasks: TaskTable,
        broker: Any,
        leases: LeaseKeeper,
        threads: Threads,
        *,
        answers_max: int,
        cancel_when_lost: bool = True,
        on_abandoned: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        self._tasks = tasks
        self._broker = broker
        self._leases = leases
        self._threads = threads
        self._cancel_when_lost = cancel_when_lost
        self._on_abandoned = on_abandoned
        self._answering, self._answers_max = 0, answers_max  # handlers that ended, whose messages are being settled
        self._rng = rng or random.Random()
        self._handle = chain([tracing.observe, *tasks.layers] if tracing.is_on() else tasks.layers, self._innermost)
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
            self.totals.abandoned -= 1  # a coroutine that has ended later
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker failed to run a handler", error=type(error).__name__)

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
            run.give_place()  # the next message is fetched while this one is settled
        self._answering += 1
        try:
            await self._answer(run.lease, outcome)
        finally:
            self._answering -= 1

    # -- outcomes ------------------------------------------------------------------------------------------

    async def _outcome(self, run: Run) -> Outcome:
        message = run.lease.message
        task = self._tasks.find(message)
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
        except (Exception, SystemExit) as error:  # sys.exit() in a handler must not end the worker
            outcome = task.rules.decide(error, message.attempts, self._rng.random())
            tell = log.info if task.rules.expects(error) else log.exception
            tell("handler failed", task=task.name, message=message.message_id, act=outcome.act, why=outcome.reason)
            return outcome
        finally:
            self.totals.seconds += loop.time() - started
        return ACK

    def _unknown(self, headers: dict[str, str]) -> Outcome:
        """Nack the message after the topic's backoff, because another version of the app may have the task."""
        name = headers.get(TASK)
        reason = "the message names no task, and its topic has several"
        if name:
            reason = f"this app has no task {name[:100]!r}"
        return Outcome("bury" if self._tasks.unknown == "bury" else "nack", reason)

    def _cancelled(self, run: Run, task: Task[..., Any], error: BaseException) -> Outcome:
        """The run was stopped, or the handler raised CancelledError itself."""
        if run.cause is None:
            return task.rules.decide(
                RuntimeError("the handler was cancelled from within"), run.lease.message.attempts, self._rng.random()
            )
        asyncio.current_task().uncancel()  # type: ignore[union-attr]
        if run.thread_runs:
            self._leave(run, f"its thread is still running ({run.cause})")
            return LEAVE
        if run.cause == "timeout":
            late = TimeoutError(f"the handler took longer than its timeout of {task.timeout:g} s")
            return task.rules.decide(late, run.lease.message.attempts, self._rng.random())
        return Outcome("release") if run.cause == "stop" else LEAVE

    # -- the causes ------------------------------------------------------------------------------------------------

    def _time_out(self, run: Run, task: Task[..., Any]) -> None:
        self.totals.timed_out += 1
        log.warning("handler timed out", task=task.name, message=run.lease.message.message_id, timeout=task.timeout)
        self._leases.let_go(run.lease)
        run.stop("timeout")
        run.timer = asyncio.get_running_loop().call_later(HEED_SECONDS, self._leave, run, "it ignores its cancellation")

    def _lose(self, run: Run) -> None:
        self.totals.lost += 1
        log.warning("lease lost while its handler was running", message=run.lease.message.message_id)
        if self._cancel_when_lost and not run.thread_runs:
            run.stop("lost")

    def _leave(self, run: Run, why: str) -> None:
        """Abandon a run: free its slot, and let its lease expire."""
        if run.is_left:
            return
        run.is_left = True
        self._leases.let_go(run.lease)
        self.totals.abandoned += 1
        log.warning("run abandoned", message=run.lease.message.message_id, why=why)
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
            log.info("abandoned run has ended", message=run.lease.message.message_id)

    # -- settling ------------------------------------------------------------------------------------------------

    async def _answer(self, lease: Lease, outcome: Outcome) -> None:
        """Settle the message; retry while the broker cannot be reached and the lease holds."""
        tries, loop = 0, asyncio.get_running_loop()
        try:
            while outcome.act != "leave":
                try:
                    await self._tell(lease, outcome)
                    break
                except LeaseLost:
                    self.totals.lost += not lease.is_lost
                    log.warning("message settled after its lease had ended", message=lease.message.message_id)
                    break
                except UnavailableError:
                    if lease.is_lost or loop.time() >= lease.until:
                        break
                await asyncio.sleep(ANSWER_PAUSES[min(tries, len(ANSWER_PAUSES) - 1)])
                tries += 1
        except HeaplineError as error:
            log.error("message cannot be settled", message=lease.message.message_id, error=type(error).__name__)
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


# -- threads of plain functions ----------------------------------------------------------------------------------------

Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Threads:
    """Threads for plain functions. A thread cannot be stopped, so one that hangs is abandoned and replaced.

    The worker's slots limit how many run at the same time. Threads are daemons, so abandoned ones do not keep a process
    alive.
    """

    def __init__(self, idle_max: int) -> None:
        self._idle_max = idle_max
        self._idle: list[queue.SimpleQueue[Job | None]] = []  # used by the event loop only
        self.count = 0

    def run(self, function: Callable[[], Any], on_end: Callable[[], None]) -> asyncio.Future[Any]:
        """Return the future of the result. `on_end` is called in the loop when the function has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start(loop)
        context = contextvars.copy_context()
        ended: asyncio.Future[Any] = loop.create_future()
        ended.add_done_callback(lambda done: self._end(inbox, done, future, on_end))
        inbox.put((loop, ended, lambda: context.run(function)))
        return future

    def _start(self, loop: asyncio.AbstractEventLoop) -> queue.SimpleQueue[Job | None]:
        inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.count += 1
        threading.Thread(target=_work, args=(inbox,), name=f"heapline-task-{self.count}", daemon=True).start()
        return inbox

    def _end(
        self,
        inbox: queue.SimpleQueue[Job | None],
        done: asyncio.Future[Any],
        future: asyncio.Future[Any],
        on_end: Callable[[], None],
    ) -> None:
        if len(self._idle) < self._idle_max:
            self._idle.append(inbox)
        else:
            self._leave(inbox)
        result, error = done.result()
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        on_end()

    def _leave(self, inbox: queue.SimpleQueue[Job | None]) -> None:
        self.count -= 1
        inbox.put(None)

    def close(self) -> None:
        while self._idle:
            self._leave(self._idle.pop())


def _work(inbox: queue.SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        loop, ended, function = job
        try:
            answer: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            answer = (None, _storable(error))
        try:
            loop.call_soon_threadsafe(ended.set_result, answer)
        except RuntimeError:
            return  # the loop is closed, so the worker has ended
        del job, ended, function, answer


def _storable(error: BaseException) -> BaseException:
    """Wrap what a future cannot hold or would take for its own cancellation, and exits of the interpreter."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | asyncio.CancelledError):
        return error
    wrapped = RuntimeError(f"the handler raised {type(error).__qualname__}")
    wrapped.__cause__ = error
    return wrapped
