"""The outbox: rows of committed transactions, and only those, are enqueued, in order and once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

import heapline
from heapline import outbox
from heapline.outbox import OutboxRelay, sender
from heapline.outbox.sql import LANES, OUTBOX, SqlStore
from heapline.outbox.store import Turn
from heapline.testing import HandClock, MemoryBroker, drain
from tests.unit.client.outbox_rig import Calls, FaultyBroker, Killed, MortalStore, new_database, waiting

WINDOW = 60.0  # seconds for which topics remember, in tests that wait longer


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def hl(clock: HandClock) -> AsyncIterator[MemoryBroker]:
    async with MemoryBroker(clock) as broker:
        await broker.create_topic("jobs", dedup_window=WINDOW, partitions=3)
        yield broker


def write(engine: Engine, *payloads: bytes, topic: str = "jobs", **options: Any) -> None:
    with Session(engine) as session, session.begin():
        for payload in payloads:
            outbox.enqueue(session, topic, payload, **options)


def payloads(hl: MemoryBroker, topic: str = "jobs") -> list[bytes | None]:
    return [info.payload for info in hl.standing(topic)]


# -- writing -----------------------------------------------------------------------------------------------------------


async def test_committed_rows_are_enqueued_and_rolled_back_ones_are_not(engine: Engine, hl: MemoryBroker) -> None:
    write(engine, b"a", b"b")
    with Session(engine) as session:
        outbox.enqueue(session, "jobs", b"never")
        session.rollback()
    async with OutboxRelay(engine, hl) as relay:
        assert await relay.run_once() == 2
    assert sorted(payloads(hl)) == [b"a", b"b"]
    assert waiting(engine) == 0


async def test_every_field_of_a_message_is_kept(engine: Engine, hl: MemoryBroker) -> None:
    await hl.create_topic("eu/fair", fairness="keys")
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    write(
        engine, b"\x00\xff", topic="eu/fair", priority=-7, key="k", deliver_at=at, headers={"ü": "1"}, ttl=60.5,
        max_retries=3, fairness_key="f",
    )  # fmt: skip
    async with OutboxRelay(engine, hl) as relay:
        await relay.run_once()
    [info] = hl.standing("eu/fair")
    assert (info.payload, info.priority, info.key, info.headers) == (b"\x00\xff", -7, "k", {"ü": "1"})
    assert (info.due_at, info.fairness_key, info.state) == (at, "f", "delayed")
    assert info.expires_at == at + timedelta(seconds=60.5)


async def test_delay_counts_from_the_writing(engine: Engine, hl: MemoryBroker, clock: HandClock) -> None:
    write(engine, b"x", delay=30)
    clock.advance(20)
    async with OutboxRelay(engine, hl) as relay:
        await relay.run_once()
    [info] = hl.standing("jobs")
    assert info.due_at is not None
    assert abs((info.due_at - datetime.now(UTC)).total_seconds() - 30) < 10


async def test_async_sessions_and_connections_write_too(engine: Engine, hl: MemoryBroker, tmp_path: Path) -> None:
    asynchronous = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
    async with AsyncSession(asynchronous) as session, session.begin():
        await outbox.enqueue(session, "jobs", b"async session")
    async with asynchronous.begin() as connection:
        await outbox.enqueue(connection, "jobs", b"async connection")
    scoped = async_scoped_session(async_sessionmaker(asynchronous), scopefunc=asyncio.current_task)
    await outbox.enqueue(scoped, "jobs", b"scoped session")
    await scoped.commit()
    await scoped.remove()
    with engine.begin() as plain:
        outbox.enqueue(plain, "jobs", b"connection")
    async with OutboxRelay(asynchronous, hl) as relay:
        assert await relay.run_once() == 4
    await asynchronous.dispose()
    async with OutboxRelay(f"sqlite+aiosqlite:///{tmp_path}/app.db", hl) as relay:
        assert await relay.run_once() == 0
    assert sorted(payloads(hl)) == [b"async connection", b"async session", b"connection", b"scoped session"]


async def test_two_spellings_of_a_topic_share_one_sequence(engine: Engine, hl: MemoryBroker) -> None:
    """Two groups of one topic would be sent at the same time, and the higher numbers could arrive first."""
    write(engine, b"a", b"b", topic="jobs")
    write(engine, b"c", b"d", topic="default/jobs")
    sent: list[str] = []

    class Sending(FaultyBroker):
        async def enqueue_batch(self, topic: str, messages: Any, **options: Any) -> Any:
            sent.append(topic)
            return await super().enqueue_batch(topic, messages, **options)

    async with OutboxRelay(engine, Sending(hl, random.Random(0), 0.0)) as relay:  # type: ignore[arg-type]
        assert await relay.run_once() == 4
    assert sent == ["jobs"]
    assert sorted(payloads(hl)) == [b"a", b"b", b"c", b"d"]


async def test_topics_are_sent_together(engine: Engine, hl: MemoryBroker) -> None:
    """While the server is down, each takes its complete deadline: in sequence they would outlast the relay's lease."""
    for topic in ("one", "two", "three"):
        await hl.create_topic(topic)
        write(engine, b"x", topic=topic)
    asked = asyncio.Barrier(3)

    class Together(FaultyBroker):
        async def enqueue_batch(self, topic: str, messages: Any, **options: Any) -> Any:
            await asked.wait()
            return await super().enqueue_batch(topic, messages, **options)

    async with OutboxRelay(engine, Together(hl, random.Random(0), 0.0)) as relay, asyncio.timeout(10):  # type: ignore[arg-type]
        assert await relay.run_once() == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"payload": "text"}, "payload must be bytes"),
        ({"topic": "no/such/topic"}, "topic"),
        ({"delay": 1, "deliver_at": datetime.now(UTC)}, "not both"),
        ({"headers": {"a": 1}}, "header"),
        ({"priority": 1.5}, "priority"),
        ({"key": "k" * 1025}, "^key of a row of the outbox must be at most 1024 characters"),
        ({"fairness_key": "a\0b"}, "^fairness_key of a row .* without NUL"),
        ({"session": None}, "a SQLAlchemy session or connection, not NoneType"),
    ],
)
def test_message_that_no_topic_accepts_is_rejected_immediately(
    engine: Engine, given: dict[str, Any], said: str
) -> None:
    with Session(engine) as session:
        arguments = {"session": session, "topic": "jobs", "payload": b"x", **given}
        with pytest.raises(heapline.RequestError, match=said):
            outbox.enqueue(**arguments)
        session.commit()
    assert waiting(engine) == 0


