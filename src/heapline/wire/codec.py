"""Calls and results in msgpack, and what all encodings share: hooks for msgspec, and rows of column structs.

The hooks encode values that msgspec does not know: errors, payloads that share a buffer, and arrays. An error is
{"error": class, "facts": {…}, "text": …}.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import msgspec.inspect
from msgspec.structs import replace

from heapline.contract import broker as _every_call  # noqa: F401  (registers the calls)
from heapline.contract import check
from heapline.contract.call import CALLS, Call, Feed
from heapline.contract.columns import Columns, from_rows, to_rows
from heapline.contract.errors import BadRequest, HeaplineError, UnavailableError
from heapline.contract.message import LogFrame, Outgoing, from_ms
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
#: Of every call and every result. Built at import: see `describe_types`.
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=dec_hook) for call in CALLS.values() for kind in (call, call.result)
}


def decode_call(data: bytes | memoryview, kind: type[Call[Any]]) -> Any:
    """Decode a call. Raise the same BadRequest as its constructor if a field is not valid."""
    try:
        try:
            return _DECODERS[kind].decode(data)
        except msgspec.ValidationError as error:
            check.explain(kind, lambda: msgspec.msgpack.decode(data), error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"cannot decode the request as {kind.__name__}") from None


def encode_result(result: Any) -> bytes:
    """Encode the result of a call, or an item of a feed, for the native wire. No result is an empty body."""
    if result is None:
        return b""
    if type(result) is LogFrame:
        result = replace(result, events=[replace(e, columns=_pack_log_columns(e.columns)) for e in result.events])
    return encode(result)


def decode_result(data: bytes | memoryview, kind: type[Call[Any]]) -> Any:
    """Decode the result of a call, of this release or another one; see `read_answer`.

    Raise UnavailableError if that fails.
    """
    if kind.result is type(None):
        return None
    try:
        try:
            result = _DECODERS[kind.result].decode(data)
        except msgspec.ValidationError:
            result = read_answer(kind.result, msgspec.msgpack.decode(data))
        if type(result) is LogFrame:
            events = [replace(event, columns=_unpack_log_columns(event.columns)) for event in result.events]
            result = replace(result, events=events)
    except Exception as error:
        text = f"the server's answer to {kind.facts.rpc} cannot be decoded: {error}"
        raise UnavailableError(text) from error
    return result


def read_answer(kind: Any, value: Any) -> Any:
    """Build an answer from plain values that msgspec refused as `kind`, because the server is of another release.

    Structs that are also part of requests have bounds and reject unknown fields. An answer may have other bounds, other
    choices and more fields: the fields are ignored, the values are taken as they are. Types must be right.
    """
    return _build(msgspec.inspect.type_info(kind), value)


#: The types of single values, without their bounds.
_PLAIN: dict[type[msgspec.inspect.Type], Any] = {
    msgspec.inspect.BoolType: bool,
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.StrType: str,
    msgspec.inspect.BytesType: bytes,
    msgspec.inspect.MemoryViewType: memoryview,
    msgspec.inspect.DateTimeType: datetime,
    msgspec.inspect.NoneType: None,
}


def _build(info: msgspec.inspect.Type, value: Any, *, strict: bool = True) -> Any:
    match info, value:
        case msgspec.inspect.Metadata(type=kind), _:
            return _build(kind, value, strict=strict)
        case msgspec.inspect.UnionType(types=types), _:
            return _build_one_of(types, value)
        case msgspec.inspect.StructType(cls=cls, fields=fields, tag=tag, tag_field=tag_field), dict():
            if tag is None or value.get(tag_field) == tag:
                known = [(field, value[field.encode_name]) for field in fields if field.encode_name in value]
                if all(field.encode_name in value for field in fields if field.required):
                    return cls(**{field.name: _build(field.type, item) for field, item in known})
        case ((msgspec.inspect.ListType(item_type=kind) | msgspec.inspect.CollectionType(item_type=kind)), list()):
            return [_build(kind, item) for item in value]
        case msgspec.inspect.DictType(key_type=key, value_type=kind), dict():
            # JSON has numbers as texts there
            return {_build(key, name, strict=False): _build(kind, item) for name, item in value.items()}
        case msgspec.inspect.LiteralType(values=values), _ if type(value) in set(map(type, values)):
            return value
        case msgspec.inspect.CustomType(cls=cls), _:
            return dec_hook(cls, value)
        case msgspec.inspect.RawType(), _:
            return msgspec.Raw(msgspec.json.encode(value))
        case msgspec.inspect.AnyType(), _:
            return value
    if type(info) not in _PLAIN:
        raise msgspec.ValidationError(f"cannot read {check.shown(value)} as {type(info).__name__}")
    return msgspec.convert(value, _PLAIN[type(info)], strict=strict)


def _build_one_of(kinds: Sequence[msgspec.inspect.Type], value: Any) -> Any:
    for kind in kinds:
        try:
            return _build(kind, value)
        except msgspec.ValidationError as error:
            refused = error
    raise refused


def _pack_log_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a log event as plain values: arrays of numbers packed, in little-endian order."""
    import numpy as np  # not above: `heapline --help` does without it

    packed: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, dict):
            packed[name] = {"columns": _pack_log_columns(value)}
        elif isinstance(value, np.ndarray):
            little = value.astype(value.dtype.newbyteorder("<"), copy=False)
            packed[name] = {"dtype": little.dtype.str, "data": little.tobytes()}
        else:
            packed[name] = {"value": value}
    return packed


def _unpack_log_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    found: dict[str, Any] = {}
    for name, column in columns.items():
        if "columns" in column:
            found[name] = _unpack_log_columns(column["columns"])
        elif "dtype" in column:
            found[name] = np.frombuffer(column["data"], column["dtype"])
        else:
            found[name] = column["value"]
    return found


def waiting_commands() -> frozenset[int]:
    """Return the numbers of calls that may take long: those that wait, and feeds."""
    return frozenset(number for number, kind in CALLS.items() if kind.facts.waits or issubclass(kind, Feed))


# -- errors on the native wire -----------------------------------------------------------------------------------------


def encode_error(error: HeaplineError) -> bytes:
    """Describe an error, with the code that a client without its class goes by."""
    return encode({**error_codes.describe(error), "code": error_codes.codes_of(type(error)).grpc})


def encode_failure(code: str, text: str) -> bytes:
    """Describe a failure that has no class: a cancelled request, or an internal error."""
    return encode({"code": code, "text": text})


def decode_error(data: bytes | memoryview) -> HeaplineError:
    """Return the described error: the same class, or the class that its code stands for."""
    try:
        described = msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return error_codes.of_code("UNKNOWN", "the server sent an error that cannot be decoded")
    described["error"] = str(described.get("error"))
    return error_codes.rebuild(described, str(described.get("code", "UNKNOWN")))


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
    """Replace the numbers of the columns by their values."""
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
