"""Dead letters: which topics have them, why the messages died, and replaying or deleting them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from heapline.contract.dead_letters import (
    CountDeadLetters,
    DeleteDeadLetters,
    GroupDeadLetters,
    ListDeadLetters,
    ReplayDeadLetters,
)
from heapline.contract.errors import BadRequest
from heapline.contract.message import DlqFilter
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given, instant, selected
from heapline.dashboard.caller import Caller
from heapline.dashboard.features import features_of
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
        affected = sorted((each for each in stats if each.dead), key=lambda each: (-each.dead, each.topic))
        return {"title": "Dead letters", "topic": "", "topics": affected[:ROWS_MAX]}
    where = filter_of(place.query)
    has_groups = "dlq_groups" in await features_of(caller)
    shown = place.choice("show", *(("reasons", "letters") if has_groups else ("letters",)))
    variables: dict[str, Any] = {
        "title": f"Dead letters of {topic}",
        "topic": topic,
        "where": where,
        "matching": matching(place.query),
        "has_groups": has_groups,
        "show": "letters" if where is not None or place.get("cursor") else shown,
    }
    if variables["show"] == "reasons":
        return variables | {"groups": await caller.do(GroupDeadLetters(topic, ROWS_MAX))}
    found = await caller.do(
        ListDeadLetters(topic, ROWS_MAX, place.get("cursor") or None, where, max_bytes=PAYLOADS_MAX)
    )
    return variables | {"letters": found.items, "cursor": found.cursor, "first_line": first_line}


def matching(query: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an address that selects letters."""
    return {name: query[name] for name in ("topic", "reason", "key") if query.get(name)}


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


# -- all that match, pinned: letters that die after the dialog was opened are left alone -------------------------------


async def _pinned(caller: Caller, arguments: Arguments) -> tuple[int, Input]:
    """Return how many letters match now, and the field that keeps the action to these."""
    topic = given(arguments, "topic")
    found = await caller.do(CountDeadLetters(topic, filter_of(arguments)))
    return found.count, Input(name="as_of", label="", kind="hidden", value=found.as_of.isoformat())


def _set(arguments: Arguments, form: Mapping[str, str]) -> DlqFilter:
    where = filter_of(arguments) or DlqFilter()
    return structs.replace(where, died_before=instant(given(form, "as_of")))


def _described(arguments: Arguments) -> dict[str, str]:
    names = {"reason": "Reason contains", "key": "Key"}
    return {label: arguments[name] for name, label in names.items() if arguments.get(name)}


async def _replay_all_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    number, as_of = await _pinned(caller, arguments)
    return Dialog(
        title=f"Replay {counted(number, 'dead letter')} of {given(arguments, 'topic')}",
        text=f"All that match as of {as_of.value[11:19]} UTC; later ones stay. They become ready again.",
        button=f"Replay {count(number)}",
        facts=_described(arguments),
        inputs=[
            as_of,
            Input(name="rate", label="At most this many per second", value=arguments.get("rate", ""), kind="number",
                  hint="empty: all at once"),
        ],
    )  # fmt: skip


@action("replay-matching", _replay_all_dialog)
async def replay_matching(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    replayed = await caller.do(ReplayDeadLetters(topic, None, _set(arguments, form), rate_of(form)))
    return Done(text=f"Replayed {counted(replayed.count, 'dead letter')} of {topic}")


async def _delete_all_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    number, as_of = await _pinned(caller, arguments)
    topic = given(arguments, "topic")
    return Dialog(
        title=f"Delete {counted(number, 'dead letter')} of {topic}",
        text=f"All that match as of {as_of.value[11:19]} UTC; later ones stay. Their payloads are lost.",
        button=f"Delete {count(number)}",
        facts=_described(arguments),
        inputs=[as_of],
        to_type=topic,
    )


@action("delete-matching", _delete_all_dialog, types_topic=True)
async def delete_matching(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    deleted = await caller.do_confirmed(DeleteDeadLetters(topic, None, _set(arguments, form)))
    return Done(text=f"Deleted {counted(deleted.count, 'dead letter')} of {topic}")
