"""Messages in: one, many, and as a producer that numbers them. Answered when durable."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here
from heapline.ulid import to_ulids
from heapline.wire.json_requests import EnqueueAsk, EnqueueBatchAsk, OpenProducerAsk, identity_in
from heapline.wire.json_shapes import (
    BatchEnqueuedTold,
    EnqueuedTold,
    EpochTold,
    RowTold,
    tell_enqueued,
    tell_rows,
)  # fmt: skip

router = APIRouter(prefix="/v1", tags=["in"])


@documented(router, "POST", "/enqueue", asks=EnqueueAsk, tells=EnqueuedTold, summary="Enqueue a message")
async def enqueue(house: Here) -> Response:
    async with house.asked("Enqueue", EnqueueAsk) as (body, caller):
        m = body.outgoing()
        caller.check_payload(len(m.payload), body.topic)
        result = await house.broker.enqueue(
            body.topic, m.payload, priority=m.priority, key=m.key, delay=m.delay, deliver_at=m.deliver_at,
            headers=m.headers, ttl=m.ttl, max_retries=m.max_retries, idempotency_key=m.idempotency_key,
            idempotency_scope=m.idempotency_scope, seq=m.seq, fairness_key=m.fairness_key, **identity_in(body),
        )  # fmt: skip
        return say(tell_enqueued(result))


@documented(
    router, "POST", "/enqueue:batch", asks=EnqueueBatchAsk, tells=BatchEnqueuedTold, summary="Enqueue many messages"
)
async def enqueue_batch(house: Here) -> Response:
    """All or none; with `"atomic": false` each has an id or an error of its own, and the answer is 200 all the same."""
    async with house.asked("EnqueueBatch", EnqueueBatchAsk) as (body, caller):
        identity, payloads = identity_in(body), [m.content() for m in body.messages]
        caller.check_payload(max(map(len, payloads), default=0), body.topic)
        if body.atomic and not any(identity.values()) and all(m.is_plain() for m in body.messages):
            priorities = np.array([m.priority for m in body.messages], dtype=np.int64)
            ids = await house.broker.enqueue_columns(body.topic, payloads, priorities)
            rows = [RowTold(message_id=u, id=str(i), duplicate=False) for u, i in zip(to_ulids(ids), ids, strict=True)]
        else:
            messages = [m.outgoing() for m in body.messages]
            rows = tell_rows(
                await house.broker.enqueue_batch(body.topic, messages, atomic=body.atomic, **identity)
            )  # fmt: skip
        return say(BatchEnqueuedTold(results=rows))


@documented(
    router, "POST", "/producers:open", asks=OpenProducerAsk, tells=EpochTold, summary="Begin an epoch of a producer"
)
async def open_producer(house: Here) -> Response:
    """Older epochs of that name are fenced: what they still send is refused (409)."""
    async with house.asked("OpenProducer", OpenProducerAsk) as (body, _):
        return say(EpochTold(epoch=await house.broker.open_producer(body.topic, body.producer_id)))
