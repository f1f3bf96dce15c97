"""One shard: connections to its database, transactions on a topic, and the contract's errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import lru_cache
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import asyncpg
import msgspec

from heapline.contract.config import DEFAULT_NAMESPACE, TopicConfig
from heapline.contract.errors import BadRequest, Closed, MessageNotFound, TopicNotFound, UnavailableError
from heapline.contract.ids import parse_id, to_ulid
from heapline.contract.message import TopicInfo
from heapline.core.latency import Latency
from heapline.core.order import Ordering
from heapline.core.partition import ordering_of
from heapline.logs import Log
from heapline.sql.circuit import PING_SECONDS, Circuit
from heapline.sql.config import SqlConfig
from heapline.sql.layout import Floors, Layout
from heapline.sql.migrations import migrate
from heapline.sql.node_id import NodeId, NodeIdLost
from heapline.sql.statements import all_blocks, fill, statement
from heapline.sql.wakeups import Wakeups

log = Log("heapline.sql")
T = TypeVar("T")
ATTEMPTS = 5  # of a transaction that was rolled back because of a deadlock, or because the node id was lost
POSTGRES_MIN = 14
EVERY_ANSWER = "every answer is durable"
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
ROLLBACK_SECONDS = 5.0  # after which a connection is given up instead
#: After which the server ends a transaction whose node sends nothing more. A node that was cut off in the middle of one
#: would keep its locks until TCP gives up, which takes two hours.
ABANDONED_SECONDS = 10
#: Every statement finds its rows by an index. The planner must not choose otherwise: slots are new and have no
#: statistics, and a sort of all ready messages instead of the first of an index made pops ten times as slow.
PLANNER = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",  # planning a claim over all slots takes 4 ms
    "jit": "off",
}
_UNREACHABLE = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection that broke in the middle of an operation
    asyncpg.OperatorInterventionError,  # shutdown, restart, cancelled by an operator
    asyncpg.InsufficientResourcesError,  # too many connections, disk full
    asyncpg.ReadOnlySQLTransactionError,  # a standby
    asyncpg.QueryCanceledError,
    OSError,
    TimeoutError,
)
_SLOW = (TimeoutError, asyncpg.QueryCanceledError, asyncpg.InsufficientResourcesError)  # of those: it does answer
#: After these a connection is given up. Its release would wait until the statement is cancelled, or it leads to a
#: server that has become a standby.
_USELESS = (TimeoutError, asyncpg.ReadOnlySQLTransactionError)
_REFUSALS = (
    asyncpg.InvalidAuthorizationSpecificationError,  # a wrong user or password
    asyncpg.InvalidCatalogNameError,  # no such database
    asyncpg.InsufficientPrivilegeError,
)
_REPEATABLE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


class ShardDown(UnavailableError):
    """A shard cannot be reached. Clients see UnavailableError."""

    def __init__(self, shard: int, text: str) -> None:
        super().__init__(text)
        self.shard = shard


class Topic(NamedTuple):
    """A topic as its row was in this transaction."""

    id: int  # its incarnation
    name: str  # canonical
    config: TopicConfig
    ordering: Ordering
    id_suffix: int
    is_paused: bool

    @property
    def info(self) -> TopicInfo:
        return TopicInfo(name=self.name, incarnation=self.id, config=self.config, id_suffix=self.id_suffix)

    def find_id(self, message_id: str | int) -> int:
        """Return the integer of an id. The ULID of another topic raises MessageNotFound."""
        id, suffix = parse_id(message_id)
        if suffix is not None and suffix != self.id_suffix:
            raise MessageNotFound(self.name, str(message_id))
        return id

    def ulid(self, id: int) -> str:
        return to_ulid(id, self.id_suffix)


class Turn(NamedTuple):
    """A transaction on one topic."""

    connection: asyncpg.Connection
    topic: Topic
    layout: Layout  # read after the locks were taken
    node_until: int | None  # end of the node id's lease; None: lost

    @property
    def now(self) -> int:
        """The time in ms, by the database's clock."""
        return self.layout.now


Work = Callable[[Turn], Awaitable[T]]
_decode_config = msgspec.json.Decoder(TopicConfig).decode


class Name(NamedTuple):
    """A topic's name in its two parts."""

    namespace: str
    name: str

    @property
    def canonical(self) -> str:
        return self.name if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{self.name}"


