"""One topic's state: its partitions, the state shared by them, and the open unit.

`emit` is the only way to change anything: the event is applied immediately and its bytes join the open unit; the
caller's answer waits for that unit. `replay` only applies, without collecting: recovery is apply alone. No I/O, no
clock, no asyncio here; the runner drives it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from heapline.contract.config import TopicConfig
from heapline.contract.errors import JournalCorrupt, MessageNotFound
from heapline.contract.ids import parse_id, to_ulid
from heapline.core.dedup.sequences import PASSED_MS
from heapline.core.entries import FEW_ROWS
from heapline.core.events import (
    I64,
    AnyEvent,
    BatchCommitted,
    BatchPrepared,
    ConfigChanged,
    Enqueued,
    Fired,
    Grown,
    Leased,
    Moved,
    Paused,
    Released,
    Replayed,
    Rescheduled,
    Resumed,
    decode_events,
    encode_event,
)
from heapline.core.fairness.keys import hashes_of
from heapline.core.fairness.turns import FairShare
from heapline.core.groups.group import Groups
from heapline.core.groups.stream import StreamCount, StreamTail
from heapline.core.ids import partition_of
from heapline.core.live_map import LiveMap
from heapline.core.now import Now
from heapline.core.partition import Draw, Partition
from heapline.core.record import FLAG_FAIRNESS, ROW, PositionLayout, size_class, size_class_of
from heapline.engine.groups.group_index import FOLLOWED, Following
from heapline.journal.block import Block
from heapline.journal.log import TopicLog
from heapline.journal.segment import segment_path
from heapline.journal.unit import Frame, SealedUnit, Unit

SETTLE_ROWS = 16384  # leases settled by one event
array_head = struct.Struct(">BI").pack
TOGETHER_BYTES_MAX = 64 << 10  # of events for which space is reserved in one call
EVENT_OVERHEAD = 64  # most bytes that a frame or block adds to its unit beyond its own
_SEQUENCED = (
    Leased, Released, Fired, Replayed, Rescheduled, Enqueued, BatchCommitted,
)  # fmt: skip


_SHARED = frozenset((BatchPrepared, BatchCommitted, Paused, Resumed, ConfigChanged, Grown))
FRAME_BYTES = 8  # of a frame without events


_decode_config = msgspec.json.Decoder(TopicConfig).decode
#: A lease of a partition's first messages: its event, and their ids, keys, and positions with the new attempts.
ChosenLease = tuple[Partition, Leased, list[int], list[int], list[int]]


class _PendingFrame(msgspec.Struct):
    """The events of one partition in the open unit."""

    first_offset: int
    first_id: int = -1
    rows: int = 0
    events: list[bytes] = []


class Topic:
    def __init__(self, name: str, config: TopicConfig, now: Now, draw: Draw, id_suffix: int = 0) -> None:
        self.name = name
        self.id_suffix = id_suffix  # low bits of its messages' ULIDs
        self.config = config
        self.layout = PositionLayout(config.segment_bytes)
        self.live = LiveMap(self.layout)
        self.fair = FairShare() if config.fairness == "keys" else None
        self._new_partition = partial(Partition, live=self.live, now=now, draw=draw, fair=self.fair)
        self.partitions = [self._new_partition(p, config) for p in range(config.partitions)]
        self.following = Following(self.layout, config.partitions)  # the data that its groups need
        self._partitions_given = config.partitions
        self.growths: list[Grown] = []  # oldest first
        self.next_seq = 1  # spine sequence
        self.paused = False
        self.paused_until: int | None = None  # wall ms
        self.blob_names: dict[str, str] = {}  # blob names of runs that a snapshot has stored
        self.changed: set[int] = set()  # partitions changed since the runner last planned its wakes
        self.granted: list[tuple[int, int]] = []  # partitions that only leased messages since then, and a deadline
        self.new_heads: set[int] = set()  # partitions whose head may have changed since the last selection
        self.open_frames: dict[int, _PendingFrame] = {}  # by partition; empty if the open unit is
        self._frames_bytes = 0
        self._blocks = 0

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        return sum(p.entries.ready for p in self.partitions)

    @property
    def backlog(self) -> int:
        return sum(p.entries.ready + p.entries.delayed + p.entries.prepared.count for p in self.partitions)

    @property
    def leased(self) -> int:
        return sum(len(p.entries.leases) for p in self.partitions)

    @property
    def groups(self) -> Groups:
        return self.following.groups

    @property
    def counts(self) -> list[StreamCount]:
        return self.following.counts

    @property
    def tails(self) -> list[StreamTail | None]:
        return self.following.tails

    def ulid(self, id: int) -> str:
        return to_ulid(id, self.id_suffix)

    def own_id(self, message_id: object) -> int | None:
        """Return the integer of an id in either form, or None if it is a ULID of another topic."""
        id, suffix = parse_id(message_id)
        return id if suffix in (None, self.id_suffix) else None

    def find_id(self, message_id: object) -> int:
        """Return the integer of an id in either form. Raise MessageNotFound if it is a ULID of another topic."""
        id = self.own_id(message_id)
        if id is None:
            raise MessageNotFound(self.name, str(message_id))
        return id

    def own_ids(self, message_ids: Sequence[object] | None) -> list[int] | None:
        """Return the integers of ids, without ULIDs of other topics; None if none are given."""
        return None if message_ids is None else [id for m in message_ids if (id := self.own_id(m)) is not None]

    def take_seq(self, count: int = 1) -> int:
        first = self.next_seq
        self.next_seq += count
        return first

    def forget_passed(self, now: Now) -> None:
        """Forget passing producers (core/dedup/sequences.py) that were not used in any partition for long. Runs only
        right before a snapshot, so that what is loaded equals the state in memory. If such a producer returns, it
        starts again."""
        used_at: dict[str, int] = {}
        for partition in self.partitions:
            for name, at in partition.state.sequences.passing().items():
                used_at[name] = max(at, used_at.get(name, at))
        limit = now.steady - max(PASSED_MS, round(self.config.dedup_window * 1000))
        if passed := [name for name, at in used_at.items() if at <= limit]:
            for partition in self.partitions:
                partition.state.sequences.forget(passed)

    def by_partition(self, ids: list[int], tokens: list[int]) -> list[tuple[Partition, list[int], list[int]]]:
        """Group leases by partition. Many leases are sliced, because one event must fit into the smallest segment."""
        if len(ids) > SETTLE_ROWS:
            cuts = range(0, len(ids), SETTLE_ROWS)
            slices = [(ids[cut : cut + SETTLE_ROWS], tokens[cut : cut + SETTLE_ROWS]) for cut in cuts]
            return [part for piece in slices for part in self.by_partition(*piece)]
        partitions = self.partitions
        if len(partitions) == 1 or not ids:
            return [(partitions[0], ids, tokens)]
        columns = np.array([ids, tokens], dtype=np.int64)
        owners = partition_of(columns[0])
        order = owners.argsort(kind="stable")
        numbers, starts = np.unique(owners[order], return_index=True)
        pieces = np.split(columns[:, order], starts[1:], axis=1)
        return [
            (partitions[n if n < len(partitions) else 0], *piece.tolist())  # an unknown id is not leased anywhere
            for n, piece in zip(numbers.tolist(), pieces, strict=True)
        ]

    # -- changing --------------------------------------------------------------------------------------------------

    def reserve(self, journal: TopicLog, nbytes: int, now: Now, blocks: int = 1, frames: int = 1) -> None:
        """Ensure that the next `nbytes` bytes of events are in one unit."""
        pending = self._frames_bytes + len(self.open_frames) * EVENT_OVERHEAD
        more = pending + nbytes + (blocks + frames) * EVENT_OVERHEAD
        if not journal.fits(more):
            self.seal(journal, now)
            journal.room(nbytes, blocks=blocks, frames=frames)

    def emit(self, journal: TopicLog, partition: Partition, event: AnyEvent, now: Now) -> None:
        """Apply an event without records, and add it to the open unit."""
        data = encode_event(event)
        self.reserve(journal, len(data), now, blocks=0)
        self.changed.add(partition.number)
        self._gather(partition, event, data)
        self._apply(partition, event, now.steady, None, None)

    def emit_leases(self, journal: TopicLog, leases: Sequence[ChosenLease], now: Now) -> None:
        """Like `emit`, for leases of the messages that were just chosen. The turn plans their deadlines and nothing
        else."""
        encoded = [encode_event(lease[1]) for lease in leases]
        total = sum(map(len, encoded))
        together = total <= TOGETHER_BYTES_MAX
        if together:
            self.reserve(journal, total, now, blocks=0, frames=len(leases))
        for (partition, event, ids, keys, positions), data in zip(leases, encoded, strict=True):
            if not together:
                self.reserve(journal, len(data), now, blocks=0)
            self._gather(partition, event, data)
            partition.state.apply_lease(event, ids, keys, positions)
            if partition.needs_maintenance:
                self.changed.add(partition.number)
            else:
                deadlines = [grant.deadline for grant in event.grants]
                self.granted.append((partition.number, deadlines[0] if len(deadlines) == 1 else min(deadlines)))

    def emit_records(
        self,
        journal: TopicLog,
        partition: Partition,
        event: Enqueued | Moved | BatchPrepared,
        rows: Any,
        block: Block,
        now: Now,
        fairness: I64 | None = None,
    ) -> None:
        """Apply an event with records, and add both to the open unit.

        The caller has reserved space for everything that must be in one unit.
        """
        self.emit_shared(journal, [(partition, event)], rows, block, now, fairness)

    def emit_shared(
        self,
        journal: TopicLog,
        events: Sequence[tuple[Partition, Enqueued | Moved | BatchPrepared]],
        rows: Any,
        block: Block,
        now: Now,
        fairness: I64 | None = None,
    ) -> None:
        """Like `emit_records`, for partitions whose records are in one block: each event names its own records."""
        segment, at = journal.add_block(block)
        positions = self._positions(segment, at, rows)
        for partition, event in events:
            event.block = self._blocks
            own = slice(event.start, event.start + event.count)
            self.changed.add(partition.number)
            self._gather(partition, event, encode_event(event), int(rows["id"][event.start]))
            hashes = None if fairness is None else fairness[own]
            self._apply(partition, event, now.steady, rows[own], positions[own], hashes)
        self._blocks += 1

    def _gather(self, partition: Partition, event: AnyEvent, data: bytes, first_id: int = -1) -> None:
        frame = self.open_frames.get(partition.number)
        if frame is None:
            frame = self.open_frames[partition.number] = _PendingFrame(partition.state.offset)
            self._frames_bytes += FRAME_BYTES
        self.new_heads.add(partition.number)
        frame.events.append(data)
        frame.rows += event.rows()
        self._frames_bytes += len(data)
        if frame.first_id < 0:
            frame.first_id = first_id

    def seal(self, journal: TopicLog, now: Now) -> SealedUnit | None:
        """Close the open unit. Return None if it is empty."""
        if not self.open_frames:
            return None
        frames: list[Frame] = []
        for number, frame in self.open_frames.items():
            data = b"".join((array_head(0xDD, len(frame.events)), *frame.events))  # a msgpack array
            frames.append(Frame(number, frame.first_offset, frame.rows, data, frame.first_id))
        journal.add_frames(frames)
        unit = journal.seal(now.steady, now.wall)
        if unit is not None and self.following.groups.by_name:
            for number in self.open_frames:
                self.following.sealed(unit.number, number, self.partitions[number].state.offset, journal.written_unit)
        self.open_frames.clear()
        self._frames_bytes = self._blocks = 0
        return unit

    def _positions(self, segment: int, at: int, rows: Any) -> I64:
        if len(rows) <= FEW_ROWS:
            lengths = zip(rows["payload_len"].tolist(), rows["small_len"].tolist(), strict=True)
            few = [size_class_of(payload + small) for payload, small in lengths]
            pack = self.layout.pack
            return np.array([pack(segment, at + i * ROW.itemsize, size) for i, size in enumerate(few)], dtype=np.int64)
        sizes = rows["payload_len"].astype(np.int64) + rows["small_len"]
        places = at + np.arange(len(rows), dtype=np.int64) * ROW.itemsize
        positions: I64 = self.layout.pack(segment, places, size_class(sizes))
        return positions

    def _apply(
        self,
        partition: Partition,
        event: AnyEvent,
        at: int,
        rows: Any,
        positions: I64 | None,
        fairness: I64 | None = None,
    ) -> None:
        kind = type(event)
        if kind in FOLLOWED and self.config.streams:
            self.following.follow(partition.number, partition.state.offset, event, rows, positions)
        if kind in _SHARED:
            self._apply_shared(partition, event)
        partition.state.apply(event, at, rows, positions, fairness)

    def _apply_shared(self, partition: Partition, event: AnyEvent) -> None:
        """Apply an event's effects on the state that the partitions share, before the partition applies it."""
        if isinstance(event, BatchPrepared):
            if self.growths and event.keys is not None:
                self._ask_longer(partition, event.batch_id, int(event.keys.expires.max()))
        elif isinstance(event, BatchCommitted):
            if len(event.ids):
                self.following.committed(partition.number, partition.state.offset, event, partition.entries.prepared)
        elif isinstance(event, Paused):
            self.paused, self.paused_until = True, event.until
        elif isinstance(event, Resumed):
            self.paused, self.paused_until = False, None
        elif isinstance(event, ConfigChanged):
            self.adopt(event.config)
        elif isinstance(event, Grown):
            self.extend(event.after)
            self.growths.append(event)

    def _ask_longer(self, partition: Partition, batch_id: str, expires: int) -> None:
        """Extend `Grown.until` when another part of a batch brings idempotency keys. Keys that the batch has in doubt
        here were placed here because of it, maybe before a growth, and are looked up here until the new ones expire."""
        if batch_id in partition.entries.prepared.batches:
            self.growths = [
                Grown(g.before, g.after, g.at, max(g.until, expires)) if partition.number < g.before else g
                for g in self.growths
            ]

    # -- settings --------------------------------------------------------------------------------------------------

    def set_config(self, config: TopicConfig) -> None:
        """Use other settings for decisions from now on. Only `Grown` adds partitions."""
        self.config = config
        for partition in self.partitions:
            partition.config = config

    def adopt(self, settings: bytes) -> None:
        """Adopt settings (JSON) that the journal or a snapshot has recorded, if they have more partitions than the
        catalog's. Otherwise the catalog's settings, passed to the constructor, are newer: see topic_growth.py."""
        if msgspec.json.decode(settings)["partitions"] > self._partitions_given:
            self.set_config(_decode_config(settings))

    def extend(self, count: int) -> None:
        """Extend the topic to `count` partitions. New ones are empty, and their offsets start at 0."""
        self.partitions += [self._new_partition(p, self.config) for p in range(len(self.partitions), count)]
        self.following.extend(len(self.partitions))

    # -- recovery --------------------------------------------------------------------------------------------------

    def replay(self, unit: Unit, directory: str) -> None:
        """Apply the events of a durable unit."""
        path = segment_path(directory, unit.segment)
        for frame in unit.frames:
            if frame.partition >= len(self.partitions):
                raise JournalCorrupt(path, unit.offset, f"partition {frame.partition} does not exist in this topic")
            partition = self.partitions[frame.partition]
            if frame.first_offset != partition.state.offset:
                detail = (
                    f"partition {frame.partition} continues at {frame.first_offset}, not at {partition.state.offset}"
                )
                raise JournalCorrupt(path, unit.offset, detail)
            for event in decode_events(frame.events, path):
                rows, positions, fairness = self._records(unit, event)
                if isinstance(event, _SEQUENCED):
                    self.next_seq = max(self.next_seq, event.seq + event.rows())
                self._apply(partition, event, unit.time, rows, positions, fairness)
            if partition.state.offset != frame.first_offset + frame.row_count:
                raise JournalCorrupt(path, unit.offset, f"a frame holds other than its {frame.row_count} rows")

    def opened(self, now: Now) -> None:
        """Finish loading, before the topic serves."""
        self.following.opened([partition.state.offset for partition in self.partitions], now.steady)

    def settle(self) -> None:
        """Apply the limits, after everything stored has been applied or the settings have changed."""
        if self.fair is not None:
            members = [partition.fairness for partition in self.partitions if partition.fairness is not None]
            self.fair.settle(self.config.max_inflight_per_key, members)
            self.new_heads.update(range(len(self.partitions)))

    def _records(self, unit: Unit, event: AnyEvent) -> tuple[Any, I64 | None, I64 | None]:
        if not isinstance(event, Enqueued | Moved | BatchPrepared) or not event.count:
            return None, None, None
        ref = unit.blocks[event.block]
        rows = unit.rows(ref)[event.start : event.start + event.count]
        at = unit.place(ref) + event.start * ROW.itemsize
        fairness = None
        if self.fair is not None and isinstance(event, Enqueued | BatchPrepared):
            fairness = _fairness_hashes(unit.data, ref.offset + event.start * ROW.itemsize, rows)
        return rows, self._positions(unit.segment, at, rows), fairness


def _fairness_hashes(data: memoryview, at: int, rows: Any) -> I64:
    """Return the hashes of the fairness keys of records whose rows start at `at`."""
    has = (rows["flags"] & FLAG_FAIRNESS) != 0
    hashes = np.zeros(len(rows), dtype=np.int64)
    starts = (at + np.arange(len(rows)) * ROW.itemsize + rows["small_at"] + rows["key_len"])[has]
    ends = starts + rows["fairness_len"][has]
    keys = (bytes(data[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
    hashes[has] = hashes_of(keys, len(starts))
    return hashes
