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
from heapline.wire.descriptors import METHODS, pb
from heapline.wire.rows import MAY_NAME_FILES, columns_of, rows_of

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
            fields = self._pack_columns if as_columns else self._pack_items
            return self.message_class(**fields(value), **self._asks)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"cannot encode {type(value).__name__} as protobuf: {error}") from None

    def fields(self, value: Any, as_columns: bool = True) -> dict[str, Any]:
        """Return the message's fields as its constructor takes them, also inside another message."""
        return (self._pack_columns if as_columns else self._pack_items)(value)

    @cached_property
    def _pack_columns(self) -> Callable[[Any], dict[str, Any]]:
        return _compile_pack(_info(self.kind), self.message_class.DESCRIPTOR, as_columns=True)

    @cached_property
    def _pack_items(self) -> Callable[[Any], dict[str, Any]]:
        return _compile_pack(_info(self.kind), self.message_class.DESCRIPTOR, as_columns=False)

    @cached_property
    def unpack(self) -> Callable[[Any], Any]:
        """Return the struct of a message. Raises what the struct's constructor raises."""
        return _compile_unpack(_info(self.kind), self.message_class.DESCRIPTOR, self._whose)

    def compile(self) -> None:
        """Compile now, and raise TypeError if the struct and the message differ."""
        _ = self._pack_columns, self._pack_items, self.unpack


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
            packed.append({"name": name, "dtype": "tuple" if isinstance(value, tuple) else "", "data": data})
    return packed


def _unpack_log_columns(columns: Any) -> dict[str, Any]:
    import numpy as np

    found: dict[str, Any] = {}
    for column in columns:
        if column.dtype == "columns":
            found[column.name] = _unpack_log_columns(column.columns)
        elif column.dtype in ("", "tuple"):
            value = msgspec.msgpack.decode(column.data)
            found[column.name] = tuple(value) if column.dtype else value
        else:
            found[column.name] = np.frombuffer(column.data, dtype=column.dtype).copy()
    return found


def _floats(data: bytes) -> list[float]:
    return array("d", data).tolist()


def _required(name: str) -> Any:
    raise BadRequest(f"{name} is required")


