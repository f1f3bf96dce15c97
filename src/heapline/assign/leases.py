"""Two views of a worker's lease: the holder's own, and what a leader may conclude about it. Pure; time is passed in.

**The holder** counts from the moment before it sent the last renewal that was answered, by its own clock, and less
than the full ttl, because clocks differ: `GUARD` covers clocks that drift apart by up to 5 %.

**A leader** never concludes from silence. It times how long it has known a revision; after a full ttl it writes a
tombstone over exactly that revision. If the write succeeds, there was no later renewal, so the holder's own clock has
stopped it. If the key is gone or shows another session at a later revision, the old session cannot renew any more, and
has ended a ttl after the leader learnt that. Readings from the past change nothing: only a higher revision counts.
Workers may be set differently while a setting is rolled out: the ttl is the longer of the holder's and the leader's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from heapline.assign.records import Standing, WorkerRecord

GUARD = 0.05  # of the ttl: how much earlier a holder stops
EARLY = 5 / 6  # of the ttl: when a holder that could not renew begins to stop its partitions, so that hooks can run


class Lease:
    """The holder's own view."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._sent_at = -math.inf

    def renewed(self, sent_at: float) -> None:
        """A renewal that was sent at that moment was carried out."""
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
    """Write over this revision that its session has ended."""

    worker: str
    session: str
    revision: int


@dataclass(frozen=True, slots=True)
class Bar:
    """The key is gone: create it, so that it is proved, and nobody's renewal can follow."""

    worker: str


@dataclass(slots=True)
class _Known:
    record: WorkerRecord
    revision: int
    seen_at: float  # when this revision was seen first
    since: float  # when this standing of this session was seen first
    gone: bool = False  # not in the store any more, as far as listings say, and nobody cares


class Sessions:
    """What a leader knows of all workers' keys since it began to lead."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._known: dict[str, _Known] = {}
        self._floors: dict[str, dict[str, int]] = {}  # worker, session: a revision at which it surely stood there
        self._displaced: dict[tuple[str, str], float] = {}  # since when we know that it cannot renew any more
        self._ended: set[tuple[str, str]] = set()
        self._confirmed: dict[tuple[str, str], int] = {}
        self._ttls: dict[tuple[str, str], float] = {}  # as their holders count
        self._missing: dict[str, float] = {}  # since when listings do not show it
        self._tried: dict[str, float] = {}

    # --- what was seen

    def expect(self, worker: str, session: str, revision: int, now: float, ttl: float = 0.0) -> None:
        """The assignment names this session; it stood in the worker's key at that revision."""
        self._ttls.setdefault((worker, session), ttl)
        floors = self._floors.setdefault(worker, {})
        if session not in floors:
            floors[session] = revision
            if (known := self._known.get(worker)) is not None:
                self._displace(worker, session, known.record, known.revision, now)

    def see(self, worker: str, record: WorkerRecord, revision: int, now: float) -> bool:
        """A worker's key was read or written; whether that says more than that it goes on as it was."""
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
            return  # it is that session itself, or a reading from before it
        if record.follows == session:
            self._ended.add((worker, session))
        self._displaced.setdefault((worker, session), now)

    def listed(self, workers: Collection[str], now: float) -> None:
        """A listing showed these workers' keys and no others."""
        for worker in self._floors.keys() | self._known.keys():
            if worker in workers:
                self._missing.pop(worker, None)
            else:
                self._missing.setdefault(worker, now)

    # --- what follows from it

    def is_ended(self, worker: str, session: str, now: float) -> bool:
        if (worker, session) in self._ended:
            return True
        displaced = self._displaced.get((worker, session))
        return displaced is not None and now >= displaced + self._wait(worker, session)

    def ttl(self, worker: str, session: str) -> float:
        """How long its holder counts on a renewal; 0 if that is not known."""
        return self._ttls.get((worker, session), 0.0)

    def _wait(self, worker: str, session: str) -> float:
        """How long after its last renewal its lease has surely ended."""
        return max(self._ttl, self.ttl(worker, session))

    def confirmed(self, worker: str, session: str) -> int:
        return self._confirmed.get((worker, session), 0)

    def live(self) -> dict[str, tuple[str, int]]:
        """Workers that are there, as far as anybody can know: session and revision."""
        return {
            worker: (known.record.session, known.revision)
            for worker, known in self._known.items()
            if known.record.standing is Standing.LIVE and not known.gone
        }

    def released_at(self, worker: str) -> float | None:
        """Since when it is known that this worker has stopped in good order and has not come back."""
        known = self._known.get(worker)
        return known.since if known is not None and known.record.standing is Standing.RELEASED else None

    def refreshes(self) -> dict[tuple[str, str], int]:
        return {(worker, known.record.session): known.record.refreshes for worker, known in self._known.items()}

    def due(self, now: float) -> list[Tombstone | Bar]:
        """What has to be written now to end leases that seem to be over."""
        doing: list[Tombstone | Bar] = []
        for worker in list(self._floors):
            if self._again_at(worker) <= now and (one := self._due(worker, now)) is not None:
                self._tried[worker] = now
                doing.append(one)
        return doing

    def _due(self, worker: str, now: float) -> Tombstone | Bar | None:
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
        return known.seen_at + self._wait(worker, known.record.session)

    def _again_at(self, worker: str) -> float:
        return self._tried.get(worker, -math.inf) + self._ttl / 6

    def _is_open(self, worker: str, session: str) -> bool:
        return (worker, session) not in self._ended and (worker, session) not in self._displaced

    def next_at(self, now: float) -> float:
        """When time alone will change something; what is due already, and was tried, is tried again after a while."""
        moments = [at + self._wait(*key) for key, at in self._displaced.items() if key not in self._ended]
        for worker, floors in self._floors.items():
            known = self._known.get(worker)
            at = math.inf if known is None else self._silent_until(known, worker)
            if (known is not None and not known.gone) or any(self._is_open(worker, session) for session in floors):
                at = min(at, self._missing_until(worker))
            moments.append(max(at, self._again_at(worker)))
        return min((moment for moment in moments if moment > now), default=math.inf)

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
