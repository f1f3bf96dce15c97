"""The columns of every view, in one table: names, types, whether they may be null, and what they mean.

    python -m heapline.spark.schema > docs/spark-schema.md

Spark's schema, the Arrow schema of the batches and the page in the docs are all made from the table. Where Spark's
Kafka source has a column of the same meaning, the name and the type are Kafka's. Nothing here needs Spark or Arrow
until a schema is asked for.

SCHEMA_VERSION 1. A column's name, type and meaning never change; new columns go at the end of their view. Anything else
raises the version, and the version before stays to be had.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from heapline.errors import BadRequest

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
    Column("offset", "bigint", False, "the row's place in its partition's log"),
)
_TIMESTAMP = Column(
    "timestamp", "timestamp", False,
    "when the row was committed: the journal's own time, which never runs backwards, not even with the machine's clock",
)  # fmt: skip
_IDS = (
    Column("message_id", "string", True, "the message, as a ULID; null where an event is about none"),
    Column("id", "bigint", True, "the same as an integer"),
)
_PRIORITY = "the priority that it was enqueued with"
_DUE = "when it was to be delivered first; null: at once"
_EXPIRES = "when its time to live ends; null: never"
_RETRIES = "how often it may be retried; null: as its topic says"

MESSAGES = (
    Column("key", "binary", True, "the key that chose its partition, in UTF-8"),
    Column("value", "binary", False, "the payload"),
    *_WHERE,
    _TIMESTAMP,
    Column("timestampType", "int", False, "1, as Kafka's LogAppendTime: the broker gave the timestamp"),
    Column(HEADERS, PAIRS, True, "its headers; null where there are none. Only with `includeHeaders=true`"),
    *(column._replace(nullable=False) for column in _IDS),
    Column("priority", "bigint", False, _PRIORITY),
    Column("deliver_at", "timestamp", True, _DUE),
    Column("enqueued_at", "timestamp", False, "when it was enqueued; of a prepared message, when it was prepared"),
    Column("expires_at", "timestamp", True, _EXPIRES),
    Column("max_retries", "int", True, _RETRIES),
    Column("fairness_key", "string", True, "whose turn it takes, on a topic with fairness between keys"),
    Column("batch_id", "string", True, "the batch that it was prepared in; null: it was enqueued without one"),
    Column("unit", "bigint", False, "the commit: all rows of a topic with the same one became durable together"),
)

EVENTS = (
    *_WHERE,
    _TIMESTAMP,
    Column("wall_time", "timestamp", False, "the machine's clock at that commit"),
    Column("unit", "bigint", False, "the commit, as in the messages"),
    Column("kind", "string", False, "what happened: `enqueued`, `leased`, `acked` and so on"),
    *_IDS,
    Column("at", "timestamp", False, "when it was decided; the timestamp where the event does not say"),
    Column("priority", "bigint", True, f"{_PRIORITY}; of `rescheduled` the new one"),
    Column("due", "timestamp", True, "when it is ready, or ready again; null: at once"),
    Column("deadline", "timestamp", True, "of `leased` and `extended`: when the lease ends"),
    Column("attempts", "int", True, "of `leased`: the number of this delivery, 1 on the first"),
    Column("holder", "string", True, "of `leased`: who took it, if it was said"),
    Column("reason", "string", True, "why it was nacked, dead-lettered or throttled, if it was said"),
    Column("seq", "bigint", True, "the spine sequence of the event: what became eligible or was leased, in one order"),
    Column("limit_key", "bigint", True, "of `leased`: the worst heap key that was allowed; null: any"),
    Column("heap_key", "bigint", True, "the heap key, where the event gives one: with turns, and of `rescheduled`"),
    Column("turn", "bigint", True, "of a new message: its turn among those of its priority; 0 without fairness"),
    Column("expires_at", "timestamp", True, _EXPIRES),
    Column("max_retries", "int", True, _RETRIES),
    Column("payload_bytes", "bigint", True, "of a new message: the size of its payload"),
    Column("was_delayed", "boolean", True, "of `cancelled` and `rescheduled`: it was waiting for its time"),
    Column("returned", "boolean", True, "of `expired`: it is gone; false: a worker has it, it goes when it comes back"),
    Column("kept", "boolean", True, "of `dead_lettered`: it is in the dead-letter queue; false: it is gone"),
    Column("count", "bigint", True, "how many messages, of events that do not name them one by one"),
    Column("batch_id", "string", True, "of events of a prepared batch"),
    Column("group", "string", True, "of events of a consumer group"),
    Column("stream_offset", "bigint", True, "of events of a consumer group: the offset of the row that they are about"),
    Column("details", "string", True, "whatever else the event says, as JSON"),
    Column("enqueued_at", "timestamp", True, "of a new or moved message: when it was enqueued, or prepared"),
    Column(
        "due_wall",
        "boolean",
        True,
        "of new, `fired` and `rescheduled`: it waits for a time of the machine's clock, not of the journal",
    ),
)

_RECORD = {column.name: column for column in MESSAGES}
_NOW = "its priority at that moment, which may have been changed since it was enqueued"
_AS_OF = (
    Column("as_of", "timestamp", False, "the moment that all rows of a topic are of, by the broker's clock"),
    Column("as_of_offset", "bigint", False, "the same in its partition's log: all events below it, and no other"),
)
_ATTEMPTS = "how often it has been delivered so far; a delivery that was released does not count"

BACKLOG = (
    *(_RECORD[name] for name in ("key", "value", "topic", "partition", HEADERS, "message_id", "id")),
    Column("state", "string", False, "`ready`, `delayed` (it waits for its time or for a retry) or `leased`"),
    Column("priority", "bigint", False, _NOW),
    Column("due_at", "timestamp", True, "of a delayed one: when it is ready"),
    Column("attempts", "int", False, _ATTEMPTS),
    Column("deadline", "timestamp", True, "of a leased one: when the lease ends"),
    Column("holder", "string", True, "of a leased one: who has it, if it was said"),
    Column("reason", "string", True, "why it last failed, if it was said"),
    *(_RECORD[name] for name in ("deliver_at", "enqueued_at", "expires_at", "max_retries", "fairness_key")),
    *_AS_OF,
)

DLQ = (
    *(_RECORD[name] for name in ("key", "value", "topic", "partition", HEADERS, "message_id", "id")),
    Column("priority", "bigint", False, _NOW),
    Column("attempts", "int", False, _ATTEMPTS),
    Column("reason", "string", False, "why it was dead-lettered"),
    Column("died_at", "timestamp", False, "when it was"),
    *(_RECORD[name] for name in ("deliver_at", "enqueued_at", "expires_at", "max_retries", "fairness_key")),
    *_AS_OF,
)

VIEWS: dict[str, tuple[Column, ...]] = {"messages": MESSAGES, "events": EVENTS, "backlog": BACKLOG, "dlq": DLQ}
CONSUMED = (
    *(_RECORD[name] for name in ("key", "value", "topic", "partition")),
    Column(HEADERS, PAIRS, True, "its headers; null where there are none"),
    *(_RECORD[name] for name in ("message_id", "id")),
    Column("priority", "bigint", False, _NOW),
    *(_RECORD[name] for name in ("enqueued_at", "fairness_key")),
    Column("attempts", "int", False, "the number of this delivery, 1 on the first"),
)
OF_A_MOMENT = ("backlog", "dlq")  # and not of a range of the log


def columns_of(view: str, wanted: tuple[str, ...] | None = None, headers: bool = False) -> tuple[Column, ...]:
    """The columns that a read gives: those wanted, in that order, or all of the view."""
    there = {c.name: c for c in VIEWS[view]}
    if wanted is None:
        return tuple(c for c in there.values() if c.name != HEADERS or headers)
    for name in wanted:
        if name not in there:
            raise BadRequest(f"the view {view} has no column {name!r}; it has {', '.join(there)}")
    if len(set(wanted)) < len(wanted):
        raise BadRequest(f"columns={','.join(wanted)} names a column twice")
    return tuple(there[name] for name in wanted)


def spark_ddl(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"`{c.name}` {c.type}{'' if c.nullable else ' NOT NULL'}" for c in columns)


def arrow_schema(columns: tuple[Column, ...]) -> Any:
    """What batches of these columns must look like: Spark takes no other types, and no other nullability."""
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


_PAGE = """# What the columns mean

Made by `python -m heapline.spark.schema` from the table in `spark/schema.py`: edit that.

`spark.read.format("heapline").option("view", …)`, schema version {version}. A column's name, type and meaning never
change; new ones are added at the end. All timestamps are moments, which Spark shows in its session's time zone; what
the journal records are milliseconds UTC. Choose columns with `option("columns", "value,offset")`: Spark cannot tell a
Python source which it needs, so what is not named is not even read.
"""
_TEXT = {
    "messages": "What was enqueued, one row a message: a prepared message at the row of its commit, one that the "
    "journal was compacted around once. Offsets have gaps, where the log holds events of other kinds.",
    "events": "Everything that happened, one row for each offset of the log, without gaps. No lease tokens, no "
    "payloads.",
    "backlog": "What waits: ready, delayed and leased messages, as they were when the read was planned. Batch only: "
    "every action on the same DataFrame shows that moment, whatever happens to the queue meanwhile; load it again for "
    "another. Messages that are prepared and not committed do not wait yet.",
    "heapline.spark.consume": "Not a view: the messages that `consume` has leased, as its function gets them.",
    "dlq": "The dead letters of the work queue (those of groups are not among them), pinned in the same way.",
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
