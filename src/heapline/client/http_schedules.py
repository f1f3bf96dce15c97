"""Schedules over HTTP: a part of `HttpBroker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from heapline.client.schedule_checks import checked_schedule
from heapline.schedules import ScheduleInfo
from heapline.schedules.definition import schedule_name
from heapline.wire.json_schedules import SchedulesTold, ScheduleTold, ask_for, read_schedule
from heapline.wire.json_shapes import Done

if TYPE_CHECKING:
    from heapline.client.http_calls import HttpCalls

TOP = "/v1/schedules"


class HttpSchedules:
    if TYPE_CHECKING:

        @property
        def calls(self) -> HttpCalls: ...

    async def create_schedule(
        self, name: str, *, topic: str, payload: bytes = b"", cron: str | None = None, every: float | None = None,
        tz: str | None = None, **more: Any,
    ) -> ScheduleInfo:  # fmt: skip
        fields = {"topic": topic, "payload": payload, "cron": cron, "every": every, "tz": tz, **more}
        body = ask_for(checked_schedule(name, fields))
        return read_schedule(await self.calls("POST", TOP, ScheduleTold, body))

    async def get_schedule(self, name: str) -> ScheduleInfo:
        return read_schedule(await self.calls("GET", _path(name), ScheduleTold))

    async def list_schedules(self) -> list[ScheduleInfo]:
        found: list[ScheduleInfo] = []
        after: str | None = None
        while True:
            answer = await self.calls("GET", TOP, SchedulesTold, query={"after": after})
            found += map(read_schedule, answer.schedules)
            if answer.next is None:
                return found
            after = answer.next

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        return read_schedule(await self.calls("POST", f"{_path(name)}:pause", ScheduleTold))

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        return read_schedule(await self.calls("POST", f"{_path(name)}:resume", ScheduleTold))

    async def delete_schedule(self, name: str) -> None:
        await self.calls("DELETE", _path(name), Done)


def _path(name: str) -> str:
    return f"{TOP}/{quote(schedule_name(name))}"
