"""The outbox on a real PostgreSQL: concurrent relays and writers, locked rows, relays that die."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from heapline import outbox
from heapline.outbox import OutboxRelay
from heapline.outbox.sql import OUTBOX, SqlStore
from heapline.testing import HandClock, MemoryBroker
from tests.postgres import postgres_server
from tests.unit.client.outbox_rig import FaultyBroker, Killed, MortalStore, waiting

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres_server({}) as (_, port):
        yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("SET synchronous_commit = off"))
        outbox.metadata().drop_all(connection)
        outbox.create_tables(connection)
    yield engine
    engine.dispose()


@pytest.fixture
async def hl() -> AsyncIterator[MemoryBroker]:
    async with MemoryBroker(HandClock()) as broker:
        await broker.create_topic("jobs", partitions=2)
        yield broker


async def test_rows_are_complete_with_both_kinds_of_engines(engine: Engine, url: str, hl: MemoryBroker) -> None:
    asynchronous = create_async_engine(url)
    async with asynchronous.begin() as connection:
        await outbox.enqueue(connection, "jobs", b"\x00\xff", priority=-(1 << 62), headers={"ü": "1"}, key="k", ttl=1.5)
    async with OutboxRelay(asynchronous, hl) as relay:
        assert await relay.run_once() == 1
    await asynchronous.dispose()
    with engine.begin() as plain:
        outbox.enqueue(plain, "jobs", b"2")
    async with OutboxRelay(url, hl) as relay:
        assert await relay.run_once() == 1
    first, second = sorted(hl.standing("jobs"), key=lambda info: info.priority or 0)
    assert (first.payload, first.priority, first.headers, first.key) == (b"\x00\xff", -(1 << 62), {"ü": "1"}, "k")
    assert second.payload == b"2"


async def test_row_of_an_open_transaction_is_neither_waited_for_nor_missed(engine: Engine, hl: MemoryBroker) -> None:
    with engine.connect() as late:
        outbox.enqueue(late, "jobs", b"1")
        with engine.begin() as early:
            outbox.enqueue(early, "jobs", b"2")
            outbox.enqueue(early, "jobs", b"3")
        with engine.connect() as locker:
            locker.execute(select(OUTBOX.c.id).where(OUTBOX.c.payload == b"3").with_for_update())
            async with OutboxRelay(engine, hl) as relay:
                async with asyncio.timeout(30):
                    assert await relay.run_once() == 1  # not the locked one, and without waiting for it
                locker.rollback()
                late.commit()
                assert await relay.run_once() == 2
    assert sorted(info.payload or b"" for info in hl.standing("jobs")) == [b"1", b"2", b"3"]


def write(engine: Engine, name: int, committed: list[bytes]) -> None:
    rng = random.Random(name)
    for number in range(100):
        mine = [b"%d.%d.%d" % (name, number, i) for i in range(rng.randint(1, 4))]
        with engine.connect() as connection:
            for payload in mine:
                outbox.enqueue(connection, "jobs", payload, key=rng.choice((None, "a")))
            if rng.random() < 0.8:
                connection.commit()
                committed += mine


async def test_many_writers_and_killed_relays_enqueue_each_row_once(engine: Engine, hl: MemoryBroker) -> None:
    committed: list[bytes] = []
    threads = [threading.Thread(target=write, args=(engine, name, committed)) for name in range(4)]
    for thread in threads:
        thread.start()
    rng, deaths = random.Random(5), 0

    async def relays(is_mortal: bool) -> None:
        """One after the other: when one is killed the next begins."""
        nonlocal deaths
        while any(thread.is_alive() for thread in threads) or (is_mortal and deaths < 40 and waiting(engine)):
            broker: Any = FaultyBroker(hl, rng, 0.1 if is_mortal else 0)
            store = MortalStore(engine, rng, 0.1) if is_mortal else SqlStore(engine)
            relay = OutboxRelay(store, broker, batch_rows=rng.choice((1, 5, 30)), lease=rng.choice((-1, 0.01, 1000)))
            try:
                for _ in range(20):
                    await relay.turn()
                await relay.close()
            except Killed:
                deaths += 1

    async with asyncio.timeout(120):
        await asyncio.gather(relays(True), relays(True), relays(False))
    for thread in threads:
        thread.join()
    async with OutboxRelay(engine, hl, lease=-1) as relay:
        await relay.run_once()
        assert relay.failed == 0
    assert Counter(info.payload for info in hl.standing("jobs")) == Counter(committed)
    assert waiting(engine) == 0
    assert deaths > 3
