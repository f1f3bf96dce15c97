"""The calls on schedules of the embedded broker: each asks the scheduler, which knows its own directory and clock."""

from __future__ import annotations

from typing import Any

from heapline.engine.keeper import TopicKeeper
from heapline.schedules import ScheduleInfo, schedule_of


class ScheduleCalls(TopicKeeper):
    """Mixed into the embedded broker."""

    async def create_schedule(
        self, name: str, *, topic: str, payload: bytes = b"", cron: str | None = None, every: float | None = None,
        tz: str | None = None, **more: Any,
    ) -> ScheduleInfo:  # fmt: skip
        self._catalog_or_fail()
        wanted = schedule_of(name, topic=topic, payload=payload, cron=cron, every=every, tz=tz, **more)
        return await self._schedules.set(wanted)

    async def get_schedule(self, name: str) -> ScheduleInfo:
        self._catalog_or_fail()
        return await self._schedules.get(name)

    async def list_schedules(self) -> list[ScheduleInfo]:
        self._catalog_or_fail()
        return await self._schedules.list_all()

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        self._catalog_or_fail()
        return await self._schedules.pause(name)

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        self._catalog_or_fail()
        return await self._schedules.resume(name)

    async def delete_schedule(self, name: str) -> None:
        self._catalog_or_fail()
        await self._schedules.delete(name)

    async def schedules_page(self, after: str, limit: int) -> tuple[list[ScheduleInfo], str | None]:
        """`list_schedules`, a page at a time: those after this name, and after which name there are more."""
        self._catalog_or_fail()
        return await self._schedules.page(after, limit)

    async def fire_schedules(self) -> None:
        """Fire what is due by now, and wait for it: for clocks that are moved by hand."""
        self._catalog_or_fail()
        await self._schedules.fire_due()
