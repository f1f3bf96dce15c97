"""A real Spark writes to a real server: each row becomes one message, whatever fails or is repeated."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS

pytestmark = MARKS


class Server:
    """A server process, a client that bypasses Spark, and a new topic for each test."""

    def __init__(self, process: Process, data: Path) -> None:
        self.where = {"heapline.url": process.target, "heapline.api_key_file": str(data / "admin.key")}
        self.hl: Any = heapline.connect_sync(process.target, api_key=(data / "admin.key").read_text().strip())
        self._topics = 0

    def topic(self, **config: Any) -> str:
        self._topics += 1
        self.hl.create_topic(f"t{self._topics}", partitions=2, **config)
        return f"t{self._topics}"

    def taken(self, topic: str) -> Counter[str]:
        found: Counter[str] = Counter()
        while messages := self.hl.pop(topic, 1000):
            found.update(m.payload.decode() for m in messages)
            self.hl.ack(messages)
        return found

    def prepared(self, topic: str) -> int:
        return sum(p.prepared for p in self.hl.stats(topic).partitions)

    def sinks(self) -> dict[str, int]:
        return {sink.name: sink.version for sink in self.hl.list_sinks()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("sink") / "data"
    with asyncio.Runner() as runner:
        process = Process(data)
        runner.run(process.__aenter__())
        try:
            with Server(process, data).hl as hl:
                made = Server(process, data)
                made.hl = hl
                yield made
        finally:
            runner.run(process.__aexit__())


def save(df: Any, server: Server, topic: str | None, **options: str) -> None:
    writer = df.write.format("heapline").options(**server.where).options(**options).mode("append")
    (writer if topic is None else writer.option("topic", topic)).save()


def numbers(spark: Any, count: int, tasks: int = 3) -> Any:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) as value")


def wanted(count: int) -> Counter[str]:
    return Counter(str(i) for i in range(count))


def test_written_rows_are_messages_with_all_columns(spark: Any, server: Server) -> None:
    topic = server.topic(fairness="keys")
    df = spark.range(0, 6, 1, 2).selectExpr(
        "cast(cast(id as string) as binary) as value", "cast(id as int) as priority", "concat('k', id % 2) as key",
        "if(id = 5, timestamp'2099-01-01 00:00:00', null) as deliver_at", "map('n', cast(id as string)) as headers",
        "concat('once-', id) as idempotency_key", "3600.5 as ttl", "'me' as fairness_key",
    )  # fmt: skip
    save(df, server, topic)
    save(df, server, topic)  # according to the idempotency keys, these are the same
    messages = server.hl.pop(topic, 100)
    facts = sorted((m.payload, m.priority, m.key, m.headers, m.fairness_key) for m in messages)
    assert facts == [(b"%d" % i, i, f"k{i % 2}", {"n": str(i)}, "me") for i in range(5)]
    assert server.hl.stats(topic).delayed == 1
    server.hl.ack(messages)


def test_rows_go_to_the_topics_they_name(spark: Any, server: Server) -> None:
    one, two = server.topic(), server.topic()
    df = numbers(spark, 3000).selectExpr("value", f"if(value < '5', '{one}', '{two}') as topic")
    save(df, server, None)
    found = server.taken(one), server.taken(two)
    assert found[0] + found[1] == wanted(3000)
    assert max(found[0]) < "5" <= min(found[1])


def test_retried_task_duplicates_nothing(spark: Any, server: Server, tmp_path: Path) -> None:
    topic, mark = server.topic(), str(tmp_path / "thrown")

    def throw_once(batches: Any) -> Any:
        for number, batch in enumerate(batches):
            if number == 1 and not os.path.exists(mark):
                Path(mark).touch()
                raise RuntimeError("on purpose")
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "6000")
    try:
        save(numbers(spark, 40_000, 2).mapInArrow(throw_once, "value string"), server, topic)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert os.path.exists(mark)
    assert server.taken(topic) == wanted(40_000)
    assert server.prepared(topic) == 0


def test_repeated_transaction_is_written_once(spark: Any, server: Server) -> None:
    topic = server.topic()
    for version in ("0", "0", "1", "0"):
        save(numbers(spark, 100), server, topic, txnAppId="load", txnVersion=version)
    assert server.taken(topic) == wanted(100) + wanted(100)
    assert server.prepared(topic) == 0
    assert server.sinks()[f"txn:load@{topic}"] == 1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files that a stream reads, one per batch."""
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def feed(source: Path, number: int, rows: range) -> None:
    (source / f"{number}.txt").write_text("".join(f"{i}\n" for i in rows))


def stream(spark: Any, source: Path) -> Any:
    return spark.readStream.option("maxFilesPerTrigger", "1").text(str(source))