# -- relaying ----------------------------------------------------------------------------------------------------------


async def test_row_that_commits_late_under_a_lower_id_is_not_missed(engine: Engine, hl: MemoryBroker) -> None:
    write(engine, b"1", b"2")
    with engine.begin() as connection:  # as if the first transaction were still open
        connection.execute(update(OUTBOX).where(OUTBOX.c.id == 1).values(failed_ms=1))
    async with OutboxRelay(engine, hl) as relay:
        assert await relay.run_once() == 1
        with engine.begin() as connection:
            connection.execute(update(OUTBOX).values(failed_ms=None))
        assert await relay.run_once() == 1
    assert sorted(payloads(hl)) == [b"1", b"2"]


async def test_rows_of_a_topic_keep_their_order_across_batches(engine: Engine, hl: MemoryBroker) -> None:
    await hl.create_topic("line")
    for i in range(5):
        write(engine, *(b"%d" % (10 * i + j) for j in range(10)), topic="line")
    async with OutboxRelay(engine, hl, batch_rows=7) as relay:
        assert await relay.run_once() == 50
    assert payloads(hl, "line") == [b"%d" % i for i in range(50)]


async def test_batches_are_bounded_by_bytes(engine: Engine, hl: MemoryBroker) -> None:
    write(engine, *(bytes(400_000) for _ in range(5)))
    async with OutboxRelay(engine, hl, batch_bytes=1_000_000) as relay:
        await relay.turn()
        assert len(payloads(hl)) == 2
        await relay.run_once()
    assert len(payloads(hl)) == 5


