"""The dead-letter queue: list, replay and delete in slices, because it may hold millions of letters."""

from __future__ import annotations

from collections.abc import AsyncIterator

from heapline.contract import dead_letters
from heapline.contract.call import Context, Count, Page, cursor_of, read_cursor
from heapline.contract.dead_letters import matches
from heapline.contract.errors import MessageNotFound
from heapline.contract.fields import MessageId
from heapline.contract.message import DlqFilter, MessageInfo
from heapline.core.entries import DEAD
from heapline.core.now import Now
from heapline.engine.handlers import handles
from heapline.engine.lookup import Record, get, living, owner, read_records
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper

SLICE = 1000
Letter = tuple[MessageInfo, Record | None]


async def find(
    runner: TopicRunner, message_ids: list[MessageId] | None, where: DlqFilter | None
) -> AsyncIterator[list[Letter]]:
    """Yield the requested dead letters in slices, oldest first."""
    ids = runner.loaded.topic.own_ids(message_ids)
    wanted = None if ids is None else set(ids)

    def all_dead(now: Now) -> list[int]:
        rows = [
            (dead.at, id)
            for partition in runner.loaded.topic.partitions
            for id, dead in partition.entries.dead.items()
            if wanted is None or id in wanted
        ]
        return [id for _, id in sorted(rows)]

    dead = await runner.call(all_dead)
    for start in range(0, len(dead), SLICE):
        yield await _slice(runner, dead[start : start + SLICE], where)


async def _slice(runner: TopicRunner, ids: list[int], where: DlqFilter | None) -> list[Letter]:
    places = await runner.call(lambda now: [(id, owner(runner, id).entries.find(id)) for id in ids])
    still = [(id, found) for id, found in places if found is not None and found.place == DEAD]
    records = await read_records(runner, [found.position for _, found in still])

    def describe(now: Now) -> list[Letter]:
        letters: list[Letter] = []
        for (id, _), record in zip(still, records, strict=True):
            partition = owner(runner, id)
            if id in partition.entries.dead:
                found = partition.entries.find(id)
                assert found is not None
                letters.append((living(runner.loaded.topic, partition, id, found, record), record))
        return letters

    letters = await runner.call(describe)
    return [letter for letter in letters if where is None or matches(letter[0], where)]


@handles(dead_letters.ListDeadLetters)
async def list_dead_letters(
    broker: TopicKeeper, command: dead_letters.ListDeadLetters, context: Context
) -> Page[MessageInfo]:
    """Return a page, oldest first. Sorts all dead letters of the topic each time, because no such order is kept."""
    runner = broker.runner(command.topic)
    after = read_cursor(command.cursor, tuple[int, int], (-1, -1))

    def later(now: Now) -> list[tuple[int, int]]:
        rows = ((dead.at, id) for p in runner.loaded.topic.partitions for id, dead in p.entries.dead.items())
        return sorted(row for row in rows if row > after)

    rows = await runner.call(later)
    items: list[MessageInfo] = []
    size, last = 0, after
    for start in range(0, len(rows), SLICE):
        part = rows[start : start + SLICE]
        infos = {info.id: info for info, _ in await _slice(runner, [id for _, id in part], command.where)}
        for row in part:
            info = infos.get(row[1])
            if info is None:
                continue
            size += len(info.payload or b"")
            if items and (len(items) == command.limit or size > command.max_bytes):
                return Page(items, cursor_of(last))
            items.append(info)
            last = row
    return Page(items)


@handles(dead_letters.GetDeadLetter)
async def get_dead_letter(broker: TopicKeeper, command: dead_letters.GetDeadLetter, context: Context) -> MessageInfo:
    runner = broker.runner(command.topic)
    info = await get(runner, runner.loaded.topic.find_id(command.message_id))
    if info.state != "dead":
        raise MessageNotFound(command.topic, info.message_id)
    return info


@handles(dead_letters.ReplayDeadLetters)
async def replay_dead_letters(broker: TopicKeeper, command: dead_letters.ReplayDeadLetters, context: Context) -> Count:
    """Return dead letters to the queue; with a rate, the n-th becomes due n/rate seconds from now."""
    runner, rate, count = broker.runner(command.topic), command.rate, 0
    start: int | None = None
    async for letters in find(runner, command.ids, command.where):

        def decide(now: Now, letters: list[Letter] = letters, first: int = count) -> int:
            nonlocal start
            start = now.steady if start is None else start
            shares: dict[int, tuple[list[int], list[int], list[int]]] = {}
            number = first
            for info, record in letters:
                if info.id not in runner.loaded.topic.partitions[info.partition].entries.dead:
                    continue
                due = 0 if rate is None or number == 0 else start + round(number * 1000 / rate)
                ttl = record.ttl_ms if record is not None else 0
                dead_ids, dues, expires = shares.setdefault(info.partition, ([], [], []))
                dead_ids.append(info.id)
                dues.append(due if due > now.steady else 0)
                expires.append(max(due, now.steady) + ttl if ttl else 0)
                number += 1
            for partition_number, share in shares.items():
                partition = runner.loaded.topic.partitions[partition_number]
                seq = runner.loaded.topic.take_seq(len(share[0]))
                runner.loaded.emit(partition, partition.decide_replay(*share, seq), now)
            return number - first

        count += await runner.call(decide)
    return Count(count)


@handles(dead_letters.DeleteDeadLetters)
async def delete_dead_letters(broker: TopicKeeper, command: dead_letters.DeleteDeadLetters, context: Context) -> Count:
    runner, count = broker.runner(command.topic), 0
    async for letters in find(runner, command.ids, command.where):

        def decide(now: Now, letters: list[Letter] = letters) -> int:
            gone = 0
            for partition in runner.loaded.topic.partitions:
                mine = [i.id for i, _ in letters if i.partition == partition.number and i.id in partition.entries.dead]
                if mine:
                    runner.loaded.emit(partition, partition.decide_dlq_delete(mine), now)
                    gone += len(mine)
            return gone

        count += await runner.call(decide)
    return Count(count)
