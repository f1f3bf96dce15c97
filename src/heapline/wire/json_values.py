"""Values as JSON has them, for people: payloads, ids, tokens, instants, positions, rows, errors and columns of the log.

id of a message (int)       `message_id`, a ULID, and `id`, digits; JavaScript rounds numbers over 2^53
bounds of ranges of ids     digits
token of a lease            `lease_token`, digits
payload                     one of `payload` (base64), `payload_text` and `payload_json`
enqueued_ms, deadline_ms    `enqueued_at`, `deadline`, as RFC 3339
rows of partitions          {"0": [17, 18]}
position in a log           "earliest", "latest", an offset, {"0": 1200}, or a time
error                       {"error", "text", "facts"}
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct, UnsetType

from heapline.contract.columns import pack, unpack
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.fields import INT64_MAX
from heapline.contract.groups import Position, pack_offsets, position, unpack_offsets
from heapline.contract.ids import suffix_of
from heapline.contract.message import EPOCH, Enqueued, from_ms
from heapline.contract.messages import enqueued, pack_enqueued
from heapline.wire import error_codes

PayloadAs = Literal["base64", "text", "json"]
Ulid = Annotated[
    str, Meta(max_length=64, description="the message's id, a ULID", examples=["01JGXV0Z000000000000000000"])
]
Digits = Annotated[str, Meta(max_length=64, description="the same id as digits of an integer")]
AnyId = Annotated[str, Meta(max_length=64, description="the message's id, a ULID or digits")]
Token = Annotated[str, Meta(max_length=64, description="the lease's token, as the pop returned it", examples=["42"])]
Base64 = Annotated[
    bytes | UnsetType,
    Meta(
        description="any bytes, in base64",
        examples=["aGVsbG8="],
        extra={"wanted": "base64 (payload_text and payload_json need no encoding)"},
    ),
]
Text = Annotated[str | UnsetType, Meta(description="text, stored as UTF-8", examples=["hello"])]
Json = Annotated[Raw | UnsetType, Meta(description="any JSON, stored as it is written", examples=[{"order": 7}])]
Place = Annotated[
    str | int | dict[str, int],
    Meta(
        description='"earliest", "latest", a time (RFC 3339), an offset of each partition, or {partition: offset}',
        examples=["earliest", "2030-01-31T12:00:00Z", {"0": 1200}],
    ),
]
Rows = Annotated[
    dict[str, list[int]],
    Meta(description="offsets of rows, by the number of their partition", examples=[{"0": [17, 18]}]),
]
ONE_PAYLOAD = "give exactly one of payload (base64), payload_text and payload_json"
_MS = timedelta(milliseconds=1)
_WIDE = ("i8", "u8")  # numpy types whose numbers JavaScript rounds


class JsonOptions(Struct, frozen=True, kw_only=True):
    """Options of the HTTP interface, which are not fields of a command."""

    payload_as: PayloadAs = "base64"
    tell_lost: bool = False
    force: bool = False
    confirmation: str | None = None
    id_suffix: int = 0  # of the ULIDs in a request, or of the topic whose result is written; not an option


PLAIN = JsonOptions()


class ErrorResponse(Struct, frozen=True, kw_only=True):
    """An error."""

    error: Annotated[str, Meta(description="class of the error", examples=["TopicNotFound"])]
    text: Annotated[str, Meta(description="what happened, and what to do")]
    facts: Annotated[dict[str, Any], Meta(description="data of the error", examples=[{"topic": "jobs"}])] = {}


def error_response(error: Any) -> ErrorResponse:
    """Describe an error; ids are digits."""
    described = error_codes.describe(error)
    facts = described["facts"]
    if "lost" in facts:
        facts = facts | {"lost": list(map(str, facts["lost"]))}
    return ErrorResponse(error=described["error"], text=error_codes.advise(described, "http"), facts=facts)


def read_error(response: ErrorResponse, code: str = "UNKNOWN") -> HeaplineError:
    """Return the error that was described; `code` is the gRPC name for a class that this version does not know."""
    facts = response.facts
    if isinstance(facts.get("lost"), list):
        facts = facts | {"lost": [int(id) for id in facts["lost"]]}
    described = {"error": response.error, "facts": facts, "text": response.text}
    return error_codes.rebuild(described | {"text": error_codes.advise(described, "http", is_back=True)}, code)


class Conversion(NamedTuple):
    """A type, the type that it has in JSON, and the way there and back."""

    type: Any
    write: Callable[[Any, JsonOptions], Any]
    read: Callable[[Any], Any]
    has_payload: bool = False


def raw_json(raw: Any) -> bytes:
    content = bytes(raw)
    try:
        content.decode()
    except UnicodeDecodeError:
        raise BadRequest("payload_json is not UTF-8") from None
    return content


def show_payload(payload: bytes, payload_as: PayloadAs) -> dict[str, Any]:
    """Return a payload as the caller wants to see it, or in base64 if it is not text or JSON."""
    if payload_as == "base64":
        return {"payload": payload}
    try:
        text = payload.decode()
        if payload_as == "text":
            return {"payload_text": text}
        msgspec.json.decode(payload)
    except (ValueError, RecursionError):
        return {"payload": payload}
    return {"payload_json": Raw(payload)}


def read_token(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= INT64_MAX:
        return int(text)
    raise BadRequest(f"lease_token must be the one that a pop returned with the message, got {text[:40]!r}")


class EnqueuedRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The id of one message of a batch, or its error if the batch is not atomic."""

    message_id: Ulid | None = None
    id: Digits | None = None
    duplicate: bool = False
    error: ErrorResponse | None = None


