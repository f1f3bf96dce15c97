"""Records from which a schedule book is rebuilt, and the complete state of a book.

On disk a record is a msgpack array that begins with its tag, kind·16 + version.

To change a record, never edit a struct's fields in place. Add a struct with the next version in its tag, keep the old
one, and let `Book.apply` accept both. A reader refuses an unknown tag or field (`UnknownFormat`); it never skips one.
`Schedule` itself may get fields with defaults: an older reader refuses those.
"""

from __future__ import annotations

import msgspec

from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.contract.schedules import Schedule

STATE_VERSION = 1


class ScheduleSet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0x011):
    """A schedule was created, changed or rewound. Its other state, such as a pause, is kept."""

    schedule: Schedule
    incarnation: int
    anchor_ms: int  # start of the `every` interval count
    done_ms: int  # nothing fires at or before this
    at_ms: int


class SchedulePaused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0x021):
    name: str
    at_ms: int


class ScheduleResumed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0x031):
    name: str
    done_ms: int  # firings that became due during the pause are not made up


class ScheduleDeleted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0x041):
    name: str


class ScheduleFired(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0x051):
    """All firings up to a time are done; `fired_ms` is the last one enqueued, None if all were skipped."""

    name: str
    incarnation: int
    until_ms: int
    fired_ms: int | None
    count: int


Record = ScheduleSet | SchedulePaused | ScheduleResumed | ScheduleDeleted | ScheduleFired
KINDS: tuple[type[msgspec.Struct], ...] = (
    ScheduleSet, SchedulePaused, ScheduleResumed, ScheduleDeleted, ScheduleFired,
)  # fmt: skip


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one schedule that must survive a restart."""

    schedule: Schedule
    incarnation: int
    anchor_ms: int
    done_ms: int
    created_ms: int
    changed_ms: int
    paused_ms: int | None = None  # since when; None = not paused
    fired_ms: int | None = None  # the last firing that was enqueued
    fired_count: int = 0


class BookState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = STATE_VERSION
    incarnations: int = 0  # the last number assigned, including to deleted schedules
    schedules: list[ScheduleState] = []


_records: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_states = msgspec.msgpack.Decoder(BookState)


def encode_record(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_record(data: bytes, where: str) -> Record:
    """Decode a record. The error names `where`: the file or journal that contained it."""
    try:
        return _records.decode(data)
    except msgspec.ValidationError as error:
        tag = _first(data)
        known = any(kind.__struct_config__.tag == tag for kind in KINDS)
        more = "unknown field" in str(error) or "at most length" in str(error)  # unknown to this version
        if isinstance(tag, int) and (more or not known):
            raise UnknownFormat(f"{where} (schedule record {tag:#x})", tag & 15) from error
        raise SnapshotCorrupt(where, f"a schedule record is invalid: {error}") from error
    except msgspec.DecodeError as error:
        raise SnapshotCorrupt(where, f"a schedule record cannot be read: {error}") from error


def encode_state(state: BookState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes, where: str) -> BookState:
    try:
        version = _versions.decode(data).version
        if version != STATE_VERSION:
            raise UnknownFormat(where, version)
        return _states.decode(data)
    except msgspec.DecodeError as error:
        raise SnapshotCorrupt(where, f"the schedules cannot be read: {error}") from error


class _Versioned(msgspec.Struct):
    version: int


_versions = msgspec.msgpack.Decoder(_Versioned)


def _first(data: bytes) -> object:
    whole = msgspec.msgpack.decode(data)
    return whole[0] if isinstance(whole, list) and whole else None
