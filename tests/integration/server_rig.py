"""A server in this process on a real socket, with a clock that tests advance, for tests of the server alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from heapline.contract.errors import Unauthenticated
from heapline.engine import EmbeddedBroker
from heapline.server.auth.principals import Guard, NoAuthGuard, Principal, parse_scope
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from heapline.wire.descriptors import pb
from tests.conformance.worlds import EmbeddedWorld, UnsyncedDisk
from tests.integration.raw_grpc import RawGrpc


class Keys(NoAuthGuard):
    """Keys, their scopes, and whether they are valid."""

    def __init__(self, **scopes: str) -> None:
        self.scopes = scopes
        self.revoked: set[str] = set()

    async def authenticate(self, credential: str | None) -> Principal:
        if credential not in self.scopes or credential in self.revoked:
            raise Unauthenticated("who are you?")
        return Principal(credential, (parse_scope(self.scopes[credential]),))

    def is_valid(self, principal: Principal) -> bool:
        return principal.subject not in self.revoked


class Rig(EmbeddedWorld):
    dashboard: Any = None  # what makes the server's pages

    def __init__(self, directory: Path, guard: Guard | None = None, **settings: Any) -> None:
        super().__init__(directory)
        self._guard = guard or NoAuthGuard()
        self._settings = ServerSettings(**{"port": 0, "grpc_port": 0, "http_port": 0, "stop_grace": 2.0, **settings})

    async def start(self) -> None:
        self.behind = EmbeddedBroker(str(self.directory), config=self.config, disk=UnsyncedDisk(), clock=self.clock)
        await self.behind.__aenter__()
        self.server = Server(self.behind, self._guard, self._settings, dashboard=self.dashboard)
        await self.server.start()
        self.broker = await RawGrpc(self.grpc_target).__aenter__()  # type: ignore[assignment]

    async def stop(self) -> None:
        await self.broker.close()
        await self.server.stop()
        await self.behind.close()

    @property
    def engine(self) -> EmbeddedBroker:
        return self.behind

    @property
    def target(self) -> str:
        """the native wire"""
        return f"127.0.0.1:{self.server.port}"

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    @property
    def wire(self) -> RawGrpc:
        return self.broker  # type: ignore[return-value]

    async def __aenter__(self) -> Rig:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def leased(self, topic: str = "jobs") -> int:
        return (await self.behind.stats(topic)).leased


class Requests:
    """Messages that a client sends on a stream during the test."""

    def __init__(self, *first: Any) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        for request in first:
            self.say(request)

    def say(self, request: Any) -> None:
        self._queue.put_nowait(request)

    def credits(self, count: int) -> None:
        self.say(pb.PopStreamRequest(credits=count))

    def end(self) -> None:
        self.say(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (request := await self._queue.get()) is not None:
            yield request


def pop_start(topic: str = "jobs", credits: int = 0, **options: Any) -> Any:
    return pb.PopStreamRequest(start=pb.PopRequest(topic=topic, **options), credits=credits)


async def until(holds: Callable[[], Any]) -> None:
    """Wait for a message that must arrive."""
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
