"""The methods of `heapline.v1.Heapline` on a broker: from a request to the contract's call and back.

Batches without extras go to the engine as columns and come back as columns; everything else takes the contract's own
way. Who may call is settled before (rpc.py); the two streams that last are in pop_stream.py and enqueue_stream.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from heapline.engine.calls import Identity
from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.raw_log import Hold
from heapline.engine.requests import check_int, check_producer
from heapline.errors import BadRequest, LeaseLost, MessageNotFound
from heapline.model import Enqueued, LeaseRef, Message, Outgoing, Popped
from heapline.server.auth.principal import Action
from heapline.server.enqueue_stream import enqueue_stream
from heapline.server.front import Caller, Front, Stopping
from heapline.server.giving_back import give_back_leases, give_back_result
from heapline.server.grpc_groups import GroupCalls
from heapline.server.limiting import pop_within
from heapline.server.pop_stream import PopStream
from heapline.server.replaying import ReplayMethods
from heapline.server.schedules import ScheduleCalls
from heapline.server.session import Session
from heapline.wire import shapes
from heapline.wire.columns import (
    ints,
    is_plain,
    is_timed,
    pack_popped,
    popped_items,
    read_ints,
    read_sizes,
    unpack_outgoing,
    unpack_plain,
    unpack_seqs,
    unpack_times,
)  # fmt: skip
from heapline.wire.schema import pb
from heapline.wire.shapes import given, moment

POP_BYTES_DEFAULT = 2 << 20
POP_BYTES_MAX = 32 << 20  # of one answer: it is built in memory
PINNED_ROWS = 1 << 15  # of a message: 2 MiB
LIST_DEFAULT = {"Peek": 10, "DlqList": 100}


class GrpcService(GroupCalls, ReplayMethods, ScheduleCalls):
    def __init__(self, broker: EmbeddedBroker, front: Front) -> None:
        self._broker = broker
        self._front = front
        self._waiting: set[asyncio.Task[Any]] = set()
        self._subscribed = {}
        self._by_wait_id: dict[tuple[str, str], asyncio.Task[Any]] = {}  # of those, by subject and wait_id

    # -- heaps -----------------------------------------------------------------------------------------------------

    async def MakeHeap(self, request: Any, caller: Caller) -> Any:
        return shapes.pack_info(
            await self._broker.create_topic(request.topic, **shapes.read_config(request.config_json))
        )  # fmt: skip

    async def UpdateHeapConfig(self, request: Any, caller: Caller) -> Any:
        return shapes.pack_info(
            await self._broker.update_topic(request.topic, **shapes.read_config(request.config_json))
        )  # fmt: skip

    async def DeleteHeap(self, request: Any, caller: Caller) -> Any:
        caller.confirm("DeleteHeap", request.topic, request.confirmation)
        await self._broker.delete_topic(request.topic)
        return pb.Done()

    async def ListHeaps(self, request: Any, caller: Caller) -> Any:
        """Those on which the caller may do something."""
        infos = await self._broker.list_topics()
        return pb.HeapInfos(
            heaps=[shapes.pack_info(info) for info in infos if any(caller.may(a, info.name) for a in Action)]
        )  # fmt: skip

    async def Stats(self, request: Any, caller: Caller) -> Any:
        return shapes.pack_stats(await self._broker.stats(request.topic))

    async def Purge(self, request: Any, caller: Caller) -> Any:
        caller.confirm("Purge", request.topic, request.confirmation)
        return _counted(caller, await self._broker.purge(request.topic))

    async def Pause(self, request: Any, caller: Caller) -> Any:
        await self._broker.pause_topic(request.topic, moment(request, "until_us"))
        return pb.Done()

    async def Resume(self, request: Any, caller: Caller) -> Any:
        await self._broker.resume_topic(request.topic)
        return pb.Done()

    async def SetPartitionThrottled(self, request: Any, caller: Caller) -> Any:
        caller.tell(about=f"partition {request.partition}, throttled={request.throttled}")
        await self._broker.set_partition_throttled(
            request.topic, request.partition, request.throttled, given(request, "reason")
        )
        return pb.Done()

    async def Snapshot(self, request: Any, caller: Caller) -> Any:
        await self._broker.snapshot(request.topic)
        return pb.Done()

    # -- in --------------------------------------------------------------------------------------------------------

    async def Enqueue(self, request: Any, caller: Caller) -> Any:
        if not request.HasField("message"):
            raise BadRequest("there is no message in this request")
        caller.check_payload(len(request.message.payload), request.topic)
        m = shapes.unpack_item(request.message)
        result = await self._broker.enqueue(
            request.topic, m.payload, priority=m.priority, key=m.key, delay=m.delay, deliver_at=m.deliver_at,
            headers=m.headers, ttl=m.ttl, max_retries=m.max_retries, idempotency_key=m.idempotency_key,
            idempotency_scope=m.idempotency_scope, seq=m.seq, fairness_key=m.fairness_key, **_identity(request),
        )  # fmt: skip
        return shapes.pack_result(result)

    async def EnqueueBatch(self, request: Any, caller: Caller) -> Any:
        _check_payloads(request, caller)
        if request.HasField("items"):
            results = await self._enqueue([shapes.unpack_item(item) for item in request.items.items], request)
            return pb.EnqueueBatchResponse(items=[shapes.pack_result(r) for r in results])
        if is_plain(request.columns) and not request.each_alone and not request.HasField("identity"):
            payloads, priorities = unpack_plain(request.columns)
            ids = await self._broker.enqueue_columns(request.topic, payloads, priorities)
            return pb.EnqueueBatchResponse(ids=ints(ids))
        if is_plain(request.columns, numbered=True) and (seqs := unpack_seqs(request.columns)):
            numbered = await self._enqueue_numbered(request, seqs)
            if numbered is not None:
                return shapes.pack_results(numbered)
        return shapes.pack_results(await self._enqueue(unpack_outgoing(request.columns), request))

    async def _enqueue_numbered(self, request: Any, seqs: list[int]) -> list[Enqueued] | None:
        """What clients of ours send: messages as columns, with their numbers."""
        identity = _identity(request)
        if not identity or identity["epoch"] is None:
            return None
        check_producer(identity["producer_id"])
        check_int("epoch", identity["epoch"], 1, 1 << 62)
        check_int("answered_below", identity["answered_below"] or 0, 0, 1 << 62)
        payloads, priorities = unpack_plain(request.columns)
        return await self._broker.enqueue_numbered_columns(
            request.topic, payloads, priorities, seqs,
            Identity(identity["producer_id"], identity["epoch"], identity["answered_below"] or 0),
            atomic=not request.each_alone,
        )  # fmt: skip

    async def _enqueue(self, messages: list[Outgoing], request: Any) -> list[Enqueued]:
        return await self._broker.enqueue_batch(
            request.topic, messages, atomic=not request.each_alone, **_identity(request)
        )

    def EnqueueStream(self, requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
        return enqueue_stream(requests, caller, self.EnqueueBatch, self._front)

    async def OpenProducer(self, request: Any, caller: Caller) -> Any:
        return pb.Epoch(epoch=await self._broker.open_producer(request.topic, request.producer_id))

    # -- prepared batches ------------------------------------------------------------------------------------------

    async def PrepareBatch(self, request: Any, caller: Caller) -> Any:
        for share in request.shares:
            caller.must(Action.PRODUCE, share.topic)
            _check_payloads(share, caller)
        if await self._prepared_quietly(request):
            return pb.PrepareBatchResponse()
        shares: dict[str, list[Outgoing]] = {}
        for share in request.shares:
            if share.topic in shares:
                raise BadRequest(f"topic {share.topic!r} is given twice: put its messages together")
            if share.HasField("items"):
                shares[share.topic] = [shapes.unpack_item(item) for item in share.items.items]
            else:
                shares[share.topic] = unpack_outgoing(share.columns)
        answers = await self._broker.prepare_batch(request.batch_id, request.part, shares, **_identity(request))
        if request.without_results:
            return pb.PrepareBatchResponse()
        return pb.PrepareBatchResponse(
            shares=[pb.TopicEnqueued(topic=t, results=shapes.pack_results(r)) for t, r in answers.items()]
        )

    async def _prepared_quietly(self, request: Any) -> bool:
        """What Spark sends mostly: columns, of which nobody asks what became of each row."""
        if not request.without_results or request.HasField("identity") or not all(
            share.HasField("columns") and is_timed(share.columns) for share in request.shares
        ):  # fmt: skip
            return False
        shares = {share.topic: (*unpack_plain(share.columns), unpack_times(share.columns)) for share in request.shares}
        if len(shares) < len(request.shares):
            return False
        return await self._broker.prepare_columns(request.batch_id, request.part, shares)

    async def CommitBatch(self, request: Any, caller: Caller) -> Any:
        count = await self._broker.commit_batch(
            request.batch_id, list(request.parts), sink=given(request, "sink"), version=given(request, "version")
        )
        return pb.Count(count=count)

    async def AbortBatch(self, request: Any, caller: Caller) -> Any:
        return pb.Count(count=await self._broker.abort_batch(request.batch_id))

    async def ListBatches(self, request: Any, caller: Caller) -> Any:
        return shapes.pack_batches(await self._broker.list_batches())

    async def ListSinks(self, request: Any, caller: Caller) -> Any:
        return shapes.pack_sinks(await self._broker.list_sinks())

    async def ForgetSink(self, request: Any, caller: Caller) -> Any:
        caller.tell(about=f"sink {request.name}")
        caller.confirm("ForgetSink", "", request.confirmation, request.name)
        return pb.Known(known=await self._broker.forget_sink(request.name))

    # -- out -------------------------------------------------------------------------------------------------------

    async def Pop(self, request: Any, caller: Caller) -> Any:
        if request.give_up:
            return self._give_up(request, caller)
        pop = pop_within(
            self._broker, caller, request.topic, request.max_messages or 1, wait=request.wait,
            visibility=given(request, "visibility"), holder=given(request, "holder"),
            request_id=given(request, "request_id"),
            max_bytes=min(request.max_bytes or POP_BYTES_DEFAULT, POP_BYTES_MAX),
        )  # fmt: skip
        if request.wait:
            with caller.while_valid():
                name, popped = await self._waited_for(pop, request, caller)
        else:
            name, popped = await pop
        return pop_response(name, popped, request.as_items)

    async def _waited_for(self, pop: Any, request: Any, caller: Caller) -> tuple[str, Popped | None]:
        """A pop that may wait long; a server that stops does not wait for it, nor a client that gave it up. What it
        got goes back if it is ended."""
        task = asyncio.ensure_future(pop)
        self._waiting.add(task)
        name = caller.principal.subject, request.wait_id
        if request.wait_id:
            self._by_wait_id[name] = task
        try:
            answer: tuple[str, Popped | None] = await task
            return answer
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # it was the pop that was ended
                if self._front.stopping.is_set():
                    raise Stopping from None
                return request.topic, None
            if not task.cancel() and not request.HasField("request_id"):
                give_back_result(self._broker, task)  # it ended before the one who asked went, and nobody saw it
            raise
        finally:
            self._waiting.discard(task)
            if self._by_wait_id.get(name) is task:
                del self._by_wait_id[name]

    def _give_up(self, request: Any, caller: Caller) -> Any:
        """A client that just cancels its call does not know whether the answer was on its way. So it asks for the
        waiting to end, and gets an answer of which it knows."""
        if not request.wait_id:
            raise BadRequest("give_up names the call that is to end by its wait_id")
        task = self._by_wait_id.get((caller.principal.subject, request.wait_id))
        if task is not None:
            task.cancel()
        return pb.PopResponse(topic=request.topic)

    def stop_waiting(self) -> None:
        for task in list(self._waiting):
            task.cancel()

    def PopStream(self, requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
        return PopStream(self._broker, self._front, caller).run(requests)

    async def Ack(self, request: Any, caller: Caller) -> Any:
        ids, tokens = _leases(request)
        lost = await self._broker.ack_columns(request.topic, ids, tokens) if ids else []
        return _lost(request, lost)

    async def Nack(self, request: Any, caller: Caller) -> Any:
        backoff, reason = given(request, "seconds"), given(request, "reason")
        return await self._act(request, lambda refs: self._broker.nack(refs, backoff=backoff, reason=reason))

    async def Release(self, request: Any, caller: Caller) -> Any:
        return await self._act(request, self._broker.release)

    async def MoveToDLQ(self, request: Any, caller: Caller) -> Any:
        return await self._act(request, lambda refs: self._broker.bury(refs, reason=given(request, "reason")))

    async def Extend(self, request: Any, caller: Caller) -> Any:
        # Messages instead of references, because these are told their new deadlines.
        messages = [
            Message(self._broker, request.topic, 0, id, token, b"", 0, 0, None, None, 0, -1)
            for id, token in zip(*_leases(request), strict=True)
        ]
        answer = await self._act(request, lambda _: self._broker.extend(messages, request.seconds))
        answer.deadline_ms = ints([m._deadline_ms for m in messages])
        return answer

    async def _act(self, request: Any, act: Any) -> Any:
        ids, tokens = _leases(request)
        try:
            await act([LeaseRef(request.topic, id, token) for id, token in zip(ids, tokens, strict=True)])
        except LeaseLost as error:
            return _lost(request, error.lost)
        return pb.LeasesResponse()

    # -- by id -----------------------------------------------------------------------------------------------------

    async def Get(self, request: Any, caller: Caller) -> Any:
        return shapes.pack_message_info(await self._broker.get(request.topic, request.message_id))

    async def Peek(self, request: Any, caller: Caller) -> Any:
        found = await self._broker.peek(request.topic, request.limit or LIST_DEFAULT["Peek"])
        return pb.MessageInfos(messages=map(shapes.pack_message_info, found))

    async def Cancel(self, request: Any, caller: Caller) -> Any:
        await self._broker.cancel(request.topic, request.message_id)
        return pb.Done()

    async def Reschedule(self, request: Any, caller: Caller) -> Any:
        await self._broker.reschedule(
            request.topic, request.message_id, delay=given(request, "delay"),
            deliver_at=moment(request, "deliver_at_us"), priority=given(request, "priority"),
        )  # fmt: skip
        return pb.Done()

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def DlqList(self, request: Any, caller: Caller) -> Any:
        limit = request.limit or LIST_DEFAULT["DlqList"]
        found = await self._broker.dlq_list(request.topic, limit, where=shapes.unpack_filter(request))
        return pb.MessageInfos(messages=map(shapes.pack_message_info, found))

    async def DlqPeek(self, request: Any, caller: Caller) -> Any:
        info = await self._broker.get(request.topic, request.message_id)
        if info.state != "dead":
            raise MessageNotFound(request.topic, info.message_id)
        return shapes.pack_message_info(info)

    async def DlqReplay(self, request: Any, caller: Caller) -> Any:
        count = await self._broker.dlq_replay(
            request.topic, _ids(request), where=shapes.unpack_filter(request), rate=given(request, "rate")
        )
        return _counted(caller, count)

    async def DlqDelete(self, request: Any, caller: Caller) -> Any:
        caller.confirm("DlqDelete", request.topic, request.confirmation, _arguments(request))
        count = await self._broker.dlq_delete(request.topic, _ids(request), where=shapes.unpack_filter(request))
        return _counted(caller, count)

    # -- all of them ---------------------------------------------------------------------------------------------

    def Session(self, requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
        return Session(self._front, self, caller, self._give_back).run(requests)

    def _give_back(self, response: Any) -> None:
        """The leases of a Pop's answer that could not be sent."""
        if response.HasField("columns"):
            ids = read_ints(response.columns.ids).tolist()
            give_back_leases(self._broker, response.topic, ids, read_ints(response.columns.tokens).tolist())
        elif response.items:
            ids = [item.id for item in response.items]
            give_back_leases(self._broker, response.topic, ids, [item.token for item in response.items])

    # -- the log ---------------------------------------------------------------------------------------------------

    async def Offsets(self, request: Any, caller: Caller) -> Any:
        offsets = await self._broker.offsets(request.topic)
        pairs = [offsets[p] for p in range(len(offsets))]
        return pb.OffsetsResponse(starts=ints([s for s, _ in pairs]), ends=ints([e for _, e in pairs]))

    async def ReadLog(self, request: Any, caller: Caller) -> AsyncIterator[Any]:
        end = given(request, "end")
        async for frame in self._broker.read_log(request.topic, request.partition, request.start, end):
            if self._front.stopping.is_set():
                raise Stopping
            yield shapes.pack_frame(frame)

    async def LogIndex(self, request: Any, caller: Caller) -> Any:
        hold = Hold(request.hold.name, request.hold.segment, request.hold.seconds) if request.HasField("hold") else None
        found = await self._broker.log_index(request.topic, request.after_unit, hold)
        return pb.LogIndexResponse(
            incarnation=found.incarnation, first_segment=found.first_segment, last_unit=found.last_unit,
            segment_bytes=found.segment_bytes, starts=ints(found.starts), ends=ints(found.ends),
            marks=found.marks.tobytes(), mark_segments=ints(found.mark_segments),
        )  # fmt: skip

    async def ReadUnits(self, request: Any, caller: Caller) -> AsyncIterator[Any]:
        async for units in self._broker.read_units(request.topic, request.start_unit, request.end_unit):
            if self._front.stopping.is_set():
                raise Stopping
            yield pb.RawUnits(units=[pb.RawUnit(segment=u.segment, at=u.offset, data=bytes(u.data)) for u in units])

    async def PinState(self, request: Any, caller: Caller) -> AsyncIterator[Any]:
        found = await self._broker.pin_state(request.topic, request.dead)
        at = pb.PinnedAt(
            incarnation=found.incarnation, wall_ms=found.at, segment_bytes=found.segment_bytes, ends=ints(found.ends),
            count=len(found.rows), texts=found.texts,
        )  # fmt: skip
        yield pb.PinnedState(at=at)
        for first in range(0, len(found.rows), PINNED_ROWS):
            if self._front.stopping.is_set():
                raise Stopping
            yield pb.PinnedState(rows=found.rows[first : first + PINNED_ROWS].tobytes())

    async def ReadRecords(self, request: Any, caller: Caller) -> Any:
        positions = read_ints(request.positions, "positions")
        found = await self._broker.read_records(request.topic, request.incarnation, positions)
        return pb.RecordsRead(
            rows=found.rows.tobytes(), smalls=b"".join(found.smalls), payloads=b"".join(found.payloads),
            bad=ints(sorted(found.bad)),
        )  # fmt: skip


