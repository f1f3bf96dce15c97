"""MQueue's API at the root of the HTTP port: `POST /enqueue`, `GET /dequeue`, `POST /ack`, `POST /nack`.

Names and shapes are the original's (docs/mqueue.md says what differs). What the original leaves open is decided here:

*Callers* are users with a JWT, or API keys; `produce` and `consume` on `namespace/topic`, as on all interfaces.

*Topics* have no call of their own. An enqueue creates those that do not exist, with default settings, by the right to
produce; `MQueueRules` limits how many, or turns it off. A dequeue from a topic that does not exist finds nothing,
because its producer may not have started yet. If enqueues do not create topics, an unknown topic is an error: 404.

*An enqueue* is atomic, even over several topics. Its items are checked before a topic is created. A
request that is sent again because its answer was lost is enqueued twice, unless its items have an `idempotency_key`.

*Leases.* A dequeue leases to the holder `mqueue:<subject>`. An ack or nack looks up the message's lease and uses its
token, if the caller's subject holds it; otherwise 409, and nothing changes. There is no race: a lease that ends
meanwhile takes its token with it. The holder is stored with the lease, so a restart changes nothing. Workers that share
a subject share their leases; a `lease_token` tells them apart, and is required in addition to the subject.

*A repeated ack* gets 409 without a token, because it looks the same as an ack of a message that another worker did;
with its `lease_token` it succeeds as long as the engine remembers it.

*Idempotency keys* are unique in a namespace if the broker can claim them there (`NamespaceKeys`), otherwise in a topic.

*A shard that is down* is answered with 500, as in the original, not with 503: the server itself is available.

*Rates* are counted after the caller is authenticated and before anything is done, so a rejected call changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from heapline.clock import Clock, SystemClock
from heapline.contract.batches import AbortBatch, CommitBatch, ForgetBatch, ListBatches, PrepareBatch, Share
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Context
from heapline.contract.check import build, describe_types
from heapline.contract.columns import pack
from heapline.contract.config import TopicConfig
from heapline.contract.errors import (
    BadRequest,
    BatchDecided,
    HeaplineError,
    LeaseLost,
    PayloadTooLarge,
    TopicExists,
    TopicNotFound,
    UnavailableError,
    UnknownPart,
)
from heapline.contract.leases import Ack, GetLease, LeaseKeys, Nack, Pop
from heapline.contract.message import Enqueued, Outgoing, from_ms
from heapline.contract.messages import EnqueueBatch, check_messages, enqueued, pack_messages
from heapline.contract.topics import CreateTopic, ListTopics, TopicSettings
from heapline.logs import Log
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request
from heapline.server.limits import MQueueRules, RateStore, SharedRates
from heapline.server.protocols import mqueue_shapes as shapes
from heapline.server.protocols.http import NO_STORE, Exchange, Page, read_json

Shares = dict[str, list[Outgoing]]
INTERFACE = "mqueue"
PREFIX = "mqueue:"  # of the ids of its batches
PART = "all"
ATOMIC_BYTES_MAX = 15 << 20  # of the messages for one new topic: a broker writes about as much in one unit
IN_PROGRESS_MS = 5000  # that a batch of another server is left alone
LIST_EVERY_MS = 2000  # between looks for batches of other servers, while enqueues arrive
MESSAGE_BYTES = 200  # of a message besides its payload, generously
log = Log("heapline.server")


describe_types(shapes.Item, shapes.Dequeue, shapes.Ack, shapes.Nack)


class MQueue:
    def __init__(
        self, dispatcher: Dispatcher, rules: MQueueRules, clock: Clock | None = None, behind: Broker | None = None
    ) -> None:
        rules.validate()
        self._keys = behind if isinstance(behind, NamespaceKeys) else None
        k = getattr(behind, "mqueue_k", 1)
        self._config = TopicSettings() if k == 1 else TopicSettings(k=k)  # of topics that an enqueue creates
        self._dispatcher, self.rules = dispatcher, rules
        self._broker: Broker = dispatcher.broker
        self._atomic = AtomicEnqueue(self._broker, getattr(behind, "is_shared", False))
        store = behind if isinstance(behind, RateStore) else None
        self._rates = SharedRates(rules, (clock or SystemClock()).boot_ms, store)
        self._creating = asyncio.Lock()  # two at a time could exceed the limit

    def routes(self) -> dict[tuple[str, str], Page]:
        return {
            ("POST", "/enqueue"): _reporting_shards(self.enqueue),
            ("GET", "/dequeue"): _reporting_shards(self.dequeue),
            ("POST", "/ack"): _reporting_shards(self.ack),
            ("POST", "/nack"): _reporting_shards(self.nack),
        }

    def _request(self, rpc: str, exchange: Exchange) -> Request:
        return Request(self._dispatcher.gate, INTERFACE, rpc, exchange.headers)

    async def _body(self, kind: Any, exchange: Exchange, request: Request) -> Any:
        data = await exchange.body()
        request.check_credential()  # a client may take long to send it
        return read_json(kind, data)

    # -- in --------------------------------------------------------------------------------------------------------

    async def enqueue(self, exchange: Exchange) -> None:
        async with self._request("EnqueueBatch", exchange) as request:
            items = await self._body(list[shapes.Item], exchange, request)
            if not items:
                raise BadRequest("nothing to enqueue; send an array of items")
            names: dict[tuple[str, str], str] = {}
            shares: Shares = {}
            for item in items:
                place = (item.namespace, item.topic)
                if place not in names:
                    shares[names.setdefault(place, shapes.topic_of(*place))] = []
                shares[names[place]].append(item.outgoing())
            self._admit(shares, request)
            await self._rates.take({shapes.namespace_of(topic) for topic in shares})
            repeated, claimed_at = await self._claim(items, names)
            if repeated:
                shares = {}
                for index, item in enumerate(items):
                    if index not in repeated:
                        shares.setdefault(names[item.namespace, item.topic], []).append(item.outgoing())
            stored = await self._enqueue(shares, request, claimed_at) if shares else {}
            results = {topic: iter(found) for topic, found in stored.items()}
            ids = [
                repeated[i] if i in repeated else next(results[names[item.namespace, item.topic]]).id
                for i, item in enumerate(items)
            ]
        await exchange.respond(msgspec.json.encode(ids))

    async def _claim(
        self, items: Sequence[shapes.Item], names: Mapping[tuple[str, str], str]
    ) -> tuple[dict[int, int], dict[str, int]]:
        """Claim the items' idempotency keys.

        Return the ids of items that repeat a message of another topic, and when each topic's keys were claimed.
        """
        if self._keys is None:
            return {}, {}
        by_namespace: dict[str, dict[int, tuple[str, str, bytes]]] = {}
        topics: dict[tuple[str, str], str] = {}
        for index, item in enumerate(items):
            if item.idempotency_key is not None:
                topic = names[item.namespace, item.topic]
                if topics.setdefault((item.namespace, item.idempotency_key), topic) != topic:
                    raise BadRequest(
                        f"idempotency key {item.idempotency_key!r} is used for two topics of namespace "
                        f"{item.namespace!r}; give each message a key of its own"
                    )
                rows = by_namespace.setdefault(item.namespace, {})
                rows[index] = (item.idempotency_key, topic, item.payload)
        repeated: dict[int, int] = {}
        claimed_at: dict[str, int] = {}
        for namespace, rows in by_namespace.items():
            found, times = await self._keys.claim_keys(namespace, list(rows.values()))
            repeated |= {index: id for index, id in zip(rows, found, strict=True) if id is not None}
            claimed_at |= times
        return repeated, claimed_at

    def _admit(self, shares: Shares, request: Request) -> None:
        gate = self._dispatcher.gate
        for messages in shares.values():
            check_messages(messages, atomic=True)
        first, *others = [EnqueueBatch(topic, pack_messages(messages)) for topic, messages in shares.items()]
        for command in others:
            gate.check(request, command)
        gate.admit(request, first, others=others)

    async def _enqueue(
        self, shares: Shares, request: Request, claimed_at: Mapping[str, int]
    ) -> dict[str, list[Enqueued]]:
        context = msgspec.structs.replace(request.context(), claimed_at=claimed_at)
        try:
            return await self._atomic.enqueue(shares, context)
        except TopicNotFound:
            if not self.rules.creates_topics:
                raise
        await self._create_topics(shares, request)
        return await self._atomic.enqueue(shares, context)

    async def _create_topics(self, shares: Shares, request: Request) -> None:
        async with self._creating:
            # Whether the caller may see them or not: they count towards the limits.
            existing = {info.name: info.config for info in await _every(self._broker, ListTopics)}
            for topic, messages in shares.items():
                _check_sizes(topic, messages, existing.get(topic) or TopicConfig())
            new = [topic for topic in shares if topic not in existing]
            self.rules.check_room(map(shapes.namespace_of, new), map(shapes.namespace_of, existing))
            for topic in new:
                with contextlib.suppress(TopicExists):  # created by another caller, with other settings
                    await self._broker.do(CreateTopic(topic, self._config), request.context())
                log.info("topic created by an enqueue", topic=topic, subject=request.caller.subject)

    # -- out -------------------------------------------------------------------------------------------------------

    async def dequeue(self, exchange: Exchange) -> None:
        async with self._request("Pop", exchange) as request:
            wanted = build(shapes.Dequeue, exchange.query(), lax=True)
            name = shapes.topic_of(wanted.namespace, wanted.topic)
            command = Pop(name, wanted.limit, holder=holder_of(request), request_id=wanted.request_id)
            self._dispatcher.gate.check(request, command)
            await self._rates.take([wanted.namespace])
            try:
                leased = await self._dispatcher.run(command, request)
            except TopicNotFound:
                if not self.rules.creates_topics:
                    raise
                leased = None
            found = [] if leased is None or leased.messages is None else shapes.delivered(leased.messages)
        await exchange.respond(msgspec.json.encode(found), headers=NO_STORE)

    async def ack(self, exchange: Exchange) -> None:
        async with self._request("Ack", exchange) as request:
            wanted = await self._body(shapes.Ack, exchange, request)
            name, keys = await self._own_lease(wanted, request)
            await self._settle(Ack(name, keys), request)
        await exchange.respond(b"{}")

    async def nack(self, exchange: Exchange) -> None:
        async with self._request("Nack", exchange) as request:
            wanted = await self._body(shapes.Nack, exchange, request)
            name, keys = await self._own_lease(wanted, request)
            reason = (wanted.error or "")[: shapes.ERROR_CHARACTERS_MAX] or None
            await self._settle(Nack(name, keys, reason=reason), request)
        await exchange.respond(b"{}")

    async def _settle(self, command: Ack | Nack, request: Request) -> None:
        settled = await self._dispatcher.step(command, request)
        if settled.lost:
            raise LeaseLost(settled.lost, command.topic)

    async def _own_lease(self, wanted: Any, request: Request) -> tuple[str, LeaseKeys]:
        """Admit the request, and return the lease that an ack or nack is about if the caller holds it."""
        name = shapes.topic_of(wanted.namespace, wanted.topic)
        id = shapes.whole(wanted.id)
        token = None if wanted.lease_token is None else shapes.whole(wanted.lease_token, "lease_token")
        lookup = GetLease(name, id)
        self._dispatcher.gate.admit(request, lookup)
        await self._rates.take([wanted.namespace])
        try:
            lease = await self._broker.do(lookup)  # as the server itself: the holder is not the caller's subject
        except TopicNotFound:
            raise LeaseLost([id], name) from None
        if lease.token is None and token is not None:
            return name, _keys(id, token)  # perhaps acked before: the engine remembers tokens for a while
        if lease.token is None or lease.holder != holder_of(request) or token not in (None, lease.token):
            raise LeaseLost([id], name)
        return name, _keys(id, lease.token)


@runtime_checkable
class NamespaceKeys(Protocol):
    """A broker whose idempotency keys can be unique in a namespace."""

    async def claim_keys(
        self, namespace: str, rows: Sequence[tuple[str, str, bytes]]
    ) -> tuple[list[int | None], dict[str, int]]:
        """Claim keys for messages (key, topic, payload).

        Return the ids of those that repeat one of another topic, and when each topic's keys were claimed.
        """


def _reporting_shards(page: Page) -> Page:
    """Let a page answer 500 if a shard of the broker is down."""

    async def answer(exchange: Exchange) -> None:
        try:
            await page(exchange)
        except UnavailableError as error:
            if getattr(error, "shard", None) is not None:
                error.http_status = 500  # type: ignore[attr-defined]
            raise

    return answer


def _check_sizes(topic: str, messages: list[Outgoing], config: TopicConfig) -> None:
    """Raise if a topic with these settings would reject the messages: it is not created for them then."""
    limit, size = config.max_payload_bytes, 0
    for message in messages:
        size += len(message.payload) + MESSAGE_BYTES
        if len(message.payload) > limit:
            raise PayloadTooLarge(len(message.payload), limit, topic)
    if size > ATOMIC_BYTES_MAX:
        raise BadRequest(f"{size} bytes for topic {topic!r} are over the {ATOMIC_BYTES_MAX} of one request; split it")


def _keys(id: int, token: int) -> LeaseKeys:
    return LeaseKeys(pack((id,)), pack((token,)))


def holder_of(request: Request) -> str:
    return f"{INTERFACE}:{request.caller.subject}"


class AtomicEnqueue:
    """Enqueues to several topics atomically, for callers that do not use prepared batches.

    The messages of one topic are an atomic batch. Those of several topics are prepared under an id that no one else
    knows, and committed immediately. If a topic fails, or this process is killed, such a batch stays prepared and
    undecided, and no other caller can end it. Until its timeout, a day, the idempotency keys in it would be in doubt,
    and the retry that the error advises would be rejected. So the next enqueue drops it, including batches of earlier
    runs. A batch that turns out to be committed stays.

    If other servers share the broker (`is_shared`), batches of other runs may be in progress. They are listed now and
    then, and dropped if they are older than an enqueue takes. Dropping one of a server that is very slow is safe: its
    commit fails as a whole, and its caller retries.
    """

    def __init__(self, broker: Broker, is_shared: bool = False, wall_ms: Callable[[], int] | None = None) -> None:
        self._broker, self._is_shared = broker, is_shared
        self._wall_ms = wall_ms or SystemClock().wall_ms
        self._listed_ms = 0  # when batches of other runs were listed
        self._run = f"{PREFIX}{secrets.token_hex(8)}:"
        self._left: set[str] = set()  # batches that may be prepared and must be dropped
        self._knows_earlier = False  # whether those of earlier runs were looked up

    async def enqueue(
        self, shares: Mapping[str, Sequence[Outgoing]], context: Context = HERE
    ) -> dict[str, list[Enqueued]]:
        if self._left or self._wants_list():
            await self._drop_left()
        if len(shares) == 1:
            ((topic, messages),) = shares.items()
            return {topic: enqueued(await self._broker.do(EnqueueBatch(topic, pack_messages(messages)), context))}
        batch_id = self._run + secrets.token_hex(16)
        packed = [Share(topic, pack_messages(messages)) for topic, messages in shares.items()]
        try:
            prepared = await self._broker.do(PrepareBatch(batch_id, PART, packed), context)
            await self._broker.do(CommitBatch(batch_id, [PART]), context)
        except HeaplineError as error:
            self._left.add(batch_id)
            await self._drop_left()
            if isinstance(error, UnknownPart):
                raise UnavailableError("the enqueue took too long, so another server dropped it; retry") from error
            raise
        except BaseException:
            self._left.add(batch_id)  # a cancelled caller does not wait for more
            raise
        await self._broker.do(ForgetBatch(batch_id))
        return {topic: enqueued(share.results) for topic, share in zip(shares, prepared.shares, strict=True)}

    def _wants_list(self) -> bool:
        if not self._is_shared:
            return not self._knows_earlier
        return self._wall_ms() - self._listed_ms >= LIST_EVERY_MS

    async def _drop_left(self) -> None:
        """Drop what is left, as far as possible now: a topic that is being reloaded cannot say what it holds."""
        with contextlib.suppress(HeaplineError):
            if self._wants_list():
                self._listed_ms = now = self._wall_ms()
                self._left |= {
                    batch.batch_id
                    for batch in await _every(self._broker, ListBatches)
                    if batch.state == "undecided"
                    and batch.batch_id.startswith(PREFIX)
                    and not batch.batch_id.startswith(self._run)
                    and (not self._is_shared or batch.since < from_ms(now - IN_PROGRESS_MS))
                }
                self._knows_earlier = True
            for batch_id in list(self._left):
                try:
                    await self._broker.do(AbortBatch(batch_id))
                except BatchDecided:  # it is committed, although its caller received an error
                    await self._broker.do(ForgetBatch(batch_id))
                self._left.discard(batch_id)


async def _every(broker: Broker, listing: Callable[[str | None], Any]) -> list[Any]:
    """Return the rows of all pages."""
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = await broker.do(listing(cursor))
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found
