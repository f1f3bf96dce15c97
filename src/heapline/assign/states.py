"""The states of a worker as a table; the picture in docs/assign-states.md is made from it.

    python -m heapline.assign.states > docs/assign-states.md

Every change of state that may happen stands here once, with its reason; the manager asks `reason` before it makes one.
SCALING, REBALANCING and EMERGENCY are a leader's; the others see a move only as a new assignment.
"""

from __future__ import annotations

from typing import NamedTuple

from heapline.assign.model import State

INIT, CLAIMING_ID, ELECTION, WAITING, STABLE, SCALING, REBALANCING, EMERGENCY, SHUTDOWN = State


class Transition(NamedTuple):
    before: State | None  # None = before the worker was there
    after: State | None  # None = it has ended
    when: str


MEANINGS = {
    INIT: "made, and not started",
    CLAIMING_ID: "looks for an id that is free, and takes it",
    ELECTION: "has an id; takes part in finding a leader",
    WAITING: "knows who leads; has nothing yet",
    STABLE: "works on what it was given",
    SCALING: "leads, and waits for a window to pass in which more may change",
    REBALANCING: "leads, and calculates and writes an assignment",
    EMERGENCY: "leads, and gives away at once what a crashed worker held",
    SHUTDOWN: "drops its partitions, gives back its id",
}

LOST = "its own lease ended, so it holds nothing and starts over"
STOP = "stop()"
FAILED = "stop(), or startup_timeout passed"

TRANSITIONS: tuple[Transition, ...] = (
    Transition(None, INIT, "a manager is made"),
    Transition(INIT, CLAIMING_ID, "start()"),
    Transition(CLAIMING_ID, ELECTION, "an id is claimed"),
    Transition(ELECTION, WAITING, "there is a leader"),
    Transition(WAITING, STABLE, "its first assignment is there and the hook has run"),
    # -- a leader whose own first assignment is yet to come
    Transition(WAITING, SCALING, "leads, and the crowd starts or has changed"),
    Transition(WAITING, EMERGENCY, "leads, and a worker crashed"),
    Transition(SCALING, WAITING, "no longer leads, and has no assignment yet"),
    Transition(REBALANCING, WAITING, "written, or no longer leads, and its own first hook has not run yet"),
    Transition(EMERGENCY, WAITING, "written, or no longer leads, and its own first hook has not run yet"),
    # -- planned changes
    Transition(STABLE, SCALING, "workers came or left, partitions changed, or a restart was detected"),
    Transition(SCALING, REBALANCING, "the window and the cooldown have passed"),
    Transition(SCALING, STABLE, "nothing is left to do, too little would move, or it no longer leads"),
    Transition(REBALANCING, STABLE, "the assignment is written, or it no longer leads"),
    Transition(REBALANCING, SCALING, "somebody else wrote first, or more has changed meanwhile"),
    # -- crashes
    Transition(STABLE, EMERGENCY, "a worker crashed"),
    Transition(SCALING, EMERGENCY, "a worker crashed while others came or left"),
    Transition(REBALANCING, EMERGENCY, "a worker crashed before the assignment was written"),
    Transition(EMERGENCY, STABLE, "the assignment is written, or it no longer leads"),
    Transition(EMERGENCY, SCALING, "the assignment is written, and a planned change waits"),
    # -- cut off, or paused for too long
    Transition(ELECTION, CLAIMING_ID, LOST),
    Transition(WAITING, CLAIMING_ID, LOST),
    Transition(STABLE, CLAIMING_ID, LOST),
    Transition(SCALING, CLAIMING_ID, LOST),
    Transition(REBALANCING, CLAIMING_ID, LOST),
    Transition(EMERGENCY, CLAIMING_ID, LOST),
    # -- the end
    Transition(INIT, SHUTDOWN, STOP),
    Transition(CLAIMING_ID, SHUTDOWN, FAILED),
    Transition(ELECTION, SHUTDOWN, FAILED),
    Transition(WAITING, SHUTDOWN, FAILED),
    Transition(STABLE, SHUTDOWN, STOP),
    Transition(SCALING, SHUTDOWN, FAILED),
    Transition(REBALANCING, SHUTDOWN, FAILED),
    Transition(EMERGENCY, SHUTDOWN, FAILED),
    Transition(SHUTDOWN, None, "all is given back"),
)

REASONS = {(t.before, t.after): t.when for t in TRANSITIONS}


def is_allowed(before: State | None, after: State | None) -> bool:
    return (before, after) in REASONS


def reason(before: State | None, after: State | None) -> str:
    """Why a worker may go from one to the other; a change that is not in the table is a bug of ours."""
    try:
        return REASONS[before, after]
    except KeyError:
        raise AssertionError(f"no transition leads from {_name(before)} to {_name(after)}") from None


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = [f"    {_name(t.before)} --> {_name(t.after)}: {t.when}" for t in TRANSITIONS]
    return "\n".join(("stateDiagram-v2", *lines)) + "\n"


def page() -> str:
    """docs/assign-states.md."""
    meanings = [f"| {state.name} | {state.value} | {MEANINGS[state]} |" for state in State]
    rows = [f"| {_shown(t.before)} | {_shown(t.after)} | {t.when} |" for t in TRANSITIONS]
    return "\n".join(
        (
            "# The states of a worker",
            "",
            "Made by `python -m heapline.assign.states` from the table in `assign/states.py`: edit that.",
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


def _name(state: State | None) -> str:
    return "[*]" if state is None else state.name


def _shown(state: State | None) -> str:
    return "–" if state is None else state.name


if __name__ == "__main__":
    print(page(), end="")
