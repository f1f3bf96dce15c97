"""Handler of Explain: the messages that would be popped next, why one message waits, and what holds messages back.

The order is not computed here: a turn asks for the selection that its pops would use. The records are read after it, so
the answer describes the state of that turn. The sentences are in core/explanation.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from heapline.contract import inspection
from heapline.contract.call import Context
from heapline.contract.fields import ANSWER_BYTES
from heapline.contract.inspection import DeliveryHold, ExplainedMessage, Explanation
from heapline.contract.message import MessageInfo, from_ms
from heapline.core.entries import DELAYED, LEASED, READY, Found
from heapline.core.explanation import Waiting, effective_priority, repr_name, sentence, span
from heapline.core.ids import unix_ms_of
from heapline.core.leases import DEADLINE, HOLDER
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.record import attempts_of, size_bound
from heapline.engine.handlers import handles
from heapline.engine.lookup import Record, departed, living, owner, read_records
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper


class _Place(NamedTuple):
    """A message, as a turn found it."""

    id: int
    found: Found
    line: int | None = None
    turns_ahead: int | None = None
    text: str = ""  # why it is not in line; empty if it is


class _View(NamedTuple):
    now: Now
    ready: int
    places: Sequence[_Place]
    holds: list[DeliveryHold]
    removed: MessageInfo | None = None


@handles(inspection.Explain)
async def explain(broker: TopicKeeper, command: inspection.Explain, context: Context) -> Explanation:
    runner = broker.runner(command.topic)
    if command.message_id is None:
        view = await runner.call(partial(_next, runner, command.limit))
    else:
        view = await runner.call(partial(_one, runner, runner.loaded.topic.find_id(command.message_id)))
    records = await read_records(runner, [place.found.position for place in view.places])
    if view.removed is None:
        items = list(_explained(runner, view, records))
    else:
        items = [ExplainedMessage(message=view.removed, text=_removed(view.removed, view.now))]
    return Explanation(topic=runner.name, ready=view.ready, items=items, holds=view.holds)


def _next(runner: TopicRunner, limit: int, now: Now) -> _View:
    topic, places = runner.loaded.topic, []
    chosen = runner.loaded.delivery.preview(limit, now)
    fits = int(np.searchsorted(np.cumsum(size_bound(chosen.positions)), ANSWER_BYTES, side="right"))
    columns = (column[: max(1, fits)].tolist() for column in (chosen.keys, chosen.ids, chosen.positions))
    for line, (key, id, position) in enumerate(zip(*columns, strict=True), 1):
        ahead = None if topic.fair is None else topic.fair.ahead(key)
        places.append(_Place(id, Found(READY, position, key, 0, False), line, ahead))
    return _View(now, topic.ready, places, list(_holds(runner, now)))


def _one(runner: TopicRunner, id: int, now: Now) -> _View:
    topic, partition = runner.loaded.topic, owner(runner, id)
    found = partition.entries.find(id)
    if found is None:
        return _View(now, topic.ready, [], [], departed(topic, partition, id))
    if found.place != READY:
        place = _Place(id, found, text=_elsewhere(partition, id, found, now))
    else:
        runner.loaded.delivery.preview(1, now)  # finds out which messages their keys' limits block
        hashes, parked = partition.entries.key_hashes, partition.entries.parked
        is_blocked = hashes is not None and parked.find(hashes.of_one(id), id) is not None
        line = None
        if topic.config.strategy == "best_first" and not is_blocked and partition.state.throttled is None:
            ahead = [p.entries.heap.count_below(found.key, id) for p in topic.partitions if p.state.throttled is None]
            line = 1 + sum(ahead)
        text = ""
        if partition.state.throttled is not None:
            text = f"Ready, but partition {partition.number} is throttled{_because(partition.state.throttled)}."
        elif is_blocked and topic.fair is not None:
            text = f"Ready, but its fairness key has all its {topic.fair.limit} leases."
        turns = None if topic.fair is None else topic.fair.ahead(found.key)
        place = _Place(id, found, line, turns, text)
    return _View(now, topic.ready, [place], list(_holds(runner, now)))


def _explained(runner: TopicRunner, view: _View, records: Sequence[Record | None]) -> Iterator[ExplainedMessage]:
    above: Waiting | None = None
    for place, record in zip(view.places, records, strict=True):
        partition = owner(runner, place.id)
        info = living(runner.loaded.topic, partition, place.id, place.found, record)
        if place.found.place != LEASED:  # leased since
            info = msgspec.structs.replace(info, holder=None, deadline=None)
        waited = max(0, view.now.steady - (unix_ms_of(place.id) if record is None else record.enqueued_at))
        text, effective = place.text, None
        if place.found.place == READY and info.priority is not None:
            effective = effective_priority(partition.entries.ordering, info.priority, waited)
            fairness_key = info.fairness_key
            waiting = Waiting(
                place.found.key, info.priority, waited, info.attempts, fairness_key, place.turns_ahead, effective
            )
            text = text or sentence(waiting, place.line, above)
            above = waiting
        yield ExplainedMessage(
            message=msgspec.structs.replace(info, payload=None, headers={}),
            text=text or "Ready, but its record is damaged.",
            line=place.line,
            age=waited / 1000,
            effective_priority=effective,
            turns_ahead=place.turns_ahead,
        )


# -- messages that are not in line -------------------------------------------------------------------------------------


def _elsewhere(partition: Partition, id: int, found: Found, now: Now) -> str:
    tries = attempts_of(found.position)
    if found.place == LEASED:
        lease = partition.entries.leases.by_id[id]
        holder = "an unnamed holder" if lease[HOLDER] is None else repr_name(lease[HOLDER])
        return f"Leased by {holder}: delivery {tries}, ends in {span(lease[DEADLINE] - now.steady)} unless extended."
    if found.place == DELAYED:
        wait = span(found.due - (now.wall if found.wall else now.steady))
        retry = f" for retry {tries}{_because(partition.entries.reasons.get(id))}" if tries else ""
        return f"Delayed{retry}: due in {wait}."
    letter = partition.entries.dead[id]
    return f"Dead since {span(now.steady - letter.at)}{_because(letter.reason)}, after {_counted(tries, 'delivery')}."


def _removed(info: MessageInfo, now: Now) -> str:
    ago = "" if info.ended_at is None else f" {span(now.steady - round(info.ended_at.timestamp() * 1000))} ago"
    return f"No longer in the queue: {info.state}{ago}{_because(info.reason)}."


def _because(reason: str | None) -> str:
    return f" ({repr_name(reason)})" if reason else ""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun.removesuffix('y') + 'ies'}"


# -- what holds messages back ------------------------------------------------------------------------------------------


def _holds(runner: TopicRunner, now: Now) -> Iterator[DeliveryHold]:
    """Yield reasons why fewer messages are delivered than are ready. The selection of this turn has been made."""
    topic, delivery, config = runner.loaded.topic, runner.loaded.delivery, runner.loaded.topic.config
    ready = topic.ready
    if not ready:
        return
    if topic.paused:
        until = None if topic.paused_until is None else from_ms(topic.paused_until)
        yield DeliveryHold(kind="paused", count=ready, until=until, text="The topic is paused.")
    if config.max_inflight and topic.leased >= config.max_inflight:
        text = f"{topic.leased} messages are leased, as many as max_inflight allows."
        yield DeliveryHold(kind="in_flight", count=ready, text=text)
    if delivery.rate is not None and delivery.rate.room(now.steady) <= 0:
        text = f"The limit of {config.max_pops_per_second:g} messages per second is used up."
        yield DeliveryHold(
            kind="rate", count=ready, text=text, until=from_ms(now.steady + delivery.rate.next_in(now.steady))
        )
    throttled = [p for p in topic.partitions if p.state.throttled is not None and p.entries.ready]
    if throttled:
        named = ", ".join(f"{p.number}{_because(p.state.throttled)}" for p in throttled[:5])
        more = f" and {len(throttled) - 5} more" if len(throttled) > 5 else ""
        count = sum(p.entries.ready for p in throttled)
        yield DeliveryHold(kind="throttled", count=count, text=f"Throttled partitions: {named}{more}.")
    parked = sum(p.entries.parked.rows for p in topic.partitions)
    if parked and topic.fair is not None:
        text = f"Their fairness keys have all their {topic.fair.limit} leases."
        yield DeliveryHold(kind="fairness", count=parked, text=text)
    fresh_until = delivery.heads.look_again_at if config.min_freshness else None
    if fresh_until is not None and fresh_until > now.steady:
        text = f"The best messages have been first for less than {config.min_freshness:g} s (min_freshness)."
        yield DeliveryHold(kind="freshness", count=ready, text=text, until=from_ms(fresh_until))
