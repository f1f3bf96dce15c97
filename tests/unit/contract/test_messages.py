"""Messages are checked one by one or as columns, and both accept and reject the same ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heapline.contract.check import EPOCH, INSTANT_MAX, SECONDS_MAX
from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.message import Outgoing
from heapline.contract.messages import Enqueue, NewMessages, check_message, check_messages, pack_messages
from heapline.wire.codec import columns_of, rows_of

EAST = timezone(timedelta(hours=2))
delays = st.sampled_from([None, 0, 1, 2.5, -1, float("nan"), float("inf"), SECONDS_MAX, 2 * SECONDS_MAX, True, "1"])
instants = st.sampled_from(
    [
        None,
        datetime(2030, 1, 1, tzinfo=UTC),
        datetime(2030, 1, 1, tzinfo=EAST),
        datetime(2030, 1, 1),
        EPOCH,
        INSTANT_MAX,
        INSTANT_MAX + timedelta(microseconds=1),
        datetime(1900, 1, 1, tzinfo=UTC),
        5,
    ]
)
priorities = st.sampled_from([0, -5, 1 << 63, True, 1.5])
extras = st.sampled_from([{}, {}, {}, {"ttl": 0}, {"key": ""}, {"headers": {"a": 1}}, {"seq": -1}, {"payload": "text"}])


@st.composite
def outgoings(draw: Any) -> Outgoing:
    given = {"payload": b"x" * draw(st.sampled_from([0, 100])), "priority": draw(priorities)}
    return Outgoing(**{**given, "delay": draw(delays), "deliver_at": draw(instants), **draw(extras)})


def is_valid(message: Outgoing) -> bool:
    try:
        check_message(message)
    except HeaplineError:
        return False
    return True


@given(st.lists(outgoings(), min_size=1, max_size=3))
@example([Outgoing(b"", delay=1.0), Outgoing(b"", delay=float("nan"))])
@example([Outgoing(b"", priority=True)])
def test_batch_has_an_error_for_each_invalid_message_and_for_no_other(messages: list[Outgoing]) -> None:
    assert set(check_messages(messages, atomic=False)) == {i for i, m in enumerate(messages) if not is_valid(m)}


@given(outgoings())
def test_single_enqueue_accepts_what_a_batch_accepts(message: Outgoing) -> None:
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "seq"}
    try:
        Enqueue("jobs", **fields)
    except BadRequest:
        assert not is_valid(message) or message.seq is not None
    else:
        assert is_valid(Outgoing(**fields))


VALID = st.builds(
    Outgoing,
    st.binary(max_size=9),
    st.integers(-9, 9),
    st.none() | st.just("k"),
    st.none() | st.floats(0, 1e6),
    ttl=st.none() | st.floats(0.1, 1e6),
) | st.builds(
    lambda at: Outgoing(b"", deliver_at=at),
    st.datetimes(datetime(1971, 1, 1), datetime(2099, 1, 1), timezones=st.just(UTC)),
)


@given(st.lists(VALID, min_size=1, max_size=4))
def test_packed_messages_have_the_same_rows(messages: list[Outgoing]) -> None:
    rows = rows_of(pack_messages(messages))
    assert [(r.payload, r.priority, r.key, r.delay, r.ttl) for r in rows] == [
        (m.payload, m.priority, m.key, m.delay, m.ttl) for m in messages
    ]
    for row, message in zip(rows, messages, strict=True):
        assert (row.deliver_at is None) == (message.deliver_at is None)
        if message.deliver_at is not None:
            assert timedelta(0) <= row.deliver_at - message.deliver_at <= timedelta(milliseconds=1), "never early"


@pytest.mark.parametrize(
    "columns",
    [
        {"priorities": pack([1, 2])},
        {"keys": [""]},
        {"keys": ["x" * 4097]},
        {"keys": ["\ud800"]},
        {"delays": pack([-1.0], "d")},
        {"ttls": pack([0.0], "d")},
        {"deliver_at_ms": pack([-1])},
        {"max_retries": pack([251])},
        {"idempotency_scopes": pack([4], "B")},
        {"idempotency_scopes": pack([1], "B")},
        {"seqs": pack([-2])},
        {"headers": [{"a": 1}]},
        {"delays": pack([1.0], "d"), "deliver_at_ms": pack([5])},
    ],
    ids=lambda columns: ",".join(columns),
)
def test_columns_from_a_wire_are_checked_on_construction(columns: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        NewMessages([b"x"], **columns)


@pytest.mark.parametrize("at", [INSTANT_MAX + timedelta(milliseconds=1), EPOCH - timedelta(milliseconds=1)])
def test_instant_out_of_range_is_refused(at: datetime) -> None:
    with pytest.raises(BadRequest, match="deliver_at must be a time"):
        Enqueue("jobs", b"", deliver_at=at)
    Enqueue("jobs", b"", deliver_at=INSTANT_MAX)


def test_instant_without_a_time_zone_says_what_to_use() -> None:
    with pytest.raises(BadRequest, match=r"must have a time zone.*datetime\.now\(UTC\)"):
        Enqueue("jobs", b"", deliver_at=datetime(2030, 1, 1))


@pytest.mark.parametrize("field", ["delay", "ttl"])
def test_nan_in_an_item_is_refused_and_does_not_mean_none(field: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} must be a number of seconds"):
        columns_of(NewMessages, [Outgoing(b"x", **{field: float("nan")})])
