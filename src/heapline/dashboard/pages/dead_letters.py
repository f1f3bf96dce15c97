"""Dead letters: which topics have them, why the messages died, and replaying or deleting them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.contract.dead_letters import DeleteDeadLetters, ListDeadLetters, ReplayDeadLetters
from heapline.contract.errors import BadRequest
from heapline.contract.message import DlqFilter
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given, selected
from heapline.dashboard.caller import Caller
from heapline.dashboard.page import Place, page
from heapline.dashboard.render import count, counted
from heapline.dashboard.topic_rows import ROWS_MAX, read_stats

SAMPLE_MAX = 5
REASON_MAX = 160  # characters of a row
PAYLOADS_MAX = 64 << 10  # bytes of a page, which does not show payloads


@page("/dead", "dead", "dead.html")
async def dead_letters(caller: Caller, place: Place) -> dict[str, Any]:
    topic = place.get("topic")
    if not topic:
        stats, _ = await read_stats(caller)
        found = sorted((each for each in stats if each.dead), key=lambda each: (-each.dead, each.topic))
        return {"title": "Dead letters", "topic": "", "topics": found[:ROWS_MAX]}
    where = filter_of(place.query)
    page = await caller.do(ListDeadLetters(topic, ROWS_MAX, place.get("cursor") or None, where, max_bytes=PAYLOADS_MAX))
    return {
        "title": f"Dead letters of {topic}",
        "topic": topic,
        "letters": page.items,
        "cursor": page.cursor,
        "where": where,
        "first_line": first_line,
    }


def filter_of(query: Mapping[str, str]) -> DlqFilter | None:
    """Return the filter of an address, or None if it has none."""
    reason, key = query.get("reason") or None, query.get("key") or None
    return None if reason is None and key is None else DlqFilter(reason=reason, key=key)


def first_line(reason: str | None) -> str:
    """Return the line of a reason that says most: the last one of a traceback, otherwise the first."""
    lines = [line for line in (reason or "").strip().splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if len(line) <= REASON_MAX else f"{line[:REASON_MAX]}…"


# -- replay and delete -------------------------------------------------------------------------------------------------


async def _replay_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, ids = given(arguments, "topic"), selected(arguments)
    return Dialog(
        title=f"Replay {counted(len(ids), 'dead letter')} of {topic}",
        text="They become ready again with no attempts, at their original priority.",
        button=f"Replay {count(len(ids))}",
        sample=[*ids[:SAMPLE_MAX], *(["…"] if len(ids) > SAMPLE_MAX else [])],
        inputs=[Input(name="rate", label="At most this many per second", value=arguments.get("rate", ""),
                      kind="number", hint="empty: all at once")],
    )  # fmt: skip


@action("replay-dead", _replay_dialog)
async def replay_dead(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, ids = given(arguments, "topic"), selected(arguments)
    replayed = await caller.do(ReplayDeadLetters(topic, list(ids), None, rate_of(form)))
    left = len(ids) - replayed.count
    text = f"Replayed {counted(replayed.count, 'dead letter')} of {topic}"
    return Done(text=text if not left else f"{text}; {count(left)} were not dead any more")


def rate_of(form: Mapping[str, str]) -> float | None:
    text = form.get("rate", "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise BadRequest(f"{text!r} is not a rate; give a number of messages per second") from None


async def _delete_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, ids = given(arguments, "topic"), selected(arguments)
    return Dialog(
        title=f"Delete {counted(len(ids), 'dead letter')} of {topic}",
        text="Their payloads are lost.",
        button=f"Delete {count(len(ids))}",
        sample=[*ids[:SAMPLE_MAX], *(["…"] if len(ids) > SAMPLE_MAX else [])],
        to_type=topic,
    )


@action("delete-dead", _delete_dialog, types_topic=True)
async def delete_dead(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, ids = given(arguments, "topic"), selected(arguments)
    deleted = await caller.do_confirmed(DeleteDeadLetters(topic, list(ids)))
    return Done(text=f"Deleted {counted(deleted.count, 'dead letter')} of {topic}")
