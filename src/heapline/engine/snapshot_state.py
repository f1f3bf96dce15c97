"""The state of a topic in a snapshot: large immutable columns as blobs, the rest as one msgpack value.

`freeze` runs on the event loop and must be quick: it takes references to immutable runs and copies only small tables.
`Frozen.encode` runs in an I/O thread. `thaw` rebuilds the topic.

STATE_VERSION 1: [version, next sequence, paused, paused until, live map, a dictionary per partition, a dictionary for
the whole topic]. To change it once a version has been released: bump STATE_VERSION, keep `thaw` for the old ones, add a
fixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.core.dead_letters import DeadLetters, reason_runs
from heapline.core.dedup.idempotency import KeyWindow
from heapline.core.dedup.sequences import SequenceWindow
from heapline.core.entries import Entries, Touched
from heapline.core.events import Grown
from heapline.core.fairness.keys import KeyHashes
from heapline.core.heap.run_heap import Run, RunHeap
from heapline.core.leases import LeaseTable
from heapline.core.live_map import SegmentPins
from heapline.core.partition import Partition
from heapline.core.prepared import Prepared
from heapline.core.recent_ends import GoneMemory
from heapline.core.wheel.timing_wheel import Chunk, TimingWheel
from heapline.engine.topic import Topic

STATE_VERSION = 1
BLOB_ROWS_MIN = 4096  # shorter runs are kept in the state itself
WHEELS = ("delays", "calendar", "ttls", "ttls_wall")
_RUN_COLUMNS = ("keys", "ids", "positions")
_CHUNK_COLUMNS = ("dues", "keys", "ids", "positions")


class Frozen:
    """A captured state: plain values, and arrays that no longer change."""

    def __init__(self, state: list[Any], blobs: dict[str, list[Any]]) -> None:
        self._state = state
        self.blobs = blobs

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._state, enc_hook=_encode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype != np.object_ else reason_runs(value)
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"a snapshot cannot hold {type(value)}")


class _Blobs:
    """Names for large immutable runs. A run never changes its name, so that it is written once.

    A serial is unique only within one run of the process; the unit makes a name unique forever.
    """

    def __init__(self, names: dict[str, str], unit: int) -> None:
        self._names = names
        self._unit = unit
        self.arrays: dict[str, list[Any]] = {}

    def add(self, run_name: str, arrays: list[Any]) -> str:
        name = self._names.setdefault(run_name, f"{run_name}-{self._unit}")
        self.arrays[name] = arrays
        return name


def freeze(topic: Topic, unit: int) -> Frozen:
    """Capture the state that the units up to `unit` lead to."""
    blobs = _Blobs(topic.blob_names, unit)
    partitions = [_freeze_partition(p, blobs) for p in topic.partitions]
    if topic.config.streams:
        for number, saved in enumerate(partitions):
            saved["stream"] = topic.following.to_state(number)
    for saved, commits in zip(partitions, topic.following.commits, strict=True):
        if pinned := commits.to_state():
            saved["commits"] = pinned
    topic.blob_names = _run_names(blobs.arrays)  # a run that was dropped never returns
    live = topic.live.to_state()
    whole = _freeze_whole(topic)
    state = [STATE_VERSION, topic.next_seq, topic.paused, topic.paused_until, live, partitions, whole]
    return Frozen(state, blobs.arrays)


def _freeze_whole(topic: Topic) -> dict[str, Any]:
    """Return the state that belongs to no single partition."""
    whole: dict[str, Any] = {}
    if topic.growths:
        whole["growths"] = [msgspec.structs.astuple(growth) for growth in topic.growths]
        whole["config"] = msgspec.json.encode(topic.config)
    if topic.fair is not None:
        whole["fairness"] = topic.fair.to_state()
    if topic.groups:
        whole["groups"] = topic.groups.to_state()
    return whole


def _thaw_whole(topic: Topic, saved: dict[str, Any]) -> None:
    topic.growths = [Grown(*growth) for growth in saved.get("growths", ())]
    if "groups" in saved:
        topic.following.load_groups(saved["groups"], [partition.state.offset for partition in topic.partitions])


def _extend(topic: Topic, saved: dict[str, Any]) -> None:
    """Apply a growth that the snapshot contains and the catalog may not contain yet; see topic_growth.py."""
    if saved.get("growths"):
        topic.adopt(saved["config"])
        topic.extend(topic.config.partitions)
    if topic.fair is not None and "fairness" in saved:
        topic.fair.load_state(saved["fairness"])


def _run_names(blobs: Iterable[str]) -> dict[str, str]:
    return {name.rpartition("-")[0]: name for name in blobs}


def _freeze_partition(p: Partition, blobs: _Blobs) -> dict[str, Any]:
    state, entries = p.state, p.entries
    return {
        "offset": state.offset,
        "last_id": state.ids.last,
        "ready": entries.ready,
        "delayed": entries.delayed,
        "heap": [_freeze_run(r, f"heap-{p.number}-{r.serial}", _RUN_COLUMNS, blobs) for r in entries.heap.runs()],
        "wheels": {
            name: [
                _freeze_run(c, f"{name}-{p.number}-{c.serial}", _CHUNK_COLUMNS, blobs)
                for c in getattr(entries, name).chunks()
            ]
            for name in WHEELS
        },
        "leases": entries.leases.to_state(),
        "dead": entries.dead.to_state(),
        "touched": [(id, *touched.to_state()) for id, touched in entries.touched.items()],
        "reasons": list(entries.reasons.items()),
        "limits": list(entries.limits.items()),
        "lapsed": list(entries.lapsed),
        "retrying": list(entries.retrying),
        "shown": list(entries.shown),
        "sequences": state.sequences.to_state(),
        "keys": state.keys.to_state(),
        "gone": state.gone.to_state(),
        "throttled": state.throttled,
        "prepared": entries.prepared.to_state(),
        **({} if entries.key_hashes is None else _freeze_fairness(entries, entries.key_hashes)),
    }


def _freeze_fairness(entries: Entries, hashes: KeyHashes) -> dict[str, Any]:
    parked = [
        [run.keys[run.start :], run.ids[run.start :], run.positions[run.start :]] for run in entries.parked.runs()
    ]
    return {"key_hashes": hashes.to_state(), "parked": parked}


def _freeze_run(run: Any, name: str, columns: tuple[str, ...], blobs: _Blobs) -> list[Any]:
    """[serial, start, rows, name of its blob or None, columns or None]"""
    arrays = [getattr(run, column) for column in columns]
    rows = len(arrays[0])
    if rows >= BLOB_ROWS_MIN:
        return [run.serial, run.start, rows, blobs.add(name, [np.ascontiguousarray(a) for a in arrays]), None]
    return [run.serial, 0, rows - run.start, None, [a[run.start :] for a in arrays]]


def thaw(topic: Topic, state: bytes, blobs: Mapping[str, memoryview], now: int, wall: int, path: str) -> None:
    """Load a snapshot's state into a new topic."""
    try:
        version, *rest = msgspec.msgpack.decode(state)
        if version != STATE_VERSION:
            raise UnknownFormat(path, version)
        topic.next_seq, topic.paused, topic.paused_until, live, partitions, whole = rest
        topic.live.load_state(live)
        _extend(topic, whole)
        if len(partitions) > len(topic.partitions):
            raise SnapshotCorrupt(path, f"it has {len(partitions)} partitions, the topic {len(topic.partitions)}")
        topic.blob_names = _run_names(blobs)
        for partition, saved in zip(topic.partitions, partitions, strict=False):
            _thaw_partition(partition, saved, blobs, now, wall)
            topic.following.load_state(partition.number, saved.get("stream"), partition.state.offset)
            topic.following.commits[partition.number] = SegmentPins.from_state(saved.get("commits", []))
        _thaw_whole(topic, whole)
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise SnapshotCorrupt(path, repr(error)) from error


