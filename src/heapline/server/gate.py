"""The gate that every request passes, on every interface. It uses the facts of calls and names no single call.

An interface opens a `Request` and enters it: a stopping server rejects it, and the guard authenticates it. Then the
interface reads the command, which it does not do for an unauthenticated client, and hands it to the dispatcher.
The dispatcher has it admitted here: rights, payload size, limits, confirmation. Observers (metrics, traces, the
audit log) see each request begin, be admitted, and end.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from heapline.clock import Clock, SystemClock
from heapline.contract.call import Call, Context
from heapline.contract.errors import BadRequest, ConfirmationNeeded, RateLimited, Unauthenticated, UnavailableError
from heapline.server.auth.principals import ANONYMOUS, Guard, Principal
from heapline.server.auth.secret import redact
from heapline.server.credentials import ENDED, Credentials
from heapline.server.limits import Counter, Limits, PrincipalRates

_PROCESS = secrets.token_hex(6)  # random once: a system call per request would cost more than everything else here
_NUMBERS = itertools.count(1)
_encode = msgspec.msgpack.Encoder().encode
VALID_FOR_MS = 60_000  # of a confirmation token
PACE_SECONDS = 5  # that a stream waits for its rate
PACE_CHECK_SECONDS = 0.05
_NONCE, _EXPIRY, _MAC = 16, 8, 32  # bytes of its parts


class Stopping(UnavailableError):
    """The server is stopping. Clients see UnavailableError."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; connect again and retry")


@dataclass(slots=True, eq=False)
class Request:
    """One request from its arrival to its answer: `async with Request(gate, "http", "Purge", headers) as request:`."""

    gate: Gate
    interface: str  # "native", "grpc", "http" or "mqueue"
    rpc: str  # of a call; or of a gRPC stream that carries many commands
    headers: Mapping[str, str]  # names in lower case
    _: KW_ONLY
    is_stream: bool = False
    peer: Callable[[], str] | None = None  # returns where the client connects from, if the interface knows
    topic: str = ""
    deadline: float | None = None  # when the client gives up, in the event loop's time
    caller: Principal = ANONYMOUS  # until the request is entered
    started: float = field(default_factory=time.perf_counter)
    waits: bool = False  # may take long because it waits for something to happen
    counter: Counter | None = None  # the limit that it counts against
    about: str = ""  # for the audit log
    count: int = 0  # for the audit log
    #: What an observer keeps, by its own class. Cleared when the request ends, because contexts that it left behind
    #: (telemetry/logs.py) keep the notes.
    notes: dict[type, Any] = field(default_factory=dict)
    _correlation_id: str = ""

    @property
    def correlation_id(self) -> str:
        """The id of the request in logs: the caller's own, or one that is generated when it is first needed."""
        if not self._correlation_id:
            self._correlation_id = correlation_id(self.headers.get("x-correlation-id"))
        return self._correlation_id

    async def __aenter__(self) -> Request:
        self.begin()
        try:
            credential = self.headers.get("authorization") or self.headers.get("x-api-key")
            self.caller = await self.gate.guard.authenticate(credential)
        except BaseException as error:
            self.end(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def begin(self, caller: Principal | None = None) -> None:
        """Begin without waiting, for a caller that its connection has authenticated. `end` must follow, unless this
        raises."""
        gate = self.gate
        gate.requests_open += 1
        for begin in gate.on_begin:
            begin(self)
        try:
            if gate.stopping.is_set():
                raise Stopping
            if caller is not None:
                self.caller = caller
                self.check_credential()
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None = None) -> None:
        gate = self.gate
        if self.counter is not None:
            self.counter.give_back(self.caller.subject)
        for end in gate.on_end:
            end(self, error)
        self.notes.clear()
        gate.requests_open -= 1
        if not gate.requests_open and gate.stopping.is_set():
            gate.idle.set()

    def check_credential(self) -> None:
        """Raise Unauthenticated if the credential has ended since the request began, as it may while a body arrives."""
        if not self.gate.guard.is_valid(self.caller):
            raise Unauthenticated(ENDED)

    def context(self) -> Context:
        """Return the context that the request's commands run in. No command reaches the broker without a caller."""
        if self.caller is ANONYMOUS:
            raise Unauthenticated("the request was not authenticated")
        return Context(
            principal=self.caller.subject,
            deadline=self.deadline,
            trace=self.headers.get("traceparent"),
            leases_max=self.gate.limits.leases_per_consumer,
        )


class Observer:
    """Sees every request. None of its methods waits or raises; a subclass overrides those that it needs.

    `begin` comes first, and `end` last and exactly once. `admitted` comes between them, if the caller is known and
    allowed.
    """

    def begin(self, request: Request) -> None: ...

    def admitted(self, request: Request) -> None: ...

    def end(self, request: Request, error: BaseException | None) -> None: ...


