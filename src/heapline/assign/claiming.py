"""Taking a worker id by compare-and-set: the one that was released last, or else the first that is free. So a worker
that is restarted gets the place that is being kept for it, also if lower ids are free. One pass over all ids; whoever
calls it waits and tries again.

Free is an id whose key is not there, was released, or was ended by a leader at least `worker_id_ttl` ago as we saw it:
until then it is kept for the worker that was cut off. That one takes its own id back at once, as a new session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from heapline.assign.config import Config
from heapline.assign.kv import KV, Conflict, Entry
from heapline.assign.records import WORKER_PREFIX, Standing, WorkerRecord, decode, encode, worker_key


@dataclass(frozen=True, slots=True)
class Claim:
    worker: str
    session: str
    revision: int
    sent_at: float  # the moment from which its lease counts
    follows: str


class Claimer:
    """Remembers between passes since when it has seen which tombstone, and which sessions it has tried itself."""

    def __init__(self, kv: KV, config: Config, clock: Callable[[], float], new_session: Callable[[], str]) -> None:
        self._kv, self._config, self._clock, self._new_session = kv, config, clock, new_session
        self._stones: dict[str, tuple[int, float]] = {}  # worker: a tombstone's revision, and when it was seen first
        self._own: set[str] = set()  # sessions of this process, former ones and those of unanswered claims

    async def claim(self, preferred: str | None = None) -> Claim | None:
        """One pass; None if no id is free now. ConnectionLost leaves open whether one was claimed: the next pass
        finds it."""
        found = {entry.key.removeprefix(WORKER_PREFIX): entry for entry in await self._kv.entries(WORKER_PREFIX)}
        if preferred is not None and (claim := await self._try(preferred, found.get(preferred), own=True)) is not None:
            return claim
        ids = sorted(self._config.worker_ids(), key=lambda worker: -_released_at(found.get(worker)))
        for worker in ids:
            if (claim := await self._try(worker, found.get(worker), own=False)) is not None:
                return claim
        return None

    async def _try(self, worker: str, entry: Entry | None, own: bool) -> Claim | None:
        record = None if entry is None else decode(entry.value, WorkerRecord)
        if entry is not None and record is not None and not self._is_free(worker, entry, record, own):
            return None
        over = record is not None and record.standing in (Standing.RELEASED, Standing.ENDED)
        follows = record.session if record is not None and over else ""
        session = self._new_session()
        self._own.add(session)
        value = encode(WorkerRecord(session=session, follows=follows, ttl=float(self._config.heartbeat_ttl)))
        ttl = float(self._config.worker_id_ttl)
        sent_at = self._clock()
        with contextlib.suppress(Conflict):
            if entry is None:
                revision = await self._kv.create(worker_key(worker), value, ttl=ttl)
            else:
                revision = await self._kv.update(worker_key(worker), value, entry.revision, ttl=ttl)
            return Claim(worker, session, revision, sent_at, follows)
        self._own.discard(session)  # it was not carried out, and never will be
        return None

    def _is_free(self, worker: str, entry: Entry, record: WorkerRecord, own: bool) -> bool:
        if record.standing is Standing.RELEASED:
            return True
        if record.standing is Standing.LIVE:
            return record.session in self._own  # nobody else renews it, and we do not either
        revision, seen_at = self._stones.get(worker, (0, 0.0))
        if revision != entry.revision:
            seen_at = self._clock()
            self._stones[worker] = (entry.revision, seen_at)
        return own or self._clock() >= seen_at + self._config.worker_id_ttl


def _released_at(entry: Entry | None) -> int:
    """The revision at which an id was released; 0 if it was not."""
    record = None if entry is None else decode(entry.value, WorkerRecord)
    return entry.revision if entry is not None and record is not None and record.standing is Standing.RELEASED else 0
