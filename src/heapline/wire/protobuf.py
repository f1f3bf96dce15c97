"""Commands and results as protobuf messages: converters compiled from the structs and the proto's descriptors.

A field of a struct is the proto field of the same name. Its type decides how it is written:

    int, float, str, bytes, bool    the scalar; `optional` if its default is not zero
    datetime                        `<name>_us`, int64 microseconds since 1970
    id of a message (str | int)     string
    packed column (memoryview)      `repeated sfixed64`, `double` or `bool`, which descriptors.py makes bytes; or bytes
    list, dict                      `repeated`, `map`; a message with one field `items` if absent differs from empty
    list of texts in a column       `repeated string`, "" for None
    dict of any values              `<name>_json`, a JSON object
    struct                          a message; columns may be sent as `items` instead, one message per row
    error                           Error

A converter is compiled when a call is first used. Requests with unknown fields are refused, unknown fields of responses
are ignored. Values are checked by the constructors of the commands.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, cached_property
from typing import Any, NamedTuple

import msgspec
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import NODEFAULT, UNSET, inspect
from msgspec.inspect import Field, StructType, Type

from heapline.contract.call import Call
from heapline.contract.columns import Columns
from heapline.contract.config import Aging
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.message import EPOCH
from heapline.wire import error_codes
from heapline.wire.codec import MAY_NAME_FILES, columns_of, rows_of
from heapline.wire.descriptors import METHODS, pb

#: Fields of the proto that are not fields of a command: options of this interface.
AS_COLUMNS = "as_columns"  # whether the answer is packed as columns instead of items
EXTRAS = {name: {AS_COLUMNS} for name in ("PopRequest", "GroupFetchRequest", "ReplayRequest")}
#: Methods of the service that are not calls of their own: they stream EnqueueBatch, Pop, and GroupFetch with its acks.
STREAMS = frozenset({"EnqueueStream", "PopStream", "Subscribe"})
_MICROSECOND = timedelta(microseconds=1)


class Codec:
    """Converts between a struct and its message."""

    def __init__(self, kind: Any, message_class: Any, whose: str | None) -> None:
        self.kind, self.message_class = kind, message_class
        self._whose = whose
        self._asks = {AS_COLUMNS: True} if message_class.DESCRIPTOR.name in EXTRAS else {}

    def pack(self, value: Any, as_columns: bool = True) -> Any:
        """Return the message of a struct. A request that has the option asks for an answer in columns."""
        try:
            fields = self.columns.pack if as_columns else self.items.pack
            return self.message_class(**fields(value), **self._asks)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"cannot encode {type(value).__name__} as protobuf: {error}") from None

    def fields(self, value: Any, as_columns: bool = True) -> dict[str, Any]:
        """Return the message's fields as its constructor takes them, also inside another message."""
        return (self.columns if as_columns else self.items).pack(value)

    @cached_property
    def unpack(self) -> Callable[[Any], Any]:
        """Return the struct of a message. Raises what the struct's constructor raises."""
        return self.columns.unpack

    @cached_property
    def columns(self) -> _Functions:
        """The functions that pack columns as columns. Raises TypeError if the struct and the message differ."""
        return _compile(_info(self.kind), self.message_class.DESCRIPTOR, _Options(True, self._whose))

    @cached_property
    def items(self) -> _Functions:
        """The functions that pack columns as items."""
        return _compile(_info(self.kind), self.message_class.DESCRIPTOR, _Options(False, self._whose))


@cache
def request_of(kind: type[Call[Any]]) -> Codec:
    """Return the codec of a call. `as_columns` of its message, if it has that, says how to pack the answer."""
    return Codec(kind, METHODS[kind.facts.rpc].request, kind.__name__)


@cache
def response_of(kind: type[Call[Any]]) -> Codec:
    """Return the codec of a call's result, or of one item of a feed."""
    return Codec(kind.result, METHODS[kind.facts.rpc].response, None)


@cache
def struct_codec(kind: Any, message_class: Any, whose: str | None = None) -> Codec:
    """Return the codec of a struct in a stream's messages. With `whose`, a call's name, unknown fields are refused."""
    return Codec(kind, message_class, whose)


def _info(kind: Any) -> StructType | None:
    """Describe a struct; None for a call without a result."""
    if kind is None or kind is type(None):
        return None
    info = inspect.type_info(kind)
    assert isinstance(info, StructType)
    return info


# -- values ------------------------------------------------------------------------------------------------------------


def to_us(instant: datetime) -> int:
    return (instant - EPOCH) // _MICROSECOND


def from_us(us: int) -> datetime:
    try:
        return EPOCH + us * _MICROSECOND
    except OverflowError:
        raise BadRequest(f"{us} microseconds since 1970 is not a valid time") from None