def _overridden(observers: Sequence[Observer], name: str) -> list[Any]:
    """Return the methods of this name, without those that do nothing."""
    return [getattr(o, name) for o in observers if getattr(type(o), name) is not getattr(Observer, name)]


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
        self.on_begin = _overridden(observers, "begin")
        self._on_admitted = _overridden(observers, "admitted")
        self.on_end = _overridden(observers, "end")[::-1]
        self.limits = limits or Limits()
        self.limits.validate()
        self.calls = Counter("calls in flight", self.limits.inflight_per_key)
        self.streams = Counter("open streams", self.limits.streams_per_key)
        clock = clock or SystemClock()
        self.rates = PrincipalRates(self.limits, clock.boot_ms)
        self.credentials = Credentials(guard)
        self._confirmations = Confirmations(clock, guard.secret("confirmation"))
        self._cipher = AESGCM(guard.secret("cursor"))
        self.stopping = asyncio.Event()
        self.requests_open = 0
        self.idle = asyncio.Event()  # set when the last request ends while stopping

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(
        self,
        request: Request,
        command: Call[Any] | None = None,
        about: Any = None,
        others: Sequence[Call[Any]] = (),
    ) -> None:
        """Check rights, limits and payload sizes of a command, or raise. `about` has the fields that `needs` names.

        Without a command, admit a stream whose commands are checked one by one as they arrive. `others` are commands of
        the same request, which have been checked; their messages are counted.
        """
        self.rates.take(request.caller.subject, *(() if command is None else (command, *others)))
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
        for admitted in self._on_admitted:
            admitted(request)

    def check(self, request: Request, command: Call[Any], about: Any = None) -> None:
        """Check the rights and the payload sizes of one command."""
        for access in type(command).facts.needs:
            # The topics that the right is needed on: the value of a field, or of a field of each row of a list.
            name, dot, inner = access.on.partition(".")
            value: Any = getattr(command if about is None else about, name) if name else None
            for topic in [getattr(row, inner) for row in value] if dot else (value,):
                request.caller.check(access.right, topic)
        self.limits.check_payloads(command)

    def confirm(self, request: Request, command: Call[Any], token: str | None) -> None:
        """Raise ConfirmationNeeded with a token, unless `token` was issued to this caller for this very command."""
        rpc = type(command).facts.rpc
        about = getattr(command, "topic", "") or redact(request.about)  # people paste complete keys
        self._confirmations.require(token, request.caller, rpc, about, _encode(command))

    async def pace(self, request: Request, command: Call[Any]) -> None:
        """Count one more command of a stream. Wait while its caller is over a rate, or raise if that takes long."""
        while True:
            try:
                return self.rates.take(request.caller.subject, command)
            except RateLimited as limited:
                if limited.retry_after > PACE_SECONDS or self.stopping.is_set():
                    raise
            await asyncio.sleep(PACE_CHECK_SECONDS)
            request.check_credential()

    # -- cursors ---------------------------------------------------------------------------------------------------

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

    async def until_idle(self, seconds: float) -> None:
        """While stopping, wait until the last request has ended, but at most this long."""
        if self.requests_open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), seconds)


def _bound(request: Request, rpc: str) -> bytes:
    return f"{rpc}\0{request.caller.subject}".encode()


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


# -- confirmation ------------------------------------------------------------------------------------------------------


class Confirmations:
    """Confirmation tokens: a call that destroys data must be sent twice.

    The first call is rejected with a token (`ConfirmationNeeded`); the same call with that token is executed. A token
    is bound to the caller and to the encoded command, is valid for a minute and can be used once. It is an HMAC under
    the server's secret, so nothing is stored for tokens that are never used, and every process with the secret can
    verify it. Used tokens are remembered per process.
    """

    def __init__(self, clock: Clock, secret: bytes, valid_for_ms: int = VALID_FOR_MS) -> None:
        self._clock, self._secret, self._valid_for_ms = clock, secret, valid_for_ms
        self._used: dict[bytes, int] = {}  # nonce -> its expiry, in that order

    def require(self, token: str | None, principal: Principal, call: str, topic: str, command: bytes = b"") -> None:
        """Return if this call was confirmed, otherwise raise ConfirmationNeeded with a new token."""
        bound = _joined(principal.subject.encode(), call.encode(), topic.encode(), command)
        if not token or not self._redeem(token, bound):
            raise ConfirmationNeeded(call, topic, self._issue(bound))

    def _issue(self, bound: bytes) -> str:
        # Wall time, because other processes verify it too; a token from too far ahead is rejected.
        expiry = (self._clock.wall_ms() + self._valid_for_ms).to_bytes(_EXPIRY, "big")
        open_part = secrets.token_bytes(_NONCE) + expiry
        return base64.urlsafe_b64encode(open_part + self._mac(open_part, bound)).decode()

    def _redeem(self, token: str, bound: bytes) -> bool:
        try:
            raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return False
        if len(raw) != _NONCE + _EXPIRY + _MAC:
            return False
        open_part, mac = raw[:-_MAC], raw[-_MAC:]
        if not hmac.compare_digest(mac, self._mac(open_part, bound)):
            return False
        now = self._clock.wall_ms()
        nonce, expiry = open_part[:_NONCE], int.from_bytes(open_part[_NONCE:], "big")
        self._used = {used: until for used, until in self._used.items() if until > now}
        if not now < expiry <= now + self._valid_for_ms or nonce in self._used:
            return False
        self._used[nonce] = expiry
        return True

    def _mac(self, open_part: bytes, bound: bytes) -> bytes:
        return hmac.digest(self._secret, open_part + bound, hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """Join the parts, each with its length, so that no two different lists give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
