"""The rules of `heapline.assign`, each removed in turn: every mutant must make a checker complain.

A rule whose removal goes unnoticed is either unnecessary or untested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from heapline.assign import assignment, leases
from heapline.assign.assignment import Document
from heapline.assign.heartbeat import Heartbeat
from heapline.assign.kv import Entry
from heapline.assign.leadership import LeaderExecutor
from heapline.assign.leases import Lease, Sessions, Tombstone
from heapline.assign.manager import Manager
from heapline.assign.member import Member
from heapline.assign.watcher import Watcher
from heapline.assign.worker_ids import Standing, WorkerRecord


@contextmanager
def ends_leases_by_silence() -> Iterator[None]:
    """A leader treats a lease as ended when it sees no renewal, without a tombstone by compare-and-set."""

    async def write_tombstone(self: LeaderExecutor, stone: Tombstone) -> None:
        record = WorkerRecord(session=stone.session, standing=Standing.ENDED)
        self.leader.sessions.observe(stone.worker, record, stone.revision + 1, self._clock())

    with patch.object(LeaderExecutor, "_write_tombstone", write_tombstone):
        yield


@contextmanager
def confirms_before_the_hook() -> Iterator[None]:
    """A worker confirms a version as soon as it has seen it."""
    with patch.object(Member, "confirmable", lambda self: self.version):
        yield


@contextmanager
def counts_its_lease_from_the_answer() -> Iterator[None]:
    """The holder counts from receiving the answer to a renewal, not from before sending it."""
    original = Heartbeat._write

    async def write(self: Heartbeat, standing: Standing) -> Any:
        entry = await original(self, standing)
        if entry is not None:
            self._member.lease.renewed(self._clock())
        return entry

    with patch.object(Heartbeat, "_write", write):
        yield


@contextmanager
def grants_without_confirmation() -> Iterator[None]:
    """A leader grants revoked partitions without waiting for a confirmation."""
    original = assignment._Known.__init__

    def init(self: assignment._Known, *args: Any) -> None:
        original(self, *args)
        self.confirmed = [1 << 60] * len(self.confirmed)

    with patch.object(assignment._Known, "__init__", init):
        yield


@contextmanager
def goes_back_to_older_documents() -> Iterator[None]:
    """A worker follows whatever document it read last."""
    original = Watcher.observe

    def observe_anything(self: Watcher, entry: Entry) -> None:
        self._newest = (0, None)
        original(self, entry)

    def observe_any(self: Member, read: Document) -> bool:
        if read.version == self.version:
            return False
        self.document = read
        self._grants = read.grants(self.worker, self.session)
        self._awaited = read.waits_for(self.worker, self.session)
        return True

    with patch.object(Member, "observe", observe_any), patch.object(Watcher, "observe", observe_anything):
        yield


@contextmanager
def ignores_its_own_clock() -> Iterator[None]:
    """A worker holds until it learns that its session has ended."""
    with patch.object(Lease, "ends_at", property(lambda self: float("inf"))):
        yield


@contextmanager
def leaves_no_guard_for_drift() -> Iterator[None]:
    """The holder uses its lease to the end on its own clock, which may be slow."""
    with patch.object(leases, "GUARD", -0.05):
        yield


@contextmanager
def grants_to_workers_not_sessions() -> Iterator[None]:
    """A worker takes what was granted to an earlier session of its id."""
    original = Document.grants

    def grants(self: Document, worker: str, session: str) -> dict[Any, int]:
        found: dict[Any, int] = {}
        for each in self.sessions:
            if each.worker == worker:
                found.update(original(self, worker, each.session))
        return found

    with patch.object(Document, "grants", grants):
        yield


@contextmanager
def releases_before_it_has_dropped() -> Iterator[None]:
    """A stopping worker releases its id while its hooks still run."""
    original = Manager._shut_down

    async def shut_down(self: Manager, seconds: float) -> None:
        await self._release()
        await original(self, seconds)

    with patch.object(Manager, "_shut_down", shut_down):
        yield


@contextmanager
def trusts_a_gone_key() -> Iterator[None]:
    """A leader treats a session as ended if a listing does not show its key."""
    original = Sessions.note_listing

    def listed(self: Sessions, workers: Any, now: float) -> None:
        original(self, workers, now)
        for worker in self._missing.keys() & self._known.keys():
            self._ended.update((worker, session) for session in self._floors.get(worker, ()))
            self._known[worker].gone = True

    with patch.object(Sessions, "note_listing", listed):
        yield


@contextmanager
def counts_everybodys_lease_by_its_own_setting() -> Iterator[None]:
    """A leader ends leases after its own ttl, whatever the holders' settings."""
    with patch.object(Sessions, "ttl", lambda self, worker, session: 0.0):
        yield


Mutant = Callable[[], Any]
MUTANTS: tuple[Mutant, ...] = (
    ends_leases_by_silence,
    confirms_before_the_hook,
    counts_its_lease_from_the_answer,
    grants_without_confirmation,
    goes_back_to_older_documents,
    ignores_its_own_clock,
    leaves_no_guard_for_drift,
    grants_to_workers_not_sessions,
    releases_before_it_has_dropped,
    trusts_a_gone_key,
    counts_everybodys_lease_by_its_own_setting,
)
