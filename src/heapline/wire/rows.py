"""Rules that protobuf and JSON share: rows of column structs, and texts that may name the server's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from heapline.contract.columns import Columns, from_rows, to_rows
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing, from_ms
from heapline.contract.messages import SCOPES, NewMessages, pack_messages
from heapline.contract.stream import ReplayInfo

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
