"""Schedules: make, change, list, look at, pause, resume, delete them.

A schedule is a path, `/v1/schedules/nightly` or `/v1/schedules/billing/nightly`; what is done to it follows a colon.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.queries import As, Strict, Text
from heapline.server.http.visiting import Here
from heapline.server.schedules import PAGE_MAX, administered, create, page
from heapline.wire.json_schedules import ScheduleAsk, SchedulesTold, ScheduleTold, tell_schedule
from heapline.wire.json_shapes import Done

router = APIRouter(prefix="/v1", tags=["schedules"])
Name = Annotated[str, Path(max_length=300, description="`name`, or `namespace/name`", examples=["nightly"])]


class Look(Strict):
    payload_as: As = "base64"


class ListQuery(Look):
    after: Annotated[Text, Field(description="the `next` of the answer before")] = ""
    limit: Annotated[int, Field(ge=1, le=PAGE_MAX)] = PAGE_MAX


@documented(
    router, "POST", "/schedules", asks=ScheduleAsk, tells=ScheduleTold, status=201, summary="Make or change a schedule"
)
async def create_schedule(house: Here) -> Response:
    """Under a name that is there it changes that one, which then fires nothing for times before now. Needs to admin the
    schedule and to produce on its topic."""
    async with house.asked("CreateSchedule", ScheduleAsk) as (body, caller):
        return say(tell_schedule(await create(house.broker, caller, body.fields()), "base64"), 201)


@documented(router, "GET", "/schedules", tells=SchedulesTold, summary="List schedules")
async def list_schedules(query: Annotated[ListQuery, Query()], house: Here) -> Response:
    """By name, those that the caller may admin; a page at a time."""
    async with house.visit("ListSchedules") as caller:
        found, following = await page(house.broker, caller, query.after, query.limit)
        told = [tell_schedule(info, query.payload_as) for info in found]
        return say(SchedulesTold(schedules=told, next=following))


@documented(router, "POST", "/schedules/{name:path}:pause", tells=ScheduleTold, summary="Stop firing")
async def pause(name: Name, house: Here) -> Response:
    """Until it is resumed; it stays paused over restarts and changes."""
    async with house.visit("PauseSchedule") as caller:
        return say(tell_schedule(await house.broker.pause_schedule(administered(caller, name)), "base64"))


@documented(router, "POST", "/schedules/{name:path}:resume", tells=ScheduleTold, summary="Fire again")
async def resume(name: Name, house: Here) -> Response:
    """What fell due during the pause is not made up."""
    async with house.visit("ResumeSchedule") as caller:
        return say(tell_schedule(await house.broker.resume_schedule(administered(caller, name)), "base64"))


@documented(router, "GET", "/schedules/{name:path}", tells=ScheduleTold, summary="Look at one schedule")
async def get_schedule(name: Name, query: Annotated[Look, Query()], house: Here) -> Response:
    async with house.visit("GetSchedule") as caller:
        return say(tell_schedule(await house.broker.get_schedule(administered(caller, name)), query.payload_as))


@documented(router, "DELETE", "/schedules/{name:path}", tells=Done, summary="Delete a schedule")
async def delete_schedule(name: Name, house: Here) -> Response:
    """What it has enqueued stays in the topic."""
    async with house.visit("DeleteSchedule") as caller:
        await house.broker.delete_schedule(administered(caller, name))
        return say(Done(done=True))
