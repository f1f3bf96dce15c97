"""The one validator: checks compiled per class from field types and `msgspec.Meta` bounds, worded alike everywhere.

msgspec checks bounds when it decodes, in words of its own, and not at all when a struct is constructed. So a command
runs its compiled check when it is constructed. A request that msgspec rejects is read a second time, field by field,
only to raise the error that the constructor would have raised.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec
from msgspec import NODEFAULT, UNSET, ValidationError, inspect
from msgspec.inspect import Field, Type

from heapline.contract.errors import BadName, BadRequest, HeaplineError

T = TypeVar("T")
_IN_STRUCT = re.compile(r"`\$[^`]*\.\w")  # the part of msgspec's message that names a place inside the field
_ONE_OF = re.compile(r"\ban? (\w+)(?! number)")
SHOWN = 60  # characters of a wrong value that an error shows
SECONDS_MAX = 200 * 366 * 86400.0  # two centuries: longer is a mistake, and sums of times stay in range
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
INSTANT_MAX = EPOCH + timedelta(seconds=SECONDS_MAX, milliseconds=1_704_067_200_000)
INSTANT_MIN = EPOCH - timedelta(milliseconds=1)


def compile_check(kind: type[Any], without: Sequence[str] = ()) -> Callable[[Any], None]:
    """Return a function that raises BadRequest for the first invalid field of an instance.

    A struct may define `validate(self)` for rules over several fields; it runs after its fields are valid. With
    `without`, the function checks the other fields alone, of any object that has them.
    """
    names: dict[str, Any] = {
        "UNSET": UNSET,
        "fail": fail,
        "wrong_text": _wrong_text,
        "wrong_instant": _wrong_instant,
        "bytes_of": _size,
    }
    lines = ["def check(self):"]
    for i, field in enumerate(_fields(kind)):
        if field.name in without:
            continue
        test, wanted = _test(field.type, names, f"{kind.__name__}_{i}")
        names[f"wanted{i}"] = wanted
        if test and _may_be_unset(field):
            test = f"v is not UNSET and ({test})"
        if test:
            lines += [f" v = self.{field.name}", f" if {test}: fail({field.name!r}, wanted{i}, v)"]
    if hasattr(kind, "validate") and not without:
        lines.append(" self.validate()")
    exec("\n".join([*lines, " return None"]), names)
    check: Callable[[Any], None] = names["check"]
    return check


def _may_be_unset(field: Field) -> bool:
    return not field.required and field.default is NODEFAULT and field.default_factory is NODEFAULT


def read(kind: type[T], raw: Any, decode: Callable[[], T], *, lax: bool = False) -> T:
    """Return what `decode` returns. If it fails, raise the error that constructing `kind` from `raw` raises."""
    try:
        return decode()
    except ValidationError as error:
        explain(kind, raw, error, lax=lax)


def describe_types(*kinds: Any) -> None:
    """Have msgspec describe these types now, at import, in one thread.

    It describes a type when it first decodes one, and crashes the process if two threads do that at the same time.
    """
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


def build(kind: type[T], raw: Mapping[str, Any], *, lax: bool = False) -> T:
    """Build a struct from plain values. `lax` reads numbers and booleans from text, as a query string has them."""
    return read(kind, raw, lambda: msgspec.convert(raw, kind, strict=not lax), lax=lax)


def fail(name: str, wanted: str, value: Any) -> NoReturn:
    if wanted.startswith("name "):
        raise BadName(wanted[5:], value if isinstance(value, str) else repr(value))
    if wanted.startswith("secret "):
        raise BadRequest(f"{name} must be {wanted[7:]}")
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise BadRequest(f"{name} must have a time zone, got {value.isoformat()}; use, for example, datetime.now(UTC)")
    if isinstance(value, datetime) and _wrong_instant(value):
        wanted = f"a time from {EPOCH.year} to {INSTANT_MAX.year}"
    raise BadRequest(f"{name} must be {wanted}, got {shown(value)}")


def shown(value: Any) -> str:
    text = value.isoformat() if isinstance(value, datetime) else repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def explain(kind: type[Any], raw: Any, error: ValidationError, *, lax: bool = False) -> NoReturn:
    """Raise the error that constructing `kind` from `raw`, or from what it returns, raises instead of msgspec's."""
    if isinstance(error.__cause__, HeaplineError):
        raise error.__cause__ from None
    raw = raw() if callable(raw) else raw
    if not isinstance(raw, Mapping):
        raise BadRequest(f"{kind.__name__} must be an object with named fields, got {shown(raw)}") from None
    fields = {field.encode_name: field for field in _fields(kind)}
    for name in raw:
        if name not in fields:
            raise BadRequest(f"unknown field {name!r}; {kind.__name__} has {', '.join(fields)}") from None
    for name, field in fields.items():
        if name not in raw:
            if field.required:
                raise BadRequest(f"{name} is required") from None
            continue
        try:
            msgspec.convert(raw[name], _hints(kind)[field.name], strict=not lax, str_keys=True)
        except ValidationError as inner:
            if isinstance(inner.__cause__, HeaplineError):
                raise inner.__cause__ from None
            value = raw[name]
            if lax:  # show a number as the constructor would
                with contextlib.suppress(ValidationError):
                    value = msgspec.convert(value, float, strict=False)
                    value = msgspec.convert(raw[name], int, strict=False)
            _, wanted = _test(field.type, {}, "x")
            if _IN_STRUCT.search(str(inner)) and "wanted" not in (getattr(field.type, "extra", None) or {}):
                raise BadRequest(f"{name} is invalid: {inner}") from None
            fail(name, wanted, value)
    raise BadRequest(f"invalid {kind.__name__}: {error}") from None


