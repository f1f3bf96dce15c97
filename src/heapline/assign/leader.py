"""Decide what a leader does next: end leases, plan, move. Pure: readings, results and time are passed in.

**Plans** say which worker should hold which partition. They are rare: when the pool starts (after the cold start
window), when workers join or leave or partitions change (after the planned scale window and the cooldown), and
immediately after a crash. **Moves** carry out a plan and continue whenever a confirmation or the end of a lease becomes
known.

A worker that stopped cleanly keeps its slot for the planned scale window: if its id returns, it gets its partitions
again without a plan. If fewer of the last plan's workers are live than `restart_detection_ratio`, the whole pool is
restarting, and no worker counts as crashed before the cold start window is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from heapline.assign.assignment import Document, Facts, Lifecycle, Plan, advance, first
from heapline.assign.config import Config
from heapline.assign.leases import Bar, Sessions, Tombstone
from heapline.assign.partitions import Partition
from heapline.assign.states import State
from heapline.assign.strategies import moved_share

STARTUP_SHARE = 0.8  # share of startup_timeout; a longer window could make start() fail


class Cause(Enum):
    """Why a new plan is needed."""

    COLD_START = auto()
    RESTART = auto()
    PLANNED = auto()
    CRASH = auto()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of the strategy. The caller passes its result to `accept_plan`."""

    cause: Cause
    workers: tuple[str, ...]
    partitions: tuple[Partition, ...]
    previous: dict[str, list[Partition]]


@dataclass(frozen=True, slots=True)
class Decision:
    """The next actions of a leader, and when to decide again if nothing happens."""

    state: State = State.STABLE
    writes: list[Tombstone | Bar] = field(default_factory=list)
    publish: Document | None = None  # to write over `Leader.revision`
    plan_request: PlanRequest | None = None
    refresh: bool = False  # list the partitions again
    deposed: bool = False  # a leader with a higher epoch writes documents
    wake_at: float = math.inf


