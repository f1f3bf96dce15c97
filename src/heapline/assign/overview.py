"""An observer's view of a worker pool: workers, leader, who holds what, and what has moved.

It is built from one listing of the store, so it may be stale, and nothing may be decided by it. A worker shown as live
may have just crashed, and partitions shown as held are those that the document grants.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from heapline.assign.assignment import ASSIGNMENT_KEY, NO_WORKER, Document
from heapline.assign.election import LEADER_KEY, LeaderRecord
from heapline.assign.kv import Entry, decode_record
from heapline.assign.worker_ids import WORKER_PREFIX, Standing, WorkerRecord
from heapline.contract.errors import HeaplineError


@dataclass(slots=True)
class WorkerView:
    """One worker."""

    worker: str
    standing: str = "gone"  # live, released, ended, barred; gone = its key is missing
    leads: bool = False
    revision: int = 0  # revision of its key; rises with every heartbeat
    confirmed: int = 0
    held_count: int = 0  # as reported by the worker
    weight: int = 0  # weight of the partitions that the document grants it
    partitions: list[str] = field(default_factory=list)  # granted to its current session
    leaving: list[str] = field(default_factory=list)  # revoked, not confirmed yet
    coming: list[str] = field(default_factory=list)  # planned for it, not granted yet


@dataclass(slots=True)
class Overview:
    """The worker pool at one time."""

    version: int = 0
    epoch: int = 0
    lifecycle: str = ""
    leader: str = ""
    partition_count: int = 0
    unheld: list[str] = field(default_factory=list)  # not granted to any live worker
    workers: list[WorkerView] = field(default_factory=list)
    holders: dict[str, tuple[str, int]] = field(default_factory=dict)  # partition: (worker, fence)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["holders"] = {id: {"worker": worker, "fence": fence} for id, (worker, fence) in self.holders.items()}
        return found


@dataclass(frozen=True, slots=True)
class Move:
    """A partition that changed its holder."""

    partition: str
    source: str  # "" = none
    target: str
    fence: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the pool, and what changed since the previous one."""

    seen: Overview | None  # None if the store did not answer
    moved: list[Move]
    trouble: str = ""


def overview(entries: Iterable[Entry]) -> Overview:
    """Build an overview from all entries of the store."""
    found = Overview()
    seats: dict[str, WorkerView] = {}
    sessions: dict[str, str] = {}
    document: Document | None = None
    leader: LeaderRecord | None = None
    for entry in entries:
        if entry.key == ASSIGNMENT_KEY:
            document = _document(entry.value)
        elif entry.key == LEADER_KEY:
            leader = decode_record(entry.value, LeaderRecord)
        elif entry.key.startswith(WORKER_PREFIX) and (record := decode_record(entry.value, WorkerRecord)) is not None:
            worker = entry.key.removeprefix(WORKER_PREFIX)
            seats[worker] = WorkerView(
                worker, str(record.standing), False, entry.revision, record.confirmed, record.held
            )
            sessions[worker] = record.session if record.standing is Standing.LIVE else ""
    if leader is not None and not leader.released:
        found.leader = leader.worker
        seats.setdefault(leader.worker, WorkerView(leader.worker)).leads = True
    if document is not None:
        _read(found, document, seats, sessions)
    found.workers = sorted(seats.values(), key=lambda seat: _natural(seat.worker))
    return found


def moves(before: Overview, after: Overview) -> list[Move]:
    """Return the grants that changed or were removed between two overviews."""
    changed = sorted(id for id, now in after.holders.items() if before.holders.get(id) != now)
    gone = sorted(before.holders.keys() - after.holders.keys())
    return [
        *(Move(id, before.holders.get(id, ("", 0))[0], *after.holders[id]) for id in changed),
        *(Move(id, before.holders[id][0], "", 0) for id in gone),
    ]


def _read(found: Overview, document: Document, seats: dict[str, WorkerView], sessions: dict[str, str]) -> None:
    found.version, found.epoch, found.lifecycle = document.version, document.epoch, str(document.lifecycle)
    for worker in document.members:
        seats.setdefault(worker, WorkerView(worker))
    for i, id in enumerate(document.ids):
        target = "" if document.targets[i] == NO_WORKER else document.workers[document.targets[i]]
        holder = None if document.holders[i] == NO_WORKER else document.sessions[document.holders[i]]
        found.partition_count += target != ""
        is_there = holder is not None and sessions.get(holder.worker) == holder.session
        if holder is not None and is_there and not document.revoked[i]:
            seat = seats[holder.worker]
            seat.partitions.append(id)
            seat.weight += document.weights[i]
            found.holders[id] = (holder.worker, document.fences[i])
            continue
        if holder is not None and is_there:
            seats[holder.worker].leaving.append(id)
        if target:
            found.unheld.append(id)
            seats.setdefault(target, WorkerView(target)).coming.append(id)


def _document(value: bytes) -> Document | None:
    try:
        return Document.decode(value)
    except (HeaplineError, msgspec.DecodeError, zlib.error):
        return None  # possibly of a newer version; the workers can still be shown


def _natural(worker: str) -> tuple[str, int, str]:
    """Return a sort key that puts worker-2 before worker-10."""
    prefix, _, number = worker.rpartition("-")
    return (prefix, int(number), worker) if number.isdecimal() else (worker, -1, worker)