class Results(Struct, frozen=True):
    """One result per message, in the order of the request."""

    results: list[EnqueuedRow]


def _enqueued_out(row: Enqueued) -> EnqueuedRow:
    if row.error is not None:
        return EnqueuedRow(error=error_response(row.error))
    return EnqueuedRow(message_id=row.message_id, id=str(row.id), duplicate=row.duplicate)


def _enqueued_in(row: EnqueuedRow) -> Enqueued:
    if row.error is not None:
        return Enqueued(0, error=read_error(row.error))
    return Enqueued(int(row.id or 0), row.duplicate)


ENQUEUED_ROWS = Conversion(
    list[EnqueuedRow],
    lambda v, _: [_enqueued_out(row) for row in enqueued(v)],
    lambda v: pack_enqueued(
        [_enqueued_in(row) for row in v], next((suffix_of(r.message_id) for r in v if r.message_id), 0)
    ),
)
ROWS = Conversion(Rows, lambda v, _: text_keys(unpack_offsets(v)), lambda v: pack_offsets(int_keys(v)))
IDS = Conversion(list[Digits], lambda v, _: list(map(str, v)), lambda v: list(map(int, v)))
INSTANT_MS = Conversion(datetime, lambda ms, _: from_ms(ms), lambda instant: (instant - EPOCH) // _MS)
DEADLINES = Conversion(
    list[datetime | None],
    lambda packed, _: [None if ms < 0 else from_ms(ms) for ms in unpack(packed)],
    lambda found: pack([-1 if instant is None else (instant - EPOCH) // _MS for instant in found]),
)


def text_keys(found: Any) -> Any:
    """Return a mapping by partition as JSON has it; other values as they are."""
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else found


def int_keys(found: dict[str, Any]) -> dict[int, Any]:
    for key in found:
        if not (key.isascii() and key.isdigit() and len(key) <= 19):
            raise BadRequest(f"a partition must be a number, got {key[:20]!r}")
    return {int(key): value for key, value in found.items()}


def place_in(place: Any) -> Position:
    if isinstance(place, dict):
        return position("a position", int_keys(place))
    if isinstance(place, str) and place not in ("earliest", "latest"):
        try:
            return Position(at=msgspec.convert(place, datetime))
        except msgspec.ValidationError:
            pass
        if place.isascii() and place.isdigit() and len(place) <= 19:  # in a query
            place = int(place)
    return position("a position", place)


# -- columns of the log ------------------------------------------------------------------------------------------------


def log_out(value: Any) -> Any:
    """Mark what JSON lacks: arrays, bytes, and columns inside columns. Wide numbers are digits."""
    if hasattr(value, "dtype"):
        if not value.shape:
            return value.item()
        dtype, values = value.dtype.str[1:], value.tolist()
        return {"dtype": dtype, "values": list(map(str, values)) if dtype in _WIDE else values}
    if isinstance(value, dict):
        return {"columns": {name: log_out(inner) for name, inner in value.items()}}
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [log_out(inner) for inner in value]
    return msgspec.to_builtins(value)


def log_in(value: Any) -> Any:
    if isinstance(value, list):
        return [log_in(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        import numpy as np

        values = map(int, value["values"]) if value["dtype"] in _WIDE else value["values"]
        return np.array(list(values), dtype=value["dtype"])
    if "columns" in value:
        return {name: log_in(inner) for name, inner in value["columns"].items()}
    return base64.b64decode(value["base64"])
