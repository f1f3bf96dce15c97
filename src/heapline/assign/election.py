"""Who leads: the contract of an election agent, and the agent that needs nothing but the key-value store.

To lead is only to be the one who plans; two who believe to lead do no harm, because what they write is serialised by
compare-and-set and rests on facts (document.py). So an agent may be wrong for a while, and any will do.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from heapline.assign.errors import ElectionFailed
from heapline.assign.kv import KV, Conflict, Entry
from heapline.assign.leases import GUARD
from heapline.assign.records import LEADER_KEY, LeaderRecord, decode, encode


class ElectionAgent(Protocol):
    """One worker's side of an election. Durations are in seconds."""

    async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
        """Try to lead for so long; whether that worked. Raises if nobody can say."""
        ...

    async def renew_leadership(self) -> None:
        """Lead for another lease; raises if that is over."""
        ...

    async def release_leadership(self) -> None: ...

    async def is_leader(self) -> bool: ...


@runtime_checkable
class NumberedElection(Protocol):
    """An agent that numbers its leaders: `epoch` rises with every one. Without it a leader counts on from the last
    document."""

    @property
    def epoch(self) -> int: ...

    def stay_above(self, epoch: int) -> None:
        """An epoch that was used already: the next one must be higher."""
        ...


class KVElection:
    """A lease on the key `leader`, renewed by compare-and-set, given up by the holder's own clock before anybody takes
    it: others must have seen the same revision for a full lease. The key never expires, so that epochs never fall."""

    def __init__(self, kv: KV, clock: Callable[[], float] = time.monotonic, token: str | None = None) -> None:
        self._kv, self._clock = kv, clock
        self._token = token or secrets.token_hex(8)
        self._worker = ""
        self._lease = 0.0
        self._floor = 0
        self._epoch = 0
        self._beats = 0
        self._revision = 0  # of our own record, while we lead
        self._until = float("-inf")
        self._seen: tuple[int, float] = (0, 0.0)  # the highest revision seen, and when first
        self._past: tuple[int, float] = (0, 0.0)  # the same of the last reading that was older than that

    @property
    def epoch(self) -> int:
        return self._epoch

    def stay_above(self, epoch: int) -> None:
        self._floor = max(self._floor, epoch)

    async def is_leader(self) -> bool:
        return self._clock() < self._until

    async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
        self._worker, self._lease = worker_id, lease_duration
        entry = await self._kv.get(LEADER_KEY)
        if entry is not None and not self._is_free(entry):
            return False
        sent_at = self._clock()
        record = None if entry is None else decode(entry.value, LeaderRecord)
        self._epoch = max(self._floor, record.epoch if record is not None else 0) + 1
        try:
            if entry is None:
                revision = await self._kv.create(LEADER_KEY, self._record())
            else:
                revision = await self._kv.update(LEADER_KEY, self._record(), entry.revision)
        except Conflict:
            return False
        self._won(revision, sent_at)
        return True

    def _is_free(self, entry: Entry) -> bool:
        now = self._clock()
        if entry.revision > self._seen[0]:
            self._seen = (entry.revision, now)
        if entry.revision < self._seen[0]:
            # A reading from the past; but if it stays so, the store was made anew. Trying costs nothing.
            if entry.revision != self._past[0]:
                self._past = (entry.revision, now)
            return now >= self._past[1] + self._lease
        record = decode(entry.value, LeaderRecord)
        if record is None or record.released or record.session == self._token:
            return True  # our own: a write of ours that was not answered
        return now >= self._seen[1] + self._lease

    async def renew_leadership(self) -> None:
        if self._clock() >= self._until:
            raise ElectionFailed("the lease ended before it was renewed")
        try:
            await self._renew()
        except Conflict:
            if not await self._find_own():
                self._until = float("-inf")
                raise ElectionFailed("somebody else leads") from None
            await self._renew()

    async def _renew(self) -> None:
        sent_at = self._clock()
        self._beats += 1
        self._won(await self._kv.update(LEADER_KEY, self._record(), self._revision), sent_at)

    async def _find_own(self) -> bool:
        """After a write that was not answered: our record may stand at a revision that we do not know."""
        entry = await self._kv.get(LEADER_KEY)
        record = None if entry is None else decode(entry.value, LeaderRecord)
        if entry is None or record is None or record.session != self._token or entry.revision <= self._revision:
            return False
        self._revision = entry.revision
        return True

    async def release_leadership(self) -> None:
        leads, self._until = self._clock() < self._until, float("-inf")
        if leads:
            with contextlib.suppress(Conflict):  # somebody else leads already
                await self._kv.update(LEADER_KEY, self._record(released=True), self._revision)

    def _won(self, revision: int, sent_at: float) -> None:
        self._revision = revision
        self._until = sent_at + self._lease * (1 - GUARD)

    def _record(self, released: bool = False) -> bytes:
        return encode(
            LeaderRecord(
                worker=self._worker, session=self._token, epoch=self._epoch, beats=self._beats, released=released
            )
        )
