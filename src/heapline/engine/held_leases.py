"""Handlers of the calls that show who holds leases, and that end a lease without its token.

The leases of a partition are in the order of their grants, so of their tokens. The first page reads only what it
returns. A later one lists the ids of the leases, 0.2 µs each, and begins by a binary search in that order. A page is
filled in slices, because a filter may match few leases.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import partial
from heapq import merge
from itertools import islice
from typing import NamedTuple

from heapline.contract import inspection
from heapline.contract.call import Context, Count, Page, PageBuilder, cursor_of, read_cursor
from heapline.contract.check import instant_to_ms
from heapline.contract.errors import CorruptionError, TopicNotFound, TopicReloading
from heapline.contract.inspection import HeldLease, WorkerInfo
from heapline.contract.message import from_ms
from heapline.core.leases import DEADLINE, HOLDER, POSITION, STARTED, TOKEN, Lease
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.record import attempts_of
from heapline.engine.handlers import handles
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper

SLICE = 1000  # leases that one turn reads
ENDED = "ended by an administrator"
Place = tuple[int, int, int]  # of a lease among all of a topic: when it was granted, its partition, its token
BEFORE_ALL: Place = (-1, -1, -1)


class _Held(NamedTuple):
    place: Place
    id: int
    lease: Lease


def _leases_after(partition: Partition, after: Place) -> Iterator[_Held]:
    by_id, number = partition.entries.leases.by_id, partition.number

    def held(id: int) -> _Held:
        lease = by_id[id]
        return _Held((lease[STARTED], number, lease[TOKEN]), id, lease)

    if after == BEFORE_ALL:
        return map(held, by_id)
    ids = list(by_id)
    start = bisect_right(ids, after, key=lambda id: held(id).place)
    return map(held, islice(ids, start, None))


@handles(inspection.ListLeases)
async def list_leases(broker: TopicKeeper, command: inspection.ListLeases, context: Context) -> Page[HeldLease]:
    runner, holder = broker.runner(command.topic), command.holder
    after = read_cursor(command.cursor, Place, BEFORE_ALL)
    wanted = SLICE if holder is not None else command.limit + 1

    def read(after: Place, now: Now) -> list[_Held]:
        partitions = [p for p in runner.loaded.topic.partitions if len(p.entries.leases)]
        if holder is not None:
            partitions = [p for p in partitions if p.entries.leases.held.get(holder)]
        return list(islice(merge(*(_leases_after(p, after) for p in partitions)), wanted))

    page: PageBuilder[HeldLease] = PageBuilder(command.limit)
    while found := await runner.call(partial(read, after)):
        for held in found:
            if holder in (None, held.lease[HOLDER]) and not page.add(_row(runner, held)):
                return Page(page.items, cursor_of(after))
            after = held.place
    return Page(page.items)


def _row(runner: TopicRunner, held: _Held) -> HeldLease:
    return HeldLease(
        id=held.id,
        partition=held.place[1],
        holder=held.lease[HOLDER],
        since=from_ms(held.lease[STARTED]),
        deadline=from_ms(held.lease[DEADLINE]),
        attempts=attempts_of(held.lease[POSITION]),
        id_suffix=runner.loaded.topic.id_suffix,
    )


@handles(inspection.EndLeases)
async def end_leases(broker: TopicKeeper, command: inspection.EndLeases, context: Context) -> Count:
    runner = broker.runner(command.topic)
    ids = list(dict.fromkeys(runner.loaded.topic.own_ids(command.ids) or ()))
    until = None if command.granted_until is None else instant_to_ms(command.granted_until)

    def decide(now: Now) -> int:
        topic, count = runner.loaded.topic, 0
        for partition, part_ids, _ in topic.by_partition(ids, ids):
            by_id = partition.entries.leases.by_id
            leases = [(id, lease) for id in part_ids if (lease := by_id.get(id)) is not None]
            chosen = {id: lease[TOKEN] for id, lease in leases if until is None or lease[STARTED] <= until}
            reason = command.reason or ENDED
            decision = partition.decide_nack(list(chosen), list(chosen.values()), now, None, reason)
            runner.loaded.emit_decision(partition, decision, now)
            count += len(chosen)
        return count

    return Count(await runner.call(decide))


@handles(inspection.ListWorkers)
async def list_workers(broker: TopicKeeper, command: inspection.ListWorkers, context: Context) -> Page[WorkerInfo]:
    """Return a page. It is read from memory, topic by topic, and decides nothing, so it waits for no commit."""
    after = read_cursor(command.cursor, tuple[str, str], ("", ""))
    page: PageBuilder[WorkerInfo] = PageBuilder(command.limit)
    for name in sorted(info.name for info in broker.topic_infos()):
        if name < after[0]:
            continue
        for worker in _workers(broker, name):
            if (name, worker.holder) > after:
                if not page.add(worker):
                    return Page(page.items, cursor_of(after))
                after = name, worker.holder
        await asyncio.sleep(0)
    return Page(page.items)


def _workers(broker: TopicKeeper, topic: str) -> list[WorkerInfo]:
    try:
        runner = broker.runner(topic)
    except (TopicNotFound, TopicReloading, CorruptionError):  # deleted meanwhile, or not served now
        return []
    now = runner.steady.now().steady
    leases: Counter[str] = Counter()
    for partition in runner.loaded.topic.partitions:
        leases.update(partition.entries.leases.held)
    waiting = Counter(pop.holder for pop in runner.turns.pops if pop.holder is not None)
    active = runner.counters.workers.active(now)
    return [
        WorkerInfo(
            topic=runner.name,
            holder=holder,
            leases=leases[holder],
            waiting=waiting[holder],
            rate=active[holder].rate if holder in active else 0.0,
            last_lease_at=from_ms(active[holder].last_at) if holder in active else None,
        )
        for holder in sorted({*leases, *waiting, *active})
    ]
