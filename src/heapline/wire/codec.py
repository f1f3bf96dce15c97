"""Calls and results in msgpack, and msgspec hooks for values that msgspec does not know.

These are errors, payloads that share a buffer, and arrays. An error is {"error": class, "facts": {…}, "text": …}.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

import msgspec

from heapline.contract import check
from heapline.contract.call import Call
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.stream import Payloads
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
