"""The table of states is complete, has the specified paths, and generates the page."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from heapline.assign import states
from heapline.assign.states import MEANINGS, REASONS, TRANSITIONS, State, is_allowed, reason

ROOT = Path(__file__).parents[3]

#: As the specification draws them.
PATHS = {
    "normal startup": "INIT CLAIMING_ID ELECTION WAITING_ASSIGNMENT STABLE",
    "planned scale, cold start, restart detected": "STABLE SCALING REBALANCING STABLE",
    "first cold start, of the leader": "WAITING_ASSIGNMENT SCALING REBALANCING STABLE",
    "worker crash": "STABLE EMERGENCY STABLE",
    "graceful shutdown": "STABLE SHUTDOWN",
    "cut off and back": "STABLE CLAIMING_ID ELECTION WAITING_ASSIGNMENT STABLE",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_specified_path_is_allowed(path: str) -> None:
    for before, after in pairwise(State[name] for name in path.split()):
        assert is_allowed(before, after)
        assert reason(before, after)


def test_every_state_can_be_reached_left_and_stopped() -> None:
    reached, around = {None}, {None}
    while around:
        around = {t.after for t in TRANSITIONS if t.before in around} - reached
        reached |= around
    assert reached == {None, *State}
    assert is_allowed(State.SHUTDOWN, None)
    for state in set(State) - {State.SHUTDOWN}:
        assert is_allowed(state, State.SHUTDOWN)


def test_worker_whose_lease_ended_must_claim_an_id_again() -> None:
    """It claims an id and waits for an assignment: the only way back to STABLE leads through both."""
    into_stable = {t.before for t in TRANSITIONS if t.after is State.STABLE}
    assert into_stable == {State.WAITING_ASSIGNMENT, State.SCALING, State.REBALANCING, State.EMERGENCY}
    assert {t.after for t in TRANSITIONS if t.before is State.CLAIMING_ID} == {State.ELECTION, State.SHUTDOWN}
    for state in set(State) - {State.INIT, State.CLAIMING_ID, State.SHUTDOWN}:
        assert is_allowed(state, State.CLAIMING_ID)


@pytest.mark.parametrize(
    ("before", "after"),
    [(State.INIT, State.STABLE), (State.SHUTDOWN, State.STABLE), (State.STABLE, State.REBALANCING),
     (State.CLAIMING_ID, State.STABLE), (State.STABLE, State.STABLE), (None, State.STABLE)],
)  # fmt: skip
def test_other_transitions_raise(before: State | None, after: State) -> None:
    assert not is_allowed(before, after)
    with pytest.raises(AssertionError, match="no transition"):
        reason(before, after)


def test_table_lists_each_transition_once_and_explains_each_state() -> None:
    assert len(REASONS) == len(TRANSITIONS)
    assert MEANINGS.keys() == set(State)
    assert all(t.when and MEANINGS for t in TRANSITIONS)


def test_page_of_states_is_current() -> None:
    page = (ROOT / "docs" / "assign-states.md").read_text(encoding="utf-8")
    assert page == states.page(), "run: python -m heapline.assign.states > docs/assign-states.md"


def test_diagram_has_an_arrow_for_each_transition() -> None:
    arrows = states.mermaid().splitlines()[1:]
    assert len(arrows) == len(TRANSITIONS)
    for arrow in arrows:
        assert arrow.count(":") == 1, "Mermaid allows one colon per line"
        assert ";" not in arrow, "Mermaid reads a semicolon as the end of a line"
