"""A broker over HTTP: the contract of broker.py, call by call, with the same errors.

As thin as the one over gRPC (wire.py): it retries nothing and joins nothing. It needs httpx alone. What cannot be
undone is asked for twice here, because whoever calls `purge` in a program has decided already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from heapline.broker import Held, MessageId
from heapline.client import json_reading as reading
from heapline.client.checks import (
    check_outgoing,
    check_outgoings,
    check_pop,
    check_range,
    check_rate,
    check_reschedule,
    check_throttle,
    checked_parts,
    checked_topic,
)  # fmt: skip
from heapline.client.http_calls import HttpCalls, read_error
from heapline.client.http_groups import HttpGroups
from heapline.client.http_replays import HttpReplays
from heapline.client.http_schedules import HttpSchedules
from heapline.client.leases import Outcome, on_each_topic
from heapline.client.numbering import enqueue_checked, enqueue_numbered
from heapline.client.returning import Returns
from heapline.engine.calls import Identity
from heapline.engine.columns import check_moment, check_seconds
from heapline.engine.requests import (
    check_filter,
    check_int,
    check_name,
    check_producer,
    check_reason,
    check_sink,
    check_unnumbered,
    identity_of,
    messages_by_topic,
    parse_ids,
)  # fmt: skip
from heapline.errors import Closed, ConfirmationNeeded
from heapline.model import (
    BatchInfo,
    DlqFilter,
    Enqueued,
    IdempotencyScope,
    LogFrame,
    Message,
    MessageInfo,
    Outgoing,
    SinkInfo,
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer
from heapline.ulid import parse_id
from heapline.wire import json_log
from heapline.wire import json_requests as ask
from heapline.wire import json_shapes as told

BATCH_BYTES = 16 << 20  # of one request; larger batches that need not be atomic are sent in pieces
T = TypeVar("T")


class HttpBroker(HttpGroups, HttpReplays, HttpSchedules):
    """`async with HttpBroker("http://localhost:7480", credential="Bearer …") as broker: …`"""

    def __init__(self, url: str, *, credential: str | None = None, timeout: float | None = None) -> None:
        self._url = url
        self._credential = credential
        self._timeout = timeout
        self._calls_or_none: HttpCalls | None = None
        self._returns = Returns(self.release)

    async def __aenter__(self) -> HttpBroker:
        self._calls_or_none = HttpCalls(self._url, self._credential, self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._returns.close()
        calls, self._calls_or_none = self._calls_or_none, None
        if calls is not None:
            await calls.close()

    @property
    def calls(self) -> HttpCalls:
        if self._calls_or_none is None:
            raise Closed
        return self._calls_or_none

    async def _post(self, path: str, kind: type[T], body: Any = None) -> T:
        return await self.calls("POST", f"/v1/{path}", kind, body)

    async def _twice(self, method: str, path: str, kind: type[T], body: Any = None) -> T:
        """A call that must be confirmed, and its confirmation."""
        try:
            return await self.calls(method, path, kind, body, {"force": "true"})
        except ConfirmationNeeded as needed:
            confirmed = {"x-confirmation": needed.token}
        return await self.calls(method, path, kind, body, {"force": "true"}, confirmed)

    # -- topics ----------------------------------------------------------------------------------------------------

    async def create_topic(self, topic: str, **config: Any) -> TopicInfo:
        body = told.config_json({"topic": checked_topic(topic), **config}).encode()
        return reading.topic_info(await self._post("heaps", told.HeapTold, body))

    async def update_topic(self, topic: str, **config: Any) -> TopicInfo:
        body = told.config_json(config).encode()
        return reading.topic_info(await self.calls("PATCH", _heap(topic), told.HeapTold, body))

    async def list_topics(self) -> list[TopicInfo]:
        answer = await self.calls("GET", "/v1/heaps", told.HeapsTold)
        return [reading.topic_info(heap) for heap in answer.heaps]

    async def delete_topic(self, topic: str) -> None:
        await self._twice("DELETE", _heap(topic), told.Done)

    async def stats(self, topic: str) -> TopicStats:
        query = {"topic": checked_topic(topic)}
        return (await self.calls("GET", "/v1/stats", told.StatsTold, query=query)).heaps[0]

    async def purge(self, topic: str) -> int:
        return (await self._twice("POST", f"{_heap(topic)}:purge", told.Count)).count

    async def pause_topic(self, topic: str, until: datetime | None = None) -> None:
        if until is not None:
            check_moment("until", until)
        await self.calls("POST", f"{_heap(topic)}:pause", told.Done, ask.PauseAsk(until=until))

    async def resume_topic(self, topic: str) -> None:
        await self.calls("POST", f"{_heap(topic)}:resume", told.Done)

    async def set_partition_throttled(
        self, topic: str, partition: int, throttled: bool, reason: str | None = None
    ) -> None:
        check_throttle(partition, throttled, reason)
        body = ask.ThrottleAsk(partition=partition, throttled=throttled, reason=reason)
        await self.calls("POST", f"{_heap(topic)}:throttle", told.Done, body)

    async def snapshot(self, topic: str) -> None:
        await self.calls("POST", f"{_heap(topic)}:snapshot", told.Done)

    # -- in --------------------------------------------------------------------------------------------------------

    async def enqueue(
        self, topic: str, payload: bytes, *, priority: int = 0, key: str | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, headers: Mapping[str, str] | None = None, ttl: float | None = None,
        max_retries: int | None = None, idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, seq: int | None = None,
        answered_below: int | None = None, fairness_key: str | None = None,
    ) -> Enqueued:  # fmt: skip
        message = Outgoing(
            payload, priority, key, delay, deliver_at, headers, ttl, max_retries, idempotency_key, idempotency_scope,
            seq, fairness_key,
        )  # fmt: skip
        check_outgoing(message, checked_topic(topic))
        if producer is not None:
            check_unnumbered([message], producer_id, epoch, answered_below)
            return (await enqueue_numbered(self, self, topic, [message], True, producer))[0]
        identity = identity_of(producer_id, epoch, answered_below, [message])
        body = ask.EnqueueAsk(topic=topic, **reading.fields_of(message), **_identity(identity))
        return reading.enqueued(await self._post("enqueue", told.EnqueuedTold, body))

    async def enqueue_batch(
        self, topic: str, messages: Sequence[Outgoing], *, atomic: bool = True, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, answered_below: int | None = None,
    ) -> list[Enqueued]:  # fmt: skip
        return await enqueue_checked(
            self, self, checked_topic(topic), messages, atomic, producer, producer_id, epoch, answered_below
        )

    async def send_batch(
        self, topic: str, messages: list[Outgoing], atomic: bool, identity: Identity | None
    ) -> list[Enqueued]:
        """Checked messages, with their numbers if they have any."""
        if not atomic and len(messages) > 1 and sum(len(m.payload) for m in messages) > BATCH_BYTES:
            half = len(messages) // 2
            first = await self.send_batch(topic, messages[:half], atomic, identity)
            return first + await self.send_batch(topic, messages[half:], atomic, identity)
        body = ask.EnqueueBatchAsk(
            topic=topic, messages=list(map(reading.new_message, messages)), atomic=atomic, **_identity(identity)
        )
        return reading.results((await self._post("enqueue:batch", told.BatchEnqueuedTold, body)).results)

    async def open_producer(self, topic: str, producer_id: str) -> int:
        check_producer(producer_id)
        body = ask.OpenProducerAsk(topic=checked_topic(topic), producer_id=producer_id)
        return (await self._post("producers:open", told.EpochTold, body)).epoch

    # -- prepared batches ------------------------------------------------------------------------------------------

    async def prepare_batch(
        self, batch_id: str, part: str, messages: Mapping[str, Sequence[Outgoing]] | Sequence[Outgoing], *,
        topic: str | None = None, producer_id: str | None = None, epoch: int | None = None,
        answered_below: int | None = None,
    ) -> dict[str, list[Enqueued]]:  # fmt: skip
        check_name("batch_id", batch_id)
        check_name("part", part)
        shares = messages_by_topic(messages, topic)
        for name, outgoing in shares.items():
            check_outgoings(outgoing, checked_topic(name), atomic=True)
        everything = [message for outgoing in shares.values() for message in outgoing]
        identity = _identity(identity_of(producer_id, epoch, answered_below, everything))
        packed = {name: list(map(reading.new_message, outgoing)) for name, outgoing in shares.items()}
        body = ask.PrepareAsk(batch_id=batch_id, part=part, messages=packed, **identity)
        answer = await self._post("batches:prepare", told.PreparedTold, body)
        return {name: reading.results(rows) for name, rows in answer.results.items()}

    async def commit_batch(
        self, batch_id: str, parts: Sequence[str], *, sink: str | None = None, version: int | None = None
    ) -> int:
        check_sink(sink, version)
        body = ask.CommitAsk(batch_id=batch_id, parts=checked_parts(batch_id, parts), sink=sink, version=version)
        return (await self._post("batches:commit", told.Count, body)).count

    async def abort_batch(self, batch_id: str) -> int:
        check_name("batch_id", batch_id)
        return (await self._post("batches:abort", told.Count, ask.AbortAsk(batch_id=batch_id))).count

    async def list_batches(self) -> list[BatchInfo]:
        return (await self.calls("GET", "/v1/batches", told.BatchesTold)).batches

    async def list_sinks(self) -> list[SinkInfo]:
        return (await self.calls("GET", "/v1/sinks", told.SinksTold)).sinks

    async def forget_sink(self, name: str) -> bool:
        check_name("name", name)
        return (await self._twice("DELETE", f"/v1/sinks/{quote(name, safe='')}", told.KnownTold)).known

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        check_pop(visibility, wait, holder, request_id, max_messages, max_bytes)
        body = ask.PopAsk(
            topic=checked_topic(topic), max_messages=max_messages, visibility=visibility, wait=wait, holder=holder,
            max_bytes=max_bytes, request_id=request_id,
        )  # fmt: skip
        return await self._returns.pop(self._pop(body), wait > 0, request_id is not None)

    async def _pop(self, body: ask.PopAsk) -> list[Message]:
        answer = await self._post("pop", told.PopTold, body)
        return [reading.message(self, answer.topic, row) for row in answer.messages]

    async def ack(self, messages: Held) -> None:
        await self._on_leases("ack", messages, ask.LeasesAsk)

    async def nack(self, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None:
        if backoff is not None:
            check_seconds("backoff", backoff)
        check_reason(reason)
        await self._on_leases("nack", messages, ask.NackAsk, backoff=backoff, reason=reason)

    async def release(self, messages: Held) -> None:
        await self._on_leases("release", messages, ask.LeasesAsk)

    async def extend(self, messages: Held, seconds: float) -> None:
        check_seconds("seconds", seconds, 0.001)
        await self._on_leases("extend", messages, ask.ExtendAsk, seconds=seconds)

    async def bury(self, messages: Held, *, reason: str | None = None) -> None:
        check_reason(reason)
        await self._on_leases("bury", messages, ask.BuryAsk, reason=reason)

    async def _on_leases(self, verb: str, messages: Held, kind: Any, **options: Any) -> None:
        async def act(topic: str, ids: list[int], tokens: list[int]) -> Outcome:
            leases = reading.leases(ids, tokens)
            answer = await self._post(
                verb, told.LeasesTold, kind(topic=topic, leases=leases, tell_lost=True, **options)
            )  # fmt: skip
            return reading.outcome(ids, answer)

        await on_each_topic(messages, act)

    # -- by id -----------------------------------------------------------------------------------------------------

    async def get(self, topic: str, message_id: MessageId) -> MessageInfo:
        query = {"topic": checked_topic(topic), "message_id": str(parse_id(message_id))}
        return reading.message_info(await self.calls("GET", "/v1/get", told.MessageTold, query=query))

    async def peek(self, topic: str, limit: int = 10) -> list[MessageInfo]:
        check_int("limit", limit, 1, 10_000)
        query = {"topic": checked_topic(topic), "limit": limit}
        found = await self.calls("GET", "/v1/peek", told.MessagesTold, query=query)
        return list(map(reading.message_info, found.messages))

    async def cancel(self, topic: str, message_id: MessageId) -> None:
        body = ask.MessageAsk(topic=checked_topic(topic), message_id=str(parse_id(message_id)))
        await self._post("cancel", told.Done, body)

    async def reschedule(
        self, topic: str, message_id: MessageId, *, delay: float | None = None, deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        check_reschedule(delay, deliver_at, priority)
        body = ask.RescheduleAsk(
            topic=checked_topic(topic), message_id=str(parse_id(message_id)), delay=delay, deliver_at=deliver_at,
            priority=priority,
        )  # fmt: skip
        await self._post("reschedule", told.Done, body)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def dlq_list(self, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        check_int("limit", limit, 1, 1 << 31)
        check_filter(where)
        described = {} if where is None else msgspec.to_builtins(reading.where(where))
        query = {"topic": checked_topic(topic), "limit": limit} | described
        found = await self.calls("GET", "/v1/dlq", told.MessagesTold, query=query)
        return list(map(reading.message_info, found.messages))

    async def dlq_replay(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:  # fmt: skip
        check_rate(rate)
        body = ask.ReplayAsk(**_dead(topic, ids, where), rate=rate)
        return (await self._post("dlq:replay", told.Count, body)).count

    async def dlq_delete(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int:
        body = ask.DeadAsk(**_dead(topic, ids, where))
        return (await self._twice("POST", "/v1/dlq:delete", told.Count, body)).count

    # -- the log ---------------------------------------------------------------------------------------------------

    async def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        query = {"topic": checked_topic(topic)}
        answer = await self.calls("GET", "/v1/offsets", told.OffsetsTold, query=query)
        return {p.partition: (p.start, p.end) for p in answer.partitions}

    async def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        check_range(partition, start, end)
        query = {"topic": checked_topic(topic), "partition": partition, "start": start, "end": end}
        async for line in self.calls.lines("/v1/log", query):
            if line.startswith(b'{"error"'):
                raise read_error(msgspec.json.decode(line))
            yield json_log.read_frame(msgspec.json.decode(line, type=json_log.FrameTold))


def _heap(topic: str) -> str:
    return f"/v1/heaps/{quote(checked_topic(topic))}"


def _identity(identity: Identity | None) -> dict[str, Any]:
    return {} if identity is None else identity._asdict()


def _dead(topic: str, ids: Sequence[MessageId] | None, where: DlqFilter | None) -> dict[str, Any]:
    check_filter(where)
    numbers = parse_ids(ids)
    return {
        "topic": checked_topic(topic),
        "message_ids": None if numbers is None else list(map(str, numbers)),
        "where": None if where is None else reading.where(where),
    }