_HINTS: dict[type[Any], dict[str, Any]] = {}
_FIELDS: dict[type[Any], tuple[Field, ...]] = {}  # msgspec resolves type hints each time it is asked


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind, include_extras=True)
    return _HINTS[kind]


def _fields(kind: type[Any]) -> tuple[Field, ...]:
    if kind not in _FIELDS:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        _FIELDS[kind] = info.fields
    return _FIELDS[kind]


def _test(kind: Type, names: dict[str, Any], prefix: str) -> tuple[str, str]:
    """(an expression that is true if `v` is invalid, what a valid value is)."""
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            test, wanted = _test(inner, names, prefix)
            extra = extra or {}
            if "name" in extra:  # a name of something: BadName says which characters it may have
                if "is_text" in extra:  # of a str alone, and hot: a cache that is called without a function between
                    names[f"is_name_{prefix}"] = extra["is_text"]
                    return f"type(v) is not str or not is_name_{prefix}(v)", f"name {extra['name']}"
                if "is_str" in extra:  # of any kind of str
                    names[f"is_name_{prefix}"] = extra["is_str"]
                    return f"not isinstance(v, str) or not is_name_{prefix}(v)", f"name {extra['name']}"
                names[f"is_name_{prefix}"] = extra["is_name"]
                return f"not is_name_{prefix}(v)", f"name {extra['name']}"
            if "check" in extra:  # raises an error of its own
                names[f"check_{prefix}"] = extra["check"]
                return f"check_{prefix}(v)", wanted
            if "bytes_max" in extra:
                limit = extra["bytes_max"]
                wanted = (
                    f"a string of 1 to {limit} bytes"
                    if "bytes_min" not in extra
                    else f"a string of up to {limit} bytes"
                )
                test = f"{test} or bytes_of(v) > {limit}" if test else ""
            return test, extra.get("wanted", wanted)
        case inspect.UnionType(types=types):
            rest = [t for t in types if not isinstance(t, inspect.NoneType)]
            tests, words = zip(*(_test(t, names, f"{prefix}_{i}") for i, t in enumerate(rest)), strict=True)
            wrong = " and ".join(f"({t})" for t in tests) if all(tests) else ""
            optional = any(isinstance(t, inspect.NoneType) for t in types)
            if optional:
                wrong = f"v is not None and {wrong}" if wrong else ""
            if words[0].startswith("name "):  # BadName has words of its own
                return wrong, words[0]
            return wrong, " or ".join(words) + (" or None" if optional else "")
        case inspect.BoolType():
            return "v is not True and v is not False", "True or False"
        case inspect.IntType(ge=low, le=high, gt=above):
            wrong = "type(v) is not int and (not isinstance(v, int) or isinstance(v, bool))"  # an IntEnum is fine
            return f"{wrong}{_range(low, high, above)}", "an integer" + _from(low, high, above)
        case inspect.FloatType(ge=low, le=high, gt=above):
            wrong = "type(v) is not float and type(v) is not int or v != v"
            return f"{wrong}{_range(low, high, above)}", "a number" + _from(low, high, above)
        case inspect.StrType(min_length=low, max_length=high):
            length = _range(low, high, None, "len(v)")
            return f"type(v) is not str{length} or not v.isascii() and wrong_text(v)", "a string" + _long(low, high)
        case inspect.BytesType() | inspect.MemoryViewType():
            return "not isinstance(v, (bytes, memoryview))", "bytes"
        case inspect.DateTimeType():
            return "wrong_instant(v)", "a time with a time zone"
        case inspect.LiteralType(values=values):
            return f"v not in {tuple(values)!r}", "one of " * (len(values) > 1) + ", ".join(map(repr, values))
        case inspect.ListType(item_type=item):
            return _each("type(v) is not list", "a list", item, names, prefix)
        case inspect.DictType(key_type=inspect.IntType(ge=int()) as key, value_type=item):
            test, _ = _each("type(v) is not dict", "", key, names, f"{prefix}_key")
            test, _ = _each(test, "", item, names, prefix, ".values()")
            wanted, value_wanted = (_test(kind, {}, "")[1] for kind in (key, item))
            return test, f"a mapping, each key {wanted} and each value {value_wanted}"
        case inspect.DictType(value_type=item):
            return _each("type(v) is not dict", "a mapping", item, names, prefix, ".values()")
        case inspect.StructType(cls=cls):
            names[cls.__name__] = cls
            if not hasattr(cls, "__post_init__"):  # a plain struct: nothing has checked it yet
                names[f"check_{cls.__name__}"] = compile_check(cls)
                return f"not isinstance(v, {cls.__name__}) or check_{cls.__name__}(v)", _one(cls.__name__)
            return f"not isinstance(v, {cls.__name__})", _one(cls.__name__)
    return "", "valid"


