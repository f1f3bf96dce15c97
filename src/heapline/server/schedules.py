"""Schedules over the server's faces: who may do what with them, and the methods of gRPC. HTTP is in http/schedules.py.

A schedule's name stands in scopes like a topic's: whoever makes, changes, looks at, pauses or deletes one must be
allowed to *admin* its name, and making or changing one also needs to *produce* on its topic. From then on the broker
enqueues for it, whatever becomes of the key that made it; so changes of schedules are in the audit log, under the
schedule's name.
"""

from __future__ import annotations

from typing import Any

from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.requests import check_int
from heapline.schedules import ScheduleInfo
from heapline.schedules.definition import schedule_name
from heapline.server.auth.principal import Action
from heapline.server.front import Caller
from heapline.wire.schedules import pack_schedule_info, unpack_spec
from heapline.wire.schema import pb

PAGE_MAX = 1000


async def create(broker: EmbeddedBroker, caller: Caller, fields: dict[str, Any]) -> ScheduleInfo:
    name, topic = administered(caller, fields.pop("name")), fields["topic"]
    caller.must(Action.PRODUCE, topic)
    caller.check_payload(len(fields["payload"]), topic)
    return await broker.create_schedule(name, **fields)


def administered(caller: Caller, name: str) -> str:
    """The schedule's whole name; raises if the caller has nothing to say there, whether or not there is such a one."""
    name = schedule_name(name)
    caller.tell(about=f"schedule {name}")
    caller.must(Action.ADMIN, name)
    return name


async def page(broker: EmbeddedBroker, caller: Caller, after: str, limit: int) -> tuple[list[ScheduleInfo], str | None]:
    """Those that the caller may see, of the next ones; and what to ask after for more: the last of those, since
    which others there are is not for everybody."""
    check_int("limit", limit, 1, PAGE_MAX)
    while True:
        found, following = await broker.schedules_page(after, limit)
        seen = [info for info in found if caller.may(Action.ADMIN, schedule_name(info.name))]
        if seen or following is None:
            return seen, None if following is None else seen[-1].name
        after = following


class ScheduleCalls:
    """The methods of `heapline.v1.Heapline` about schedules."""

    _broker: EmbeddedBroker

    async def CreateSchedule(self, request: Any, caller: Caller) -> Any:
        return pack_schedule_info(await create(self._broker, caller, unpack_spec(request)))

    async def GetSchedule(self, request: Any, caller: Caller) -> Any:
        return pack_schedule_info(await self._broker.get_schedule(administered(caller, request.schedule)))

    async def ListSchedules(self, request: Any, caller: Caller) -> Any:
        found, following = await page(self._broker, caller, request.after, request.limit or PAGE_MAX)
        return pb.ScheduleInfos(schedules=map(pack_schedule_info, found), next=following or "")

    async def PauseSchedule(self, request: Any, caller: Caller) -> Any:
        return pack_schedule_info(await self._broker.pause_schedule(administered(caller, request.schedule)))

    async def ResumeSchedule(self, request: Any, caller: Caller) -> Any:
        return pack_schedule_info(await self._broker.resume_schedule(administered(caller, request.schedule)))

    async def DeleteSchedule(self, request: Any, caller: Caller) -> Any:
        await self._broker.delete_schedule(administered(caller, request.schedule))
        return pb.Done()
