"""The outbox on SQLAlchemy: its two tables, the insert, and the relay's store. Sync and async engines alike.

The store's work is written once, as functions of a plain connection: an async engine runs them with `run_sync`, a sync
one in a thread. Every turn begins by renewing its lane, which takes SQLite's write lock before anything is read;
elsewhere rows are taken with SKIP LOCKED, so that relays do not wait for each other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
    case,
    create_engine,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy import insert as insert_into
from sqlalchemy.engine import CursorResult

from heapline.contract.config import canonical_topic
from heapline.contract.errors import BadRequest
from heapline.outbox.sender import IN_DOUBT_BEGINS
from heapline.outbox.store import (
    ERROR_CHARACTERS,
    KEY_CHARACTERS,
    MESSAGE_COLUMNS,
    TOPIC_CHARACTERS,
    FreeLane,
    Row,
    Turn,
    number,
)

T = TypeVar("T")
METADATA = MetaData()
_BIG = BigInteger().with_variant(Integer, "sqlite")  # the only kind that SQLite counts up by itself

OUTBOX = Table(
    "heapline_outbox",
    METADATA,
    Column("id", _BIG, primary_key=True, autoincrement=True),
    Column("topic", String(TOPIC_CHARACTERS), nullable=False),
    Column("payload", LargeBinary(length=(1 << 24) - 1), nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("message_key", String(KEY_CHARACTERS)),
    Column("deliver_at_ms", BigInteger),
    Column("headers", Text),  # JSON
    Column("ttl", Float(53)),
    Column("max_retries", Integer),
    Column("fairness_key", String(KEY_CHARACTERS)),
    Column("created_ms", BigInteger, nullable=False),
    # The relay's: who sends it, under which numbers; or why it cannot be sent.
    Column("lane", String(32), index=True),
    Column("epoch", BigInteger),
    Column("seq", BigInteger),
    Column("failed_ms", BigInteger),
    Column("error", String(ERROR_CHARACTERS)),
    sqlite_autoincrement=True,
)
LANES = Table(
    "heapline_outbox_lane",
    METADATA,
    Column("name", String(32), primary_key=True),
    Column("owner", String(32)),
    Column("epoch", BigInteger, nullable=False),
    Column("beat_ms", BigInteger, nullable=False),
)
_ROW = [OUTBOX.c[name] for name in ("id", "epoch", "seq", *MESSAGE_COLUMNS)]


def insert(session: Any, row: dict[str, Any]) -> Any:
    """Write a row in the caller's transaction. Return the new id, or an awaitable of it."""
    if not hasattr(session, "execute"):
        raise BadRequest(f"the outbox writes through a SQLAlchemy session or connection, not {type(session).__name__}")
    done = session.execute(insert_into(OUTBOX).values(row))
    return _id_later(done) if inspect.isawaitable(done) else done.inserted_primary_key[0]


async def _id_later(done: Awaitable[Any]) -> Any:
    return (await done).inserted_primary_key[0]


class SqlStore:
    """The relay's store on a URL, an Engine or an AsyncEngine. It disposes only of an engine that it created."""

    def __init__(self, database: Any) -> None:
        self._owns = isinstance(database, str) or not (hasattr(database, "connect") and hasattr(database, "begin"))
        self._engine: Any = _engine_of(database) if self._owns else database

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """`work(connection, *args)` as one transaction."""
        if hasattr(self._engine, "sync_engine"):
            async with self._engine.begin() as connection:
                result: T = await connection.run_sync(work, *args)
                return result
        return await asyncio.to_thread(_transact, self._engine, work, args)

    async def free_lanes(self, owner: str, stale_ms: int) -> list[FreeLane]:
        return await self.run(_free_lanes, owner, stale_ms)

    async def take(self, lane: FreeLane, owner: str, epoch: int, now_ms: int) -> bool:
        return await self.run(_take, lane, owner, epoch, now_ms)

    async def add_lane(self, name: str, owner: str, epoch: int, now_ms: int) -> None:
        await self.run(_add_lane, name, owner, epoch, now_ms)

    async def held(self, lane: str) -> list[Row]:
        return await self.run(_held, lane)

    async def turn(self, turn: Turn) -> list[Row] | None:
        return await self.run(_turn, turn)

    async def give_back(self, lane: str, epoch: int) -> None:
        await self.run(_give_back, lane, epoch)

    async def close(self) -> None:
        if self._owns:
            disposed = self._engine.dispose()
            if disposed is not None:
                await disposed


def _engine_of(url: Any) -> Any:
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    if parsed.get_dialect().is_async:
        from sqlalchemy.ext.asyncio import create_async_engine

        return create_async_engine(parsed)
    return create_engine(parsed)


