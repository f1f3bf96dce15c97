"""Kill writers and relays of an outbox with SIGKILL repeatedly, and count the outcome of each transaction.

Run as a program: `python -m tests.integration.outbox_killer DIRECTORY directory|server KILLS SEED`. The parent stays
without threads and event loops while it forks, so that a child starts quickly and dies at an interesting point. A
transaction writes orders and their messages together; the orders in the database at the end are the truth.
In the setting "directory" the relay is also the broker and both die together; in "server" the broker survives.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, event, func, insert, select

import heapline
from heapline import outbox
from heapline.outbox.sql import LANES, OUTBOX
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import ServerSettings

METADATA = MetaData()
ORDERS = Table("orders", METADATA, Column("id", Integer, primary_key=True), Column("name", String(64)))
SETTINGS = {"spare_segment_bytes": 0}
TOPICS = ("bills", "mail")


def engine_of(directory: Path) -> Engine:
    engine = create_engine(f"sqlite:///{directory}/app.db?timeout=60")

    @event.listens_for(engine, "connect")
    def unsynced(connection: Any, _: Any) -> None:  # a killed process loses nothing that it has written
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")

    return engine


# -- children ----------------------------------------------------------------------------------------------------------


def write(directory: Path, seed: int) -> None:
    """Endless transactions; some of them roll back."""
    rng = random.Random(seed)
    engine = engine_of(directory)
    for number in range(1 << 30):
        with engine.connect() as connection:
            for i in range(rng.randint(1, 5)):
                name = f"{seed}.{number}.{i}"
                connection.execute(insert(ORDERS).values(name=name))
                outbox.enqueue(connection, rng.choice(TOPICS), name.encode(), key=rng.choice((None, name)))
            if rng.random() < 0.8:
                connection.commit()
        time.sleep(0.001)


def relay(directory: Path, to: str | None, seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        async with broker_of(directory, to) as broker:
            engine = engine_of(directory)
            async with outbox.OutboxRelay(
                engine, broker, batch_rows=rng.choice((1, 7, 50)), poll=0.001, lease=rng.choice((-1.0, 0.05))
            ) as relay:
                await relay.run()

    asyncio.run(run())


def broker_of(directory: Path, to: str | None) -> Any:
    return heapline.open(directory / "data", **SETTINGS) if to is None else heapline.connect(to)


def serve(directory: Path) -> None:
    async def run() -> None:
        async with heapline.open(directory / "data", **SETTINGS) as broker:
            server = Server(broker, NoAuthGuard(), ServerSettings(port=0, grpc_port=0, http_port=0, stop_grace=1.0))
            await server.start()
            (directory / "port.new").write_text(str(server.port))
            (directory / "port.new").rename(directory / "port")
            await asyncio.Event().wait()

    asyncio.run(run())


def fork(work: Callable[..., None], *args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        except BaseException as error:
            print(f"{work.__name__} ended: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)  # no process here ends without being killed
    return pid


def kill(pid: int) -> bool:
    """Return whether it was alive until now."""
    os.kill(pid, signal.SIGKILL)
    return os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


# -- the parent --------------------------------------------------------------------------------------------------------


def main(directory: Path, setting: str, kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    engine = engine_of(directory)
    METADATA.create_all(engine)
    outbox.create_tables(engine)
    engine.dispose()
    with heapline.open_sync(directory / "data", **SETTINGS) as broker:
        broker.create_topic("bills", segment_bytes=1 << 20, dedup_window=0.1)
        broker.create_topic("mail", segment_bytes=1 << 20, partitions=3)
    to = server = None
    if setting == "server":
        server = fork(serve, directory)
        while not (directory / "port").exists():
            time.sleep(0.01)
        to = f"127.0.0.1:{(directory / 'port').read_text()}"
    alive, in_doubt = kill_many(directory, to, kills, rng)
    result = asyncio.run(finish(directory, to))
    if server is not None:
        kill(server)
    return {"kills": kills, "killed_alive": alive, "left_rows_in_doubt": in_doubt, **result}


def kill_many(directory: Path, to: str | None, kills: int, rng: random.Random) -> tuple[int, int]:
    """Start and kill children; return how many were alive until then and left claimed rows."""
    count = 1 if to is None else 2  # one process has a directory open; over a network several relays run
    children: list[tuple[int, bool]] = []
    alive = in_doubt = 0
    for number in range(kills):
        while sum(is_writer for _, is_writer in children) < 1:
            children.append((fork(write, directory, number), True))
        while sum(not is_writer for _, is_writer in children) < count:
            children.append((fork(relay, directory, to, number), False))
        time.sleep(rng.choice((0.02, 0.1, 0.3)) * rng.random() + 0.02)
        victim = rng.choice(children)
        children.remove(victim)
        alive += kill(victim[0])
        in_doubt += not victim[1] and claimed(directory) > 0
    for pid, _ in children:
        kill(pid)
    return alive, in_doubt


def claimed(directory: Path) -> int:
    """Return rows that a lane has claimed and not settled. Plain SQL: the parent keeps no engine while it forks."""
    connection = sqlite3.connect(f"file:{directory}/app.db?mode=ro", uri=True)
    try:
        return int(connection.execute("SELECT count(lane) FROM heapline_outbox").fetchone()[0])
    finally:
        connection.close()


async def relay_all(engine: Engine, broker: Any) -> int:
    """Relay until nothing is left; return how many rows are refused. Postponed rows are retried for a minute."""
    until = time.monotonic() + 60
    async with outbox.OutboxRelay(engine, broker, lease=-1) as relay:
        while True:
            await relay.run_once()
            with engine.connect() as connection:
                left = connection.execute(select(OUTBOX.c.id, OUTBOX.c.topic, OUTBOX.c.lane, OUTBOX.c.error)).all()
                lanes = connection.execute(select(LANES)).all()
            if len(left) == relay.failed or time.monotonic() > until:
                return relay.failed
            reported = f"still there at {time.time_ns() // 1_000_000} ms: {left}, lanes {lanes}"
            print(reported, file=sys.stderr, flush=True)
            await asyncio.sleep(0.2)


async def finish(directory: Path, to: str | None) -> dict[str, Any]:
    engine = engine_of(directory)
    async with broker_of(directory, to) as broker:
        with engine.connect() as connection:
            waiting = connection.scalar(select(func.count()).select_from(OUTBOX))
        failed = await relay_all(engine, broker)
        enqueued: Counter[str] = Counter()
        for topic in TOPICS:
            while messages := await broker.pop(topic, 1000, visibility=600):
                enqueued.update(m.payload.decode() for m in messages)
    with engine.connect() as connection:
        committed = set(connection.scalars(select(ORDERS.c.name)))
        left = connection.scalar(select(func.count()).select_from(OUTBOX))
    engine.dispose()
    return {
        "committed": len(committed), "enqueued": enqueued.total(), "waiting_at_the_last_kill": waiting, "left": left,
        "missing": len(committed - set(enqueued)), "invented": len(set(enqueued) - committed),
        "doubled": sum(n > 1 for n in enqueued.values()), "failed": failed,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
