"""One message's life as steps for a timeline: from the journal, or from what is known without it."""

from __future__ import annotations

import time
from datetime import datetime
from typing import NamedTuple

from heapline.contract.inspection import MessageEvent, MessageHistory, MessageLife
from heapline.contract.message import MessageInfo
from heapline.dashboard.caller import Caller
from heapline.dashboard.render import when

READS_MAX = 3  # calls for one page; each reads a bounded part of the journal
LIVES_MAX = 200
READ_SHARE = 10.0  # a life is read again after so many times as long as it took

#: By the kind of an event: the color of its step, and its text.
KINDS = {
    "enqueued": ("", "Enqueued"),
    "batch_prepared": ("", "Enqueued in a batch"),
    "batch_committed": ("ready", "Batch committed"),
    "batch_aborted": ("warn", "Batch aborted"),
    "due": ("ready", "Became due"),
    "fired": ("ready", "Became due"),
    "leased": ("leased", "Leased"),
    "extended": ("leased", "Lease extended"),
    "lease_expired": ("warn", "Lease expired"),
    "nacked": ("warn", "Failed"),
    "released": ("", "Released by its worker"),
    "acked": ("ok", "Done"),
    "dead_lettered": ("dead", "Became a dead letter"),
    "dropped": ("dead", "Dropped"),
    "replayed": ("ready", "Replayed"),
    "dead_deleted": ("dead", "Deleted"),
    "cancelled": ("warn", "Cancelled"),
    "rescheduled": ("delayed", "Rescheduled"),
    "expired": ("warn", "Expired"),
    "ttl_ended": ("warn", "Expired while it was leased"),
    "purged": ("warn", "Purged"),
    "moved": ("", "Moved within the journal"),
    "group_failed": ("warn", "Failed in a group"),
    "group_dead": ("dead", "Became a dead letter of a group"),
}


class Step(NamedTuple):
    """One entry of a message's life."""

    at: datetime | None
    kind: str  # for its color
    text: str
    detail: str = ""


class Life(NamedTuple):
    steps: list[Step]
    note: str = ""  # about what is not known
    cursor: str | None = None  # the rest of the journal was not read


class ReadLife(NamedTuple):
    """A life, and what was known of its message when it was read."""

    known: object
    life: Life
    read_at: float
    took: float


async def life_of(caller: Caller, info: MessageInfo, cursor: str | None) -> Life:
    """Return a message's life from the journal, or its continuation.

    It is read again if the message has changed, but not all the time: a lease may be extended every second, and each
    reading goes through the journal.
    """
    key, known = (
        (info.topic, info.message_id, cursor),
        (info.state, info.attempts, info.deadline, info.due_at, info.reason),
    )
    lives, now = caller.memory.lives, time.monotonic()
    found: ReadLife | None = lives.get(key)
    if found is not None and (found.known == known or now - found.read_at < READ_SHARE * found.took):
        return found.life
    life = await _read(caller, info, cursor)
    lives[key] = ReadLife(known, life, time.monotonic(), time.monotonic() - now)
    if len(lives) > LIVES_MAX:
        lives.popitem(last=False)
    return life


async def _read(caller: Caller, info: MessageInfo, cursor: str | None) -> Life:
    steps: list[Step] = []
    note = ""
    for _ in range(READS_MAX):
        page: MessageLife = await caller.do(MessageHistory(info.topic, info.id, cursor=cursor))
        steps += [_step(event) for event in page.items]
        cursor = page.cursor
        if not page.is_complete and page.known_since is not None:
            note = f"The journal before {when(page.known_since)} was reclaimed; what happened earlier is not known."
        if cursor is None:
            break
    else:
        note = f"Read up to {when(page.read_until)}."
    return Life(steps or known_steps(info), note, cursor)


def _step(event: MessageEvent) -> Step:
    kind, text = KINDS.get(event.kind, ("", event.kind.replace("_", " ").capitalize()))
    if event.kind == "leased":
        text += f" by {event.holder or 'an unnamed worker'}"
        if event.attempts is not None and event.attempts > 1:
            text += f", delivery {event.attempts}"
    if event.deadline is not None:
        text += f", until {event.deadline:%H:%M:%S}"
    if event.group:
        text += f" “{event.group}”"
    if event.due_at is not None and event.due_at > event.at:
        text += f", due {when(event.due_at)}"
    return Step(event.at, kind, text, event.reason or "")


def known_steps(info: MessageInfo) -> list[Step]:
    """Return what is known of a message's life without reading the journal."""
    steps = [Step(info.enqueued_at, "", "Enqueued")]
    if info.due_at is not None and info.enqueued_at is not None and info.due_at > info.enqueued_at:
        steps.append(Step(info.due_at, "delayed", "Due"))
    if info.attempts:
        steps.append(Step(None, "leased", f"Delivered {info.attempts} time{'s' if info.attempts > 1 else ''}"))
    if info.state == "leased":
        steps.append(Step(info.deadline, "leased", f"Leased by {info.holder or 'an unnamed worker'}, until"))
    elif info.ended_at is not None:
        kind = {"acked": "ok", "dead": "dead"}.get(info.state, "warn")
        steps.append(Step(info.ended_at, kind, info.state.capitalize(), info.reason or ""))
    elif info.reason:
        steps.append(Step(None, "warn", "Failed", info.reason))
    return steps


# -- tracebacks --------------------------------------------------------------------------------------------------------

LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")


class Part(NamedTuple):
    """Lines of a reason that are shown, or folded."""

    text: str
    is_folded: bool


def folded(reason: str) -> list[Part]:
    """Split a traceback into the frames of the application and those of libraries. Other text is one part."""
    if not reason.startswith("Traceback"):
        return [Part(reason, False)]
    parts: list[Part] = []
    is_library = False
    for line in reason.splitlines():
        if line.startswith('  File "'):
            is_library = any(part in line for part in LIBRARIES)
        elif not line.startswith("    "):
            is_library = False
        if parts and parts[-1].is_folded == is_library:
            parts[-1] = Part(f"{parts[-1].text}\n{line}", is_library)
        else:
            parts.append(Part(line, is_library))
    return parts