async def test_rows_of_a_missing_topic_wait_without_blocking_others(
    engine: Engine, hl: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heapline.outbox.relay.PAUSE", 1000)
    write(engine, b"early", topic="later")
    write(engine, b"x")
    async with OutboxRelay(engine, hl, batch_rows=1) as relay:
        assert await relay.run_once() == 1
        assert waiting(engine) == 1
        await hl.create_topic("later")
        assert await relay.run_once() == 0  # it checks again after a while, or when it is woken
        relay.wake()
        assert await relay.run_once() == 1
    assert payloads(hl, "later") == [b"early"]


async def test_rejected_row_stays_with_the_reason_and_others_are_sent(engine: Engine, hl: MemoryBroker) -> None:
    await hl.create_topic("small", max_payload_bytes=10)
    write(engine, b"1", b"2", bytes(11), b"3", bytes(12), b"4", topic="small")
    async with OutboxRelay(engine, hl) as relay:
        await relay.run_once()
        assert (relay.relayed, relay.failed) == (4, 2)
    assert payloads(hl, "small") == [b"1", b"2", b"3", b"4"]
    with engine.connect() as connection:
        errors = connection.scalars(select(OUTBOX.c.error).where(OUTBOX.c.failed_ms.is_not(None))).all()
    assert len(errors) == 2
    assert all("PayloadTooLarge" in error for error in errors)


async def test_invalid_row_does_not_block_others(engine: Engine, hl: MemoryBroker) -> None:
    write(engine, b"1", b"2", b"3")
    with engine.begin() as connection:  # not written by `enqueue`
        connection.execute(update(OUTBOX).where(OUTBOX.c.id == 2).values(headers="{no json"))
    async with OutboxRelay(engine, hl) as relay:
        assert await relay.run_once() == 2
        assert relay.failed == 1
    assert sorted(payloads(hl)) == [b"1", b"3"]
    with engine.connect() as connection:
        (row,) = connection.execute(select(OUTBOX.c.id, OUTBOX.c.error)).all()
    assert row.id == 2
    assert "this row is not a message (JSONDecodeError); use outbox.enqueue" in row.error


async def test_run_continues_until_it_is_stopped(engine: Engine, hl: MemoryBroker) -> None:
    async with OutboxRelay(engine, hl, poll=60) as relay:
        running = asyncio.ensure_future(relay.run())
        write(engine, b"x")
        relay.wake()
        async with asyncio.timeout(30):
            while waiting(engine):  # noqa: ASYNC110 - its end is in a database
                await asyncio.sleep(0.001)
        relay.stop()
        await running
    assert payloads(hl) == [b"x"]


async def test_run_outlasts_a_database_that_fails_before_and_after_its_commits(
    engine: Engine, hl: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = SqlStore.turn, 0

    async def failing(self: SqlStore, turn: Turn) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            raise ConnectionResetError("before")
        claimed = await real(self, turn)
        if calls % 3 == 0:
            raise ConnectionResetError("after")
        return claimed

    monkeypatch.setattr(SqlStore, "turn", failing)
    monkeypatch.setattr("heapline.outbox.relay.PAUSE", 0.001)
    write(engine, *(b"%d" % i for i in range(20)))
    async with OutboxRelay(engine, hl, batch_rows=4, poll=0.001) as relay:
        running = asyncio.ensure_future(relay.run())
        async with asyncio.timeout(30):
            while waiting(engine):  # noqa: ASYNC110 - its end is in a database
                await asyncio.sleep(0.001)
        relay.stop()
        await running
    assert Counter(payloads(hl)) == Counter(b"%d" % i for i in range(20))


async def test_broker_that_cannot_be_reached_keeps_the_rows_waiting(engine: Engine, hl: MemoryBroker) -> None:
    class Away:
        async def enqueue_batch(self, topic: str, messages: Any, **options: Any) -> Any:
            raise OSError("no route")

    write(engine, b"x")
    broker: Any = Away()
    async with OutboxRelay(engine, broker) as relay:
        assert await relay.run_once() == 0
        assert waiting(engine) == 1
        relay._broker = hl
        relay.wake()
        assert await relay.run_once() == 1


async def test_lanes_of_closed_and_of_killed_relays_are_used_again(engine: Engine, hl: MemoryBroker) -> None:
    for payload in (b"1", b"2", b"3"):
        write(engine, payload)
        await left_in_doubt(engine, hl, enqueued=True)
        write(engine, payload)
        async with OutboxRelay(engine, hl, lease=-1) as relay:
            await relay.run_once()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*), count(owner) FROM heapline_outbox_lane").one() == (1, 0)


# -- exactly once ------------------------------------------------------------------------------------------------------


async def left_in_doubt(engine: Engine, hl: MemoryBroker, *, enqueued: bool) -> None:
    """A relay is killed after it has claimed its rows, before or after they were enqueued."""
    relay = OutboxRelay(engine, hl, lease=-1)
    real, done = sender.send, False

    async def dying(*args: Any) -> Any:
        nonlocal done
        if enqueued and not done:
            done = True
            await real(*args)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heapline.outbox.relay.send", dying)
        with pytest.raises(Killed):
            await relay.run_once()


@pytest.mark.parametrize("enqueued", [False, True])
@pytest.mark.parametrize("away", [0, 2 * WINDOW, 1000 * WINDOW])
@pytest.mark.parametrize("grows", [False, True])
async def test_rows_in_doubt_are_enqueued_once_however_long_the_relay_was_away(
    engine: Engine, hl: MemoryBroker, clock: HandClock, enqueued: bool, away: float, grows: bool
) -> None:
    write(engine, b"keyed", key="some key")
    write(engine, *(b"%d" % i for i in range(20)))
    await left_in_doubt(engine, hl, enqueued=enqueued)
    assert len(payloads(hl)) == (21 if enqueued else 0)
    assert waiting(engine) == 21
    clock.advance(away)
    await hl.stats("jobs")
    if grows:
        await hl.update_topic("jobs", partitions=7)
    write(engine, b"after")
    async with OutboxRelay(engine, hl, lease=-1) as relay:
        await relay.run_once()
        assert (relay.relayed, relay.failed) == (22, 0)
    assert Counter(payloads(hl)) == Counter([b"keyed", b"after", *(b"%d" % i for i in range(20))])


async def test_hung_relay_that_wakes_after_another_took_over_changes_nothing(engine: Engine, hl: MemoryBroker) -> None:
    write(engine, b"1", b"2")
    hung = OutboxRelay(engine, hl)
    with pytest.MonkeyPatch.context() as patch:

        async def hangs(*args: Any) -> Any:
            return sender.Sent()

        patch.setattr("heapline.outbox.relay.send", hangs)
        await hung.turn()  # claimed, not sent
    async with OutboxRelay(engine, hl, lease=-1) as other:
        assert await other.run_once() == 2
        write(engine, b"3")
        assert await other.run_once() == 1
        await hung.run_once()  # sends its two again: refused, because its lane was taken
    write(engine, b"4")
    assert await hung.run_once() == 1
    await hung.close()
    assert sorted(payloads(hl)) == [b"1", b"2", b"3", b"4"]


async def test_restored_database_loses_nothing_and_reports_rows_in_doubt(engine: Engine, hl: MemoryBroker) -> None:
    write(engine, b"in doubt")
    await left_in_doubt(engine, hl, enqueued=False)
    with engine.connect() as connection:
        lanes = connection.execute(select(LANES)).all()
        rows = connection.execute(select(OUTBOX)).all()
    async with OutboxRelay(engine, hl, lease=-1) as relay:
        await relay.run_once()
        write(engine, b"next")
        await relay.run_once()
    with engine.begin() as connection:
        connection.execute(LANES.delete())
        connection.execute(LANES.insert(), [dict(lane._mapping) for lane in lanes])
        connection.execute(OUTBOX.insert(), [dict(row._mapping) for row in rows])
    write(engine, b"new")
    async with OutboxRelay(engine, hl, lease=-1) as relay:
        await relay.run_once()
        assert (relay.relayed, relay.failed) == (1, 1)
    assert sorted(payloads(hl)) == [b"in doubt", b"new", b"next"]
    with engine.connect() as connection:
        assert "it is unknown whether" in connection.scalars(select(OUTBOX.c.error)).one()


@pytest.mark.parametrize("steps", [[0, 3, 500], [0, 500, 3, 7]])
async def test_restored_database_does_not_repeat_numbers_if_the_clock_stands(
    engine: Engine, hl: MemoryBroker, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """The epoch after the restore is above the broker's, or below it and rejected."""
    monkeypatch.setattr("heapline.outbox.store.time", SimpleNamespace(time_ns=lambda: 0))
    monkeypatch.setattr("heapline.outbox.store.secrets", SimpleNamespace(randbelow=lambda _: steps.pop(0)))
    for payload in (b"before the backup", b"lost", b"after the restore"):
        write(engine, payload)
        async with OutboxRelay(engine, hl) as relay:
            assert await relay.run_once() == 1
        with engine.begin() as connection:
            connection.execute(update(LANES).values(epoch=1))
    assert sorted(payloads(hl)) == [b"after the restore", b"before the backup", b"lost"]
    assert steps == []


@pytest.mark.parametrize("repeated", [False, True])
async def test_rejected_row_that_may_have_been_sent_is_in_doubt(
    engine: Engine, hl: MemoryBroker, repeated: bool
) -> None:
    """If refused on the first try, it gets a new number. If refused on a retry, it may already be enqueued."""
    write(engine, b"1")
    refuse = hl.enqueue_batch

    async def refused_once(*args: Any, **options: Any) -> Any:
        hl.enqueue_batch = refuse  # type: ignore[method-assign]
        error = heapline.StaleEpoch("outbox", 1, 2)
        error.repeated = repeated
        raise error

    hl.enqueue_batch = refused_once  # type: ignore[method-assign]
    async with OutboxRelay(engine, hl) as relay:
        await relay.run_once()
        assert (relay.relayed, relay.failed) == ((0, 1) if repeated else (1, 0))


async def test_call_of_a_task_is_written_in_the_transaction_and_then_run(engine: Engine, hl: MemoryBroker) -> None:
    app = heapline.App(hl)

    @app.task(topic="jobs", priority=7, max_retries=2)
    async def add(a: int, b: int = 1) -> int:
        return a + b

    with Session(engine) as session, session.begin():
        outbox.enqueue_call(session, add.item(1))
        outbox.enqueue_call(session, add.item(2, b=3, priority=1, key="k"))
    with Session(engine) as session:
        outbox.enqueue_call(session, add.item(9))
        session.rollback()
    async with OutboxRelay(engine, hl) as relay:
        assert await relay.run_once() == 2
    assert sorted((info.priority, info.key) for info in hl.standing("jobs")) == [(1, "k"), (7, None)]
    assert [done.result for done in await drain(hl, app)] == [5, 2]


def test_call_that_cannot_be_stored_in_a_row_is_refused(engine: Engine) -> None:
    app = heapline.App("./unused")

    @app.task(topic="jobs")
    async def note(text: str) -> None: ...

    with Session(engine) as session:
        with pytest.raises(heapline.BadRequest, match="enqueued exactly once without a key; omit idempotency_key"):
            outbox.enqueue_call(session, note.item("x", idempotency_key="k"))
        with pytest.raises(heapline.BadRequest, match=r"needs a call of a task, such as send.item\(…\), got Task"):
            outbox.enqueue_call(session, note)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="would reject these arguments"):
            outbox.enqueue_call(session, note.item(5))
    assert waiting(engine) == 0


@pytest.mark.parametrize("enqueued", [False, True])
@pytest.mark.parametrize("calls_before", [0, 1])
async def test_relay_that_calls_the_broker_late_leaves_no_row_in_doubt(
    engine: Engine, hl: MemoryBroker, calls_before: int, enqueued: bool
) -> None:
    """It hangs before a call. Another relay takes its lane and is killed, the first continues, and a third finishes."""
    write(engine, b"1", b"2", b"3")
    calls = Calls()
    hung = OutboxRelay(engine, calls.to(hl), batch_rows=1)
    running = asyncio.ensure_future(hung.run_once())
    async with asyncio.timeout(30):
        for _ in range(calls_before):
            await calls.run_next()
        await calls.arrive()
        await left_in_doubt(engine, hl, enqueued=enqueued)
        continuing = asyncio.ensure_future(calls.run_all())
        await running
        continuing.cancel()
    async with OutboxRelay(engine, hl, lease=-1) as relay:
        await relay.run_once()
        assert relay.failed == hung.failed == 0
    assert sorted(payloads(hl)) == [b"1", b"2", b"3"]
    assert waiting(engine) == 0


async def turn_until_killed(store: Any, broker: Any, rng: random.Random) -> None:
    relay = OutboxRelay(store, broker, batch_rows=rng.choice((1, 3, 50)), lease=rng.choice((-1, 1000)))
    try:
        while True:
            with contextlib.suppress(OSError):  # as `run` does
                await relay.turn()
    except Killed:
        pass


@pytest.mark.parametrize("seed", range(12))
async def test_calls_that_run_after_their_relay_gave_up_or_died_change_nothing(
    engine: Engine, hl: MemoryBroker, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Transactions and enqueues of three relays run in any order. A call may fail for its relay and run much later."""
    monkeypatch.setattr("heapline.outbox.relay.PAUSE", 0)
    rng = random.Random(seed)
    calls, relays = Calls(), set[asyncio.Task[None]]()
    await hl.create_topic("more", dedup_window=WINDOW)
    written: list[bytes] = []
    for step in range(250):
        if rng.random() < 0.1:
            written.append(b"%d" % step)
            write(engine, written[-1], topic=rng.choice(("jobs", "more")))
        while len(relays) < 3:
            task = asyncio.ensure_future(turn_until_killed(calls.to(SqlStore(engine)), calls.to(hl), rng))
            relays.add(task)
            task.add_done_callback(relays.discard)
        for _ in range(20):  # until each relay waits for a call
            await asyncio.sleep(0)
        call = rng.choice(calls.waiting)
        fate = rng.random()
        if fate < 0.1:
            call.fail(ConnectionResetError())
        elif fate < 0.15:
            call.fail(Killed())
        else:
            calls.waiting.remove(call)
            await call.run()
    for task in relays:
        task.cancel()
    for left in (True, False):
        async with OutboxRelay(engine, hl, lease=-1) as relay:
            await relay.run_once()
        while left and calls.waiting:
            await calls.run_next()
    assert Counter(payloads(hl) + payloads(hl, "more")) == Counter(written)
    assert waiting(engine) == 0


async def live(engine: Engine, hl: MemoryBroker, rng: random.Random, chance: float) -> None:
    """Run one relay until it is killed or has nothing to do."""
    broker: Any = FaultyBroker(hl, rng, chance)
    store = MortalStore(engine, rng, chance)
    relay = OutboxRelay(store, broker, batch_rows=rng.choice((1, 3, 50)), lease=rng.choice((-1, 1000)))
    try:
        for _ in range(rng.randint(1, 8)):
            await relay.turn()
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await relay.close()
    except Killed:
        pass


@pytest.mark.parametrize("seed", range(12))
async def test_each_committed_row_is_enqueued_once_whatever_kills_the_relays(
    engine: Engine, hl: MemoryBroker, clock: HandClock, seed: int
) -> None:
    rng = random.Random(seed)
    await hl.create_topic("more", dedup_window=WINDOW)
    committed: list[bytes] = []
    for step in range(12):
        mine = [b"%d.%d" % (step, i) for i in range(rng.randint(0, 8))]
        with Session(engine) as session:
            for payload in mine:
                key = rng.choice((None, "a", "b"))
                outbox.enqueue(session, rng.choice(("jobs", "more")), payload, key=key)
            if rng.random() < 0.7:
                session.commit()
                committed += mine
        await asyncio.gather(*(live(engine, hl, rng, 0.08) for _ in range(rng.randint(1, 3))))
        clock.advance(rng.choice((0, 1, 3 * WINDOW)))
        if rng.random() < 0.1:
            parts = next(t.config.partitions for t in await hl.list_topics() if t.name == "jobs")
            await hl.update_topic("jobs", partitions=parts + 2)
    async with OutboxRelay(engine, hl, lease=-1) as relay:
        await relay.run_once()
    assert Counter(payloads(hl) + payloads(hl, "more")) == Counter(committed)
    assert waiting(engine) == 0
