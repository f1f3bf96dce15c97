"""Handlers of the calls about schedules."""

from __future__ import annotations

from heapline.contract import schedules
from heapline.contract.call import Context, Page, cursor_of, read_cursor
from heapline.contract.schedules import ScheduleInfo
from heapline.engine.handlers import handles
from heapline.engine.topics import TopicKeeper


@handles(schedules.CreateSchedule)
async def create(broker: TopicKeeper, command: schedules.CreateSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.set(command.schedule())


@handles(schedules.GetSchedule)
async def get(broker: TopicKeeper, command: schedules.GetSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.get(command.name)


@handles(schedules.ListSchedules)
async def list_schedules(broker: TopicKeeper, command: schedules.ListSchedules, context: Context) -> Page[ScheduleInfo]:
    broker.check_open()
    after = read_cursor(command.cursor, str, "")
    found, following = await broker.schedules.page(after, command.limit)
    return Page(found, None if following is None else cursor_of(following))


@handles(schedules.PauseSchedule)
async def pause(broker: TopicKeeper, command: schedules.PauseSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.pause(command.name)


@handles(schedules.ResumeSchedule)
async def resume(broker: TopicKeeper, command: schedules.ResumeSchedule, context: Context) -> ScheduleInfo:
    broker.check_open()
    return await broker.schedules.resume(command.name)


@handles(schedules.DeleteSchedule)
async def delete(broker: TopicKeeper, command: schedules.DeleteSchedule, context: Context) -> None:
    broker.check_open()
    await broker.schedules.delete(command.name)
