"""Producers of one topic: open their epochs, and recognize numbered calls whose messages are all new.

Most numbered calls continue where their producer's last one ended, so all of their messages are new. `NewCalls` finds
these calls by their first number alone, and they are enqueued together with all other calls of the turn. Any other call
is judged row by row (duplicates.py): repeats, gaps, idempotency keys, doubts about a prepared batch, unknown epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heapline.contract.errors import StaleEpoch
from heapline.core.dedup.verdict import fingerprints
from heapline.core.events import I64, ProducerOpened, ProducerRows
from heapline.core.now import Now
from heapline.core.placement import place
from heapline.engine.columns import EVENT_BYTES_PER_ROW, EnqueueCall, Identity
from heapline.engine.duplicates import SHARE_BITS, name_of_share, opened_with
from heapline.engine.topic import Topic
from heapline.journal.log import TopicLog

PRODUCER_BYTES = 64  # upper bound of what a producer adds to an event beside its name and rows
Span = tuple[EnqueueCall, int, int]  # a call, and its rows among those of a group: from, to


class Producers:
    """Opens epochs. Every partition records an epoch, so that each fences the older ones by itself."""

    def __init__(self, topic: Topic, journal: TopicLog) -> None:
        self._topic, self._journal = topic, journal

    def open(self, producer_id: str, epoch: int | None, now: Now) -> int:
        """Record an epoch (the next one, if none is given) in every partition."""
        partitions = self._topic.partitions
        if epoch is None:
            epoch = max(p.state.sequences.epoch_of(producer_id) or 0 for p in partitions) + 1
        self._record(range(len(partitions)), ProducerOpened(producer_id, epoch, len(partitions)), now)
        return epoch

    def is_open(self, identity: Identity, now: Now) -> bool:
        """Return whether the epoch of a call is the current one, and False if it has yet to be opened.

        Raise StaleEpoch if it is an older one. Partitions that were added after it was opened record it now.
        """
        known = [p.state.sequences.epoch_of(identity.producer_id) or 0 for p in self._topic.partitions]
        if identity.epoch < max(known):
            raise StaleEpoch(identity.producer_id, identity.epoch, max(known))
        if identity.epoch > max(known):
            return False
        if late := [number for number, epoch in enumerate(known) if epoch < identity.epoch]:
            count = opened_with(self._topic, identity)
            self._record(late, ProducerOpened(identity.producer_id, identity.epoch, count), now)
        return True

    def _record(self, numbers: Sequence[int], event: ProducerOpened, now: Now) -> None:
        self._topic.reserve(self._journal, 256 * len(numbers), now, blocks=0, frames=len(numbers))
        for number in numbers:
            self._topic.emit(self._journal, self._topic.partitions[number], event, now)


class NewCalls:
    """A group of calls that are written together, because all of their messages are new."""

    def __init__(self, topic: Topic) -> None:
        self.calls: list[EnqueueCall] = []
        self.nbytes = self.count = 0
        self._topic = topic
        self._next: dict[str, int] = {}  # producer -> the first number that is new after the calls of the group

    def add(self, call: EnqueueCall) -> bool:
        """Add the call and return True, unless messages of it may be known, or are numbered before the group's."""
        if not (call.is_plain or self._are_new(call)):
            return False
        self.calls.append(call)
        self.nbytes += call.nbytes
        self.count += call.count
        return True

    def _are_new(self, call: EnqueueCall) -> bool:
        """Place the call's messages and return True if all of them are new, even after the group's other calls."""
        identity, first = call.identity, call.first_seq
        if identity is None or first is None or call.has_tokens:
            return False
        name, epoch, answered_below = identity
        known = self._next.get(name)
        if known is None:
            if self._topic.growths and not self._is_known_everywhere(identity):
                return False
        elif first < known:
            return False
        parts = self._place(call, identity, first)
        if parts is None:
            return False
        for number in {parts} if isinstance(parts, int) else set(parts.tolist()):
            partition = self._topic.partitions[number]
            if partition.entries.prepared.batches or not partition.state.sequences.is_unseen(name, epoch, first):
                return False
        call.parts = parts
        self._next[name] = max(first + call.count, answered_below)
        return True

    def _is_known_everywhere(self, identity: Identity) -> bool:
        """Return whether the partitions that were added after the epoch was opened have recorded it too."""
        windows = [partition.state.sequences for partition in self._topic.partitions]
        return all(window.epoch_of(identity.producer_id) == identity.epoch for window in windows)

    def _place(self, call: EnqueueCall, identity: Identity, first: int) -> I64 | int | None:
        """Return the partition of all messages of the call, or of each. None if it depends on what is remembered."""
        count = len(self._topic.partitions)
        if count == 1:
            return 0
        keys = call.places()
        if self._topic.growths:
            if keys is not None:
                return None
            count = opened_with(self._topic, identity)
        last = first + call.count - 1
        shares = range(first >> SHARE_BITS, (last >> SHARE_BITS) + 1)
        placed = place([name_of_share(identity.producer_id, share << SHARE_BITS) for share in shares], count)
        if keys is None and len(shares) == 1:
            return int(placed[0])
        parts: I64 = placed[(call.numbers(first) >> SHARE_BITS) - shares[0]]
        if keys is not None:
            keyed = {row: key.encode() for row, key in enumerate(keys) if key is not None}
            parts[list(keyed)] = place(list(keyed.values()), count)
        return parts


