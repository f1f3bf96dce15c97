"""Consume a topic with Spark: the driver leases messages, a function processes them as a DataFrame, the driver acks.

Delivery is at least once. Only the driver leases, before any task runs: a source that leased in its tasks would lease
other messages on every retry and every action. Every action on the DataFrame reads the same rows. All of them pass
through the driver's memory, so `max_messages` bounds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Any

from heapline.contract.errors import BadRequest, HeaplineError, LeaseLost, ResourceExhausted
from heapline.contract.ids import parse_id
from heapline.logs import Log
from heapline.spark.options import Target
from heapline.spark.schema import CONSUMED, arrow_schema
from heapline.spark.target import SERVER_OPTIONS, client_of, resolve_target

log_ = Log("heapline.spark")
VISIBILITY = 60.0  # seconds
POP_MESSAGES, POP_BYTES = 1000, 16 << 20
CALL_MESSAGES = 10_000  # messages per ack, nack, release or extend


@dataclass(frozen=True)
class ConsumeResult:
    """The numbers of messages that were leased, acked and nacked."""

    leased: int
    acked: int
    nacked: int
    lost: tuple[int, ...]  # ids whose lease ended before they were acked; they are delivered again


def consume(
    spark: Any,
    topic: str,
    fn: Callable[[Any], Any],
    max_messages: int = 10_000,
    *,
    where: Mapping[str, str] | None = None,
    url: str | None = None,
    api_key: str | None = None,
    visibility: float = VISIBILITY,
    wait: float = 0.0,
    partitions: int | None = None,
    holder: str | None = None,
    fail_on_lost: bool = False,
) -> ConsumeResult:
    """Lease up to `max_messages` of a topic's best messages, call `fn(df)` with them, and ack them when it returns.

        consume(spark, "orders", lambda df: df.select("value").write.mode("append").parquet("orders"))

    Delivery is at least once. If `fn` fails, all messages are released and its exception is raised. If the driver dies,
    they are redelivered when their leases end, after at most `visibility` seconds. What `fn` wrote by then is written
    again next time, unless its writes are idempotent. Leases are extended while `fn` runs. A lease that ends anyway
    (the driver was suspended, the server unreachable) is listed in `lost` of the result, and its message is not acked;
    with `fail_on_lost`, LeaseLost is raised after all other messages were acked.

    `df` has the columns listed in docs/spark-schema.md and the same rows in every action. `fn` is not called if there
    are no messages after `wait` seconds. To reject messages, `fn` returns their ids: an iterable of ids or of (id,
    reason), or a DataFrame with `message_id` or `id` and optionally `reason`. These are nacked, all others acked.

    `where` names a server with the options of the format (`heapline.url`, `heapline.api_key_file`, …); `url` and
    `api_key` are short forms. Without them, the environment names the server. `partitions` is the number of partitions
    of `df`.
    """
    if max_messages < 1 or visibility <= 0:
        raise BadRequest(f"max_messages={max_messages} and visibility={visibility:g} must both be over 0")
    with client_of(resolve_target(_target(where or {}, url, api_key))) as client:

        def frame(table: Any) -> Any:
            df = spark.createDataFrame(table)
            return df if partitions is None else df.repartition(partitions)

        result = consume_with(client, frame, topic, fn, max_messages, visibility, wait, holder)
    if result.lost and fail_on_lost:
        raise LeaseLost(list(result.lost), topic)
    return result


def _target(where: Mapping[str, str], url: str | None, api_key: str | None) -> Target:
    if "path" in where:
        raise BadRequest("messages are leased from a server; set heapline.url instead of path")
    if unknown := sorted(where.keys() - set(SERVER_OPTIONS)):
        raise BadRequest(f"unknown option {unknown[0]!r} in where; use {', '.join(SERVER_OPTIONS)}")
    short = {"heapline.url": url, "heapline.api_key": api_key}
    return Target.of({**where, **{name: value for name, value in short.items() if value}})


def consume_with(
    client: Any,
    frame: Callable[[Any], Any],
    topic: str,
    fn: Callable[[Any], Any],
    max_messages: int,
    visibility: float = VISIBILITY,
    wait: float = 0.0,
    holder: str | None = None,
) -> ConsumeResult:
    """Consume with an open client. `frame` converts an Arrow table to a DataFrame."""
    with Leases(client, topic, visibility, holder) as leases:
        messages = leases.pop(max_messages, wait)
        if not messages:
            return ConsumeResult(0, 0, 0, ())
        rejected = _rejected(fn(frame(table_of(messages))), {message.id for message in messages}, messages[0].id_suffix)
        acked, nacked = leases.settle(rejected)
    if leases.lost:
        log_.warning("leases ended before their messages were acked", topic=topic, count=len(leases.lost))
    return ConsumeResult(len(messages), acked, nacked, tuple(sorted(leases.lost)))


def table_of(messages: list[Any]) -> Any:
    """Return leased messages as an Arrow table."""
    import pyarrow as pa

    schema = arrow_schema(CONSUMED)
    converted: dict[str, Callable[[Any], Any]] = {
        "key": lambda message: None if message.key is None else message.key.encode(),
        "value": lambda message: message.payload,
        "headers": lambda message: _pairs(message.headers),
    }  # all other columns are attributes of a message
    columns = [map(converted.get(field.name, attrgetter(field.name)), messages) for field in schema]
    return pa.table([pa.array(list(c), field.type) for c, field in zip(columns, schema, strict=True)], schema=schema)


def _pairs(headers: Mapping[str, str]) -> list[dict[str, Any]] | None:
    return [{"key": name, "value": value.encode()} for name, value in headers.items()] or None


def _rejected(returned: Any, leased: set[int], id_suffix: int) -> dict[int, str | None]:
    """Return the ids and reasons of the messages that `fn` rejected."""
    if returned is None:
        return {}
    if hasattr(returned, "collect"):
        name = next((n for n in ("message_id", "id") if n in returned.columns), None)
        if name is None:
            raise BadRequest("a DataFrame of messages to reject needs a column message_id or id")
        columns = [name, "reason"] if "reason" in returned.columns else [name]
        returned = [tuple(row) for row in returned.select(*columns).collect()]
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise BadRequest(f"fn must return None or the messages that it rejects, not {type(returned).__name__}")
    found: dict[int, str | None] = {}
    unknown: set[str] = set()
    for item in returned:
        id, reason = (*item, None)[:2] if isinstance(item, tuple) else (item, None)
        number, suffix = parse_id(id)
        if number not in leased or suffix not in (None, id_suffix):
            unknown.add(str(id))
        found[number] = None if reason is None else str(reason)
    if unknown:
        raise BadRequest(f"fn rejected {len(unknown)} message(s) that were not passed to it; all were released")
    return found


class Leases:
    """Message leases that a driver holds while a job runs: popped in batches, extended, and settled.

    Use it with `with`, around everything from the first pop to the last ack. A thread extends the leases every third of
    their duration. A lease that ends anyway (the driver was suspended, the server unreachable for too long) is recorded
    in `lost`: its message belongs, or will belong, to another consumer. If the driver is killed, messages that were not
    acked are redelivered when their leases end. `client` blocks and must be usable from several threads.
    """

    def __init__(self, client: Any, topic: str, visibility: float, holder: str | None = None) -> None:
        self._client, self._topic, self._visibility, self._holder = client, topic, visibility, holder
        self._held: dict[int, Any] = {}  # id -> message
        self.lost: set[int] = set()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._extend, name="heapline-leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if error is not None:
            try:
                self.call("release", self.held())
            except HeaplineError as failure:  # the leases will expire; the first error is the one to raise
                log_.warning("leases not released; they will expire", topic=self._topic, error=str(failure))

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def pop(self, count: int, wait: float) -> list[Any]:
        """Lease up to `count` of the available messages; wait up to `wait` seconds for the first."""
        popped: list[Any] = []
        while len(popped) < count:
            try:
                messages = self._client.pop(
                    self._topic,
                    min(POP_MESSAGES, count - len(popped)),
                    visibility=self._visibility,
                    wait=0.0 if popped else wait,
                    holder=self._holder,
                    max_bytes=POP_BYTES,
                )
            except ResourceExhausted:  # the limit of leases per consumer
                if not popped:
                    raise
                break
            if not messages:
                break
            with self._lock:
                self._held.update((message.id, message) for message in messages)
            popped += messages
        return popped

    def held(self) -> list[Any]:
        with self._lock:
            return list(self._held.values())

    def _extend(self) -> None:
        pause = self._visibility / 3
        while not self._ended.wait(pause):
            try:
                self.call("extend", self.held(), self._visibility, ends=False)
                pause = self._visibility / 3
            except Exception as error:  # two more tries fit before the leases end
                log_.warning("leases not extended; will retry", topic=self._topic, error=repr(error))
                pause = self._visibility / 10

    def call(self, method: str, messages: Sequence[Any], *args: Any, ends: bool = True, **more: Any) -> int:
        """Ack, nack, release or extend messages; return how many were still leased."""
        done = 0
        for first in range(0, len(messages), CALL_MESSAGES):
            part = list(messages[first : first + CALL_MESSAGES])
            call: Callable[..., None] = getattr(self._client, method)
            try:
                call(part, *args, **more)
                gone: list[int] = []
            except LeaseLost as error:  # the call succeeded for all other messages
                gone = error.lost
            with self._lock:
                for id in gone if not ends else [message.id for message in part]:
                    self._held.pop(id, None)
                self.lost.update(gone)
            done += len(part) - len(gone)
        return done

    def settle(self, rejected: Mapping[int, str | None]) -> tuple[int, int]:
        """Nack the rejected messages with their reasons and ack all others; return (acked, nacked)."""
        self._stop()  # do not extend leases while they are acked
        held = self.held()
        acked = self.call("ack", [message for message in held if message.id not in rejected])
        nacked = 0
        for reason in sorted(set(rejected.values()), key=str):
            some = [message for message in held if message.id in rejected and rejected[message.id] == reason]
            nacked += self.call("nack", some, reason=reason)
        return acked, nacked