def pop_response(topic: str, popped: Popped | None, as_items: bool) -> Any:
    if popped is None:
        return pb.PopResponse(topic=topic)
    if as_items:
        return pb.PopResponse(topic=topic, items=popped_items(popped))
    return pb.PopResponse(topic=topic, columns=pack_popped(popped))


def _identity(request: Any) -> dict[str, Any]:
    if not request.HasField("identity"):
        return {}
    identity = request.identity
    return {
        "producer_id": identity.producer_id or None,
        "epoch": given(identity, "epoch"),
        "answered_below": given(identity, "answered_below"),
    }


def _leases(request: Any) -> tuple[list[int], list[int]]:
    if request.leases:
        return [lease.id for lease in request.leases], [lease.token for lease in request.leases]
    ids, tokens = read_ints(request.ids, "ids"), read_ints(request.tokens, "tokens")
    if len(ids) != len(tokens):
        raise BadRequest(f"{len(ids)} ids and {len(tokens)} tokens: a lease needs both")
    if len(ids) and (ids.min() < 0 or tokens.min() < 0):
        raise BadRequest("ids and tokens are ints from 0 to 2^63−1")
    return ids.tolist(), tokens.tolist()


def _lost(request: Any, lost: list[int]) -> Any:
    if lost and not request.tell_lost:
        raise LeaseLost(lost, request.topic)
    return pb.LeasesResponse(lost=ints(lost))


def _check_payloads(request: Any, caller: Caller) -> None:
    if request.HasField("items"):
        for item in request.items.items:
            caller.check_payload(len(item.payload), request.topic)
    elif len(request.columns.payloads) > caller.visit.front.limits.payload_bytes_max:  # else none can be over it
        largest = int(read_sizes(request.columns).max(initial=0))
        caller.check_payload(largest, request.topic)


def _counted(caller: Caller, count: int) -> Any:
    caller.tell(count=count)
    return pb.Count(count=count)


def _arguments(request: Any) -> str:
    """All that was asked for but the confirmation itself, in few bytes."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("confirmation")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def _ids(request: Any) -> list[str] | None:
    return list(request.ids.message_ids) if request.HasField("ids") else None
