"""The audit job: proves or refutes from the events of topics that the queue kept its promises.

It needs one pass over the events and two shuffles, however many events there are. The tasks that read events convert
them to numbers and pack those of many messages into one row, beside a few rows about whole topics (steps.py). These
rows stay on Spark's disks until the audit ends. The driver first derives from the few rows what all
tasks must know. Then the steps of each message are brought together (first shuffle) and complete messages are judged,
many at a time (histories.py). The times at which messages were ready go on by topic (second shuffle), where leases are
ranked (ranks.py). The driver receives counts and a few examples.

A task that judges holds its share of the messages in memory, about 100 bytes per event and at least 1/256 of all
messages. A task that ranks holds about 70 bytes for each time that a message of its topic became ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, partial, reduce
from time import perf_counter
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceReader, InputPartition

from heapline.contract.config import canonical_topic
from heapline.contract.errors import BadRequest
from heapline.contract.ids import suffix_of, to_ulid
from heapline.spark.audit import histories as H
from heapline.spark.audit import steps as S
from heapline.spark.audit.facts import Balances, BrokerState, Facts, RankRule, broker_state, facts_of
from heapline.spark.audit.ranks import Intervals
from heapline.spark.audit.report import AuditResult, Example, Ranked, make_report, rank
from heapline.spark.jobs.lake import Offsets, journal_rows, topic_rows
from heapline.spark.options import parse_options
from heapline.spark.source import BatchReader, HeaplineSource
from heapline.spark.target import client_of, resolve, server_target

EXAMPLES = 10
ROWS_PER_TASK = 1_500_000
PIECES = 4  # the minimum number of tasks that read a journal
#: Rows that tasks return: encoded Findings, columns of Intervals, or an encoded Ranked.
_ROW_DDL = "what int, topic int, blob binary"
_ROW_SCHEMA = pa.schema([("what", pa.int32()), ("topic", pa.int32()), ("blob", pa.binary())])
_FOUND, _READY, _RANKED = range(3)


def audit(
    spark: Any,
    where: Mapping[str, str] | None = None,
    topic: str | Sequence[str] = "",
    *,
    lake: str | None = None,
    start: Offsets | None = None,
    end: Offsets | None = None,
    opening: Any = None,
    closing: Balances | None = None,
    configs: Mapping[str, Any] | None = None,
    examples: int = EXAMPLES,
) -> AuditResult:
    """Audit a topic, or several together, in which case batches are judged across all of them.

    The events come from `where` (options of the format `heapline`), from a `lake`, or from both. `start` and `end` are
    offsets by partition, for one topic. `opening` is a DataFrame of lifecycles: the messages that existed at the start.
    Without it, older messages are judged as far as the events allow. Settings and the closing balance are fetched from
    the server; without a server, `configs` and `closing` can provide them.
    """
    started = perf_counter()
    names = [canonical_topic(name) for name in ([topic] if isinstance(topic, str) else topic)]
    if not all(names) or not names:
        raise BadRequest("no topic to audit")
    if (start or end) and (len(names) > 1 or lake is not None):
        raise BadRequest("start and end are offsets in the journal of a single topic")
    broker = broker_state(where, names) if where is not None else BrokerState({}, {}, {})
    if end is not None:
        broker = broker._replace(ends={names[0]: dict(end)}, closing={})
    packed = _read(spark, where, names, lake, start, broker.ends)
    closing = closing if closing is not None else broker.closing
    result = _audited(packed, names, opening, closing, {**broker.configs, **(configs or {})}, examples, started)
    return _with_ulids(result, lambda name: topic_rows(spark, where, lake, name, columns=("topic", "message_id")))


def record(where: Mapping[str, str], result: AuditResult, until: datetime) -> None:
    """Keep the result with each audited topic, on the server that `where` names. `until` is when the audit began."""
    wrong = {check.name: check.wrong for check in result.checks}
    with client_of(server_target(where)) as client:
        for topic in result.topics:
            client.record_audit(
                topic,
                until,
                result.messages,
                lost=wrong["none_lost"],
                doubled=wrong["one_holder"] + wrong["stays_over"],
                early=wrong["not_early"],
                refuted=list(result.refuted),
                topics=len(result.topics),
            )


def audit_events(
    events: Any,
    *,
    opening: Any = None,
    closing: Balances | None = None,
    configs: Mapping[str, Any] | None = None,
    examples: int = EXAMPLES,
) -> AuditResult:
    """Audit a DataFrame with the columns of the view `events`, of whatever topics it contains."""
    result = _audited(_packed(events), None, opening, closing, configs or {}, examples, perf_counter())
    return _with_ulids(result, lambda name: events)


# -- reading -----------------------------------------------------------------------------------------------------------


class PackedEvents(HeaplineSource):
    """A data source that packs events where they are read. It has the options of `heapline`."""

    @classmethod
    def name(cls) -> str:
        return "heapline_packed_events"

    def schema(self) -> str:
        return S.PACKED_DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return PackingReader(resolve(parse_options(self.options, streaming=False)))


class PackingReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        return S.pack(super().read(partition))


def _read(
    spark: Any,
    where: Mapping[str, str] | None,
    names: Sequence[str],
    lake: str | None,
    start: Offsets | None,
    ends: Mapping[str, Offsets],
) -> Any:
    if lake is not None:
        parts = [_packed(topic_rows(spark, where, lake, name, columns=S.NEEDS)) for name in names]
    elif where is None:
        raise BadRequest("no source of events; give options of the format heapline, or a lake")
    else:
        spark.dataSource.register(PackedEvents)
        where = {"minPartitions": str(PIECES), **where}
        read = partial(journal_rows, spark, where, columns=S.NEEDS, start=start, source=PackedEvents.name())
        parts = [read(name, end=ends.get(name)) for name in names]
    return reduce(lambda a, b: a.unionByName(b), parts)


def _packed(events: Any) -> Any:
    return events.select(*S.NEEDS).mapInArrow(S.pack, S.PACKED_DDL)


def _audited(
    packed: Any,
    names: Sequence[str] | None,
    opening: Any,
    closing: Balances | None,
    configs: Mapping[str, Any],
    examples: int,
    started: float,
) -> AuditResult:
    packed = packed.persist(StorageLevel.DISK_ONLY)
    try:
        blobs = packed.where(packed["what"] == S.MARK_ROWS).select("blob").toArrow()["blob"]
        marks, reaches = S.merge_marks([S.from_blob(blob.as_buffer()) for blob in blobs])
        names = sorted({reach.topic for reach in reaches}) if names is None else names
        facts = facts_of(names, marks, reaches, configs, closing, opening is not None)
        result = _judge(packed.where(packed["what"] == S.STEP_ROWS), opening, facts, examples)
    finally:
        packed.unpersist()
    return dataclasses.replace(result, seconds=round(perf_counter() - started, 3))


def _with_ulids(result: AuditResult, events_of_topic: Callable[[str], Any]) -> AuditResult:
    """Replace the integers in the examples by ULIDs.

    The steps have no id suffix, so it is read from one event of each topic that has an example.
    """

    @cache
    def suffix_of_topic(topic: str) -> int | None:
        found = events_of_topic(topic).where((F.col("topic") == topic) & F.col("message_id").isNotNull())
        row = found.select("message_id").first()
        return None if row is None else suffix_of(row[0])

    def with_ulid(example: Example) -> Example:
        if example.message_id is None or (suffix := suffix_of_topic(example.topic)) is None:
            return example
        return dataclasses.replace(example, message_id=to_ulid(int(example.message_id), suffix))

    checks = [dataclasses.replace(check, examples=tuple(map(with_ulid, check.examples))) for check in result.checks]
    return dataclasses.replace(result, checks=tuple(checks))


# -- judging -----------------------------------------------------------------------------------------------------------


def _judge(packed: Any, opening: Any, facts: Facts, examples: int) -> AuditResult:
    names = [topic.name for topic in facts.topics]
    if opening is not None:
        packed = packed.unionByName(_opening(opening, names).mapInArrow(partial(S.pack_steps, names), S.PACKED_DDL))
    events = sum(reach.rows for reach in facts.reaches)
    tasks = min(S.BUCKETS, max(2, -(-events // ROWS_PER_TASK)))
    judged = packed.repartitionById(tasks, packed["bucket"] % tasks).select("blob")
    judged = judged.mapInArrow(partial(_judge_task, facts.topics, examples), _ROW_DDL)
    if any(rule is not None for rule in facts.rules):
        ranking = partial(_rank_task, facts.rules, examples)
        judged = judged.repartition(len(names), "topic").mapInArrow(ranking, _ROW_DDL)
    rows = judged.where(judged["what"] != _READY).toArrow().to_pylist()
    findings = [msgspec.msgpack.decode(row["blob"], type=H.Findings) for row in rows if row["what"] == _FOUND]
    ranked = [msgspec.msgpack.decode(row["blob"], type=Ranked) for row in rows if row["what"] == _RANKED]
    return make_report(facts, findings, ranked, examples)


def _number(names: Sequence[str]) -> Any:
    if len(names) == 1:
        return F.lit(0)
    return F.coalesce(*(F.when(F.col("topic") == name, number) for number, name in enumerate(names)))


def _opening(rows: Any, names: Sequence[str]) -> Any:
    """Return the messages that existed at the start, as steps before all others."""
    columns = {
        "topic": _number(names),
        "id": F.col("id"),
        "offset": F.lit(-1),
        "unit": F.lit(-1),
        "step": F.coalesce(*(F.when(F.col("outcome") == word, number) for word, number in S.OPENINGS.items())),
        "at": F.lit(0),
        "due": F.coalesce(F.unix_millis("ready_at"), F.lit(S.NO_DUE)),
        "wall": F.lit(1),
        "seq": F.lit(S.NO_SEQ),
        "key": F.coalesce("priority", F.lit(S.NO_KEY)),
        "since": F.coalesce(F.unix_millis("enqueued_at"), F.lit(0)),
    }
    there = F.col("topic").isin(*names) & ~F.col("is_over")
    return rows.where(there).select(*(column.cast("bigint").alias(name) for name, column in columns.items()))


def _judge_task(topics: Sequence[H.Topic], examples: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Judge the messages that a task received, topic by topic."""
    steps = S.unpack_steps(batches, {topic.name: number for number, topic in enumerate(topics)})
    for number, topic in enumerate(topics):
        mine = steps if len(topics) == 1 else steps.take(steps.topic == number)
        yield from _as_rows(H.judge(mine, number, topic, examples))


