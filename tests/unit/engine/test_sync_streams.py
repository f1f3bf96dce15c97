"""Subscriptions for code that does not await: plain iteration, acks that block, and callbacks."""

from __future__ import annotations

from typing import Any

import pytest

import heapline
from heapline.testing import SyncMemoryBroker


@pytest.fixture
def hl() -> Any:
    with SyncMemoryBroker() as hl:
        hl.create_topic("jobs")
        hl.enqueue_batch("jobs", [heapline.Outgoing(str(n).encode()) for n in range(6)])
        yield hl


def test_rows_are_iterated_over_acked_and_nacked(hl: Any) -> None:
    backoff = {"base": 0.0, "max": 0.0, "jitter": 0.0}
    seen = []
    with hl.subscribe("jobs", group="g", member="m", backoff=backoff) as rows:
        assert (rows.topic, rows.group, rows.member, rows.partitions) == ("jobs", "g", "m", [0])
        for row in rows:
            seen.append((row.payload, row.attempts))
            if row.payload == b"2" and row.attempts == 1:
                row.nack("once more")
            else:
                row.ack()
            if len(seen) == 7:
                break
    assert sorted(seen) == sorted([(str(n).encode(), 1) for n in range(6)] + [(b"2", 2)])
    assert hl.get_group("jobs", "g").lag == 0
    assert hl.get_group("jobs", "g").members == {}


def test_batches_and_their_rows_are_acked_together(hl: Any) -> None:
    reported: list[list[int]] = []
    with hl.subscribe("jobs", group="g", batches=True, on_assigned=reported.append) as batches:
        batch = next(iter(batches))
        assert (len(batch), list(batch.payloads)[:2]) == (6, [b"0", b"1"])
        batches.ack(batch.messages()[:2])
        assert hl.get_group("jobs", "g").lag == 4
        batches.ack({batch.partition: batch.offsets[2:3].tolist()})
        batch.ack()
    assert reported == [[0]]
    assert hl.get_group("jobs", "g").lag == 0


def test_rejections_are_raised_when_a_subscription_begins(hl: Any) -> None:
    with pytest.raises(heapline.TopicNotFound):
        hl.subscribe("none", group="g").__enter__()
    hl.close()
    with pytest.raises(heapline.Closed):
        hl.subscribe("jobs", group="g")


def test_call_made_in_a_hook_is_refused_instead_of_deadlocking(hl: Any) -> None:
    with (
        pytest.raises(heapline.BadRequest, match="another one"),
        hl.subscribe("jobs", group="g", on_assigned=lambda partitions: hl.stats("jobs")),
    ):
        pass


def test_subscription_of_a_closed_broker_can_be_closed(hl: Any) -> None:
    with hl.subscribe("jobs", group="g"):
        hl.close()