def run(df: Any, server: Server, topic: str, checkpoint: Path) -> str:
    writer = df.writeStream.format("heapline").options(**server.where).option("topic", topic)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return str(query.id)


def test_replayed_last_batch_of_a_stream_is_written_once(
    spark: Any, server: Server, source: Path, tmp_path: Path
) -> None:
    topic, checkpoint = server.topic(), tmp_path / "checkpoint"
    for number in range(3):
        feed(source, number, range(number * 1000, number * 1000 + 1000))
    query = run(stream(spark, source), server, topic, checkpoint)
    assert server.sinks()[f"query:{query}"] == 2
    assert server.hl.stats(topic).ready == 3000
    for crumb in checkpoint.glob("commits/*2*"):  # as if it had been killed before Spark recorded its commit
        crumb.unlink()
    for crumb in checkpoint.glob("commits/.*2*"):
        crumb.unlink()
    feed(source, 3, range(3000, 4000))
    assert run(stream(spark, source), server, topic, checkpoint) == query
    assert server.sinks()[f"query:{query}"] == 3
    assert server.taken(topic) == wanted(4000)
    assert server.prepared(topic) == 0


def test_foreach_batch_can_write_two_transactions(spark: Any, server: Server, source: Path, tmp_path: Path) -> None:
    one, two, checkpoint = server.topic(), server.topic(), tmp_path / "checkpoint"
    feed(source, 0, range(500))

    def both(df: Any, number: int) -> None:
        for topic in (one, two):
            save(df, server, topic, txnAppId="both", txnVersion=str(number))

    for _ in range(2):
        query = stream(spark, source).writeStream.foreachBatch(both).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()
        for crumb in checkpoint.glob("commits/*"):
            crumb.unlink()
    assert server.taken(one) == server.taken(two) == wanted(500)


def test_bad_rows_fail_the_batch_or_go_to_bad_records_path(spark: Any, server: Server, tmp_path: Path) -> None:
    topic = server.topic(segment_bytes=1 << 20, max_payload_bytes=1000)
    df = spark.range(0, 20, 1, 2).selectExpr(
        "case when id = 3 then null when id = 13 then repeat('secret', 1000) else cast(id as string) end as value",
        f"if(id = 7, 'nowhere', '{topic}') as topic",
    )  # fmt: skip
    with pytest.raises(Exception, match="cannot be enqueued, so nothing of the batch is") as caught:
        save(df, server, None)
    assert "secret" not in str(caught.value)
    assert (server.taken(topic), server.prepared(topic)) == (Counter(), 0)
    aside = tmp_path / "bad"
    save(df, server, None, badRecordsPath=str(aside), txnAppId="aside", txnVersion="0")
    save(df, server, None, badRecordsPath=str(aside), txnAppId="aside", txnVersion="0")
    assert server.taken(topic) == wanted(20) - Counter(["3", "7", "13"])
    found = spark.read.parquet(str(aside)).orderBy("_reason").collect()
    assert [row["_reason"] for row in found] == [
        "topic 'nowhere' does not exist", "value has 6000 bytes; the topic allows at most 1000", "value is null",
    ]  # fmt: skip
    assert not list((aside / "_staging").rglob("*.parquet"))


def test_mistakes_are_rejected_before_anything_is_written(spark: Any, server: Server) -> None:
    writer = numbers(spark, 1).write.format("heapline").options(**server.where).option("topic", "t1")
    with pytest.raises(Exception, match='use "append"'):
        writer.mode("overwrite").save()
    with pytest.raises(Exception, match="only the server writes to a data directory") as caught:
        writer.mode("append").option("path", "data").save()
    assert "hl_" not in str(caught.value)


def test_spark_reschedules_and_cancels_messages(spark: Any, server: Server) -> None:
    topic = server.topic()
    save(numbers(spark, 60, 1), server, topic)
    held = server.hl.pop(topic, 5)
    waiting = [(m.message_id, m.id, m.payload.decode()) for m in server.hl.peek(topic, 100)]
    assert len(waiting) == 55
    df = spark.createDataFrame(
        [*waiting, (held[0].message_id, held[0].id, "leased")], "message_id string, id long, v string"
    )
    urgent = df.selectExpr("message_id", "if(v = '42', -100, 0) as priority", f"'{topic}' as topic")
    save(urgent, server, None, operation="reschedule")
    (first,) = server.hl.pop(topic)
    assert first.payload == b"42"
    server.hl.ack([*held, first])
    gone = df.where("v not in ('50', '51')").select("id")
    with pytest.raises(Exception, match="failOnMissing=false"):
        save(gone, server, topic, operation="cancel", failOnMissing="true")
    save(gone, server, topic, operation="cancel")
    assert server.taken(topic) == Counter(["50", "51"])
