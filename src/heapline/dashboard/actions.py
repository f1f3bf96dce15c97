"""Changes that people make: a dialog that says what would happen, and the command that makes it happen.

Opening a dialog is a dry run: it counts what the action is about. An action that cannot be undone asks for the topic's
name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from heapline.contract.errors import BadRequest
from heapline.dashboard.caller import Caller

SELECTED_MAX = 50
Arguments = Mapping[str, str]  # of the address: which topic, which messages


@dataclass(frozen=True, kw_only=True)
class Input:
    name: str
    label: str
    value: str = ""
    kind: str = "text"  # of the HTML input; or "select", "checkbox", "lines"
    hint: str = ""
    options: Sequence[str] = ()
    is_required: bool = False
    is_fixed: bool = False


@dataclass(frozen=True, kw_only=True)
class Dialog:
    title: str
    text: str
    button: str  # a verb and a count: "Replay 231"
    inputs: Sequence[Input] = ()
    sample: Sequence[str] = ()  # of what it is about
    to_type: str = ""  # what the person must type before it happens
    facts: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Done:
    text: str
    secret: str = ""  # shown once
    goto: str | None = None  # the page that follows
    undo: str | None = None  # the action that takes it back, as a path


Prepare = Callable[[Caller, Arguments], Awaitable[Dialog]]
Run = Callable[[Caller, Arguments, Mapping[str, str]], Awaitable[Done]]


@dataclass(frozen=True)
class Action:
    name: str
    prepare: Prepare
    run: Run
    types_topic: bool  # what cannot be undone is confirmed by typing the topic's name

    def check(self, arguments: Arguments, form: Mapping[str, str]) -> None:
        if self.types_topic and form.get("typed", "").strip() != arguments.get("topic", ""):
            raise BadRequest("what you typed is not the name of the topic; nothing was changed")


ACTIONS: dict[str, Action] = {}


def action(name: str, prepare: Prepare, *, types_topic: bool = False) -> Callable[[Run], Run]:
    """Register what an action does. `prepare` makes its dialog."""

    def register(run: Run) -> Run:
        ACTIONS[name] = Action(name, prepare, run, types_topic)
        return run

    return register


def given(arguments: Mapping[str, Any], name: str) -> str:
    value: str = arguments.get(name, "")
    if not value:
        raise BadRequest(f"{name} is missing; reload the page and try again")
    return value


def instant(text: str) -> datetime:
    """Return a time that a dialog wrote into its form."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest("the dialog's time is not valid; open the dialog again") from None


def selected(arguments: Arguments) -> list[str]:
    """Return the ids of the rows that were ticked."""
    ids = [line for line in arguments.get("id", "").splitlines() if line]
    if not ids:
        raise BadRequest("nothing is selected; tick some rows and try again")
    if len(ids) > SELECTED_MAX:
        raise BadRequest(f"at most {SELECTED_MAX} rows can be selected")
    return ids
