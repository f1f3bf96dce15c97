"""MQueue's API at the root of the HTTP port: `POST /enqueue`, `GET /dequeue`, `POST /ack`, `POST /nack`.

Names and shapes are the original's (docs/mqueue.md tells what differs). What it leaves open is decided here:

*Who calls.* Users by their JWT and API keys alike; `produce` and `consume` on `namespace/topic`, as on all faces.

*Topics* have no call of their own, so an enqueue makes those that are not there, with default settings, by the right to
produce; `MQueueRules` bounds how many, or turns it off. A dequeue from a topic that is not there finds nothing: its
producer has not come yet. Where topics are not made by the way, a name that is not there is a mistake: 404.

*An enqueue* goes in whole or not at all, also over several topics (whole_batches.py). Its items are checked before a
topic is made. A request that is sent again because its answer was lost goes in twice, unless its items carry an
`idempotency_key`.

*Whose lease.* A dequeue leases to `mqueue:<subject>`. An ack or nack looks up the message's lease and acts by the token
that it finds there, if the caller's subject holds it; otherwise 409, and nothing is changed. Nothing can come between:
a lease that has ended meanwhile has taken its token along. The holder is recorded with the lease, so a restart changes
nothing. Workers that share a subject share their leases; a `lease_token` tells them apart, and is asked for in addition
to the subject, not instead of it.

*An ack repeated* after it has succeeded gets 409 without a token, because nothing tells it from an ack of something
that somebody else has done; with its `lease_token` it succeeds as long as the engine remembers it.

*Rates* are counted when the caller is let in and before anything is done, so a refused call changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.responses import Response

from heapline.config import TopicConfig
from heapline.engine.calls import EnqueueCall, check_batch_bytes
from heapline.engine.columns import Columns
from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.requests import check_all
from heapline.errors import BadRequest, LeaseLost, TopicExists, TopicNotFound
from heapline.logs import Log
from heapline.model import Enqueued, LeaseRef, Outgoing
from heapline.server.auth.principal import Action
from heapline.server.front import Caller, Visit
from heapline.server.http import mqueue_shapes as shapes
from heapline.server.http.visiting import House
from heapline.server.limiting import pop_within
from heapline.server.mqueue_rules import MQueueRules, NamespaceRates
from heapline.server.whole_batches import WholeBatches

T = TypeVar("T")
Shares = dict[str, list[Outgoing]]
FACE = "mqueue"
NO_STORE = {"cache-control": "no-store"}  # a GET that leases must not be answered by a cache
log = Log("heapline.server")
router = APIRouter(tags=["mqueue"])


def install(app: FastAPI, broker: EmbeddedBroker, rules: MQueueRules) -> None:
    app.state.mqueue = MQueue(broker, rules)
    app.include_router(router)


class MQueue:
    """What the calls share: the rates, and the making of topics."""

    def __init__(self, broker: EmbeddedBroker, rules: MQueueRules) -> None:
        rules.validate()
        self._broker, self.rules = broker, rules
        self._batches = WholeBatches(broker)
        self.rates = NamespaceRates(rules, broker.clock.boot_ms)
        self._making = asyncio.Lock()  # one at a time: two that count would make one too many

    async def enqueue(self, shares: Shares, caller: Caller) -> dict[str, list[Enqueued]]:
        try:
            return await self._batches.enqueue(shares)
        except TopicNotFound:
            if not self.rules.creates_topics:
                raise
        await self._make_topics(shares, caller.principal.subject)
        return await self._batches.enqueue(shares)

    async def _make_topics(self, shares: Shares, subject: str) -> None:
        async with self._making:
            there = {info.name: info.config for info in await self._broker.list_topics()}
            for topic, messages in shares.items():
                config = there.get(topic) or TopicConfig()
                check_all(messages, config, topic, atomic=True)
                check_batch_bytes(EnqueueCall(asyncio.Future(), columns=Columns(messages)), config)
            new = [topic for topic in shares if topic not in there]
            self.rules.check_room(map(shapes.namespace_of, new), map(shapes.namespace_of, there))
            for topic in new:
                with contextlib.suppress(TopicExists):  # made by somebody else, in another way
                    await self._broker.create_topic(topic)
                log.info("an enqueue made a topic", topic=topic, subject=subject)

    async def own_lease(self, topic: str, wanted: shapes.Ack, caller: Caller) -> LeaseRef:
        """The lease that an ack or a nack is about, if it is the caller's."""
        id = shapes.whole(wanted.id)
        token = None if wanted.lease_token is None else shapes.whole(wanted.lease_token, "lease_token")
        try:
            lease = await self._broker.lease_of(topic, id)
        except TopicNotFound:
            raise LeaseLost([id], topic) from None
        if lease is None and token is not None:
            return LeaseRef(topic, id, token)  # acked lately, perhaps: the engine remembers tokens
        if lease is None or lease[1] != holder_of(caller) or token not in (None, lease[0]):
            raise LeaseLost([id], topic)
        return LeaseRef(topic, id, lease[0])


