"""What can be set on a write, and which columns it takes: names, types and checks, before anything is written.

All of it is checked on the driver, where a mistake is told at once and not by tasks that fail four times. An option or
column that is not known is refused: misspelt, it would silently do nothing. What the values of a row may be is decided
in outgoing.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heapline.config import parse_topic
from heapline.engine.requests import NAME_BYTES_MAX
from heapline.errors import BadRequest
from heapline.spark.options import Target, plain_topic
from heapline.spark.sources import settled_target

ENQUEUE, RESCHEDULE, CANCEL = "enqueue", "reschedule", "cancel"
OPERATIONS = (ENQUEUE, RESCHEDULE, CANCEL)
NAMES = (
    "heapline.url", "heapline.api_key", "heapline.api_key_file", "heapline.token", "topic", "operation", "txnAppId",
    "txnVersion", "badRecordsPath", "failOnMissing",
)  # fmt: skip
_KNOWN = {name.lower(): name for name in NAMES}
#: What Spark adds by itself to the options of a stream.
_SPARKS_OWN = {"checkpointlocation", "queryname"}

_WHOLE = r"tinyint|smallint|int|bigint"
_SECONDS = rf"{_WHOLE}|float|double|decimal\(\d+,\d+\)"
_TEXT = r"string|varchar\(\d+\)|char\(\d+\)"
_BYTES = rf"binary|{_TEXT}"
_PAIR = r"struct<(key:string,value:(binary|string)|value:(binary|string),key:string)>"
#: Column -> (types as Spark spells them, how they are told to people), for each operation.
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
    CANCEL: {
        "message_id": (_TEXT, "string, a ULID"),
        "id": ("bigint", "bigint"),
        "topic": (_TEXT, "string"),
    },
}


@dataclass(frozen=True)
class WriteOptions:
    target: Target
    operation: str
    topic: str | None  # None: each row says
    columns: tuple[str, ...]
    txn: tuple[str, int] | None
    bad_records: str | None
    fail_on_missing: bool


def parse_write(
    options: Mapping[str, str], columns: Mapping[str, str], *, streaming: bool, overwrite: bool
) -> WriteOptions:
    """`columns`: names and types as Spark spells them."""
    given = {name.lower(): value for name, value in options.items()}
    if overwrite:
        word = 'outputMode("complete")' if streaming else 'mode("overwrite")'
        raise BadRequest(f'{word} would replace what is in the queue: use "append", which adds to it')
    if "path" in given:
        raise BadRequest("a directory has one writer, its server: give heapline.url instead of path")
    for name in given:
        if name not in _KNOWN and not (streaming and name in _SPARKS_OWN):
            raise BadRequest(f"there is no option {name!r} for writing; there are {', '.join(NAMES)}")
    operation = given.get("operation", ENQUEUE).strip().lower()
    if operation not in OPERATIONS:
        raise BadRequest(f"operation is one of {', '.join(OPERATIONS)}, not {operation!r}")
    _check_columns(operation, columns)
    topic = given.get("topic")
    if topic is not None:
        parse_topic(topic)
    elif "topic" not in columns:
        raise BadRequest("say where to: option topic, or a column topic")
    if "failonmissing" in given and operation == ENQUEUE:
        raise BadRequest(f"failOnMissing goes with operation={RESCHEDULE} or {CANCEL}")
    return WriteOptions(
        target=_target(given), operation=operation, topic=None if topic is None else plain_topic(topic),
        columns=tuple(columns), txn=_txn(given, streaming, operation), bad_records=_bad_records(given, operation),
        fail_on_missing=_flag(given, "failonmissing"),
    )  # fmt: skip


def settled_write(options: WriteOptions) -> WriteOptions:
    """The same with server and key found: on the driver, because the environment of executors may be another."""
    return dataclasses.replace(options, target=settled_target(options.target))


def spark_columns(schema: Any) -> dict[str, str]:
    """Of a StructType: names and types as SQL spells them."""
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _check_columns(operation: str, columns: Mapping[str, str]) -> None:
    known = COLUMNS[operation]
    for name, kind in columns.items():
        if name not in known:
            raise BadRequest(
                f"there is no column {name!r} for operation={operation}; there are {', '.join(known)}: select those "
                "that you mean, and give them these names"
            )
        types, told = known[name]
        if not re.fullmatch(types, kind):
            raise BadRequest(f"column {name} is {told}, not {kind}: cast it")
    if operation == ENQUEUE:
        if "value" not in columns:
            raise BadRequest("there is no column value: give the payload that name, for example to_json(struct(*))")
        if "deliver_at" in columns and "delay" in columns:
            raise BadRequest("give a column deliver_at or a column delay, not both")
        return
    if ("message_id" in columns) == ("id" in columns):
        raise BadRequest(f"operation={operation} needs a column message_id (string) or id (bigint), one of them")
    if operation == RESCHEDULE and "priority" not in columns and "deliver_at" not in columns:
        raise BadRequest("nothing to change: give a column priority or deliver_at, or both")


def _target(given: Mapping[str, str]) -> Target:
    key = given.get("heapline.api_key", given.get("heapline.token"))
    return Target(None, given.get("heapline.url"), key, given.get("heapline.api_key_file"))


def _txn(given: Mapping[str, str], streaming: bool, operation: str) -> tuple[str, int] | None:
    app, version = given.get("txnappid"), given.get("txnversion")
    if app is None and version is None:
        return None
    if streaming:
        raise BadRequest("a stream is written exactly once by itself: leave txnAppId and txnVersion away")
    if operation != ENQUEUE:
        raise BadRequest(f"operation={operation} may be repeated as it is: leave txnAppId and txnVersion away")
    if app is None or version is None:
        raise BadRequest("txnAppId and txnVersion go together: give both, or neither")
    if not app or len(app.encode()) > NAME_BYTES_MAX - len("txn:"):
        raise BadRequest(f"txnAppId is a name of 1 to {NAME_BYTES_MAX - 4} bytes")
    if not re.fullmatch(r"\d{1,19}", version.strip()) or int(version) >= 1 << 63:
        raise BadRequest(f"txnVersion is a whole number from 0 on that rises with every write, not {version!r}")
    return app, int(version)


def _bad_records(given: Mapping[str, str], operation: str) -> str | None:
    path = given.get("badrecordspath")
    if path is not None and operation != ENQUEUE:
        raise BadRequest("badRecordsPath goes with operation=enqueue")
    if path is not None and not path.strip():
        raise BadRequest("badRecordsPath is empty")
    return path


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "false").strip().lower()
    if value not in ("true", "false"):
        raise BadRequest(f"{_KNOWN[name]} is true or false, not {value!r}")
    return value == "true"
