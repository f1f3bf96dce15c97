"""Recompute from the log of a topic the rank of every leased message among all that were eligible.

The log of each partition is in order; across partitions, spine sequences order the events that make messages eligible
or lease them. A reschedule has a sequence too, from which its message is ranked by its new key. If an event has
no sequence (a nack without backoff, a cancellation), its position in its unit is unknown; then
a message is only counted while it was *certainly* eligible. So a computed rank is never too high, and one
above `k` is a broken promise.

Leases with one sequence are one step: the messages of a selection, delivered in the order of their keys.
Rank is 1 + the number of certainly eligible messages that are strictly better and not of the same step; messages of
throttled partitions do not count. A message enqueued before the log's start is unknown, and not counted.
If fairness keys take turns, only better priorities count; if leases per key are limited (now: an earlier limit
is unknown), messages with a key may be blocked at any time, and do not count.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import groupby
from typing import Any, NamedTuple

from heapline.contract.broker import Broker
from heapline.contract.config import TopicConfig
from heapline.contract.message import LogEvent, LogFrame
from heapline.core.ids import partition_of
from heapline.core.partition import ordering_of
from heapline.core.record import FLAG_FAIRNESS

#: Events that end a message's wait, without a sequence that says when.
_LEAVE = {"cancelled", "expired", "dead_lettered", "acked", "dead_deleted"}
#: Events that may make messages eligible, and the column that is 0 for those rows (None = all).
_DUES = {"fired": None, "released": None, "enqueued": "due", "nacked": "dues", "lease_expired": "dues",
         "replayed": "dues", "rescheduled": "dues"}  # fmt: skip
Key = tuple[int, int]  # (what rank counts, id)


class Ranked(NamedTuple):
    id: int
    rank: int
    seq: int


class _Step(NamedTuple):
    """An event of a unit that has a sequence."""

    seq: int
    is_lease: bool
    ids: list[int]  # leased or made eligible
    moved: Mapping[int, int] = {}  # id of a rescheduled message -> its new heap key


class RankAudit:
    """Feed it the frames of whole units, in order."""

    def __init__(
        self, config: TopicConfig, rank_key: Callable[[int], int] | None = None, unknown: Iterable[int] = ()
    ) -> None:
        """`rank_key`: of a heap key, the part that rank counts; then only a better one counts, not an older id.
        `unknown`: partitions whose log does not go back to their beginning; they may be throttled."""
        self._ordering = ordering_of(config)
        if rank_key is None and self._ordering.has_turns:
            rank_key = self._ordering.rank_key
        self._rank_key = rank_key or int
        self._is_limited = config.max_inflight_per_key > 0
        self._held_back: set[int] = set()  # messages that a limit may block
        self.steps: dict[int, list[int]] = {}  # sequence -> everything leased under it, if known beforehand
        self._later: set[int] = set()  # prepared with a delay
        self._older_is_better = rank_key is None
        self._keys: dict[int, Key] = {}
        self._ready: list[Key] = []  # sorted: certainly eligible
        self._throttled = set(unknown)
        self.ranked: list[Ranked] = []

    def unit(self, frames: Iterable[LogFrame]) -> None:
        """The frames of one unit, one per partition."""
        frames = list(frames)
        for frame in frames:
            for event in frame.events:
                self._learn_keys(event)
        self._judge(frames)
        for frame in frames:
            for event in frame.events:
                self._settle(frame.partition, event)

    def _learn_keys(self, event: LogEvent) -> None:
        if event.kind == "rescheduled" and self._is_limited:
            # Messages from before the log's start: their fairness keys are unknown.
            self._held_back.update(id for id in event.columns["ids"].tolist() if id not in self._keys)
        if event.kind not in ("enqueued", "batch_prepared"):
            return
        columns = event.columns if event.kind == "enqueued" else event.columns["messages"]
        ids = columns["ids"]
        if not len(ids):
            return
        keys = self._ordering.keys(columns["priority"], columns["enqueued_at"])
        if self._ordering.has_turns:
            keys = self._ordering.with_turns(keys, columns["turn"])
        for id, key in zip(ids.tolist(), keys.tolist(), strict=True):
            self._keys[id] = (self._rank_key(key), id)
        if event.kind == "batch_prepared":
            self._later.update(ids[columns["due"] != 0].tolist())
        if self._is_limited:
            self._held_back.update(ids[(columns["flags"] & FLAG_FAIRNESS) != 0].tolist())

    # -- during a unit -------------------------------------------------------------------------------------------------

    def _judge(self, frames: list[LogFrame]) -> None:
        unsure, closed = _doubtful(frames)
        closed |= self._throttled
        ready = [key for key in self._ready if key[1] not in unsure and partition_of(key[1]) not in closed]
        keys: ChainMap[int, Key] = ChainMap({}, self._keys)  # including the reschedules of this unit so far
        steps = [step for frame in frames for event in frame.events for step in self._steps(event)]
        steps.sort(key=lambda step: step[:2])
        for (seq, is_lease), group in groupby(steps, key=lambda step: step[:2]):
            together = list(group)
            ids = [id for step in together for id in step.ids]
            if is_lease:
                self._rank(ids, seq, ready, keys)
                continue
            for step in together:
                self._move(step.moved, ready, keys)
            for id in ids:
                if self._counts(id, keys) and id not in unsure and partition_of(id) not in closed:
                    insort(ready, keys[id])

    def _move(self, moved: Mapping[int, int], ready: list[Key], keys: MutableMapping[int, Key]) -> None:
        for id, key in moved.items():
            _remove(ready, keys.get(id))
            keys[id] = (self._rank_key(key), id)

    def _counts(self, id: int, keys: Mapping[int, Key]) -> bool:
        return id in keys and id not in self._held_back

    def _steps(self, event: LogEvent) -> list[_Step]:
        columns: dict[str, Any] = event.columns
        if event.kind == "leased":
            return [_Step(columns["seq"], True, columns["ids"].tolist())]
        if event.kind == "rescheduled":
            moved = dict(zip(columns["ids"].tolist(), columns["keys"].tolist(), strict=True))
            return [_Step(columns["seq"], False, self._waiting_at_once(event), moved)]
        if event.kind in ("enqueued", "fired", "released", "replayed", "batch_committed"):
            ids = self._waiting_at_once(event)
            return [_Step(columns["seq"], False, ids)] if ids else []
        return []

    def _waiting_at_once(self, event: LogEvent) -> list[int]:
        """Messages that this event makes eligible, with or without a sequence."""
        if event.kind == "batch_committed" and "ids" in event.columns:
            return [id for id in event.columns["ids"].tolist() if id not in self._later]
        if event.kind not in _DUES or "ids" not in event.columns:
            return []
        ids = event.columns["ids"]
        due = _DUES[event.kind]
        found: list[int] = (ids if due is None else ids[event.columns[due] == 0]).tolist()
        return found

    def _rank(self, ids: list[int], seq: int, ready: list[Key], keys: Mapping[int, Key]) -> None:
        known = [keys[id] for id in ids if id in keys]
        # A selection may be in two units, if the first one was full.
        gone = [keys[id] for id in self.steps.get(seq, ()) if id in keys]
        for key in {*known, *gone}:
            _remove(ready, key)
        for value, id in known:
            better = bisect_left(ready, (value, id if self._older_is_better else -1))
            self.ranked.append(Ranked(id, 1 + better, seq))

    # -- after a unit --------------------------------------------------------------------------------------------------

    def _settle(self, partition: int, event: LogEvent) -> None:
        """Update the state after the unit: a partition's own events are in order."""
        columns = event.columns
        kind = event.kind
        if kind == "throttled":
            (self._throttled.add if columns["throttled"] else self._throttled.discard)(partition)
        elif kind == "purged":
            self._ready = [key for key in self._ready if partition_of(key[1]) != partition]
        elif kind == "rescheduled":
            moved = dict(zip(columns["ids"].tolist(), columns["keys"].tolist(), strict=True))
            self._move(moved, self._ready, self._keys)
            for id in self._waiting_at_once(event):
                self._add(id)
        elif kind == "leased" or kind in _LEAVE:
            if kind == "leased":
                self._throttled.discard(partition)
            for id in columns["ids"].tolist():
                self._drop(id)
                if kind in _LEAVE and kind != "dead_lettered":
                    self._keys.pop(id, None)
        else:
            for id in self._waiting_at_once(event):
                self._add(id)

    def _add(self, id: int) -> None:
        if self._counts(id, self._keys):
            self._drop(id)
            insort(self._ready, self._keys[id])

    def _drop(self, id: int) -> None:
        _remove(self._ready, self._keys.get(id))


