"""The audit: proves or refutes from the events of topics that the queue kept its promises.

Two passes over the events and two shuffles, however many there are. The first pass gathers what concerns whole topics
(auditing/marks.py), a few rows; the driver makes of it what all tasks must know. The second turns events into numbers,
brings the steps of each message together (first shuffle) and judges whole messages, many at once
(auditing/histories.py); what was ready when goes on by topic (second shuffle), where leases are ranked
(auditing/ranks.py). Back come counts and a few examples.

A task of the second pass holds its share of the messages in memory, some 100 bytes an event, and one that ranks holds
some 70 bytes for each time that a message of its topic was ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from heapline.errors import BadRequest
from heapline.spark.jobs.auditing import histories as H
from heapline.spark.jobs.auditing import steps as S
from heapline.spark.jobs.auditing.concluding import Known, Ordered, Ranked, Standing, conclude, known, rank
from heapline.spark.jobs.auditing.marks import KINDS, Mark, Reach
from heapline.spark.jobs.auditing.outside import Outside, ask
from heapline.spark.jobs.auditing.ranks import NEVER, Intervals
from heapline.spark.jobs.auditing.verdicts import AuditResult
from heapline.spark.jobs.inputs import Offsets, events_of, journal_events
from heapline.spark.options import plain_topic

EXAMPLES = 10
ROWS_A_TASK = 1_500_000
MARK_COLUMNS = (
    "topic", "partition", "offset", "timestamp", "wall_time", "unit", "kind", "id", "count", "batch_id", "details",
)  # fmt: skip
STEP_COLUMNS = (
    "topic", "offset", "unit", "kind", "id", "at", "priority", "due", "seq", "heap_key", "returned", "kept",
    "enqueued_at", "due_wall",
)  # fmt: skip
_STEP_NAMES = ", ".join(f"{name} bigint" for name in S.Steps._fields)
#: What tasks hand on: kind of row, and numbers that mean what the kind says.
_ROW = ("what", "topic", "id", "key", "a", "b", "c", "d", "e")
_ROW_NAMES = ", ".join(f"{name} bigint" for name in _ROW)
_ROW_SCHEMA = pa.schema([(name, pa.int64()) for name in _ROW])
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

    def load(columns: Sequence[str]) -> Any:
        if lake is not None:
            parts = [events_of(spark, where, lake, name, columns=columns) for name in names]
        else:
            if where is None:
                raise BadRequest("say where the events are: options of the format heapline, or a lake")
            parts = [
                journal_events(spark, where, n, columns=columns, start=start, end=outside.ends.get(n)) for n in names
            ]  # fmt: skip
        return reduce(lambda one, other: one.unionByName(other), parts)

    marks, reaches = _gather(load(MARK_COLUMNS))
    facts = known(
        names, marks, reaches, asked, closing if closing is not None else outside.closing, opening is not None
    )
    result = _judge(load(STEP_COLUMNS), opening, facts, examples)
    return dataclasses.replace(result, seconds=round(perf_counter() - began, 3))


def audit_events(
    events: Any, *, opening: Any = None, closing: Mapping[str, Mapping[int, Standing]] | None = None,
    configs: Mapping[str, Any] | None = None, examples: int = EXAMPLES,
) -> AuditResult:  # fmt: skip
    """The same of a DataFrame with the columns of the view `events`, of whatever topics are in it."""
    began = perf_counter()
    marks, reaches = _gather(events)
    names = sorted({reach.topic for reach in reaches})
    facts = known(names, marks, reaches, configs or {}, closing, opening is not None)
    return dataclasses.replace(_judge(events, opening, facts, examples), seconds=round(perf_counter() - began, 3))


# -- the first pass ----------------------------------------------------------------------------------------------------


def _gather(events: Any) -> tuple[list[Mark], list[Reach]]:
    from pyspark.sql import functions as F

    is_mark = F.col("kind").isin(*KINDS)
    own = is_mark & (F.col("kind") != "batch_committed")  # all rows of a commit are one event

    def only(name: str, where: Any = is_mark) -> Any:
        return F.when(where, F.col(name)).alias(f"mark_{name}")

    ahead = F.unix_millis("wall_time") - F.unix_millis("timestamp")
    lease = F.when(F.col("kind") == "leased", F.col("unit"))
    rows = events.groupBy(
        "topic", "partition", only("kind"), only("batch_id"), only("details"), only("unit"), only("offset", own)
    ).agg(
        F.count("*").alias("rows"), F.min("offset").alias("first"), F.max("offset").alias("last"),
        F.count("id").alias("named"), F.max("count").alias("count"), F.max("unit").alias("last_unit"),
        F.min(lease).alias("first_lease"), F.max(ahead).alias("ahead"),
    ).collect()  # fmt: skip
    marks = [
        Mark(r["topic"], r["partition"], r["mark_kind"], r["mark_batch_id"], r["mark_details"], r["mark_unit"],
             r["first"], r["rows"], r["named"], r["count"] or 0)
        for r in rows if r["mark_kind"] is not None
    ]  # fmt: skip
    return marks, _reaches(rows)


def _reaches(rows: Sequence[Any]) -> list[Reach]:
    found: dict[tuple[str, int], Reach] = {}
    for r in rows:
        lease = NEVER if r["first_lease"] is None else r["first_lease"]
        reach = Reach(
            r["topic"], r["partition"], r["rows"], r["first"], r["last"], r["last_unit"], lease, r["ahead"]
        )  # fmt: skip
        was = found.get((reach.topic, reach.partition), reach._replace(rows=0))
        found[reach.topic, reach.partition] = Reach(
            reach.topic, reach.partition, was.rows + reach.rows, min(was.first, reach.first),
            max(was.last, reach.last), max(was.last_unit, reach.last_unit), min(was.first_lease, reach.first_lease),
            max(was.wall_ahead, reach.wall_ahead),
        )  # fmt: skip
    return list(found.values())


# -- the second --------------------------------------------------------------------------------------------------------


def _judge(events: Any, opening: Any, facts: Known, examples: int) -> AuditResult:
    names = [topic.name for topic in facts.topics]
    steps = _steps(events, names)
    if opening is not None:
        steps = steps.unionByName(_opening(opening, names))
    rows = sum(reach.rows for reach in facts.reaches)
    tasks = max(2, -(-rows // ROWS_A_TASK))
    judged = steps.repartition(tasks, "topic", "id").mapInArrow(partial(_look, facts.topics, examples), _ROW_NAMES)
    if any(order is not None for order in facts.orders):
        judged = judged.repartition(len(names), "topic").mapInArrow(partial(_rank, facts.orders, examples), _ROW_NAMES)
    return _told(facts, judged.toArrow(), examples)


def _steps(events: Any, names: Sequence[str]) -> Any:
    """As auditing/steps.py has it."""
    from pyspark.sql import functions as F

    kind = F.col("kind")
    numbers = F.create_map(*(F.lit(x) for pair in S.STEPS.items() for x in pair))
    step = F.when((kind == "dead_lettered") & ~F.col("kept"), S.DROPPED).otherwise(F.try_element_at(numbers, kind))
    moved = kind == "rescheduled"
    key = F.when(moved, F.col("heap_key")).when(kind.isin("enqueued", "batch_committed"), F.col("priority"))
    found = {
        "topic": _number(names), "id": F.col("id"), "offset": F.col("offset"), "unit": F.col("unit"), "step": step,
        "at": F.unix_millis("at"), "due": F.coalesce(F.unix_millis("due"), F.lit(S.NO_DUE)),
        "wall": F.coalesce(F.col("due_wall").cast("bigint"), F.lit(0)),
        "seq": F.coalesce("seq", F.lit(S.NO_SEQ)), "key": F.coalesce(key, F.lit(S.NO_KEY)),
        "since": F.coalesce(F.unix_millis("enqueued_at"), F.lit(0)),
    }  # fmt: skip
    named = kind.isin(*S.STEPS) & F.col("id").isNotNull() & F.coalesce("returned", F.lit(True))
    return events.where(named).select(*(column.cast("bigint").alias(name) for name, column in found.items()))


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
    steps = S.Steps(*_columns(batches, S.Steps._fields))
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
    if found.intervals is not None and len(found.intervals.id):
        i, count = found.intervals, len(found.intervals.id)
        # Whether it is judged stands in the lowest bit beside the offset.
        yield _batch(
            [np.full(count, _READY), np.full(count, t), i.id, i.key, i.from_unit, i.from_step, i.to_unit, i.to_step,
             i.offset * 2 + i.judged]
        )  # fmt: skip


def _columns(batches: Iterable[Any], names: Sequence[str]) -> list[Any]:
    """All rows of some batches, column by column."""
    there = list(batches)
    none = np.zeros(0, dtype=np.int64)
    return [np.concatenate([none, *(batch[name].to_numpy() for batch in there)]) for name in names]


def _batch(columns: Any) -> Any:
    return pa.RecordBatch.from_arrays([pa.array(column, pa.int64()) for column in columns], schema=_ROW_SCHEMA)


def _rank(orders: Sequence[Ordered | None], examples: int, batches: Iterator[Any]) -> Iterator[Any]:
    """In a task: rank the leases of the topics that came here; what else came goes on."""
    import pyarrow.compute as pc

    kept: list[Any] = []
    for batch in batches:
        ready = pc.equal(batch["what"], _READY)
        kept.append(batch.filter(ready))
        yield batch.filter(pc.invert(ready))
    columns = dict(zip(_ROW, _columns(kept, _ROW), strict=True))
    for number in np.unique(columns["topic"]).tolist():
        order = orders[number]
        if order is None:
            continue
        mine = columns["topic"] == number
        c = {name: column[mine] for name, column in columns.items()}
        intervals = Intervals(c["key"], c["id"], c["a"], c["b"], c["c"], c["d"], c["e"] & 1, c["e"] >> 1)
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
