"""What a crowd looks like to somebody who only looks: workers, leader, who holds what, and what has moved.

Made from one listing of the store, so it may show the past. It decides nothing, and nobody decides by it: a worker
that is shown as live may have crashed a moment ago, and what is shown as held is what the document grants.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from heapline.assign.document import NOBODY, Document
from heapline.assign.kv import Entry
from heapline.assign.records import (
    ASSIGNMENT_KEY,
    LEADER_KEY,
    WORKER_PREFIX,
    LeaderRecord,
    Standing,
    WorkerRecord,
    decode,
)
from heapline.errors import HeaplineError


@dataclass(slots=True)
class Seat:
    """One worker."""

    worker: str
    standing: str = "gone"  # live, released, ended, barred; gone = its key is not there
    leads: bool = False
    revision: int = 0  # of its key: rises with every heartbeat
    confirmed: int = 0
    held_count: int = 0  # as it says itself
    weight: int = 0  # of what the document grants it
    partitions: list[str] = field(default_factory=list)  # granted to its present session
    leaving: list[str] = field(default_factory=list)  # revoked, and not confirmed yet
    coming: list[str] = field(default_factory=list)  # meant for it, and not granted yet


@dataclass(slots=True)
class Overview:
    version: int = 0
    epoch: int = 0
    lifecycle: str = ""
    leader: str = ""
    partition_count: int = 0
    unheld: list[str] = field(default_factory=list)  # granted to nobody who is there
    workers: list[Seat] = field(default_factory=list)
    holders: dict[str, tuple[str, int]] = field(default_factory=dict)  # partition: worker and fence

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["holders"] = {id: {"worker": worker, "fence": fence} for id, (worker, fence) in self.holders.items()}
        return found


@dataclass(frozen=True, slots=True)
class Move:
    partition: str
    source: str  # "" = nobody
    target: str
    fence: int


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the crowd, and what has changed since the one before."""

    seen: Overview | None  # None = the store did not answer
    moved: list[Move]
    trouble: str = ""


def overview(entries: Iterable[Entry]) -> Overview:
    """Of all keys of the store."""
    found = Overview()
    seats: dict[str, Seat] = {}
    sessions: dict[str, str] = {}
    document: Document | None = None
    leader: LeaderRecord | None = None
    for entry in entries:
        if entry.key == ASSIGNMENT_KEY:
            document = _document(entry.value)
        elif entry.key == LEADER_KEY:
            leader = decode(entry.value, LeaderRecord)
        elif entry.key.startswith(WORKER_PREFIX) and (record := decode(entry.value, WorkerRecord)) is not None:
            worker = entry.key.removeprefix(WORKER_PREFIX)
            seats[worker] = Seat(
                worker, str(record.standing), False, entry.revision, record.confirmed, record.held
            )  # fmt: skip
            sessions[worker] = record.session if record.standing is Standing.LIVE else ""
    if leader is not None and not leader.released:
        found.leader = leader.worker
        seats.setdefault(leader.worker, Seat(leader.worker)).leads = True
    if document is not None:
        _read(found, document, seats, sessions)
    found.workers = sorted(seats.values(), key=lambda seat: _natural(seat.worker))
    return found


def moves(before: Overview, after: Overview) -> list[Move]:
    """What was granted, or went away, between two looks."""
    changed = sorted(id for id, now in after.holders.items() if before.holders.get(id) != now)
    gone = sorted(before.holders.keys() - after.holders.keys())
    return [
        *(Move(id, before.holders.get(id, ("", 0))[0], *after.holders[id]) for id in changed),
        *(Move(id, before.holders[id][0], "", 0) for id in gone),
    ]


def _read(found: Overview, document: Document, seats: dict[str, Seat], sessions: dict[str, str]) -> None:
    found.version, found.epoch, found.lifecycle = document.version, document.epoch, str(document.lifecycle)
    for worker in document.members:
        seats.setdefault(worker, Seat(worker))
    for i, id in enumerate(document.ids):
        target = "" if document.targets[i] == NOBODY else document.workers[document.targets[i]]
        holder = None if document.holders[i] == NOBODY else document.sessions[document.holders[i]]
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
            seats.setdefault(target, Seat(target)).coming.append(id)


def _document(value: bytes) -> Document | None:
    try:
        return Document.decode(value)
    except (HeaplineError, msgspec.DecodeError, zlib.error):
        return None  # of a newer version than ours, perhaps; the workers can still be shown


def _natural(worker: str) -> tuple[str, int, str]:
    """worker-2 stands before worker-10."""
    prefix, _, number = worker.rpartition("-")
    return (prefix, int(number), worker) if number.isdecimal() else (worker, -1, worker)
