"""What every call goes through, on whichever face it came: who calls, what they may do, and who is told of it.

A face (gRPC in rpc.py, HTTP in http/) makes a `Visit` of each call and enters it: a server that stops refuses, the
guard says who calls and whether they may, and the observers (metrics, traces, audit, limits) learn of its beginning and
end. What the call does, and how an error is written on the wire, is the face's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from heapline.clock import Clock, SystemClock
from heapline.errors import HeaplineError, Unauthenticated, UnavailableError
from heapline.server.auth.confirm import Confirmations
from heapline.server.auth.limits import Limits
from heapline.server.auth.principal import Action, Guard, Principal
from heapline.server.lasting import Lasting, WhileValid

PRODUCE, CONSUME, ADMIN = Action.PRODUCE, Action.CONSUME, Action.ADMIN
#: What a caller must be allowed to do on the call's topic, by the name of the call, which is the same on all faces.
#: None: the call asks by itself.
ACTIONS: dict[str, Action | None] = {
    "MakeHeap": ADMIN, "UpdateHeapConfig": ADMIN, "DeleteHeap": ADMIN, "ListHeaps": None, "Stats": CONSUME,
    "Purge": ADMIN, "Pause": ADMIN, "Resume": ADMIN, "SetPartitionThrottled": ADMIN, "Snapshot": ADMIN,
    "Enqueue": PRODUCE, "EnqueueBatch": PRODUCE, "EnqueueStream": None, "OpenProducer": PRODUCE,
    "PrepareBatch": None, "CommitBatch": PRODUCE, "AbortBatch": PRODUCE, "ListBatches": PRODUCE,
    "Pop": CONSUME, "PopStream": None, "Ack": CONSUME, "Nack": CONSUME, "Release": CONSUME, "Extend": CONSUME,
    "MoveToDLQ": CONSUME, "Get": CONSUME, "Peek": CONSUME, "Cancel": PRODUCE, "Reschedule": PRODUCE,
    "DlqList": CONSUME, "DlqPeek": CONSUME, "DlqReplay": ADMIN, "DlqDelete": ADMIN,
    "Offsets": CONSUME, "ReadLog": CONSUME, "LogIndex": CONSUME, "ReadUnits": CONSUME, "Session": None,
    "PinState": CONSUME, "ReadRecords": CONSUME,
    "CreateGroup": ADMIN, "GetGroup": CONSUME, "ListGroups": CONSUME, "DeleteGroup": ADMIN, "GroupOffsets": CONSUME,
    "ResetOffsets": ADMIN, "GroupFetch": CONSUME, "GroupAck": CONSUME, "GroupNack": CONSUME, "GroupLeave": CONSUME,
    "GroupDeadList": CONSUME, "GroupDeadReplay": ADMIN, "GroupDeadDelete": ADMIN, "Subscribe": None,
    "CreateSchedule": None, "GetSchedule": None, "ListSchedules": None, "PauseSchedule": None, "ResumeSchedule": None,
    "DeleteSchedule": None,
    "Replay": CONSUME, "KeepReplay": CONSUME, "StartReplay": ADMIN, "GetReplay": None, "ListReplays": None,
    "CancelReplay": None,
    "ListSinks": ADMIN, "ForgetSink": ADMIN,  # on all topics, as sinks are over all of them
    "ListKeys": ADMIN, "CreateKey": ADMIN, "RevokeKey": ADMIN,  # these on all topics, and only over HTTP
    "ListUsers": ADMIN, "CreateUser": ADMIN, "UpdateUser": ADMIN, "DisableUser": ADMIN,
}  # fmt: skip


_PROCESS = secrets.token_hex(6)  # random once: a system call for each call would cost more than all else here
_NUMBERS = itertools.count(1)


class Stopping(UnavailableError):
    """Told as UnavailableError: the server is going away, another or the next one will serve."""

    def __init__(self) -> None:
        super().__init__("the server is stopping: connect again and retry")


class Visit:
    """One call from its arrival to its answer."""

    __slots__ = (
        "about", "call", "caller", "context", "correlation_id", "count", "face", "front", "headers", "notes", "read",
        "started", "topic",
    )  # fmt: skip

    def __init__(
        self, front: Front, face: str, call: str, topic: str | None, headers: Mapping[str, str], context: Any = None,
        read: Callable[[Visit], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        self.front = front
        self.face = face  # "grpc", "http" or "mqueue"
        self.call = call  # a name of ACTIONS
        self.topic = topic
        self.headers = headers  # in lower case
        self.context = context  # gRPC's, on that face
        self.read = read  # what is read only once it is known who calls, and tells the topic: a stranger's body is not
        self.correlation_id = correlation_id(headers.get("x-correlation-id"))
        self.started = time.perf_counter()
        self.caller: Caller | None = None
        self.about, self.count = "", 0  # for the audit log, see Caller.tell
        self.notes: dict[type, Any] = {}  # what an observer keeps from begin to end, under its own class

    async def __aenter__(self) -> Caller:
        self.front.calls_under_way += 1
        for observer in self.front.observers:
            observer.begin(self)
        try:
            return await self._admit()
        except BaseException as error:
            self._end(error)
            raise

    async def _admit(self) -> Caller:
        if self.front.stopping.is_set():
            raise Stopping
        guard = self.front.guard
        principal = await guard.authenticate(self.headers.get("authorization") or self.headers.get("x-api-key"))
        self.caller = caller = Caller(guard, principal, self)
        if self.read is not None:
            await self.read(self)
        action = ACTIONS[self.call]
        if action is not None:
            caller.must(action, self.topic)
        for observer in self.front.observers:
            observer.admitted(self)
        return caller

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.front.ended_one()
        for observer in reversed(self.front.observers):
            observer.end(self, error)


class Caller:
    """Who is on the other side of one call."""

    __slots__ = ("_guard", "principal", "visit")

    def __init__(self, guard: Guard, principal: Principal, visit: Visit) -> None:
        self._guard = guard
        self.principal = principal
        self.visit = visit

    @property
    def context(self) -> Any:
        return self.visit.context

    def must(self, action: Action, topic: str | None) -> None:
        self._guard.check(self.principal, action, topic)

    def may(self, action: Action, topic: str) -> bool:
        with contextlib.suppress(HeaplineError):
            self._guard.check(self.principal, action, topic)
            return True
        return False

    def tell(self, *, about: str = "", count: int = 0) -> None:
        """What the audit log should know of this call: the id of a key or message, how many messages it was about."""
        self.visit.about, self.visit.count = about, count

    def confirm(self, call: str, topic: str, token: str | None, arguments: str = "") -> None:
        """What cannot be undone is asked for twice: raises ConfirmationNeeded, with a token, unless `token` is one that
        was given to this caller for this very call."""
        self.visit.front.confirmations.require(token, self.principal, call, topic, arguments)

    def check_payload(self, size: int, topic: str) -> None:
        """Raises PayloadTooLarge for what this server takes of nobody, whatever the topic would."""
        self.visit.front.limits.check_payload(size, topic)

    def while_valid(self) -> WhileValid:
        """`with caller.while_valid(): …` around what lasts: it ends when the credential does, with Unauthenticated."""
        return self.visit.front.lasting.hold(self.principal)

    def must_be_valid(self) -> None:
        """Asked again and again on streams: a credential may be revoked while they last."""
        if not self._guard.is_valid(self.principal):
            raise Unauthenticated("the credential of this stream is no longer valid: connect again with another")


class Observer(Protocol):
    """Told of every call. `begin` always comes first and `end` last and once; `admitted`, between them, when the caller
    is known and allowed; it may still refuse by raising one of Heapline's errors. None of them waits."""

    def begin(self, visit: Visit) -> None: ...

    def admitted(self, visit: Visit) -> None: ...

    def end(self, visit: Visit, error: BaseException | None) -> None: ...


class Front:
    def __init__(
        self, guard: Guard, observers: Sequence[Observer] = (), clock: Clock | None = None, limits: Limits | None = None
    ) -> None:
        if guard is None:
            raise ValueError("a server needs a guard: who may call is never left open by accident")
        self.guard = guard
        self.observers = tuple(observers)
        self.limits = limits or Limits()
        self.stopping = asyncio.Event()
        self.calls_under_way = 0
        self._idle = asyncio.Event()
        self.lasting = Lasting(guard)
        self.confirmations = Confirmations(clock or SystemClock())

    def ended_one(self) -> None:
        self.calls_under_way -= 1
        if not self.calls_under_way and self.stopping.is_set():
            self._idle.set()

    async def until_idle(self, seconds: float) -> None:
        """While stopping: until the last call has ended, or so long."""
        if self.calls_under_way:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)


def correlation_id(given: str | None) -> str:
    """The caller's own, if it is fit to stand in a log, else a new one."""
    if given and len(given) <= 64 and given.isascii() and given.replace("-", "").replace("_", "").isalnum():
        return given
    return f"{_PROCESS}-{next(_NUMBERS):x}"
