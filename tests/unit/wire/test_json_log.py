"""The log as JSON: a client gets back what the broker read."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heapline.model import LogEvent, LogFrame
from heapline.wire.json_log import FrameTold, read_frame, tell_frame

scalars = st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text() | st.binary()
arrays = st.sampled_from(["i8", "u8", "u4", "u2", "u1", "f8"]).flatmap(
    lambda dtype: hnp.arrays(dtype, st.integers(0, 5), elements={"allow_nan": False} if dtype == "f8" else None)
)
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@given(columns=st.dictionaries(st.text(), values, max_size=4), payloads=st.none() | st.lists(st.binary(), max_size=3))
def test_frame_comes_back_as_it_was(columns: dict[str, Any], payloads: list[bytes] | None) -> None:
    event = LogEvent(kind="enqueued", offset=3, row_count=2, columns=columns, payloads=payloads)
    frame = LogFrame(topic="jobs", partition=1, unit=7, offset=3, row_count=2, time_ms=5, wall_ms=-6, events=[event])
    line = msgspec.json.encode(tell_frame(frame))
    assert b"\n" not in line
    again = read_frame(msgspec.json.decode(line, type=FrameTold))
    (found,) = again.events
    assert same(columns, found.columns)
    assert found.payloads == payloads
    assert msgspec.structs.replace(again, events=[]) == msgspec.structs.replace(frame, events=[])


def test_numbers_of_64_bits_are_digits_in_strings() -> None:
    columns = {"ids": np.array([1 << 60]), "flags": np.array([7], dtype="u2")}
    event = LogEvent(kind="acked", offset=0, row_count=1, columns=columns)
    frame = LogFrame(topic="jobs", partition=0, unit=1, offset=0, row_count=1, time_ms=0, wall_ms=0, events=[event])
    told = tell_frame(frame).events[0].columns
    assert told == {"ids": {"dtype": "i8", "values": [str(1 << 60)]}, "flags": {"dtype": "u2", "values": [7]}}