class Leader:
    """One term of one leader. `since` is when its process started; `term` is the term's number, if there is one."""

    def __init__(self, config: Config, session: str, since: float, term: int | None = None) -> None:
        self._config, self._session, self._since, self._term = config, session, since, term
        self._cap = STARTUP_SHARE * config.startup_timeout
        self.sessions = Sessions(config.heartbeat_ttl)
        self.document: Document | None = None
        self.revision = 0  # revision of the document; 0 = none
        self._is_read = False
        self._epoch: int | None = None  # set once this leader has written a document
        self._partitions: tuple[Partition, ...] | None = None
        self._refreshes: dict[tuple[str, str], int] = {}
        self._plan: Plan | None = None
        self._cause: Cause | None = None
        self._joined: dict[str, float] = {}  # worker: since when it waits for its first plan
        self._is_changed: bool | None = None  # whether the partitions differ from the document's
        self._changed_since: float | None = None
        self._restart_since: float | None = None
        self._last_plan_at = -math.inf
        self._tried: object = None  # the facts from which nothing had to change

    # --- events

    def observe_document(self, document: Document | None, revision: int, now: float) -> None:
        """Note a document that was read. Older documents, and a missing one, change nothing."""
        if document is None or revision <= self.revision:
            self._is_read = True
            return
        if document.writer == self._session:
            self._note_plan_written(now)  # this leader's own write was applied without an answer
        self._adopt(document, revision, now)

    def published(self, document: Document, revision: int, now: float) -> None:
        """Note that this leader's document was written."""
        self._note_plan_written(now)
        self._epoch = document.epoch
        self._adopt(document, revision, now)

    def _note_plan_written(self, now: float) -> None:
        if self._plan is not None:
            self._last_plan_at = now
            self._restart_since = None  # later joins and leaves have windows of their own

    def _adopt(self, document: Document, revision: int, now: float) -> None:
        self._is_read = True
        self.document, self.revision = document, revision
        self._plan = self._cause = self._is_changed = None
        for each in document.sessions:
            self.sessions.expect(each.worker, each.session, each.revision, now, each.ttl)
        self.sessions.keep_only((each.worker, each.session) for each in document.sessions)

    def observe_partitions(self, partitions: Sequence[Partition]) -> None:
        self._partitions = tuple(partitions)
        self._is_changed = None

    def accept_plan(self, request: PlanRequest, targets: Mapping[str, Sequence[Partition]], now: float) -> bool:
        """Take the strategy's result. Return False if it is not used.

        It is not used if too little would move, or if the workers have changed meanwhile.
        """
        live = self.sessions.live()
        if self.document is None or set(request.workers) - live.keys() - self.document.members.keys():
            return False
        revisions = {(s.worker, s.session): s.revision for s in self.document.sessions}
        members = {w: live.get(w) or self._previous_session(w, revisions) for w in request.workers}
        worth = request.cause is not Cause.PLANNED or self._is_worth_moving(request, targets)
        self._cause = request.cause
        self._plan = Plan(targets if worth else _keep_current_plan(request), members)
        return worth

    def _previous_session(self, worker: str, revisions: Mapping[tuple[str, str], int]) -> tuple[str, int]:
        assert self.document is not None
        session = self.document.members.get(worker, "")
        return session, revisions.get((worker, session), 0)

    def _is_worth_moving(self, request: PlanRequest, targets: Mapping[str, Sequence[Partition]]) -> bool:
        before = {p: worker for worker, ps in request.previous.items() for p in ps}
        if any(before.get(p) not in request.workers for p in request.partitions):
            return True  # some partitions have no worker
        if any(ps and not request.previous.get(worker) for worker, ps in targets.items()):
            return True  # a worker would otherwise hold nothing
        moved = moved_share(request.previous, targets)
        return moved > 0 and moved >= self._config.assignment.min_rebalance_threshold

    # --- decisions

    def decide(self, now: float) -> Decision:
        """Return everything that has to be done now."""
        if not self._is_read:
            return Decision()
        if self.document is None:
            return self._first_document(now)
        epoch = self._next_epoch(self.document)
        if epoch is None:
            return Decision(deposed=True)
        writes = self.sessions.pending_writes(now)
        request, state, wake_at = self._windows(self.document, now)
        publish = self._advance(self.document, epoch, now)
        wake_at = min(wake_at, self.sessions.next_deadline(now))
        return Decision(state, writes, publish, None if publish else request, self._has_refreshes(), False, wake_at)

    def _first_document(self, now: float) -> Decision:
        """Create the first document, unless a live worker has confirmed a version.

        Such a confirmation means that a document existed: either this reading is stale, or the document was deleted.
        Then nothing may be granted until all those sessions have ended.
        """
        if any(self.sessions.confirmed(worker, session) for worker, (session, _) in self.sessions.live().items()):
            return Decision(State.SCALING, self.sessions.pending_writes(now), wake_at=self.sessions.next_deadline(now))
        return Decision(State.SCALING, publish=first(self._term or 1, self._session))

    def _advance(self, document: Document, epoch: int, now: float) -> Document | None:
        """Return the next version if the facts have changed since the last try.

        Computing it takes a while for many partitions.
        """
        lifecycle, live = self._lifecycle(document), self.sessions.live()
        sessions = self.sessions
        facts = Facts(live, lambda w, session: sessions.is_ended(w, session, now), sessions.confirmed, sessions.ttl)
        known = [(facts.is_ended(s.worker, s.session), facts.confirmed(s.worker, s.session)) for s in document.sessions]
        tried = (document.version, lifecycle, known, {worker: session for worker, (session, _) in live.items()})
        if self._plan is None and self._epoch is not None and tried == self._tried:
            return None
        after = advance(document, facts, epoch, self._session, self._plan, lifecycle)
        self._tried = tried if after is None else None
        return after

    def _next_epoch(self, document: Document) -> int | None:
        """Return the epoch for this leader's documents, or None if another leader has a higher one."""
        if self._epoch is not None:
            return self._epoch if document.epoch <= self._epoch else None
        if self._term is None or document.writer == self._session:
            return document.epoch + 1
        return self._term if document.epoch < self._term else None

    def _lifecycle(self, document: Document) -> Lifecycle:
        if self._plan is not None and self._cause in (Cause.COLD_START, Cause.RESTART):
            return Lifecycle.POST_COLD_START
        if not document.members or self._restart_since is not None:
            return Lifecycle.COLD_START
        if self._plan is not None:
            return Lifecycle.STABLE
        return Lifecycle.POST_COLD_START if document.lifecycle is Lifecycle.COLD_START else document.lifecycle

    def _has_refreshes(self) -> bool:
        counts = self.sessions.refreshes()
        has_new = any(count > self._refreshes.get(session, 0) for session, count in counts.items())
        self._refreshes = counts
        return has_new

    def _windows(self, document: Document, now: float) -> tuple[PlanRequest | None, State, float]:
        """Return the plan to request now if any, the resulting state, and when to decide again."""
        membership = _Membership(document, self.sessions, now)
        self._track_windows(document, membership, now)
        if self._plan is not None and self._cause is not None:
            return None, State.EMERGENCY if self._cause is Cause.CRASH else State.REBALANCING, math.inf
        cause, due, stays = self._find_cause(document, membership, now)
        if cause is None:
            return None, State.STABLE, math.inf
        workers = tuple(sorted(membership.live.keys() | membership.unproved | stays))
        partitions = document.partitions() if self._partitions is None else self._partitions
        if not workers or (self._partitions is None and not document.members):
            return None, State.SCALING, math.inf  # no workers, or no partitions known yet
        if now < due:
            return None, State.SCALING, due
        request = PlanRequest(cause, workers, tuple(partitions), document.plan())
        return request, State.EMERGENCY if cause is Cause.CRASH else State.REBALANCING, math.inf

    def _track_windows(self, document: Document, membership: _Membership, now: float) -> None:
        """Note since when the conditions hold from which windows are counted."""
        self._joined = {worker: self._joined.get(worker, now) for worker in membership.joins}
        if self._is_changed is None:  # compared once per document and listing
            listed = self._partitions
            self._is_changed = listed is not None and {p.id: p.weight for p in listed} != document.loads()
        self._changed_since = (self._changed_since or now) if self._is_changed else None
        settled = not (membership.joins or membership.crashed or membership.released)
        if settled or not document.members:
            self._restart_since = None
        elif self._restart_since is None and membership.share < self._config.restart_detection_ratio:
            self._restart_since = now

    def _window_deadline(self, membership: _Membership) -> float:
        """Return when windows and cooldown must end, so that no start() fails.

        This worker itself has been waiting since before its term: the last leader's lease had to end.
        """
        ours = [self._since for worker in membership.joins if membership.live[worker][0] == self._session]
        return min([*self._joined.values(), *ours], default=math.inf) + self._cap

    def _find_cause(
        self, document: Document, membership: _Membership, now: float
    ) -> tuple[Cause | None, float, set[str]]:
        """Return why a plan is needed, from when on, and which stopped workers still keep their slots."""
        config = self._config
        window = min(config.planned_scale_window, self._cap)
        cold_window = min(config.cold_start_window, self._cap)
        latest = self._window_deadline(membership)
        if not document.members:
            return Cause.COLD_START, self._since + cold_window, set()
        if self._restart_since is not None:
            return Cause.RESTART, min(self._restart_since + cold_window, latest), set()
        stays = {worker for worker, at in membership.released.items() if now < at + window}
        if membership.crashed:
            return Cause.CRASH, now, stays
        times = [*self._joined.values(), *membership.released.values()]
        times += [] if self._changed_since is None else [self._changed_since]
        if not times:
            return None, math.inf, stays
        due = max(min(times) + window, self._last_plan_at + config.assignment.rebalance_cooldown)
        return Cause.PLANNED, min(due, latest), stays


class _Membership:
    """The workers of the last plan compared with the live workers."""

    def __init__(self, document: Document, sessions: Sessions, now: float) -> None:
        self.live = sessions.live()
        self.joins = self.live.keys() - document.members.keys()
        self.released: dict[str, float] = {}
        self.crashed: set[str] = set()
        self.unproved: set[str] = set()  # not seen, but possibly live
        for worker, session in document.members.items():
            if worker in self.live:
                continue
            at = sessions.released_at(worker)
            if at is not None:
                self.released[worker] = at
            elif sessions.is_ended(worker, session, now):
                self.crashed.add(worker)
            else:
                self.unproved.add(worker)
        missing = len(self.released) + len(self.crashed)
        self.share = 1 - missing / len(document.members) if document.members else 0.0


def _keep_current_plan(request: PlanRequest) -> dict[str, list[Partition]]:
    """Return the current plan, updated with weights, removed partitions and new members."""
    weights = {p.id: p for p in request.partitions}
    before = {worker: [weights[p.id] for p in ps if p.id in weights] for worker, ps in request.previous.items()}
    return {worker: before.get(worker, []) for worker in request.workers}
