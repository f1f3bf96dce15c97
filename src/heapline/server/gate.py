"""The gate that every request passes, on whichever interface it arrives. It reads a call's facts and knows no call.

An interface opens a `Request` and enters it: a stopping server rejects it, and the guard says who calls. Then the
interface reads the command, which it does not do for an unauthenticated client, and hands it to the dispatcher.
The dispatcher has it admitted here: rights, payload size, limits, confirmation. Observers (metrics, traces, the
audit log) see each request begin, be admitted, and end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from heapline.clock import Clock, SystemClock
from heapline.contract.call import BY_RPC, Access, Call, Right
from heapline.contract.context import Context
from heapline.contract.errors import BadRequest, PermissionDenied, Unauthenticated, UnavailableError
from heapline.server.auth.principals import Guard, Principal
from heapline.server.confirmation import Confirmations
from heapline.server.credentials import ENDED, Credentials
from heapline.server.limits import Counter, Limits

_PROCESS = secrets.token_hex(6)  # random once: a system call per request would cost more than everything else here
_NUMBERS = itertools.count(1)
_encode = msgspec.msgpack.Encoder().encode


class Stopping(UnavailableError):
    """The server is stopping. Clients see UnavailableError."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; connect again and retry")


class Request:
    """One request from its arrival to its answer: `async with Request(gate, "http", "Purge", headers) as request:`."""

    __slots__ = (
        "about",
        "correlation_id",
        "count",
        "counter",
        "deadline",
        "gate",
        "headers",
        "interface",
        "is_stream",
        "kind",
        "notes",
        "peer",
        "principal",
        "rpc",
        "started",
        "topic",
        "waits",
    )

    def __init__(
        self,
        gate: Gate,
        interface: str,
        rpc: str,
        headers: Mapping[str, str],
        *,
        is_stream: bool = False,
        peer: Callable[[], str] | None = None,
        topic: str = "",
        deadline: float | None = None,
    ) -> None:
        self.gate = gate
        self.interface = interface  # "grpc", "http" or "mqueue"
        self.rpc = rpc  # of a call; or of a gRPC stream that carries many commands
        self.kind: type[Call[Any]] | None = BY_RPC.get(rpc)
        self.is_stream = is_stream
        self.headers = headers  # names in lower case
        self.peer = peer  # returns where the client connects from, if the interface knows
        self.topic = topic
        self.deadline = deadline  # when the client gives up, in the event loop's time
        self.correlation_id = correlation_id(headers.get("x-correlation-id"))
        self.started = time.perf_counter()
        self.principal: Principal | None = None
        self.waits = False  # may take long because it waits for something to happen
        self.counter: Counter | None = None  # the limit that it counts against
        self.about, self.count = "", 0  # for the audit log
        self.notes: dict[type, Any] = {}  # what an observer keeps from begin to end, by its own class

    @property
    def caller(self) -> Principal:
        assert self.principal is not None, "the request was entered"
        return self.principal

    async def __aenter__(self) -> Request:
        gate = self.gate
        gate.requests_open += 1
        for observer in gate.observers:
            observer.begin(self)
        try:
            if gate.stopping.is_set():
                raise Stopping
            credential = self.headers.get("authorization") or self.headers.get("x-api-key")
            self.principal = await gate.guard.authenticate(credential)
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.counter is not None:
            self.counter.give_back(self.caller.subject)
        for observer in reversed(self.gate.observers):
            observer.end(self, error)
        self.gate.ended_one()

    def check_credential(self) -> None:
        """Raise Unauthenticated if the credential has ended since the request began, as it may while a body arrives."""
        if not self.gate.guard.is_valid(self.caller):
            raise Unauthenticated(ENDED)

    def context(self) -> Context:
        """Return the context that the request's commands run in."""
        return Context(
            principal=self.caller.subject,
            deadline=self.deadline,
            trace=self.headers.get("traceparent"),
            leases_max=self.gate.limits.leases_per_consumer,
        )


class Observer(Protocol):
    """Sees every request. None of its methods waits or raises.

    `begin` comes first, and `end` last and exactly once. `admitted` comes between them, if the caller is known and
    allowed.
    """

    def begin(self, request: Request) -> None: ...

    def admitted(self, request: Request) -> None: ...

    def end(self, request: Request, error: BaseException | None) -> None: ...


