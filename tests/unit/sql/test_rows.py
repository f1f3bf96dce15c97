"""New messages as rows: when they are due, when they expire, and how they are ordered."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, PayloadTooLarge, Unsupported
from heapline.contract.message import Outgoing
from heapline.contract.messages import Enqueue, pack_messages
from heapline.core.dedup.idempotency import key_hash
from heapline.core.order import Ordering
from heapline.sql.rows import NewRow, check_batch_bytes, check_rows, place_rows, row_of_command, rows_of_batch

NOW = 1_800_000_000_000
ID = 5 << 22
OPTIONS: dict[str, Any] = {
    "priority": -3, "key": "k", "delay": 1.5, "headers": {"a": "b"}, "ttl": 2.0, "max_retries": 4,
    "idempotency_key": "i", "idempotency_scope": "until_ack",
}  # fmt: skip


def test_enqueue_and_batch_give_the_same_rows() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    for options in (OPTIONS, {}, {"deliver_at": at}, {"idempotency_key": "i"}, {"priority": 7, "ttl": 0.0004}):
        single = row_of_command(Enqueue("jobs", b"x", **options))
        (batched,) = rows_of_batch(pack_messages([Outgoing(b"x", **options)]))
        assert single == batched


def test_message_is_ready_unless_its_time_is_later() -> None:
    rows = [NewRow(b"now"), NewRow(b"past", at_ms=NOW - 5), NewRow(b"soon", delay_ms=1), NewRow(b"at", at_ms=NOW + 9)]
    ready, delayed = place_rows(rows, [1, 2, 3, 4], Ordering("min"), NOW)
    assert (ready.payloads, ready.dues) == ([b"now", b"past"], [NOW, NOW])
    assert (delayed.payloads, delayed.dues) == ([b"soon", b"at"], [NOW + 1, NOW + 9])


def test_time_to_live_counts_from_the_due_time() -> None:
    _, delayed = place_rows([NewRow(b"x", delay_ms=50, ttl_ms=7)], [1], Ordering("min"), NOW)
    assert (delayed.ttls, delayed.expires) == ([7], [NOW + 57])


@pytest.mark.parametrize(("mode", "key"), [("min", -(1 << 63)), ("max", (1 << 63) - 1)])
def test_smallest_key_is_served_first_in_both_modes(mode: str, key: int) -> None:
    ready, _ = place_rows([NewRow(b"x", priority=-(1 << 63))], [ID], Ordering(mode), NOW)
    assert (ready.keys, ready.priorities) == ([key], [-(1 << 63)])


def test_only_keys_that_end_with_the_message_are_kept_in_its_row() -> None:
    rows = [NewRow(b"x", idempotency_key="i", scope=scope) for scope in range(3)]
    ready, _ = place_rows(rows, [1, 2, 3], Ordering("min"), NOW)
    assert ready.scopes == [None, 1, 2]
    assert ready.hashes == [None, key_hash("i"), key_hash("i")]


def test_row_that_the_topic_rejects_has_its_own_error() -> None:
    rows = [NewRow(b"xx"), NewRow(b"xxx"), NewRow(b"x", fairness_key="f")]
    errors = check_rows(rows, TopicConfig(max_payload_bytes=2), "jobs", atomic=False)
    assert {row: type(error) for row, error in errors.items()} == {1: PayloadTooLarge, 2: Unsupported}
    with pytest.raises(PayloadTooLarge):
        check_rows(rows, TopicConfig(max_payload_bytes=2), "jobs", atomic=True)


def test_atomic_batch_has_a_limit_in_bytes() -> None:
    check_batch_bytes([NewRow(b"x" * (1 << 20))] * 14)
    with pytest.raises(BadRequest, match="atomic=False"):
        check_batch_bytes([NewRow(b"x" * (1 << 20))] * 15)
