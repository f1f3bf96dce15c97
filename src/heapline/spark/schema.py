"""The columns of every view, in one table: names, types, nullability and meaning.

    python -m heapline.spark.schema > docs/spark-schema.md

Spark's schema, the Arrow schema of the batches and the page in the docs are derived from the table. Where Spark's Kafka
source has a column of the same meaning, the name and the type are Kafka's. Nothing here needs Spark or Arrow until a
schema is requested.

SCHEMA_VERSION 1. A column's name, type and meaning never change; new columns go at the end of their view. Any other
change increases the version, and the previous version stays available.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from heapline.contract.errors import BadRequest

SCHEMA_VERSION = 1
HEADERS = "headers"
PAIRS = "array<struct<key:string,value:binary>>"


class Column(NamedTuple):
    name: str
    type: str  # as Spark's SQL spells it
    nullable: bool
    meaning: str


_WHERE = (
    Column("topic", "string", False, "the topic, with its namespace unless that is `default`"),
    Column("partition", "int", False, "the partition, from 0"),
    Column("offset", "bigint", False, "the row's position in its partition's log"),
)
_TIMESTAMP = Column("timestamp", "timestamp", False, "commit time by the journal's clock, which never runs backwards")
_IDS = (
    Column("message_id", "string", True, "the message id as a ULID; null if an event does not concern a message"),
    Column("id", "bigint", True, "the message id as an integer"),
)
_PRIORITY = "the priority at enqueue"
_DUE = "the requested first delivery time; null: immediately"
_EXPIRES = "when the time to live ends; null: never"
_RETRIES = "the maximum number of retries; null: the topic's setting"

MESSAGES = (
    Column("key", "binary", True, "the key that selects the partition, in UTF-8"),
    Column("value", "binary", False, "the payload"),
    *_WHERE,
    _TIMESTAMP,
    Column("timestampType", "int", False, "1, Kafka's LogAppendTime: the broker set the timestamp"),
    Column(HEADERS, PAIRS, True, "the headers; null if there are none. Only with `includeHeaders=true`"),
    *(column._replace(nullable=False) for column in _IDS),
    Column("priority", "bigint", False, _PRIORITY),
    Column("deliver_at", "timestamp", True, _DUE),
    Column("enqueued_at", "timestamp", False, "when it was enqueued; for a prepared message, when it was prepared"),
    Column("expires_at", "timestamp", True, _EXPIRES),
    Column("max_retries", "int", True, _RETRIES),
    Column("fairness_key", "string", True, "the key for fair ordering, on a topic with fairness between keys"),
    Column("batch_id", "string", True, "the batch in which it was prepared; null: it was enqueued without a batch"),
    Column("unit", "bigint", False, "the commit: all rows of a topic with the same unit became durable together"),
)

EVENTS = (
    *_WHERE,
    _TIMESTAMP,
    Column("wall_time", "timestamp", False, "the machine's clock at the commit"),
    Column("unit", "bigint", False, "the commit, as in `messages`"),
    Column("kind", "string", False, "the kind of event: `enqueued`, `leased`, `acked` and so on"),
    *_IDS,
    Column("at", "timestamp", False, "when the event was decided; the timestamp if the event does not record it"),
    Column("priority", "bigint", True, f"{_PRIORITY}; for `rescheduled` the new priority"),
    Column("due", "timestamp", True, "when it is ready, or ready again; null: immediately"),
    Column("deadline", "timestamp", True, "for `leased` and `extended`: when the lease ends"),
    Column("attempts", "int", True, "for `leased`: the number of this delivery, from 1"),
    Column("holder", "string", True, "for `leased`: the lease holder, if known"),
    Column("reason", "string", True, "why it was nacked, dead-lettered or throttled, if known"),
    Column("seq", "bigint", True, "the spine sequence: one order of everything that became eligible or was leased"),
    Column("limit_key", "bigint", True, "for `leased`: the worst heap key that was allowed; null: any"),
    Column("heap_key", "bigint", True, "the heap key, if the event records one: with fairness, and for `rescheduled`"),
    Column("turn", "bigint", True, "for a new message: its turn within its priority; 0 without fairness"),
    Column("expires_at", "timestamp", True, _EXPIRES),
    Column("max_retries", "int", True, _RETRIES),
    Column("payload_bytes", "bigint", True, "for a new message: the size of its payload"),
    Column("was_delayed", "boolean", True, "for `cancelled` and `rescheduled`: whether it was delayed"),
    Column("returned", "boolean", True, "for `expired`: true if removed; false if leased, and removed after the lease"),
    Column("kept", "boolean", True, "for `dead_lettered`: true if in the dead-letter queue; false if dropped"),
    Column("count", "bigint", True, "the number of messages, if not named (`purged`, `fired` without streams)"),
    Column("batch_id", "string", True, "for events of a prepared batch"),
    Column("group", "string", True, "for events of a consumer group"),
    Column("stream_offset", "bigint", True, "for events of a consumer group: the offset of the row concerned"),
    Column("details", "string", True, "all other fields of the event, as JSON"),
    Column("enqueued_at", "timestamp", True, "for a new or moved message: when it was enqueued or prepared"),
    Column("due_wall", "boolean", True, "whether `due` is by the machine's clock and not by the journal's"),
)

_RECORD = {column.name: column for column in MESSAGES}
_NOW = "the priority at that time, which may have changed since enqueue"
_AS_OF = (
    Column("as_of", "timestamp", False, "the time that all rows of a topic describe, by the broker's clock"),
    Column(
        "as_of_offset", "bigint", False, "that time in the partition's log: exactly the events below it; -1: unknown"
    ),
)
_ATTEMPTS = "the number of deliveries so far; released deliveries do not count"

_FIRST = tuple(_RECORD[name] for name in ("key", "value", "topic", "partition", HEADERS, "message_id", "id"))
_LAST = tuple(_RECORD[name] for name in ("deliver_at", "enqueued_at", "expires_at", "max_retries", "fairness_key"))

BACKLOG = (
    *_FIRST,
    Column("state", "string", False, "`ready`, `delayed` (until its due time or a retry) or `leased`"),
    Column("priority", "bigint", False, _NOW),
    Column("due_at", "timestamp", True, "if delayed: when it becomes ready"),
    Column("attempts", "int", False, _ATTEMPTS),
    Column("deadline", "timestamp", True, "if leased: when the lease ends"),
    Column("holder", "string", True, "if leased: the lease holder, if known"),
    Column("reason", "string", True, "why it last failed, if known"),
    *_LAST,
    *_AS_OF,
)

DEAD_LETTERS = (
    *_FIRST,
    Column("priority", "bigint", False, _NOW),
    Column("attempts", "int", False, _ATTEMPTS),
    Column("reason", "string", False, "why it was dead-lettered"),
    Column("died_at", "timestamp", False, "when it was dead-lettered"),
    *_LAST,
    *_AS_OF,
)

VIEWS: dict[str, tuple[Column, ...]] = {"messages": MESSAGES, "events": EVENTS, "backlog": BACKLOG, "dlq": DEAD_LETTERS}
CONSUMED = (
    *(_RECORD[name] for name in ("key", "value", "topic", "partition")),
    Column(HEADERS, PAIRS, True, "the headers; null if there are none"),
    *(_RECORD[name] for name in ("message_id", "id")),
    Column("priority", "bigint", False, _NOW),
    *(_RECORD[name] for name in ("enqueued_at", "fairness_key")),
    Column("attempts", "int", False, "the number of this delivery, from 1"),
)
DLQ = "dlq"
STATE_VIEWS = ("backlog", DLQ)  # views of one point in time, not of a range of the log


def columns_of(view: str, wanted: tuple[str, ...] | None = None, headers: bool = False) -> tuple[Column, ...]:
    """Return the columns of a read: the wanted ones in their order, or all columns of the view."""
    there = {c.name: c for c in VIEWS[view]}
    if wanted is None:
        return tuple(c for c in there.values() if c.name != HEADERS or headers)
    for name in wanted:
        if name not in there:
            raise BadRequest(f"the view {view} does not have a column {name!r}; it has {', '.join(there)}")
    if len(set(wanted)) < len(wanted):
        raise BadRequest(f"columns={','.join(wanted)} names a column more than once")
    return tuple(there[name] for name in wanted)


def spark_ddl(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"`{c.name}` {c.type}{'' if c.nullable else ' NOT NULL'}" for c in columns)


def arrow_schema(columns: tuple[Column, ...]) -> Any:
    """Return the Arrow schema of batches with these columns. Spark accepts no other types or nullability."""
    import pyarrow as pa

    types = arrow_types()
    return pa.schema([pa.field(c.name, types[c.type], nullable=c.nullable) for c in columns])


def arrow_types() -> dict[str, Any]:
    import pyarrow as pa

    pair = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    return {
        "string": pa.string(), "binary": pa.binary(), "int": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", "UTC"),
        PAIRS: pa.list_(pa.field("element", pair)),
    }  # fmt: skip


_PAGE = """# Columns of the Spark views

