"""Prepared batches: parts that become visible all at once, over all topics, or not at all."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from heapline.server.auth.principal import Action
from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here
from heapline.wire.json_requests import AbortAsk, CommitAsk, PrepareAsk, identity_in
from heapline.wire.json_shapes import BatchesTold, Count, PreparedTold, tell_rows

router = APIRouter(prefix="/v1", tags=["prepared batches"])


@documented(router, "POST", "/batches:prepare", asks=PrepareAsk, tells=PreparedTold, summary="Store a part of a batch")
async def prepare(house: Here) -> Response:
    """Durable, and invisible until the batch is committed. The same content may be repeated; it gets the same ids."""
    async with house.asked("PrepareBatch", PrepareAsk) as (body, caller):
        for topic in body.messages:
            caller.must(Action.PRODUCE, topic)
        shares = {topic: [m.outgoing() for m in messages] for topic, messages in body.messages.items()}
        for topic, share in shares.items():
            caller.check_payload(max((len(m.payload) for m in share), default=0), topic)
        answers = await house.broker.prepare_batch(body.batch_id, body.part, shares, **identity_in(body))
        return say(PreparedTold(results={topic: tell_rows(results) for topic, results in answers.items()}))


@documented(router, "POST", "/batches:commit", asks=CommitAsk, tells=Count, summary="Make a batch visible")
async def commit(house: Here) -> Response:
    """Exactly the named parts; the others are dropped. A part that is not prepared fails the whole commit (404).
    Repeating it changes nothing; with `sink` and `version` for ever, and whatever the parts are called. Needs to
    produce on all topics."""
    async with house.asked("CommitBatch", CommitAsk) as (body, _):
        count = await house.broker.commit_batch(body.batch_id, body.parts, sink=body.sink, version=body.version)
        return say(Count(count=count))


@documented(router, "POST", "/batches:abort", asks=AbortAsk, tells=Count, summary="Drop a batch")
async def abort(house: Here) -> Response:
    """All parts of a batch that was not committed; tells how many there were."""
    async with house.asked("AbortBatch", AbortAsk) as (body, _):
        return say(Count(count=await house.broker.abort_batch(body.batch_id)))


@documented(router, "GET", "/batches", tells=BatchesTold, summary="Batches not decided, and those committed of late")
async def list_batches(house: Here) -> Response:
    async with house.visit("ListBatches"):
        return say(BatchesTold(batches=await house.broker.list_batches()))
