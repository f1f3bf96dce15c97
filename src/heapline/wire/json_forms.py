"""JSON forms of commands and results: twins of the structs, derived from their types, that people can read and write.

    columns                     a list of rows
    batches of a stream         `rows`, each with its `partition`
    single values               as json_values.py writes them

A struct without any of these is its own form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from heapline.contract.call import Call
from heapline.contract.columns import Columns
from heapline.contract.errors import BadRequest
from heapline.contract.groups import (
    PartitionBatch,
    PartitionRows,
    Position,
    StreamRow,
    StreamRows,
    place_of,
)
from heapline.contract.ids import parse_id, to_ulid
from heapline.contract.leases import Extended, LeaseKeys, Settled
from heapline.contract.message import DlqFilter, LogEvent, LogFrame, Outgoing, TopicInfo
from heapline.contract.messages import EnqueuedBatch, IdRanges, MessageScan
from heapline.contract.schedules import ScheduleInfo
from heapline.contract.stream import GroupInfo
from heapline.contract.topics import TopicSettings
from heapline.wire import error_codes
from heapline.wire.codec import MAY_NAME_FILES, columns_of, rows_of
from heapline.wire.json_values import (
    DEADLINES,
    ENQUEUED_ROWS,
    IDS,
    INSTANT_MS,
    ONE_PAYLOAD,
    PLAIN,
    ROWS,
    AnyId,
    Base64,
    Conversion,
    Digits,
    ErrorResponse,
    Json,
    JsonOptions,
    PayloadAs,
    Place,
    Results,
    Text,
    Token,
    Ulid,
    error_response,
    int_keys,
    log_in,
    log_out,
    place_in,
    raw_json,
    read_error,
    read_token,
    show_payload,
    text_keys,
)

#: Structs whose fields are among those of the command that has them.
INLINE: dict[Any, tuple[str, ...]] = {TopicSettings: ("POST", "PATCH"), DlqFilter: ("GET",)}
#: Properties that answers show as well.
COMPUTED: dict[Any, tuple[tuple[str, Any], ...]] = {
    ScheduleInfo: (("state", str),),
    GroupInfo: (("lag", int),),
}


class Part(NamedTuple):
    """One field of a struct, as the fields that its JSON form has for it."""

    fields: list[Any]  # as defstruct takes them
    write: Any  # (value, options) -> the values of these fields by name; or such a function per field, which is faster
    read: Callable[[Any], Any]
    has_payload: bool = False
    is_same: bool = False  # has the same name and type in JSON


class Form(NamedTuple):
    """The JSON form of a struct: a type that msgspec encodes and decodes, and the way there and back."""

    twin: Any
    write: Callable[..., Any]  # returns the twin of a struct; takes the struct and the options
    read: Callable[[Any], Any]  # returns the struct of a twin
    read_with: Any = None  # the same, with fields that the twin lacks; only of requests
    parts: dict[str, Part] = {}  # noqa: RUF012 - never modified

    @property
    def has_payload(self) -> bool:
        return any(part.has_payload for part in self.parts.values())


def _compile(kind: Any, parts: dict[str, Part], twin: Any, computed: Sequence[str] = ()) -> Form:
    """Compile a form, because the rows of a batch pass through it one by one."""
    names: dict[str, Any] = {"kind": kind, "twin": twin, "PLAIN": PLAIN, "replace": replace}
    writes, reads = [f"{name}=v.{name}" for name in computed], []
    for i, (name, part) in enumerate(parts.items()):
        names[f"w{i}"], names[f"r{i}"] = part.write, part.read
        reads.append(f"{name}=t.{name}" if part.is_same else f"{name}=r{i}(t)")
        if part.is_same:
            writes.append(f"{name}=v.{name}")
        elif callable(part.write):
            writes.append(f"**w{i}(v.{name}, o)")
        else:
            names |= {f"w{i}_{other}": write for other, write in part.write.items()}
            writes += [f"{other}=w{i}_{other}(v.{name}, o)" for other in part.write]
    suffix = "\n if v.id_suffix: o = replace(o, id_suffix=v.id_suffix)" if "id_suffix" in parts else ""
    exec(f"def write(v, o=PLAIN):{suffix}\n return twin({', '.join(writes)})", names)
    exec(f"def read(t): return kind({', '.join(reads)})", names)
    exec(f"def read_with(t, given): return kind({', '.join([*reads, '**given'])})", names)
    return Form(twin, names["write"], names["read"], names["read_with"], parts)


@cache
def request_form(kind: type[Call[Any]], method: str, outside: tuple[str, ...], options: tuple[str, ...]) -> Form:
    """Return the form of a command. `outside` are fields in the path; `options` are added to the others."""
    parts: dict[str, Part] = {}
    for field in msgspec.structs.fields(kind):
        if field.name not in outside:
            parts[field.name] = _request_part(field, method)
    extra = [(f.name, f.type, _default(f)) for f in msgspec.structs.fields(JsonOptions) if f.name in options]
    twin = _define(kind, [f for part in parts.values() for f in part.fields] + extra, is_request=True)
    return _compile(kind, parts, twin)


@cache
def result_form(kind: Any) -> Form:
    """Return the form of a result."""
    if kind is EnqueuedBatch:  # an answer is an object, not a list
        write, read = ENQUEUED_ROWS.write, ENQUEUED_ROWS.read
        return Form(Results, lambda v, o=PLAIN: Results(write(v, o)), lambda t: read(t.results))
    return _form(kind, False)


def to_json(value: Any, payload_as: PayloadAs = "base64") -> Any:
    """Return a result as the HTTP interface writes it, for msgspec to encode."""
    kind: Any = type(value)
    return result_form(kind).write(value, JsonOptions(payload_as=payload_as))


@cache
def message_form() -> Form:
    """Return the form of a message to enqueue, as a line of a file has it."""
    return _form(Outgoing, True)


@cache
def _form(kind: Any, is_request: bool, /) -> Form:
    parts = {field.name: _part(kind, field, is_request) for field in msgspec.structs.fields(kind)}
    computed = () if is_request else COMPUTED.get(kind, ())
    if all(part.is_same for part in parts.values()) and not computed and not get_args(kind):
        return Form(kind, lambda value, options=PLAIN: value, lambda twin: twin, parts=parts)
    fields = [field for part in parts.values() for field in part.fields]
    fields += [(name, hint | UnsetType, UNSET) for name, hint in computed]
    return _compile(kind, parts, _define(kind, fields, is_request), [name for name, _ in computed])


def _define(kind: Any, fields: list[Any], is_request: bool) -> Any:
    plain = get_origin(kind) or kind
    name = "".join(argument.__name__ for argument in get_args(kind)) + plain.__name__  # MessageInfoPage
    if not is_request:
        fields = [_always_written(*field) for field in fields]
    twin = msgspec.defstruct(
        name, fields, kw_only=True, omit_defaults=True, forbid_unknown_fields=is_request, module=__name__
    )
    twin.__doc__ = plain.__doc__
    return twin


def _always_written(name: str, hint: Any, default: Any = NODEFAULT) -> Any:
    """Numbers and flags appear in answers even if they have their default, which a factory hides from msgspec."""
    if default is NODEFAULT:
        return (name, hint)
    return (name, hint, msgspec.field(default_factory=lambda: default) if isinstance(default, int | float) else default)


def _default(field: Any) -> Any:
    return field.default if field.default is not NODEFAULT else msgspec.field(default_factory=field.default_factory)


# -- fields ------------------------------------------------------------------------------------------------------------


def _request_part(field: Any, method: str) -> Part:
    kinds = (field.type, *get_args(field.type))
    inner = next((kind for kind, methods in INLINE.items() if kind in kinds and method in methods), None)
    return _part(None, field, is_request=True) if inner is None else _inline(field, inner)


def _inline(field: Any, kind: Any) -> Part:
    """The fields of a struct among those of the command."""
    form = _form(kind, True)
    names = [name for part in form.parts.values() for name, *_ in part.fields]

    def write(value: Any, options: JsonOptions) -> dict[str, Any]:
        return {} if value is None else {n: getattr(form.write(value, options), n) for n in names}

    def read(twin: Any) -> Any:
        found = {name: part.read(twin) for name, part in form.parts.items()}
        found = {name: value for name, value in found.items() if value is not UNSET and value is not None}
        return kind(**found) if found else field.default

    return Part([f for part in form.parts.values() for f in part.fields], write, read)


def _part(owner: Any, field: Any, is_request: bool) -> Part:
    name, hint = field.name, field.type
    plain = _plain(hint)
    if name == "payload" and plain is bytes:
        return _payload_part(field, is_request)
    if name == "id" and plain is int:
        return _id_part(is_request)
    if name == "id_suffix":
        return _suffix_part(owner)
    if name == "token" and plain is int:
        return _renamed("lease_token", Conversion(Token, lambda v, _: str(v), read_token), field)
    if name in ("enqueued_ms", "deadline_ms") and plain is int:
        return _renamed({"enqueued_ms": "enqueued_at", "deadline_ms": "deadline"}[name], INSTANT_MS, field)
    if name == "lost" and owner in (Settled, Extended):
        return _renamed(name, IDS, field)
    if name == "bounds" and owner is IdRanges:
        return _renamed(name, IDS, field)
    if name == "next_id" and owner is MessageScan:
        return _renamed(name, Conversion(Digits, lambda v, _: str(v), int), field)
    if name == "deadline_ms" and owner is Extended:
        return _renamed("deadlines", DEADLINES, field)
    if name == "batches" and get_args(hint) == (PartitionBatch,):
        return _batches_part()
    if plain is LeaseKeys:
        return _leases_part()
    if (owner, name) in MAY_NAME_FILES:
        return _renamed(name, Conversion(str, lambda v, _: error_codes.without_paths(v), lambda v: v), field)
    if name == "columns" and owner is LogEvent:
        return _renamed(
            name,
            Conversion(dict[str, Any], lambda v, _: log_out(v)["columns"], lambda v: log_in({"columns": v})),
            field,
        )
    conversion = conversion_of(hint, is_request)
    if conversion is not None and not is_request and isinstance(plain, type) and issubclass(plain, Columns):
        write = conversion.write  # no messages are an empty list
        return Part(
            [(name, conversion.type)],
            {name: lambda v, o: [] if v is None else write(v, o)},
            lambda t: conversion.read(getattr(t, name)) if getattr(t, name) or field.required else field.default,
            conversion.has_payload,
        )
    if conversion is not None:
        return _renamed(name, conversion, field)
    return Part(
        [(name, hint) if field.required else (name, hint, _default(field))],
        lambda value, _: {name: value},
        lambda twin: getattr(twin, name),
        is_same=True,
    )


def _renamed(name: str, conversion: Conversion, field: Any) -> Part:
    """A field of another type, and perhaps another name."""
    write, read = conversion.write, conversion.read
    if field.required:
        value = attrgetter(name)
        return Part([(name, conversion.type)], {name: write}, lambda t: read(value(t)), conversion.has_payload)

    def write_given(value: Any, options: JsonOptions) -> dict[str, Any]:
        is_absent = value is None or value is UNSET or value is field.default
        return {} if is_absent else {name: write(value, options)}

    def read_given(twin: Any) -> Any:
        value = getattr(twin, name)
        return _absent(field) if value is UNSET or value is None else read(value)

    nullable = conversion.type | UnsetType if field.default is UNSET else conversion.type | UnsetType | None
    return Part([(name, nullable, UNSET)], write_given, read_given, conversion.has_payload)


def _absent(field: Any) -> Any:
    """Return the value of a field that was not given."""
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return None if field.required else UNSET if field.default is NODEFAULT else field.default


def _payload_part(field: Any, is_request: bool) -> Part:
    def write(payload: Any, options: JsonOptions) -> dict[str, Any]:
        return {} if payload is None else show_payload(payload, options.payload_as)

    def read(twin: Any) -> Any:
        payload, text, raw = twin.payload, twin.payload_text, twin.payload_json
        count = (payload is not UNSET) + (text is not UNSET) + (raw is not UNSET)
        if count > 1 or (is_request and field.required and not count):
            raise BadRequest(ONE_PAYLOAD)
        if payload is not UNSET:
            return payload
        if text is not UNSET:
            return text.encode()
        return raw_json(raw) if count else _absent(field)

    fields: list[Any] = [("payload", Base64, UNSET), ("payload_text", Text, UNSET), ("payload_json", Json, UNSET)]
    return Part(fields, write, read, has_payload=True)


def _id_part(is_request: bool) -> Part:
    if is_request:
        return Part([("message_id", AnyId)], {"message_id": lambda v, _: str(v)}, lambda t: parse_id(t.message_id)[0])
    return Part(
        [("message_id", Ulid), ("id", Digits)],
        {"message_id": lambda v, o: to_ulid(v, o.id_suffix), "id": lambda v, _: str(v)},
        lambda t: int(t.id),
    )


def _suffix_part(owner: Any) -> Part:
    """The topic's part of ULIDs: visible in them, and as digits where a result may have none."""
    if owner in (TopicInfo, LogFrame):
        fields: list[Any] = [("id_suffix", Annotated[str, Meta(description="end of the topic's ULIDs, digits")], "0")]
        return Part(fields, {"id_suffix": lambda v, _: str(v)}, lambda t: int(t.id_suffix))
    return Part([], lambda _, __: {}, suffix_in)


