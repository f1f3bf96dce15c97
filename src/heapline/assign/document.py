"""The assignment document: who holds what, who shall hold it, and the only steps by which that may change.

A partition moves in two steps. A version *revokes* it: its holder is still named, and drops it. When that holder's
session has confirmed this version or a later one, or has surely ended, a later version *grants* it to the session that
shall have it, with the version's number as its fence. A revocation is never taken back: even the same session is
granted it anew, after its confirmation.

`advance` makes the next version out of facts that cannot become false again (a confirmation, an end). So it does not
matter whether whoever calls it still leads: versions are written by compare-and-set, one after the other.

Above the bytes: one byte FORMAT, then msgpack, compressed. A change of the fields that older readers cannot take is a
new FORMAT byte, and `decode` keeps reading the old one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from heapline.assign.model import Lifecycle, Partition
from heapline.errors import UnknownFormat

FORMAT = b"\x01"
NOBODY = -1


class Session(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    session: str
    revision: int  # of the worker's key, where this session was seen


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Columns: entry i of each list belongs to partition `ids[i]`."""

    version: int
    epoch: int
    writer: str  # the session of the leader who wrote it
    lifecycle: Lifecycle = Lifecycle.COLD_START
    members: dict[str, str] = {}  # workers that the last plan reckoned with, and their sessions
    sessions: list[Session] = []  # all that are named above and below
    workers: list[str] = []
    ids: list[str] = []
    weights: list[int] = []
    targets: list[int] = []  # into workers: who shall hold it; NOBODY = it is to go away
    holders: list[int] = []  # into sessions: who may hold it, or may have not dropped it yet
    fences: list[int] = []  # the version that granted it
    revoked: list[int] = []  # the version that revoked it, or 0

    def encode(self) -> bytes:
        return FORMAT + zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def decode(cls, value: bytes) -> Document:
        if value[:1] != FORMAT:
            raise UnknownFormat("the assignment document", value[0] if value else 0)
        return msgspec.msgpack.decode(zlib.decompress(value[1:]), type=cls)

    def grants(self, worker: str, session: str) -> dict[Partition, int]:
        """What this session may hold, with the fences."""
        mine = next((n for n, s in enumerate(self.sessions) if (s.worker, s.session) == (worker, session)), None)
        if mine is None:
            return {}
        return {
            self.partition(i): self.fences[i]
            for i, holder in enumerate(self.holders)
            if holder == mine and not self.revoked[i]
        }

    def waits_for(self, worker: str, session: str) -> int:
        """The highest version that a leader waits for this session to confirm, or 0."""
        mine = next((n for n, s in enumerate(self.sessions) if (s.worker, s.session) == (worker, session)), None)
        if mine is None:
            return 0
        return max((at for holder, at in zip(self.holders, self.revoked, strict=True) if holder == mine), default=0)

    def partition(self, i: int) -> Partition:
        return Partition(tuple(self.ids[i].split(".")), self.weights[i])

    def partitions(self) -> list[Partition]:
        """Those that are to be assigned."""
        return [self.partition(i) for i, target in enumerate(self.targets) if target != NOBODY]

    def plan(self) -> dict[str, list[Partition]]:
        """Who shall hold what."""
        plan: dict[str, list[Partition]] = {worker: [] for worker in self.members}
        for i, target in enumerate(self.targets):
            if target != NOBODY:
                plan.setdefault(self.workers[target], []).append(self.partition(i))
        return plan


