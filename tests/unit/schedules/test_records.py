from __future__ import annotations

import msgspec
import pytest

from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.contract.schedules import make_schedule
from heapline.core.schedules.book import Book
from heapline.core.schedules.records import (
    KINDS,
    BookState,
    Record,
    ScheduleDeleted,
    ScheduleFired,
    SchedulePaused,
    ScheduleResumed,
    ScheduleSet,
    decode_record,
    decode_state,
    encode_record,
    encode_state,
)

NIGHTLY = make_schedule(
    "nightly", topic="jobs", cron="0 3 * * *", tz="Europe/Berlin", payload=b"\x00p", headers={"a": "b"}
)
RECORDS: list[Record] = [
    ScheduleSet(NIGHTLY, 3, 10, 20, 30),
    SchedulePaused("default/nightly", 40),
    ScheduleResumed("default/nightly", 50),
    ScheduleDeleted("default/nightly"),
    ScheduleFired("default/nightly", 3, 60, 55, 2),
    ScheduleFired("default/nightly", 3, 60, None, 0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_survives_encoding(record: Record) -> None:
    assert decode_record(encode_record(record), "here") == record


def test_bytes_of_records_never_change() -> None:
    """On-disk format: if this fails, follow the procedure in records.py."""
    assert encode_record(RECORDS[4]) == bytes.fromhex("9651af64656661756c742f6e696768746c79033c3702")
    plain = msgspec.msgpack.decode(encode_record(RECORDS[0]))
    assert plain == [
        0x11,
        {
            "name": "default/nightly", "topic": "default/jobs", "cron": "0 3 * * *", "tz": "Europe/Berlin",
            "payload": b"\x00p", "headers": {"a": "b"}, "every_ms": None, "starts_ms": None, "ends_ms": None,
            "misfire": "once", "grace_ms": 60_000, "makeup_max": 100, "priority": 0, "key": None, "ttl": None,
            "max_retries": None, "fairness_key": None,
        },
        3, 10, 20, 30,
    ]  # fmt: skip
    assert [kind.__struct_config__.tag for kind in KINDS] == [0x11, 0x21, 0x31, 0x41, 0x51]


@pytest.mark.parametrize(
    "plain",
    [
        [0x52, "default/nightly"],
        [0x61, "default/nightly"],
        [0x41, "default/nightly", "more"],
        [0x11, {"name": "a/b", "topic": "a/t", "moon": "full"}, 1, 2, 3, 4],
    ],
)
def test_record_of_a_newer_version_is_refused(plain: list[object]) -> None:
    with pytest.raises(UnknownFormat, match="here"):
        decode_record(msgspec.msgpack.encode(plain), "here")


@pytest.mark.parametrize("data", [b"", b"\xc1", encode_record(RECORDS[1])[:-1], msgspec.msgpack.encode([0x21, 5, 5])])
def test_damaged_record_is_corruption(data: bytes) -> None:
    with pytest.raises(SnapshotCorrupt, match="here"):
        decode_record(data, "here")


def test_state_survives_encoding() -> None:
    book = Book()
    book.set(NIGHTLY, 1_770_000_000_000)
    book.pause("nightly", 1_770_000_000_001)
    state = book.to_state()
    assert decode_state(encode_state(state), "here") == state
    assert Book.from_state(state).to_state() == state


def test_state_of_a_newer_version_is_refused_whatever_it_holds() -> None:
    newer = msgspec.msgpack.encode({"version": 2, "moons": []})
    with pytest.raises(UnknownFormat, match="version 2"):
        decode_state(newer, "here")


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", encode_state(BookState())[:-1], msgspec.msgpack.encode({"version": 1, "x": 1})]
)
def test_damaged_state_is_corruption(data: bytes) -> None:
    with pytest.raises(SnapshotCorrupt, match="here"):
        decode_state(data, "here")
