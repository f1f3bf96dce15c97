"""Handlers of schedules: each calls the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heapline.contract import schedules
from heapline.contract.call import Page
from heapline.contract.context import Context
from heapline.contract.schedules import ScheduleInfo
from heapline.engine.handlers import cursor_of, handles, read_cursor

if TYPE_CHECKING:
    from heapline.engine.broker import EmbeddedBroker


@handles(schedules.CreateSchedule)
async def create(broker: EmbeddedBroker, command: schedules.CreateSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.set(command.schedule())


@handles(schedules.GetSchedule)
async def get(broker: EmbeddedBroker, command: schedules.GetSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.get(command.name)


@handles(schedules.ListSchedules)
async def list_schedules(
    broker: EmbeddedBroker, command: schedules.ListSchedules, context: Context
) -> Page[ScheduleInfo]:
    broker.check_open()
    after = read_cursor(command.cursor, str, "")
    found, following = await broker.schedules.page(after, command.limit)
    return Page(found, None if following is None else cursor_of(following))


@handles(schedules.PauseSchedule)
async def pause(broker: EmbeddedBroker, command: schedules.PauseSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.pause(command.name)


@handles(schedules.ResumeSchedule)
async def resume(broker: EmbeddedBroker, command: schedules.ResumeSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.resume(command.name)


@handles(schedules.DeleteSchedule)
async def delete(broker: EmbeddedBroker, command: schedules.DeleteSchedule, context: Context) -> None:
    broker.check_open()
    await broker.schedules.delete(command.name)
