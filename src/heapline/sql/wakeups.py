"""Wake pops that wait: those of this process directly, those of other nodes by LISTEN and NOTIFY.

A notification is a hint. It is sent after the commit, on its own connection, at most one per topic at a time, because
NOTIFY inside a transaction makes all commits of a database wait for each other. A pop that misses one polls.

A node that knows of no other sends none. It learns of others when it starts and when it renews its node id, and a node
that starts announces itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from heapline.contract.errors import HeaplineError
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.sql")
RETRY_SECONDS = 1.0
GATHER_SECONDS = 0.005  # that notifications are gathered before they are sent
REST_SECONDS = 0.02  # at least, after a transaction that sends them
Send = Callable[[str, list[str]], Awaitable[None]]


class Wakeups:
    def __init__(self, shard: int, url: str, schema: str, node: str, send: Send) -> None:
        self._shard, self._url, self._send = shard, url, send
        self._channel = f"heapline_{schema}"
        self._waiters: dict[str, set[asyncio.Event]] = {}  # by topic
        self._announcement = f"/{node}"  # the name of a topic does not begin with a slash
        self._unsent: dict[str, None] = {self._announcement: None}
        self._has_unsent = asyncio.Event()
        self._has_unsent.set()
        self.others = asyncio.Event()  # there are other nodes
        self.listening = asyncio.Event()
        self._tasks = OwnedTasks()

    def start(self) -> None:
        self._tasks.spawn(self._listen())
        self._tasks.spawn(self._notify())

    async def close(self) -> None:
        await self._tasks.cancel()

    def add(self, topic: str, event: asyncio.Event) -> None:
        self._waiters.setdefault(topic, set()).add(event)

    def remove(self, topic: str, event: asyncio.Event) -> None:
        waiting = self._waiters[topic]
        waiting.discard(event)
        if not waiting:
            del self._waiters[topic]

    def wake(self, topic: str) -> None:
        """Wake the pops of this process that wait for the topic, and tell the other nodes."""
        self._wake_here(topic)
        if self.others.is_set():
            self._unsent[topic] = None
            self._has_unsent.set()

    def wake_all(self) -> None:
        """Wake every waiting pop of this process."""
        for topic in list(self._waiters):
            self._wake_here(topic)

    def _wake_here(self, topic: str) -> None:
        for event in self._waiters.get(topic, ()):
            event.set()

    async def _notify(self) -> None:
        while True:
            await self._has_unsent.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._has_unsent.clear()
            topics, self._unsent = list(self._unsent), {}
            try:
                await self._send(self._channel, topics)
            except HeaplineError as error:
                log.warning("notification not sent; waiting pops poll", shard=self._shard, error=str(error))
            await asyncio.sleep(REST_SECONDS)

    async def _listen(self) -> None:
        while True:
            try:
                await self._listen_until_closed()
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
                log.warning("cannot listen; waiting pops poll; will retry", shard=self._shard, error=str(error))
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen_until_closed(self) -> None:
        connection = await asyncpg.connect(self._url, timeout=10)
        closed = asyncio.Event()

        def received(_connection: Any, _pid: int, _channel: str, text: str) -> None:
            if not text.startswith("/"):
                self._wake_here(text)
            elif text != self._announcement:
                self.others.set()

        try:
            connection.add_termination_listener(lambda _: closed.set())
            await connection.add_listener(self._channel, received)
            self.listening.set()
            self.wake_all()  # a notification may have been missed
            await closed.wait()
        finally:
            self.listening.clear()
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await connection.close(timeout=1)
