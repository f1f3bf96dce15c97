"""Micro-batches of a stream: what they contain, what they wait for, where they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.spark.options import parse_options
from heapline.spark.read_plan import StreamPlan
from heapline.spark.topic_log import DataLost
from tests.unit.engine.rig import PATH, Rig, opened
from tests.unit.engine.test_maintenance import churn, reclaim
from tests.unit.spark.log_rig import read_work, source_of

Facts = dict[str, Any]


class Stream:
    """A stream as Spark drives one; `options` are given as to readStream."""

    def __init__(self, rig: Rig, **options: str) -> None:
        given = {"path": PATH, "startingOffsets": "earliest", **options}
        if not {"subscribe", "subscribePattern", "assign"} & given.keys():
            given["subscribe"] = "jobs"
        self.options = parse_options(given, streaming=True)
        self.rig = rig
        self.following = StreamPlan(source_of(rig), self.options)
        self.at = self.following.first()

    def next(self, now: float = 0.0, limited: bool = True) -> list[bytes] | None:
        """Return the values of the next micro-batch, or None if there is none yet."""
        limit = self.options.max_rows if limited else None
        end = self.following.next_end(self.at, limit, limited, now)
        if json.dumps(end) == json.dumps(self.at):
            return None
        work = self.following.plan(self.at, end)
        self.at = end
        table = read_work(self.rig, work, self.options)
        return sorted(table["value"].to_pylist())


@contextmanager
def followed(rig: Rig, **options: str) -> Iterator[Stream]:
    stream = Stream(rig, **options)
    yield stream
    stream.following.close()


async def test_stream_returns_every_message_once() -> None:
    async with opened(topic={"partitions": 3}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"a%d" % i, key=f"k{i}") for i in range(5)])
        with followed(rig) as stream:
            assert stream.next() == [b"a%d" % i for i in range(5)]
            assert stream.next() is None
            await rig.hl.enqueue("jobs", b"b")
            assert stream.next() == [b"b"]
            await rig.hl.ack(await rig.hl.pop("jobs", 10))
            assert stream.next() == []  # something happened, but nothing was enqueued
        with followed(rig, startingOffsets="latest") as stream:
            assert stream.next() is None


async def test_micro_batch_is_limited_and_every_partition_advances() -> None:
    async with opened(topic={"partitions": 4}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%03d" % i, key=f"k{i}") for i in range(100)])
        with followed(rig, maxOffsetsPerTrigger="30") as stream:
            batches = [stream.next() or [] for _ in range(4)]
            assert [len(batch) for batch in batches] == [30, 30, 30, 10]
            assert sorted(v for batch in batches for v in batch) == [b"%03d" % i for i in range(100)]
            assert stream.next() is None
        with followed(rig, maxOffsetsPerTrigger="30") as stream:
            assert len(stream.next(limited=False) or []) == 100  # an unlimited read gets everything


async def test_micro_batch_waits_for_min_rows_up_to_the_delay() -> None:
    async with opened() as rig:
        with followed(rig, minOffsetsPerTrigger="3", maxTriggerDelay="10s") as stream:
            assert stream.next(now=100.0) is None
            await rig.hl.enqueue("jobs", b"1")
            assert stream.next(now=101.0) is None
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"2"), Outgoing(b"3")])
            assert stream.next(now=102.0) == [b"1", b"2", b"3"]
            await rig.hl.enqueue("jobs", b"4")
            assert stream.next(now=111.9) is None
            assert stream.next(now=112.1) == [b"4"]


async def test_available_now_ends_at_the_end_of_the_log_at_its_start() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(5)])
        with followed(rig, maxOffsetsPerTrigger="2", minOffsetsPerTrigger="2") as stream:
            stream.following.stop_here()
            await rig.hl.enqueue("jobs", b"later")
            assert [stream.next() for _ in range(4)] == [[b"0", b"1"], [b"2", b"3"], [b"4"], None]


async def test_new_partitions_and_topics_are_read_from_their_beginning() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"old")
        with followed(rig, subscribePattern="jobs.*", startingOffsets="latest") as stream:
            await rig.hl.update_topic("jobs", partitions=3)
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=f"k{i}") for i in range(9)])
            assert stream.next(now=1.0) == [b"%d" % i for i in range(9)]
            await rig.topic("jobs-more")
            await rig.hl.enqueue("jobs-more", b"first there")
            assert stream.next(now=3.0) == [b"first there"]
            assert stream.next(now=5.0) is None


async def test_rows_reclaimed_since_the_checkpoint_are_data_loss() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        with followed(rig) as stream:
            begin = stream.at
        await churn(rig)
        await rig.hl.ack(await rig.hl.pop("jobs", 10))
        await reclaim(rig)
        with followed(rig) as stream:
            stream.at = begin
            with pytest.raises(DataLost, match="failOnDataLoss=false"):
                stream.next()
        with followed(rig, failOnDataLoss="false") as stream:
            stream.at = begin
            assert stream.next()


async def test_running_stream_holds_unread_rows() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x", priority=-1000)
        with followed(rig) as stream:
            end = stream.following.next_end(stream.at, None, True, 0.0)
            stream.following.plan(stream.at, end)
            await rig.hl.ack(await rig.hl.pop("jobs"))
            await churn(rig)
            await reclaim(rig)
            assert read_work(rig, stream.following.plan(stream.at, end), stream.options)["value"].to_pylist() == [b"x"]


async def test_recreated_topic_stops_the_stream() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        with followed(rig) as stream:
            stream.next()
            checkpoint = stream.at
        await rig.hl.delete_topic("jobs")
        await rig.topic()
        with followed(rig) as stream:
            stream.at = checkpoint
            with pytest.raises(DataLost, match="new checkpoint"):
                stream.next()


async def test_checkpoint_offsets_are_valid_starting_offsets() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await rig.hl.enqueue("jobs", b"x", key="a")
        with followed(rig) as stream:
            stream.next()
            await rig.hl.enqueue("jobs", b"y", key="b")
        with followed(rig, startingOffsets=json.dumps(stream.at)) as again:
            assert again.next() == [b"y"]


def test_stream_rejects_ending_offsets() -> None:
    with pytest.raises(BadRequest, match="omit endingOffsets"):
        parse_options({"path": "x", "subscribe": "jobs", "endingOffsets": "latest"}, streaming=True)


async def test_deleted_topic_stops_the_stream_unless_loss_is_allowed() -> None:
    async with opened() as rig:
        await rig.topic("jobs-2")
        await rig.hl.enqueue("jobs", b"a")
        await rig.hl.enqueue("jobs-2", b"b")
        with followed(rig, subscribe="jobs,jobs-2") as strict, followed(
            rig, subscribe="jobs,jobs-2", failOnDataLoss="false"
        ) as lenient:  # fmt: skip
            assert strict.next() == lenient.next() == [b"a", b"b"]
            await rig.hl.delete_topic("jobs-2")
            await rig.hl.enqueue("jobs", b"c")
            with pytest.raises(DataLost, match="'jobs-2' was deleted"):
                strict.next()
            assert lenient.next() == [b"c"]
            assert lenient.next() is None


async def test_log_that_ends_before_the_checkpoint_is_data_loss() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"a")
        for fails in ("true", "false"):
            with followed(rig, failOnDataLoss=fails) as stream:
                stream.at["jobs"]["0"] = 7
                if fails == "false":
                    assert stream.next() is None
                    continue
                with pytest.raises(DataLost, match="ends at 1, but rows up to 7 were already read"):
                    stream.next()
