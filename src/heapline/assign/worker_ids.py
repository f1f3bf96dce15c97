"""Worker ids: the record stored under each id, and the claim of a free id by compare-and-set.

A claim takes the most recently released id, otherwise the first free one. So a restarted worker gets the slot that is
kept for it, even if lower ids are free. A claim is one pass over all ids; the caller waits and tries again.

An id is free if its key does not exist, was released, or was ended by a leader at least `worker_id_ttl` ago as observed
here. Until then it is reserved for the worker that was cut off, which reclaims it immediately as a new session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from heapline.assign.config import Config
from heapline.assign.errors import StableIDExhausted
from heapline.assign.kv import KV, Conflict, Entry, decode_record, encode_record
from heapline.contract.check import describe_types

WORKER_PREFIX = "worker."


class Standing(StrEnum):
    """The standing of a worker's session."""

    LIVE = "live"
    RELEASED = "released"  # stopped after dropping everything; holds nothing
    ENDED = "ended"  # a leader's tombstone, written over the last renewal after the lease ended
    BARRED = "barred"  # written by a leader where the key was missing; an earlier session can no longer renew


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of `worker.<id>`.

    Only its session writes it, by compare-and-set on its last revision; a leader may overwrite it to end the session.
    `confirmed` never falls within a session, so an old reading only delays.
    """

    session: str = ""
    standing: Standing = Standing.LIVE
    confirmed: int = 0  # the session holds nothing that this version of the assignment does not grant it
    beats: int = 0  # number of renewals
    held: int = 0  # number of partitions it holds, for observers
    refreshes: int = 0  # number of partition listings this session has requested
    ttl: float = 0.0  # seconds that its holder counts on a renewal; 0 = unknown
    follows: str = ""  # the previous session of this id, if it had provably ended when this one began


describe_types(WorkerRecord)


def worker_key(worker: str) -> str:
    return WORKER_PREFIX + worker


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed worker id."""

    worker: str
    session: str
    revision: int
    sent_at: float  # the time from which its lease counts
    follows: str


class Claimer:
    """Claims ids. Remembers when each tombstone was first seen, and which sessions this process has tried."""

    def __init__(self, kv: KV, config: Config, clock: Callable[[], float], new_session: Callable[[], str]) -> None:
        self._kv, self._config, self._clock, self._new_session = kv, config, clock, new_session
        # worker: revision of its tombstone, and when it was first seen
        self._tombstones: dict[str, tuple[int, float]] = {}
        self._own: set[str] = set()  # sessions of this process, including earlier ones and unanswered claims

    async def claim(self, preferred: str | None = None) -> Claim | None:
        """Run one pass. Return None if no id is free now. Raise StableIDExhausted if live workers hold all of them.

        After ConnectionLost it is unknown whether an id was claimed; the next pass finds out.
        """
        found = {entry.key.removeprefix(WORKER_PREFIX): entry for entry in await self._kv.entries(WORKER_PREFIX)}
        if (
            preferred is not None
            and (claim := await self._try_claim(preferred, found.get(preferred), is_own=True)) is not None
        ):
            return claim
        ids = sorted(self._config.worker_ids(), key=lambda worker: -_released_at(found.get(worker)))
        for worker in ids:
            if (claim := await self._try_claim(worker, found.get(worker), is_own=False)) is not None:
                return claim
        if all(_is_live(found.get(worker)) for worker in ids):
            names = list(self._config.worker_ids())
            raise StableIDExhausted(names[0], names[-1])
        return None

    async def _try_claim(self, worker: str, entry: Entry | None, is_own: bool) -> Claim | None:
        record = None if entry is None else decode_record(entry.value, WorkerRecord)
        if entry is not None and record is not None and not self._is_free(worker, entry, record, is_own):
            return None
        over = record is not None and record.standing in (Standing.RELEASED, Standing.ENDED)
        follows = record.session if record is not None and over else ""
        session = self._new_session()
        self._own.add(session)
        value = encode_record(WorkerRecord(session=session, follows=follows, ttl=self._config.heartbeat_ttl))
        ttl = self._config.worker_id_ttl
        sent_at = self._clock()
        with contextlib.suppress(Conflict):
            if entry is None:
                revision = await self._kv.create(worker_key(worker), value, ttl=ttl)
            else:
                revision = await self._kv.update(worker_key(worker), value, entry.revision, ttl=ttl)
            return Claim(worker, session, revision, sent_at, follows)
        self._own.discard(session)  # it was not applied and never will be
        return None

    def _is_free(self, worker: str, entry: Entry, record: WorkerRecord, is_own: bool) -> bool:
        if record.standing is Standing.RELEASED:
            return True
        if record.standing is Standing.LIVE:
            return record.session in self._own  # only this process could renew it, and it does not
        revision, seen_at = self._tombstones.get(worker, (0, 0.0))
        if revision != entry.revision:
            seen_at = self._clock()
            self._tombstones[worker] = (entry.revision, seen_at)
        return is_own or self._clock() >= seen_at + self._config.worker_id_ttl


def _is_live(entry: Entry | None) -> bool:
    record = None if entry is None else decode_record(entry.value, WorkerRecord)
    return record is not None and record.standing is Standing.LIVE


def _released_at(entry: Entry | None) -> int:
    """Return the revision at which an id was released, or 0 if it was not."""
    record = None if entry is None else decode_record(entry.value, WorkerRecord)
    return entry.revision if entry is not None and record is not None and record.standing is Standing.RELEASED else 0