@lru_cache(1024)
def read_config(text: str) -> tuple[TopicConfig, Ordering]:
    config = _decode_config(text)
    return config, ordering_of(config)


def write_config(config: TopicConfig) -> str:
    return msgspec.json.encode(config).decode()


class Shard:
    def __init__(self, index: int, config: SqlConfig) -> None:
        self.index = index
        self._config = config
        self._url = config.postgres[index]
        self.schema = config.schema
        self._pool: Any = None
        self._server_settings = {
            "search_path": config.schema,
            "application_name": "heapline",
            "idle_in_transaction_session_timeout": f"{ABANDONED_SECONDS}s",
            **PLANNER,
        }
        self._rings_lock = str(lock_key(f"heapline rings {config.schema}"))
        self.floors = Floors()
        self.node = NodeId(config.node_lease)
        self.wakeups = Wakeups(index, self._url, config.schema, str(self.node.owner), self._notify)
        self.settings: dict[str, str] = {}  # of the server
        self.deployment = ""  # id of this database
        self.circuit = Circuit(index, config.connections, self._ping, self._cut)
        self.limited: set[Name] = set()  # topics that had a max_backlog when this node last enqueued to them
        self.commits = Latency()
        self.commits_total = 0

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, create or upgrade the tables, and lease a node id."""
        try:
            await self._open()
        except (*_REFUSALS, asyncpg.ObjectNotInPrerequisiteStateError) as error:
            raise BadRequest(
                f"cannot open shard {self.index} ({error}); check its URL, and the rights of its role"
            ) from error
        except UnavailableError as error:
            raise UnavailableError(
                f"cannot open shard {self.index} ({_first_line(error.__cause__)}); check its URL, and that it runs"
            ) from error
        self.circuit.start()
        self.wakeups.start()

    async def _open(self) -> None:
        config = self._config
        with self._reaching():
            self._pool = await self._create_pool()
            async with self._pool.acquire() as connection:
                version = connection.get_server_version()
                if version.major < POSTGRES_MIN:
                    raise BadRequest(
                        f"shard {self.index} runs PostgreSQL {version.major}; upgrade it to {POSTGRES_MIN} or newer"
                    )
                await migrate(connection, config.schema, self.index, len(config.postgres))
                self.settings = dict(await connection.fetchrow(statement("server_settings")))
                self.deployment = str(await connection.fetchval(statement("select_deployment")))
                await self.node.lease(connection)
                await self.find_others(connection)

    async def _create_pool(self) -> Any:
        """Return a pool. It opens connections when they are needed."""
        return await asyncpg.create_pool(
            self._url,
            min_size=0,
            timeout=CONNECT_SECONDS,
            max_size=self._config.connections,
            command_timeout=self._config.command_timeout,
            statement_cache_size=500,
            init=self._connected,
            reset=_keep_session,
            server_settings=self._server_settings,
        )

    async def _connected(self, connection: asyncpg.Connection) -> None:
        """Forget what was known: the connection may be to a server that is not as far as the last one.

        The pool replaces idle connections that broke without an error.
        """
        self.floors.clear()

    async def find_others(self, connection: asyncpg.Connection) -> None:
        """Notice whether other nodes use this shard."""
        if await connection.fetchval(statement("has_other_nodes"), self.node.owner):
            self.wakeups.others.set()
        else:
            self.wakeups.others.clear()

    async def close(self) -> None:
        await self.circuit.close()
        await self.wakeups.close()
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await pool.close()  # waits for transactions, which may mint ids
                if self.node.number < 0:
                    return
                connection = await self.connect()
                try:
                    await self.node.release(connection)
                finally:
                    await connection.close()
        except (*_UNREACHABLE, asyncpg.PostgresError) as error:
            pool.terminate()
            log.warning("node id not released; its lease will expire", shard=self.index, error=repr(error))

    async def connect(self) -> asyncpg.Connection:
        """Open a connection besides those of the pool."""
        return await asyncpg.connect(self._url, timeout=CONNECT_SECONDS, server_settings=self._server_settings)

    @property
    def is_up(self) -> bool:
        """Whether the server answers, as far as this node knows."""
        return self.circuit.is_up

    async def _ping(self) -> bool:
        """Return whether the server answers on a new connection."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                connection = await asyncpg.connect(self._url, server_settings=self._server_settings)
                try:
                    await connection.fetchval("SELECT 1")
                finally:
                    connection.terminate()
        except asyncpg.InsufficientResourcesError:  # such as too many connections: it does answer
            return True
        except (*_UNREACHABLE, asyncpg.PostgresError):
            return False
        return True

    async def _cut(self) -> None:
        """End all connections, so that what waits for an answer fails."""
        pool, self._pool = self._pool, await self._create_pool()
        pool.terminate()
        self.floors.clear()

    @property
    def durability(self) -> str:
        if self.settings["fsync"] != "on" or self.settings["synchronous_commit"] == "off":
            return "answers may be lost in a crash of the database: its fsync or synchronous_commit is off"
        return EVERY_ANSWER

    # -- transactions ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection for single statements."""
        if self._pool is None:
            raise Closed
        if not self.is_up:
            raise ShardDown(self.index, f"shard {self.index} is unavailable; nothing was changed: retry later")
        with self._reaching():
            async with self.circuit.call():
                pool, connection = self._pool, await self._acquire()
                try:
                    yield connection
                except Exception as error:
                    if isinstance(error, _USELESS):
                        _terminate(connection)
                    if not isinstance(error, _UNREACHABLE):
                        self.circuit.answered()
                    raise
                else:
                    self.circuit.answered()
                finally:
                    await _release(pool, connection)

    async def _acquire(self) -> Any:
        try:
            return await self._pool.acquire()
        except TimeoutError:
            self.circuit.fail()  # unlike a statement that takes too long
            raise
        except asyncpg.InsufficientResourcesError:
            raise
        except asyncpg.PostgresError as error:  # such as a password that was changed, or a database that is locked
            self.circuit.fail()
            raise ShardDown(
                self.index, f"shard {self.index} refuses connections ({_first_line(error)}); retry later"
            ) from error

    @property
    def connections(self) -> tuple[int, int]:
        """The number of open connections: those in use, and those that are idle."""
        if self._pool is None:
            return 0, 0
        idle: int = self._pool.get_idle_size()
        return self._pool.get_size() - idle, idle

    async def run(
        self,
        work: Callable[[asyncpg.Connection], Awaitable[T]],
        topic: Name | None = None,
        lock: int | None = None,
        begin: str | None = None,
    ) -> T:
        """Run `work` in a transaction, alone on `topic` if one is given, or alone with another advisory lock.

        `begin` replaces the statements that begin it and take its locks. Repeats the transaction if it met a deadlock,
        or if the node id was lost.
        """
        begin = begin or self._begin(self.lock_key(topic) if topic is not None else lock)
        for attempt in range(ATTEMPTS):
            number = self.node.number
            try:
                return await self.transact(begin, work)
            except _REPEATABLE:
                if attempt + 1 == ATTEMPTS:
                    raise UnavailableError(f"shard {self.index}: repeated deadlocks; retry later") from None
            except NodeIdLost:
                if attempt + 1 == ATTEMPTS:
                    raise UnavailableError(f"shard {self.index}: this node cannot keep its node id; retry") from None
                async with self.connection() as connection:
                    await self.node.replace(connection, number)
        raise AssertionError("unreachable")

    async def transact(self, begin: str, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """Run `work` in one transaction, which takes its locks as it begins: one round trip for both."""
        async with self.connection() as connection:
            began = perf_counter()
            try:
                await connection.execute(begin)  # fails if a lock takes too long, and leaves a transaction to roll back
                result = await work(connection)
            except TimeoutError:
                raise  # the connection is given up, and its transaction with it
            except BaseException:
                await _roll_back(connection)
                raise
            if await connection.execute(statement("commit")) != "COMMIT":
                raise UnavailableError(f"shard {self.index} rolled the transaction back; nothing was changed: retry")
        self.commits.add(perf_counter() - began)
        self.commits_total += 1
        return result

    async def run_alone(self, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """Run `work` while no other transaction runs. Raises asyncpg.LockNotAvailableError if others are too slow."""
        return await self.transact(fill(all_blocks()["begin_alone"], {"rings": self._rings_lock}), work)

    def _begin(self, lock: int | None) -> str:
        if lock is None:
            return statement("begin", rings=self._rings_lock)
        values = {"rings": self._rings_lock, "lock": str(lock)}
        return fill(all_blocks()["begin_locked"], values)

    async def in_topic(self, name: Name, work: Work[T], *, locked: bool = True) -> T:
        """Run `work` in a transaction on a topic, alone among those that lock it."""

        async def turn(connection: asyncpg.Connection) -> T:
            return await work(await self.enter(connection, name))

        return await self.run(turn, name if locked else None)

    async def lock_rings(self, connection: asyncpg.Connection) -> Layout:
        """Keep the rings from turning until the transaction ends, and read how far they have turned."""
        await connection.execute(statement("lock_rings", rings=self._rings_lock))
        return await self.read_layout(connection)

    async def share_topic(self, name: Name, work: Work[T], alone: Iterable[str]) -> T:
        """Run `work` in a transaction on a topic, beside others that share it, but alone with certain names of it."""

        async def turn(connection: asyncpg.Connection) -> T:
            return await work(await self.enter(connection, name))

        topic = self.lock_key(name)
        others = sorted(lock_key(f"{topic} {one}") for one in alone)
        values = {"rings": self._rings_lock, "topic": str(topic), "others": ",".join(map(str, others))}
        return await self.run(turn, begin=fill(all_blocks()["begin_shared"], values))

    async def read_layout(self, connection: asyncpg.Connection) -> Layout:
        """Read the time, and how far the rings have turned."""
        return Layout(*await connection.fetchrow(statement("now")))

    async def enter(self, connection: asyncpg.Connection, name: Name) -> Turn:
        """Read the topic and the time. Raise TopicNotFound if it does not exist."""
        row = await connection.fetchrow(statement("enter_topic"), *name, self.node.number, self.node.owner)
        if row is None:
            raise TopicNotFound(name.canonical)
        layout = Layout(*(row[name] for name in Layout._fields))
        return Turn(connection, topic_of(name, row, layout.now), layout, row["node_until"])

    async def read_topic(self, name: Name) -> Turn:
        """Read the topic and the time, outside a transaction."""
        async with self.connection() as connection:
            return await self.enter(connection, name)

    def lock_key(self, name: Name) -> int:
        """Return the number of the topic's advisory lock."""
        return lock_key(f"heapline {self.schema} {name.namespace}/{name.name}")

    def own_lock(self, what: str) -> int:
        """Return the number of an advisory lock of this schema."""
        return lock_key(f"heapline {self.schema} {what}")

    async def _notify(self, channel: str, topics: list[str]) -> None:
        async with self.connection() as connection:
            await connection.execute(statement("notify"), channel, topics)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except _UNREACHABLE as error:
            self.floors.clear()
            if not isinstance(error, _SLOW):
                self.circuit.fail()
            raise ShardDown(
                self.index,
                f"shard {self.index} is unavailable ({_first_line(error)}); the outcome of a write is unknown: "
                "retry with the same idempotency key",
            ) from error
        except asyncpg.CharacterNotInRepertoireError as error:
            raise BadRequest("PostgreSQL cannot store the character NUL in a name; use another name") from error


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


async def _roll_back(connection: asyncpg.Connection) -> None:
    """End the transaction, if necessary with its connection."""
    try:
        await connection.execute(statement("rollback"), timeout=ROLLBACK_SECONDS)
    except (*_UNREACHABLE, asyncpg.PostgresError):
        _terminate(connection)


async def _release(pool: Any, connection: asyncpg.Connection) -> None:
    """Return a connection to its pool. If it broke, what its user has to say counts: a result or a cancellation."""
    try:
        await pool.release(connection)
    except (*_UNREACHABLE, asyncpg.PostgresError):
        _terminate(connection)


def _terminate(connection: asyncpg.Connection) -> None:
    with contextlib.suppress(asyncpg.InterfaceError):  # all connections of its pool were ended before
        connection.terminate()


async def _keep_session(connection: asyncpg.Connection) -> None:
    """Return a connection to the pool as it is: every transaction leaves its session as it was."""


def lock_key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def topic_of(name: Name, row: Any, now: int) -> Topic:
    config, ordering = read_config(row["config"])
    until = row["paused_until"]
    is_paused = row["paused"] and (until is None or until > now)
    return Topic(row["id"], name.canonical, config, ordering, row["id_suffix"], is_paused)
