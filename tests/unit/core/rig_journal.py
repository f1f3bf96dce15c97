"""The base of the partition rig: a real partition, the naive one, and a list as the journal.

Events are encoded, recorded and applied. The records rebuild the partition from the start or from a snapshot, as a
restart would. Records have positions but no bytes: their rows are kept in a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from heapline.contract.config import TopicConfig, check_config
from heapline.core.entries import DEAD, DELAYED, FROM_LEASE, LEASED, READY
from heapline.core.events import (
    KIND_NAMES,
    AnyEvent,
    Enqueued,
    Extended,
    Fired,
    Moved,
    Purged,
    decode_events,
    encode_event,
)  # fmt: skip
from heapline.core.groups.stream import stream_of
from heapline.core.heap.run_heap import RunHeap
from heapline.core.lifecycle import ALLOWED
from heapline.core.live_map import LiveMap
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.record import size_class
from heapline.core.wheel.timer_chunks import Sizes
from heapline.core.wheel.timing_wheel import TimingWheel
from heapline.engine import snapshot_state as freezing
from heapline.engine.topic import Topic
from tests.unit.core.naive import NaivePartition, clock

START = 1_790_000_000_000
RECORD_BYTES = 1024
PLACES = {READY: "ready", DELAYED: "delayed", LEASED: "leased", DEAD: "dead"}
STOOD = {0: "ready", 1: "delayed", FROM_LEASE: "leased"}
#: So small that a dozen messages create runs, lanes, slots and far runs.
TINY_HEAP = {"front_rows": 6, "slice_rows": 5, "small_rows": 4, "singles_rows": 7, "fan_in": 2, "block_rows": 3}
TINY_WHEEL = Sizes(slots=3, fan_bits=1, chunk_rows=8, head_rows=4, slice_rows=2)
_WHEELS = (("delays", False), ("calendar", True), ("ttls", False), ("ttls_wall", True))


class Entry(NamedTuple):
    """An event as the journal would store it."""

    data: bytes
    at: int
    rows: Any
    positions: Any
    fairness: Any


class Snapshot(NamedTuple):
    frozen: freezing.Frozen
    entries: int  # the number of log rows that it takes


def middle(count: int) -> npt.NDArray[np.float64]:
    return np.full(count, 0.5)


def fresh_topic(config: TopicConfig, now: Now) -> Topic:
    topic = Topic("jobs", config, now, middle)
    topic.live = LiveMap(topic.layout, check=True)
    topic.partitions = [Partition(0, config, topic.live, now, middle, topic.fair)]
    shrink(topic.partitions[0], now)
    return topic


def shrink(p: Partition, now: Now) -> None:
    """Set sizes of heap and wheels at which few rows reach every path."""
    p.entries.heap = RunHeap.from_runs(p.entries.heap.runs(), **TINY_HEAP)
    for name, wall in _WHEELS:
        wheel: TimingWheel = getattr(p.entries, name)
        chunks = wheel.chunks()
        setattr(p.entries, name, TimingWheel.from_chunks(clock(now, wall), wheel.tick_ms, chunks, _sizes=TINY_WHEEL))


class JournalRig:
    def __init__(self, wall: int = START, **config: Any) -> None:
        self.config = TopicConfig(**config)
        check_config(self.config)
        self.now = Now(START, wall)
        self.model = NaivePartition(self.config)
        self.topic = fresh_topic(self.config, self.now)
        self.topic.settle()
        self.log: list[Entry] = []
        self.snapshot: Snapshot | None = None
        self.records: dict[int, Any] = {}  # id -> row
        self.where: dict[int, tuple[int, int]] = {}  # id -> segment, byte
        self.segment, self._at = 1, 512
        self.reached: set[tuple[str, str, str]] = set()
        self.streamed: set[int] = set()  # messages that have their offset in the stream
        self.old_tokens: list[tuple[int, int]] = []
        self._seq = 1

    @property
    def p(self) -> Partition:
        return self.topic.partitions[0]

    # -- the journal -----------------------------------------------------------------------------------------------

    def take_seq(self, count: int = 1) -> int:
        self._seq += count
        return self._seq - count

    def emit(
        self, event: AnyEvent, rows: Any = None, positions: Any = None, fairness: Any = None, chosen: Any = None
    ) -> None:
        """Record an event and apply it; its state changes must be in the lifecycle table.

        A lease may come with the columns of the messages that were just read. It is always replayed without them.
        """
        self.log.append(Entry(encode_event(event), self.now.steady, rows, positions, fairness))
        ids = self._ids_of(event, rows)
        before = {id: self.state_of(id) for id in ids}
        shown = stream_of(event, self.p.state.offset, rows, positions).ids.tolist() if self.config.streams else []
        assert self.streamed.isdisjoint(shown), "a message enters the stream once"
        self.streamed.update(shown)
        if chosen is None:
            self.p.state.apply(event, self.now.steady, rows, positions, fairness)
        else:
            self.p.state.apply_lease(event, *chosen)
        kind = KIND_NAMES[type(event)]
        for id in ids:
            step = (kind, before[id], self.state_of(id))
            if isinstance(event, Extended | Moved):
                assert step[1] == step[2], f"{kind} changes no state"
            else:
                assert step in ALLOWED, f"{step} is not a transition of the lifecycle"
                self.reached.add(step)
            if step[2] == "ready" and self.config.streams:
                assert id in self.streamed, "a message enters the stream when it first becomes due"
        assert all(self.state_of(id) != "delayed" for id in shown)

    def _ids_of(self, event: AnyEvent, rows: Any) -> list[int]:
        if isinstance(event, Enqueued | Moved):
            found: list[int] = rows["id"].tolist()
            return found
        if isinstance(event, Purged):
            return [m.id for m in self.model.inside("ready", "delayed")]
        if isinstance(event, Fired) and event.ids is None:
            return [m.id for m in self.model.timers(event.wall)[: event.count]]
        return event.ids.tolist() if hasattr(event, "ids") else []

    def state_of(self, id: int) -> str:
        found = self.p.entries.find(id)
        if found is not None:
            return PLACES[found.place]
        gone = self.p.state.gone.find(id)
        return "" if gone is None else gone.how

    def allot(self, rows: Any) -> Any:
        """Positions for records, one after the other."""
        places = self._at + np.arange(len(rows), dtype=np.int64) * RECORD_BYTES
        self._at += len(rows) * RECORD_BYTES
        for id, place in zip(rows["id"].tolist(), places.tolist(), strict=True):
            self.where[id] = (self.segment, place)
        return self.topic.layout.pack(self.segment, places, size_class(rows["payload_len"].astype(np.int64)))

    def roll(self) -> None:
        self.segment, self._at = self.segment + 1, 512

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def move(self, ids: Sequence[int]) -> None:
        """Rewrite the records of these live messages, as a rewrite of their segment would."""
        rows = np.array([self.records[id] for id in ids])
        self.emit(Moved(0, 0, len(rows)), rows, self.allot(rows))

    def take_snapshot(self, blob_rows_min: int = 4096) -> None:
        """Freeze now and encode the bytes later, as an I/O thread would."""
        with mock.patch.object(freezing, "BLOB_ROWS_MIN", blob_rows_min):
            self.snapshot = Snapshot(freezing.freeze(self.topic, len(self.log)), len(self.log))

    def replayed(self) -> Topic:
        """Return the topic rebuilt from the whole journal."""
        topic = fresh_topic(self.config, Now(START, START))
        self._replay_onto(topic, 0)
        return topic

    def thawed(self) -> Topic:
        """Return the topic rebuilt from the last snapshot and the journal after it."""
        assert self.snapshot is not None
        frozen, entries = self.snapshot
        topic = fresh_topic(self.config, self.now)
        blobs = {name: b"".join(c.tobytes() for c in columns) for name, columns in frozen.blobs.items()}
        freezing.thaw(topic, frozen.encode(), blobs, self.now.steady, self.now.wall, "memory")
        shrink(topic.partitions[0], self.now)
        self._replay_onto(topic, entries)
        return topic

    def _replay_onto(self, topic: Topic, start: int) -> None:
        for data, at, rows, positions, fairness in self.log[start:]:
            (event,) = decode_events(b"\x91" + data, "memory")
            topic.partitions[0].state.apply(event, at, rows, positions, fairness)
        topic.settle()

    def restart(self, topic: Topic) -> None:
        """Continue with this topic instead."""
        self.topic = topic
