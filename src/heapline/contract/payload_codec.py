"""Decode payloads by their content type, JSON or MessagePack, into the type that the reader names.

Types are those of msgspec (dataclasses, structs, TypedDict, datetime, UUID, Enum, Decimal, containers of them), and
pydantic's models if the program itself uses pydantic. Never pickle: decoding a payload runs no code from it. Errors
name the position at which a payload is invalid, and never its contents.
"""

from __future__ import annotations

import re
from threading import Lock
from typing import Any

import msgspec

from heapline.contract.errors import BadRequest

JSON = "application/json"
CONTENT_TYPE = "content-type"
MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_building = Lock()  # msgspec crashes if two threads build the first decoder of a type at the same time
_VALUE = re.compile(r"(Invalid (?:enum )?value) .*?( - at `|$)", re.DOTALL)  # msgspec quotes the invalid value


def decode(payload: bytes, content_type: str | None, kind: Any = Any) -> Any:
    """Return the payload as a `kind`. Without a content type it is decoded as JSON.

    >>> decode(b'{"a": "2026-01-01"}', None)
    {'a': '2026-01-01'}
    """
    media = (content_type or JSON).partition(";")[0].strip().lower()
    try:
        if media == JSON or media.endswith("+json"):
            return build_decoder(msgspec.json.Decoder, kind).decode(payload)
        if media in MSGPACK:
            return build_decoder(msgspec.msgpack.Decoder, kind).decode(payload)
    except RecursionError:
        raise BadRequest("cannot decode the payload: it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"cannot decode the payload: {without_values(error)}") from None
    raise BadRequest(f"the payload is {media!r}, which is not JSON; read it from m.payload")


def build_decoder(decoder: Any, kind: Any) -> Any:
    """Return msgspec's decoder of a program's own type. It may be the first one, and other threads may need it too."""
    with _building:
        return decoder(kind, dec_hook=read_foreign)


def without_values(error: Exception) -> str:
    """Return msgspec's text without values of the payload."""
    return _VALUE.sub(r"\1\2", str(error))


def write_foreign(value: Any) -> Any:
    """Encode a value of a type that msgspec does not support (its enc_hook)."""
    if is_pydantic(type(value)):
        return msgspec.Raw(value.model_dump_json(by_alias=True, round_trip=True).encode())
    raise TypeError(
        f"cannot encode {type(value).__qualname__} as JSON; use a dataclass, a msgspec.Struct, a pydantic model, "
        "or plain values"
    )


def read_foreign(kind: Any, value: Any) -> Any:
    """Decode a value of a type that msgspec does not support (its dec_hook). msgspec adds the position to errors."""
    if not is_pydantic(kind):
        raise TypeError(f"no way to read a {getattr(kind, '__qualname__', kind)} is known")
    # Encoded as JSON again: a strict model takes a date from a JSON string, but not from a Python one.
    text = msgspec.json.encode(value)
    try:
        return kind.model_validate_json(text)
    except ValueError as error:
        raise ValueError(_pydantic_words(error)) from None


def is_pydantic(kind: Any) -> bool:
    """Return whether a class is a pydantic model, without importing pydantic, which may not be installed."""
    return isinstance(kind, type) and hasattr(kind, "model_validate_json") and hasattr(kind, "model_dump_json")


def _pydantic_words(error: Any) -> str:
    """Return position and kind of each problem: pydantic's own messages may contain the input."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{p['type']} at {'.'.join(map(str, p['loc'])) or 'the top'}" for p in problems[:5])
