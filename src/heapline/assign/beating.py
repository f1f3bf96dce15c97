"""A session's heartbeat: renewing its key by compare-and-set, and finding out when somebody has ended it.

A renewal that is not answered counts as not made, but may have been carried out: then the key stands at a revision
that we do not know. It is read again; as long as it names our session we go on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from heapline.assign.claiming import Claim
from heapline.assign.config import Config
from heapline.assign.errors import ConnectionLost
from heapline.assign.heeding import heeding
from heapline.assign.kv import KV, Conflict, Entry
from heapline.assign.member import Member
from heapline.assign.records import Standing, WorkerRecord, decode, encode, worker_key
from heapline.logs import Log

log = Log("heapline.assign")

T = TypeVar("T")


class SessionLost(Exception):
    """A leader, or time, has ended our session."""


async def within(seconds: float, operation: Awaitable[T]) -> T:
    """An operation on the store with a deadline; after that its outcome is unknown."""
    try:
        async with asyncio.timeout(seconds):
            return await heeding(operation)
    except TimeoutError:
        raise ConnectionLost(f"no answer within {seconds:g} s") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectionLost("it was given up from within") from None


def is_cancelled() -> bool:
    """Whether it is our own task that shall end. Else a CancelledError came out of what we waited for (somebody's task
    that was cancelled, a connection that was closed), and would end our task without a word."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def patience(config: Config) -> float:
    """How long an operation may take whose lateness could end a lease: no longer than leaves time for another."""
    return min(float(config.operation_timeout), max(float(config.heartbeat_interval), config.heartbeat_ttl / 4))


class Heart:
    def __init__(self, kv: KV, config: Config, clock: Callable[[], float], member: Member, claim: Claim) -> None:
        self._kv, self._config, self._clock, self._member = kv, config, clock, member
        self._key, self._follows = worker_key(claim.worker), claim.follows
        self._revision = claim.revision
        self._in_doubt = False  # a write was sent whose outcome is unknown
        self._is_released = False
        self._beats = 0
        self._lock = asyncio.Lock()
        self.confirmed = 0  # as it stands in our key
        self.refreshes = 0
        self.refreshes_written = 0
        member.lease.renewed(claim.sent_at)

    async def release(self) -> None:
        """Say that this session has dropped everything and will hold nothing any more."""
        self._is_released = True
        while True:
            try:
                if await self._write(Standing.RELEASED) is not None:
                    return
            except SessionLost:
                raise
            except Exception as error:
                log.warning("assign.not_released", error=type(error).__name__, detail=str(error))
            await asyncio.sleep(self._config.heartbeat_ttl / 100)

    async def beat(self) -> Entry | None:
        """Renew once: our key as written, or None if it has to be tried again. Raises ConnectionLost, SessionLost."""
        return await self._write(Standing.LIVE)

    async def _write(self, standing: Standing) -> Entry | None:
        async with self._lock:
            if self._is_released and standing is Standing.LIVE:
                return None
            doubted, self._in_doubt = self._in_doubt, True
            record = self._record(standing)
            value = encode(record)
            sent_at = self._clock()
            try:
                self._revision = await within(
                    patience(self._config),
                    self._kv.update(self._key, value, self._revision, ttl=float(self._config.worker_id_ttl)),
                )
            except Conflict:
                self._in_doubt = doubted
                if not doubted:
                    raise SessionLost from None
                await self._read_again()
                return None
            self._in_doubt = False  # whatever was sent before expects an older revision
            self._member.lease.renewed(sent_at)
            self.confirmed, self.refreshes_written = record.confirmed, record.refreshes
            return Entry(self._key, value, self._revision)

    def _record(self, standing: Standing) -> WorkerRecord:
        self._beats += 1
        return WorkerRecord(
            session=self._member.session,
            standing=standing,
            confirmed=self._member.confirmable(),
            beats=self._beats,
            held=len(self._member.held),
            refreshes=self.refreshes,
            ttl=float(self._config.heartbeat_ttl),
            follows=self._follows,
        )

    async def _read_again(self) -> None:
        entry = await within(patience(self._config), self._kv.get(self._key))
        if entry is None:
            if self._clock() >= self._member.lease.ends_at:
                raise SessionLost  # it may be a reading from the past, but by now we hold nothing anyway
            return
        record = decode(entry.value, WorkerRecord)
        if entry.revision < self._revision:
            return  # a reading from the past
        if record is None or record.session != self._member.session or record.standing is not Standing.LIVE:
            raise SessionLost
        self._revision = entry.revision
