"""Finding messages, and one message: why it waits, its life, its payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from heapline.contract.call import Right
from heapline.contract.errors import BadRequest, MessageNotFound
from heapline.contract.ids import from_ulid, parse_id
from heapline.contract.inspection import Explain, SearchMessages
from heapline.contract.message import TopicInfo
from heapline.contract.messages import Cancel, GetMessage, Reschedule
from heapline.contract.topics import ListTopics
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given
from heapline.dashboard.caller import Caller
from heapline.dashboard.features import features_of
from heapline.dashboard.message_life import Life, folded, known_steps, life_of
from heapline.dashboard.page import Place, page, path_to
from heapline.dashboard.topic_rows import ROWS_MAX

SHOWN_BYTES = 64 << 10  # of a payload
HEX_BYTES = 4 << 10
WAITING = ("ready", "delayed")
STATES = ("", "ready", "delayed", "leased", "dead")


@page("/messages", "messages", "messages.html", is_live=False)
async def messages(caller: Caller, place: Place) -> dict[str, Any]:
    wanted, topic = place.get("q").strip(), place.get("topic")
    topics, _ = await caller.all(ListTopics, limit=1000)
    may_search = "search" in await features_of(caller)
    variables: dict[str, Any] = {
        "title": "Messages",
        "wanted": wanted,
        "topic": topic,
        "topics": [each.name for each in topics],
        "states": STATES,
        "may_search": may_search,
        "message": None,
        "problem": "",
        "result": None,
        "named": [],
        "path_of": message_path,
    }
    if _is_id(wanted):
        return variables | await _by_id(caller, wanted, topics)
    if topic and may_search and (wanted or place.get("key") or place.get("header")):
        state: Any = place.choice("state", *STATES) or None
        command = SearchMessages(
            topic,
            wanted or None,
            place.get("key") or None,
            place.get("header") or None,
            state,
            ROWS_MAX,
            place.get("cursor") or None,
        )
        return variables | {"result": await caller.do(command)}
    named = [each.name for each in topics if wanted and wanted.lower() in each.name.lower()]
    return variables | {"named": named[:ROWS_MAX]}


async def _by_id(caller: Caller, wanted: str, topics: Sequence[TopicInfo]) -> dict[str, Any]:
    """Return the message of an id, whose end names its topic."""
    suffix = from_ulid(wanted)[1]
    owner = next((each.name for each in topics if each.id_suffix == suffix), None)
    if owner is None:
        return {"problem": "This id belongs to no topic that you may read. The ids of a topic end alike."}
    try:
        return {"message": await caller.do(GetMessage(owner, wanted))}
    except MessageNotFound as error:
        return {"problem": str(error)}


def _is_id(text: str) -> bool:
    try:
        return parse_id(text)[1] is not None
    except BadRequest:
        return False


def message_path(topic: str, message_id: str) -> str:
    return path_to("/message", topic=topic, id=message_id)


# -- one message -------------------------------------------------------------------------------------------------------


@page("/message", "messages", "message.html")
async def message(caller: Caller, place: Place) -> dict[str, Any]:
    topic, message_id = place.get("topic"), place.get("id")
    if not topic or not message_id:
        raise BadRequest("the address of a message has its topic and its id; search for it")
    info = await caller.do(GetMessage(topic, message_id))
    features = await features_of(caller)
    sentence = ""
    if info.state in WAITING and "explain" in features:
        explained = (await caller.do(Explain(topic, 1, info.message_id))).items
        sentence = explained[0].text if explained else ""
    life = Life(known_steps(info))
    if "history" in features:
        life = await life_of(caller, info, place.get("cursor") or None)
    view = place.choice("as", *views_of(info.payload))
    return {
        "title": info.message_id,
        "info": info,
        "sentence": sentence,
        "life": life,
        "folded": folded,
        "views": views_of(info.payload),
        "view": view,
        "payload": payload_as(view, info.payload),
        "is_cut": info.payload is not None and len(info.payload) > (HEX_BYTES if view == "hex" else SHOWN_BYTES),
        "is_waiting": info.state in WAITING,
        "may_produce": caller.may(Right.PRODUCE, topic),
    }


def views_of(payload: bytes | None) -> tuple[str, ...]:
    """Return the forms in which a payload can be shown, the best one first."""
    if payload is None:
        return ("text",)
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return ("hex",)
    if not text.isprintable() and any(ord(ch) < 32 and ch not in "\t\r\n" for ch in text):
        return ("hex", "text")
    try:
        msgspec.json.decode(payload[:SHOWN_BYTES])
    except (msgspec.DecodeError, RecursionError):
        return ("text", "hex")
    return ("json", "text", "hex")


def payload_as(view: str, payload: bytes | None) -> str:
    if payload is None:
        return ""
    if view == "json":
        return msgspec.json.format(payload[:SHOWN_BYTES], indent=2).decode()  # does not touch its numbers
    if view == "text":
        return payload[:SHOWN_BYTES].decode(errors="replace")
    data = payload[:HEX_BYTES]
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:06x}  {part.hex(' '):<47}  {text}")
    return "\n".join(lines)


# -- changes -----------------------------------------------------------------------------------------------------------


async def _cancel_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    text = f"Removes the message {given(arguments, 'id')} before it is delivered. This cannot be undone."
    return Dialog(title="Cancel message", text=text, button="Cancel message")


@action("cancel", _cancel_dialog)
async def cancel(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    await caller.do(Cancel(given(arguments, "topic"), given(arguments, "id")))
    return Done(text="Cancelled the message")


async def _reschedule_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, message_id = given(arguments, "topic"), given(arguments, "id")
    info = await caller.do(GetMessage(topic, message_id))
    return Dialog(
        title="Reschedule message",
        text=f"Changes when, or how urgently, {message_id} is delivered. What is left empty stays.",
        button="Reschedule",
        inputs=[
            Input(name="delay", label="Seconds from now", kind="number", value=arguments.get("delay", "")),
            Input(name="priority", label="Priority", kind="text", value=arguments.get("priority", ""),
                  hint=f"now {info.priority}"),
        ],
    )  # fmt: skip


@action("reschedule", _reschedule_dialog)
async def reschedule(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    delay, priority = form.get("delay", "").strip(), form.get("priority", "").strip()
    try:
        seconds = float(delay) if delay else None
        wanted = int(priority) if priority else None
    except ValueError:
        raise BadRequest("give a number of seconds, and a priority that is an integer") from None
    topic, message_id = given(arguments, "topic"), given(arguments, "id")
    await caller.do(Reschedule(topic, message_id, delay=seconds, priority=wanted))
    return Done(text="Rescheduled the message")
