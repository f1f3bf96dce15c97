"""A broker over one gRPC channel: the contract of broker.py, call by call, with the same errors.

Thin on purpose: it retries nothing and joins nothing. Messages act through the broker that popped them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from heapline.broker import Held, MessageId
from heapline.client.calls import Calls
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
    is_plain,
)  # fmt: skip
from heapline.client.groups import WireGroups
from heapline.client.leases import Outcome, on_each_topic
from heapline.client.numbering import enqueue_checked, enqueue_numbered
from heapline.client.replaying import WireReplays
from heapline.client.returning import Returns
from heapline.client.schedules import WireSchedules
from heapline.client.target import ClientTls, parse_target
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
from heapline.errors import Closed, ConfirmationNeeded, HeaplineError
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
from heapline.wire import shapes
from heapline.wire.columns import ints, pack_outgoing, pack_plain, read_ints, to_us, unpack_messages
from heapline.wire.schema import pb

BATCH_BYTES = 16 << 20  # of one request; larger batches that need not be atomic are sent in pieces
GIVE_UP_SECONDS = 2.0  # for the answer of a pop that was given up; then its call is cancelled


class WireBroker(WireGroups, WireReplays, WireSchedules):
    """`async with WireBroker("heaplines://queue:7400", credential="…", tls=ClientTls(ca="ca.crt")) as broker: …`

    Without a scheme and without `tls` the connection is in the clear: for loopback.
    """

    def __init__(
        self, target: str, *, credential: str | None = None, timeout: float | None = None, sessions: bool = True,
        tls: ClientTls | None = None,
    ) -> None:  # fmt: skip
        parse_target(target, tls)
        self._tls = tls
        self._target = target
        self._sessions = sessions
        self._credential = credential
        self._timeout = timeout
        self._calls_or_none: Calls | None = None
        self._returns = Returns(self.release)
        self._name, self._waits = secrets.token_hex(8), 0  # of pops that wait

    async def __aenter__(self) -> WireBroker:
        self._calls_or_none = Calls(
            self._target, self._credential, self._timeout, sessions=self._sessions, late=self._late, tls=self._tls
        )
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
    def calls(self) -> Calls:
        if self._calls_or_none is None:
            raise Closed
        return self._calls_or_none

    # -- topics ----------------------------------------------------------------------------------------------------

    async def create_topic(self, topic: str, **config: Any) -> TopicInfo:
        return await self._configure("MakeHeap", topic, config)

    async def update_topic(self, topic: str, **config: Any) -> TopicInfo:
        return await self._configure("UpdateHeapConfig", topic, config)

    async def _configure(self, method: str, topic: str, config: dict[str, Any]) -> TopicInfo:
        request = pb.HeapConfig(topic=checked_topic(topic), config_json=shapes.config_json(config))
        return shapes.unpack_info(await self.calls(method, request))

    async def list_topics(self) -> list[TopicInfo]:
        return [shapes.unpack_info(info) for info in (await self.calls("ListHeaps", pb.Nothing())).heaps]

    async def delete_topic(self, topic: str) -> None:
        await self._confirmed("DeleteHeap", pb.Heap(topic=checked_topic(topic)))

    async def stats(self, topic: str) -> TopicStats:
        return shapes.unpack_stats(await self._on_heap("Stats", topic))

    async def purge(self, topic: str) -> int:
        return _count(await self._confirmed("Purge", pb.Heap(topic=checked_topic(topic))))

    async def pause_topic(self, topic: str, until: datetime | None = None) -> None:
        if until is not None:
            check_moment("until", until)
        until_us = None if until is None else to_us(until)
        await self.calls("Pause", pb.PauseRequest(topic=checked_topic(topic), until_us=until_us))

    async def resume_topic(self, topic: str) -> None:
        await self._on_heap("Resume", topic)

    async def set_partition_throttled(
        self, topic: str, partition: int, throttled: bool, reason: str | None = None
    ) -> None:
        check_throttle(partition, throttled, reason)
        request = pb.ThrottleRequest(
            topic=checked_topic(topic), partition=partition, throttled=throttled, reason=reason
        )
        await self.calls("SetPartitionThrottled", request)

    async def snapshot(self, topic: str) -> None:
        await self._on_heap("Snapshot", topic)

    async def _confirmed(self, method: str, request: Any) -> Any:
        """Both steps of a call that cannot be undone: whoever calls it in Python has said what he means."""
        try:
            return await self.calls(method, request)
        except ConfirmationNeeded as needed:
            request.confirmation = needed.token
        return await self.calls(method, request)

    async def _on_heap(self, method: str, topic: str) -> Any:
        return await self.calls(method, pb.Heap(topic=checked_topic(topic)))

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
        identity = _identity(identity_of(producer_id, epoch, answered_below, [message]))
        request = pb.EnqueueRequest(topic=topic, message=shapes.pack_item(message), identity=identity)
        return shapes.unpack_result(await self.calls("Enqueue", request))

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
        request = pb.EnqueueBatchRequest(
            topic=topic, columns=_columns(messages), each_alone=not atomic, identity=_identity(identity)
        )  # fmt: skip
        return shapes.unpack_results(await self.calls("EnqueueBatch", request))

    async def open_producer(self, topic: str, producer_id: str) -> int:
        check_producer(producer_id)
        request = pb.OpenProducerRequest(topic=checked_topic(topic), producer_id=producer_id)
        epoch: int = (await self.calls("OpenProducer", request)).epoch
        return epoch

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
        packed = [pb.TopicMessages(topic=name, columns=_columns(share)) for name, share in shares.items()]
        request = pb.PrepareBatchRequest(batch_id=batch_id, part=part, shares=packed, identity=identity)
        answer = await self.calls("PrepareBatch", request)
        return {share.topic: shapes.unpack_results(share.results) for share in answer.shares}

    async def commit_batch(
        self, batch_id: str, parts: Sequence[str], *, sink: str | None = None, version: int | None = None
    ) -> int:
        parts = checked_parts(batch_id, parts)
        check_sink(sink, version)
        request = pb.CommitBatchRequest(batch_id=batch_id, parts=parts, sink=sink, version=version)
        return _count(await self.calls("CommitBatch", request))

    async def abort_batch(self, batch_id: str) -> int:
        check_name("batch_id", batch_id)
        return _count(await self.calls("AbortBatch", pb.BatchRequest(batch_id=batch_id)))

    async def list_batches(self) -> list[BatchInfo]:
        return shapes.unpack_batches(await self.calls("ListBatches", pb.Nothing()))

    async def list_sinks(self) -> list[SinkInfo]:
        return shapes.unpack_sinks(await self.calls("ListSinks", pb.Nothing()))

    async def forget_sink(self, name: str) -> bool:
        check_name("name", name)
        known: bool = (await self._confirmed("ForgetSink", pb.SinkRequest(name=name))).known
        return known

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        check_pop(visibility, wait, holder, request_id, max_messages, max_bytes)
        request = pb.PopRequest(
            topic=checked_topic(topic), max_messages=max_messages, visibility=visibility, wait=wait, holder=holder,
            max_bytes=max_bytes, request_id=request_id,
        )  # fmt: skip
        if self._sessions:
            return await self._popped(request)
        if wait:
            request.wait_id = self._wait_id()
        asking = asyncio.ensure_future(self.calls("Pop", request))
        try:
            return self._messages(await asyncio.shield(asking))
        except asyncio.CancelledError:
            self._returns.own(self._give_back(asking, request))
            raise

    async def _popped(self, request: Any) -> list[Message]:
        return self._messages(await self.calls("Pop", request))

    def _wait_id(self) -> str:
        self._waits += 1
        return f"{self._name}.{self._waits}"

    def _messages(self, answer: Any) -> list[Message]:
        return unpack_messages(self, answer.topic, answer.columns) if answer.columns.count else []

    def _late(self, method: str, request: bytes, answer: bytes) -> None:
        """What a call brought that was given up meanwhile. Not of a named pop: who repeats it has the same leases."""
        if method != "Pop" or pb.PopRequest.FromString(request).HasField("request_id"):
            return
        if messages := self._messages(pb.PopResponse.FromString(answer)):
            self._returns.late(messages)

    async def _give_back(self, asking: asyncio.Future[Any], request: Any) -> None:
        """Nobody waits for this pop any more: what it still brings goes back. It is not just cancelled, because then
        an answer that is on its way would be dropped, and its leases would last to their end."""
        with contextlib.suppress(HeaplineError, asyncio.CancelledError):
            if request.wait_id:
                await self.calls("Pop", pb.PopRequest(topic=request.topic, wait_id=request.wait_id, give_up=True))
            await asyncio.wait({asking}, timeout=GIVE_UP_SECONDS)
        if not asking.done():
            asking.cancel()
        with contextlib.suppress(HeaplineError, asyncio.CancelledError):
            messages = self._messages(await asking)
            if messages and not request.HasField("request_id"):  # who repeats a named pop has the same leases
                await self.release(messages)

    async def ack(self, messages: Held) -> None:
        await self._on_leases("Ack", messages)

    async def nack(self, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None:
        if backoff is not None:
            check_seconds("backoff", backoff)
        check_reason(reason)
        await self._on_leases("Nack", messages, seconds=backoff, reason=reason)

    async def release(self, messages: Held) -> None:
        await self._on_leases("Release", messages)

    async def extend(self, messages: Held, seconds: float) -> None:
        check_seconds("seconds", seconds, 0.001)
        await self._on_leases("Extend", messages, seconds=seconds)

    async def bury(self, messages: Held, *, reason: str | None = None) -> None:
        check_reason(reason)
        await self._on_leases("MoveToDLQ", messages, reason=reason)

    async def _on_leases(self, method: str, messages: Held, **options: Any) -> None:
        async def act(topic: str, ids: list[int], tokens: list[int]) -> Outcome:
            request = pb.LeasesRequest(topic=topic, ids=ints(ids), tokens=ints(tokens), tell_lost=True, **options)
            answer = await self._act(method, request)
            return Outcome(read_ints(answer.lost).tolist(), read_ints(answer.deadline_ms).tolist())

        await on_each_topic(messages, act)

    async def _act(self, method: str, request: Any) -> Any:
        return await self.calls(method, request)

    async def pop_stream(
        self, topic: str, credits: AsyncIterator[int], *, visibility: float | None = None, holder: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """Messages as they come, as many as there are credits; ends when these have ended."""
        start = pb.PopStart(topic=checked_topic(topic), visibility=visibility, holder=holder)

        async def requests() -> AsyncIterator[Any]:
            yield pb.PopStreamRequest(start=start)
            async for count in credits:
                yield pb.PopStreamRequest(credits=count)

        async for answer in self.calls.stream("PopStream", requests()):
            yield self._messages(answer)

    # -- by id -----------------------------------------------------------------------------------------------------

    async def get(self, topic: str, message_id: MessageId) -> MessageInfo:
        return shapes.unpack_message_info(await self.calls("Get", _of_message(topic, message_id)))

    async def peek(self, topic: str, limit: int = 10) -> list[MessageInfo]:
        check_int("limit", limit, 1, 10_000)
        found = await self.calls("Peek", pb.ListRequest(topic=checked_topic(topic), limit=limit))
        return [shapes.unpack_message_info(info) for info in found.messages]

    async def cancel(self, topic: str, message_id: MessageId) -> None:
        await self.calls("Cancel", _of_message(topic, message_id))

    async def reschedule(
        self, topic: str, message_id: MessageId, *, delay: float | None = None, deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        check_reschedule(delay, deliver_at, priority)
        request = pb.RescheduleRequest(
            topic=checked_topic(topic), message_id=str(parse_id(message_id)), delay=delay, priority=priority,
            deliver_at_us=None if deliver_at is None else to_us(deliver_at),
        )  # fmt: skip
        await self.calls("Reschedule", request)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def dlq_list(self, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        check_int("limit", limit, 1, 1 << 31)
        check_filter(where)
        request = pb.ListRequest(topic=checked_topic(topic), limit=limit, where=shapes.pack_filter(where))
        return [shapes.unpack_message_info(info) for info in (await self.calls("DlqList", request)).messages]

    async def dlq_replay(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:  # fmt: skip
        check_rate(rate)
        return await self._on_dead("DlqReplay", topic, ids, where, rate)

    async def dlq_delete(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int:
        return await self._on_dead("DlqDelete", topic, ids, where, None)

    async def _on_dead(
        self, method: str, topic: str, ids: Sequence[MessageId] | None, where: DlqFilter | None, rate: float | None
    ) -> int:
        check_filter(where)
        numbers = parse_ids(ids)
        request = pb.DlqRequest(
            topic=checked_topic(topic), where=shapes.pack_filter(where), rate=rate,
            ids=None if numbers is None else pb.Ids(message_ids=map(str, numbers)),
        )  # fmt: skip
        return _count(await (self._confirmed if method == "DlqDelete" else self.calls)(method, request))

    # -- the log ---------------------------------------------------------------------------------------------------

    async def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        answer = await self._on_heap("Offsets", topic)
        pairs = zip(read_ints(answer.starts).tolist(), read_ints(answer.ends).tolist(), strict=True)
        return dict(enumerate(pairs))

    async def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        check_range(partition, start, end)
        request = pb.ReadLogRequest(topic=checked_topic(topic), partition=partition, start=start, end=end)
        async for frame in self.calls.stream("ReadLog", request):
            yield shapes.unpack_frame(frame)


def _columns(messages: list[Outgoing]) -> Any:
    if messages and is_plain(messages):
        return pack_plain([m.payload for m in messages], [m.priority for m in messages])
    return pack_outgoing(messages)


def _identity(identity: Identity | None) -> Any:
    return None if identity is None else pb.Identity(**identity._asdict())


def _of_message(topic: str, message_id: MessageId) -> Any:
    return pb.MessageRequest(topic=checked_topic(topic), message_id=str(parse_id(message_id)))


def _count(answer: Any) -> int:
    count: int = answer.count
    return count
