"""The audit: proves or refutes from the events of topics that the queue kept its promises.

One pass over the events and two shuffles, however many there are. Whoever reads them makes numbers of them and packs
those of many messages into one row (auditing/packing.py), beside a few rows of what concerns whole topics
(auditing/gathering.py). These rows are kept on Spark's disks until the audit is over: the driver first makes of the few
what all tasks must know; then the steps of each message come together (first shuffle), and whole messages are judged,
many at once (auditing/histories.py); what was ready when goes on by topic (second shuffle), where leases are ranked
(auditing/ranks.py). Back come counts and a few examples.

A task that judges holds its share of the messages in memory, some 100 bytes an event: a 256th of them at least. One
that ranks holds some 70 bytes for each time that a message of its topic was ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from heapline.errors import BadRequest
from heapline.spark.jobs.auditing import histories as H
from heapline.spark.jobs.auditing import steps as S
from heapline.spark.jobs.auditing.concluding import Known, Ordered, Ranked, Standing, conclude, known, rank
from heapline.spark.jobs.auditing.gathering import put_together
from heapline.spark.jobs.auditing.outside import Outside, ask
from heapline.spark.jobs.auditing.packing import (
    BUCKETS,
    MARKS,
    PACKED_DDL,
    STEPS,
    from_blob,
    pack,
    pack_columns,
    pack_steps,
    unpack_columns,
    unpack_steps,
)
from heapline.spark.jobs.auditing.ranks import Intervals
from heapline.spark.jobs.auditing.verdicts import AuditResult
from heapline.spark.jobs.inputs import Offsets, events_of, journal_events
from heapline.spark.options import plain_topic

EXAMPLES = 10
ROWS_A_TASK = 1_500_000
PIECES = 4  # that a journal is read in at least
#: What tasks hand on: kind of row, and numbers that mean what the kind says; or many of those as one value.
_ROW = ("what", "topic", "id", "key", "a", "b", "c", "d", "e")
_ROW_NAMES = ", ".join(f"{name} bigint" for name in _ROW) + ", blob binary"
_ROW_SCHEMA = pa.schema([*((name, pa.int64()) for name in _ROW), ("blob", pa.binary())])
_COMPLAINTS, _EXAMPLE, _STANDING, _PURGED, _TOTALS, _READY, _RANKED, _RANK_EXAMPLE = range(8)


def audit(
    spark: Any, where: Mapping[str, str] | None = None, topic: str | Sequence[str] = "", *, lake: str | None = None,
    start: Offsets | None = None, end: Offsets | None = None, opening: Any = None,
    closing: Mapping[str, Mapping[int, Standing]] | None = None, configs: Mapping[str, Any] | None = None,
    examples: int = EXAMPLES,
) -> AuditResult:  # fmt: skip
    """Audit a topic, or several at once: then batches are judged over all of them.

    The events come from `where` (options of the format `heapline`), from a `lake`, or from both. `start` and `end` are
    offsets by partition, for one topic. `opening` is a DataFrame of lifecycles: the messages that were there at the
    start; without it, messages that began earlier are judged as far as the events tell. A server is asked for settings
    and for the closing balance; else `configs` and `closing` may say them.
    """
    began = perf_counter()
    names = [plain_topic(name) for name in ([topic] if isinstance(topic, str) else topic)]
    if not all(names) or not names:
        raise BadRequest("say which topic is to be audited")
    if (start or end) and (len(names) > 1 or lake is not None):
        raise BadRequest("offsets say where to start and end in the journal of one topic")
    outside = ask(where, names) if where is not None else Outside({}, {}, {}, {})
    if end is not None:
        outside = outside._replace(ends={names[0]: dict(end)}, closing={})
    asked = {**outside.configs, **(configs or {})}

    packed = _read(spark, where, names, lake, start, outside.ends)
    closing = closing if closing is not None else outside.closing
    return _audited(packed, names, opening, closing, asked, examples, began)


def audit_events(
    events: Any, *, opening: Any = None, closing: Mapping[str, Mapping[int, Standing]] | None = None,
    configs: Mapping[str, Any] | None = None, examples: int = EXAMPLES,
) -> AuditResult:  # fmt: skip
    """The same of a DataFrame with the columns of the view `events`, of whatever topics are in it."""
    return _audited(_packed(events), None, opening, closing, configs or {}, examples, perf_counter())


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(
    spark: Any, where: Mapping[str, str] | None, names: Sequence[str], lake: str | None, start: Offsets | None,
    ends: Mapping[str, Offsets],
) -> Any:  # fmt: skip
    if lake is not None:
        parts = [_packed(events_of(spark, where, lake, name, columns=S.NEEDS)) for name in names]
    elif where is None:
        raise BadRequest("say where the events are: options of the format heapline, or a lake")
    else:
        from heapline.spark.jobs.auditing.source import PackedEvents

        spark.dataSource.register(PackedEvents)
        where = {"minPartitions": str(PIECES), **where}
        read = partial(journal_events, spark, where, columns=S.NEEDS, start=start, source=PackedEvents.name())
        parts = [read(name, end=ends.get(name)) for name in names]
    return reduce(lambda one, other: one.unionByName(other), parts)


def _packed(events: Any) -> Any:
    return events.select(*S.NEEDS).mapInArrow(pack, PACKED_DDL)


def _audited(
    packed: Any, names: Sequence[str] | None, opening: Any, closing: Mapping[str, Mapping[int, Standing]] | None,
    configs: Mapping[str, Any], examples: int, began: float,
) -> AuditResult:  # fmt: skip
    from pyspark import StorageLevel

    packed = packed.persist(StorageLevel.DISK_ONLY)
    try:
        told = packed.where(packed["what"] == MARKS).select("blob").toArrow()["blob"]
        marks, reaches = put_together([from_blob(blob.as_buffer()) for blob in told])
        names = sorted({reach.topic for reach in reaches}) if names is None else names
        facts = known(names, marks, reaches, configs, closing, opening is not None)
        result = _judge(packed.where(packed["what"] == STEPS), opening, facts, examples)
    finally:
        packed.unpersist()
    return dataclasses.replace(result, seconds=round(perf_counter() - began, 3))


# -- judging -----------------------------------------------------------------------------------------------------------


def _judge(packed: Any, opening: Any, facts: Known, examples: int) -> AuditResult:
    names = [topic.name for topic in facts.topics]
    if opening is not None:
        packed = packed.unionByName(_opening(opening, names).mapInArrow(partial(pack_steps, names), PACKED_DDL))
    rows = sum(reach.rows for reach in facts.reaches)
    tasks = min(BUCKETS, max(2, -(-rows // ROWS_A_TASK)))
    judged = packed.repartitionById(tasks, packed["bucket"] % tasks).select("blob")
    judged = judged.mapInArrow(partial(_look, facts.topics, examples), _ROW_NAMES)
    if any(order is not None for order in facts.orders):
        judged = judged.repartition(len(names), "topic").mapInArrow(partial(_rank, facts.orders, examples), _ROW_NAMES)
    return _told(facts, judged.drop("blob").toArrow(), examples)


def _number(names: Sequence[str]) -> Any:
    from pyspark.sql import functions as F

    if len(names) == 1:
        return F.lit(0)
    return F.coalesce(*(F.when(F.col("topic") == name, number) for number, name in enumerate(names)))


def _opening(rows: Any, names: Sequence[str]) -> Any:
    """Messages that were there, as steps before all others."""
    from pyspark.sql import functions as F

    step = F.coalesce(*(F.when(F.col("outcome") == word, number) for word, number in S.OPENINGS.items()))
    found = {
        "topic": _number(names), "id": F.col("id"), "offset": F.lit(-1), "unit": F.lit(-1), "step": step,
        "at": F.lit(0), "due": F.coalesce(F.unix_millis("ready_at"), F.lit(S.NO_DUE)), "wall": F.lit(1),
        "seq": F.lit(S.NO_SEQ), "key": F.coalesce("priority", F.lit(S.NO_KEY)),
        "since": F.coalesce(F.unix_millis("enqueued_at"), F.lit(0)),
    }  # fmt: skip
    there = F.col("topic").isin(*names) & ~F.col("is_over")
    return rows.where(there).select(*(column.cast("bigint").alias(name) for name, column in found.items()))


def _look(topics: Sequence[H.Topic], examples: int, batches: Iterator[Any]) -> Iterator[Any]:
    """In a task: judge the messages that came here, topic by topic."""
    steps = unpack_steps(batches, {topic.name: number for number, topic in enumerate(topics)})
    for number, topic in enumerate(topics):
        mine = steps if len(topics) == 1 else steps.take(steps.topic == number)
        yield from _as_rows(H.look(mine, number, topic, examples))


def _as_rows(found: H.Looked) -> Iterator[Any]:
    t = found.topic
    rows = [(_TOTALS, t, 0, 0, found.messages, found.leases, found.timed, found.unknown, 0)]
    rows += [(_COMPLAINTS, t, 0, what, count, 0, 0, 0, 0) for what, count in found.complaints.items()]
    rows += [(_EXAMPLE, t, c.id, c.what, c.offset, c.before, c.at, c.due, 0) for c in found.examples]
    rows += [(_STANDING, t, 0, state, part, count, 0, 0, 0) for (part, state), count in found.standing.items()]
    rows += [(_PURGED, t, 0, 0, part, offset, count, 0, 0) for (part, offset), count in found.purged.items()]
    yield _batch(np.array(rows, dtype=np.int64).T)
    if found.intervals is not None:
        for blob in pack_columns(found.intervals):
            yield _batch([[_READY], [t], *[[0]] * 7], [blob])


def _batch(columns: Any, blobs: list[bytes | None] | None = None) -> Any:
    numbers = [pa.array(column, pa.int64()) for column in columns]
    values = pa.array(blobs, pa.binary()) if blobs else pa.nulls(len(numbers[0]), pa.binary())
    return pa.RecordBatch.from_arrays([*numbers, values], schema=_ROW_SCHEMA)


def _rank(orders: Sequence[Ordered | None], examples: int, batches: Iterator[Any]) -> Iterator[Any]:
    """In a task: rank the leases of the topics that came here; what else came goes on."""
    import pyarrow.compute as pc

    kept: dict[int, list[Any]] = {}
    for batch in batches:
        ready = pc.equal(batch["what"], _READY)
        yield batch.filter(pc.invert(ready))
        there = batch.filter(ready)
        for number, blob in zip(there["topic"].to_pylist(), there["blob"], strict=True):
            kept.setdefault(number, []).append(blob.as_buffer())
    for number, blobs in kept.items():
        order = orders[number]
        if order is None:
            continue
        intervals = Intervals(*unpack_columns(blobs, Intervals._fields))
        found = rank(intervals, number, order, examples)
        rows = [(_RANKED, number, 0, 0, found.looked_at, found.wrong, found.rank_max, 0, 0)]
        rows += [(_RANK_EXAMPLE, number, id, 0, offset, place, 0, 0, 0) for id, offset, place in found.examples]
        yield _batch(np.array(rows, dtype=np.int64).T)


def _told(facts: Known, table: Any, examples: int) -> AuditResult:
    """What the tasks found, as it was before it became rows."""
    looked: list[H.Looked] = []
    ranked: dict[int, Ranked] = {}
    for row in table.to_pylist():
        what, t, id, key, a, b, c, d, _ = (row[name] for name in _ROW)
        part = H.Looked(t)
        if what == _TOTALS:
            part.messages, part.leases, part.timed, part.unknown = a, b, c, d
        elif what == _COMPLAINTS:
            part.complaints[key] = a
        elif what == _EXAMPLE:
            part.examples.append(H.Complaint(key, t, id, a, b, c, d))
        elif what == _STANDING:
            part.standing[a, key] = b
        elif what == _PURGED:
            part.purged[a, b] = c
        elif what == _RANKED:
            ranked[t] = Ranked(t, a, b, c, ranked[t].examples if t in ranked else ())
            continue
        elif what == _RANK_EXAMPLE:
            was = ranked.get(t, Ranked(t, 0, 0, 0, ()))
            ranked[t] = was._replace(examples=(*was.examples, (id, a, b)))
            continue
        looked.append(part)
    return conclude(facts, looked, list(ranked.values()), examples)
