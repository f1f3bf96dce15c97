"""Schedules: when they fire next, whether they fail, and pausing or firing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.contract.errors import BadRequest
from heapline.contract.messages import Enqueue
from heapline.contract.schedules import (
    CreateSchedule,
    DeleteSchedule,
    GetSchedule,
    ListSchedules,
    PauseSchedule,
    ResumeSchedule,
)
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given
from heapline.dashboard.caller import Caller
from heapline.dashboard.page import Place, page, path_to
from heapline.dashboard.render import when
from heapline.dashboard.topic_rows import ROWS_MAX


@page("/schedules", "schedules", "schedules.html")
async def schedules(caller: Caller, place: Place) -> dict[str, Any]:
    found = await caller.do(ListSchedules(place.get("cursor") or None, ROWS_MAX))
    return {"title": "Schedules", "schedules": found.items, "cursor": found.cursor}


async def _create_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    return Dialog(
        title="Create schedule",
        text="Enqueues a message at times of day, or at intervals. A schedule of the same name is changed.",
        button="Create schedule",
        inputs=[
            Input(name="name", label="Name", value=arguments.get("name", ""), is_required=True),
            Input(name="topic", label="Topic", value=arguments.get("topic", ""), is_required=True),
            Input(name="cron", label="Cron", value=arguments.get("cron", ""), hint="such as 0 3 * * *"),
            Input(name="every", label="Or every so many seconds", kind="number", value=arguments.get("every", "")),
            Input(name="tz", label="Time zone of cron", value=arguments.get("tz", ""), hint="such as Europe/Berlin"),
            Input(name="payload", label="Payload", kind="lines", value=arguments.get("payload", "")),
        ],
    )


@action("create-schedule", _create_dialog)
async def create_schedule(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    try:
        every = float(form["every"]) if form.get("every") else None
    except ValueError:
        raise BadRequest("every must be a number of seconds") from None
    command = CreateSchedule(
        given(form, "name"),
        given(form, "topic"),
        form.get("payload", "").encode(),
        form.get("cron") or None,
        every,
        form.get("tz") or None,
    )
    made = await caller.do(command)
    return Done(text=f"{made.name} fires next at {when(made.next_at)}")


async def _pause_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    name = given(arguments, "name")
    return Dialog(title=f"Pause {name}", text="It does not fire until it is resumed.", button="Pause")


@action("pause-schedule", _pause_dialog)
async def pause_schedule(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    name = given(arguments, "name")
    await caller.do(PauseSchedule(name))
    return Done(text=f"Paused {name}", undo=path_to("/do/resume-schedule", name=name))


async def _resume_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    name = given(arguments, "name")
    return Dialog(title=f"Resume {name}", text="It fires again at its next time.", button="Resume")


@action("resume-schedule", _resume_dialog)
async def resume_schedule(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    name = given(arguments, "name")
    await caller.do(ResumeSchedule(name))
    return Done(text=f"Resumed {name}")


async def _run_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    schedule = await caller.do(GetSchedule(given(arguments, "name")))
    text = f"Enqueues its message into {schedule.topic} now. The next firing, at {when(schedule.next_at)}, stays."
    return Dialog(title=f"Run {schedule.name} now", text=text, button="Run now")


@action("run-schedule", _run_dialog)
async def run_schedule(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    schedule = await caller.do(GetSchedule(given(arguments, "name")))
    message = Enqueue(
        schedule.topic,
        schedule.payload,
        priority=schedule.priority,
        key=schedule.key,
        headers=schedule.headers or None,
        ttl=schedule.ttl,
        max_retries=schedule.max_retries,
        fairness_key=schedule.fairness_key,
    )
    await caller.do(message)
    return Done(text=f"Enqueued the message of {schedule.name} into {schedule.topic}")


async def _delete_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    name = given(arguments, "name")
    return Dialog(title=f"Delete {name}", text="Messages that it has enqueued stay.", button="Delete schedule")


@action("delete-schedule", _delete_dialog)
async def delete_schedule(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    name = given(arguments, "name")
    await caller.do_confirmed(DeleteSchedule(name))
    return Done(text=f"Deleted {name}")