@dataclass(frozen=True, slots=True)
class Plan:
    """A new answer to who shall hold what."""

    targets: Mapping[str, Sequence[Partition]]  # worker: its partitions
    members: Mapping[str, tuple[str, int]]  # worker: session and revision


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the sessions, and stays true."""

    live: Mapping[str, tuple[str, int]]  # worker: session and revision
    is_ended: Callable[[str, str], bool]
    confirmed: Callable[[str, str], int]


@dataclass(slots=True)
class _Row:
    id: str
    weight: int
    target: str | None
    holder: Session | None = None
    fence: int = 0
    revoked: int = 0


def first(epoch: int, writer: str) -> Document:
    return Document(version=1, epoch=epoch, writer=writer)


def advance(
    before: Document, facts: Facts, epoch: int, writer: str, plan: Plan | None = None,
    lifecycle: Lifecycle | None = None,
) -> Document | None:  # fmt: skip
    """The next version, or None if there is nothing to change."""
    version = before.version + 1
    rows = _rows(before, plan)
    members = _members(before, facts, plan)
    changed = plan is not None or members != before.members or (before.epoch, before.writer) != (epoch, writer)
    changed = changed or (lifecycle is not None and lifecycle != before.lifecycle)
    step = _Step(version, facts, members)
    kept = [row for row in rows if step.settle(row)]
    if not (changed or step.changed):
        return None
    sessions = _sessions(before, facts, plan, members, kept)
    return _pack(kept, sessions, members, version, epoch, writer, lifecycle or before.lifecycle)


class _Step:
    """What happens to each partition from one version to the next."""

    def __init__(self, version: int, facts: Facts, members: Mapping[str, str]) -> None:
        self.version = version
        self.changed = False
        self._facts = facts
        self._ended: dict[tuple[str, str], bool] = {}
        self._takers = {
            worker: Session(worker, session, facts.live[worker][1])
            for worker, session in members.items()
            if worker in facts.live and facts.live[worker][0] == session
        }

    def settle(self, row: _Row) -> bool:
        """Change one row as far as the facts allow; False if the partition goes away."""
        taker = self._takers.get(row.target) if row.target is not None else None
        holder = row.holder
        if holder is None:
            return self._give(row, taker)
        ended = self._is_ended(holder)
        if not row.revoked and not ended:
            if row.target != holder.worker:
                row.revoked = self.version
                self.changed = True
            return True  # a former session of the target's itself need not be told: it can only end
        if ended or self._facts.confirmed(holder.worker, holder.session) >= row.revoked:
            if taker is None and row.target is not None and ended:
                return True  # nobody is there to take it, and naming the last holder does no harm
            return self._give(row, taker)
        return True

    def _give(self, row: _Row, taker: Session | None) -> bool:
        if taker is None and row.target is not None and row.holder is None:
            return True
        self.changed = True
        row.holder, row.revoked = taker, 0
        if taker is not None:
            row.fence = self.version
        return row.target is not None

    def _is_ended(self, session: Session) -> bool:
        key = (session.worker, session.session)
        if key not in self._ended:
            self._ended[key] = self._facts.is_ended(*key)
        return self._ended[key]


def _rows(before: Document, plan: Plan | None) -> list[_Row]:
    rows = [
        _Row(id, weight, None if target == NOBODY else before.workers[target],
             None if holder == NOBODY else before.sessions[holder], fence, revoked)
        for id, weight, target, holder, fence, revoked in zip(
            before.ids, before.weights, before.targets, before.holders, before.fences, before.revoked, strict=True)
    ]  # fmt: skip
    if plan is None:
        return rows
    wanted = {partition.id: (worker, partition.weight) for worker, ps in plan.targets.items() for partition in ps}
    for row in rows:
        target, row.weight = wanted.pop(row.id, (None, row.weight))
        row.target = target
    rows += [_Row(id, weight, worker) for id, (worker, weight) in wanted.items()]
    return sorted(rows, key=lambda row: row.id)


def _members(before: Document, facts: Facts, plan: Plan | None) -> dict[str, str]:
    """Without a new plan a worker that came back under its own id takes its own place again, and that is all."""
    if plan is not None:
        return {worker: session for worker, (session, _) in sorted(plan.members.items())}
    return {worker: facts.live.get(worker, (session, 0))[0] for worker, session in before.members.items()}


def _sessions(
    before: Document, facts: Facts, plan: Plan | None, members: Mapping[str, str], rows: list[_Row]
) -> list[Session]:
    """Every session that is named, each with a revision at which it was seen; any such revision says enough."""
    found = {(s.worker, s.session): s for s in before.sessions}
    seen = {**(plan.members if plan is not None else {}), **facts.live}
    for worker, (session, revision) in seen.items():
        found.setdefault((worker, session), Session(worker, session, revision))
    named = {(row.holder.worker, row.holder.session) for row in rows if row.holder is not None} | members.items()
    return [found[key] for key in sorted(named) if key in found]


def _pack(
    rows: list[_Row], sessions: list[Session], members: dict[str, str], version: int, epoch: int, writer: str,
    lifecycle: Lifecycle,
) -> Document:  # fmt: skip
    workers = sorted({row.target for row in rows if row.target is not None})
    number_of = {(s.worker, s.session): n for n, s in enumerate(sessions)}
    place_of = {worker: n for n, worker in enumerate(workers)}
    return Document(
        version=version,
        epoch=epoch,
        writer=writer,
        lifecycle=lifecycle,
        members=members,
        sessions=sessions,
        workers=workers,
        ids=[row.id for row in rows],
        weights=[row.weight for row in rows],
        targets=[NOBODY if row.target is None else place_of[row.target] for row in rows],
        holders=[NOBODY if row.holder is None else number_of[row.holder.worker, row.holder.session] for row in rows],
        fences=[row.fence for row in rows],
        revoked=[row.revoked for row in rows],
    )
