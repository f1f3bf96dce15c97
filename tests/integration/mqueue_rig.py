"""A server with MQueue's API on a real port, users who have logged in, and a client that speaks plain HTTP."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Self

import httpx

from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.secret import Secret
from tests.conformance.worlds import Memory
from tests.integration.server_rig import Rig
from tests.unit.server.auth.rig import PASSWORD, CountingHasher

NAMESPACE, TOPIC = "payments", "process-refund"
PLACE = {"namespace": NAMESPACE, "topic": TOPIC}
WHERE = f"{NAMESPACE}/{TOPIC}"
ALICE, BOB = "alice@example.com", "bob@example.com"


def b64(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def item(payload: bytes = b"x", priority: int = 1, **more: Any) -> dict[str, Any]:
    return {**PLACE, "priority": priority, "payload": b64(payload), **more}


class Client:
    """One caller: the four calls of MQueue, with their responses."""

    def __init__(self, http: httpx.AsyncClient, token: str | None) -> None:
        self.http = http
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def enqueue(self, *items: Any) -> httpx.Response:
        return await self.http.post("/enqueue", json=list(items), headers=self.headers)

    async def dequeue(self, **params: Any) -> httpx.Response:
        return await self.http.get("/dequeue", params={**PLACE, **params}, headers=self.headers)

    async def ack(self, id: Any, **more: Any) -> httpx.Response:
        return await self.http.post("/ack", json={"id": id, **PLACE, **more}, headers=self.headers)

    async def nack(self, id: Any, **more: Any) -> httpx.Response:
        return await self.http.post("/nack", json={"id": id, **PLACE, **more}, headers=self.headers)

    async def put(self, *payloads: bytes, priority: int = 1) -> list[int]:
        answer = await self.enqueue(*(item(payload, priority) for payload in payloads))
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()
        return ids

    async def take(self, limit: int = 10) -> list[dict[str, Any]]:
        answer = await self.dequeue(limit=limit)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()
        return found


class MQueueRig(Rig):
    """Users' scopes are given by email; all users have the same password."""

    def __init__(self, directory: Path, users: dict[str, str] | None = None, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.directory.mkdir()
        self._open_guard()
        for email, scope in (users or {ALICE: "payments/*:produce,consume", BOB: "*:produce,consume"}).items():
            self.directory_guard.users.add(email, Secret(PASSWORD), [scope])

    def _open_guard(self) -> None:
        self._guard = self.directory_guard = DirectoryGuard(self.directory, clock=self.clock, hasher=CountingHasher())

    async def start(self) -> None:
        self._open_guard()
        await super().start()
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.server.http_port}", timeout=30)

    async def stop(self) -> None:
        await self.http.aclose()
        await super().stop()
        await self.directory_guard.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def restart(self, memory: Memory = "snapshot") -> None:
        """Close everything and reopen it on another port; callers must log in again."""
        await self.reopen(memory)

    async def login(self, email: str) -> Client:
        token = await self.directory_guard.login(email, Secret(PASSWORD))
        return Client(self.http, token.reveal())

    def anybody(self, token: str | None = None) -> Client:
        return Client(self.http, token)

    async def pass_time(self, seconds: float) -> None:
        """The guard is in front of the broker, so this uses the broker directly."""
        self.clock.advance(seconds)
        for info in await self.behind.list_topics():
            for _ in range(2):
                await self.behind.stats(info.name)

    async def counts(self, topic: str = WHERE) -> tuple[int, int, int, int]:
        stats = await self.behind.stats(topic)
        return stats.ready, stats.delayed, stats.leased, stats.dead
