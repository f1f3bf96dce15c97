"""Join and cut batches of messages and of their results, column by column."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from heapline.contract.columns import pack, plan, unpack
from heapline.contract.errors import HeaplineError
from heapline.contract.messages import EnqueuedBatch, NewMessages, RowError


def size(messages: NewMessages) -> int:
    """Bytes of payloads."""
    return sum(map(len, messages.payloads))


def join(batches: Sequence[NewMessages]) -> NewMessages:
    """All messages of several batches, in order."""
    columns: dict[str, Any] = {}
    for column in plan(NewMessages):
        values = [getattr(batch, column.name) for batch in batches]
        if all(value is None for value in values):
            continue
        if column.form is None:
            columns[column.name] = [
                item
                for value, batch in zip(values, batches, strict=True)
                for item in ([None] * len(batch) if value is None else value)
            ]
        else:
            absent = array(column.form, [0 if column.none is None else column.none]).tobytes()
            columns[column.name] = memoryview(
                b"".join(absent * len(b) if v is None else v for v, b in zip(values, batches, strict=True))
            )
    return NewMessages(**columns)


def failed(count: int, error: HeaplineError) -> EnqueuedBatch:
    """The result of a batch of which every row has this error."""
    return EnqueuedBatch(pack([0] * count), None, [RowError(i, error) for i in range(count)])


def join_results(results: Sequence[EnqueuedBatch]) -> EnqueuedBatch:
    errors: list[RowError] = []
    start = 0
    for result in results:
        errors += [RowError(start + e.row, e.error) for e in result.errors or ()]
        start += result.ids.nbytes // 8
    duplicates = None
    if any(result.duplicates is not None for result in results):
        duplicates = memoryview(
            b"".join(bytes(r.ids.nbytes // 8) if r.duplicates is None else r.duplicates for r in results)
        )
    suffix = next((r.id_suffix for r in results if r.id_suffix), 0)  # a part that failed has none
    return EnqueuedBatch(memoryview(b"".join(r.ids for r in results)), duplicates, errors or None, suffix)


def cut_result(result: EnqueuedBatch, sizes: Sequence[int]) -> list[EnqueuedBatch]:
    """The results of batches that were enqueued as one."""
    found, start = [], 0
    for count in sizes:
        end = start + count
        duplicates = None if result.duplicates is None else result.duplicates[start:end]
        if duplicates is not None and not any(duplicates):
            duplicates = None
        errors = [RowError(e.row - start, e.error) for e in result.errors or () if start <= e.row < end]
        found.append(EnqueuedBatch(result.ids[start * 8 : end * 8], duplicates, errors or None, result.id_suffix))
        start = end
    return found


def replace_results(result: EnqueuedBatch, rows: Sequence[int], others: EnqueuedBatch) -> EnqueuedBatch:
    """A result in which these rows have the results of `others`, in order."""
    ids, count = unpack(result.ids), result.ids.nbytes // 8
    duplicates = bytearray(count) if result.duplicates is None else bytearray(result.duplicates)
    errors = {e.row: e.error for e in result.errors or ()}
    other_ids, other_errors = unpack(others.ids), {e.row: e.error for e in others.errors or ()}
    for i, row in enumerate(rows):
        ids[row] = other_ids[i]
        duplicates[row] = 0 if others.duplicates is None else others.duplicates[i]
        errors.pop(row, None)
        if i in other_errors:
            errors[row] = other_errors[i]
    return EnqueuedBatch(
        pack(ids),
        memoryview(bytes(duplicates)) if any(duplicates) else None,
        [RowError(row, errors[row]) for row in sorted(errors)] or None,
        result.id_suffix or others.id_suffix,
    )
