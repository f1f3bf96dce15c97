"""What a client refuses by itself of calls on groups: what no wire could carry, or would carry as something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from heapline.engine.columns import check_moment, check_seconds
from heapline.engine.requests import check_int
from heapline.errors import BadRequest
from heapline.streams import Place

OFFSET_MAX = (1 << 62) - 1
PARTITION_MAX = (1 << 31) - 1


def spelled(kind: Any, **fields: Any) -> Any:
    """A protobuf message of these fields; a value that it cannot hold is the caller's mistake."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"an argument does not fit: {error}") from None


def check_fetch(max_messages: int, max_bytes: int, wait: float) -> None:
    check_int("max_messages", max_messages, 0, 1_000_000)
    check_int("max_bytes", max_bytes, 1, 1 << 40)
    check_seconds("wait", wait)


def checked_place(place: Any) -> Place:
    if isinstance(place, datetime):
        check_moment("a place in a stream", place)
        return place
    if isinstance(place, Mapping):
        for partition, offset in place.items():
            check_int("partition", partition, 0, PARTITION_MAX)
            check_int("offset", offset, 0, OFFSET_MAX)
        return place
    if isinstance(place, str) and place in ("earliest", "latest"):
        return place  # type: ignore[return-value]
    if type(place) is int and 0 <= place <= OFFSET_MAX:
        return place
    raise BadRequest(
        f'a place in a stream is "earliest", "latest", an offset, a datetime with its time zone, or '
        f"{{partition: offset}}, not {str(place)[:60]!r}"
    )


def rows_of(offsets: Any) -> dict[int, Any]:
    """{partition: offsets}, these as columns of int64."""
    if not isinstance(offsets, Mapping):
        raise BadRequest(f"rows are given as {{partition: [offsets]}}, not as {type(offsets).__name__}")
    found: dict[int, Any] = {}
    for partition, some in offsets.items():
        check_int("partition", partition, 0, PARTITION_MAX)
        found[partition] = _column(some)
    return found


def _column(offsets: Any) -> Any:
    known = isinstance(offsets, np.ndarray | Sequence) and not isinstance(offsets, str | bytes)
    try:
        column = np.asarray(offsets if known else "")
    except (TypeError, ValueError, OverflowError):
        column = np.asarray("")
    if column.ndim != 1 or (len(column) and (column.dtype.kind != "i" or column.min() < 0)):
        raise BadRequest(f"offsets are a list of ints from 0 on, not {str(offsets)[:60]!r}")
    return column.astype(np.int64)
