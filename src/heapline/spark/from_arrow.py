"""From Arrow arrays to numpy columns, buffer by buffer; the other way round is buffers.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heapline.spark.buffers import I64, Bools


def valid_of(column: Any) -> Bools:
    valid: Bools = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def lengths_of(column: Any) -> I64:
    """In bytes; 0 where there is none."""
    found: I64 = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def numbers_of(column: Any, kind: Any) -> tuple[npt.NDArray[Any], Bools]:
    """The numbers, 0 where there is none, and where there are some."""
    numbers = column.cast(kind, safe=False)
    return pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False), valid_of(column)


def text_of(column: Any) -> Any:
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def blob_of(column: Any) -> tuple[bytes, I64]:
    """All values one after the other, and their sizes; there are no nulls."""
    plain = column.cast(pa.binary())
    _, offsets, data = plain.buffers()
    if not len(plain) or data is None:
        return b"", np.zeros(len(plain), dtype=np.int64)
    bounds = np.frombuffer(offsets, dtype=np.int32)[plain.offset : plain.offset + len(plain) + 1].astype(np.int64)
    return data[int(bounds[0]) : int(bounds[-1])].to_pybytes(), np.diff(bounds)


def is_text(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False
