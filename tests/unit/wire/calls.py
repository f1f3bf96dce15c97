"""Hypothesis strategies for any command or result, derived from the types of its fields; and how to compare two."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec import NODEFAULT, UNSET, Struct, inspect

import heapline.contract.broker  # noqa: F401  (registers every call)
from heapline.contract.call import CALLS, Call
from heapline.contract.columns import Columns, pack
from heapline.contract.errors import BadRequest, HeaplineError, LeaseLost, TopicNotFound
from heapline.contract.ids import SUFFIX_MAX
from heapline.contract.message import Enqueued, LogEvent, Outgoing
from heapline.contract.messages import EnqueuedBatch, pack_enqueued
from heapline.contract.schedules import CreateSchedule
from heapline.wire.codec import columns_of

ALL_CALLS = sorted(CALLS.values(), key=lambda kind: kind.facts.id)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
NAMES = st.sampled_from(["jobs", "a", "x-1.b"])
INSTANTS = st.integers(1, 4 * 10**15).map(lambda us: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us))
ERRORS = st.sampled_from([BadRequest("no"), TopicNotFound("jobs"), LeaseLost([1, 1 << 60], "jobs")])
OUTGOING = st.builds(
    Outgoing,
    payload=st.binary(max_size=9),
    priority=INT64,
    key=st.none() | TEXT,
    delay=st.none() | st.floats(0, 1e6),
    headers=st.none() | st.dictionaries(TEXT, TEXT, min_size=1, max_size=2),
    ttl=st.none() | st.floats(0.001, 1e6),
    max_retries=st.none() | st.integers(0, 250),
    idempotency_key=st.none() | TEXT,
    fairness_key=st.none() | TEXT,
)
#: Fields that must be absent, because several fields depend on each other.
DEPENDENT = {
    "delay", "deliver_at", "idempotency_scope", "producer_id", "epoch", "seq", "first_seq", "answered_below",
    "keep_due",
}  # fmt: skip


@cache
def commands(kind: type[Call[Any]]) -> st.SearchStrategy[Any]:
    """Valid commands of a kind, without combinations that it refuses."""
    if kind is CreateSchedule:
        return st.builds(
            kind, name=NAMES, topic=NAMES, payload=st.binary(max_size=9), every=st.sampled_from([1.5, 60.0]),
            starts=st.none() | INSTANTS, headers=st.none() | st.dictionaries(TEXT, TEXT, min_size=1, max_size=2),
        )  # fmt: skip
    return _struct(inspect.type_info(kind)).filter(lambda command: command is not None)


@cache
def results(kind: type[Call[Any]]) -> st.SearchStrategy[Any]:
    if kind.result in (None, type(None)):
        return st.none()
    return _struct(inspect.type_info(kind.result))


def _struct(info: Any) -> st.SearchStrategy[Any]:
    if info.cls is LogEvent:
        columns = st.fixed_dictionaries(
            {"ids": st.just(np.array([1, 1 << 60])), "at": INT64, "holders": st.just(["a", None])}
        )
        return st.builds(LogEvent, kind=TEXT, offset=INT64, row_count=INT64, columns=columns,
                         payloads=st.none() | st.lists(st.binary(max_size=4), max_size=2))  # fmt: skip
    if info.cls is EnqueuedBatch:
        row = st.builds(Enqueued, st.integers(1, 1 << 62), st.booleans()) | ERRORS.map(lambda e: Enqueued(0, error=e))
        suffix = st.integers(0, SUFFIX_MAX)
        return st.builds(
            lambda rows, s: pack_enqueued(rows, s if any(r.id for r in rows) else 0), st.lists(row, max_size=4), suffix
        )
    if isinstance(info.cls, type) and issubclass(info.cls, Columns):
        rows = OUTGOING if info.cls.row is Outgoing else _struct(inspect.type_info(info.cls.row))
        return st.lists(rows, min_size=1, max_size=4).map(lambda rows: columns_of(info.cls, rows))
    fields = {}
    for field in info.fields:
        values = _values(field.type, field.name)
        if not field.required and field.name in DEPENDENT:
            continue
        if not field.required and field.default is NODEFAULT and field.default_factory is NODEFAULT:
            values |= st.just(UNSET)
        elif not field.required and field.default is not NODEFAULT:
            values |= st.just(field.default)
        fields[field.name] = values
    return st.fixed_dictionaries(fields).map(lambda given: _build(info.cls, given))


def _build(kind: Any, given: dict[str, Any]) -> Any:
    if kind.__name__ == "Position":
        name = next((n for n, v in given.items() if v is not None), None)
        given = {name: given[name]} if name else {"edge": "latest"}
    if given.get("id_suffix") and not any(given.get(name) for name in ("messages", "batches", "id", "config", "unit")):
        given["id_suffix"] = 0  # an answer without messages shows none
    try:
        return kind(**given)
    except BadRequest:
        return None


def _values(kind: Any, name: str, nullable: bool = False) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            return NAMES if "name" in (extra or {}) else _values(inner, name, nullable)
        case inspect.UnionType(types=types):
            rest = [t for t in types if not isinstance(t, inspect.NoneType)]
            if len(rest) < len(types):
                inner = rest[0] if len(rest) == 1 else inspect.UnionType(tuple(rest))
                return st.none() | _values(inner, name, nullable=True)
            if any(isinstance(t, inspect.IntType) for t in rest):
                return st.sampled_from(["01JGXV0Z000000000000000000", "42"])  # ids are texts on every wire
            return st.one_of([_values(t, name) for t in rest])
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high):
            if name == "id_suffix":
                return st.integers(0, SUFFIX_MAX)
            if name == "id":
                return st.integers(0, 1 << 62)
            if name.endswith("_ms"):
                return st.integers(0, 10**14)
            small = name in ("attempts", "partition")  # columns of 8 and 16 bits
            return st.integers(low or 0, 255) if small else st.integers(low or 0, min(high or 1 << 62, 1 << 62))
        case inspect.FloatType(ge=low, le=high, gt=above):
            return st.floats(low or above or 0.0, high or 1e9, exclude_min=above is not None)
        case inspect.StrType():
            return TEXT
        case inspect.BytesType():
            return st.binary(max_size=9)
        case inspect.MemoryViewType():
            return st.lists(st.integers(0, 10**14), min_size=1, max_size=3).map(pack)
        case inspect.DateTimeType():
            return INSTANTS
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.CustomType():
            return ERRORS
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            items = _values(item, name).filter(lambda v: v is not None)
            return st.lists(items, min_size=getattr(kind, "min_length", None) or 0, max_size=3)
        case inspect.DictType(value_type=inspect.AnyType()):
            return st.dictionaries(TEXT, st.integers(0, 9), max_size=2)
        case inspect.DictType(key_type=key, value_type=item):
            keys = st.integers(0, key.le or 1 << 40) if isinstance(key, inspect.IntType) else TEXT
            return st.dictionaries(keys, _values(item, name), min_size=1 if nullable else 0, max_size=2)
        case inspect.StructType():
            return _struct(kind).filter(lambda v: v is not None)
    raise TypeError(kind)


def same(a: Any, b: Any) -> bool:
    """Compare two values by content, including arrays, views and errors."""
    if isinstance(a, Struct):
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in a.__struct_fields__)
    if isinstance(a, HeaplineError):
        return type(a) is type(b) and a.facts() == b.facts() and str(a) == str(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, memoryview):
        return isinstance(b, memoryview) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
