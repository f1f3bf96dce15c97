"""Create, describe, move and delete consumer groups, and handle their dead letters.

Offsets are resolved before the turn that decides (start_offsets.py). Every reported value was true in a turn and is
durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.call import Page, cursor_of, read_cursor
from heapline.contract.config import GroupConfig, make_group_config
from heapline.contract.errors import BadRequest, GroupExists, ResourceExhausted
from heapline.contract.message import from_ms
from heapline.contract.stream import GroupDeadLetter, GroupInfo, GroupOffset, Offsets, Place
from heapline.core.events import encode_event
from heapline.core.groups.group import Group, Groups
from heapline.core.groups.offsets import GroupOffsets
from heapline.core.now import Now
from heapline.core.record import size_bound
from heapline.engine.groups.start_offsets import Start, check_place, is_there, resolve
from heapline.engine.lookup import Record
from heapline.engine.runner import TopicRunner

I64 = npt.NDArray[np.int64]
GROUPS_MAX = 1000  # per topic; any consumer can create a group by subscribing, and each group may hold the journal
DEAD_ROWS = 4096  # dead letters handled by one event


def check_streams(runner: TopicRunner) -> None:
    if not runner.loaded.topic.config.streams:
        raise BadRequest(
            f"topic {runner.name!r} was created with streams=False, so it cannot have groups; create another topic "
            "with streams=True"
        )


async def create(runner: TopicRunner, name: str, start: Place, fields: Mapping[str, Any]) -> GroupInfo:
    """Create the group, unless it already exists with the same settings."""
    check_streams(runner)
    config = make_group_config(fields)
    check_place("start", start, len(runner.loaded.topic.partitions))
    while True:
        is_there = name in runner.loaded.topic.groups.by_name
        starts = None if is_there else await resolve(runner, start, range(len(runner.loaded.topic.partitions)))
        made = await runner.call(partial(_create, runner, name, start, starts, config))
        if made is not None:
            return made


def _create(
    runner: TopicRunner, name: str, start: Place, starts: list[Start] | None, config: GroupConfig, now: Now
) -> GroupInfo | None:
    """Return None if the group was deleted meanwhile, or if the log no longer starts where the group was to start."""
    topic = runner.loaded.topic
    known = topic.groups.by_name.get(name)
    if known is not None:
        differing = [f for f in GroupConfig.__struct_fields__ if getattr(known.config, f) != getattr(config, f)]
        if differing:
            raise GroupExists(runner.name, name, differing)
        return info(runner, known, now)
    if starts is None or not is_there(runner, starts):
        return None
    if len(topic.groups.by_name) >= GROUPS_MAX:
        raise ResourceExhausted(f"the groups of topic {runner.name!r}", GROUPS_MAX)
    if start == "latest":  # the latest offset in this turn, not at the time of the request
        starts = [(p.number, p.state.offset, topic.counts[p.number].total) for p in topic.partitions]
    missing = range(len(starts), len(topic.partitions))  # the topic has grown meanwhile
    starts = [*starts, *((p, 0, 0) for p in missing)]
    events = Groups.decide_create(name, config, starts, now.steady)
    nbytes = sum(len(encode_event(event)) for _, event in events)
    topic.reserve(runner.loaded.journal, nbytes, now, blocks=0, frames=len(events))  # atomic: see decide_rest
    for partition, event in events:
        runner.loaded.emit(topic.partitions[partition], event, now)
    group = runner.streams.group(name)
    runner.streams.noted(group)
    return info(runner, group, now)


async def ensure(runner: TopicRunner, name: str, session: str, start: Place, fields: Mapping[str, Any] | None) -> None:
    """Create the group of a fetch if it does not exist. Raise if the group exists with different settings."""
    known = runner.loaded.topic.groups.by_name.get(name)
    if known is None:
        await runner.call(lambda now: runner.streams.sessions.check_ended(name, session))
        await create(runner, name, start, fields or {})
    elif fields:
        wanted = make_group_config(fields, known.config)
        differing = [f for f in fields if getattr(known.config, f) != getattr(wanted, f)]
        if differing:
            await runner.call(lambda now: None)  # the group is durable
            raise GroupExists(runner.name, name, differing)


def info(runner: TopicRunner, group: Group, now: Now) -> GroupInfo:
    return GroupInfo(
        name=group.name,
        topic=runner.name,
        config=group.config,
        generation=group.members.generation,
        members={member: sorted(group.members.reads(member)) for member in group.members.leases},
        offsets=offsets_of(runner, group),
        used_at=from_ms(group.used_at),
        holding=not group.config.observer and group.in_use(now.steady),
    )


def offsets_of(runner: TopicRunner, group: Group) -> list[GroupOffset]:
    topic = runner.loaded.topic
    return [
        GroupOffset(
            partition=number,
            committed=place.committed,
            end=topic.partitions[number].state.offset,
            lag=place.lag(topic.counts[number].total),
            outstanding=place.outstanding,
            retrying=len(place.failed) - place.failed.out,
            dead=len(place.dead),
            member=group.members.owners.get(number),
        )
        for number, place in sorted(group.partitions.items())
    ]


async def reset(runner: TopicRunner, name: str, to: Place, partitions: Sequence[int] | None) -> list[GroupOffset]:
    await runner.call(lambda now: runner.streams.group(name))  # raises if it does not exist
    count = len(runner.loaded.topic.partitions)
    check_place("to", to, count)
    if partitions is None:
        partitions = sorted(to) if isinstance(to, Mapping) else range(count)
    elif isinstance(to, Mapping):
        raise BadRequest("give {partition: offset} or partitions, not both")
    starts: list[Start] = []

    def decide(now: Now) -> list[GroupOffset] | None:
        group = runner.streams.group(name)
        if to != "latest" and not is_there(runner, starts):
            return None
        for number, offset, below in starts:
            if to == "latest":
                topic = runner.loaded.topic
                offset, below = topic.partitions[number].state.offset, topic.counts[number].total
            event = group.partitions[number].decide_reset(offset, below, now.steady)
            runner.streams.emit(group, number, event, now)
        return offsets_of(runner, group)

    while True:
        starts = await resolve(runner, to, partitions)
        moved = await runner.call(decide)
        if moved is not None:
            return moved


def delete(runner: TopicRunner, name: str, now: Now) -> None:
    runner.streams.group(name)
    for partition, event in runner.loaded.topic.groups.decide_delete(name, now.steady):
        runner.loaded.emit(runner.loaded.topic.partitions[partition], event, now)
    # A unit is replayed partition by partition: a new group of the same name in this unit would replace the old one
    # piecemeal.
    runner.loaded.topic.seal(runner.loaded.journal, now)
    runner.streams.ended(name)


# -- dead letters ------------------------------------------------------------------------------------------------------


async def dead_letters(
    runner: TopicRunner, name: str, limit: int, cursor: str | None, max_bytes: int
) -> Page[GroupDeadLetter]:
    """Return a page of the group's dead letters, oldest first."""
    after = read_cursor(cursor, tuple[int, int, int], (-1, -1, -1))

    def look(now: Now) -> list[tuple[tuple[int, int, int], Any]]:
        group = runner.streams.group(name)
        rows = (
            ((row.at, number, at), row) for number, place in group.partitions.items() for at, row in place.dead.items()
        )
        return sorted((row for row in rows if row[0] > after), key=lambda row: row[0])[: limit + 1]

    rows = await runner.call(look)
    sizes = np.cumsum(size_bound(np.array([row.position for _, row in rows], dtype=np.int64)))
    count = min(limit, max(1, int(np.searchsorted(sizes, max_bytes, side="right"))), len(rows))
    following = cursor_of(rows[count - 1][0]) if len(rows) > count else None
    rows = rows[:count]
    positions = np.array([row.position for _, row in rows], dtype=np.int64)
    records, missing = runner.loaded.journal.cached(positions)
    if len(missing):
        records.fill(missing, await runner.load(positions[missing]))
    letters = []
    for i, ((_, number, offset), row) in enumerate(rows):
        is_bad = i in records.bad or int(records.rows["id"][i]) != row.id
        record = None if is_bad else Record(records, i)
        letters.append(
            GroupDeadLetter(
                partition=number,
                offset=offset,
                id=row.id,
                attempts=row.attempts,
                reason=row.reason,
                died_at=from_ms(row.at),
                payload=None if record is None else record.payload,
                priority=None if record is None else record.priority,
                key=None if record is None else record.key,
                headers={} if record is None else record.headers,
                id_suffix=runner.loaded.topic.id_suffix,
            )
        )
    return Page(letters, following)


