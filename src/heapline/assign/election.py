"""Leader election: the `ElectionAgent` protocol, and an agent that needs only the key-value store.

The leader is merely the worker that plans. Two workers that both believe they lead do no harm, because their writes are
serialized by compare-and-set and rest on facts (assignment.py). So an agent may be wrong for a while, and any agent
will do.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from heapline.assign.errors import ElectionFailed
from heapline.assign.kv import KV, Conflict, Entry, decode_record, encode_record
from heapline.assign.leases import GUARD
from heapline.contract.check import describe_types

LEADER_KEY = "leader"


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `leader`: which worker leads."""

    worker: str
    session: str
    epoch: int  # rises with every term
    beats: int = 0
    released: bool = False


describe_types(LeaderRecord)


class ElectionAgent(Protocol):
    """One worker's side of an election. Durations are in seconds."""

    async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
        """Try to lead for `lease_duration`. Return whether it succeeded. Raise if the outcome is unknown."""
        ...

    async def renew_leadership(self) -> None:
        """Extend the leadership by another lease. Raise if it has ended."""
        ...

    async def release_leadership(self) -> None: ...

    async def is_leader(self) -> bool: ...


@runtime_checkable
class NumberedElection(Protocol):
    """An agent that numbers its leaders: `epoch` rises with every term.

    Without it, a leader continues from the epoch of the last document.
    """

    @property
    def epoch(self) -> int: ...

    def stay_above(self, epoch: int) -> None:
        """Note an epoch that is already in use; the next one must be higher."""
        ...


class KVElection:
    """A lease on the key `leader`, renewed by compare-and-set.

    The leader gives it up by its own clock before another worker can take it: others must have seen the same revision
    for a full lease. The key never expires, so epochs never fall.
    """

    def __init__(self, kv: KV, clock: Callable[[], float] = time.monotonic, token: str | None = None) -> None:
        self._kv, self._clock = kv, clock
        self._token = token or secrets.token_hex(8)
        self._worker = ""
        self._lease = 0.0
        self._floor = 0
        self._epoch = 0
        self._beats = 0
        self._revision = 0  # revision of this worker's record while it leads
        self._until = float("-inf")
        self._seen: tuple[int, float] = (0, 0.0)  # highest revision seen, and when it was first seen
        self._past: tuple[int, float] = (0, 0.0)  # revision of the last stale reading, and when it was first seen

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
        record = None if entry is None else decode_record(entry.value, LeaderRecord)
        self._epoch = max(self._floor, record.epoch if record is not None else 0) + 1
        try:
            if entry is None:
                revision = await self._kv.create(LEADER_KEY, self._record())
            else:
                revision = await self._kv.update(LEADER_KEY, self._record(), entry.revision)
        except Conflict:
            return False
        self._extend_lease(revision, sent_at)
        return True

    def _is_free(self, entry: Entry) -> bool:
        now = self._clock()
        if entry.revision > self._seen[0]:
            self._seen = (entry.revision, now)
        if entry.revision < self._seen[0]:
            # A stale reading. If it persists, the store was recreated. Trying costs nothing.
            if entry.revision != self._past[0]:
                self._past = (entry.revision, now)
            return now >= self._past[1] + self._lease
        record = decode_record(entry.value, LeaderRecord)
        if record is None or record.released or record.session == self._token:
            return True  # its own record means an earlier write of ours was applied without an answer
        return now >= self._seen[1] + self._lease

    async def renew_leadership(self) -> None:
        if self._clock() >= self._until:
            raise ElectionFailed("the lease ended before it was renewed")
        try:
            await self._renew()
        except Conflict:
            if not await self._find_own_record():
                self._until = float("-inf")
                raise ElectionFailed("another worker leads") from None
            await self._renew()

    async def _renew(self) -> None:
        sent_at = self._clock()
        self._beats += 1
        self._extend_lease(await self._kv.update(LEADER_KEY, self._record(), self._revision), sent_at)

    async def _find_own_record(self) -> bool:
        """After an unanswered write, find this worker's record at a revision it does not know yet."""
        entry = await self._kv.get(LEADER_KEY)
        record = None if entry is None else decode_record(entry.value, LeaderRecord)
        if entry is None or record is None or record.session != self._token or entry.revision <= self._revision:
            return False
        self._revision = entry.revision
        return True

    async def release_leadership(self) -> None:
        leads, self._until = self._clock() < self._until, float("-inf")
        if leads:
            with contextlib.suppress(Conflict):  # another worker leads already
                await self._kv.update(LEADER_KEY, self._record(released=True), self._revision)

    def _extend_lease(self, revision: int, sent_at: float) -> None:
        self._revision = revision
        self._until = sent_at + self._lease * (1 - GUARD)

    def _record(self, released: bool = False) -> bytes:
        return encode_record(
            LeaderRecord(
                worker=self._worker, session=self._token, epoch=self._epoch, beats=self._beats, released=released
            )
        )
