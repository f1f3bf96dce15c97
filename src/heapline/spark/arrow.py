"""Convert between numpy columns and Arrow arrays, buffer by buffer. No Python object is created per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heapline.contract.ids import EPOCH_2024_MS, PARTITION_BITS, SEQUENCE_BITS, tails_of

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

TIMESTAMP = pa.timestamp("us", "UTC")
_DIGITS = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", dtype=np.uint8)
_ULID_CHARS = 26


def _validity(valid: Bools | None) -> tuple[Any, int]:
    if valid is None or valid.all():
        return None, 0
    return pa.py_buffer(np.packbits(valid, bitorder="little")), len(valid) - int(np.count_nonzero(valid))


def numbers(kind: Any, values: npt.NDArray[Any], valid: Bools | None = None) -> Any:
    """Return a column of fixed width. Values where it is not valid are ignored."""
    mask, nulls = _validity(valid)
    dense = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype() if not pa.types.is_timestamp(kind) else np.int64)
    return pa.Array.from_buffers(kind, len(dense), [mask, pa.py_buffer(dense)], nulls)


def flags(values: Bools, valid: Bools | None = None) -> Any:
    mask, nulls = _validity(valid)
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [mask, bits], nulls)


def moments(ms: I64, valid: Bools | None = None) -> Any:
    """Return a column of timestamps from milliseconds."""
    return numbers(TIMESTAMP, ms * 1000, valid)


def blobs(kind: Any, data: Any, lengths: npt.NDArray[Any], valid: Bools | None = None) -> Any:
    """Return a column of strings or bytes that are adjacent in `data`. Invalid ones have length 0."""
    mask, nulls = _validity(valid)
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.Array.from_buffers(kind, len(lengths), [mask, pa.py_buffer(ends), pa.py_buffer(data)], nulls)


def repeated(kind: Any, text: str, count: int) -> Any:
    """Return a column with the same string `count` times."""
    data = text.encode()
    return blobs(kind, data * count, np.full(count, len(data)))


def chosen(kind: Any, texts: list[str | None], which: npt.NDArray[Any]) -> Any:
    """Return `texts[which]` as a column, with None as null."""
    return pa.array(texts, type=kind).take(pa.array(which))


def gather(data: Bytes, starts: I64, lengths: I64) -> Any:
    """Return the pieces `data[start : start + length]` one after the other, without a copy if they are adjacent."""
    total = int(lengths.sum())
    if not total:
        return b""
    ends = np.cumsum(lengths)
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return data[starts[0] : starts[0] + total]
    return data[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]


def ulids(ids: I64, suffix: int, valid: Bools | None = None) -> Any:
    """Return ids of one topic as ULIDs (contract/ids.py defines the spelling)."""
    ms = (ids >> (PARTITION_BITS + SEQUENCE_BITS)) + EPOCH_2024_MS
    low_bits = ids & ((1 << (PARTITION_BITS + SEQUENCE_BITS)) - 1)
    chars = np.empty((len(ids), _ULID_CHARS), dtype=np.uint8)
    for at in range(10):
        chars[:, at] = _DIGITS[(ms >> (5 * (9 - at))) & 31]
    # 22 bits of partition and sequence: four complete digits and two bits of the fifth. The topic's suffix follows.
    for at in range(4):
        chars[:, 10 + at] = _DIGITS[(low_bits >> (17 - 5 * at)) & 31]
    tails = np.array([list(tail.encode()) for tail in tails_of(suffix)], dtype=np.uint8)
    chars[:, 14] = tails[low_bits & 3, 0]
    chars[:, 15:] = tails[0, 1:]
    if valid is None or valid.all():
        return blobs(pa.string(), chars.reshape(-1), np.full(len(ids), _ULID_CHARS))
    return blobs(pa.string(), chars[valid].reshape(-1), np.where(valid, _ULID_CHARS, 0), valid)


def valid_of(column: Any) -> Bools:
    valid: Bools = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def lengths_of(column: Any) -> I64:
    """Return the lengths in bytes; 0 for null."""
    found: I64 = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def numbers_of(column: Any, kind: Any) -> tuple[npt.NDArray[Any], Bools]:
    """Return the numbers (0 for null) and where they are valid."""
    numbers = column.cast(kind, safe=False)
    return pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False), valid_of(column)


def text_of(column: Any) -> Any:
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def is_text(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False
