"""Encoding of events: optional columns, and refusal of unknown tags."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from heapline.contract.errors import UnknownFormat
from heapline.core.events import KIND_NAMES, Fired, Resumed, decode_events, encode_event


def decoded(event: Fired) -> Fired:
    (found,) = decode_events(b"\x91" + encode_event(event), "here")
    assert isinstance(found, Fired)
    return found


def test_absent_columns_are_read_back_as_none_and_take_a_byte_each() -> None:
    ids = np.array([7, 8], dtype=np.int64)
    named, counted = decoded(Fired(False, 1, ids, ids)), decoded(Fired(True, 1, count=2))
    assert (named.rows(), named.keys, named.again, named.count) == (2, None, None, None)
    assert (counted.rows(), counted.ids, counted.positions, counted.count) == (1, None, None, 2)
    assert len(encode_event(Fired(True, 1, count=2))) == 10


def test_kinds_are_numbered_densely_from_one_in_version_1() -> None:
    tags = sorted(int(kind.__struct_config__.tag) for kind in KIND_NAMES)  # type: ignore[arg-type]
    assert tags == [kind * 16 + 1 for kind in range(1, len(KIND_NAMES) + 1)]


@pytest.mark.parametrize("tag", [0x7F1, 0x082])
def test_unknown_kind_or_version_of_an_event_is_refused_by_name(tag: int) -> None:
    data = msgspec.msgpack.encode([[Resumed.__struct_config__.tag], [tag, 1, 2]])
    with pytest.raises(UnknownFormat, match=f"here .event kind {tag:#x}.") as caught:
        decode_events(data, "here")
    assert caught.value.version == tag & 15
