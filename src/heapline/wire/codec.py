"""Calls and results in msgpack, and what all encodings share: hooks for msgspec, and rows of column structs.

The hooks encode values that msgspec does not know: errors, payloads that share a buffer, and arrays. An error is
{"error": class, "facts": {…}, "text": …}.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

import msgspec
from msgspec.structs import replace

from heapline.contract import check
from heapline.contract.call import Call
from heapline.contract.columns import Columns, from_rows, to_rows
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.message import Outgoing, from_ms
from heapline.contract.messages import SCOPES, NewMessages, pack_messages
from heapline.contract.stream import Payloads, ReplayInfo
from heapline.wire import error_codes


def enc_hook(value: Any) -> Any:
    """Return plain values for an error, for payloads that share a buffer, and for arrays and numbers of numpy."""
    if isinstance(value, HeaplineError):
        return error_codes.describe(value)
    if isinstance(value, Payloads):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot encode {type(value).__name__}")


def dec_hook(kind: type[Any], value: Any) -> Any:
    """Return the error that was described."""
    if issubclass(kind, Exception) and isinstance(value, dict):
        return error_codes.rebuild(value)
    raise TypeError(f"cannot decode {kind.__name__}")


def decode(data: Any, kind: Any) -> Any:
    """Decode msgpack as `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=dec_hook)


encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
_building = Lock()  # msgspec crashes if threads build the same decoder at the same time


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _building:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


def decode_call(data: bytes, kind: type[Call[Any]]) -> Any:
    """Decode a call. Raise the same BadRequest as its constructor if a field is not valid."""
    try:
        try:
            return _decoder(kind).decode(data)
        except msgspec.ValidationError as error:
            check.explain(kind, lambda: msgspec.msgpack.decode(data), error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"cannot decode the request as {kind.__name__}") from None


def decode_result(data: bytes, kind: type[Call[Any]]) -> Any:
    """Decode the result of a call. Fields that are not known are ignored."""
    return _decoder(kind.result).decode(data)


# -- shared by protobuf and JSON ---------------------------------------------------------------------------------------

#: Fields of results whose text can quote paths of the server; they are shortened.
MAY_NAME_FILES = {(ReplayInfo, "error")}


def rows_of(columns: Columns) -> list[Any]:
    """Return one row struct per message."""
    if not isinstance(columns, NewMessages):
        return to_rows(columns)
    rows = to_rows(columns)
    if columns.deliver_at_ms is None and columns.idempotency_scopes is None:
        return rows
    return [_outgoing(row) for row in rows]


def _outgoing(row: Outgoing) -> Outgoing:
    """Replace the numbers of the columns by what they stand for."""
    at: Any = row.deliver_at
    scope: Any = row.idempotency_scope
    return replace(
        row,
        deliver_at=None if at is None else from_ms(at),
        idempotency_scope=None if scope is None else SCOPES[scope - 1],
    )


def columns_of(kind: type[Columns], rows: Sequence[Any]) -> Any:
    """Build the column struct `kind` from row structs."""
    if kind is not NewMessages:
        return from_rows(kind, rows)
    for row in rows:
        for name, value in (("delay", row.delay), ("ttl", row.ttl)):
            if value is not None and value != value:  # in a column NaN stands for none
                raise BadRequest(f"{name} must be a number of seconds, got nan")
        if row.idempotency_scope is not None and row.idempotency_scope not in SCOPES:
            raise BadRequest(f"idempotency_scope must be one of {SCOPES}, got {row.idempotency_scope!r}")
    return pack_messages(rows) if rows else NewMessages([])
