"""Encoding of rows for the wire: columns match the rows, and invalid rows are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heapline.contract.check import instant_to_ms
from heapline.contract.config import TopicConfig
from heapline.contract.errors import HeaplineError
from heapline.contract.message import Outgoing, TopicInfo, from_ms
from heapline.engine.columns import check_one
from heapline.spark import enqueue_rows as outgoing
from heapline.spark.enqueue_rows import BadRow, TopicLimits, validate
from heapline.wire.codec import rows_of

CONFIGS = {"plain": TopicConfig(max_payload_bytes=20), "fair": TopicConfig(max_payload_bytes=30, fairness="keys")}
FACTS = {name: TopicLimits.of(TopicInfo(name=name, incarnation=1, config=c)) for name, c in CONFIGS.items()}
PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("value", pa.binary()), ("topic", pa.string()), ("priority", pa.int64()), ("key", pa.binary()),
        ("deliver_at", pa.timestamp("us", "UTC")), ("headers", PAIRS), ("idempotency_key", pa.string()),
        ("ttl", pa.float64()), ("fairness_key", pa.string()),
    ]
)  # fmt: skip


def known(names: Sequence[str]) -> Mapping[str, TopicLimits]:
    return {name: FACTS[name] for name in names if name in FACTS}


def sent(batch: Any, default: str | None = "plain") -> tuple[dict[str, list[Outgoing]], list[BadRow]]:
    """Return all messages to send, by topic, and the rejected rows."""
    good, bad = validate(batch, default, known)
    found: dict[str, list[Outgoing]] = {}
    for _, shares in good.parts():
        for topic, columns in shares:
            found.setdefault(topic, []).extend(rows_of(columns))
    return found, bad


# -- the model ---------------------------------------------------------------------------------------------------------


def naive(row: dict[str, Any]) -> tuple[str, Outgoing] | None:
    """Return the message of each row by the engine's own checks; None if it cannot be enqueued."""
    topic = row["topic"] if row["topic"] is not None else "plain"
    topic = topic.removeprefix("default/")
    if topic not in CONFIGS or row["value"] is None:
        return None
    try:
        names = [pair["key"] for pair in row["headers"] or ()]
        headers = {pair["key"]: pair["value"].decode() for pair in row["headers"] or ()} or None
        key = None if row["key"] is None else row["key"].decode()
        if len(set(names)) < len(names):
            return None
        message = Outgoing(
            row["value"], row["priority"] or 0, key, None, row["deliver_at"], headers, row["ttl"], None,
            row["idempotency_key"], None, None, row["fairness_key"],
        )  # fmt: skip
        check_one(message, CONFIGS[topic], topic)
        if message.deliver_at is not None:  # to the first millisecond that is not before it
            message = msgspec.structs.replace(message, deliver_at=from_ms(max(1, instant_to_ms(message.deliver_at))))
    except (HeaplineError, UnicodeDecodeError, AttributeError):
        return None
    return topic, message


rare = st.integers(0, 9).map(lambda n: n == 0)
moments = st.datetimes(datetime(1960, 1, 1), datetime(2300, 1, 1), timezones=st.just(UTC))
ROWS = st.fixed_dictionaries({
    "value": st.none() | st.binary(max_size=40),
    "topic": st.sampled_from([None, "plain", "fair", "default/fair", "nowhere"]),
    "priority": st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3),
    "key": st.none() | st.sampled_from([b"k", b"\xff", b"", "ä".encode(), b"x" * 4097]),
    "deliver_at": st.none() | moments,
    "headers": st.none() | st.lists(
        st.fixed_dictionaries({
            "key": st.sampled_from(["a", "b"]), "value": st.sampled_from([None, b"1", b"\xff", b"x" * 33_000])
        }), max_size=2,
    ),
    "idempotency_key": st.none() | st.sampled_from(["", "once", "y" * 4097]),
    "ttl": st.none() | st.floats() | st.just(3.5),
    "fairness_key": st.none() | st.just("me"),
})  # fmt: skip


