"""Batches that are checked by columns: never one that a check of each message would refuse."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heapline.config import TopicConfig
from heapline.engine.columns import MOMENT_MAX, SECONDS_MAX, are_plain, are_scheduled, check_moment, check_one
from heapline.errors import BadRequest, HeaplineError
from heapline.model import EPOCH, Outgoing

CONFIG = TopicConfig(max_payload_bytes=100)
EAST = timezone(timedelta(hours=2))
delays = st.sampled_from([None, 0, 1, 2.5, -1, float("nan"), float("inf"), SECONDS_MAX, 2 * SECONDS_MAX, True, "1"])
moments = st.sampled_from(
    [
        None,
        datetime(2030, 1, 1, tzinfo=UTC),
        datetime(2030, 1, 1, tzinfo=EAST),
        datetime(2030, 1, 1),
        EPOCH,
        MOMENT_MAX,
        MOMENT_MAX + timedelta(microseconds=1),
        datetime(1900, 1, 1, tzinfo=UTC),
        5,
    ]
)
priorities = st.sampled_from([0, -5, 1 << 63, True, 1.5])
extras = st.sampled_from([{}, {}, {}, {"ttl": 0}, {"key": ""}, {"headers": {"a": 1}}, {"seq": -1}, {"payload": "text"}])


@st.composite
def outgoings(draw: Any) -> Outgoing:
    given = {"payload": b"x" * draw(st.sampled_from([0, 100, 101])), "priority": draw(priorities)}
    return Outgoing(**{**given, "delay": draw(delays), "deliver_at": draw(moments), **draw(extras)})


@given(st.lists(outgoings(), min_size=1, max_size=3))
@example([Outgoing(b"", delay=1.0), Outgoing(b"", delay=float("nan"))])
def test_what_columns_let_pass_each_message_passes(messages: list[Outgoing]) -> None:
    if are_plain(messages, CONFIG) or are_scheduled(messages, CONFIG):
        for message in messages:
            check_one(message, CONFIG, "jobs")


def test_delays_and_moments_of_utc_are_checked_by_columns() -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    assert are_scheduled([Outgoing(b"x", delay=1), Outgoing(b"x", delay=0.5), Outgoing(b"x")], CONFIG)
    assert are_scheduled([Outgoing(b"x", deliver_at=moment), Outgoing(b"x")], CONFIG)
    assert not are_scheduled([Outgoing(b"x", deliver_at=moment, delay=1)], CONFIG)
    assert not are_scheduled([Outgoing(b"x", delay=1, key="k")], CONFIG)


@pytest.mark.parametrize("moment", [MOMENT_MAX + timedelta(milliseconds=1), EPOCH - timedelta(milliseconds=1)])
def test_moments_out_of_range_are_refused(moment: datetime) -> None:
    with pytest.raises(HeaplineError, match="out of range"):
        check_moment("deliver_at", moment)
    check_moment("deliver_at", MOMENT_MAX)
    with pytest.raises(BadRequest, match="no time zone"):
        check_moment("deliver_at", datetime(2030, 1, 1))
