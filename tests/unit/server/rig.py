"""A gate and a dispatcher in front of a fake broker, with callers whose scopes a test chooses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from heapline.contract.errors import Unauthenticated
from heapline.server.auth.principals import NoAuthGuard, Principal, parse_scope
from heapline.server.dispatcher import Dispatcher, Handler
from heapline.server.gate import Gate, Observer, Request
from heapline.server.limits import Limits
from heapline.testing.clock import FakeClock
from tests.unit.server.fake_broker import FakeBroker

ALL = "*:produce,consume,admin"


class Scoped(NoAuthGuard):
    """A caller's credential is its scopes, separated by spaces."""

    def __init__(self) -> None:
        self.revoked: set[str] = set()
        self.known: dict[str, Principal] = {}

    async def authenticate(self, credential: str | None) -> Principal:
        if not credential:
            raise Unauthenticated("no credential was sent")
        scopes = tuple(parse_scope(scope) for scope in credential.split())
        return self.known.setdefault(credential, Principal(f"key:{credential}", scopes))

    def is_valid(self, principal: Principal) -> bool:
        return principal.subject.removeprefix("key:") not in self.revoked


class Rig:
    def __init__(
        self,
        broker: FakeBroker | None = None,
        own: dict[type[Any], Handler] | None = None,
        observers: Sequence[Observer] = (),
        **limits: Any,
    ) -> None:
        self.broker, self.guard, self.clock = broker or FakeBroker(), Scoped(), FakeClock()
        self.gate = Gate(self.guard, observers, Limits(**limits), self.clock)
        self.dispatcher = Dispatcher(self.broker, own or {}, self.gate)

    @contextlib.asynccontextmanager
    async def request(self, rpc: str, who: str = ALL, **headers: str) -> AsyncIterator[Request]:
        async with Request(self.gate, "http", rpc, {"authorization": who, **headers}) as request:
            yield request

    async def run(self, command: Any, who: str = ALL, confirmation: str | None = None) -> Any:
        async with self.request(type(command).facts.rpc, who) as request:
            return await self.dispatcher.run(command, request, confirmation)