def _one(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _each(test: str, wanted: str, item: Type, names: dict[str, Any], prefix: str, of: str = "") -> tuple[str, str]:
    """A list or a mapping whose items are checked too."""
    inner, words = _test(item, names, f"{prefix}_item")
    if not inner:
        return test, wanted
    source = f"def wrong_{prefix}(values):\n for v in values{of}:\n  if {inner}: return True\n return False"
    exec(source, names)
    return f"{test} or wrong_{prefix}(v)", f"{wanted} of {_many(words)}"


def _many(words: str) -> str:
    """The plural of what a valid value is.

    >>> _many("a string of 1 to 64 characters or an integer"), _many("an Outgoing"), _many("bytes")
    ('strings of 1 to 64 characters or integers', 'Outgoing objects', 'bytes')
    """
    return _ONE_OF.sub(lambda m: f"{m[1]} objects" if m[1][0].isupper() else f"{m[1]}s", words)


def _range(low: Any, high: Any, above: Any = None, what: str = "v") -> str:
    if low is None and high is None and above is None:
        return ""
    left = f"{low!r} <= " if low is not None else f"{above!r} < " if above is not None else ""
    right = "" if high is None else f" <= {high!r}"
    return f" or not {left}{what}{right}"


def _from(low: Any, high: Any, above: Any = None) -> str:
    if above is not None:
        return f" over {_plain(above)}" + ("" if high is None else f" and at most {_plain(high)}")
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    return "" if low is high else f" of at least {_plain(low)}" if high is None else f" of at most {_plain(high)}"


def _plain(number: Any) -> str:
    """A bound as people write it: 2^63-1 instead of its digits."""
    if isinstance(number, float):
        return str(int(number)) if number.is_integer() else repr(number)
    for power in (62, 63):
        for offset, text in ((0, f"2^{power}"), (-1, f"2^{power}-1")):
            if abs(number) == (1 << power) + offset:
                return ("-" if number < 0 else "") + text
    return str(number)


def _long(low: Any, high: Any) -> str:
    return "" if low is high is None else f" of {low or 0} to {high} characters"


def _wrong_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no wire and no journal can hold
        return True
    return False


def _size(value: str) -> int:
    return len(value) if value.isascii() else len(value.encode())


def _wrong_instant(value: Any) -> bool:
    return not isinstance(value, datetime) or value.utcoffset() is None or not INSTANT_MIN < value <= INSTANT_MAX


def seconds_to_ms(seconds: float) -> int:
    """A delay in ms from a clock that was rounded down: one more, so that nothing is ever early."""
    return math.ceil(round(seconds * 1000, 6)) + 1 if seconds > 0 else 0


def instant_to_ms(instant: datetime) -> int:
    """The first millisecond that is not before the instant: what waits for it is never early."""
    return -((EPOCH - instant) // timedelta(milliseconds=1))
