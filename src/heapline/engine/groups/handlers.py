"""Handlers of consumer groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from heapline.contract import groups
from heapline.contract.call import Context, Count, Page, page_of
from heapline.contract.check import fail
from heapline.contract.columns import pack
from heapline.contract.errors import DeliveryLost
from heapline.contract.groups import pack_batch
from heapline.contract.stream import GroupDeadLetter, GroupInfo
from heapline.contract.topics import given
from heapline.core.now import Now
from heapline.engine.groups import admin
from heapline.engine.groups.member_calls import FetchCall, SettleCall
from heapline.engine.handlers import handles
from heapline.engine.topics import TopicKeeper


@handles(groups.CreateGroup)
async def create_group(broker: TopicKeeper, command: groups.CreateGroup, context: Context) -> GroupInfo:
    place = groups.place_of(command.start)
    return await admin.create(broker.runner(command.topic), command.group, place, given(command.config))


@handles(groups.GetGroup)
async def get_group(broker: TopicKeeper, command: groups.GetGroup, context: Context) -> GroupInfo:
    runner = broker.runner(command.topic)
    return await runner.call(lambda now: admin.info(runner, runner.streams.group(command.group), now))


@handles(groups.ListGroups)
async def list_groups(broker: TopicKeeper, command: groups.ListGroups, context: Context) -> Page[GroupInfo]:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> Page[GroupInfo]:
        found = runner.loaded.topic.groups
        return page_of(found, command.cursor, command.limit, shape=lambda group: admin.info(runner, group, now))

    return await runner.call(decide)


@handles(groups.DeleteGroup)
async def delete_group(broker: TopicKeeper, command: groups.DeleteGroup, context: Context) -> None:
    runner = broker.runner(command.topic)
    await runner.call(partial(admin.delete, runner, command.group))


@handles(groups.GetGroupOffsets)
async def group_offsets(broker: TopicKeeper, command: groups.GetGroupOffsets, context: Context) -> groups.GroupOffsets:
    runner = broker.runner(command.topic)
    found = await runner.call(lambda now: admin.offsets_of(runner, runner.streams.group(command.group)))
    return groups.GroupOffsets(found)


@handles(groups.ResetOffsets)
async def reset_offsets(broker: TopicKeeper, command: groups.ResetOffsets, context: Context) -> groups.GroupOffsets:
    runner = broker.runner(command.topic)
    last = len(runner.loaded.topic.partitions) - 1
    for partition in command.partitions or ():
        if partition > last:
            fail("a partition", f"an integer from 0 to {last}", partition)
    place = groups.place_of(command.to)
    return groups.GroupOffsets(await admin.reset(runner, command.group, place, command.partitions))


@handles(groups.GroupFetch)
async def group_fetch(broker: TopicKeeper, command: groups.GroupFetch, context: Context) -> groups.FetchedRows:
    runner = broker.runner(command.topic)
    place = groups.place_of(command.start)
    await admin.ensure(runner, command.group, command.session, place, given(command.config))
    call = FetchCall(
        runner.future(),
        command.group,
        command.member,
        command.session,
        command.max_messages,
        command.max_bytes,
        command.wait > 0,
    )
    found = await runner.streams.fetch(call, command.wait)
    return groups.FetchedRows(
        runner.name,
        found.generation,
        found.partitions,
        [pack_batch(b) for b in found.batches],
        runner.loaded.topic.id_suffix,
    )


@handles(groups.GroupAck)
async def group_ack(broker: TopicKeeper, command: groups.GroupAck, context: Context) -> groups.LostRows:
    return await _settle(broker, command, False, "")


@handles(groups.GroupNack)
async def group_nack(broker: TopicKeeper, command: groups.GroupNack, context: Context) -> groups.LostRows:
    return await _settle(broker, command, True, command.reason or "nacked")


async def _settle(broker: TopicKeeper, command: Any, nacks: bool, reason: str) -> groups.LostRows:
    runner = broker.runner(command.topic)
    columns = _columns(command.rows)
    if not columns:
        return groups.LostRows()
    call = SettleCall(runner.future(), command.group, command.member, command.session, columns, nacks, reason)
    try:
        await runner.streams.settle(call)
    except DeliveryLost as lost:
        by_partition: dict[int, list[int]] = {}
        for partition, offset in zip(lost.partitions, lost.offsets, strict=True):
            by_partition.setdefault(partition, []).append(offset)
        return groups.LostRows([groups.PartitionRows(p, pack(offsets)) for p, offsets in by_partition.items()])
    return groups.LostRows()


def _columns(rows: list[groups.PartitionRows]) -> dict[int, Any]:
    found: dict[int, list[Any]] = {}
    for share in rows:
        column = np.frombuffer(share.offsets, dtype="<i8")
        if not len(column):
            continue
        if column.min() < 0:
            fail(f"offsets of partition {share.partition}", "integers from 0 to 2^62", int(column.min()))
        found.setdefault(share.partition, []).append(column)
    return {p: columns[0] if len(columns) == 1 else np.concatenate(columns) for p, columns in found.items()}


@handles(groups.GroupLeave)
async def group_leave(broker: TopicKeeper, command: groups.GroupLeave, context: Context) -> None:
    runner = broker.runner(command.topic)
    await runner.call(partial(runner.streams.leave, command.group, command.member, command.session))


@handles(groups.ListGroupDeadLetters)
async def list_group_dead_letters(
    broker: TopicKeeper, command: groups.ListGroupDeadLetters, context: Context
) -> Page[GroupDeadLetter]:
    runner = broker.runner(command.topic)
    return await admin.dead_letters(runner, command.group, command.limit, command.cursor, command.max_bytes)


@handles(groups.ReplayGroupDeadLetters)
async def replay_group_dead_letters(
    broker: TopicKeeper, command: groups.ReplayGroupDeadLetters, context: Context
) -> Count:
    runner = broker.runner(command.topic)
    rows = None if command.rows is None else _columns(command.rows)
    return Count(await runner.call(partial(admin.replay_dead, runner, command.group, rows)))


@handles(groups.DeleteGroupDeadLetters)
async def delete_group_dead_letters(
    broker: TopicKeeper, command: groups.DeleteGroupDeadLetters, context: Context
) -> Count:
    runner = broker.runner(command.topic)
    rows = None if command.rows is None else _columns(command.rows)
    return Count(await runner.call(partial(admin.delete_dead, runner, command.group, rows)))
