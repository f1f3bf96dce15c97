"""Columns: how a batch of messages is held in a command or a result.

A column of numbers is packed: a memoryview of little-endian numbers, one per row. A column of texts or payloads is a
list, because msgspec creates its objects in C and no payload pins the chunk that it arrived in. A column that no row
uses is absent.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import repeat, starmap
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Struct

from heapline.contract.errors import BadRequest

assert sys.byteorder == "little", "packed columns are little-endian, and are read and written in place"

NO_ROWS = memoryview(b"")
INT64, FLOAT64, UINT8, UINT16 = "q", "d", "B", "H"


class Packed(NamedTuple):
    """The annotation of a column's type that says how its numbers are packed."""

    form: str  # of `array`
    none: Any = None  # the number that stands for None
    low: float = -math.inf  # bounds of the numbers; NaN, which stands for None, is not checked
    high: float = math.inf


Int64 = Annotated[memoryview, Packed(INT64)]
Uint8 = Annotated[memoryview, Packed(UINT8)]
Uint16 = Annotated[memoryview, Packed(UINT16)]


class Columns(Struct, frozen=True, omit_defaults=True):
    """Base of column structs. `row` is the struct of one message; each column has the field at the same position.

    Every batch has the first column.
    """

    row: ClassVar[type[Any]]

    def __len__(self) -> int:
        first = getattr(self, self.__struct_fields__[0])
        return first.nbytes // 8 if type(first) is memoryview else len(first)


def pack(values: Iterable[Any], form: str = INT64) -> memoryview:
    try:
        return memoryview(array(form, values)).cast("B")
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRequest(f"a column of numbers cannot be packed: {error}") from None


def pack_one(value: int) -> memoryview:
    """Pack a column of one integer; twice as fast as `pack`."""
    return memoryview(value.to_bytes(8, "little", signed=True))


def unpack(column: Any, form: str = INT64) -> list[Any]:
    """Return a packed column as a list of Python numbers."""
    if type(column) is not memoryview or column.format != "B":
        column = memoryview(column).cast("B")
    return column.cast(form).tolist()  # type: ignore[no-any-return]


def unpack_joined(columns: Iterable[memoryview]) -> list[int]:
    """Return several packed columns of integers as one list."""
    return memoryview(b"".join(columns)).cast("q").tolist()


C = TypeVar("C", bound=Columns)


class Plan(NamedTuple):
    """One column. Made once per class, because msgspec resolves type hints on each request for fields."""

    name: str
    field: str  # of the row
    form: str | None  # of a packed column
    size: int  # bytes per row of a packed column
    none: Any  # the number that stands for None
    is_required: bool
    default: Any  # of the row's field
    bounds: tuple[float, float] | None


@cache
def plan(kind: type[Columns]) -> tuple[Plan, ...]:
    plans = []
    for column, field in zip(msgspec.structs.fields(kind), msgspec.structs.fields(kind.row), strict=True):
        packed = _packed(column.type)
        form, none, low, high = packed or (None, None, -math.inf, math.inf)
        size = array(form).itemsize if form else 1
        bounds = None if math.isinf(low) else (low, high)
        plans.append(Plan(column.name, field.name, form, size, none, column.required, field.default, bounds))
    return tuple(plans)


def _packed(hint: Any) -> Packed | None:
    """Return the packing that a column's type is annotated with, even if the column is optional."""
    for part in (hint, *get_args(hint)):
        for note in getattr(part, "__metadata__", ()):
            if isinstance(note, Packed):
                return note
    return None


def check_columns(columns: Columns, count: int) -> None:
    """Raise BadRequest if a column has another length than the batch, or a number that is out of bounds."""
    for name, _, form, size, _, _, _, bounds in plan(type(columns)):
        column = getattr(columns, name)
        if column is None:
            continue
        if (column.nbytes if type(column) is memoryview else len(column)) != count * size:
            unit = "bytes" if form else "values"
            have = memoryview(column).nbytes if form else len(column)
            raise BadRequest(f"column {name} must have {count * size} {unit} for {count} rows, got {have}")
        if bounds is not None:
            low, high = bounds
            for value in unpack(column, form or INT64):
                if not low <= value <= high and value == value:
                    raise BadRequest(f"each of {name} must be from {low:g} to {high:g}, got {value}")


def from_rows(kind: type[Columns], rows: Sequence[Any]) -> Any:
    """Build columns from row structs. A column in which every row has its default is left out."""
    columns: dict[str, Any] = {}
    count = len(rows)
    for name, field, form, _, none, is_required, default, _ in plan(kind):
        values = list(map(attrgetter(field), rows))
        if not is_required and values.count(default) == count:
            continue
        if form is None:
            columns[name] = values
        else:
            columns[name] = pack(values if none is None else [none if v is None else v for v in values], form)
    return kind(**columns)


def to_rows(columns: Columns) -> list[Any]:
    """Build row structs: for JSON, for typed protobuf and for the facade."""
    kind = type(columns)
    values: dict[str, Any] = {}
    for name, field, form, _, none, _, default, _ in plan(kind):
        column = getattr(columns, name)
        if column is None:
            values[field] = repeat(default)
        elif form is None:
            values[field] = column
        else:
            found = unpack(column, form)
            values[field] = found if none is None else [None if v == none or v != v else v for v in found]
    ordered = [values[field] for field in kind.row.__struct_fields__]
    return list(starmap(kind.row, zip(*ordered, strict=False)))


def part(columns: C, start: int, end: int) -> C:
    """Rows [start, end) of a column struct."""
    found: dict[str, Any] = {}
    for column in plan(type(columns)):
        value = getattr(columns, column.name)
        if value is not None:
            width = column.size if column.form else 1
            found[column.name] = value[start * width : end * width]
    return type(columns)(**found)


def pick(columns: C, rows: Sequence[int]) -> C:
    """These rows of a column struct."""
    found: dict[str, Any] = {}
    for column in plan(type(columns)):
        value = getattr(columns, column.name)
        if value is None:
            continue
        if column.form is None:
            found[column.name] = [value[i] for i in rows]
        else:
            numbers = unpack(value, column.form)
            found[column.name] = pack([numbers[i] for i in rows], column.form)
    return type(columns)(**found)