def suffix_in(twin: Any) -> int:
    """Return the topic's part of the first ULID in a request or an answer; 0 if it has none."""
    lists = (getattr(twin, name, None) for name in ("messages", "rows", "leases"))
    first = getattr(next((rows[0] for rows in lists if rows and isinstance(rows, list)), twin), "message_id", None)
    return (parse_id(first)[1] or 0) if isinstance(first, str) else 0


def _leases_part() -> Part:
    """One lease (`message_id` and `lease_token`), or many (`leases`)."""
    row: Any = LeaseKeys.row
    form = _form(row, True)

    def write(keys: Any, options: JsonOptions) -> dict[str, Any]:
        return {"leases": [form.write(row, options) for row in rows_of(keys)]}

    def read(twin: Any) -> Any:
        is_one = twin.message_id is not UNSET and twin.lease_token is not UNSET
        is_none = twin.message_id is UNSET and twin.lease_token is UNSET
        if is_one == is_none or is_one == (twin.leases is not UNSET):
            raise BadRequest("give message_id and lease_token, or a list of such pairs in leases")
        return columns_of(LeaseKeys, [form.read(row) for row in ([twin] if is_one else twin.leases)])

    many: Any = Annotated[GenericAlias(list, (form.twin,)), Meta(max_length=1_000_000)]
    fields = [("message_id", AnyId | UnsetType, UNSET), ("lease_token", Token | UnsetType, UNSET)]
    return Part([*fields, ("leases", many | UnsetType, UNSET)], write, read)


