"""The dead-letter queue: list, replay and delete in slices, because it may hold millions of letters.

A slice is read in a turn, in the order that the partitions keep, from the place where the slice before it ended. So no
step of the event loop grows with the number of dead letters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from heapq import merge
from itertools import islice

import msgspec
import numpy as np

from heapline.contract import dead_letters
from heapline.contract.call import Context, Count, Page, cursor_of, read_cursor
from heapline.contract.dead_letters import matches, size_of
from heapline.contract.errors import MessageNotFound
from heapline.contract.fields import MessageId
from heapline.contract.message import EPOCH, DlqFilter, MessageInfo, from_ms
from heapline.core.dead_letters import BEFORE_ALL, Letter, Place
from heapline.core.entries import DEAD, Found
from heapline.core.events import I64
from heapline.core.ids import partition_of
from heapline.core.now import Now
from heapline.core.reasons import ReasonCount, ReasonGroup, ReasonTally
from heapline.core.record import size_bound
from heapline.engine.handlers import handles
from heapline.engine.lookup import Record, get, living, load_records, owner
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper

TALLY_CHUNKS = 6  # of about 1000 letters, whose reasons one turn counts
TASK = "heapline-task"  # the header that names the task of a message (client/tasks/task.py)
SLICE = 500  # letters that one turn handles
SLICE_BYTES = 4 << 20  # of their records
NO_FILTER = DlqFilter()
Read = Callable[[Place, Now], list[Letter]]  # returns the next slice after a place


def letters_after(runner: TopicRunner, place: Place, count: int, now: Now) -> list[Letter]:
    """Return the topic's next dead letters after this place, oldest first: at most `count` and SLICE_BYTES."""
    partitions = runner.loaded.topic.partitions
    return _first(merge(*(p.entries.dead.after(place) for p in partitions if len(p.entries.dead))), count)


def _first(letters: Iterable[Letter], count: int) -> list[Letter]:
    found = list(islice(letters, count))
    ends = np.cumsum(size_bound(_positions(found)))
    return found[: max(1, int(ends.searchsorted(SLICE_BYTES, side="right")))]


def _positions(letters: list[Letter]) -> I64:
    return np.array([position for _, _, position in letters], dtype=np.int64)


async def find(
    runner: TopicRunner, message_ids: list[MessageId] | None, where: DlqFilter | None
) -> AsyncIterator[list[Letter]]:
    """Yield the requested dead letters in slices, oldest first; those that die meanwhile are not included."""
    ids = runner.loaded.topic.own_ids(message_ids)
    read = await (_read_all(runner) if ids is None else _read_some(runner, ids))
    place = BEFORE_ALL
    while letters := await runner.call(partial(read, place)):
        place = letters[-1][:2]
        yield letters if where in (None, NO_FILTER) else await _matching(runner, letters, where)


async def _read_all(runner: TopicRunner) -> Read:
    def read(after: Place, now: Now) -> list[Letter]:
        return [letter for letter in letters_after(runner, after, SLICE, now) if letter[:2] <= end]

    end = await runner.call(lambda now: max(p.entries.dead.last() for p in runner.loaded.topic.partitions))
    return read


async def _read_some(runner: TopicRunner, ids: list[int]) -> Read:
    def lookup(now: Now) -> list[Place]:
        partitions = runner.loaded.topic.partitions
        mine = [id for id in set(ids) if partition_of(id) < len(partitions)]
        return sorted(place for id in mine if (place := owner(runner, id).entries.dead.place_of(id)) is not None)

    def read(after: Place, now: Now) -> list[Letter]:
        rest = islice(places, bisect_right(places, after), None)
        return _first((letter for place in rest if (letter := owner(runner, place[1]).entries.dead.at(place))), SLICE)

    places = await runner.call(lookup)
    return read


async def _matching(runner: TopicRunner, letters: list[Letter], where: DlqFilter) -> list[Letter]:
    if not _needs_records(where):
        return await runner.call(lambda now: [letter for letter in letters if _fits(runner, letter, where)])
    found = await _described(runner, letters)
    return [letter for letter, info in zip(letters, found, strict=True) if info is not None and matches(info, where)]


def _needs_records(where: DlqFilter) -> bool:
    return (where.key, where.priority_min, where.priority_max) != (None, None, None)


def _fits(runner: TopicRunner, letter: Letter, where: DlqFilter) -> bool:
    at, id, _ = letter
    dead = owner(runner, id).entries.dead.get(id)
    if dead is None or dead.at != at:
        return False
    info = MessageInfo(id=id, topic="", partition=0, state="dead", reason=dead.reason, ended_at=from_ms(at))
    return matches(info, where)


async def _described(runner: TopicRunner, letters: list[Letter]) -> list[MessageInfo | None]:
    """Return the information about each letter, or None for those that are no longer dead letters."""
    records = await load_records(runner, _positions(letters))

    def describe(now: Now) -> list[MessageInfo | None]:
        infos: list[MessageInfo | None] = []
        for row, (at, id, _) in enumerate(letters):
            partition = owner(runner, id)
            letter = partition.entries.dead.at((at, id))
            if letter is None:
                infos.append(None)
                continue
            record = None if row in records.bad else Record(records, row)
            infos.append(living(runner.loaded.topic, partition, id, Found(DEAD, letter[2], 0, 0, False), record))
        return infos

    return await runner.call(describe)


