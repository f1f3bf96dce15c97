"""Handlers of calls on dead letters."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from heapline.contract import dead_letters
from heapline.contract.call import Count, Page
from heapline.contract.context import Context
from heapline.contract.errors import MessageNotFound
from heapline.contract.fields import MessageId
from heapline.contract.message import MessageInfo
from heapline.engine import dead_letters as letters
from heapline.engine import lookup
from heapline.engine.handlers.table import handles

if TYPE_CHECKING:
    from heapline.engine.broker import EmbeddedBroker
    from heapline.engine.runner import TopicRunner


def _ids(runner: TopicRunner, ids: list[MessageId] | None) -> list[int] | None:
    return runner.loaded.topic.own_ids(ids)


@handles(dead_letters.ListDeadLetters)
def list_dead_letters(
    broker: EmbeddedBroker, command: dead_letters.ListDeadLetters, context: Context
) -> Awaitable[Page[MessageInfo]]:
    runner = broker.runner(command.topic)
    return letters.page(runner, command.limit, command.cursor, command.where, command.max_bytes)


@handles(dead_letters.GetDeadLetter)
async def get_dead_letter(broker: EmbeddedBroker, command: dead_letters.GetDeadLetter, context: Context) -> MessageInfo:
    runner = broker.runner(command.topic)
    info = await lookup.get(runner, runner.loaded.topic.find_id(command.message_id))
    if info.state != "dead":
        raise MessageNotFound(command.topic, info.message_id)
    return info


@handles(dead_letters.ReplayDeadLetters)
async def replay_dead_letters(
    broker: EmbeddedBroker, command: dead_letters.ReplayDeadLetters, context: Context
) -> Count:
    runner = broker.runner(command.topic)
    return Count(await letters.replay(runner, _ids(runner, command.ids), command.where, command.rate))


@handles(dead_letters.DeleteDeadLetters)
async def delete_dead_letters(
    broker: EmbeddedBroker, command: dead_letters.DeleteDeadLetters, context: Context
) -> Count:
    runner = broker.runner(command.topic)
    return Count(await letters.delete(runner, _ids(runner, command.ids), command.where))