@cache
def _stream_message() -> Any:
    rows = [(f.name, f.type) if f.required else (f.name, f.type, f.default) for f in msgspec.structs.fields(StreamRow)]
    kind = msgspec.defstruct("StreamMessage", [("partition", int), *rows], module=__name__)
    kind.__doc__ = "One row of a stream."
    return kind


def _batches_part() -> Part:
    """Batches of a stream as rows that have their partition."""
    kind = _stream_message()
    form = _form(kind, False)

    def write(batches: list[PartitionBatch], options: JsonOptions) -> dict[str, Any]:
        found = []
        for batch in batches:
            for row in rows_of(batch.rows):
                found.append(form.write(kind(batch.partition, *msgspec.structs.astuple(row)), options))
        return {"rows": found}

    def read(twin: Any) -> Any:
        found = [msgspec.structs.astuple(form.read(row)) for row in twin.rows]
        return [
            PartitionBatch(partition, columns_of(StreamRows, [StreamRow(*row[1:]) for row in run]))
            for partition, run in groupby(found, key=lambda row: row[0])
        ]

    return Part([("rows", GenericAlias(list, (form.twin,)))], write, read, has_payload=True)


# -- types -------------------------------------------------------------------------------------------------------------


def _plain(hint: Any) -> Any:
    """Return a type without bounds, None and UNSET."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        rest = [a for a in get_args(hint) if a not in (NoneType, UnsetType)]
        if len(rest) == 1:
            return _plain(rest[0])
    return hint


def conversion_of(hint: Any, is_request: bool) -> Conversion | None:
    """Return how a type is written in JSON, or None if msgspec writes it well."""
    plain = _plain(hint)
    origin, arguments = get_origin(plain), get_args(plain)
    if plain is Position:
        return Conversion(Place, lambda v, _: text_keys(place_of(v)), place_in)
    if plain is EnqueuedBatch:
        return ENQUEUED_ROWS
    if origin in (list, Sequence):
        return ROWS if arguments[0] is PartitionRows else _list_conversion(arguments[0], is_request)
    if origin is dict and is_request and arguments[0] is int:
        kind = GenericAlias(dict, (str, arguments[1]))
        return Conversion(kind, lambda v, _: text_keys(v), int_keys)
    if isinstance(plain, type) and issubclass(plain, Exception):
        return Conversion(ErrorResponse, lambda v, _: error_response(v), read_error)
    if isinstance(plain, type) and issubclass(plain, Columns):
        return _columns_conversion(plain, is_request)
    if isinstance(origin or plain, type) and issubclass(origin or plain, Struct):
        form = _form(plain, is_request)
        if form.twin is not plain:
            return Conversion(form.twin, form.write, form.read, form.has_payload)
    return None


def _list_conversion(item: Any, is_request: bool) -> Conversion | None:
    inner = conversion_of(item, is_request)
    if inner is None:
        return None
    return Conversion(
        GenericAlias(list, (inner.type,)),
        lambda v, o: [inner.write(x, o) for x in v],
        lambda v: [inner.read(x) for x in v],
        inner.has_payload,
    )


def _columns_conversion(kind: Any, is_request: bool) -> Conversion:
    form = _form(kind.row, is_request)
    return Conversion(
        GenericAlias(list, (form.twin,)),
        lambda v, o: [form.write(row, o) for row in rows_of(v)],
        lambda v: columns_of(kind, [form.read(row) for row in v]),
        form.has_payload,
    )
