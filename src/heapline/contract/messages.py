"""Messages: enqueue, read, cancel and reschedule them, and peek at the next ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, msgpack
from msgspec.structs import replace

from heapline.contract.call import Command, Page, Repeat, Right, call
from heapline.contract.check import INSTANT_MAX, SECONDS_MAX, compile_check, instant_to_ms, shown
from heapline.contract.columns import Columns, Int64, Packed, check_columns, pack, unpack
from heapline.contract.config import MAX_RETRIES_MAX
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.fields import (
    ANSWER_BYTES,
    INT64_MAX,
    INT64_MIN,
    KEY_BYTES_MAX,
    Cursor,
    Instant,
    Key,
    MaxBytes,
    MessageId,
    Natural,
    Priority,
    ProducerName,
    Seconds,
    Topic,
)
from heapline.contract.message import Enqueued, IdempotencyScope, MessageInfo, Outgoing

NAN = float("nan")
ABOVE_ZERO = math.ulp(0.0)  # the smallest float over 0
INSTANT_MS_MAX = instant_to_ms(INSTANT_MAX)
HEADERS_BYTES_MAX = 32 << 10
Ttl = Annotated[float, Meta(gt=0.0, le=SECONDS_MAX)]
Retries = Annotated[int, Meta(ge=0, le=MAX_RETRIES_MAX)]
Epoch = Annotated[int, Meta(ge=1, le=1 << 62)]
AnsweredBelow = Annotated[int, Meta(ge=0, le=1 << 62)]
Headers = Annotated[dict[str, str], Meta(extra={"wanted": "a mapping of strings to strings"})]
SCOPES = ("window", "pending", "until_ack")  # numbered from 1 in a packed column
_encode = msgpack.Encoder().encode


def check_headers(headers: Any) -> None:
    if not isinstance(headers, dict):
        raise BadRequest(f"headers must be a mapping of strings to strings, got {shown(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadRequest(f"headers must be strings, got {name!r}: {value!r}; write numbers as text")
    try:
        size = len(_encode(headers))
    except UnicodeEncodeError:
        raise BadRequest("headers cannot be encoded as UTF-8") from None
    if size > HEADERS_BYTES_MAX:
        raise BadRequest(f"headers must take at most {HEADERS_BYTES_MAX} bytes, got {size}")


def check_times(delay: Any, deliver_at: Any) -> None:
    if delay is not None and deliver_at is not None:
        raise BadRequest("give delay or deliver_at, not both")


_check_extras: Any = None
PRODUCER_FIELDS = ("producer_id", "epoch", "answered_below")


def check_payload(payload: Any) -> None:
    if type(payload) is not bytes:
        raise BadRequest(f"payload must be bytes, got {type(payload).__name__}; encode it first, for example as JSON")


def check_message(message: Any) -> None:
    """Raise BadRequest unless `message` is an Outgoing that could be enqueued to some topic."""
    global _check_extras
    if not isinstance(message, Outgoing):
        raise BadRequest(f"a batch holds heapline.Outgoing(…), got {type(message).__name__}")
    check_payload(message.payload)
    if _check_extras is None:
        _check_extras = compile_check(Enqueue, ("topic", "payload", "headers", *PRODUCER_FIELDS))
    _check_extras(message)
    if message.headers:
        check_headers(_as_dict(message.headers))
    check_times(message.delay, message.deliver_at)
    if message.idempotency_scope is not None and message.idempotency_key is None:
        raise BadRequest("idempotency_scope needs an idempotency_key")


def _as_dict(headers: Any) -> Any:
    try:
        return dict(headers)
    except (TypeError, ValueError):
        return headers


class NewMessages(Columns, frozen=True, forbid_unknown_fields=True):
    """A batch to enqueue. A column that no message uses is absent."""

    payloads: list[bytes]
    priorities: Int64 | None = None
    keys: list[str | None] | None = None
    delays: Annotated[memoryview, Packed("d", NAN, 0.0, SECONDS_MAX)] | None = None  # seconds
    deliver_at_ms: Annotated[memoryview, Packed("q", 0, 0, INSTANT_MS_MAX)] | None = None  # since 1970
    headers: list[dict[str, str] | None] | None = None
    ttls: Annotated[memoryview, Packed("d", NAN, ABOVE_ZERO, SECONDS_MAX)] | None = None  # seconds
    max_retries: Annotated[memoryview, Packed("q", -1, -1, MAX_RETRIES_MAX)] | None = None
    idempotency_keys: list[str | None] | None = None
    idempotency_scopes: Annotated[memoryview, Packed("B", 0, 0, len(SCOPES))] | None = None  # from 1, as in SCOPES
    seqs: Annotated[memoryview, Packed("q", -1, -1, INT64_MAX)] | None = None
    fairness_keys: list[str | None] | None = None

    row: ClassVar[type[Any]] = Outgoing

    def __post_init__(self) -> None:
        if self.payloads and set(map(type, self.payloads)) != {bytes}:
            raise BadRequest("payloads must be bytes; encode them first, for example as JSON")
        check_columns(self, len(self.payloads))
        for name in ("keys", "idempotency_keys", "fairness_keys"):
            if (texts := getattr(self, name)) is not None:
                _check_texts(name, texts, KEY_BYTES_MAX)
        if self.headers is not None:
            for headers in self.headers:
                if headers is not None:
                    check_headers(headers)
        if self.delays is not None and self.deliver_at_ms is not None:
            at = self.deliver_at_ms.cast("B").cast("q")
            if any(d == d and a for d, a in zip(self.delays.cast("B").cast("d"), at, strict=True)):
                check_times(1, 1)
        if self.idempotency_scopes is not None:
            keys = self.idempotency_keys or [None] * len(self.payloads)
            if any(s and k is None for s, k in zip(bytes(self.idempotency_scopes), keys, strict=True)):
                raise BadRequest("idempotency_scope needs an idempotency_key")

    @property
    def is_plain(self) -> bool:
        """Whether the messages have nothing but payload, priority and perhaps a time."""
        return (
            self.keys is None
            and self.headers is None
            and self.delays is None
            and self.ttls is None
            and self.max_retries is None
            and self.idempotency_keys is None
            and self.fairness_keys is None
        )


def _check_texts(name: str, column: list[str | None], limit: int) -> None:
    for value in column:
        if value is None:
            continue
        if type(value) is str and 0 < len(value) <= limit:
            if value.isascii():
                continue
            with contextlib.suppress(UnicodeEncodeError):
                if len(value.encode()) <= limit:
                    continue
        raise BadRequest(f"each of {name} must be a string of 1 to {limit} bytes or None, got {shown(value)}")


def pack_messages(messages: Sequence[Outgoing]) -> NewMessages:
    """Columns of checked messages. A column that no message uses is left out."""
    at = [None if m.deliver_at is None else max(1, instant_to_ms(m.deliver_at)) for m in messages]
    scopes = [None if m.idempotency_scope is None else SCOPES.index(m.idempotency_scope) + 1 for m in messages]
    optional: tuple[tuple[str, list[Any], str | None, Any], ...] = (
        # name, values, form of a packed column, number that stands for None
        ("keys", [m.key for m in messages], None, None),
        ("delays", [m.delay for m in messages], "d", NAN),
        ("deliver_at_ms", at, "q", 0),
        ("headers", [dict(m.headers) if m.headers else None for m in messages], None, None),
        ("ttls", [m.ttl for m in messages], "d", NAN),
        ("max_retries", [m.max_retries for m in messages], "q", -1),
        ("idempotency_keys", [m.idempotency_key for m in messages], None, None),
        ("idempotency_scopes", scopes, "B", 0),
        ("seqs", [m.seq for m in messages], "q", -1),
        ("fairness_keys", [m.fairness_key for m in messages], None, None),
    )
    columns: dict[str, Any] = {}
    for name, values, form, none in optional:
        if values.count(None) < len(values):
            columns[name] = values if form is None else pack([none if v is None else v for v in values], form)
    return NewMessages([m.payload for m in messages], pack([m.priority for m in messages]), **columns)


def numbered(messages: NewMessages, first_seq: int | None) -> NewMessages:
    """Return the messages with the numbers that an `EnqueueBatch` gives them."""
    if first_seq is None:
        return messages
    return replace(messages, seqs=pack(range(first_seq, first_seq + len(messages.payloads))))


def check_messages(messages: Sequence[Any], atomic: bool) -> dict[int, HeaplineError]:
    """Errors by row. The first one is raised if the batch is atomic."""
    errors: dict[int, HeaplineError] = {}
    for i, message in enumerate(messages):
        try:
            check_message(message)
        except HeaplineError as error:
            if atomic:
                raise
            errors[i] = error
    return errors


def pack_plain(messages: Sequence[Any]) -> NewMessages | None:
    """Columns of messages that are valid and have nothing but payload and priority; None if some are not.

    The common batch, checked by columns: a third of the time of checking each message.
    """
    if set(map(type, messages)) != {Outgoing} or any(
        m.headers
        or m.seq is not None
        or m.delay is not None
        or m.deliver_at is not None
        or m.ttl is not None
        or m.max_retries is not None
        or m.idempotency_key is not None
        or m.idempotency_scope is not None
        or m.key is not None
        or m.fairness_key is not None
        for m in messages
    ):
        return None
    payloads = [m.payload for m in messages]
    priorities = [m.priority for m in messages]
    if set(map(type, payloads)) != {bytes} or set(map(type, priorities)) != {int}:
        return None
    if min(priorities) < INT64_MIN or max(priorities) > INT64_MAX:
        return None
    return NewMessages(payloads, pack(priorities))


class RowError(Struct, frozen=True):
    """The error of one row of a batch that is not atomic."""

    row: int
    error: HeaplineError


class EnqueuedBatch(Struct, frozen=True, omit_defaults=True):
    """The ids of a batch, by row. A row with an error has id 0."""

    ids: memoryview  # int64
    duplicates: memoryview | None = None  # one byte per row; absent if no row is a duplicate
    errors: list[RowError] | None = None
    id_suffix: int = 0  # of the topic: the low bits of its messages' ULIDs


def enqueued(batch: EnqueuedBatch) -> list[Enqueued]:
    ids = unpack(batch.ids)
    if batch.duplicates is None:
        results = [Enqueued(id, id_suffix=batch.id_suffix) for id in ids]
    else:
        duplicates = zip(ids, bytes(batch.duplicates), strict=True)
        results = [Enqueued(id, bool(d), id_suffix=batch.id_suffix) for id, d in duplicates]
    for e in batch.errors or ():
        results[e.row] = Enqueued(0, error=e.error)
    return results


def pack_enqueued(results: Sequence[Enqueued], id_suffix: int) -> EnqueuedBatch:
    """Return the results of single messages as columns."""
    errors = []
    for i, r in enumerate(results):
        if r.error is not None:
            assert isinstance(r.error, HeaplineError)
            errors.append(RowError(i, r.error))
    duplicates = [r.duplicate for r in results]
    return EnqueuedBatch(
        pack([r.id for r in results]),
        memoryview(bytes(duplicates)) if any(duplicates) else None,
        errors or None,
        id_suffix,
    )


@call(id=0x10, rpc="Enqueue", http="POST /v1/enqueue", needs=Right.PRODUCE, repeat=Repeat.KEYED)
class Enqueue(Command[Enqueued], gc=False):
    """Enqueue one message. Answered when it is durable."""

    topic: Topic
    payload: bytes
    priority: Priority = 0
    key: Key | None = None
    delay: Seconds | None = None
    deliver_at: Instant | None = None
    headers: Headers | None = None
    ttl: Ttl | None = None
    max_retries: Retries | None = None
    idempotency_key: Key | None = None
    idempotency_scope: IdempotencyScope | None = None
    fairness_key: Key | None = None
    producer_id: ProducerName | None = None
    epoch: Epoch | None = None
    seq: Natural | None = None
    answered_below: AnsweredBelow | None = None

    def validate(self) -> None:
        if type(self.payload) is not bytes:
            check_payload(self.payload)
        if self.headers:
            check_headers(self.headers)
        if self.delay is not None:
            check_times(self.delay, self.deliver_at)
        if self.idempotency_scope is not None and self.idempotency_key is None:
            raise BadRequest("idempotency_scope needs an idempotency_key")
        has_seq = self.seq is not None
        if has_seq or self.producer_id is not None or self.epoch is not None or self.answered_below is not None:
            check_identity(self, has_seq, has_seq)


def check_identity(command: Any, any_seq: bool, all_seqs: bool) -> None:
    if command.producer_id is None:
        if command.epoch is not None or command.answered_below is not None or any_seq:
            raise BadRequest("epoch, seq and answered_below need a producer_id; give it, or omit them")
    elif not all_seqs:
        raise BadRequest("with producer_id every message needs its seq")
    elif command.epoch is None:
        raise BadRequest("epoch must be an integer from 1 to 2^62, got None")


@call(id=0x11, rpc="EnqueueBatch", http="POST /v1/enqueue:batch", needs=Right.PRODUCE, repeat=Repeat.KEYED)
class EnqueueBatch(Command[EnqueuedBatch], gc=False):
    """Enqueue messages, all or none. With `atomic` false each row has its own outcome."""

    topic: Topic
    messages: NewMessages
    atomic: bool = True
    producer_id: ProducerName | None = None
    epoch: Epoch | None = None
    answered_below: AnsweredBelow | None = None
    first_seq: Natural | None = None  # the number of the first message; the others follow. Instead of their `seqs`

    def validate(self) -> None:
        seqs = self.messages.seqs
        if self.first_seq is not None:
            if seqs is not None:
                raise BadRequest("give first_seq, or each message its seq, not both")
            if self.first_seq > INT64_MAX - len(self.messages) + 1:
                raise BadRequest(f"first_seq {self.first_seq} is too large for {len(self.messages)} messages")
            check_identity(self, any_seq=True, all_seqs=True)
            return
        if seqs is None and self.producer_id is None and self.epoch is None and self.answered_below is None:
            return
        numbered = None if seqs is None else min(memoryview(seqs).cast("B").cast("q"), default=0) >= 0
        check_identity(self, numbered is not None, bool(numbered))


@call(id=0x12, rpc="OpenProducer", http="POST /v1/producers:open", needs=Right.PRODUCE)
class OpenProducer(Command["Opened"]):
    """Begin a new epoch of a producer. Older epochs are rejected from then on."""

    topic: Topic
    producer_id: ProducerName


class Opened(Struct, frozen=True):
    epoch: int


OpenProducer.result = Opened


@call(id=0x13, rpc="Get", http="GET /v1/get", needs=Right.CONSUME)
class GetMessage(Command[MessageInfo]):
    """Return what is known of one message, whatever its state."""

    topic: Topic
    message_id: MessageId


@call(id=0x14, rpc="Peek", http="GET /v1/peek", needs=Right.CONSUME)
class Peek(Command[Page[MessageInfo]]):
    """Return the next messages without leasing them."""

    topic: Topic
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10
    cursor: Cursor | None = None
    max_bytes: MaxBytes = ANSWER_BYTES


class MessageScan(Struct, frozen=True, omit_defaults=True):
    """Messages in the order of their ids, all as of one time."""

    items: list[MessageInfo]
    at_ms: int  # by the broker's clock
    incarnation: int  # of the topic
    next_id: int | None = None  # where to continue; absent if the range is finished


@call(id=0x18, rpc="ScanMessages", http="GET /v1/messages", needs=Right.CONSUME, feature="scan")
class ScanMessages(Command[MessageScan]):
    """Return messages with ids from `first_id` to before `end_id`: ready, delayed and leased ones, or dead ones.

    An answer has at most `limit` of them and about `max_bytes`. To read all, call again with `first_id=next_id`: each
    message that is there throughout is returned once, as it is at the time of its answer.
    """

    topic: Topic
    dead: bool = False
    first_id: Natural = 0
    end_id: Natural = INT64_MAX
    payloads: bool = True
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    max_bytes: MaxBytes = ANSWER_BYTES


class IdRanges(Struct, frozen=True):
    """Ranges of ids: each from one bound to before the next. Without messages there are no bounds."""

    bounds: list[int]
    incarnation: int  # of the topic


@call(id=0x19, rpc="SplitMessages", http="GET /v1/messages:split", needs=Right.CONSUME, feature="scan")
class SplitMessages(Command[IdRanges]):
    """Divide the current messages into ranges of about `rows` messages, at least `parts`, for parallel scans."""

    topic: Topic
    dead: bool = False
    rows: Annotated[int, Meta(ge=1, le=INT64_MAX)] = 100_000
    parts: Annotated[int, Meta(ge=1, le=1000)] = 1


@call(id=0x15, rpc="Cancel", http="POST /v1/cancel", needs=Right.PRODUCE)
class Cancel(Command[None]):
    """Remove a message that waits."""

    topic: Topic
    message_id: MessageId


@call(id=0x16, rpc="Reschedule", http="POST /v1/reschedule", needs=Right.PRODUCE)
class Reschedule(Command[None]):
    """Change when or how urgently a waiting message is served. What is not given stays."""

    topic: Topic
    message_id: MessageId
    delay: Seconds | None = None
    deliver_at: Instant | None = None
    priority: Priority | None = None

    def validate(self) -> None:
        check_times(self.delay, self.deliver_at)
        if self.delay is None and self.deliver_at is None and self.priority is None:
            raise BadRequest("nothing to change; give delay, deliver_at or priority")
