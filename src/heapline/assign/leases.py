"""A worker's lease from two sides: the holder's own view, and what a leader may conclude. Pure; time is passed in.

**The holder** counts from just before it sent its last answered renewal, on its own clock, and stops before the full
ttl because clocks differ: `GUARD` covers clocks that drift apart by up to 5 %.

**A leader** never concludes anything from silence. It measures how long it has known a revision. After a full ttl it
writes a tombstone over exactly that revision. If the write succeeds, there was no later renewal, so the holder's own
clock has stopped it. If the key is missing or shows another session at a later revision, the old session cannot renew
any more and ends one ttl after the leader learned of it. Stale readings change nothing: only a higher revision counts.
While a new setting is rolled out, ttls may differ; the longer of the holder's and the leader's counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from heapline.assign.worker_ids import Standing, WorkerRecord

GUARD = 0.05  # share of the ttl by which a holder stops early
# share of the ttl after which a holder that cannot renew starts to drop its partitions, so that hooks can run
EARLY = 5 / 6


class Lease:
    """The holder's own view of its lease."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._sent_at = -math.inf

    def renewed(self, sent_at: float) -> None:
        """Note that a renewal sent at that time was applied."""
        self._sent_at = max(self._sent_at, sent_at)

    def lost(self) -> None:
        self._sent_at = -math.inf
        self._ttl = 0.0

    @property
    def stops_at(self) -> float:
        return self._sent_at + self._ttl * EARLY

    @property
    def ends_at(self) -> float:
        return self._sent_at + self._ttl * (1 - GUARD)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A write to make: mark the session at this revision as ended."""

    worker: str
    session: str
    revision: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A write to make: create the missing key, which proves that it is missing and prevents any renewal."""

    worker: str


@dataclass(slots=True)
class _Known:
    record: WorkerRecord
    revision: int
    seen_at: float  # when this revision was first seen
    since: float  # when this standing of this session was first seen
    gone: bool = False  # missing from the store according to listings, and no longer relevant


