"""A session's heartbeat: renew its key by compare-and-set, and detect when another process has ended the session.

A renewal without an answer counts as failed but may have been applied; the key is then at an unknown revision. It is
read again, and as long as it names this session, the session continues from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from heapline.assign.cancellation import within
from heapline.assign.config import Config
from heapline.assign.kv import KV, Conflict, Entry, decode_record, encode_record
from heapline.assign.member import Member
from heapline.assign.worker_ids import Claim, Standing, WorkerRecord, worker_key
from heapline.logs import Log

T = TypeVar("T")


class SessionLost(Exception):
    """A leader, or time, has ended this session."""


class Heartbeat:
    """Renews and releases one session's key."""

    def __init__(
        self, kv: KV, config: Config, clock: Callable[[], float], member: Member, claim: Claim, log: Log
    ) -> None:
        self._kv, self._config, self._clock, self._member, self._log = kv, config, clock, member, log
        self._key, self._follows = worker_key(claim.worker), claim.follows
        self._revision = claim.revision
        self._in_doubt = False  # the outcome of a write is unknown
        self._is_released = False
        self._beats = 0
        self._lock = asyncio.Lock()
        self.confirmed = 0  # the last confirmation written to the key
        self.refreshes = 0
        self.refreshes_written = 0
        member.lease.renewed(claim.sent_at)

    async def release(self) -> None:
        """Record that this session has dropped everything and will hold nothing from now on."""
        self._is_released = True
        while True:
            try:
                if await self._write(Standing.RELEASED) is not None:
                    return
            except SessionLost:
                raise
            except Exception as error:
                self._log.warning("assign.not_released", error=type(error).__name__, detail=str(error))
            await asyncio.sleep(self._config.heartbeat_ttl / 100)

    async def renew(self) -> Entry | None:
        """Renew once. Return the key as written, or None to try again. Raises ConnectionLost and SessionLost."""
        return await self._write(Standing.LIVE)

    async def _write(self, standing: Standing) -> Entry | None:
        async with self._lock:
            if self._is_released and standing is Standing.LIVE:
                return None
            was_in_doubt, self._in_doubt = self._in_doubt, True
            record = self._record(standing)
            value = encode_record(record)
            sent_at = self._clock()
            try:
                self._revision = await within(
                    self._config.store_timeout,
                    self._kv.update(self._key, value, self._revision, ttl=self._config.worker_id_ttl),
                )
            except Conflict:
                self._in_doubt = was_in_doubt
                if not was_in_doubt:
                    raise SessionLost from None
                await self._reread_key()
                return None
            self._in_doubt = False  # any earlier write expects an older revision and will conflict
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
            ttl=self._config.heartbeat_ttl,
            follows=self._follows,
        )

    async def _reread_key(self) -> None:
        entry = await within(self._config.store_timeout, self._kv.get(self._key))
        if entry is None:
            if self._clock() >= self._member.lease.ends_at:
                raise SessionLost  # possibly a stale reading, but the lease is over anyway
            return
        record = decode_record(entry.value, WorkerRecord)
        if entry.revision < self._revision:
            return  # a stale reading
        if record is None or record.session != self._member.session or record.standing is not Standing.LIVE:
            raise SessionLost
        self._revision = entry.revision