class Numbering:
    """The producers, numbers and fingerprints of the rows of a group that has numbered calls."""

    def __init__(self, spans: Sequence[Span], payloads: Sequence[bytes]) -> None:
        calls: dict[tuple[str, int], list[Span]] = {}
        for span in spans:
            identity = span[0].identity
            if identity is not None and span[0].first_seq is not None:
                calls.setdefault((identity.producer_id, identity.epoch), []).append(span)
        self._producers = [_NumberedRows(*producer, spans) for producer, spans in calls.items()]
        self._prints = fingerprints(payloads)

    def nbytes_max(self, frames: int) -> int:
        """Return an upper bound of what these rows add to their events, which are in so many frames.

        Each event names each of its producers.
        """
        named = 0
        for producer in self._producers:
            named += min(frames, len(producer.rows)) * (len(producer.name.encode()) + PRODUCER_BYTES)
        return named + len(self._prints) * EVENT_BYTES_PER_ROW

    def reorder(self, order: Any) -> None:
        new_rows = order.argsort()
        for producer in self._producers:
            producer.move(new_rows)
        self._prints = self._prints[order]

    def rows(self, start: int, end: int) -> list[ProducerRows]:
        """Return what an event about these rows says of their producers."""
        found: list[ProducerRows] = []
        for producer in self._producers:
            first, last = producer.rows.searchsorted((start, end)).tolist()
            if first < last:
                rows, seqs = producer.rows[first:last], producer.seqs[first:last]
                answered_below = int(producer.answered_below[first:last].max())
                prints = self._prints[rows].tobytes()
                found.append(ProducerRows(producer.name, producer.epoch, answered_below, rows - start, seqs, prints))
        return found


class _NumberedRows:
    """The rows of a group that one producer numbered, ascending, and what it said of each."""

    __slots__ = ("answered_below", "epoch", "name", "rows", "seqs")

    def __init__(self, name: str, epoch: int, spans: Sequence[Span]) -> None:
        self.name, self.epoch = name, epoch
        calls = [(call.identity.answered_below, call.count) for call, _, _ in spans if call.identity is not None]
        self.answered_below: I64 = np.repeat(*np.array(calls, dtype=np.int64).T)
        self.rows = np.concatenate([np.arange(start, end) for _, start, end in spans])
        self.seqs = np.concatenate([call.numbers(call.first_seq) for call, _, _ in spans if call.first_seq is not None])

    def move(self, new_rows: I64) -> None:
        """Follow the rows to their new places: `new_rows[n]` is that of row n."""
        moved = new_rows[self.rows]
        order = moved.argsort()
        self.rows, self.seqs, self.answered_below = moved[order], self.seqs[order], self.answered_below[order]
