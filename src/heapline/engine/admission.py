"""Turn enqueue calls into `Enqueued` events, as few and as large as one turn allows.

Calls whose messages are all new are combined across callers: one block, and one event per partition. These are calls
without an identity, and numbered calls that continue where their producer ended (producers.py). Any other call is
judged separately, because its duplicates decide which of its messages are enqueued. All messages of a call are in one
unit, so an atomic batch is atomic because it is written in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from heapline.contract.errors import (
    BadRequest,
    ConflictError,
    RequestError,
    ResourceExhausted,
    UnavailableError,
)
from heapline.contract.message import Enqueued
from heapline.contract.messages import EnqueuedBatch, enqueued, pack_enqueued
from heapline.core.dedup.verdict import fingerprints
from heapline.core.events import I64
from heapline.core.events import Enqueued as EnqueuedEvent
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.placement import place
from heapline.engine.columns import (
    EVENT_BYTES_PER_ROW,
    Columns,
    EnqueueCall,
    Identity,
    batch_bytes_max,
    check_batch_bytes,
    gather,
)
from heapline.engine.counters import Counters
from heapline.engine.duplicates import SHARE_BITS, CallShare, FormerPlaces, give_turns, name_of_share
from heapline.engine.producers import NewCalls, Numbering, Producers
from heapline.engine.topic import Topic
from heapline.journal.block import ROW_BYTES, Block, make_block
from heapline.journal.log import TopicLog

SHARE_ROWS = 1 << SHARE_BITS  # of calls without key that share a partition
BLOCK_BYTES_MAX = (4 << 20) - (64 << 10)  # the largest frame that any replicated log carries


Answer = tuple[EnqueueCall, Any]
_Made = tuple[Partition, Any, Block, I64 | None]  # rows, their block, hashes of fairness keys


class Admission:
    """Admits the enqueue calls of a turn; returns the answers to send once all is durable."""

    def __init__(self, topic: Topic, journal: TopicLog, counters: Counters) -> None:
        self.producers = Producers(topic, journal)
        self._topic = topic
        self._journal = journal
        self._counters = counters
        self.measure()
        self._turn = 0  # the next partition in turn, for messages without a key

    def measure(self) -> None:
        """Set the size limit of combined calls: they must fit into a block, and it into the smallest segment."""
        config = self._topic.config
        room = batch_bytes_max(config, config.partitions)
        self._group_bytes_max = min(BLOCK_BYTES_MAX, config.segment_bytes // 2, room)

    def admit(self, calls: Sequence[EnqueueCall], now: Now) -> list[Answer]:
        answers: list[Answer] = []
        limited = self._topic.config.max_backlog > 0
        group = NewCalls(self._topic)
        for call in calls:
            if call.nbytes > self._group_bytes_max and (refusal := self._outgrown(call)) is not None:
                answers.append((call, refusal))
                continue
            if group.calls and group.nbytes + call.nbytes > self._group_bytes_max:
                answers += self._admit_group(group.calls, now)
                group = NewCalls(self._topic)
            if (limited and group.count + call.count > self._room()) or not group.add(call):
                answers += self._admit_group(group.calls, now)
                group = NewCalls(self._topic)
                answers.append((call, self._admit_alone(call, now)))
        return answers + self._admit_group(group.calls, now)

    def _outgrown(self, call: EnqueueCall) -> Any:
        """Return the refusal of a batch that no longer fits because the topic has grown meanwhile, or None."""
        try:
            check_batch_bytes(call, self._topic.config)
        except BadRequest as error:
            return error if call.atomic else self._packed([Enqueued(0, error=error)] * call.count)
        return None

    def _packed(self, results: Sequence[Enqueued]) -> EnqueuedBatch:
        return pack_enqueued(results, self._topic.id_suffix)

    def _room(self) -> int:
        """Return how many more messages may wait."""
        limit = self._topic.config.max_backlog
        return max(0, limit - self._topic.backlog) if limit else 1 << 62

    def _no_room(self) -> ResourceExhausted:
        return ResourceExhausted(f"max_backlog of topic {self._topic.name!r}", self._topic.config.max_backlog)

    def _admit_alone(self, call: EnqueueCall, now: Now) -> Any:
        """Admit a call with an identity, or one that may exceed the limit. Return its result or an exception."""
        try:
            if not call.is_plain:
                return self._admit_identified(call, now)
            room = self._room()
            if call.count <= room:
                return self._admit_group([call], now)[0][1]
            if call.atomic or call.columns is None:
                return self._no_room()
            taken: list[Enqueued] = []
            if room:
                part = EnqueueCall(call.future, columns=call.columns.subset(range(room)), atomic=False)
                taken = enqueued(self._admit_group([part], now)[0][1])
            return self._packed(taken + [Enqueued(0, error=self._no_room())] * (call.count - room))
        except (RequestError, ConflictError, UnavailableError) as error:
            return error

    # -- calls whose messages are all new ----------------------------------------------------------------------------

    def _admit_group(self, calls: list[EnqueueCall], now: Now) -> list[Answer]:
        if not calls:
            return []
        columns, spans = gather(calls)
        parts = None if len(self._topic.partitions) == 1 else self._place(columns, spans)
        is_numbered = any(call.first_seq is not None for call in calls)
        try:
            ids = self._write(columns, parts, Numbering(spans, columns.payloads) if is_numbered else None, now)
        except ResourceExhausted as error:  # no more ids: nothing was written yet
            return [(call, error) for call in calls]
        packed, suffix = ids.data.cast("B"), self._topic.id_suffix
        return [
            (call, Enqueued(ids.item(start), False, None, suffix))
            if call.columns is None
            else (call, EnqueuedBatch(packed[8 * start : 8 * end], id_suffix=suffix))
            for call, start, end in spans
        ]

    def _place(self, columns: Columns, spans: Sequence[tuple[EnqueueCall, int, int]]) -> I64:
        """Return the partition of each message, one of several.

        The rows without key of a call stay together, in their order. The calls of a turn share partitions, because an
        event per partition costs less than one per call.
        """
        count = len(self._topic.partitions)
        parts = np.empty(columns.count, dtype=np.int64)
        room = 0
        for call, start, end in spans:
            if call.parts is not None:
                parts[start:end] = call.parts
                continue
            if room < end - start:
                self._turn, room = (self._turn + 1) % count, SHARE_ROWS
            parts[start:end] = self._turn
            room -= end - start
        names = columns.places()
        if names is not None:
            plain = chain.from_iterable(range(start, end) for call, start, end in spans if call.parts is None)
            keyed = {i: key.encode() for i in plain if (key := names[i]) is not None}
            parts[list(keyed)] = place(list(keyed.values()), count)
        return parts

    def _write(self, columns: Columns, parts: I64 | None, numbering: Numbering | None, now: Now) -> I64:
        """Write all messages as new ones and return their ids.

        They are in one block, however many partitions they go to, and those of one partition are adjacent.
        """
        rows, smalls = columns.fill(now.steady, now.wall)
        fairness = None if self._topic.fair is None else give_turns(self._topic.partitions[0], rows, columns)
        payloads = columns.payloads
        if parts is None or (parts == parts[0]).all():
            spans = [(self._topic.partitions[0 if parts is None else int(parts[0])], 0, columns.count)]
            order = None
        else:
            order = parts.argsort(kind="stable")
            rows, fairness = rows[order], None if fairness is None else fairness[order]
            if numbering is not None:
                numbering.reorder(order)
            index = order.tolist()
            payloads = [payloads[i] for i in index]
            smalls = None if smalls is None else [smalls[i] for i in index]
            numbers, starts = np.unique(parts[order], return_index=True)
            ends = [*starts[1:].tolist(), columns.count]
            spans = [
                (self._topic.partitions[n], start, end)
                for n, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True)
            ]
        for partition, start, end in spans:
            rows["id"][start:end] = partition.state.ids.take(end - start, now.steady)
        blocks = [
            (
                first,
                last,
                make_block(rows[first:last], None if smalls is None else smalls[first:last], payloads[first:last]),
            )
            for first, last in _cuts(payloads)
        ]
        self._emit_blocks(rows, blocks, spans, fairness, numbering, now)
        if order is None:
            return np.ascontiguousarray(rows["id"])
        ids = np.empty(columns.count, dtype=np.int64)
        ids[order] = rows["id"]
        return ids

    def _emit_blocks(
        self,
        rows: Any,
        blocks: list[tuple[int, int, Block]],
        spans: list[tuple[Partition, int, int]],
        fairness: I64 | None,
        numbering: Numbering | None,
        now: Now,
    ) -> None:
        frames = len(spans) + len(blocks)
        total = sum(block.nbytes for _, _, block in blocks) + 512 * frames
        if numbering is not None:
            total += numbering.nbytes_max(frames)
        self._topic.reserve(self._journal, total, now, blocks=len(blocks), frames=frames)
        for first, last, block in blocks:
            events: list[tuple[Partition, EnqueuedEvent]] = []
            for partition, start, end in spans:
                start, end = max(start, first), min(end, last)
                if start < end:
                    event = EnqueuedEvent(0, start - first, end - start, self._topic.take_seq(end - start))
                    if numbering is not None:
                        event.producers = numbering.rows(start, end)
                    events.append((partition, event))
            hashes = None if fairness is None else fairness[first:last]
            self._topic.emit_shared(self._journal, events, rows[first:last], block, now, hashes)
        self._counters.enqueued += len(rows)

    def _emit(self, made: list[_Made], now: Now, events: list[EnqueuedEvent] | None = None) -> None:
        extra = sum(b.count for _, _, b, _ in made) * EVENT_BYTES_PER_ROW if events else 0
        total = sum(b.nbytes + 512 for _, _, b, _ in made) + extra
        self._topic.reserve(self._journal, total, now, blocks=len(made), frames=len(made))
        for i, (partition, rows, block, fairness) in enumerate(made):
            seq = self._topic.take_seq(len(rows))
            event = events[i] if events else EnqueuedEvent(0, 0, len(rows), seq)
            event.seq = seq
            self._topic.emit_records(self._journal, partition, event, rows, block, now, fairness)
            self._counters.enqueued += len(rows)

    # -- calls with identity ---------------------------------------------------------------------------------------

    def _admit_identified(self, call: EnqueueCall, now: Now) -> Any:
        columns = call.columns or Columns([call.message])
        results = self._judge_and_write(call, columns, now)
        return self._packed(results) if call.columns is not None else results[0]

    def judge(self, call: EnqueueCall, columns: Columns, now: Now, batch_id: str | None = None) -> list[CallShare]:
        """Assign a call's rows to partitions and find the new ones. Raise if it is atomic and a row is refused."""
        if call.identity is not None:
            self._open_epoch(call.identity, call.atomic, columns, now)
        if len(self._topic.partitions) == 1:
            parts = np.zeros(columns.count, dtype=np.int64)
        elif call.is_plain:
            parts = self._place(columns, [(call, 0, call.count)])
        else:
            parts = self._place_identified(call, columns, now)
        # Without an identity no retry will look these up.
        prints = np.zeros(columns.count, dtype=np.uint32)
        if not call.is_plain:
            prints = fingerprints(columns.payloads)
        shares = [
            CallShare(self._topic, n, np.flatnonzero(parts == n), call, columns, prints, now, batch_id)
            for n in np.unique(parts).tolist()
        ]
        self._refuse_over_room(shares, call.atomic)
        errors = {row: error for share in shares for row, error in share.errors.items()}
        if errors and call.atomic:
            raise errors[min(errors)]
        return shares

    def _judge_and_write(self, call: EnqueueCall, columns: Columns, now: Now) -> list[Enqueued]:
        shares = self.judge(call, columns, now)
        made: list[_Made] = []
        events: list[EnqueuedEvent] = []
        for share in shares:
            if share.new.any():
                rows, block, event, fairness = share.build(now)
                made.append((share.partition, rows, block, fairness))
                events.append(event)
        if made:
            self._emit(made, now, events)
        results: list[Enqueued] = [Enqueued(0)] * columns.count
        for share in shares:
            for row, result in share.results():
                results[row] = result
                self._counters.duplicates += result.duplicate
        return results

    def _refuse_over_room(self, shares: list[CallShare], atomic: bool) -> None:
        """Refuse rows beyond max_backlog. Only new rows count: a repeat is answered however full the topic is."""
        new = sorted(row for share in shares for row in share.new_rows())
        room = self._room()
        if len(new) > room:
            if atomic:
                raise self._no_room()
            for share in shares:
                share.refuse(set(new[room:]), self._no_room())

    def _open_epoch(self, identity: Identity, atomic: bool, columns: Columns, now: Now) -> None:
        """Open a new epoch of a producer that brings its own epochs and uses this one for the first time."""
        if self.producers.is_open(identity, now):
            return
        # All numbers are new in this case: refuse before anything changes.
        if atomic and columns.seqs is not None and len(np.unique(columns.seqs)) > self._room():
            raise self._no_room()
        self.producers.open(identity.producer_id, identity.epoch, now)

    def _place_identified(self, call: EnqueueCall, columns: Columns, now: Now) -> I64:
        """Place rows by fairness key or key, else idempotency key, else (producer, sequence), so that retries meet."""
        count = len(self._topic.partitions)
        names: list[bytes] = []
        keys = columns.places()
        for i in range(columns.count):
            key = keys[i] if keys else None
            token = columns.tokens[i] if columns.tokens else None
            if key is not None:
                names.append(key.encode())
            elif token is not None:
                names.append(b"idempotency\0" + token.encode())
            elif call.identity is not None:
                assert columns.seqs is not None
                names.append(name_of_share(call.identity.producer_id, columns.seqs.item(i)))
            else:
                self._turn = (self._turn + 1) % count
                names.append(f"turn\0{self._turn}".encode())
        parts = place(names, count)
        if self._topic.growths:
            return FormerPlaces(self._topic, call.identity, columns, names, parts, now.steady).parts()
        return parts


def _cuts(payloads: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return (first, end) of blocks of at most BLOCK_BYTES_MAX. Nearly always one."""
    sizes = [len(p) for p in payloads]
    if sum(sizes) + len(sizes) * 2 * ROW_BYTES <= BLOCK_BYTES_MAX:
        return [(0, len(sizes))]
    cuts: list[tuple[int, int]] = []
    start, total = 0, 0
    for i, size in enumerate(sizes):
        size += 2 * ROW_BYTES
        if total + size > BLOCK_BYTES_MAX - (64 << 10) and i > start:
            cuts.append((start, i))
            start, total = i, 0
        total += size
    return [*cuts, (start, len(sizes))]
