"""The assignment document: who holds what, who should hold it, and the only steps by which that may change.

A partition moves in two steps. First a version *revokes* it: the document still names its holder, which drops it. When
that holder's session has confirmed this version or a later one, or has provably ended, a later version *grants* the
partition to its target session, with the version's number as its fence. A revocation is never undone: even the same
session is granted the partition again only after it has confirmed.

`advance` computes the next version from facts that cannot become false again (a confirmation, an ended session). So it
does not matter whether its caller still leads: versions are written one after the other by compare-and-set.

As stored: one byte FORMAT, then compressed msgpack. To change the fields in a way that older readers cannot accept,
use a new FORMAT byte and keep reading the old one in `decode`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from heapline.assign.partitions import Partition
from heapline.contract.errors import UnknownFormat

ASSIGNMENT_KEY = "assignment"
FORMAT = b"\x01"
NO_WORKER = -1
ELSEWHERE = -2  # the index of no worker and of no session
COLUMNS = ("ids", "weights", "targets", "holders", "fences", "revoked")  # fields with one row per partition


class Lifecycle(StrEnum):
    """The pool's phase of starting, as stated in the assignment."""

    COLD_START = "cold_start"  # a first deployment, or a detected restart
    POST_COLD_START = "post_cold_start"  # the first assignment after a cold start
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The partitions that one worker may hold now.

    `fences` maps each partition's id to a number that rises with every grant. Pass it to the systems that the work
    writes to, and have them refuse lower numbers.
    """

    version: int = 0  # version of the document; 0 = none yet
    lifecycle: Lifecycle = Lifecycle.COLD_START
    partitions: tuple[Partition, ...] = ()
    fences: Mapping[str, int] = field(default_factory=dict)

    def fence(self, partition: Partition) -> int:
        return self.fences[partition.id]


class Session(msgspec.Struct, frozen=True, array_like=True):
    """A worker's session as named in the document."""

    worker: str
    session: str
    revision: int  # a revision of the worker's key at which this session was seen
    ttl: float = 0.0  # length of its lease as its holder counts it; 0 = unknown


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The assignment as columns: entry i of each list belongs to partition `ids[i]`."""

    version: int
    epoch: int
    writer: str  # session of the leader that wrote it
    lifecycle: Lifecycle = Lifecycle.COLD_START
    members: dict[str, str] = {}  # workers of the last plan, and their sessions
    sessions: list[Session] = []  # all sessions named in `members` and `holders`
    workers: list[str] = []
    ids: list[str] = []
    weights: list[int] = []
    targets: list[int] = []  # index into workers: the worker that should hold it; NO_WORKER = remove it
    holders: list[int] = []  # index into sessions: the session that may hold it, or may not have dropped it yet
    fences: list[int] = []  # the version that granted it
    revoked: list[int] = []  # the version that revoked it, or 0

    def encode(self) -> bytes:
        return FORMAT + zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def decode(cls, value: bytes) -> Document:
        if value[:1] != FORMAT:
            raise UnknownFormat("the assignment document", value[0] if value else 0)
        return _decode(zlib.decompress(value[1:]))

    def grants(self, worker: str, session: str) -> dict[Partition, int]:
        """Return the partitions that this session may hold, with their fences."""
        index = self._session_index(worker, session)
        return {
            self.partition(i): self.fences[i]
            for i, holder in enumerate(self.holders)
            if holder == index and not self.revoked[i]
        }

    def written_by(self) -> str | None:
        """Return the worker that led when this version was written, if the document names it."""
        return next((worker for worker, session in self.members.items() if session == self.writer), None)

    def waits_for(self, worker: str, session: str) -> int:
        """Return the highest version that a leader waits for this session to confirm, or 0."""
        index = self._session_index(worker, session)
        return max((at for holder, at in zip(self.holders, self.revoked, strict=True) if holder == index), default=0)

    def _session_index(self, worker: str, session: str) -> int:
        """Return the session's index in `sessions`, or ELSEWHERE, which no holder has."""
        keys = ((each.worker, each.session) for each in self.sessions)
        return next((index for index, key in enumerate(keys) if key == (worker, session)), ELSEWHERE)

    def partition(self, i: int) -> Partition:
        return Partition(tuple(self.ids[i].split(".")), self.weights[i])

    def partitions(self) -> list[Partition]:
        """Return the partitions to assign."""
        return [self.partition(i) for i, target in enumerate(self.targets) if target != NO_WORKER]

    def loads(self) -> dict[str, int]:
        """Return the weights of the partitions to assign, by id. Cheaper than `partitions`."""
        columns = zip(self.ids, self.weights, self.targets, strict=True)
        return {id: weight for id, weight, target in columns if target != NO_WORKER}

    def plan(self) -> dict[str, list[Partition]]:
        """Return which worker should hold which partitions."""
        plan: dict[str, list[Partition]] = {worker: [] for worker in self.members}
        for i, target in enumerate(self.targets):
            if target != NO_WORKER:
                plan.setdefault(self.workers[target], []).append(self.partition(i))
        return plan