_HELPERS: dict[str, Any] = {
    "UNSET": UNSET,
    "array": array,
    "columns_of": columns_of,
    "floats": _floats,
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
    """A field of a struct without what may be absent: its plain type, and what stands for absence."""

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


def _compile_pack(info: StructType | None, message: Any, as_columns: bool) -> Callable[[Any], dict[str, Any]]:
    if info is None:
        return lambda _: {}
    names = dict(_HELPERS)
    if _is_columns(info) and not as_columns:
        names["pack"] = _compile_pack(_row(info), message.fields_by_name["items"].message_type, as_columns)
        return _run("def made(v): return {'items': list(map(pack, rows_of(v)))}", names)
    lines = []
    for i, (field, proto) in enumerate(_proto_fields(info, message)):
        shape, value = _shape(field), f"v.{field.name}"
        expression = _pack_value(shape.type, proto, value, names, f"f{i}", as_columns)
        if (info.cls, field.name) in MAY_NAME_FILES:
            expression = f"without_paths({value})"
        if shape.is_unset:
            expression = f"None if {value} is UNSET else {expression}"
        elif shape.is_nullable and expression != value:
            expression = f"None if {value} is None else {expression}"
        lines.append(f"{proto.name!r}: {expression}")
    return _run(f"def made(v): return {{{', '.join(lines)}}}", names)


def _pack_value(kind: Type, proto: Any, v: str, names: dict[str, Any], prefix: str, as_columns: bool) -> str:
    """Return an expression of what the message's constructor takes for the value `v`."""
    match kind:
        case inspect.MemoryViewType():
            return f"bytes({v})"
        case inspect.DateTimeType():
            return f"to_us({v})"
        case inspect.CustomType():
            return f"pack_error({v})"
        case inspect.UnionType():
            return f"pack_ordering({v})" if proto.message_type else f"str({v})"
        case inspect.StructType():
            names[prefix] = _compile_pack(kind, proto.message_type, as_columns)
            return f"{prefix}({v})"
        case inspect.DictType() if _is_wrapper(proto):
            inner = proto.message_type.fields_by_name["items"]
            return f"{{'items': {_pack_value(kind, inner, v, names, prefix, as_columns)}}}"
        case inspect.DictType(value_type=inspect.AnyType()):
            return f"pack_log_columns({v})" if proto.is_repeated else f"json.dumps({v})"
        case inspect.DictType(value_type=item):
            value = proto.message_type.fields_by_name["value"]
            if value.message_type is None:
                return v
            names[f"{prefix}m"] = getattr(pb, value.message_type.name)
            inner = _pack_value(_plain(item)[0], value, "x", names, f"{prefix}v", as_columns)
            return f"{{k: {prefix}m(**{inner}) for k, x in {v}.items()}}"
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            return _pack_list(item, proto, v, names, prefix, as_columns)
    return v


def _pack_list(item: Type, proto: Any, v: str, names: dict[str, Any], prefix: str, as_columns: bool) -> str:
    if _is_wrapper(proto):
        inner = proto.message_type.fields_by_name["items"]
        return f"{{'items': {_pack_list(item, inner, v, names, prefix, as_columns)}}}"
    if not proto.is_repeated:
        return f"array('d', {v}).tobytes()"
    plain, is_nullable = _plain(item)
    if is_nullable:
        return f"pack_headers({v})" if proto.message_type else f"[x or '' for x in {v}]"
    inner = _pack_value(plain, proto, "x", names, f"{prefix}i", as_columns)
    return v if inner == "x" else f"[{inner} for x in {v}]"


def _compile_unpack(info: StructType | None, message: Any, whose: str | None) -> Callable[[Any], Any]:
    names = dict(_HELPERS)
    names["refuse"] = lambda m: _refuse_unknown(m, whose)
    lines = ["def made(m):"]
    if whose is not None:
        lines.append(" if len(unknown(m)): refuse(m)")
    if info is None:
        return _run("\n".join([*lines, " return None"]), names)
    names["kind"] = info.cls
    arguments = []
    for i, (field, proto) in enumerate(_proto_fields(info, message)):
        expression = _unpack_field(field, proto, names, f"f{i}", whose)
        arguments.append(f"{field.name}={expression}")
    if _is_columns(info):
        names["row"] = _compile_unpack(_row(info), message.fields_by_name["items"].message_type, whose)
        names["both"] = _refuse_both
        lines += [" if m.items:", "  both(m)", "  return columns_of(kind, list(map(row, m.items)))"]
    return _run("\n".join([*lines, f" return kind({', '.join(arguments)})"]), names)


def _refuse_unknown(message: Any, whose: str | None) -> None:
    numbers = ", ".join(str(field.field_number) for field in UnknownFieldSet(message))
    name = message.DESCRIPTOR.name
    raise BadRequest(f"unknown field {numbers} of message {name} in a request of {whose}; is the server older?")


def _refuse_both(message: Any) -> None:
    if len(message.ListFields()) > 1:
        raise BadRequest(f"{message.DESCRIPTOR.name} must have items or columns, not both")


def _unpack_field(field: Field, proto: Any, names: dict[str, Any], prefix: str, whose: str | None) -> str:
    shape, v = _shape(field), f"m.{proto.name}"
    expression = _unpack_value(shape.type, proto, v, names, prefix, whose)
    if not proto.has_presence:
        is_empty_if_absent = proto.is_repeated or isinstance(shape.type, inspect.MemoryViewType)
        if shape.is_unset or not (is_empty_if_absent or _is_zero(field)):
            raise TypeError(f"field {proto.full_name} of the proto must be optional")
        return f"({expression} if {v} else None)" if shape.is_nullable else expression
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
    return f"({expression} if m.HasField({proto.name!r}) else {default})"


def _is_zero(field: Field) -> bool:
    """Return whether an absent field has the value that protobuf gives it."""
    if field.required:
        return not _plain(field.type)[1]
    default = field.default if field.default is not NODEFAULT else field.default_factory()
    return default is not None and not default


def _unpack_value(kind: Type, proto: Any, v: str, names: dict[str, Any], prefix: str, whose: str | None) -> str:
    """Return an expression of the struct's value for the message's value `v`."""
    match kind:
        case inspect.MemoryViewType() if proto.type == proto.TYPE_BYTES:
            return f"memoryview({v})"
        case inspect.DateTimeType() if proto.name.endswith("_us") and proto.type == proto.TYPE_INT64:
            return f"from_us({v})"
        case inspect.CustomType() if proto.message_type and proto.message_type.name == "Error":
            return f"unpack_error({v})"
        case inspect.UnionType():
            return f"unpack_ordering({v})" if proto.message_type else v
        case inspect.StructType() if proto.message_type:
            names[prefix] = _compile_unpack(kind, proto.message_type, whose)
            return f"{prefix}({v})"
        case inspect.DictType() if _is_wrapper(proto):
            inner = proto.message_type.fields_by_name["items"]
            return _unpack_value(kind, inner, f"{v}.items", names, prefix, whose)
        case inspect.DictType(value_type=inspect.AnyType()):
            return f"unpack_log_columns({v})" if proto.is_repeated else f"json.loads({v} or '{{}}')"
        case inspect.DictType(key_type=key, value_type=item) if _is_map(proto):
            value = proto.message_type.fields_by_name["value"]
            if not _fits(_plain(key)[0], proto.message_type.fields_by_name["key"]):
                raise _mismatch(kind, proto)
            inner = _unpack_value(_plain(item)[0], value, "x", names, f"{prefix}v", whose)
            return f"dict({v})" if inner == "x" else f"{{k: {inner} for k, x in {v}.items()}}"
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            return _unpack_list(item, proto, v, names, prefix, whose)
    if not _fits(kind, proto):
        raise _mismatch(kind, proto)
    return v


def _unpack_list(item: Type, proto: Any, v: str, names: dict[str, Any], prefix: str, whose: str | None) -> str:
    if _is_wrapper(proto):
        inner = proto.message_type.fields_by_name["items"]
        return _unpack_list(item, inner, f"{v}.items", names, prefix, whose)
    plain, is_nullable = _plain(item)
    if not proto.is_repeated:
        if not isinstance(plain, inspect.FloatType):
            raise _mismatch(plain, proto)
        return f"floats({v})"
    if is_nullable:
        return f"unpack_headers({v})" if proto.message_type else f"[x or None for x in {v}]"
    inner = _unpack_value(plain, proto, "x", names, f"{prefix}i", whose)
    return f"{v}[:]" if inner == "x" else f"[{inner} for x in {v}]"


def _run(source: str, names: dict[str, Any]) -> Callable[[Any], Any]:
    exec(source, names)
    made: Callable[[Any], Any] = names["made"]
    return made