@given(st.lists(ROWS, max_size=8), st.sampled_from([1, 2, 5000]))
@example([dict.fromkeys(SCHEMA.names) | {"value": b"x", "topic": None, "ttl": 1e-38}], 1)
def test_encoded_columns_match_the_rows(rows: list[dict[str, Any]], part_rows: int) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    wanted: dict[str, list[Outgoing]] = {}
    wrong = []
    for number, row in enumerate(rows):
        found = naive(row)
        if found is None:
            wrong.append(number)
        else:
            wanted.setdefault(found[0], []).append(found[1])
    before, outgoing.PART_ROWS = outgoing.PART_ROWS, part_rows
    try:
        got, bad = sent(batch)
    finally:
        outgoing.PART_ROWS = before
    assert got == wanted
    assert [row.row for row in bad] == wrong


# -- by example --------------------------------------------------------------------------------------------------------


def test_text_is_sent_as_utf8_and_delays_as_seconds() -> None:
    batch = pa.record_batch({
        "value": ["ä", "b"], "priority": pa.array([1, None], pa.int8()), "delay": pa.array([None, 3], pa.int32()),
        "headers": pa.array([[("n", "1")], None], pa.map_(pa.string(), pa.string())),
    })  # fmt: skip
    assert sent(batch) == (
        {"plain": [Outgoing("ä".encode(), 1, headers={"n": "1"}), Outgoing(b"b", 0, delay=3.0)]}, [],
    )  # fmt: skip


def test_sliced_batch_encodes_only_the_slice() -> None:
    batch = pa.record_batch({"value": [b"a", b"bb", b"", b"dddd"], "priority": [1, 2, 3, 4]}).slice(1, 2)
    assert sent(batch) == ({"plain": [Outgoing(b"bb", 2), Outgoing(b"", 3)]}, [])


def test_part_fits_into_a_segment_of_its_topic() -> None:
    config = TopicConfig(segment_bytes=1 << 20, max_payload_bytes=256 << 10, partitions=4)
    facts = TopicLimits.of(TopicInfo(name="t", incarnation=1, config=config))
    batch = pa.record_batch({"value": [bytes(size) for size in [100_000] * 30 + [250_000] * 5 + [1] * 9000]})
    good, bad = validate(batch, "t", lambda names: {"t": facts})
    parts = list(good.parts())
    assert bad == []
    assert sum(rows for rows, _ in parts) == batch.num_rows
    assert max(rows for rows, _ in parts) <= outgoing.PART_ROWS
    sizes = [sum(map(len, columns.payloads)) + 80 * len(columns) for _, ((_, columns),) in parts]
    assert max(sizes) < (1 << 20) - (64 << 10)


def test_bad_row_error_has_facts_but_no_payload() -> None:
    batch = pa.record_batch({
        "value": [None, b"secret" * 10, b"ok"], "topic": ["plain", "plain", None], "priority": [0, 0, 0],
    })  # fmt: skip
    found, bad = sent(batch, None)
    assert found == {}
    assert [(row.row, row.topic, row.reason) for row in bad] == [
        (0, "plain", "value is null"), (1, "plain", "value has 60 bytes; the topic allows at most 20"),
        (2, None, "topic is null"),
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e12])
def test_invalid_delay_is_a_bad_row(seconds: float) -> None:
    _, (bad,) = sent(pa.record_batch({"value": [b"x"], "delay": [seconds]}))
    assert bad.reason.startswith("delay must be a number of seconds")


def test_deliver_at_is_rounded_up_so_that_nothing_is_early() -> None:
    moment = datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    batch = pa.record_batch({"value": [b"x"], "deliver_at": pa.array([moment], pa.timestamp("us", "Europe/Berlin"))})
    later = moment.replace(microsecond=679_000)
    assert sent(batch)[0] == {"plain": [Outgoing(b"x", deliver_at=later)]}


def test_empty_batch_has_no_parts() -> None:
    assert sent(pa.RecordBatch.from_pylist([], schema=SCHEMA)) == ({}, [])