@handles(dead_letters.ListDeadLetters)
async def list_dead_letters(
    broker: TopicKeeper, command: dead_letters.ListDeadLetters, context: Context
) -> Page[MessageInfo]:
    """Return a page, oldest first."""
    runner, where = broker.runner(command.topic), command.where
    place = read_cursor(command.cursor, tuple[int, int], BEFORE_ALL)
    items: list[MessageInfo] = []
    size = 0
    while True:
        count = SLICE if where is not None else min(SLICE, command.limit - len(items) + 1)
        letters = await runner.call(partial(letters_after, runner, place, count))
        if not letters:
            return Page(items)
        for letter, info in zip(letters, await _described(runner, letters), strict=True):
            if info is not None and (where is None or matches(info, where)):
                size += size_of(info)
                if items and (len(items) == command.limit or size > command.max_bytes):
                    return Page(items, cursor_of(place))
                items.append(info)
            place = letter[:2]


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
        ttls = (await load_records(runner, _positions(letters))).rows["ttl_ms"].tolist()

        def decide(now: Now, letters: list[Letter] = letters, ttls: list[int] = ttls, first: int = count) -> int:
            nonlocal start
            start = now.steady if start is None else start
            shares: dict[int, tuple[list[int], list[int], list[int]]] = {}
            number = first
            for (at, id, _), ttl in zip(letters, ttls, strict=True):
                partition = owner(runner, id)
                if partition.entries.dead.place_of(id) != (at, id):
                    continue
                due = 0 if rate is None or number == 0 else start + round(number * 1000 / rate)
                dead_ids, dues, expires = shares.setdefault(partition.number, ([], [], []))
                dead_ids.append(id)
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
            shares: dict[int, list[int]] = {}
            for at, id, _ in letters:
                if (partition := owner(runner, id)).entries.dead.place_of(id) == (at, id):
                    shares.setdefault(partition.number, []).append(id)
            for number, ids in shares.items():
                partition = runner.loaded.topic.partitions[number]
                runner.loaded.emit(partition, partition.decide_dlq_delete(ids), now)
            return sum(map(len, shares.values()))

        count += await runner.call(decide)
    return Count(count)


# -- counting ----------------------------------------------------------------------------------------------------------


@handles(dead_letters.CountDeadLetters)
async def count_dead_letters(
    broker: TopicKeeper, command: dead_letters.CountDeadLetters, context: Context
) -> dead_letters.DeadLetterCount:
    runner, where = broker.runner(command.topic), command.where or NO_FILTER
    # Letters that die in this very millisecond are left out: more of them may follow.
    as_of = await runner.call(lambda now: from_ms(now.steady))
    if where.died_before is None or where.died_before > as_of:
        where = msgspec.structs.replace(where, died_before=as_of)
    if _needs_records(where):
        count = sum([len(letters) async for letters in find(runner, None, where)])
    else:
        tally = ReasonCount(where.reason)
        await _tally(runner, tally, _ceil_ms(where.died_after), _ceil_ms(where.died_before))
        count = tally.count
    return dead_letters.DeadLetterCount(count, as_of)


def _ceil_ms(at: datetime | None) -> int:
    return 0 if at is None else -((EPOCH - at) // timedelta(milliseconds=1))


@handles(dead_letters.GroupDeadLetters)
async def group_dead_letters(
    broker: TopicKeeper, command: dead_letters.GroupDeadLetters, context: Context
) -> dead_letters.DeadLetterGroups:
    runner = broker.runner(command.topic)
    end = await runner.call(lambda now: now.steady)
    tally = ReasonTally()
    await _tally(runner, tally, 0, end)
    items = [await _group(runner, group) for group in tally.largest(command.limit)]
    others = tally.count - sum(item.count for item in items)
    return dead_letters.DeadLetterGroups(items=items, count=tally.count, others=others, as_of=from_ms(end))


async def _tally(runner: TopicRunner, tally: ReasonTally | ReasonCount, start: int, end: int) -> None:
    """Count the letters that died from `start` to before `end`, in ms, some thousands per turn."""

    def count(number: int, place: Place, now: Now) -> Place | None:
        last = None
        for chunk in islice(runner.loaded.topic.partitions[number].entries.dead.chunks_after(place), TALLY_CHUNKS):
            rows = chunk.only(slice(chunk.ats.searchsorted(end)))
            if len(rows.ids):
                tally.add(rows.reasons.tolist(), rows.ats.tolist(), rows.ids.tolist())
                last = rows.place(-1)
            if len(rows.ids) < len(chunk.ids):
                return None
        return last  # the first chunk may be empty, if the place is the end of one

    for number in range(len(runner.loaded.topic.partitions)):
        place: Place | None = (start, -1)
        while place is not None:
            place = await runner.call(partial(count, number, place))


async def _group(runner: TopicRunner, group: ReasonGroup) -> dead_letters.DeadLetterGroup:
    letters = [(0, id, place.position) for id in group.ids if (place := owner(runner, id).entries.dead.get(id))]
    records = await load_records(runner, _positions(letters))
    headers = [Record(records, row).headers for row in range(len(letters)) if row not in records.bad]
    return dead_letters.DeadLetterGroup(
        reason=group.reason,
        count=group.count,
        match=group.match,
        example=group.example,
        first_at=from_ms(group.first_at),
        last_at=from_ms(group.last_at),
        message_ids=[runner.loaded.topic.ulid(id) for id in group.ids],
        tasks=sorted({found[TASK] for found in headers if TASK in found}),
    )