def replay_dead(runner: TopicRunner, name: str, offsets: Offsets | None, now: Now) -> int:
    group = runner.streams.group(name)
    before = sum(len(place.dead) for place in group.partitions.values())
    for number, place, some in _chosen(group, offsets):
        for event in place.decide_replay_dead(some, now.steady, now.steady):
            runner.streams.emit(group, number, event, now)
    return before - sum(len(place.dead) for place in group.partitions.values())


def delete_dead(runner: TopicRunner, name: str, offsets: Offsets | None, now: Now) -> int:
    group = runner.streams.group(name)
    before = sum(len(place.dead) for place in group.partitions.values())
    for number, place, some in _chosen(group, offsets):
        event = place.decide_delete_dead(some, now.steady)
        if event is not None:
            runner.streams.emit(group, number, event, now)
    return before - sum(len(place.dead) for place in group.partitions.values())


def _chosen(group: Group, offsets: Offsets | None) -> list[tuple[int, GroupOffsets, I64]]:
    wanted = {n: list(p.dead) for n, p in group.partitions.items()} if offsets is None else offsets
    chosen = []
    for number, some in wanted.items():
        place = group.partitions.get(number)
        column = np.unique(np.asarray(some, dtype=np.int64))
        if place is not None:
            cuts = range(0, len(column), DEAD_ROWS)
            chosen += [(number, place, column[at : at + DEAD_ROWS]) for at in cuts]
    return chosen
