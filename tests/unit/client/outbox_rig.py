"""A small database and its outbox, and ways for a relay to die."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, func, select

from heapline import outbox
from heapline.client.outbox.sql import OUTBOX, SqlStore
from heapline.client.outbox.store import Claimed, Turn
from heapline.contract.errors import TopicReloading
from heapline.testing import MemoryBroker


def new_database(directory: Path) -> Engine:
    """SQLite in a file, unsynced: what a power cut would leave is its own affair."""
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
    """The relay's process is gone at this point."""


class MortalStore(SqlStore):
    """Dies before or after its transactions."""

    def __init__(self, engine: Engine, rng: random.Random, chance: float) -> None:
        super().__init__(engine)
        self._rng, self._chance = rng, chance

    async def turn(self, turn: Turn) -> Claimed | None:
        if self._rng.random() < self._chance:
            raise Killed
        result = await super().turn(turn)
        if self._rng.random() < self._chance:
            raise Killed
        return result


class FaultyBroker:
    """Dies with the relay before or after an enqueue, or loses its answer."""

    def __init__(self, broker: MemoryBroker, rng: random.Random, chance: float) -> None:
        self._broker, self._rng, self._chance = broker, rng, chance

    async def open_producer(self, topic: str, producer_id: str) -> int:
        self._perhaps_killed()
        epoch = await self._broker.open_producer(topic, producer_id)
        self._perhaps_killed()
        return epoch

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