Generated by `python -m heapline.spark.schema` from the table in `spark/schema.py`; edit that table.

`spark.read.format("heapline").option("view", …)`, schema version {version}. A column's name, type and meaning never
change; new ones are added at the end. Timestamps are instants, which Spark shows in its session's time zone; the
journal records milliseconds in UTC. Choose columns with `option("columns", "value,offset")`: Spark does not tell a
Python source which columns it needs, and columns that are not named are not read.
"""
_TEXT = {
    "messages": "Enqueued messages, one row per message. A prepared message appears at the row of its commit; a "
    "message that compaction moved appears once. Offsets have gaps where the log has events of other kinds.",
    "events": "All events, one row for each offset of the log, without gaps. Lease tokens and payloads are omitted.",
    "backlog": "Ready, delayed and leased messages at the time when the read was planned. Batch only. Every action on "
    "the same DataFrame shows that time, whatever happens to the queue meanwhile; load it again for a newer state. "
    "Messages that are prepared and not committed are not included. On the Postgres broker rows have their own times "
    "(docs/sql.md).",
    "heapline.spark.consume": "Not a view: the messages that `consume` leases, as its function receives them.",
    "dlq": "The dead letters of the work queue at the time of planning. Dead letters of groups are not included.",
}


def page() -> str:
    parts = [_PAGE.format(version=SCHEMA_VERSION)]
    for view, columns in {**VIEWS, "heapline.spark.consume": CONSUMED}.items():
        parts.append(f"## `{view}`\n\n{_TEXT[view]}\n\n| column | type | null | meaning |\n|---|---|---|---|\n")
        parts[-1] += "\n".join(
            f"| `{c.name}` | `{c.type}` | {'yes' if c.nullable else 'no'} | {c.meaning} |" for c in columns
        )
        parts[-1] += "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