def _remove(ready: list[Key], key: Key | None) -> None:
    """Remove a key from the sorted list if it is there."""
    if key is not None:
        place = bisect_left(ready, key)
        if place < len(ready) and ready[place] == key:
            del ready[place]


def _doubtful(frames: list[LogFrame]) -> tuple[set[int], set[int]]:
    """Messages and partitions whose state during this unit is uncertain."""
    unsure: set[int] = set()
    closed: set[int] = set()
    for frame in frames:
        for event in frame.events:
            if event.kind in ("purged", "throttled"):
                closed.add(frame.partition)
            elif event.kind in _LEAVE or event.kind in ("nacked", "lease_expired"):
                unsure.update(event.columns["ids"].tolist())
    return unsure, closed


async def ranks(broker: Broker, topic: str, rank_key: Callable[[int], int] | None = None) -> list[Ranked]:
    """Return the rank of every lease that is still in the topic's log."""
    (info,) = [info for info in await broker.list_topics() if info.name == topic]
    units: dict[int, list[LogFrame]] = {}
    offsets = await broker.offsets(topic)
    audit = RankAudit(info.config, rank_key, [partition for partition, (start, _) in offsets.items() if start])
    for partition, (start, _) in offsets.items():
        async for frame in broker.read_log(topic, partition, start):
            units.setdefault(frame.unit, []).append(frame)
    for frames in units.values():
        for event in (event for frame in frames for event in frame.events if event.kind == "leased"):
            audit.steps.setdefault(event.columns["seq"], []).extend(event.columns["ids"].tolist())
    for _, frames in sorted(units.items()):
        audit.unit(frames)
    return audit.ranked
