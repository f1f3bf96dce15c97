"""msgspec hooks for the values of the contract that msgspec does not know: errors, shared payload buffers, arrays.

Shared by every wire that msgspec encodes. An error is {"error": class, "facts": {…}, "text": …}.
"""

from __future__ import annotations

from typing import Any

import msgspec

from heapline.contract.errors import HeaplineError
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


def encode(value: Any) -> bytes:
    """Encode as msgpack."""
    return _encoder.encode(value)


def decode(data: Any, kind: Any) -> Any:
    """Decode msgpack as `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=dec_hook)


_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