def pack_error(error: Any) -> dict[str, Any]:
    described = error_codes.describe(error)
    return {"error": described["error"], "facts_json": json.dumps(described["facts"]), "text": described["text"]}


def unpack_error(error: Any) -> HeaplineError:
    facts = json.loads(error.facts_json or "{}")
    return error_codes.rebuild({"error": error.error, "facts": facts, "text": error.text})


def _pack_ordering(ordering: Any) -> dict[str, Any]:
    return {"aging": {"rate": ordering.rate}} if isinstance(ordering, Aging) else {"strict": True}


def _unpack_ordering(ordering: Any) -> Any:
    return Aging(ordering.aging.rate) if ordering.HasField("aging") else "strict"


def _pack_headers(headers: Sequence[Mapping[str, str] | None]) -> list[Any]:
    """Pack headers per message. Most messages of a batch have the same ones, and creating a map costs microseconds."""
    packed: dict[tuple[tuple[str, str], ...], Any] = {}
    found = []
    for each in headers:
        pairs = tuple(each.items()) if each else ()
        if (message := packed.get(pairs)) is None:
            message = packed[pairs] = pb.Headers(items=dict(pairs))
        found.append(message)
    return found


def _unpack_headers(headers: Any) -> list[dict[str, str] | None] | None:
    known: dict[bytes, dict[str, str]] = {}
    found: list[dict[str, str] | None] = []
    for message in headers:
        if (each := known.get(encoded := message.SerializeToString())) is None:
            each = known[encoded] = dict(message.items)
        found.append(each.copy() or None)  # a copy, because the owner of a message may change its headers
    return found or None


def _pack_log_columns(columns: dict[str, Any]) -> list[dict[str, Any]]:
    import numpy as np

    packed: list[dict[str, Any]] = []
    for name, value in columns.items():
        if isinstance(value, dict):
            packed.append({"name": name, "dtype": "columns", "columns": _pack_log_columns(value)})
        elif isinstance(value, np.ndarray):
            little = value.astype(value.dtype.newbyteorder("<"), copy=False)
            packed.append({"name": name, "dtype": little.dtype.str, "data": little.tobytes()})
        else:
            data = msgspec.msgpack.encode(value, enc_hook=lambda v: v.tolist())  # an array or a number of numpy
            packed.append({"name": name, "dtype": "", "data": data})
    return packed


def _unpack_log_columns(columns: Any) -> dict[str, Any]:
    import numpy as np

    found: dict[str, Any] = {}
    for column in columns:
        if column.dtype == "columns":
            found[column.name] = _unpack_log_columns(column.columns)
        elif not column.dtype:
            found[column.name] = msgspec.msgpack.decode(column.data)
        else:
            found[column.name] = np.frombuffer(column.data, dtype=column.dtype).copy()
    return found


def _required(name: str) -> Any:
    raise BadRequest(f"{name} is required")


_HELPERS: dict[str, Any] = {
    "UNSET": UNSET,
    "array": array,
    "columns_of": columns_of,
    "from_us": from_us,
    "json": json,
    "pack_error": pack_error,
    "pack_headers": _pack_headers,
    "pack_log_columns": _pack_log_columns,
    "pack_ordering": _pack_ordering,
    "required": _required,
    "rows_of": rows_of,
    "to_us": to_us,
    "without_paths": error_codes.without_paths,
    "unknown": UnknownFieldSet,
    "unpack_error": unpack_error,
    "unpack_headers": _unpack_headers,
    "unpack_log_columns": _unpack_log_columns,
    "unpack_ordering": _unpack_ordering,
}

# -- the compiler ------------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """A field of a struct without what may be absent: its plain type, and the value that means absence."""

    type: Type
    is_nullable: bool
    is_unset: bool  # whether an absent value is UNSET instead of None


def _shape(field: Field) -> _Shape:
    is_unset = not field.required and field.default is NODEFAULT and field.default_factory is NODEFAULT
    kind, is_nullable = _plain(field.type)
    return _Shape(kind, is_nullable, is_unset)


