"""Consuming a topic with Spark: the driver leases messages, a function works on them as a DataFrame, the driver acks.

At least once. What is leased is leased by the driver alone, before any task runs: a source that leased in its tasks
would lease others with every retry and every action. The rows go to Spark as they were leased, so each action on the
DataFrame reads the same ones. All of them pass through the driver's memory: `max_messages` is what bounds that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from heapline.errors import BadRequest, LeaseLost
from heapline.logs import Log
from heapline.spark.leasing import Leases
from heapline.spark.options import Target
from heapline.spark.schema import CONSUMED, arrow_schema
from heapline.spark.sources import client_of, settled_target
from heapline.ulid import parse_id

log_ = Log("heapline.spark")
VISIBILITY = 60.0
_WHERE = ("heapline.url", "heapline.api_key", "heapline.token", "heapline.api_key_file")


@dataclass(frozen=True)
class ConsumeResult:
    """What became of the messages that were leased."""

    leased: int
    acked: int
    nacked: int
    lost: tuple[int, ...]  # ids whose lease ended before they were acked: they are or will be delivered again


def consume(
    spark: Any, topic: str, fn: Callable[[Any], Any], max_messages: int = 10_000, *,
    where: Mapping[str, str] | None = None, url: str | None = None, api_key: str | None = None,
    visibility: float = VISIBILITY, wait: float = 0.0, partitions: int | None = None, holder: str | None = None,
    fail_on_lost: bool = False,
) -> ConsumeResult:  # fmt: skip
    """Lease up to `max_messages` of a topic's best, call `fn(df)` with them, and ack them when it returns.

        consume(spark, "orders", lambda df: df.select("value").write.mode("append").parquet("orders"))

    At least once: if `fn` fails all messages are released and what it raised is raised; if the driver dies they come
    back when their leases end, after `visibility` seconds at most. What `fn` wrote by then is written again next time,
    unless it writes in a way that can be repeated. Leases are extended while `fn` runs, however long that is. One that
    ended all the same (the driver was suspended, the server away) is in `lost` of the result, and was not acked; with
    `fail_on_lost` LeaseLost is raised, after all others were acked.

    `df` has the columns that docs/spark-schema.md names, and shows the same rows in every action. `fn` is not called
    if nothing is there; waits up to `wait` seconds for something. To refuse some messages, `fn` returns their ids: an
    iterable of ids or of (id, reason), or a DataFrame with `message_id` or `id`, and `reason` if wanted. These are
    nacked, all others acked.

    `where` is a server as in the options of the format (`heapline.url`, `heapline.api_key_file`, …); `url` and
    `api_key` are the short way. Without either, the environment says where the server is. `partitions`: in how many
    pieces Spark works on the rows.
    """
    if max_messages < 1 or visibility <= 0:
        raise BadRequest(f"max_messages={max_messages} and visibility={visibility:g} must both be over 0")
    with client_of(settled_target(_target(where or {}, url, api_key))) as client:

        def frame(table: Any) -> Any:
            made = spark.createDataFrame(table)
            return made if partitions is None else made.repartition(partitions)

        result = consume_with(client, frame, topic, fn, max_messages, visibility, wait, holder)
    if result.lost and fail_on_lost:
        raise LeaseLost(list(result.lost), topic)
    return result


def _target(where: Mapping[str, str], url: str | None, api_key: str | None) -> Target:
    if "path" in where:
        raise BadRequest("messages are leased from a server: give heapline.url instead of path")
    if strange := sorted(where.keys() - set(_WHERE)):
        raise BadRequest(f"where={strange[0]!r} does not say where a server is: there are {', '.join(_WHERE)}")
    key = api_key or where.get("heapline.api_key", where.get("heapline.token"))
    return Target(url=url or where.get("heapline.url"), api_key=key, api_key_file=where.get("heapline.api_key_file"))


def consume_with(
    client: Any, frame: Callable[[Any], Any], topic: str, fn: Callable[[Any], Any], max_messages: int,
    visibility: float = VISIBILITY, wait: float = 0.0, holder: str | None = None,
) -> ConsumeResult:  # fmt: skip
    """The same with a client that is open; `frame` makes a DataFrame of an Arrow table."""
    with Leases(client, topic, visibility, holder) as leases:
        messages = leases.take(max_messages, wait)
        if not messages:
            return ConsumeResult(0, 0, 0, ())
        refused = _refused(fn(frame(table_of(messages))), {message.id for message in messages})
        acked, nacked = leases.settle(refused)
    if leases.lost:
        log_.warning("leases ended before their messages were acked", topic=topic, count=len(leases.lost))
    return ConsumeResult(len(messages), acked, nacked, tuple(sorted(leases.lost)))


def table_of(messages: list[Any]) -> Any:
    """Leased messages as an Arrow table."""
    import pyarrow as pa

    schema = arrow_schema(CONSUMED)
    columns: dict[str, list[Any]] = {
        "key": [None if m.key is None else m.key.encode() for m in messages],
        "value": [m.payload for m in messages],
        "topic": [m.topic for m in messages],
        "partition": [m.partition for m in messages],
        "headers": [_pairs(m.headers) for m in messages],
        "message_id": [m.message_id for m in messages],
        "id": [m.id for m in messages],
        "priority": [m.priority for m in messages],
        "enqueued_at": [m.enqueued_at for m in messages],
        "fairness_key": [m.fairness_key for m in messages],
        "attempts": [m.attempts for m in messages],
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _pairs(headers: Mapping[str, str]) -> list[dict[str, Any]] | None:
    return [{"key": name, "value": value.encode()} for name, value in headers.items()] or None


def _refused(told: Any, leased: set[int]) -> dict[int, str | None]:
    """Of what `fn` returned: id -> reason."""
    if told is None:
        return {}
    if hasattr(told, "collect"):
        name = next((n for n in ("message_id", "id") if n in told.columns), None)
        if name is None:
            raise BadRequest("a DataFrame of messages to refuse needs a column message_id or id")
        columns = [name, "reason"] if "reason" in told.columns else [name]
        told = [tuple(row) for row in told.select(*columns).collect()]
    if isinstance(told, str | bytes) or not isinstance(told, Iterable):
        raise BadRequest(f"fn returns nothing, or which messages it refuses, not {type(told).__name__}")
    found: dict[int, str | None] = {}
    for one in told:
        id, reason = (*one, None)[:2] if isinstance(one, tuple) else (one, None)
        found[parse_id(id)] = None if reason is None else str(reason)
    if strange := found.keys() - leased:
        raise BadRequest(f"fn refused {len(strange)} message(s) that it was not given; all were released")
    return found
