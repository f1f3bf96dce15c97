"""Payloads are decoded by content type into the type that the reader names."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic
import pytest

import heapline
from heapline.contract.payload_codec import decode
from tests.unit.test_public_types import message


@dataclass
class Order:
    id: int
    at: datetime


class Customer(pydantic.BaseModel):
    name: str


WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def test_message_without_a_content_type_is_decoded_as_json() -> None:
    m = message(payload=b'{"id": 1, "at": "2026-01-01T00:00:00Z"}')
    assert m.json() == {"id": 1, "at": "2026-01-01T00:00:00Z"}
    assert m.decode(Order) == Order(1, WHEN)


@pytest.mark.parametrize(
    ("media", "payload"),
    [
        ("application/json", b"[" * 100_000 + b"]" * 100_000),
        ("application/json", b'{"a":' * 100_000),
        ("application/msgpack", b"\x91" * 100_000 + b"\xc0"),
    ],
)
def test_deeply_nested_payload_raises_bad_request(media: str, payload: bytes) -> None:
    with pytest.raises(heapline.BadRequest, match="nested too deeply"):
        message(payload=payload, _headers={"content-type": media}).json()


@pytest.mark.parametrize("media", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.shop+json"])
def test_every_json_content_type_is_decoded(media: str) -> None:
    assert message(payload=b"[1]", _headers={"content-type": media}).decode(list[int]) == [1]


@pytest.mark.parametrize("media", ["application/msgpack", "application/x-msgpack"])
def test_message_pack(media: str) -> None:
    m = message(payload=msgspec.msgpack.encode(Order(1, WHEN)), _headers={"content-type": media})
    assert m.decode(Order) == Order(1, WHEN)


def test_pydantic_model() -> None:
    assert decode(b'{"name": "Ann"}', None, Customer) == Customer(name="Ann")


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (b"{", Any, "cannot decode the payload: Input data was truncated"),
        (b'{"id": "secret"}', Order, "cannot decode the payload: Expected `int`, got `str` - at `$.id`"),
        (b'{"name": 5}', Customer, "cannot decode the payload: string_type at name"),
    ],
)
def test_error_for_an_invalid_payload_contains_no_values(payload: bytes, kind: Any, words: str) -> None:
    with pytest.raises(heapline.BadRequest) as caught:
        decode(payload, None, kind)
    assert str(caught.value) == words


def test_other_content_types_raise_an_error() -> None:
    with pytest.raises(heapline.BadRequest, match=r"the payload is 'image/png', which is not JSON; read it from"):
        message(_headers={"content-type": "image/png"}).json()
