"""Handmade lifecycles with the columns of the real ones, for the jobs that use them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

SCHEMA = (
    "topic string, partition int, message_id string, id bigint, priority bigint, enqueued_at timestamp, "
    "due_at timestamp, first_leased_at timestamp, last_leased_at timestamp, done_at timestamp, attempts int, "
    "retries int, lease_expiries int, wait_ms bigint, service_ms bigint, outcome string, reason string, "
    "batch_id string, payload_bytes bigint, enqueued_offset bigint, last_offset bigint"
)
START = datetime(2026, 11, 1, 12, tzinfo=UTC)


def at(ms: int) -> datetime:
    return START + timedelta(milliseconds=ms)


def lifecycle(
    number: int, enqueued: int, *, priority: int = 5, delay: int = 0, wait: int | None = 0, service: int | None = 10,
    retries: int = 0, expiries: int = 0, outcome: str = "acked", reason: str | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Times are in ms from START. Without a wait it was never leased, without a service time it is not done."""
    due = enqueued + delay
    leased = None if wait is None else at(due + wait)
    done = None if wait is None or service is None else at(due + wait + service)
    attempts = 0 if wait is None else 1 + retries + expiries
    return (
        "jobs", 0, f"{number:026d}", number, priority, at(enqueued), at(due), leased, leased, done, attempts, retries,
        expiries, wait, service if done else None, outcome, reason, None, 100, number, number,
    )  # fmt: skip
