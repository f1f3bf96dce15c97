"""Schedules over gRPC: a part of `WireBroker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heapline.client.schedule_checks import checked_schedule
from heapline.schedules import ScheduleInfo
from heapline.schedules.definition import schedule_name
from heapline.wire.schedules import pack_schedule, unpack_schedule_info
from heapline.wire.schema import pb

if TYPE_CHECKING:
    from heapline.client.calls import Calls


class WireSchedules:
    if TYPE_CHECKING:

        @property
        def calls(self) -> Calls: ...

    async def create_schedule(
        self, name: str, *, topic: str, payload: bytes = b"", cron: str | None = None, every: float | None = None,
        tz: str | None = None, **more: Any,
    ) -> ScheduleInfo:  # fmt: skip
        fields = {"topic": topic, "payload": payload, "cron": cron, "every": every, "tz": tz, **more}
        request = pack_schedule(checked_schedule(name, fields))
        return unpack_schedule_info(await self.calls("CreateSchedule", request))

    async def get_schedule(self, name: str) -> ScheduleInfo:
        return unpack_schedule_info(await self.calls("GetSchedule", _named(name)))

    async def list_schedules(self) -> list[ScheduleInfo]:
        found: list[ScheduleInfo] = []
        request = pb.ListSchedulesRequest()
        while True:
            answer = await self.calls("ListSchedules", request)
            found += map(unpack_schedule_info, answer.schedules)
            if not answer.next:
                return found
            request = pb.ListSchedulesRequest(after=answer.next)

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        return unpack_schedule_info(await self.calls("PauseSchedule", _named(name)))

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        return unpack_schedule_info(await self.calls("ResumeSchedule", _named(name)))

    async def delete_schedule(self, name: str) -> None:
        await self.calls("DeleteSchedule", _named(name))


def _named(name: str) -> Any:
    return pb.ScheduleName(schedule=schedule_name(name))