def _as_rows(found: H.Findings) -> Iterator[Any]:
    intervals, found.intervals = found.intervals, None
    yield _row(_FOUND, found.topic, msgspec.msgpack.encode(found))
    if intervals is not None:
        for blob in S.pack_columns(intervals):
            yield _row(_READY, found.topic, blob)


def _row(what: int, topic: int, blob: bytes) -> Any:
    return pa.RecordBatch.from_pylist([{"what": what, "topic": topic, "blob": blob}], schema=_ROW_SCHEMA)


def _rank_task(rules: Sequence[RankRule | None], examples: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Rank the leases of the topics that a task received, and pass on all other rows."""
    ready: dict[int, list[Any]] = {}
    for batch in batches:
        is_ready = pc.equal(batch["what"], _READY)
        yield batch.filter(pc.invert(is_ready))
        rows = batch.filter(is_ready)
        for number, blob in zip(rows["topic"].to_pylist(), rows["blob"], strict=True):
            ready.setdefault(number, []).append(blob.as_buffer())
    for number, blobs in ready.items():
        rule = rules[number]
        if rule is None:
            continue
        found = rank(Intervals(*S.unpack_columns(blobs, Intervals._fields)), number, rule, examples)
        yield _row(_RANKED, number, msgspec.msgpack.encode(found))
