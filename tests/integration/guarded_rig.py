"""A server whose callers are the keys and users of a real directory, with a clock that tests advance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.secret import Secret
from heapline.testing.clock import FakeClock
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Rig
from tests.unit.server.auth.rig import PASSWORD, CountingHasher

EMAIL = "ann@example.org"
T = TypeVar("T")


class GuardedRig(Rig):
    def __init__(self, directory: Path, **settings: Any) -> None:
        data = directory / "data"
        data.mkdir(exist_ok=True)
        self.hasher = CountingHasher()
        self.auth_clock = FakeClock()
        self.guard = DirectoryGuard(data, clock=self.auth_clock, hasher=self.hasher)
        self.hasher.hashed = 0
        self.admin_key = (data / "admin.key").read_text().strip()
        super().__init__(directory, self.guard, **settings)

    async def start(self) -> None:
        await super().start()
        await self.behind.create_topic("jobs", **self.small)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.server.http_port}", trust_env=False)

    async def stop(self) -> None:
        await self.http.aclose()
        await super().stop()
        await self.guard.close()

    def key(self, *scopes: str) -> tuple[str, str]:
        record, secret = self.guard.keys.create("a key", scopes)
        return record.id, secret.reveal()

    def as_(self, credential: str) -> RawGrpc:
        return RawGrpc(self.grpc_target, credential=credential)

    async def ask(self, method: str, path: str, credential: str | None = None, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {credential or self.admin_key}"}
        return await self.http.request(method, path, headers=headers, **options)

    async def confirm(self, method: str, path: str, credential: str | None = None, **options: Any) -> httpx.Response:
        """Ask for something that cannot be undone, and confirm it."""
        needed = await self.ask(method, f"{path}?force=true", credential, **options)
        assert needed.status_code == 428, needed.text
        token = needed.json()["facts"]["token"]
        return await self.ask(method, f"{path}?force=true&confirmation={token}", credential, **options)

    async def token(self, *scopes: str) -> str:
        """Log in as a user, who is created if missing."""
        if EMAIL not in self.guard.store.file.users:
            self.guard.users.add(EMAIL, Secret(PASSWORD), scopes or ("*:produce,consume,admin",))
        return (await self.guard.login(EMAIL, Secret(PASSWORD))).reveal()

    def other_process(self) -> DirectoryGuard:
        """Another process on the same directory, like `heapline keys`."""
        return DirectoryGuard(self.directory, clock=self.auth_clock, hasher=self.hasher)

    async def as_admin(self, act: Callable[[RawGrpc], Awaitable[T]]) -> T:
        async with self.as_(self.admin_key) as broker:
            return await act(broker)

    async def restart(self) -> None:
        """Restart the server alone; the guard stays."""
        await Rig.stop(self)
        await Rig.start(self)
