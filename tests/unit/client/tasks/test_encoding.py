"""Arguments as JSON: every annotated value decodes to the value that was encoded."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.client.tasks.arguments import Arguments, Undecodable


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Address:
    street: str
    number: int


@dataclass
class Order:
    id: UUID
    at: datetime
    colour: Colour
    to: Address | None = None
    lines: list[tuple[str, int]] = field(default_factory=list)


class Point(msgspec.Struct):
    x: float
    y: float = 0.0


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    name: str = pydantic.Field(alias="fullName")
    born: date
    limits: dict[str, Decimal] = {}


@dataclass
class Mixed:
    customer: Customer
    points: list[Point]


def everything(
    order: Order, points: dict[str, Point], customer: Customer, mixed: list[Mixed], raw: bytes, wait: timedelta,
    tags: frozenset[str], how: Literal["slow", "fast"] = "fast", *, amount: Decimal = Decimal("1.5"), free: Any = None,
) -> None: ...  # fmt: skip


CODEC = Arguments("everything", everything)

moments = st.datetimes(timezones=st.just(UTC), min_value=datetime(1971, 1, 1))
texts = st.text(st.characters(codec="utf-8"), max_size=12)
numbers = st.integers(-(2**63), 2**63 - 1)
addresses = st.builds(Address, texts, numbers)
orders = st.builds(
    Order, st.uuids(), moments, st.sampled_from(Colour), st.none() | addresses, st.lists(st.tuples(texts, numbers))
)
points = st.builds(Point, st.floats(allow_nan=False, allow_infinity=False))
decimals = st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9)
customers = st.builds(
    Customer, fullName=texts, born=st.dates(), limits=st.dictionaries(texts, decimals, max_size=2)
)  # fmt: skip
calls = st.fixed_dictionaries(
    {
        "order": orders,
        "points": st.dictionaries(texts, points, max_size=2),
        "customer": customers,
        "mixed": st.lists(st.builds(Mixed, customers, st.lists(points, max_size=2)), max_size=2),
        "raw": st.binary(max_size=20),
        "wait": st.timedeltas(timedelta(0), timedelta(days=100)),
        "tags": st.frozensets(texts, max_size=3),
    },
    optional={
        "how": st.sampled_from(["slow", "fast"]),
        "amount": decimals,
        "free": st.recursive(st.none() | st.booleans() | texts, lambda inner: st.lists(inner, max_size=2)),
    },
)
DEFAULTS = {"how": "fast", "amount": Decimal("1.5"), "free": None}


@settings(max_examples=50)
@given(calls)
def test_arguments_survive_encoding(arguments: dict[str, Any]) -> None:
    payload = CODEC.encode(CODEC.bind((), arguments))
    json.loads(payload)  # plain JSON, for any consumer
    assert CODEC.decode(payload) == DEFAULTS | arguments


@given(st.binary(max_size=60) | texts.map(str.encode) | st.just(b'{"order": {}}'))
def test_foreign_bytes_are_reported_as_undecodable(payload: bytes) -> None:
    with pytest.raises(Undecodable, match="the payload is not a call of task 'everything': "):
        CODEC.decode(payload)


def test_omitted_arguments_are_not_encoded() -> None:
    def task(a: int, b: int = 2) -> None: ...

    codec = Arguments("task", task)
    assert codec.encode(codec.bind((1,), {})) == b'{"a":1}'
    assert codec.decode(b'{"a":1}') == {"a": 1, "b": 2}


def test_positional_arguments_are_encoded_by_name() -> None:
    def task(a: int, b: int = 2) -> None: ...

    codec = Arguments("task", task)
    assert codec.bind((1, 3), {}) == codec.bind((1,), {"b": 3}) == codec.bind((), {"a": 1, "b": 3}) == {"a": 1, "b": 3}
    with pytest.raises(TypeError, match="too many positional arguments"):
        codec.bind((1, 2, 3), {})


def test_positional_only_parameters_are_called_as_such() -> None:
    def task(a: int, /, b: int, *, c: int = 3) -> tuple[int, int, int]:
        return a, b, c

    codec = Arguments("task", task)
    arguments = codec.decode(codec.encode(codec.bind((1,), {"b": 2})))
    assert codec.call(arguments) == (1, 2, 3)


def test_parameter_without_annotation_accepts_any_json() -> None:
    def task(a, b=1):  # type: ignore[no-untyped-def]
        return a, b

    codec = Arguments("task", task)
    assert codec.decode(codec.encode(codec.bind(({"x": [1]},), {}))) == {"a": {"x": [1]}, "b": 1}


# --- errors -----------------------------------------------------------------------------------------------------------


def note(n: int, colour: Colour = Colour.RED, customer: Customer | None = None) -> None: ...


NOTE = Arguments("note", note)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'n'"),
        ((1,), {"m": 1}, "got an unexpected keyword argument 'm'"),
        ((1, 2, 3, 4), {}, "too many positional arguments"),
        (("secret",), {}, "the worker would reject these arguments: Expected `int`, got `str` - at `$.n`"),
        ((1, "secret"), {}, "the worker would reject these arguments: Invalid enum value - at `$.colour`"),
        (
            (object(),),
            {},
            "cannot encode object as JSON; use a dataclass, a msgspec.Struct, a pydantic model",
        ),
        ((float("nan"),), {}, "the worker would reject these arguments: Expected `int`, got `null` - at `$.n`"),
    ],
)
def test_wrong_arguments_are_refused_with_a_clear_type_error(args: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        NOTE.encode(NOTE.bind(args, kwargs))
    text = str(caught.value)
    assert text.startswith("task note(n: ")
    assert words in text
    assert "secret" not in text


def test_pydantic_error_names_the_field_without_its_value() -> None:
    with pytest.raises(Undecodable) as caught:
        NOTE.decode(b'{"n": 1, "customer": {"fullName": 5, "born": "secret"}}')
    assert "string_type at fullName; date_" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_star_parameters_are_refused() -> None:
    def many(*rest: int) -> None: ...

    with pytest.raises(TypeError, match=r"task 'many' has \*rest: .*; every argument of a task must have a name"):
        Arguments("many", many)


def test_parameter_with_the_name_of_an_option_is_refused() -> None:
    def urgent(priority: int) -> None: ...

    with pytest.raises(TypeError, match="has a parameter 'priority', which is an option of enqueue; rename it"):
        Arguments("urgent", urgent, frozenset({"priority"}))


def test_unresolvable_annotation_is_reported() -> None:
    def lost(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match=r"task 'lost' has an annotation that cannot be resolved \(name 'Nowhere'"):
        Arguments("lost", lost).check()


def test_undecodable_annotation_is_reported() -> None:
    def torn(a: Address | Point) -> None: ...

    with pytest.raises(TypeError, match="task 'torn' has an annotation that JSON cannot be decoded to: "):
        Arguments("torn", torn).check()


def test_class_without_a_decoder_cannot_be_decoded() -> None:
    class Engine: ...

    def drive(a: Any) -> None: ...

    drive.__annotations__["a"] = Engine
    with pytest.raises(Undecodable, match=r"no way to read a .*Engine is known"):
        Arguments("drive", drive).decode(b'{"a": 1}')
