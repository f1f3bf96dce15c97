"""The durable log: its bounds, its frames as columns, and raw bytes for readers that decode it themselves."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from heapline.contract.call import Command, Feed, Right, call_family
from heapline.contract.fields import INT64_MAX, Natural, Offset, Partition, ShortName, Topic
from heapline.contract.message import LogFrame

log_call = call_family(needs=Right.CONSUME, feature="log")


class Offsets(Struct, frozen=True):
    """The readable range of each partition: [start, end), where the end is durable."""

    starts: list[int]
    ends: list[int]


@log_call(id=0x70, rpc="Offsets", http="GET /v1/offsets", feature="events")
class GetOffsets(Command[Offsets]):
    """Return the first and the next offset of each partition."""

    topic: Topic


@log_call(id=0x71, rpc="ReadLog", http="GET /v1/log", feature="events")
class ReadLog(Feed[LogFrame]):
    """Read the events of a partition, one durable frame at a time."""

    topic: Topic
    partition: Partition = 0
    start: Offset = 0
    end: Offset | None = None


class Hold(Struct, frozen=True, forbid_unknown_fields=True):
    """Keep segments from this one on for a reader; 0 seconds ends it."""

    name: ShortName
    segment: int
    seconds: float


class LogIndex(Struct, frozen=True):
    """The range of the log, and its segments."""

    incarnation: int
    first_segment: int
    last_unit: int  # durable
    segment_bytes: int
    starts: list[int]
    ends: list[int]
    marks: bytes  # entries of the sparse index, as in journal/index.py
    mark_segments: memoryview  # int64, one per mark


@log_call(id=0x72, rpc="LogIndex")
class GetLogIndex(Command[LogIndex]):
    """Return the index of the units after `after_unit`; with `hold`, keep segments for a reader."""

    topic: Topic
    after_unit: Natural = 0
    hold: Hold | None = None


class RawUnit(Struct, frozen=True):
    segment: int
    at: int  # byte in the segment
    data: bytes


class RawUnits(Struct, frozen=True):
    units: list[RawUnit]


@log_call(id=0x73, rpc="ReadUnits")
class ReadUnits(Feed[RawUnits]):
    """Read durable units [start_unit, end_unit) as they were written, with their checksums."""

    topic: Topic
    start_unit: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
    end_unit: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]


class PinnedState(Struct, frozen=True, omit_defaults=True):
    """The state at one time. The first item has everything but `rows`; the others have only `rows`."""

    incarnation: int = 0
    wall_ms: int = 0
    segment_bytes: int = 0
    ends: list[int] = []  # by partition: the state after all rows below
    count: int = 0  # of rows that follow
    texts: list[str] = []  # that rows refer to by number
    rows: bytes = b""  # as in engine/state_rows.py, sorted by position


@log_call(id=0x74, rpc="PinState")
class PinState(Feed[PinnedState]):
    """Read a topic's waiting messages, or its dead letters, as of one time. Hold the log with GetLogIndex before."""

    topic: Topic
    dead: bool = False


class RecordsRead(Struct, frozen=True):
    rows: bytes  # as in core/record.py
    smalls: bytes  # one after the other; each row has its length
    payloads: bytes
    bad: memoryview  # int64: numbers of records that could not be read; their rows are zeros


@log_call(id=0x75, rpc="ReadRecords")
class ReadRecords(Command[RecordsRead]):
    """Read records by their positions."""

    topic: Topic
    incarnation: Natural
    positions: memoryview  # int64
