"""Batches survive the wire as they were, and columns that do not fit together are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.errors import BadRequest
from heapline.model import Outgoing, Popped
from heapline.wire.columns import (
    is_plain,
    pack_outgoing,
    pack_plain,
    pack_popped,
    unpack_messages,
    unpack_outgoing,
    unpack_plain,
)
from heapline.wire.schema import pb
from heapline.wire.shapes import pack_item, unpack_item

TEXT = st.text(min_size=1, max_size=8).filter(lambda t: t.isprintable())
SECONDS = st.floats(0, 1e6)
MOMENT = st.integers(0, 4 * 10**15).map(lambda us: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us))
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


OUTGOING = st.builds(
    Outgoing, st.binary(max_size=20), INT64, maybe(TEXT), maybe(SECONDS), maybe(MOMENT),
    maybe(st.dictionaries(TEXT, TEXT, min_size=1, max_size=2)), maybe(SECONDS), maybe(st.integers(0, 250)),
    maybe(TEXT), maybe(st.sampled_from(["window", "pending", "until_ack"])), maybe(st.integers(0, (1 << 63) - 1)),
    maybe(TEXT),
)  # fmt: skip


@given(st.lists(OUTGOING, max_size=6))
def test_outgoing_messages_come_back_from_columns_as_they_were(messages: list[Outgoing]) -> None:
    packed = pb.OutgoingColumns.FromString(pack_outgoing(messages).SerializeToString())
    assert unpack_outgoing(packed) == messages


@given(st.lists(maybe(st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy"), min_size=1)), max_size=9))
def test_headers_that_are_alike_stay_each_messages_own(headers: list[dict[str, str] | None]) -> None:
    packed = pack_outgoing([Outgoing(b"", headers=each) for each in headers])
    found = [m.headers for m in unpack_outgoing(pb.OutgoingColumns.FromString(packed.SerializeToString()))]
    assert found == headers
    assert len({id(each) for each in found if each}) == sum(map(bool, headers))


@given(OUTGOING)
def test_outgoing_message_comes_back_from_an_item_as_it_was(message: Outgoing) -> None:
    assert unpack_item(pb.Outgoing.FromString(pack_item(message).SerializeToString())) == message


@given(st.lists(st.tuples(st.binary(max_size=9), INT64), max_size=9))
def test_plain_batch_comes_back_as_payloads_and_priorities(rows: list[tuple[bytes, int]]) -> None:
    packed = pack_plain([p for p, _ in rows], [n for _, n in rows])
    assert is_plain(packed)
    payloads, priorities = unpack_plain(packed)
    assert list(zip(payloads, priorities.tolist(), strict=True)) == rows


def test_batch_with_any_extra_is_not_plain() -> None:
    for extra in (
        {"key": "k"}, {"delay": 1.0}, {"deliver_at": datetime.now(UTC)}, {"headers": {"a": "b"}}, {"ttl": 1.0},
        {"max_retries": 0}, {"idempotency_key": "k"}, {"seq": 0}, {"fairness_key": "f"},
        {"idempotency_scope": "window"},
    ):  # fmt: skip
        assert not is_plain(pack_outgoing([Outgoing(b""), Outgoing(b"", **extra)])), extra


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 2, "payload_sizes": b"\1\0\0\0", "payloads": b"x"},
        {"count": 1, "payload_sizes": b"\1\0\0", "payloads": b"x"},
        {"count": 1, "payload_sizes": b"\2\0\0\0", "payloads": b"x"},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "payloads": b"x"},
        {"count": 1 << 31, "payloads": b"x"},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "priorities": b"\0" * 7},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "priorities": b"\0" * 16},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "keys": ["a", "b"]},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "delays": b"\0"},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "idempotency_scopes": b"\x09"},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "deliver_at_us": b"\xff" * 7 + b"\x7f"},
        {"count": 1, "payload_sizes": b"\0\0\0\0", "headers": [pb.Headers(), pb.Headers()]},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        unpack_outgoing(pb.OutgoingColumns(**fields))


def test_popped_columns_become_the_same_messages() -> None:
    popped = Popped(
        [1, 2], [3, 1 << 62], [-5, 6], [b"a", b""], [1, 250], [10, 11], [20, 21], [0, 1023], ["k", None], [None, "f"],
        [None, {"h": "v"}],
    )  # fmt: skip
    a, b = unpack_messages(None, "jobs", pb.PoppedColumns.FromString(pack_popped(popped).SerializeToString()))
    assert (a.id, a.token, a.priority, a.payload, a.attempts, a.partition) == (1, 3, -5, b"a", 1, 0)
    assert (a.key, a.fairness_key, a.headers, a._enqueued_ms, a._deadline_ms) == ("k", None, {}, 10, 20)
    assert (b.id, b.token, b.priority, b.payload, b.attempts, b.partition) == (2, 1 << 62, 6, b"", 250, 1023)
    assert (b.key, b.fairness_key, b.headers, b._enqueued_ms, b._deadline_ms) == (None, "f", {"h": "v"}, 11, 21)
