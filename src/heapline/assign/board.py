"""Where a worker says what it does: its state by the table, errors that are tried again, and figures.

Hooks, metrics and the log hear of it; nobody here waits for them, and nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from heapline.assign.hooks import HookRunner
from heapline.assign.metrics import MetricsCollector
from heapline.assign.model import State
from heapline.assign.states import is_allowed, reason
from heapline.logs import Log

log = Log("heapline.assign")

#: What only a leader is in.
LEADERS_OWN = (State.SCALING, State.REBALANCING, State.EMERGENCY)


class _Careful:
    """A collector whose failures nobody else has to bear."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector

    def __getattr__(self, name: str) -> Callable[..., None]:
        record = getattr(self._collector, name)

        def call(*args: object) -> None:
            try:
                record(*args)
            except Exception as error:
                log.warning("assign.metrics_failed", error=type(error).__name__, detail=str(error))

        return call


class Board:
    def __init__(self, hooks: HookRunner, metrics: MetricsCollector, clock: Callable[[], float]) -> None:
        self._hooks, self._clock = hooks, clock
        self.metrics = cast(MetricsCollector, _Careful(metrics))
        self._leader, self._leader_since = "", clock()
        self.state, self._since = State.INIT, clock()
        self.has_assignment = False  # of its present session, and the hooks know it
        self.last_error: Exception | None = None

    def to(self, state: State) -> None:
        """Change the state; from SHUTDOWN nothing leads back."""
        if state is self.state or self.state is State.SHUTDOWN:
            return
        if not is_allowed(self.state, state):
            # Some changes are two steps of the table: a window of no length, a plan that follows a crash.
            self.to(next(s for s in State if is_allowed(self.state, s) and is_allowed(s, state)))
        before, since = self.state, self._since
        reason(before, state)
        self.state, self._since = state, self._clock()
        self.metrics.record_state_duration(before, self._since - since)
        self.metrics.record_state_transition(before, state, self._since - since)
        self._hooks.tell_state(before, state)
        log.info("assign.state", before=before.name, after=state.name)

    def lead(self, state: State) -> None:
        """A leader's state. Whoever has no assignment yet waits for it when there is nothing else to say."""
        if self.state not in (State.ELECTION, State.SHUTDOWN):
            self.to(self._settled() if state is State.STABLE else state)

    def lead_no_more(self) -> None:
        if self.state in LEADERS_OWN:
            self.to(self._settled())

    def settle(self) -> None:
        """The session's first assignment is there and the hooks know it."""
        self.has_assignment = True
        if self.state is State.WAITING_ASSIGNMENT:
            self.to(State.STABLE)

    def _settled(self) -> State:
        return State.STABLE if self.has_assignment else State.WAITING_ASSIGNMENT

    def tell(self, error: Exception) -> None:
        self.last_error = error
        self._hooks.tell_error(error)

    def leads(self, worker: str) -> None:
        """Somebody leads, as far as we have heard; "" = nobody."""
        if worker != self._leader:
            now = self._clock()
            self.metrics.record_leadership_change(worker, now - self._leader_since)
            self._leader, self._leader_since = worker, now