class Gate:
    def __init__(
        self,
        guard: Guard,
        observers: Sequence[Observer] = (),
        limits: Limits | None = None,
        clock: Clock | None = None,
    ) -> None:
        if guard is None:
            raise ValueError("a server needs a guard, so that it is never open to everyone by accident")
        self.guard = guard
        self.observers = tuple(observers)
        self.limits = limits or Limits()
        self.limits.validate()
        self.calls = Counter("calls in flight", self.limits.inflight_per_key)
        self.streams = Counter("open streams", self.limits.streams_per_key)
        self.credentials = Credentials(guard)
        self._confirmations = Confirmations(clock or SystemClock(), guard.secret("confirmation"))
        self._cipher = AESGCM(guard.secret("cursor"))
        self.stopping = asyncio.Event()
        self.requests_open = 0
        self._idle = asyncio.Event()

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(self, request: Request, command: Call[Any] | None = None, about: Any = None) -> None:
        """Check rights, limits and payload sizes of a command, or raise. `about` has the fields that `needs` names.

        Without a command, admit a stream whose commands are checked one by one as they arrive.
        """
        if command is not None:
            facts = type(command).facts
            request.topic = getattr(about or command, "topic", "") or getattr(about, "source", "")
            if facts.audit is not None and not request.about:
                request.about = _shown(command, facts.audit)
            request.waits = facts.waits and bool(getattr(command, "wait", 0))
            self.check(request, command, about)
        counter = self.streams if request.is_stream else self.calls
        counter.take(request.caller.subject)
        request.counter = counter
        for observer in self.observers:
            observer.admitted(request)

    def check(self, request: Request, command: Call[Any], about: Any = None) -> None:
        """Check the rights and the payload sizes of one command."""
        for access in type(command).facts.needs:
            for topic in _topics(command if about is None else about, access.on):
                self._check_access(request.caller, access, topic)
        self.limits.check_payloads(command)

    def _check_access(self, principal: Principal, access: Access, topic: str | None) -> None:
        if access.right is not None:
            self.guard.check(principal, access.right, topic)
        elif not principal.may(None, topic):
            raise PermissionDenied(principal.subject, Right.CONSUME.value, topic or "")

    def confirm(self, request: Request, command: Call[Any], token: str | None) -> None:
        """Raise ConfirmationNeeded with a token, unless `token` was issued to this caller for this very command."""
        rpc = type(command).facts.rpc
        self._confirmations.require(token, request.caller, rpc, getattr(command, "topic", ""), _encode(command))

    # -- rows of an answer -----------------------------------------------------------------------------------------

    def visible(self, request: Request, rows: Iterable[Any], access: Access) -> list[Any]:
        """Return the rows that the caller may see."""
        return [row for row in rows if request.caller.may(access.right, getattr(row, access.on))]

    def sees_all(self, request: Request, access: Access) -> bool:
        return request.caller.may(access.right, None)

    def seal(self, cursor: str, request: Request, rpc: str) -> str:
        """Encrypt a cursor for a caller that may not see every row: it may contain the name of a hidden one.

        It is bound to the call and the caller. A cursor that a caller could make would let it search for names.
        """
        nonce, bound = os.urandom(12), _bound(request, rpc)
        return "." + base64.urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, cursor.encode(), bound)).decode()

    def unseal(self, cursor: str, request: Request, rpc: str) -> str:
        try:
            if not cursor.startswith("."):
                raise ValueError("not sealed")
            raw = base64.urlsafe_b64decode(cursor[1:].encode())
            return self._cipher.decrypt(raw[:12], raw[12:], _bound(request, rpc)).decode()
        except (ValueError, InvalidTag):
            raise BadRequest("cursor is not valid; pass the cursor of the page before, or omit it") from None

    # -- stopping --------------------------------------------------------------------------------------------------

    def ended_one(self) -> None:
        self.requests_open -= 1
        if not self.requests_open and self.stopping.is_set():
            self._idle.set()

    async def until_idle(self, seconds: float) -> None:
        """While stopping, wait until the last request has ended, but at most this long."""
        if self.requests_open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)


def _bound(request: Request, rpc: str) -> bytes:
    return f"{rpc}\0{request.caller.subject}".encode()


def _topics(command: Any, on: str) -> list[str | None]:
    """Return the topics that a right is needed on: the value of a field, or of a field of each row of a list."""
    if not on:
        return [None]
    name, dot, inner = on.partition(".")
    value = getattr(command, name)
    return [getattr(row, inner) for row in value] if dot else [value]


def _shown(command: Any, fields: tuple[str, ...]) -> str:
    """Return the audited fields of a command: the value alone if there is one, otherwise with their names."""
    if len(fields) == 1:
        value = getattr(command, fields[0])
        return "" if value is None else str(value)
    return ", ".join(f"{name}={getattr(command, name)}" for name in fields)


def correlation_id(given: str | None) -> str:
    """Return the caller's own id if it is suitable for a log, otherwise a new one."""
    if given and len(given) <= 64 and given.isascii() and given.replace("-", "").replace("_", "").isalnum():
        return given
    return f"{_PROCESS}-{next(_NUMBERS):x}"
