"""The states of a worker as a table. docs/assign-states.md is generated from it:

    python -m heapline.assign.states > docs/assign-states.md

Every allowed transition is listed once with its reason; `Status.change_to` checks each one against the table. Only a
leader is in SCALING, REBALANCING or EMERGENCY. Other workers see a move only as a new assignment.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class State(IntEnum):
    """The state of a worker. The numbers are the values of the metric `parti_worker_state`."""

    INIT = 0
    CLAIMING_ID = 1
    ELECTION = 2
    WAITING_ASSIGNMENT = 3
    STABLE = 4
    SCALING = 5
    REBALANCING = 6
    EMERGENCY = 7
    SHUTDOWN = 8


INIT, CLAIMING_ID, ELECTION, WAITING, STABLE, SCALING, REBALANCING, EMERGENCY, SHUTDOWN = State


class Transition(NamedTuple):
    before: State | None  # None = the worker does not exist yet
    after: State | None  # None = the worker has ended
    when: str


MEANINGS = {
    INIT: "created, not started",
    CLAIMING_ID: "searches for a free worker id and claims it",
    ELECTION: "has an id and takes part in the election",
    WAITING: "a leader exists; waits for its first assignment",
    STABLE: "works on its assigned partitions",
    SCALING: "leader: waits for a window in which more may change",
    REBALANCING: "leader: calculates and writes an assignment",
    EMERGENCY: "leader: immediately reassigns the partitions of a crashed worker",
    SHUTDOWN: "drops its partitions and releases its id",
}

LOST = "its lease ended, so it holds nothing and starts over"
STOP = "stop()"
FAILED = "stop(), or startup_timeout passed"

TRANSITIONS: tuple[Transition, ...] = (
    Transition(None, INIT, "a manager is created"),
    Transition(INIT, CLAIMING_ID, "start()"),
    Transition(CLAIMING_ID, ELECTION, "an id is claimed"),
    Transition(ELECTION, WAITING, "a leader exists"),
    Transition(WAITING, STABLE, "its first assignment arrived and the hook has run"),
    # -- a leader that waits for its own first assignment
    Transition(WAITING, SCALING, "it leads, and the pool starts or has changed"),
    Transition(WAITING, EMERGENCY, "it leads, and a worker crashed"),
    Transition(SCALING, WAITING, "it no longer leads and has no assignment yet"),
    Transition(REBALANCING, WAITING, "written, or it no longer leads, before its own first hook has run"),
    Transition(EMERGENCY, WAITING, "written, or it no longer leads, before its own first hook has run"),
    # -- planned changes
    Transition(STABLE, SCALING, "workers joined or left, partitions changed, or a restart was detected"),
    Transition(SCALING, REBALANCING, "the window and the cooldown have passed"),
    Transition(SCALING, STABLE, "nothing is left to do, too little would move, or it no longer leads"),
    Transition(REBALANCING, STABLE, "the assignment is written, or it no longer leads"),
    Transition(REBALANCING, SCALING, "another leader wrote first, or more has changed meanwhile"),
    # -- crashes
    Transition(STABLE, EMERGENCY, "a worker crashed"),
    Transition(SCALING, EMERGENCY, "a worker crashed while others joined or left"),
    Transition(REBALANCING, EMERGENCY, "a worker crashed before the assignment was written"),
    Transition(EMERGENCY, STABLE, "the assignment is written, or it no longer leads"),
    Transition(EMERGENCY, SCALING, "the assignment is written, and a planned change waits"),
    # -- cut off, or paused for too long
    *(Transition(state, CLAIMING_ID, LOST) for state in State if ELECTION <= state <= EMERGENCY),
    # -- the end
    *(Transition(state, SHUTDOWN, STOP if state in (INIT, STABLE) else FAILED) for state in State if state < SHUTDOWN),
    Transition(SHUTDOWN, None, "its id and leadership are released"),
)

REASONS = {(t.before, t.after): t.when for t in TRANSITIONS}


def is_allowed(before: State | None, after: State | None) -> bool:
    return (before, after) in REASONS


def reason(before: State | None, after: State | None) -> str:
    """Return why a transition is allowed. A transition that is not in the table is a bug and raises AssertionError."""
    try:
        return REASONS[before, after]
    except KeyError:
        raise AssertionError(f"no transition from {_name(before)} to {_name(after)}") from None


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = [f"    {_name(t.before)} --> {_name(t.after)}: {t.when}" for t in TRANSITIONS]
    return "\n".join(("stateDiagram-v2", *lines)) + "\n"


def page() -> str:
    """Return the text of docs/assign-states.md."""
    meanings = [f"| {state.name} | {state.value} | {MEANINGS[state]} |" for state in State]
    rows = [f"| {_name(t.before, '–')} | {_name(t.after, '–')} | {t.when} |" for t in TRANSITIONS]
    return "\n".join(
        (
            "# The states of a worker",
            "",
            "Generated from the table in `assign/states.py` by `python -m heapline.assign.states`; edit the table.",
            "",
            "```mermaid",
            mermaid() + "```",
            "",
            "| state | number | what the worker does |",
            "|---|---|---|",
            *meanings,
            "",
            "| before | after | when |",
            "|---|---|---|",
            *rows,
            "",
        )
    )


def _name(state: State | None, none: str = "[*]") -> str:
    return none if state is None else state.name


if __name__ == "__main__":
    print(page(), end="")