_decode = msgspec.msgpack.Decoder(Document).decode


@dataclass(frozen=True, slots=True)
class Plan:
    """A new target for every partition."""

    targets: Mapping[str, Sequence[Partition]]  # worker: its partitions
    members: Mapping[str, tuple[str, int]]  # worker: session and revision


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about sessions that stay true once they are."""

    live: Mapping[str, tuple[str, int]]  # worker: session and revision
    is_ended: Callable[[str, str], bool]
    confirmed: Callable[[str, str], int]
    ttl: Callable[[str, str], float] = lambda worker, session: 0.0


def first(epoch: int, writer: str) -> Document:
    """Return the first version, which assigns nothing."""
    return Document(version=1, epoch=epoch, writer=writer)


def advance(
    before: Document,
    facts: Facts,
    epoch: int,
    writer: str,
    plan: Plan | None = None,
    lifecycle: Lifecycle | None = None,
) -> Document | None:
    """Return the next version, or None if nothing changes."""
    members = _members(before, facts, plan)
    lifecycle = lifecycle or before.lifecycle
    table = _Table(before) if plan is None else _table_with_plan(before, plan)
    changed = table.settle(before.version + 1, _Known(before, facts, members, table))
    same = plan is None and members == before.members and lifecycle == before.lifecycle
    if same and not changed and (before.epoch, before.writer) == (epoch, writer):
        return None
    sessions = table.sessions_of(members, _seen(before, facts, plan))
    return Document(
        version=before.version + 1,
        epoch=epoch,
        writer=writer,
        lifecycle=lifecycle,
        members=members,
        sessions=sessions,
        workers=table.workers,
        **{name: getattr(table, name) for name in COLUMNS},
    )


class _Table:
    """The columns while they change. `sessions` names every index in `holders`."""

    def __init__(self, before: Document) -> None:
        self.workers, self.ids, self.weights, self.targets = before.workers, before.ids, before.weights, before.targets
        self.holders, self.fences, self.revoked = list(before.holders), list(before.fences), list(before.revoked)
        self.sessions = [(session.worker, session.session) for session in before.sessions]

    def settle(self, version: int, known: _Known) -> bool:
        """Change every row as far as the facts allow. Return whether any row changed."""
        holders, fences, revoked, at_home, takers = self.holders, self.fences, self.revoked, known.at_home, known.takers
        changed, removed = False, []
        for i, target in enumerate(self.targets):
            holder = holders[i]
            if revoked[i] == 0 and at_home[holder] == target:
                continue  # the usual case: its holder is its target
            taker = takers[target]
            if holder != NO_WORKER and not known.ended[holder]:
                if revoked[i] == 0:
                    # An earlier session of the target worker needs no revocation: it can only end.
                    if known.places[holder] != target:
                        revoked[i], changed = version, True
                    continue
                if known.confirmed[holder] < revoked[i]:
                    continue
            elif taker == NO_WORKER and target != NO_WORKER:
                continue  # its target is not live; naming the last holder does no harm
            changed = True
            holders[i], revoked[i] = taker, 0
            if taker != NO_WORKER:
                fences[i] = version
            elif target == NO_WORKER:
                removed.append(i)
        self._drop(removed)
        return changed

    def _drop(self, removed: list[int]) -> None:
        if removed:
            drop = set(removed)
            for name in COLUMNS:
                setattr(self, name, [value for i, value in enumerate(getattr(self, name)) if i not in drop])

    def sessions_of(self, members: Mapping[str, str], seen: Mapping[tuple[str, str], Session]) -> list[Session]:
        """Keep only sessions that hold something or are members, and renumber them."""
        holding = {self.sessions[holder] for holder in set(self.holders) - {NO_WORKER}}
        named = sorted(holding | members.items())
        number_of = {key: n for n, key in enumerate(named)}
        numbers = [number_of.get(key, NO_WORKER) for key in self.sessions] + [NO_WORKER]
        self.holders = [numbers[holder] for holder in self.holders]
        return [seen[key] for key in named]


class _Known:
    """The facts, by session index and worker index. The last entry of each list stands for NO_WORKER."""

    def __init__(self, before: Document, facts: Facts, members: Mapping[str, str], table: _Table) -> None:
        place_of = {worker: n for n, worker in enumerate(table.workers)}
        number_of = {key: n for n, key in enumerate(table.sessions)}
        self.takers = [NO_WORKER] * (len(table.workers) + 1)
        for worker, session in members.items():
            if worker in place_of and facts.live.get(worker, ("", 0))[0] == session:
                number = number_of.setdefault((worker, session), len(number_of))
                if number == len(table.sessions):
                    table.sessions.append((worker, session))
                self.takers[place_of[worker]] = number
        self.ended = [facts.is_ended(*key) for key in table.sessions]
        self.confirmed = [facts.confirmed(*key) for key in table.sessions]
        self.places = [place_of.get(worker, ELSEWHERE) for worker, _ in table.sessions]
        live = zip(self.places, self.ended, strict=True)
        self.at_home = [*(ELSEWHERE if ended else place for place, ended in live), ELSEWHERE]


def _table_with_plan(before: Document, plan: Plan) -> _Table:
    """Return the columns with the targets of a new plan. A removed partition stays until its holder has dropped it."""
    table = _Table(before)
    table.workers = sorted(worker for worker, partitions in plan.targets.items() if partitions)
    wanted = {p.id: (p.weight, n) for n, worker in enumerate(table.workers) for p in plan.targets[worker]}
    held = {id: i for i, id in enumerate(before.ids)}
    table.ids = sorted(wanted.keys() | held.keys())
    rows = [held.get(id, NO_WORKER) for id in table.ids]
    old = [wanted.get(id) or (before.weights[held[id]], NO_WORKER) for id in table.ids]
    table.weights, table.targets = [weight for weight, _ in old], [target for _, target in old]
    table.holders = [NO_WORKER if row == NO_WORKER else before.holders[row] for row in rows]
    table.fences = [0 if row == NO_WORKER else before.fences[row] for row in rows]
    table.revoked = [0 if row == NO_WORKER else before.revoked[row] for row in rows]
    return table


def _members(before: Document, facts: Facts, plan: Plan | None) -> dict[str, str]:
    """Return the members of the next version.

    Without a new plan, the only change is that a worker that returns under its own id resumes its membership.
    """
    if plan is not None:
        return {worker: session for worker, (session, _) in sorted(plan.members.items())}
    return {worker: facts.live.get(worker, (session, 0))[0] for worker, session in before.members.items()}


def _seen(before: Document, facts: Facts, plan: Plan | None) -> dict[tuple[str, str], Session]:
    """Return each session with a revision at which it was in its worker's key. Any such revision will do."""
    # A plan may name a session that has been succeeded since: both are listed with their own revisions.
    views = [facts.live.items()] if plan is None else [plan.members.items(), facts.live.items()]
    seen = {(w, session): Session(w, session, at, facts.ttl(w, session)) for view in views for w, (session, at) in view}
    return seen | {(session.worker, session.session): session for session in before.sessions}
