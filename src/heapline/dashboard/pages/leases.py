"""The pages of workers: the leases of a topic, and the holders of leases on all topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.contract.inspection import EndLeases, ListLeases, ListWorkers
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given, instant, selected
from heapline.dashboard.caller import Caller
from heapline.dashboard.page import Place, page
from heapline.dashboard.render import count, counted
from heapline.dashboard.topic_rows import ROWS_MAX

SAMPLE_MAX = 5


@page("/workers", "workers", "workers.html")
async def workers(caller: Caller, place: Place) -> dict[str, Any]:
    found = await caller.do(ListWorkers(place.get("cursor") or None, ROWS_MAX))
    return {"title": "Workers", "workers": found.items, "cursor": found.cursor}


async def leases_of(caller: Caller, topic: str, place: Place) -> dict[str, Any]:
    """Return the leases of a topic, the oldest first, or those of one holder."""
    holder = place.get("holder")
    found = await caller.do(ListLeases(topic, holder or None, place.get("cursor") or None, ROWS_MAX))
    return {"leases": found.items, "cursor": found.cursor, "holder": holder}


async def _end_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    # `seen` is the page's newest lease, in the time of leases, which the clock of this machine may have left.
    topic, ids = given(arguments, "topic"), selected(arguments)
    return Dialog(
        title=f"End {counted(len(ids), 'lease')} of {topic}",
        text="Their holders lose the messages, which are redelivered after the topic's backoff. A holder that still "
        "works on one cannot ack it any more. Leases that are newer than those on the page stay.",
        button=f"End {count(len(ids))}",
        sample=[*ids[:SAMPLE_MAX], *(["…"] if len(ids) > SAMPLE_MAX else [])],
        inputs=[
            Input(name="reason", label="Reason", value=arguments.get("reason", ""), hint="kept with the messages"),
            Input(name="seen", label="", kind="hidden", value=given(arguments, "seen")),
        ],
    )


@action("end-leases", _end_dialog)
async def end_leases(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, ids = given(arguments, "topic"), selected(arguments)
    seen = instant(given(form, "seen"))
    ended = await caller.do(EndLeases(topic, list(ids), seen, form.get("reason") or None))
    return Done(text=f"Ended {counted(ended.count, 'lease')} of {topic}")
