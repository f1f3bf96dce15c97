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
ELSEWHERE = -2  # the number of no worker at all


class Session(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    session: str
    revision: int  # of the worker's key, where this session was seen
    ttl: float = 0.0  # of its lease, as its holder counts it; 0 = not said


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

    def written_by(self) -> str | None:
        """The worker that led when this was written, if it is named here."""
        return next((worker for worker, session in self.members.items() if session == self.writer), None)

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

    def loads(self) -> dict[str, int]:
        """The same by their ids, with their weights; cheaper."""
        columns = zip(self.ids, self.weights, self.targets, strict=True)
        return {id: weight for id, weight, target in columns if target != NOBODY}

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
    ttl: Callable[[str, str], float] = lambda worker, session: 0.0


def first(epoch: int, writer: str) -> Document:
    return Document(version=1, epoch=epoch, writer=writer)


def advance(
    before: Document, facts: Facts, epoch: int, writer: str, plan: Plan | None = None,
    lifecycle: Lifecycle | None = None,
) -> Document | None:  # fmt: skip
    """The next version, or None if there is nothing to change."""
    members = _members(before, facts, plan)
    lifecycle = lifecycle or before.lifecycle
    table = _Table(before) if plan is None else _planned(before, plan)
    changed = table.settle(before.version + 1, _Known(before, facts, members, table))
    same = plan is None and members == before.members and lifecycle == before.lifecycle
    if same and not changed and (before.epoch, before.writer) == (epoch, writer):
        return None
    sessions = table.sessions_of(members, _seen(before, facts, plan))
    return Document(
        version=before.version + 1, epoch=epoch, writer=writer, lifecycle=lifecycle, members=members,
        sessions=sessions, workers=table.workers, ids=table.ids, weights=table.weights, targets=table.targets,
        holders=table.holders, fences=table.fences, revoked=table.revoked,
    )  # fmt: skip


class _Table:
    """The columns, while they change. `sessions` has a name for every number in `holders`."""

    def __init__(self, before: Document) -> None:
        self.workers, self.ids, self.weights, self.targets = before.workers, before.ids, before.weights, before.targets
        self.holders, self.fences, self.revoked = list(before.holders), list(before.fences), list(before.revoked)
        self.sessions = [(session.worker, session.session) for session in before.sessions]

    def settle(self, version: int, known: _Known) -> bool:
        """Change every row as far as the facts allow; whether any was."""
        holders, fences, revoked, at_home, takers = self.holders, self.fences, self.revoked, known.at_home, known.takers
        changed, gone = False, []
        for i, target in enumerate(self.targets):
            holder = holders[i]
            if revoked[i] == 0 and at_home[holder] == target:
                continue  # by far the most: who holds it shall hold it
            taker = takers[target]
            if holder != NOBODY and not known.ended[holder]:
                if revoked[i] == 0:
                    # A former session of the target's itself need not be told: it can only end.
                    if known.places[holder] != target:
                        revoked[i], changed = version, True
                    continue
                if known.confirmed[holder] < revoked[i]:
                    continue
            elif taker == NOBODY and target != NOBODY:
                continue  # nobody is there to take it, and naming the last holder does no harm
            changed = True
            holders[i], revoked[i] = taker, 0
            if taker != NOBODY:
                fences[i] = version
            elif target == NOBODY:
                gone.append(i)
        self._drop(gone)
        return changed

    def _drop(self, gone: list[int]) -> None:
        if gone:
            drop = set(gone)
            for name in ("ids", "weights", "targets", "holders", "fences", "revoked"):
                setattr(self, name, [value for i, value in enumerate(getattr(self, name)) if i not in drop])

    def sessions_of(self, members: Mapping[str, str], seen: Mapping[tuple[str, str], Session]) -> list[Session]:
        """Name only those that hold something or are members, and number them anew."""
        holding = {self.sessions[holder] for holder in set(self.holders) - {NOBODY}}
        named = sorted(holding | members.items())
        number_of = {key: n for n, key in enumerate(named)}
        numbers = [number_of.get(key, NOBODY) for key in self.sessions] + [NOBODY]
        self.holders = [numbers[holder] for holder in self.holders]
        return [seen[key] for key in named]


class _Known:
    """The facts, by the numbers of sessions and of workers. The last entry of each list stands for nobody."""

    def __init__(self, before: Document, facts: Facts, members: Mapping[str, str], table: _Table) -> None:
        place_of = {worker: n for n, worker in enumerate(table.workers)}
        number_of = {key: n for n, key in enumerate(table.sessions)}
        self.takers = [NOBODY] * (len(table.workers) + 1)
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


def _planned(before: Document, plan: Plan) -> _Table:
    """The columns with the targets of a new plan. What is no partition any more stays until its holder dropped it."""
    table = _Table(before)
    table.workers = sorted(worker for worker, partitions in plan.targets.items() if partitions)
    wanted = {p.id: (p.weight, n) for n, worker in enumerate(table.workers) for p in plan.targets[worker]}
    held = {id: i for i, id in enumerate(before.ids)}
    table.ids = sorted(wanted.keys() | held.keys())
    rows = [held.get(id, NOBODY) for id in table.ids]
    old = [wanted.get(id) or (before.weights[held[id]], NOBODY) for id in table.ids]
    table.weights, table.targets = [weight for weight, _ in old], [target for _, target in old]
    table.holders = [NOBODY if row == NOBODY else before.holders[row] for row in rows]
    table.fences = [0 if row == NOBODY else before.fences[row] for row in rows]
    table.revoked = [0 if row == NOBODY else before.revoked[row] for row in rows]
    return table


def _members(before: Document, facts: Facts, plan: Plan | None) -> dict[str, str]:
    """Without a new plan a worker that came back under its own id takes its own place again, and that is all."""
    if plan is not None:
        return {worker: session for worker, (session, _) in sorted(plan.members.items())}
    return {worker: facts.live.get(worker, (session, 0))[0] for worker, session in before.members.items()}


def _seen(before: Document, facts: Facts, plan: Plan | None) -> dict[tuple[str, str], Session]:
    """Each session with a revision at which it stood in its worker's key; any such revision says enough."""
    # A plan may name a session that another one has followed since: both are named with their own revisions.
    views = [facts.live.items()] if plan is None else [plan.members.items(), facts.live.items()]
    seen = {(w, session): Session(w, session, at, facts.ttl(w, session)) for view in views for w, (session, at) in view}
    return seen | {(session.worker, session.session): session for session in before.sessions}
