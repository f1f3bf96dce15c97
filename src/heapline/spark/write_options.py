"""The options of a write and the columns that it accepts: names, types and checks, before anything is written.

The driver checks all of it and reports mistakes immediately; a task would be retried four times first. Unknown
options and columns are rejected, because a misspelled one would silently do nothing. enqueue_rows.py checks the values
of rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heapline.contract.config import canonical_topic, parse_topic
from heapline.contract.errors import BadRequest
from heapline.contract.fields import NAME_BYTES_MAX
from heapline.spark.options import Target, parse_flag

ENQUEUE, RESCHEDULE, CANCEL = "enqueue", "reschedule", "cancel"
OPERATIONS = (ENQUEUE, RESCHEDULE, CANCEL)
NAMES = (
    "heapline.url", "heapline.api_key", "heapline.api_key_file", "heapline.token", "topic", "operation", "txnAppId",
    "txnVersion", "badRecordsPath", "failOnMissing",
)  # fmt: skip
_KNOWN = {name.lower(): name for name in NAMES}
#: Options that Spark adds to those of a stream.
_SPARKS_OWN = {"checkpointlocation", "queryname"}

_WHOLE = r"tinyint|smallint|int|bigint"
_SECONDS = rf"{_WHOLE}|float|double|decimal\(\d+,\d+\)"
_TEXT = r"string|varchar\(\d+\)|char\(\d+\)"
_BYTES = rf"binary|{_TEXT}"
_PAIR = r"struct<(key:string,value:(binary|string)|value:(binary|string),key:string)>"
#: For each operation: column -> (types as Spark spells them, their description in messages).
COLUMNS = {
    ENQUEUE: {
        "value": (_BYTES, "binary or string"),
        "topic": (_TEXT, "string"),
        "priority": (_WHOLE, "a whole number"),
        "key": (_BYTES, "string, or binary in UTF-8"),
        "deliver_at": ("timestamp", "timestamp"),
        "delay": (_SECONDS, "a number of seconds"),
        "headers": (rf"array<{_PAIR}>|map<string,(binary|string)>", "array<struct<key,value>> or map<string,string>"),
        "idempotency_key": (_TEXT, "string"),
        "ttl": (_SECONDS, "a number of seconds"),
        "fairness_key": (_TEXT, "string"),
    },
    RESCHEDULE: {
        "message_id": (_TEXT, "string, a ULID"),
        "id": ("bigint", "bigint"),
        "topic": (_TEXT, "string"),
        "priority": (_WHOLE, "a whole number"),
        "deliver_at": ("timestamp", "timestamp"),
    },
    CANCEL: {"message_id": (_TEXT, "string, a ULID"), "id": ("bigint", "bigint"), "topic": (_TEXT, "string")},
}


@dataclass(frozen=True)
class WriteOptions:
    target: Target
    operation: str
    topic: str | None  # None: each row names its topic
    columns: tuple[str, ...]
    txn: tuple[str, int] | None
    bad_records: str | None
    fail_on_missing: bool


def parse_write(
    options: Mapping[str, str], columns: Mapping[str, str], *, streaming: bool, overwrite: bool
) -> WriteOptions:
    """Return the options of a write. `columns` has names and types as Spark spells them."""
    given = {name.lower(): value for name, value in options.items()}
    if overwrite:
        word = 'outputMode("complete")' if streaming else 'mode("overwrite")'
        raise BadRequest(f'{word} would replace the content of the queue; use "append", which adds to it')
    if "path" in given:
        raise BadRequest("only the server writes to a data directory; set heapline.url instead of path")
    for name in given:
        if name not in _KNOWN and not (streaming and name in _SPARKS_OWN):
            raise BadRequest(f"unknown option {name!r} for writing; use {', '.join(NAMES)}")
    operation = given.get("operation", ENQUEUE).strip().lower()
    if operation not in OPERATIONS:
        raise BadRequest(f"operation must be one of {', '.join(OPERATIONS)}, not {operation!r}")
    _check_columns(operation, columns)
    topic = given.get("topic")
    if topic is not None:
        parse_topic(topic)
    elif "topic" not in columns:
        raise BadRequest("no topic given; set the option topic or add a column topic")
    if "failonmissing" in given and operation == ENQUEUE:
        raise BadRequest(f"failOnMissing is only valid with operation={RESCHEDULE} or {CANCEL}")
    return WriteOptions(
        target=Target.of(given),
        operation=operation,
        topic=None if topic is None else canonical_topic(topic),
        columns=tuple(columns),
        txn=_txn(given, streaming, operation),
        bad_records=_bad_records(given, operation),
        fail_on_missing=parse_flag(given, "failonmissing", False, _KNOWN),
    )


def spark_columns(schema: Any) -> dict[str, str]:
    """Return the names and SQL types of the columns of a StructType."""
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _check_columns(operation: str, columns: Mapping[str, str]) -> None:
    known = COLUMNS[operation]
    for name, kind in columns.items():
        if name not in known:
            raise BadRequest(
                f"unknown column {name!r} for operation={operation}; select and rename columns to {', '.join(known)}"
            )
        types, description = known[name]
        if not re.fullmatch(types, kind):
            raise BadRequest(f"column {name} must be {description}, not {kind}; cast it")
    if operation == ENQUEUE:
        if "value" not in columns:
            raise BadRequest("column value is missing; name the payload value, for example to_json(struct(*)) AS value")
        if "deliver_at" in columns and "delay" in columns:
            raise BadRequest("use a column deliver_at or a column delay, not both")
        return
    if ("message_id" in columns) == ("id" in columns):
        raise BadRequest(f"operation={operation} needs exactly one of the columns message_id (string) and id (bigint)")
    if operation == RESCHEDULE and "priority" not in columns and "deliver_at" not in columns:
        raise BadRequest("nothing to change; add a column priority or deliver_at, or both")


def _txn(given: Mapping[str, str], streaming: bool, operation: str) -> tuple[str, int] | None:
    app, version = given.get("txnappid"), given.get("txnversion")
    if app is None and version is None:
        return None
    if streaming:
        raise BadRequest("a stream is written exactly once without txnAppId and txnVersion; omit them")
    if operation != ENQUEUE:
        raise BadRequest(f"operation={operation} can be repeated without txnAppId and txnVersion; omit them")
    if app is None or version is None:
        raise BadRequest("set both txnAppId and txnVersion, or neither")
    if not app or len(app.encode()) > NAME_BYTES_MAX - len("txn:"):
        raise BadRequest(f"txnAppId must have 1 to {NAME_BYTES_MAX - 4} bytes")
    if not re.fullmatch(r"\d{1,19}", version.strip()) or int(version) >= 1 << 63:
        raise BadRequest(f"txnVersion must be an integer from 0 on that increases with every write, not {version!r}")
    return app, int(version)


def _bad_records(given: Mapping[str, str], operation: str) -> str | None:
    path = given.get("badrecordspath")
    if path is not None and operation != ENQUEUE:
        raise BadRequest("badRecordsPath is only valid with operation=enqueue")
    if path is not None and not path.strip():
        raise BadRequest("badRecordsPath is empty")
    return path
