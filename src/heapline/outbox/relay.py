"""The relay: enqueues the committed rows of an outbox, each exactly once.

Theory of operation
-------------------
The relay selects rows by "not claimed yet", never by "id greater than the last", because ids are assigned at the insert
and a transaction with a lower id may commit later. Each row takes three steps, two of them in the database:

1. *Claim.* One transaction assigns the row to this relay's lane, with the lane's epoch and a number.
2. *Send.* The broker enqueues it under (lane, epoch, number). Sending it again, from any relay, does not duplicate it.
3. *Settle.* The transaction that claims the next rows deletes it.

A relay that is killed between two steps leaves claimed rows. The next owner of the lane sends them again **under the
same numbers**, before any other row of their topic. Numbers are used instead of idempotency keys because a broker
accepts a key that it has forgotten (after its window, 24 h by default) as new, so a relay that was down for a weekend
would enqueue twice. A forgotten number is rejected as stale, forever. Here stale means that the row was enqueued: a
lane sends the rows of a topic in the order of their numbers and continues only when the earlier ones are settled, so
the broker can have seen a number as high as this one only from this very row.

The lane's row has the epoch, and taking the lane raises it by compare-and-set. Every turn checks it. So clocks only
decide when another relay may try, and any number of relays can run: each owns a lane, and adopts the rows of dead
relays. Lanes are used again, and their number stays near the highest number of relays that ran within one lease.

No call opens an epoch at the broker, because such a call can run late, after the relay has lost its lane, and would
fence the next owner's rows while they are in doubt. The first message of an epoch opens it and fences the older ones.
A relay claims rows of a topic only when all that the lane held before are settled, so a topic sees a new epoch only
when no row of an older one is in doubt. Whatever runs late, of a relay that hung, was killed or gave up waiting:

- A transaction finds another epoch in the lane's row and changes nothing.
- An enqueue brings rows that are still claimed, and is one more try under the same numbers. Or it brings rows that
  another relay has settled: then their numbers are known, stale or fenced, or the broker rejects the rows again.

A database that was restored from a backup must not repeat numbers, so `next_epoch` also uses the time and chance. Only
after a restore can the broker have seen a newer epoch than the owner of the lane. Rows that were not sent yet then get
a newer one; the others are in doubt, and an operator decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest
from heapline.logs import Log
from heapline.outbox.sender import Group, Sent, send
from heapline.outbox.store import FreeLane, OutboxStore, Row, Turn, next_epoch

log = Log("heapline.outbox")
PAUSE, PAUSE_MAX = 0.1, 30.0  # seconds between tries after an error


class _LaneLost(Exception):
    """Another relay has adopted the lane, so this one must not settle its rows."""


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    is_own: bool  # False: another relay's, adopted until its rows are settled
    owned_epoch: int  # in the database, unless another relay has taken the lane
    epoch: int  # of the rows that are claimed next
    groups: dict[str, Group]
    next_seq: int = 0
    result: Sent = field(default_factory=Sent)  # not written to the database yet

    @property
    def producer_id(self) -> str:
        return f"outbox.{self.name}"


class OutboxRelay:
    """`async with OutboxRelay("postgresql+psycopg://…", broker) as relay: await relay.run()`

    `database` is a SQLAlchemy URL, Engine or AsyncEngine, or a store (`heapline.outbox.django.DjangoStore()`).
    """

    def __init__(
        self,
        database: Any,
        broker: Broker,
        *,
        batch_rows: int = 200,
        batch_bytes: int = 1 << 20,
        poll: float = 0.5,
        lease: float = 30.0,
    ) -> None:
        self._store = _store_of(database)
        self._broker = broker
        self._batch_rows = batch_rows  # claimed in one transaction
        self._batch_bytes = batch_bytes
        self._poll = poll  # seconds between polls of an empty outbox
        self._lease = lease  # seconds after which a silent relay counts as dead
        self._owner = uuid.uuid4().hex
        self._lanes: list[_Lane] = []
        self._rescue_at = 0.0
        self._wake = asyncio.Event()
        self._stopping = False
        self.relayed = 0  # rows that were enqueued
        self.failed = 0  # rows that the broker rejects; they stay in the table with the reason

    async def __aenter__(self) -> OutboxRelay:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self) -> None:
        """Relay until `stop`. Errors of the database or the broker are logged and retried."""
        pause = PAUSE
        while not self._stopping:
            try:
                progress = await self.turn()
            except Exception as error:  # of any driver
                log.warning("outbox turn failed", error=type(error).__name__, retry_in=pause)
                await self._wait(pause)
                pause = min(2 * pause, PAUSE_MAX)
            else:
                pause = PAUSE
                if not progress:
                    await self._wait(self._poll)

    async def run_once(self) -> int:
        """Relay the rows that are committed now, and return how many."""
        before = self.relayed
        while await self.turn():
            pass
        return self.relayed - before

    def stop(self) -> None:
        """Let `run` end after the current turn."""
        self._stopping = True
        self._wake.set()

    def wake(self) -> None:
        """Poll now, including topics that were put off: rows were committed, or a topic was created."""
        for lane in self._lanes:
            for group in lane.groups.values():
                group.retry_at = 0.0
        self._wake.set()

    async def close(self) -> None:
        """Settle known outcomes, and return the lanes, so that the next relay can take them immediately."""
        self._stopping = True
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            with contextlib.suppress(Exception):  # the database has what is in doubt, even if this fails
                await self._store.turn(self._settling(lane))
                await self._store.give_back(lane.name, lane.epoch)
        await self._store.close()

    # -- turns -----------------------------------------------------------------------------------------------------

    async def turn(self) -> int:
        """Settle, claim and send the rows of each lane once. Return how many rows moved."""
        moved = 0
        try:
            await self._take_lanes()
            for lane in list(self._lanes):
                moved += await self._turn_of(lane)
        except _LaneLost as lost:
            log.warning("lane lost to another relay", lane=str(lost))
            self._forget()
            return 1
        except BaseException:
            # Rows may have been claimed without this relay knowing, so the state is read again.
            self._forget()
            raise
        return moved

    async def _turn_of(self, lane: _Lane) -> int:
        turn = self._settling(lane)
        if lane.is_own:
            turn.without = frozenset(lane.groups)
            turn.rows_max, turn.bytes_max, turn.next_seq = self._batch_rows, self._batch_bytes, lane.next_seq
        claimed = await self._store.turn(turn)
        if claimed is None:
            raise _LaneLost(lane.name)
        lane.owned_epoch = lane.epoch
        lane.next_seq += len(claimed)
        self.relayed += len(turn.sent)
        self.failed += len(turn.failed)
        lane.result = Sent()
        lane.groups.update(_groups(claimed, tried=False))
        await self._send_groups(lane)
        moved = len(lane.result.sent) + len(lane.result.failed) + len(lane.result.returned)
        if not lane.is_own and not lane.groups and not moved:
            await self._store.give_back(lane.name, lane.epoch)
            self._lanes.remove(lane)
        return moved + len(claimed)

    def _settling(self, lane: _Lane) -> Turn:
        result = lane.result
        return Turn(lane.name, lane.owned_epoch, lane.epoch, _now_ms(), result.sent, result.failed, result.returned)

    async def _send_groups(self, lane: _Lane) -> None:
        now = time.monotonic()
        due = [group for group in lane.groups.values() if group.retry_at <= now]
        results = await asyncio.gather(*(send(self._broker, lane.producer_id, group) for group in due))
        for group, result in zip(due, results, strict=True):
            lane.result.sent += result.sent
            lane.result.failed += result.failed
            lane.result.returned += result.returned
            if result.returned:
                lane.epoch = next_epoch(max(lane.epoch, result.newer_epoch))
            if not group.rows:
                del lane.groups[group.topic]
            elif result.trouble is not None:
                group.pause = min(max(PAUSE, 2 * group.pause), PAUSE_MAX)
                group.retry_at = now + group.pause
                log.warning("broker unavailable", topic=group.topic, error=result.trouble, retry_in=group.pause)

    # -- lanes -----------------------------------------------------------------------------------------------------

    async def _take_lanes(self) -> None:
        """Own a lane, and check from time to time for lanes of dead relays."""
        has_own = any(lane.is_own for lane in self._lanes)
        if has_own and time.monotonic() < self._rescue_at:
            return
        self._rescue_at = time.monotonic() + self._lease / 3
        ours = {lane.name for lane in self._lanes}
        free = await self._store.free_lanes(self._owner, _now_ms() - round(self._lease * 1000))
        for lane in sorted(free, key=lambda lane: (lane.owner != self._owner, lane.name)):
            if lane.name not in ours and (lane.has_rows or not has_own):
                has_own |= await self._take(lane, is_own=not has_own)
        if not has_own:
            name, epoch = uuid.uuid4().hex, next_epoch(0)
            await self._store.add_lane(name, self._owner, epoch, _now_ms())
            self._lanes.append(_Lane(name, True, epoch, epoch, {}))

    async def _take(self, lane: FreeLane, is_own: bool) -> bool:
        epoch = next_epoch(lane.epoch)
        if not await self._store.take(lane, self._owner, epoch, _now_ms()):
            return False
        rows = await self._store.held(lane.name)
        if not is_own:
            log.info("adopted the rows of a dead relay", lane=lane.name)
        self._lanes.append(_Lane(lane.name, is_own, epoch, epoch, _groups(rows, tried=True)))
        return True

    def _forget(self) -> None:
        """Read lanes and rows from the database again, after an error."""
        self._lanes.clear()
        self._rescue_at = 0.0

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()


def _groups(rows: list[Row], tried: bool) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for row in rows:
        groups.setdefault(row.topic, Group(row.topic, [], tried)).rows.append(row)
    return groups


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _store_of(database: Any) -> OutboxStore:
    if hasattr(database, "free_lanes"):
        store: OutboxStore = database
        return store
    from heapline.outbox.sql import SqlStore

    return SqlStore(database)


# -- a relay as a process ----------------------------------------------------------------------------------------------

#: Seconds that a call may take. Well below the relay's lease, so that a relay keeps its lanes while its server is
#: unavailable, and stops soon after a signal.
DEADLINE = 10.0


def broker_of(to: str | None, data: str | os.PathLike[str] | None, key_file: str | os.PathLike[str] | None) -> Any:
    """Return a broker to enter: a server, given or named by the environment, or a directory that this process opens."""
    from heapline.client.connect import connect_from_env  # not needed by programs that only write rows

    if data is None:
        return connect_from_env(url=to, key_file=key_file, deadline=DEADLINE)
    if to is not None:
        raise BadRequest("give a server or a data directory, not both")
    from heapline import open as open_directory

    return open_directory(data)


async def serve(
    database: Any,
    *,
    to: str | None = None,
    data: str | os.PathLike[str] | None = None,
    key_file: str | os.PathLike[str] | None = None,
    once: bool = False,
    **settings: Any,
) -> int:
    """Relay until SIGTERM or SIGINT, or once. Return how many rows were relayed."""
    async with broker_of(to, data, key_file) as broker, OutboxRelay(database, broker, **settings) as relay:
        if once:
            await relay.run_once()
            return relay.relayed
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, relay.stop)
        await relay.turn()  # a database without tables raises now instead of being retried
        await relay.run()
        return relay.relayed
