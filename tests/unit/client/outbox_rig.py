"""A small database and its outbox, and ways to kill a relay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, func, select

from heapline import outbox
from heapline.contract.errors import TopicReloading
from heapline.outbox.sql import OUTBOX, SqlStore
from heapline.outbox.store import Row, Turn
from heapline.testing import MemoryBroker


def new_database(directory: Path) -> Engine:
    """SQLite in a file, unsynced: power cuts are not tested here."""
    engine = create_engine(f"sqlite:///{directory}/app.db")

    @event.listens_for(engine, "connect")
    def unsynced(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")

    outbox.create_tables(engine)
    return engine


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(OUTBOX)) or 0


class Killed(BaseException):
    """The relay's process is dead from here on."""


class MortalStore(SqlStore):
    """Dies before or after its transactions."""

    def __init__(self, engine: Engine, rng: random.Random, chance: float) -> None:
        super().__init__(engine)
        self._rng, self._chance = rng, chance

    async def turn(self, turn: Turn) -> list[Row] | None:
        if self._rng.random() < self._chance:
            raise Killed
        result = await super().turn(turn)
        if self._rng.random() < self._chance:
            raise Killed
        return result


class FaultyBroker:
    """Kills the relay before or after an enqueue, or loses the response."""

    def __init__(self, broker: MemoryBroker, rng: random.Random, chance: float) -> None:
        self._broker, self._rng, self._chance = broker, rng, chance

    async def enqueue_batch(self, topic: str, messages: Any, **options: Any) -> Any:
        self._perhaps_killed()
        if self._rng.random() < self._chance:
            raise TopicReloading(topic, "before")
        result = await self._broker.enqueue_batch(topic, messages, **options)
        self._perhaps_killed()
        if self._rng.random() < self._chance:
            raise TopicReloading(topic, "after")
        return result

    def _perhaps_killed(self) -> None:
        if self._rng.random() < self._chance:
            raise Killed


class Call:
    """A call that waits until the test runs it. Its caller may fail before that, and the call still runs."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self._work = work
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    async def run(self) -> None:
        try:
            result = await self._work()
        except Exception as error:
            self.fail(error)
        else:
            if not self.answer.done():
                self.answer.set_result(result)


class Calls:
    """Calls of relays to their store and broker, which run late and in any order."""

    def __init__(self) -> None:
        self.waiting: list[Call] = []
        self._added = asyncio.Event()

    def to(self, target: Any) -> Any:
        """Return `target` with calls that wait for the test."""
        return _Waiting(self, target)

    def add(self, call: Call) -> None:
        self.waiting.append(call)
        self._added.set()

    async def arrive(self) -> None:
        """Wait until a call waits."""
        while not self.waiting:
            self._added.clear()
            await self._added.wait()

    async def run_next(self) -> None:
        await self.arrive()
        await self.waiting.pop(0).run()

    async def run_all(self) -> None:
        """Run calls as they arrive, until cancelled."""
        while True:
            await self.run_next()


class _Waiting:
    def __init__(self, calls: Calls, target: Any) -> None:
        self._calls, self._target = calls, target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def call(*args: Any, **options: Any) -> Any:
            waiting = Call(partial(method, *args, **options))
            self._calls.add(waiting)
            return await waiting.answer

        return call
