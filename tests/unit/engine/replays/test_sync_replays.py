"""Replays of the blocking facade."""

from __future__ import annotations

import time

import pytest

import heapline
from heapline.testing import memory_broker_sync


def test_rows_batches_and_checkpoints_without_await() -> None:
    with memory_broker_sync() as hl:
        hl.create_topic("jobs")
        for number in range(5):
            hl.enqueue("jobs", b"%d" % number)
        assert [row.payload for row in hl.replay("jobs")] == [b"0", b"1", b"2", b"3", b"4"]
        assert sum(len(batch) for batch in hl.replay("jobs", batches=True, start=3)) == 2
        for row in hl.replay("jobs", checkpoint="mine"):
            if row.payload == b"2":
                break
        assert [row.payload for row in hl.replay("jobs", checkpoint="mine")] == [b"2", b"3", b"4"]
        with pytest.raises(heapline.BadRequest):
            hl.replay("jobs", mode="slow")


def test_replay_into_a_topic_without_await() -> None:
    with memory_broker_sync() as hl:
        for topic in ("jobs", "other"):
            hl.create_topic(topic)
        hl.enqueue("jobs", b"x")
        hl.start_replay("again", "jobs", into="other")
        deadline = time.monotonic() + 20
        while (info := hl.get_replay("again")).state == "running":
            assert time.monotonic() < deadline
        assert (info.state, info.replayed) == ("done", 1)
        assert hl.list_replays() == [info]
        assert hl.pop("other")[0].payload == b"x"
