"""A small document in the first shard that all nodes share, and follow: keys and users, for a server.

Every change locks the document, so nodes take turns and none loses another's change. It is committed before it is
visible in this process. A node learns of the changes of others by LISTEN and NOTIFY, and reads the version every
POLL_SECONDS in case a notification is missed. A version is never used twice, so a node that was away while the database
was restored from a backup and changed again does not take the new content for the one it knows. `age` is how long ago
the content was certainly current: it grows while the database cannot be read, and the caller decides how old is too
old.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import asyncpg

from heapline.clock import SystemClock
from heapline.contract.errors import Closed, HeaplineError, UnavailableError
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.shard import Shard, lock_key
from heapline.sql.statements import statement

log = Log("heapline.sql")
POLL_SECONDS = 0.5
READ_SECONDS = 2.0  # that one read may take
CHANGE_SECONDS = 30.0  # that a change may take, with waiting for those of other nodes
Edit = Callable[[bytes | None], bytes | None]


class _EditFailed(Exception):
    """An edit has raised an OSError. The shard would take that for one of its own connections."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


class Document:
    """One document, for `async with`. `content` is None until it is written for the first time."""

    def __init__(self, shard: Shard, name: str) -> None:
        self._shard, self._name = shard, name
        self._channel = f"heapline_{shard.schema}_docs"  # at most 63 bytes, as PostgreSQL requires
        self._lock_key = lock_key(f"heapline document {shard.schema} {name}")
        self.content: bytes | None = None
        self._version = 0
        self._clock = (
            SystemClock()
        )  # boot time: it continues while the machine sleeps, and keys may be revoked meanwhile
        self._read_at = self._clock.boot_ms()
        self._connection: asyncpg.Connection | None = None  # of its own: a busy pool must not make the content old
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self.read()
        self._tasks.spawn(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.cancel()
        await self._disconnect()

    def age(self) -> float:
        """Return how many seconds ago the content was certainly current."""
        return (self._clock.boot_ms() - self._read_at) / 1000

    # -- reading ---------------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read the document now. Raise UnavailableError if that is not possible."""
        async with self._reading:
            began = self._clock.boot_ms()
            try:
                async with asyncio.timeout(READ_SECONDS):
                    connection = await self._connected()
                    row = await connection.fetchrow(statement("select_document"), self._name, self._version)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
                await self._disconnect()
                # Callers that are not authenticated receive this. The cause, which may name the database's host and
                # role, is for the log.
                raise UnavailableError(f"the document {self._name!r} cannot be read now; retry later") from error
            self._take(row)
            self._read_at = began

    def _take(self, row: Any) -> None:
        if row is None:
            self.content, self._version = None, 0
        elif row["version"] != self._version:
            self.content, self._version = row["content"], row["version"]

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._shard.connect()
            await self._connection.add_listener(self._channel, lambda *_: self._changed.set())
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await connection.close(timeout=1)

    async def _follow(self) -> None:
        was_read = True
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.read()
                was_read = True
            except HeaplineError as error:
                if was_read:
                    log.error("document not read; will retry", name=self._name, cause=repr(error.__cause__))
                was_read = False
            except Exception:  # a failed read must not stop the reads that follow
                log.exception("document not read; will retry", name=self._name)

    # -- from other threads ----------------------------------------------------------------------------------------

    def read_blocking(self) -> None:
        """Read the document now, from another thread."""
        asyncio.run_coroutine_threadsafe(self.read(), self._loop).result()

    def change_blocking(self, edit: Edit) -> None:
        """Replace the content by what `edit` returns, from another thread; None leaves it as it is.

        `edit` runs in a thread too, while other nodes wait for the lock.
        """
        asyncio.run_coroutine_threadsafe(self._change(edit), self._loop).result()

    async def _change(self, edit: Edit) -> None:
        async def work(connection: asyncpg.Connection) -> Any:  # the version and content after it
            await connection.execute(statement("lock_until_commit"), self._lock_key)
            row = await connection.fetchrow(statement("select_document"), self._name, 0)
            try:
                after = await asyncio.to_thread(edit, None if row is None else row["content"])
            except OSError as error:
                raise _EditFailed(error) from None
            if after is None:
                return None if row is None else tuple(row)
            version = await connection.fetchval(statement("upsert_document"), self._name, after)
            await connection.execute(statement("notify_document"), self._channel, self._name)
            return version, after

        try:
            async with asyncio.timeout(CHANGE_SECONDS):
                changed = await self._shard.run(work)
        except _EditFailed as failed:
            raise failed.error from None
        except TimeoutError:
            raise UnavailableError(f"document {self._name!r} is being changed by another node; retry") from None
        except Closed:
            raise UnavailableError("this node is closing; retry") from None
        async with self._reading:  # a read that began before the commit must not undo this
            if changed is not None and changed[0] > self._version:
                self._version, self.content = changed
