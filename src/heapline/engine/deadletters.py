"""The dead-letter queue: list, replay, delete. In slices, because it may hold millions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from heapline.core.entries import DEAD
from heapline.engine import facts
from heapline.engine.lookup import owner, read_records
from heapline.engine.runner import TopicRunner
from heapline.model import DlqFilter, MessageInfo, Now

SLICE = 1000
Letter = tuple[MessageInfo, facts.Record | None]


async def find(runner: TopicRunner, ids: Sequence[int] | None, where: DlqFilter | None) -> AsyncIterator[list[Letter]]:
    """The dead letters asked for, oldest first, a slice at a time."""
    wanted = None if ids is None else set(ids)

    def all_dead(now: Now) -> list[int]:
        rows = [
            (dead.at, id)
            for partition in runner.topic.partitions
            for id, dead in partition.dead.items()
            if wanted is None or id in wanted
        ]
        return [id for _, id in sorted(rows)]

    dead = await runner.call(all_dead)
    for start in range(0, len(dead), SLICE):
        yield await _slice(runner, dead[start : start + SLICE], where)


async def _slice(runner: TopicRunner, ids: list[int], where: DlqFilter | None) -> list[Letter]:
    places = await runner.call(lambda now: [(id, owner(runner, id).find(id)) for id in ids])
    still = [(id, found) for id, found in places if found is not None and found.place == DEAD]
    records = await read_records(runner, [found.position for _, found in still])

    def describe(now: Now) -> list[Letter]:
        letters: list[Letter] = []
        for (id, _), record in zip(still, records, strict=True):
            partition = owner(runner, id)
            if id in partition.dead:
                found = partition.find(id)
                assert found is not None
                letters.append((facts.living(partition, runner.name, id, found, record), record))
        return letters

    letters = await runner.call(describe)
    return [letter for letter in letters if where is None or facts.matches(letter[0], where)]


async def listed(runner: TopicRunner, limit: int, where: DlqFilter | None) -> list[MessageInfo]:
    infos: list[MessageInfo] = []
    async for letters in find(runner, None, where):
        infos += [info for info, _ in letters]
        if len(infos) >= limit:
            break
    return infos[:limit]


async def replay(runner: TopicRunner, ids: Sequence[int] | None, where: DlqFilter | None, rate: float | None) -> int:
    """Bring them back; with a rate, the n-th falls due n/rate seconds from now."""
    count = 0
    start: int | None = None
    async for letters in find(runner, ids, where):

        def decide(now: Now, letters: list[Letter] = letters, first: int = count) -> int:
            nonlocal start
            start = now.steady if start is None else start
            shares: dict[int, tuple[list[int], list[int], list[int]]] = {}
            number = first
            for info, record in letters:
                if info.id not in runner.topic.partitions[info.partition].dead:
                    continue
                due = 0 if rate is None or number == 0 else start + round(number * 1000 / rate)
                ttl = record.ttl_ms if record is not None else 0
                dead_ids, dues, expires = shares.setdefault(info.partition, ([], [], []))
                dead_ids.append(info.id)
                dues.append(due if due > now.steady else 0)
                expires.append(max(due, now.steady) + ttl if ttl else 0)
                number += 1
            for partition_number, share in shares.items():
                partition = runner.topic.partitions[partition_number]
                seq = runner.topic.take_seq(len(share[0]))
                runner.emit(partition, partition.decide_replay(*share, seq), now)
            return number - first

        count += await runner.call(decide)
    return count


async def delete(runner: TopicRunner, ids: Sequence[int] | None, where: DlqFilter | None) -> int:
    count = 0
    async for letters in find(runner, ids, where):

        def decide(now: Now, letters: list[Letter] = letters) -> int:
            gone = 0
            for partition in runner.topic.partitions:
                mine = [i.id for i, _ in letters if i.partition == partition.number and i.id in partition.dead]
                if mine:
                    runner.emit(partition, partition.decide_dlq_delete(mine), now)
                    gone += len(mine)
            return gone

        count += await runner.call(decide)
    return count