def _plain(kind: Type) -> tuple[Type, bool]:
    """Return a type without its bounds, and without None and whether it had that."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        rest = [t for t in kind.types if not isinstance(t, inspect.NoneType)]
        if len(rest) < len(kind.types):
            plain = _plain(rest[0])[0] if len(rest) == 1 else inspect.UnionType(tuple(rest))
            return plain, True
    return kind, False


def _proto_fields(info: StructType, message: Any) -> list[tuple[Field, Any]]:
    """Pair the fields of a struct with those of a message; neither may have one that the other lacks."""
    known = dict(message.fields_by_name)
    pairs = []
    for field in info.fields:
        found = next((known.pop(n) for n in (field.name, f"{field.name}_us", f"{field.name}_json") if n in known), None)
        if found is None:
            raise TypeError(f"message {message.name} of the proto lacks field {field.name} of {info.cls.__name__}")
        pairs.append((field, found))
    extras = EXTRAS.get(message.name, set()) | ({"items"} if _is_columns(info) else set())
    if known.keys() != extras:
        raise TypeError(f"message {message.name} has fields that {info.cls.__name__} lacks: {known.keys() ^ extras}")
    return pairs


def _is_columns(info: StructType) -> bool:
    return isinstance(info.cls, type) and issubclass(info.cls, Columns)  # a generic struct is not a class here


def _row(columns: StructType) -> StructType | None:
    kind: Any = columns.cls
    return _info(kind.row)


def _is_map(proto: Any) -> bool:
    return proto.message_type is not None and proto.message_type.GetOptions().map_entry


def _is_wrapper(proto: Any) -> bool:
    return proto.message_type is not None and not proto.is_repeated and "items" in proto.message_type.fields_by_name


def _mismatch(kind: Type, proto: Any) -> TypeError:
    return TypeError(f"field {proto.full_name} of the proto cannot hold {kind}")


_SCALARS: dict[type[Type], tuple[str, ...]] = {
    inspect.StrType: ("STRING",),
    inspect.LiteralType: ("STRING",),
    inspect.BoolType: ("BOOL",),
    inspect.IntType: ("INT64", "SINT64"),
    inspect.FloatType: ("DOUBLE",),
    inspect.BytesType: ("BYTES",),
}


def _fits(kind: Type, proto: Any) -> bool:
    """Return whether a scalar of the proto holds values of this type."""
    names = _SCALARS.get(type(kind), ())
    return any(proto.type == getattr(proto, f"TYPE_{name}") for name in names)


class _Functions(NamedTuple):
    pack: Callable[[Any], dict[str, Any]]  # returns the fields of the message
    unpack: Callable[[Any], Any]  # returns the struct


class _Options(NamedTuple):
    as_columns: bool  # whether columns are packed as columns, or as items
    whose: str | None  # the call whose request it is: unknown fields are refused


def _compile(info: StructType | None, message: Any, options: _Options) -> _Functions:
    names = dict(_HELPERS)
    names["refuse"] = lambda m: _refuse_unknown(m, options.whose)
    check = "" if options.whose is None else " if len(unknown(m)): refuse(m)\n"
    if info is None:
        return _run("def pack(v): return {}", f"def unpack(m):\n{check} return None", names)
    names["kind"] = info.cls
    packed, unpacked = [], []
    for i, (field, proto) in enumerate(_proto_fields(info, message)):
        pack, unpack = _convert_field(field, proto, names, f"f{i}", options)
        if (info.cls, field.name) in MAY_NAME_FILES:
            pack = f"v.{field.name} and without_paths(v.{field.name})"
        packed.append(f"{proto.name!r}: {pack}")
        unpacked.append(f"{field.name}={unpack}")
    source = f"{{{', '.join(packed)}}}"
    if _is_columns(info):
        names["row"] = _compile(_row(info), message.fields_by_name["items"].message_type, options)
        names["both"] = _refuse_both
        check += " if m.items:\n  both(m)\n  return columns_of(kind, list(map(row.unpack, m.items)))\n"
        if not options.as_columns:
            source = "{'items': list(map(row.pack, rows_of(v)))}"
    return _run(f"def pack(v): return {source}", f"def unpack(m):\n{check} return kind({', '.join(unpacked)})", names)


def _run(pack: str, unpack: str, names: dict[str, Any]) -> _Functions:
    exec(pack, names)
    exec(unpack, names)
    return _Functions(names["pack"], names["unpack"])


def _refuse_unknown(message: Any, whose: str | None) -> None:
    numbers = ", ".join(str(field.field_number) for field in UnknownFieldSet(message))
    name = message.DESCRIPTOR.name
    raise BadRequest(f"unknown field {numbers} of message {name} in a request of {whose}; is the server older?")


def _refuse_both(message: Any) -> None:
    if len(message.ListFields()) > 1:
        raise BadRequest(f"{message.DESCRIPTOR.name} must have items or columns, not both")


def _convert_field(field: Field, proto: Any, names: dict[str, Any], prefix: str, options: _Options) -> tuple[str, str]:
    """Return the expressions of a field of the struct `v` and of the message `m`, with those for an absent value."""
    shape, v, m = _shape(field), f"v.{field.name}", f"m.{proto.name}"
    pack, unpack = _convert(shape.type, proto, v, m, names, prefix, options)
    if shape.is_unset:
        pack = f"None if {v} is UNSET else {pack}"
    elif shape.is_nullable and pack != v:
        pack = f"None if {v} is None else {pack}"
    if not proto.has_presence:
        is_empty_if_absent = proto.is_repeated or isinstance(shape.type, inspect.MemoryViewType)
        if shape.is_unset or not (is_empty_if_absent or _is_zero(field)):
            raise TypeError(f"field {proto.full_name} of the proto must be optional")
        return pack, f"({unpack} if {m} else None)" if shape.is_nullable else unpack
    if shape.is_unset:
        default = "UNSET"
    elif field.required:
        if proto.message_type is None and not shape.is_nullable:
            raise TypeError(f"field {proto.full_name} of the proto is required and must not be optional")
        default = "None" if shape.is_nullable else f"required({field.name!r})"
    elif field.default is not NODEFAULT:
        names[f"{prefix}d"], default = field.default, f"{prefix}d"
    else:
        names[f"{prefix}d"], default = field.default_factory, f"{prefix}d()"
    return pack, f"({unpack} if m.HasField({proto.name!r}) else {default})"


def _is_zero(field: Field) -> bool:
    """Return whether an absent field has the value that protobuf gives it."""
    if field.required:
        return not _plain(field.type)[1]
    default = field.default if field.default is not NODEFAULT else field.default_factory()
    return default is not None and not default


def _convert(
    kind: Type, proto: Any, v: str, m: str, names: dict[str, Any], prefix: str, options: _Options
) -> tuple[str, str]:
    """Return two expressions: what the message's constructor takes for `v`, and the struct's value for `m`."""
    match kind:
        case inspect.DictType() | inspect.ListType() | inspect.CollectionType() if _is_wrapper(proto):
            inner = proto.message_type.fields_by_name["items"]
            pack, unpack = _convert(kind, inner, v, f"{m}.items", names, prefix, options)
            return f"{{'items': {pack}}}", unpack
        case inspect.MemoryViewType() if proto.type == proto.TYPE_BYTES:
            return f"bytes({v})", f"memoryview({m})"
        case inspect.DateTimeType() if proto.name.endswith("_us") and proto.type == proto.TYPE_INT64:
            return f"to_us({v})", f"from_us({m})"
        case inspect.CustomType() if proto.message_type and proto.message_type.name == "Error":
            return f"pack_error({v})", f"unpack_error({m})"
        case inspect.UnionType() if proto.message_type:
            return f"pack_ordering({v})", f"unpack_ordering({m})"
        case inspect.UnionType():
            return f"str({v})", m
        case inspect.StructType() if proto.message_type:
            names[f"{prefix}p"], names[f"{prefix}u"] = _compile(kind, proto.message_type, options)
            return f"{prefix}p({v})", f"{prefix}u({m})"
        case inspect.DictType(value_type=inspect.AnyType()) if proto.is_repeated:
            return f"pack_log_columns({v})", f"unpack_log_columns({m})"
        case inspect.DictType(value_type=inspect.AnyType()):
            return f"json.dumps({v})", f"json.loads({m} or '{{}}')"
        case inspect.DictType(key_type=key, value_type=item) if _is_map(proto):
            if not _fits(_plain(key)[0], proto.message_type.fields_by_name["key"]):
                raise _mismatch(kind, proto)
            value = proto.message_type.fields_by_name["value"]
            pack, unpack = _convert(_plain(item)[0], value, "x", "x", names, f"{prefix}v", options)
            if value.message_type is None:
                return v, f"dict({m})"
            names[f"{prefix}m"] = getattr(pb, value.message_type.name)
            return f"{{k: {prefix}m(**{pack}) for k, x in {v}.items()}}", f"{{k: {unpack} for k, x in {m}.items()}}"
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            return _convert_list(item, proto, v, m, names, prefix, options)
    if not _fits(kind, proto):
        raise _mismatch(kind, proto)
    return v, m


def _convert_list(
    item: Type, proto: Any, v: str, m: str, names: dict[str, Any], prefix: str, options: _Options
) -> tuple[str, str]:
    plain, is_nullable = _plain(item)
    if not proto.is_repeated:
        if not isinstance(plain, inspect.FloatType):
            raise _mismatch(plain, proto)
        return f"array('d', {v}).tobytes()", f"array('d', {m}).tolist()"
    if is_nullable and proto.message_type:
        return f"pack_headers({v})", f"unpack_headers({m})"
    if is_nullable:
        return f"[x or '' for x in {v}]", f"[x or None for x in {m}]"
    pack, unpack = _convert(plain, proto, "x", "x", names, f"{prefix}i", options)
    return v if pack == "x" else f"[{pack} for x in {v}]", f"{m}[:]" if unpack == "x" else f"[{unpack} for x in {m}]"
