"""What a leader does next: end leases, plan, move. Pure: readings, answers and time are passed in.

**Plans** say who shall hold what, and are made rarely: when the crowd starts (after the cold start window), when
workers came or left or partitions changed (after the planned scale window, and not within the cooldown), and at once
when a worker crashed. **Moves** carry a plan out, and go on whenever a confirmation or an end of a lease is known.

A worker that stopped in good order keeps its place for the planned scale window: if its id comes back, it gets its
partitions again without a plan. If fewer of the last plan's workers are there than `restart_detection_ratio`, the
whole crowd is restarting: nobody is taken for crashed before the cold start window is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from heapline.assign.config import Config
from heapline.assign.document import Document, Facts, Plan, advance, first
from heapline.assign.leases import Bar, Sessions, Tombstone
from heapline.assign.model import Lifecycle, Partition, State
from heapline.assign.strategies import moved_share

STARTUP_SHARE = 0.8  # of startup_timeout: no window may last so long that start() fails because of it


class Cause(Enum):
    """Why there has to be a new plan."""

    COLD_START = auto()
    RESTART = auto()
    PLANNED = auto()
    CRASH = auto()


@dataclass(frozen=True, slots=True)
class Ask:
    """A strategy's input: whoever carries it out answers with `planned`."""

    cause: Cause
    workers: tuple[str, ...]
    partitions: tuple[Partition, ...]
    previous: dict[str, list[Partition]]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, and when to look again if nothing happens."""

    state: State = State.STABLE
    writes: list[Tombstone | Bar] = field(default_factory=list)
    publish: Document | None = None  # over `Leading.revision`
    ask: Ask | None = None
    refresh: bool = False  # list the partitions anew
    deposed: bool = False  # somebody with a higher epoch writes documents
    wake_at: float = math.inf


class Leading:
    """One term of one leader. `since` is when its own process came into being, `term` its number if there is one."""

    def __init__(self, config: Config, session: str, since: float, term: int | None = None) -> None:
        self._config, self._session, self._since, self._term = config, session, since, term
        self._cap = STARTUP_SHARE * config.startup_timeout
        self.sessions = Sessions(config.heartbeat_ttl)
        self.document: Document | None = None
        self.revision = 0  # of the document; 0 = there is none
        self._is_read = False
        self._epoch: int | None = None  # as soon as a document of ours was written
        self._partitions: tuple[Partition, ...] | None = None
        self._refreshes: dict[tuple[str, str], int] = {}
        self._plan: Plan | None = None
        self._cause: Cause | None = None
        self._joined: dict[str, float] = {}  # since when a worker waits for its first plan
        self._is_changed: bool | None = None  # whether the partitions are others than the document's
        self._changed_since: float | None = None
        self._restart_since: float | None = None
        self._last_plan_at = -math.inf
        self._tried: object = None  # the facts from which there was nothing to change

    # --- what happens

    def see_document(self, document: Document | None, revision: int, now: float) -> None:
        """The document was read. Older readings, and its absence in one, change nothing."""
        if document is None or revision <= self.revision:
            self._is_read = True
            return
        if document.writer == self._session:
            self._carried_out(now)  # a write of ours that was not answered
        self._take(document, revision, now)

    def published(self, document: Document, revision: int, now: float) -> None:
        """Our document was written."""
        self._carried_out(now)
        self._epoch = document.epoch
        self._take(document, revision, now)

    def _carried_out(self, now: float) -> None:
        if self._plan is not None:
            self._last_plan_at = now
            self._restart_since = None  # whoever comes or leaves from now on has windows of his own

    def _take(self, document: Document, revision: int, now: float) -> None:
        self._is_read = True
        self.document, self.revision = document, revision
        self._plan = self._cause = self._is_changed = None
        for each in document.sessions:
            self.sessions.expect(each.worker, each.session, each.revision, now, each.ttl)
        self.sessions.keep_only((each.worker, each.session) for each in document.sessions)

    def see_partitions(self, partitions: Sequence[Partition]) -> None:
        self._partitions = tuple(partitions)
        self._is_changed = None

    def planned(self, ask: Ask, targets: Mapping[str, Sequence[Partition]], now: float) -> bool:
        """The strategy's answer; False if it is not used: too little would move, or the crowd is another by now."""
        live = self.sessions.live()
        if self.document is None or set(ask.workers) - live.keys() - self.document.members.keys():
            return False
        revisions = {(s.worker, s.session): s.revision for s in self.document.sessions}
        members = {w: live.get(w) or self._former(w, revisions) for w in ask.workers}
        worth = ask.cause is not Cause.PLANNED or self._is_worth_it(ask, targets)
        self._cause = ask.cause
        self._plan = Plan(targets if worth else _as_before(ask), members)
        return worth

    def _former(self, worker: str, revisions: Mapping[tuple[str, str], int]) -> tuple[str, int]:
        assert self.document is not None
        session = self.document.members.get(worker, "")
        return session, revisions.get((worker, session), 0)

    def _is_worth_it(self, ask: Ask, targets: Mapping[str, Sequence[Partition]]) -> bool:
        before = {p: worker for worker, ps in ask.previous.items() for p in ps}
        if any(before.get(p) not in ask.workers for p in ask.partitions):
            return True  # somebody must take those
        if any(ps and not ask.previous.get(worker) for worker, ps in targets.items()):
            return True  # somebody would else be left empty-handed
        moved = moved_share(ask.previous, targets)
        return moved > 0 and moved >= self._config.assignment.min_rebalance_threshold

    # --- what follows

    def look(self, now: float) -> Decision:
        if not self._is_read:
            return Decision()
        if self.document is None:
            return self._first_document(now)
        epoch = self._next_epoch(self.document)
        if epoch is None:
            return Decision(deposed=True)
        writes = self.sessions.due(now)
        ask, state, wake_at = self._windows(self.document, now)
        publish = self._advance(self.document, epoch, now)
        wake_at = min(wake_at, self.sessions.next_at(now))
        return Decision(state, writes, publish, None if publish else ask, self._has_refreshes(), False, wake_at)

    def _first_document(self, now: float) -> Decision:
        """Where a live worker has confirmed a version there was a document: either this is a reading from the past, or
        somebody removed it, and then nothing may be granted before all of those have ended."""
        if any(self.sessions.confirmed(worker, session) for worker, (session, _) in self.sessions.live().items()):
            return Decision(State.SCALING, self.sessions.due(now), wake_at=self.sessions.next_at(now))
        return Decision(State.SCALING, publish=first(self._term or 1, self._session))

    def _advance(self, document: Document, epoch: int, now: float) -> Document | None:
        """The next version, if the facts have changed since we last tried: for many partitions that takes a while."""
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
        """The number for our documents; None if somebody has a higher one."""
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
        asked = self.sessions.refreshes()
        news = any(count > self._refreshes.get(who, 0) for who, count in asked.items())
        self._refreshes = asked
        return news

    def _windows(self, document: Document, now: float) -> tuple[Ask | None, State, float]:
        """Whether there has to be a plan now, what state that is, and when to look again."""
        crowd = _Crowd(document, self.sessions, now)
        self._note(document, crowd, now)
        if self._plan is not None and self._cause is not None:
            return None, State.EMERGENCY if self._cause is Cause.CRASH else State.REBALANCING, math.inf
        cause, due, stays = self._cause_now(document, crowd, now)
        if cause is None:
            return None, State.STABLE, math.inf
        workers = tuple(sorted(crowd.live.keys() | crowd.unproved | stays))
        partitions = document.partitions() if self._partitions is None else self._partitions
        if not workers or (self._partitions is None and not document.members):
            return None, State.SCALING, math.inf  # nobody, or nothing yet, to plan with
        if now < due:
            return None, State.SCALING, due
        ask = Ask(cause, workers, tuple(partitions), document.plan())
        return ask, State.EMERGENCY if cause is Cause.CRASH else State.REBALANCING, math.inf

    def _note(self, document: Document, crowd: _Crowd, now: float) -> None:
        """Since when the things are so that windows are counted from."""
        self._joined = {worker: self._joined.get(worker, now) for worker in crowd.joins}
        if self._is_changed is None:  # compared once for each document and each listing
            listed = self._partitions
            self._is_changed = listed is not None and {p.id: p.weight for p in listed} != document.loads()
        self._changed_since = (self._changed_since or now) if self._is_changed else None
        settled = not (crowd.joins or crowd.crashed or crowd.released)
        if settled or not document.members:
            self._restart_since = None
        elif self._restart_since is None and crowd.share < self._config.restart_detection_ratio:
            self._restart_since = now

    def _latest(self, crowd: _Crowd) -> float:
        """When no window and no cooldown may last any longer, lest a start() fails. We ourselves have waited since
        before we led: the last leader's lease had to end."""
        ours = [self._since for worker in crowd.joins if crowd.live[worker][0] == self._session]
        return min([*self._joined.values(), *ours], default=math.inf) + self._cap

    def _cause_now(self, document: Document, crowd: _Crowd, now: float) -> tuple[Cause | None, float, set[str]]:
        """Why a plan is needed, from when on, and which of those that stopped still have their places kept."""
        config = self._config
        window = min(config.planned_scale_window, self._cap)
        cold_window = min(config.cold_start_window, self._cap)
        latest = self._latest(crowd)
        if not document.members:
            return Cause.COLD_START, self._since + cold_window, set()
        if self._restart_since is not None:
            return Cause.RESTART, min(self._restart_since + cold_window, latest), set()
        stays = {worker for worker, at in crowd.released.items() if now < at + window}
        if crowd.crashed:
            return Cause.CRASH, now, stays
        moments = [*self._joined.values(), *crowd.released.values()]
        moments += [] if self._changed_since is None else [self._changed_since]
        if not moments:
            return None, math.inf, stays
        due = max(min(moments) + window, self._last_plan_at + config.assignment.rebalance_cooldown)
        return Cause.PLANNED, min(due, latest), stays


class _Crowd:
    """The workers of the last plan and those that are there, compared."""

    def __init__(self, document: Document, sessions: Sessions, now: float) -> None:
        self.live = sessions.live()
        self.joins = self.live.keys() - document.members.keys()
        self.released: dict[str, float] = {}
        self.crashed: set[str] = set()
        self.unproved: set[str] = set()  # not seen, but it may well be there
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


def _as_before(ask: Ask) -> dict[str, list[Partition]]:
    """The plan stays; weights, partitions that went away and new members are taken over."""
    weights = {p.id: p for p in ask.partitions}
    before = {worker: [weights[p.id] for p in ps if p.id in weights] for worker, ps in ask.previous.items()}
    return {worker: before.get(worker, []) for worker in ask.workers}