def _transact(engine: Engine, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    with engine.begin() as connection:
        return work(connection, *args)


# -- lanes -------------------------------------------------------------------------------------------------------------


def _free_lanes(connection: Connection, owner: str, stale_ms: int) -> list[FreeLane]:
    free = or_(LANES.c.owner.is_(None), LANES.c.owner == owner, LANES.c.beat_ms < stale_ms)
    has_rows = case((exists().where(OUTBOX.c.lane == LANES.c.name), True), else_=False)
    found = connection.execute(
        select(LANES.c.name, LANES.c.owner, LANES.c.epoch, LANES.c.beat_ms, has_rows).where(free)
    )
    return [FreeLane(*lane) for lane in found]


def _take(connection: Connection, lane: FreeLane, owner: str, epoch: int, now_ms: int) -> bool:
    unchanged = and_(_owned(lane.name, lane.epoch), LANES.c.beat_ms == lane.beat_ms)
    take = update(LANES).where(unchanged).values(owner=owner, epoch=epoch, beat_ms=now_ms)
    return _count(connection.execute(take)) == 1


def _add_lane(connection: Connection, name: str, owner: str, epoch: int, now_ms: int) -> None:
    connection.execute(insert_into(LANES).values(name=name, owner=owner, epoch=epoch, beat_ms=now_ms))


def _give_back(connection: Connection, lane: str, epoch: int) -> None:
    connection.execute(update(LANES).where(_owned(lane, epoch)).values(owner=None))


def _owned(lane: str, epoch: int) -> ColumnElement[bool]:
    return and_(LANES.c.name == lane, LANES.c.epoch == epoch)


# -- for people --------------------------------------------------------------------------------------------------------


def counts(connection: Connection) -> list[tuple[str, int]]:
    """Return how many rows are in which state."""
    state = case(
        (OUTBOX.c.failed_ms.is_not(None), "refused"), (OUTBOX.c.lane.is_not(None), "in flight"), else_="waiting"
    )
    rows = connection.execute(select(state, func.count()).group_by(state).order_by(state))
    return [(name, count) for name, count in rows]


def refused(connection: Connection, limit: int) -> list[tuple[int, str, str]]:
    """(id, topic, why) of the oldest refused rows."""
    look = select(OUTBOX.c.id, OUTBOX.c.topic, OUTBOX.c.error).where(OUTBOX.c.failed_ms.is_not(None))
    return [(id, topic, error) for id, topic, error in connection.execute(look.order_by(OUTBOX.c.id).limit(limit))]


def retry_refused(connection: Connection, ids: Sequence[int] = (), topic: str | None = None) -> int:
    """Let refused rows be sent again: those named, or all (of a topic) but those that may have been enqueued."""
    which: list[ColumnElement[bool]] = [OUTBOX.c.failed_ms.is_not(None)]
    which.append(OUTBOX.c.id.in_(ids) if ids else OUTBOX.c.error.not_like(f"{IN_DOUBT_BEGINS}%"))
    if topic is not None:
        which.append(OUTBOX.c.topic == canonical_topic(topic))
    return _count(connection.execute(update(OUTBOX).where(*which).values(failed_ms=None, error=None)))


# -- rows --------------------------------------------------------------------------------------------------------------


def _held(connection: Connection, lane: str) -> list[Row]:
    rows = connection.execute(select(*_ROW).where(OUTBOX.c.lane == lane).order_by(OUTBOX.c.topic, OUTBOX.c.seq))
    return [Row(*row) for row in rows]


def _turn(connection: Connection, turn: Turn) -> list[Row] | None:
    renew = update(LANES).where(_owned(turn.lane, turn.owned_epoch)).values(epoch=turn.epoch, beat_ms=turn.now_ms)
    if _count(connection.execute(renew)) != 1:
        return None
    _settle(connection, turn)
    return _claim(connection, turn) if turn.rows_max else []


def _settle(connection: Connection, turn: Turn) -> None:
    held = OUTBOX.c.lane == turn.lane
    free: dict[str, Any] = {"lane": None, "epoch": None, "seq": None}
    if turn.sent:
        connection.execute(delete(OUTBOX).where(OUTBOX.c.id.in_(turn.sent), held))
    for id, error in turn.failed:
        failed = {**free, "failed_ms": turn.now_ms, "error": error}
        connection.execute(update(OUTBOX).where(OUTBOX.c.id == id, held).values(failed))
    if turn.returned:
        connection.execute(update(OUTBOX).where(OUTBOX.c.id.in_(turn.returned), held).values(free))


def _claim(connection: Connection, turn: Turn) -> list[Row]:
    open_ = and_(OUTBOX.c.lane.is_(None), OUTBOX.c.failed_ms.is_(None))
    look = select(OUTBOX.c.id, func.length(OUTBOX.c.payload)).where(open_)
    if turn.without:
        look = look.where(OUTBOX.c.topic.not_in(sorted(turn.without)))
    look = look.order_by(OUTBOX.c.id).limit(turn.rows_max).with_for_update(skip_locked=True)
    numbers = number([(id, nbytes) for id, nbytes in connection.execute(look)], turn)
    if not numbers:
        return []
    claim = update(OUTBOX).where(OUTBOX.c.id.in_(list(numbers)), open_)
    values = {"lane": turn.lane, "epoch": turn.epoch, "seq": case(numbers, value=OUTBOX.c.id)}
    if _count(connection.execute(claim.values(values))) != len(numbers):
        raise RuntimeError(
            "two relays claimed the same rows; this database does not support row locks"
        )  # rolls it back
    rows = connection.execute(select(*_ROW).where(OUTBOX.c.id.in_(list(numbers))).order_by(OUTBOX.c.id))
    return [Row(*row) for row in rows]


def _count(result: Any) -> int:
    assert isinstance(result, CursorResult)
    return int(result.rowcount)
