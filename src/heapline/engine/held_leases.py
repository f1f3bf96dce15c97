"""Handlers of the calls that show who holds leases, and that end a lease without its token.

The leases of a partition are in the order of their grants, so of their tokens. The first page reads only what it
returns. A later one lists the ids of the leases and begins by a binary search in that order. The leases of one holder
may be few among many, so several turns look for them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from heapq import merge, nsmallest
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

SCANNED = 20_000  # leases among which one turn looks for those of a holder
ENDED = "ended by an administrator"
Place = tuple[int, int, int]  # of a lease among all of a topic: when it was granted, its partition, its token

BEFORE_ALL: Place = (-1, -1, -1)


class _Held(NamedTuple):
    place: Place
    id: int
    lease: Lease


def _leases_after(partition: Partition, after: Place) -> Iterator[_Held]:
    by_id, ids = partition.entries.leases.by_id, _ids_after(partition, after)
    return (_Held(_place(partition, by_id[id]), id, by_id[id]) for id in ids)


def _ids_after(partition: Partition, after: Place) -> Iterator[int]:
    by_id = partition.entries.leases.by_id
    if after == BEFORE_ALL:
        return iter(by_id)
    ids = list(by_id)
    return islice(ids, bisect_right(ids, after, key=lambda id: _place(partition, by_id[id])), None)


def _place(partition: Partition, lease: Lease) -> Place:
    return lease[STARTED], partition.number, lease[TOKEN]


class _Part(NamedTuple):
    """The leases that one turn found, in order, and up to where it looked; None: to the end."""

    found: list[_Held]
    end: Place | None


def _next_part(partitions: Sequence[Partition], after: Place, limit: int) -> _Part:
    return _Part(list(islice(merge(*(_leases_after(p, after) for p in partitions)), limit)), None)


def _next_part_of(holder: str, partitions: Sequence[Partition], after: Place) -> _Part:
    found: list[_Held] = []
    ends = []
    scanned = max(1, SCANNED // max(1, len(partitions)))
    for partition in partitions:
        by_id = partition.entries.leases.by_id
        ids = list(islice(_ids_after(partition, after), scanned + 1))
        if len(ids) > scanned:
            ids.pop()
            ends.append(_place(partition, by_id[ids[-1]]))
        matching = [id for id in ids if by_id[id][HOLDER] == holder]
        found += [_Held(_place(partition, by_id[id]), id, by_id[id]) for id in matching]
    end = min(ends, default=None)
    return _Part(sorted((held for held in found if end is None or held.place <= end), key=lambda held: held.place), end)


@handles(inspection.ListLeases)
async def list_leases(broker: TopicKeeper, command: inspection.ListLeases, context: Context) -> Page[HeldLease]:
    runner, holder = broker.runner(command.topic), command.holder
    after: Place | None = read_cursor(command.cursor, Place, BEFORE_ALL)

    def read(after: Place, now: Now) -> _Part:
        partitions = [p for p in runner.loaded.topic.partitions if len(p.entries.leases)]
        if holder is None:
            return _next_part(partitions, after, command.limit + 1)
        return _next_part_of(holder, [p for p in partitions if p.entries.leases.held.get(holder)], after)

    page: PageBuilder[HeldLease] = PageBuilder(command.limit)
    while after is not None:
        part = await runner.call(partial(read, after))
        for held in part.found:
            if not page.add(_row(runner, held)):
                return Page(page.items, cursor_of(after))
            after = held.place
        after = part.end
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
        for worker in _workers(broker, name, after[1] if name == after[0] else "", command.limit + 1):
            if not page.add(worker):
                return Page(page.items, cursor_of(after))
            after = name, worker.holder
        await asyncio.sleep(0)
    return Page(page.items)


def _workers(broker: TopicKeeper, topic: str, after: str, limit: int) -> list[WorkerInfo]:
    """Return the first workers of a topic whose names follow a name. There may be very many."""
    try:
        runner = broker.runner(topic)
    except (TopicNotFound, TopicReloading, CorruptionError):  # deleted meanwhile, or not served now
        return []
    held = [p.entries.leases.held for p in runner.loaded.topic.partitions]
    waiting = Counter(pop.holder for pop in runner.turns.pops if pop.holder is not None)
    active = runner.counters.workers.active(runner.steady.now().steady)
    known: list[Mapping[str, object]] = [*held, waiting, active]
    names = {name for by_name in known for name in by_name if name > after}
    return [
        WorkerInfo(
            topic=runner.name,
            holder=holder,
            leases=sum(of_partition.get(holder, 0) for of_partition in held),
            waiting=waiting[holder],
            rate=active[holder].rate if holder in active else 0.0,
            last_lease_at=from_ms(active[holder].last_at) if holder in active else None,
        )
        for holder in nsmallest(limit, names)
    ]