class Sessions:
    """A leader's knowledge of all workers' keys since its term began."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._known: dict[str, _Known] = {}
        self._floors: dict[str, dict[str, int]] = {}  # worker, session: a revision at which it was in the key
        self._displaced: dict[tuple[str, str], float] = {}  # since when it is known that it can no longer renew
        self._ended: set[tuple[str, str]] = set()
        self._confirmed: dict[tuple[str, str], int] = {}
        self._ttls: dict[tuple[str, str], float] = {}  # as their holders count them
        self._missing: dict[str, float] = {}  # since when listings do not show the key
        self._tried: dict[str, float] = {}

    # --- observations

    def expect(self, worker: str, session: str, revision: int, now: float, ttl: float = 0.0) -> None:
        """Note that the assignment names this session, which was in the worker's key at that revision."""
        self._ttls.setdefault((worker, session), ttl)
        floors = self._floors.setdefault(worker, {})
        if session not in floors:
            floors[session] = revision
            if (known := self._known.get(worker)) is not None:
                self._displace(worker, session, known.record, known.revision, now)

    def observe(self, worker: str, record: WorkerRecord, revision: int, now: float) -> bool:
        """Note a worker's key as it was read or written. Return whether more changed than a plain renewal."""
        self._missing.pop(worker, None)
        known = self._known.get(worker)
        if known is not None and revision <= known.revision:
            return False
        before = WorkerRecord() if known is None else known.record
        same = (before.session, before.standing) == (record.session, record.standing)
        says_more = not same or (before.confirmed, before.refreshes) != (record.confirmed, record.refreshes)
        self._known[worker] = _Known(record, revision, now, known.since if known is not None and same else now)
        self._tried.pop(worker, None)
        if record.session:
            self._floors.setdefault(worker, {}).setdefault(record.session, revision)
            self._confirmed[worker, record.session] = record.confirmed
            if record.standing is Standing.LIVE:
                self._ttls[worker, record.session] = record.ttl
        if record.standing in (Standing.RELEASED, Standing.ENDED):
            self._ended.add((worker, record.session))
        for session in self._floors.get(worker, ()):
            self._displace(worker, session, record, revision, now)
        return says_more

    def _displace(self, worker: str, session: str, record: WorkerRecord, revision: int, now: float) -> None:
        if record.session == session or revision <= self._floors[worker][session]:
            return  # the session itself, or a reading from before it
        if record.follows == session:
            self._ended.add((worker, session))
        self._displaced.setdefault((worker, session), now)

    def note_listing(self, workers: Collection[str], now: float) -> None:
        """Note that a listing showed these workers' keys and no others."""
        for worker in self._floors.keys() | self._known.keys():
            if worker in workers:
                self._missing.pop(worker, None)
            else:
                self._missing.setdefault(worker, now)

    # --- conclusions

    def is_ended(self, worker: str, session: str, now: float) -> bool:
        if (worker, session) in self._ended:
            return True
        displaced = self._displaced.get((worker, session))
        return displaced is not None and now >= displaced + self._lease_length(worker, session)

    def ttl(self, worker: str, session: str) -> float:
        """Return how long its holder counts on a renewal, or 0 if unknown."""
        return self._ttls.get((worker, session), 0.0)

    def _lease_length(self, worker: str, session: str) -> float:
        """Return how long after its last renewal its lease has certainly ended."""
        return max(self._ttl, self.ttl(worker, session))

    def confirmed(self, worker: str, session: str) -> int:
        return self._confirmed.get((worker, session), 0)

    def live(self) -> dict[str, tuple[str, int]]:
        """Return the live workers as far as is known: session and revision."""
        return {
            worker: (known.record.session, known.revision)
            for worker, known in self._known.items()
            if known.record.standing is Standing.LIVE and not known.gone
        }

    def released_at(self, worker: str) -> float | None:
        """Return since when this worker is known to have stopped cleanly without returning, or None."""
        known = self._known.get(worker)
        return known.since if known is not None and known.record.standing is Standing.RELEASED else None

    def refreshes(self) -> dict[tuple[str, str], int]:
        return {(worker, known.record.session): known.record.refreshes for worker, known in self._known.items()}

    def pending_writes(self, now: float) -> list[Tombstone | Bar]:
        """Return the writes that end leases which appear to be over."""
        writes: list[Tombstone | Bar] = []
        for worker in list(self._floors):
            if self._retry_at(worker) <= now and (write := self._pending_write(worker, now)) is not None:
                self._tried[worker] = now
                writes.append(write)
        return writes

    def _pending_write(self, worker: str, now: float) -> Tombstone | Bar | None:
        known = self._known.get(worker)
        if self._missing_until(worker) <= now:
            if any(self._is_open(worker, session) for session in self._floors[worker]):
                return Bar(worker)
            if known is not None:
                known.gone = True
        elif known is not None and self._silent_until(known, worker) <= now:
            return Tombstone(worker, known.record.session, known.revision)
        return None

    def _missing_until(self, worker: str) -> float:
        return self._missing.get(worker, math.inf) + self._ttl

    def _silent_until(self, known: _Known, worker: str) -> float:
        if known.record.standing is not Standing.LIVE:
            return math.inf
        return known.seen_at + self._lease_length(worker, known.record.session)

    def _retry_at(self, worker: str) -> float:
        return self._tried.get(worker, -math.inf) + self._ttl / 6

    def _is_open(self, worker: str, session: str) -> bool:
        return (worker, session) not in self._ended and (worker, session) not in self._displaced

    def next_deadline(self, now: float) -> float:
        """Return when time alone will change something. A due write that was already tried is retried after a while."""
        times = [at + self._lease_length(*key) for key, at in self._displaced.items() if key not in self._ended]
        for worker, floors in self._floors.items():
            known = self._known.get(worker)
            at = math.inf if known is None else self._silent_until(known, worker)
            if (known is not None and not known.gone) or any(self._is_open(worker, session) for session in floors):
                at = min(at, self._missing_until(worker))
            times.append(max(at, self._retry_at(worker)))
        return min((time_at for time_at in times if time_at > now), default=math.inf)

    def keep_only(self, named: Iterable[tuple[str, str]]) -> None:
        """Forget sessions that neither the assignment names nor a key shows."""
        keep = set(named) | {(worker, known.record.session) for worker, known in self._known.items()}
        for worker, floors in list(self._floors.items()):
            for session in [session for session in floors if (worker, session) not in keep]:
                del floors[session]
                self._ended.discard((worker, session))
                self._displaced.pop((worker, session), None)
                self._confirmed.pop((worker, session), None)
                self._ttls.pop((worker, session), None)
            if not floors:
                del self._floors[worker]
                self._missing.pop(worker, None)
