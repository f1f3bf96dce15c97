"""The rules of `heapline.assign` with one taken away each: every one of them must make a checker complain.

A rule whose loss nobody notices is either not needed or not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from heapline.assign import document, leases
from heapline.assign.beating import Heart
from heapline.assign.directing import Director
from heapline.assign.document import Document
from heapline.assign.kv import Entry
from heapline.assign.leases import Lease, Sessions, Tombstone
from heapline.assign.lookout import Lookout
from heapline.assign.manager import Manager
from heapline.assign.member import Member
from heapline.assign.records import Standing, WorkerRecord


@contextmanager
def ends_leases_by_silence() -> Iterator[None]:
    """A leader takes a lease for ended when it has seen no renewal, without a tombstone by compare-and-set."""

    async def bury(self: Director, stone: Tombstone) -> None:
        record = WorkerRecord(session=stone.session, standing=Standing.ENDED)
        self.leading.sessions.see(stone.worker, record, stone.revision + 1, self._clock())

    with patch.object(Director, "_bury", bury):
        yield


@contextmanager
def confirms_before_the_hook() -> Iterator[None]:
    """A worker confirms a version as soon as it has seen it."""
    with patch.object(Member, "confirmable", lambda self: self.version):
        yield


@contextmanager
def counts_its_lease_from_the_answer() -> Iterator[None]:
    """The holder counts from when it heard of the renewal, not from before it sent it."""
    original = Heart._write

    async def write(self: Heart, standing: Standing) -> Any:
        entry = await original(self, standing)
        if entry is not None:
            self._member.lease.renewed(self._clock())
        return entry

    with patch.object(Heart, "_write", write):
        yield


@contextmanager
def grants_without_confirmation() -> Iterator[None]:
    """A leader grants what it has revoked without waiting for anybody."""
    original = document._Known.__init__

    def init(self: document._Known, *args: Any) -> None:
        original(self, *args)
        self.confirmed = [1 << 60] * len(self.confirmed)

    with patch.object(document._Known, "__init__", init):
        yield


@contextmanager
def goes_back_to_older_documents() -> Iterator[None]:
    """A worker believes whatever document it has read last."""
    feed = Lookout.feed

    def feed_anything(self: Lookout, entry: Entry) -> None:
        self._newest = (0, None)
        feed(self, entry)

    def see(self: Member, read: Document) -> bool:
        if read.version == self.version:
            return False
        self.document = read
        self._grants = read.grants(self.worker, self.session)
        self._awaited = read.waits_for(self.worker, self.session)
        return True

    with patch.object(Member, "see", see), patch.object(Lookout, "feed", feed_anything):
        yield


@contextmanager
def ignores_its_own_clock() -> Iterator[None]:
    """A worker holds until it hears that its session has ended."""
    with patch.object(Lease, "ends_at", property(lambda self: float("inf"))):
        yield


@contextmanager
def leaves_no_guard_for_drift() -> Iterator[None]:
    """The holder uses its lease to the last moment by its own clock, which may be slow."""
    with patch.object(leases, "GUARD", -0.05):
        yield


@contextmanager
def grants_to_workers_not_sessions() -> Iterator[None]:
    """Whoever has the id takes what was granted to an earlier session of it."""
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
    """A worker that stops gives back its id while its hooks still run."""
    original = Manager._shut_down

    async def shut_down(self: Manager, seconds: float) -> None:
        await self._release()
        await original(self, seconds)

    with patch.object(Manager, "_shut_down", shut_down):
        yield


@contextmanager
def trusts_a_gone_key() -> Iterator[None]:
    """A session whose key is not in a listing has ended."""
    original = Sessions.listed

    def listed(self: Sessions, workers: Any, now: float) -> None:
        original(self, workers, now)
        for worker in self._missing.keys() & self._known.keys():
            self._ended.update((worker, session) for session in self._floors.get(worker, ()))
            self._known[worker].gone = True

    with patch.object(Sessions, "listed", listed):
        yield


@contextmanager
def counts_everybodys_lease_by_its_own_setting() -> Iterator[None]:
    """A leader ends leases after its own ttl, whatever their holders were set to."""
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