def _thaw_partition(p: Partition, saved: dict[str, Any], blobs: Mapping[str, memoryview], now: int, wall: int) -> None:
    state, entries = p.state, p.entries
    state.offset, entries.ready, entries.delayed = saved["offset"], saved["ready"], saved["delayed"]
    if saved["last_id"]:
        state.ids.observe(saved["last_id"])
    entries.heap = RunHeap.from_runs([Run(*_thaw_run(r, _RUN_COLUMNS, blobs)) for r in saved["heap"]])
    for name in WHEELS:
        chunks = [Chunk.of_columns(*_thaw_run(c, _CHUNK_COLUMNS, blobs)) for c in saved["wheels"][name]]
        wheel: TimingWheel = getattr(entries, name)
        time = wall if name in ("calendar", "ttls_wall") else now
        setattr(entries, name, TimingWheel.from_chunks(time, wheel.tick_ms, chunks))
    entries.leases = LeaseTable.from_state(saved["leases"])
    entries.dead = DeadLetters.from_state(saved["dead"])
    entries.touched = {id: Touched(*rest) for id, *rest in saved["touched"]}
    entries.reasons = dict(saved["reasons"])
    entries.limits = dict(saved["limits"])
    entries.lapsed = set(saved["lapsed"])
    entries.retrying = set(saved["retrying"])
    entries.shown = set(saved["shown"])
    state.sequences = SequenceWindow.from_state(saved["sequences"])
    state.keys = KeyWindow.from_state(saved["keys"])
    state.gone = GoneMemory.from_state(saved["gone"])
    state.throttled = saved["throttled"]
    entries.prepared = Prepared.from_state(saved["prepared"])
    if entries.key_hashes is not None:
        entries.key_hashes = KeyHashes.from_state(saved["key_hashes"])
        for columns in saved["parked"]:  # which keys are blocked is determined again
            entries.heap.push(*(np.frombuffer(column, dtype=np.int64) for column in columns))
    entries.loaded()


def _thaw_run(saved: list[Any], columns: tuple[str, ...], blobs: Mapping[str, memoryview]) -> list[Any]:
    serial, start, rows, name, inline = saved
    if name is None:
        arrays = [np.frombuffer(data, dtype=np.int64) for data in inline]
    else:
        whole = np.frombuffer(blobs[name], dtype=np.int64).reshape(len(columns), rows)
        arrays = list(whole)
    return [serial, *arrays, start]