def holder_of(caller: Caller) -> str:
    return f"{FACE}:{caller.principal.subject}"


class Desk(House):
    """What a route of this face works with."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.mqueue: MQueue = request.app.state.mqueue

    async def body(self, kind: type[T], optional: bool = False) -> T:
        return shapes.read(await self.read(), kind)

    def let_in(self, call: str, topic: str) -> Visit:
        return self.visit(call, topic, FACE)


AtDesk = Annotated[Desk, Depends(Desk)]
Name = Annotated[str, Query(pattern=shapes.NAME_PATTERN)]


@router.post("/enqueue", **shapes.ENQUEUE)
async def enqueue(desk: AtDesk) -> Response:
    """Enqueue messages into any topics, all or none; answers their ids in the same order."""
    names: dict[tuple[str, str], str] = {}
    shares: Shares = {}

    def first_topic(items: list[shapes.Item]) -> str:
        if not items:
            raise BadRequest("there is nothing to enqueue: send an array of items")
        for item in items:
            place = (item.namespace, item.topic)
            if place not in names:
                shares[names.setdefault(place, shapes.topic_of(*place))] = []
            shares[names[place]].append(item.outgoing())
        return next(iter(shares))

    async with desk.asked("EnqueueBatch", list[shapes.Item], face=FACE, topic_in=first_topic) as (items, caller):
        for topic in shares:
            caller.must(Action.PRODUCE, topic)
        for topic, messages in shares.items():
            caller.check_payload(max(len(message.payload) for message in messages), topic)
        desk.mqueue.rates.take({shapes.namespace_of(topic) for topic in shares})
        results = {topic: iter(enqueued) for topic, enqueued in (await desk.mqueue.enqueue(shares, caller)).items()}
        return _answer([next(results[names[item.namespace, item.topic]]).id for item in items])


@router.get("/dequeue", **shapes.DEQUEUE)
async def dequeue(
    desk: AtDesk, namespace: Name, topic: Name,
    limit: Annotated[int, Query(ge=1, le=shapes.LIMIT_MAX)] = shapes.LIMIT_DEFAULT,
    request_id: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
) -> Response:  # fmt: skip
    """Lease the most urgent messages that are due, at most `limit` and about 2 MiB of them; none is `[]`. With a
    `request_id`, a repeat is answered with what the first request leased and still holds, if it leased anything."""
    name = shapes.topic_of(namespace, topic)
    async with desk.let_in("Pop", name) as caller:
        desk.mqueue.rates.take([namespace])
        holder = holder_of(caller)
        repeat = None if request_id is None else f"{holder} {request_id}"  # each has names of his own
        try:
            _, popped = await pop_within(desk.broker, caller, name, limit, holder=holder, request_id=repeat)
        except TopicNotFound:
            if not desk.mqueue.rules.creates_topics:
                raise
            popped = None
        return _answer([] if popped is None else shapes.delivered(popped), NO_STORE)


@router.post("/ack", **shapes.ACK)
async def ack(desk: AtDesk) -> Response:
    """The work is done: the message goes. 409 unless the caller holds its lease."""
    async with desk.asked("Ack", shapes.Ack, face=FACE, topic_in=_topic_in) as (wanted, caller):
        name = _topic_in(wanted)
        desk.mqueue.rates.take([wanted.namespace])
        await desk.broker.ack(await desk.mqueue.own_lease(name, wanted, caller))
        return _answer({})


@router.post("/nack", **shapes.NACK)
async def nack(desk: AtDesk) -> Response:
    """The work has failed: the message comes again after a while, or is dead. 409 unless the caller holds its lease."""
    async with desk.asked("Nack", shapes.Nack, face=FACE, topic_in=_topic_in) as (wanted, caller):
        name = _topic_in(wanted)
        desk.mqueue.rates.take([wanted.namespace])
        lease = await desk.mqueue.own_lease(name, wanted, caller)
        await desk.broker.nack(lease, reason=(wanted.error or "")[: shapes.ERROR_CHARACTERS_MAX] or None)
        return _answer({})


def _topic_in(wanted: shapes.Ack) -> str:
    return shapes.topic_of(wanted.namespace, wanted.topic)


def _answer(content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), 200, headers, media_type="application/json")
