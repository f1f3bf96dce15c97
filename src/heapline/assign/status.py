"""A worker's status: its state by the table, retried errors, and metrics. Reports them to hooks, metrics and the log.

Nothing here waits for a report, and nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from heapline.assign.hooks import HookRunner
from heapline.assign.metrics import MetricsCollector
from heapline.assign.states import State, is_allowed, reason
from heapline.logs import Log

#: States that only a leader is in.
LEADER_STATES = (State.SCALING, State.REBALANCING, State.EMERGENCY)


class _SafeCollector:
    """Wraps a collector so that its errors are logged and affect nothing else."""

    def __init__(self, collector: MetricsCollector, log: Log) -> None:
        self._collector, self._log = collector, log

    def __getattr__(self, name: str) -> Callable[..., None]:
        record = getattr(self._collector, name)

        def call(*args: object) -> None:
            try:
                record(*args)
            except Exception as error:
                self._log.warning("assign.metrics_failed", error=type(error).__name__, detail=str(error))

        return call


class Status:
    """The current state of a worker."""

    def __init__(self, hooks: HookRunner, metrics: MetricsCollector, clock: Callable[[], float], log: Log) -> None:
        self._hooks, self._clock, self.log = hooks, clock, log
        self.metrics = cast(MetricsCollector, _SafeCollector(metrics, log))
        self._leader, self._leader_since = "", clock()
        self.state, self._since = State.INIT, clock()
        self.has_assignment = False  # the current session has an assignment and its hook has run
        self.last_error: Exception | None = None

    def change_to(self, state: State) -> None:
        """Change the state. SHUTDOWN is final."""
        if state is self.state or self.state is State.SHUTDOWN:
            return
        if not is_allowed(self.state, state):
            # Some changes take two steps in the table: a window of zero length, a plan right after a crash.
            self.change_to(next(s for s in State if is_allowed(self.state, s) and is_allowed(s, state)))
        before, since = self.state, self._since
        reason(before, state)
        self.state, self._since = state, self._clock()
        self.metrics.record_state_duration(before, self._since - since)
        self.metrics.record_state_transition(before, state, self._since - since)
        self._hooks.notify_state_change(before, state)
        self.log.info("assign.state", before=before.name, after=state.name)

    def set_leader_state(self, state: State) -> None:
        """Enter a leader's state. A leader without an assignment of its own waits for it instead of becoming STABLE."""
        if self.state not in (State.ELECTION, State.SHUTDOWN):
            self.change_to(self._settled_state() if state is State.STABLE else state)

    def leave_leader_state(self) -> None:
        """Leave the leader's states after a term."""
        if self.state in LEADER_STATES:
            self.change_to(self._settled_state())

    def settle(self) -> None:
        """Note that the session's first assignment arrived and its hook has run."""
        self.has_assignment = True
        if self.state is State.WAITING_ASSIGNMENT:
            self.change_to(State.STABLE)

    def _settled_state(self) -> State:
        return State.STABLE if self.has_assignment else State.WAITING_ASSIGNMENT

    def report_error(self, error: Exception) -> None:
        """Report an error that will be retried."""
        self.last_error = error
        self._hooks.notify_error(error)

    def note_leader(self, worker: str) -> None:
        """Note which worker leads as far as is known; "" = none."""
        if worker != self._leader:
            now = self._clock()
            self.metrics.record_leadership_change(worker, now - self._leader_since)
            self._leader, self._leader_since = worker, now
