"""A broker over one gRPC channel: the contract of broker.py, call by call, with the same errors.

Thin on purpose: it retries nothing and joins nothing. Messages act through the broker that popped them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from heapline.broker import Held, MessageId
from heapline.client.calls import Calls
from heapline.client.checks import check_outgoing, check_outgoings, is_plain
from heapline.client.numbering import enqueue_numbered
from heapline.client.target import ClientTls, parse_target
from heapline.config import parse_topic
from heapline.engine.columns import check_moment, check_priority, check_seconds
from heapline.engine.requests import (
    by_topic,
    check_filter,
    check_int,
    check_name,
    check_producer,
    check_reason,
    check_text,
    check_unnumbered,
    identity_of,
    listed,
    messages_by_topic,
    parse_ids,
)  # fmt: skip
from heapline.errors import BadRequest, Closed, ConfirmationNeeded, HeaplineError, LeaseLost
from heapline.model import (
    BatchInfo,
    DlqFilter,
    Enqueued,
    IdempotencyScope,
    LeaseRef,
    LogFrame,
    Message,
    MessageInfo,
    Outgoing,
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer
from heapline.ulid import parse_id
from heapline.wire import shapes
from heapline.wire.columns import ints, pack_outgoing, pack_plain, read_ints, to_us, unpack_messages
from heapline.wire.schema import pb

BATCH_BYTES = 16 << 20  # of one request; larger batches that need not be atomic are sent in pieces
CLOSE_SECONDS = 5.0  # for leases that are still being given back
_INT64 = (-(1 << 63), (1 << 63) - 1)


class WireBroker:
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
        self._tasks: set[asyncio.Task[None]] = set()

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
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
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
        request = pb.HeapConfig(topic=_topic(topic), config_json=shapes.config_json(config))
        return shapes.unpack_info(await self.calls(method, request))

    async def list_topics(self) -> list[TopicInfo]:
        return [shapes.unpack_info(info) for info in (await self.calls("ListHeaps", pb.Nothing())).heaps]

    async def delete_topic(self, topic: str) -> None:
        await self._confirmed("DeleteHeap", pb.Heap(topic=_topic(topic)))

    async def stats(self, topic: str) -> TopicStats:
        return shapes.unpack_stats(await self._on_heap("Stats", topic))

    async def purge(self, topic: str) -> int:
        return _count(await self._confirmed("Purge", pb.Heap(topic=_topic(topic))))

    async def pause_topic(self, topic: str, until: datetime | None = None) -> None:
        if until is not None:
            check_moment("until", until)
        until_us = None if until is None else to_us(until)
        await self.calls("Pause", pb.PauseRequest(topic=_topic(topic), until_us=until_us))

    async def resume_topic(self, topic: str) -> None:
        await self._on_heap("Resume", topic)

    async def set_partition_throttled(
        self, topic: str, partition: int, throttled: bool, reason: str | None = None
    ) -> None:
        if type(throttled) is not bool:
            raise BadRequest(f"throttled is True or False, not {throttled!r}")
        check_reason(reason)
        check_int("partition", partition, *_INT64)
        request = pb.ThrottleRequest(topic=_topic(topic), partition=partition, throttled=throttled, reason=reason)
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
        return await self.calls(method, pb.Heap(topic=_topic(topic)))

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
        check_outgoing(message, _topic(topic))
        if producer is not None:
            check_unnumbered([message], producer_id, epoch, answered_below)
            return (await enqueue_numbered(self, topic, [message], True, producer))[0]
        identity = _identity(producer_id, epoch, answered_below, [message])
        request = pb.EnqueueRequest(topic=topic, message=shapes.pack_item(message), identity=identity)
        return shapes.unpack_result(await self.calls("Enqueue", request))

    async def enqueue_batch(
        self, topic: str, messages: Sequence[Outgoing], *, atomic: bool = True, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, answered_below: int | None = None,
    ) -> list[Enqueued]:  # fmt: skip
        messages = list(messages)
        errors = check_outgoings(messages, _topic(topic), atomic)
        good = [m for i, m in enumerate(messages) if i not in errors] if errors else messages
        if errors and not good:
            return [Enqueued(0, error=errors[i]) for i in range(len(messages))]
        if producer is not None:
            check_unnumbered(good, producer_id, epoch, answered_below)
            results = await enqueue_numbered(self, topic, good, atomic, producer)
        else:
            identity = _identity(producer_id, epoch, answered_below, good)
            results = await self.send_batch(topic, good, atomic, identity)
        if not errors:
            return results
        rest = iter(results)
        return [Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(len(messages))]

    async def send_batch(self, topic: str, messages: list[Outgoing], atomic: bool, identity: Any) -> list[Enqueued]:
        """Checked messages, with their numbers if they have any."""
        if not atomic and len(messages) > 1 and sum(len(m.payload) for m in messages) > BATCH_BYTES:
            half = len(messages) // 2
            first = await self.send_batch(topic, messages[:half], atomic, identity)
            return first + await self.send_batch(topic, messages[half:], atomic, identity)
        request = pb.EnqueueBatchRequest(
            topic=topic, columns=_columns(messages), each_alone=not atomic, identity=identity
        )  # fmt: skip
        return shapes.unpack_results(await self.calls("EnqueueBatch", request))

    async def open_producer(self, topic: str, producer_id: str) -> int:
        check_producer(producer_id)
        request = pb.OpenProducerRequest(topic=_topic(topic), producer_id=producer_id)
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
            check_outgoings(outgoing, _topic(name), atomic=True)
        everything = [message for outgoing in shares.values() for message in outgoing]
        identity = _identity(producer_id, epoch, answered_below, everything)
        packed = [pb.TopicMessages(topic=name, columns=_columns(share)) for name, share in shares.items()]
        request = pb.PrepareBatchRequest(batch_id=batch_id, part=part, shares=packed, identity=identity)
        answer = await self.calls("PrepareBatch", request)
        return {share.topic: shapes.unpack_results(share.results) for share in answer.shares}

    async def commit_batch(self, batch_id: str, parts: Sequence[str]) -> int:
        check_name("batch_id", batch_id)
        if isinstance(parts, str | bytes) or not isinstance(parts, Iterable):
            raise BadRequest(f"parts is a list of part names, not {parts!r}")
        for part in (parts := list(parts)):
            check_name("part", part)
        return _count(await self.calls("CommitBatch", pb.CommitBatchRequest(batch_id=batch_id, parts=parts)))

    async def abort_batch(self, batch_id: str) -> int:
        check_name("batch_id", batch_id)
        return _count(await self.calls("AbortBatch", pb.BatchRequest(batch_id=batch_id)))

    async def list_batches(self) -> list[BatchInfo]:
        return shapes.unpack_batches(await self.calls("ListBatches", pb.Nothing()))

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        if visibility is not None:
            check_seconds("visibility", visibility, 0.001)
        check_seconds("wait", wait)
        check_text("holder", holder)
        check_text("request_id", request_id)
        check_int("max_messages", max_messages, 1, 100_000)
        check_int("max_bytes", max_bytes, 1, 1 << 40)
        request = pb.PopRequest(
            topic=_topic(topic), max_messages=max_messages, visibility=visibility, wait=wait, holder=holder,
            max_bytes=max_bytes, request_id=request_id,
        )  # fmt: skip
        if self._sessions:
            return self._messages(await self.calls("Pop", request))
        asking = asyncio.ensure_future(self.calls("Pop", request))
        try:
            return self._messages(await asyncio.shield(asking))
        except asyncio.CancelledError:
            if wait:
                asking.cancel()  # the server gives back what it had not answered with yet
            self._own(self._give_back(asking))
            raise

    def _messages(self, answer: Any) -> list[Message]:
        return unpack_messages(self, answer.topic, answer.columns) if answer.columns.count else []

    def _late(self, method: str, answer: bytes) -> None:
        """What a call brought that was given up meanwhile."""
        if method == "Pop" and (messages := self._messages(pb.PopResponse.FromString(answer))):
            self._own(self._release_late(messages))

    async def _release_late(self, messages: list[Message]) -> None:
        with contextlib.suppress(HeaplineError):
            await self.release(messages)

    async def _give_back(self, asking: asyncio.Future[Any]) -> None:
        """Nobody waits for this pop any more: what it still brings goes back."""
        with contextlib.suppress(HeaplineError, asyncio.CancelledError):
            if messages := self._messages(await asking):
                await self.release(messages)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        """One call a topic, for all that can be carried out; then raise for those that could not."""
        held = listed(messages)
        problems: list[HeaplineError] = []
        for topic, ids, tokens in by_topic(held):
            request = pb.LeasesRequest(topic=topic, ids=ints(ids), tokens=ints(tokens), tell_lost=True, **options)
            try:
                answer = await self._act(method, request)
            except HeaplineError as error:
                problems.append(error)
                continue
            if answer.deadline_ms:
                _tell_deadlines([m for m in held if m.topic == topic], read_ints(answer.deadline_ms).tolist())
            if answer.lost:
                problems.append(LeaseLost(read_ints(answer.lost).tolist(), topic))
        if problems:
            raise _worst(problems)

    async def _act(self, method: str, request: Any) -> Any:
        return await self.calls(method, request)

    async def pop_stream(
        self, topic: str, credits: AsyncIterator[int], *, visibility: float | None = None, holder: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """Messages as they come, as many as there are credits; ends when these have ended."""
        start = pb.PopStart(topic=_topic(topic), visibility=visibility, holder=holder)

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
        found = await self.calls("Peek", pb.ListRequest(topic=_topic(topic), limit=limit))
        return [shapes.unpack_message_info(info) for info in found.messages]

    async def cancel(self, topic: str, message_id: MessageId) -> None:
        await self.calls("Cancel", _of_message(topic, message_id))

    async def reschedule(
        self, topic: str, message_id: MessageId, *, delay: float | None = None, deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        if delay is not None:
            check_seconds("delay", delay)
        if deliver_at is not None:
            check_moment("deliver_at", deliver_at)
        if priority is not None:
            check_priority(priority)
        request = pb.RescheduleRequest(
            topic=_topic(topic), message_id=str(parse_id(message_id)), delay=delay, priority=priority,
            deliver_at_us=None if deliver_at is None else to_us(deliver_at),
        )  # fmt: skip
        await self.calls("Reschedule", request)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def dlq_list(self, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        check_int("limit", limit, 1, 1 << 31)
        check_filter(where)
        request = pb.ListRequest(topic=_topic(topic), limit=limit, where=shapes.pack_filter(where))
        return [shapes.unpack_message_info(info) for info in (await self.calls("DlqList", request)).messages]

    async def dlq_replay(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:  # fmt: skip
        if rate is not None and type(rate) not in (int, float):
            raise BadRequest(f"rate is messages a second, over 0 and at most 1e6, not {rate!r}")
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
            topic=_topic(topic), where=shapes.pack_filter(where), rate=rate,
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
        check_int("partition", partition, 0, 1 << 31)
        check_int("start", start, 0, 1 << 62)
        if end is not None:
            check_int("end", end, 0, 1 << 62)
        request = pb.ReadLogRequest(topic=_topic(topic), partition=partition, start=start, end=end)
        async for frame in self.calls.stream("ReadLog", request):
            yield shapes.unpack_frame(frame)


def _topic(topic: str) -> str:
    parse_topic(topic)  # a bad name is refused here: not all of them can be spelled on the wire
    return topic


def _columns(messages: list[Outgoing]) -> Any:
    if messages and is_plain(messages):
        return pack_plain([m.payload for m in messages], [m.priority for m in messages])
    return pack_outgoing(messages)


def _identity(
    producer_id: str | None, epoch: int | None, answered_below: int | None, messages: Sequence[Outgoing]
) -> Any:
    identity = identity_of(producer_id, epoch, answered_below, messages)
    return None if identity is None else pb.Identity(**identity._asdict())


def _of_message(topic: str, message_id: MessageId) -> Any:
    return pb.MessageRequest(topic=_topic(topic), message_id=str(parse_id(message_id)))


def _count(answer: Any) -> int:
    count: int = answer.count
    return count


def _tell_deadlines(held: list[Message | LeaseRef], deadlines: list[int]) -> None:
    for m, deadline in zip(held, deadlines, strict=True):
        if isinstance(m, Message) and deadline >= 0:
            m._deadline_ms = deadline


def _worst(problems: list[HeaplineError]) -> HeaplineError:
    """Of several topics' problems: leases lost, all of them together, unless something else went wrong."""
    if len(problems) == 1:
        return problems[0]
    lost = [p for p in problems if isinstance(p, LeaseLost)]
    if len(lost) < len(problems):
        return next(p for p in problems if not isinstance(p, LeaseLost))
    return LeaseLost([id for p in lost for id in p.lost], ", ".join(p.topic for p in lost))
