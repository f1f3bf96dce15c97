"""From numpy columns to Arrow arrays, buffer by buffer: nothing here makes a Python object for a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heapline.ulid import EPOCH_2024_MS, PARTITION_BITS, SEQUENCE_BITS

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_DIGITS = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", dtype=np.uint8)
_ULID_CHARS = 26


def _validity(valid: Bools | None) -> tuple[Any, int]:
    if valid is None or valid.all():
        return None, 0
    return pa.py_buffer(np.packbits(valid, bitorder="little")), len(valid) - int(np.count_nonzero(valid))


def numbers(kind: Any, values: npt.NDArray[Any], valid: Bools | None = None) -> Any:
    """A column of fixed width; values where it is not valid do not matter."""
    mask, nulls = _validity(valid)
    dense = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype() if not pa.types.is_timestamp(kind) else np.int64)
    return pa.Array.from_buffers(kind, len(dense), [mask, pa.py_buffer(dense)], nulls)


def flags(values: Bools, valid: Bools | None = None) -> Any:
    mask, nulls = _validity(valid)
    return pa.Array.from_buffers(
        pa.bool_(), len(values), [mask, pa.py_buffer(np.packbits(values, bitorder="little"))], nulls
    )  # fmt: skip


def moments(kind: Any, ms: I64, valid: Bools | None = None) -> Any:
    """Milliseconds as timestamps."""
    return numbers(kind, ms * 1000, valid)


def blobs(kind: Any, data: Any, lengths: npt.NDArray[Any], valid: Bools | None = None) -> Any:
    """Strings or bytes that lie one after the other in `data`; those that are not valid have length 0."""
    mask, nulls = _validity(valid)
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.Array.from_buffers(kind, len(lengths), [mask, pa.py_buffer(ends), pa.py_buffer(data)], nulls)


def repeated(kind: Any, text: str, count: int) -> Any:
    """The same string so many times."""
    data = text.encode()
    return blobs(kind, data * count, np.full(count, len(data)))


def chosen(kind: Any, texts: list[str | None], which: npt.NDArray[Any]) -> Any:
    """`texts[which]`, with None as null."""
    return pa.array(texts, type=kind).take(pa.array(which))


def gather(data: Bytes, starts: I64, lengths: I64) -> Any:
    """The pieces `data[start : start + length]` one after the other; no copy if they lie so already."""
    total = int(lengths.sum())
    if not total:
        return b""
    ends = np.cumsum(lengths)
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return data[starts[0] : starts[0] + total]
    return data[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]


def ulids(ids: I64, valid: Bools | None = None) -> Any:
    """The ids as ULIDs (heapline/ulid.py says how they are spelled)."""
    ms = (ids >> (PARTITION_BITS + SEQUENCE_BITS)) + EPOCH_2024_MS
    place = ids & ((1 << (PARTITION_BITS + SEQUENCE_BITS)) - 1)
    chars = np.full((len(ids), _ULID_CHARS), ord("0"), dtype=np.uint8)
    for at in range(10):
        chars[:, at] = _DIGITS[(ms >> (5 * (9 - at))) & 31]
    # 22 bits of partition and sequence, then zeros: four whole digits, and two bits of the fifth.
    for at in range(4):
        chars[:, 10 + at] = _DIGITS[(place >> (17 - 5 * at)) & 31]
    chars[:, 14] = _DIGITS[(place & 3) << 3]
    if valid is None or valid.all():
        return blobs(pa.string(), chars.reshape(-1), np.full(len(ids), _ULID_CHARS))
    return blobs(pa.string(), chars[valid].reshape(-1), np.where(valid, _ULID_CHARS, 0), valid)
