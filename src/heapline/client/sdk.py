"""The client that programs use: the wire client, made to last, quick for single calls, and safe to repeat.

Every call is repeated over broken connections until its deadline (retrying.py). Single enqueues and acks of many
coroutines travel together (coalescing.py). What it enqueues is numbered under a name of its own (numbered.py), pops
carry a request id, and acts on leases their tokens: so a call whose answer was lost is made again and counts once.

It connects when it is first used, belongs to the event loop that used it, and does not survive a fork once it was used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from itertools import count, islice
from typing import Any, cast
from weakref import WeakSet

from heapline.broker import Held, MessageId
from heapline.client.calls import Calls
from heapline.client.checks import check_outgoing
from heapline.client.coalescing import Gathering, Lane, Single, answer, refuse
from heapline.client.consuming import PREFETCH, Consumption, Feed, consume
from heapline.client.numbered import Numbered
from heapline.client.numbering import one_name
from heapline.client.patience import DEADLINE, IN_DOUBT, SECONDS, UNSENT, out_of_time, passes_by_itself, pauses
from heapline.client.retrying import RetryingCalls
from heapline.client.returning import Returns
from heapline.client.target import ClientTls, parse_target
from heapline.client.wire import WireBroker
from heapline.engine.calls import Identity
from heapline.engine.columns import check_seconds
from heapline.engine.requests import listed
from heapline.errors import (
    BadRequest,
    Closed,
    ConflictError,
    HeaplineError,
    LeaseLost,
    MessageNotFound,
    RequestError,
    ResourceExhausted,
)
from heapline.model import Enqueued, IdempotencyScope, LogFrame, Message, Outgoing
from heapline.producer import Producer
from heapline.wire.columns import ints, read_ints
from heapline.wire.schema import pb

Carry = Callable[[list[Single]], Awaitable[None]]
ENDED_BY_BURY = ("dead", "dropped")
JOINED_MAX, JOINED_BYTES_MAX = 500, 512 << 10  # a batch that is larger goes by itself
CLOSE_SECONDS = 5.0  # for what was prefetched to go back


class ConnectedBroker(WireBroker):
    """Made by `heapline.connect`. Use it with `async with`, or as it is and `close` it."""

    def __init__(
        self, endpoints: Sequence[str], *, credential: str | None = None, tls: ClientTls | None = None,
        deadline: float = DEADLINE,
    ) -> None:  # fmt: skip
        super().__init__(endpoints[0], credential=credential, tls=tls)
        for endpoint in endpoints:
            parse_target(endpoint, tls)
        check_seconds("deadline", deadline, 0.001)
        self._endpoints = tuple(endpoints)
        self._deadline = deadline
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retrying: RetryingCalls | None = None
        self._feeds: WeakSet[Feed] = WeakSet()
        _CLIENTS.add(self)

    async def __aenter__(self) -> ConnectedBroker:
        self._closed = False
        return self

    @property
    def calls(self) -> RetryingCalls:  # type: ignore[override]
        if self._loop is not asyncio.get_running_loop() or self._retrying is None:
            self._begin()
        assert self._retrying is not None
        return self._retrying

    def _begin(self) -> None:
        """First use: here and now is where it belongs to."""
        if self._closed:
            raise Closed
        if self._loop is not None and not self._loop.is_closed():
            raise BadRequest(
                "this client belongs to another event loop, which is still open: connect once for each loop, "
                "or use heapline.connect_sync from several threads"
            )
        _note_process()
        self._loop = asyncio.get_running_loop()
        self._returns = Returns(self.release)
        self._retrying = RetryingCalls(self._endpoints, self._make_calls, self._deadline)
        self._name, self._pops = secrets.token_hex(8), count(1)
        self._numbered: dict[str, Numbered] = {}
        self._enqueues: dict[str, Lane] = {}
        self._batches: dict[str, Lane] = {}
        self._acks: dict[str, Lane] = {}

    def _make_calls(self, endpoint: str) -> Calls:
        return Calls(endpoint, self._credential, None, late=self._late, tls=self._tls)

    def _forget(self) -> None:
        """In a forked child: what was the parent's is neither used nor closed here."""
        if self._retrying is not None:
            _LEFT_BEHIND.append((self._retrying, self._loop, self._returns, self._enqueues, self._batches, self._acks))
        self._loop = self._retrying = None

    async def close(self) -> None:
        """What is under way is finished, what was prefetched is released; then the connection ends."""
        self._closed = True
        retrying, loop = self._retrying, self._loop
        if retrying is None or loop is not asyncio.get_running_loop():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(feed.close() for feed in self._feeds))
        await self._returns.close()
        for lane in (*self._enqueues.values(), *self._batches.values(), *self._acks.values()):
            lane.end(Closed())
        await retrying.close()
        await self._returns.close()
        self._retrying = self._loop = None

    def within(self, seconds: float) -> ConnectedBroker:
        """The same client with another deadline: `await hl.within(2).enqueue(…)`."""
        check_seconds("seconds", seconds, 0.001)
        return cast(ConnectedBroker, _Within(self, seconds))

    def _lane(self, name: str, gathering: Gathering, carry: Carry, width: int = 1) -> Lane:
        def give_up(sent: bool) -> Exception:
            return out_of_time(name, self._deadline, IN_DOUBT if sent else UNSENT)

        return Lane(gathering, carry, self._returns.own, give_up, width)

    # -- in --------------------------------------------------------------------------------------------------------

    async def enqueue(
        self, topic: str, payload: bytes, *, priority: int = 0, key: str | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, headers: Mapping[str, str] | None = None, ttl: float | None = None,
        max_retries: int | None = None, idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, seq: int | None = None,
        answered_below: int | None = None, fairness_key: str | None = None,
    ) -> Enqueued:  # fmt: skip
        """Answered when durable. Repeated until it is, under the same number: never doubled by this call.

        Joins other enqueues to the topic that are made meanwhile; those of one caller keep their order. After
        DeadlineExceeded it may or may not have gone in: whoever calls again needs an idempotency_key to be safe.
        """
        if producer is not None or producer_id is not None or not (epoch is seq is answered_below is None):
            return await super().enqueue(
                topic, payload, priority=priority, key=key, delay=delay, deliver_at=deliver_at, headers=headers,
                ttl=ttl, max_retries=max_retries, idempotency_key=idempotency_key,
                idempotency_scope=idempotency_scope, producer=producer, producer_id=producer_id, epoch=epoch, seq=seq,
                answered_below=answered_below, fairness_key=fairness_key,
            )  # fmt: skip
        message = Outgoing(
            payload, priority, key, delay, deliver_at, headers, ttl, max_retries, idempotency_key, idempotency_scope,
            None, fairness_key,
        )  # fmt: skip
        check_outgoing(message, topic)
        until = self.calls.until()
        if SECONDS.get() is not None:  # with a deadline of its own it goes by itself
            (result,) = await self._numbers(one_name(topic)).send([message], False, until)
            if result.error is not None:
                raise result.error
            return result
        lane = self._enqueues.get(topic) or self._lane_in(topic)
        joined: Enqueued = await lane.put(message, until, len(payload))
        return joined

    def _lane_in(self, topic: str) -> Lane:
        name = one_name(topic)
        numbered = self._numbers(name)

        async def carry(batch: list[Single]) -> None:
            results = await numbered.send([single.what for single in batch], False, max(s.until for s in batch))
            for single, result in zip(batch, results, strict=True):
                if result.error is None:
                    answer(single, result)
                else:
                    refuse(single, result.error)

        lane = self._enqueues.get(name) or self._lane("EnqueueBatch", Gathering(), carry)
        self._enqueues[name] = self._enqueues[topic] = lane
        return lane

    def _numbers(self, topic: str) -> Numbered:
        if topic not in self._numbered:
            self._numbered[topic] = Numbered(topic, self.calls)
        return self._numbered[topic]

    async def send_batch(
        self, topic: str, messages: list[Outgoing], atomic: bool, identity: Identity | None
    ) -> list[Enqueued]:
        """Numbered here unless the caller has done it; so every batch can be repeated."""
        if identity is not None or not messages:
            return await super().send_batch(topic, messages, atomic, identity)
        until, name = self.calls.until(), one_name(topic)
        nbytes = sum([len(m.payload) for m in messages])
        if not atomic or len(messages) > JOINED_MAX or nbytes > JOINED_BYTES_MAX or SECONDS.get() is not None:
            return await self._numbers(name).send(messages, atomic, until)
        lane = self._batches.get(name) or self._lane_of_batches(name)
        results: list[Enqueued] = await lane.put(messages, until, nbytes, len(messages))
        return results

    def _lane_of_batches(self, topic: str) -> Lane:
        """Small atomic batches join too: all of several go in, or, if that is refused, each for itself."""
        numbered = self._numbers(topic)

        async def carry(batch: list[Single]) -> None:
            try:
                results = await numbered.send(
                    [m for single in batch for m in single.what], True, max(single.until for single in batch)
                )
            except (RequestError, ConflictError, ResourceExhausted) as error:
                if len(batch) == 1:
                    refuse(batch[0], error)
                else:
                    await asyncio.gather(*(carry([single]) for single in batch))
                return
            rest = iter(results)
            for single in batch:
                answer(single, list(islice(rest, single.count)))

        lane = self._batches[topic] = self._lane("EnqueueBatch", Gathering(), carry, width=2)
        return lane

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        """Repeated under one request id: leases that a lost answer gave are found again. The deadline is on top of
        `wait`. A pop that is cancelled gives back what it still gets."""
        self.calls  # noqa: B018 - it begins here
        named = f"{self._name}-{next(self._pops)}" if request_id is None else request_id
        options: dict[str, Any] = {
            "visibility": visibility, "holder": holder, "max_bytes": max_bytes, "request_id": named,
        }  # fmt: skip
        try:
            return await super().pop(topic, max_messages, wait=wait, **options)
        except asyncio.CancelledError:
            if request_id is None and not self._closed:
                self._returns.own(self._give_back_named(topic, options))
            raise

    async def _give_back_named(self, topic: str, options: dict[str, Any]) -> None:
        """Whether a cancelled pop leased something is told by repeating it; what it says goes back."""
        with contextlib.suppress(HeaplineError):
            if messages := await super().pop(topic, 1, **options):
                await self.release(messages)

    async def ack(self, messages: Held) -> None:
        """Joins other acks that are made meanwhile. Repeating an ack is good as long as its token is remembered."""
        if type(messages) is Message and SECONDS.get() is None:
            _tell_feed(messages)
            until = self.calls.until()
            lane = self._acks.get(messages.topic) or self._lane_out(messages.topic)
            await lane.put((messages.id, messages.token), until)
        else:
            await super().ack(messages)

    def _lane_out(self, topic: str) -> Lane:
        async def carry(batch: list[Single]) -> None:
            ids, tokens = [s.what[0] for s in batch], [s.what[1] for s in batch]
            request = pb.LeasesRequest(topic=topic, ids=ints(ids), tokens=ints(tokens), tell_lost=True)
            told, _ = await self.calls.ask("Ack", request, max(single.until for single in batch))
            lost = set(read_ints(told.lost).tolist()) if told.lost else ()
            for single in batch:
                if single.what[0] in lost:
                    refuse(single, LeaseLost([single.what[0]], topic))
                else:
                    answer(single, None)

        # An answer names lost leases by message: two leases of one message are not told apart in it.
        lane = self._acks[topic] = self._lane("Ack", Gathering(apart=lambda lease: lease[0]), carry)
        return lane

    async def _on_leases(self, method: str, messages: Held, **options: Any) -> None:
        if method != "Extend":
            messages = listed(messages)
            for message in messages:
                if isinstance(message, Message):
                    _tell_feed(message)
        await super()._on_leases(method, messages, **options)

    async def _act(self, method: str, request: Any) -> Any:
        """nack, release and bury end a lease, so when they are repeated they may find that they ended it themselves.

        The message is back in the topic then, which is what nack and release are for, and what becomes of a message
        whose lease ran out meanwhile: no error. A buried one must be found among the dead, else its lease was lost.
        """
        told, doubt = await self.calls.ask(method, request)
        if doubt and told.lost and method in ("Nack", "Release", "MoveToDLQ"):
            lost = read_ints(told.lost).tolist() if method == "MoveToDLQ" else []
            told.lost = ints([id for id in lost if not await self._is_buried(request.topic, id)])
        return told

    async def _is_buried(self, topic: str, id: int) -> bool:
        try:
            return (await self.get(topic, id)).state in ENDED_BY_BURY
        except MessageNotFound:
            return False

    def consume(
        self, topic: str, *, prefetch: int = PREFETCH, visibility: float | None = None, holder: str | None = None
    ) -> Consumption:
        """`async for message in hl.consume("jobs"): …`: see heapline.client.consuming."""
        consumption = consume(self, topic, prefetch=prefetch, visibility=visibility, holder=holder)
        self._feeds.add(consumption.feed)
        return consumption

    # -- by id -----------------------------------------------------------------------------------------------------

    async def cancel(self, topic: str, message_id: MessageId) -> None:
        """A repeated cancel that finds nothing looks whether the message was cancelled."""
        try:
            await super().cancel(topic, message_id)
        except MessageNotFound as error:
            if not error.repeated or (await self.get(topic, message_id)).state != "cancelled":
                raise

    # -- the log ---------------------------------------------------------------------------------------------------

    async def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        """Goes on where it was when a connection breaks; gives up when a deadline passes without anything new."""
        tries, until = pauses(), self.calls.until()
        loop = asyncio.get_running_loop()
        while True:
            try:
                async for frame in super().read_log(topic, partition, start, end):
                    yield frame
                    start = frame.offset + frame.row_count
                    tries, until = pauses(), self.calls.until()
                return
            except HeaplineError as error:
                pause = next(tries)
                if not passes_by_itself(error) or self._closed:
                    raise
                if loop.time() + pause >= until:
                    raise self.calls.out_of_time("ReadLog", f"the connection broke ({error})") from None
            await asyncio.sleep(pause)


def _tell_feed(message: Message) -> None:
    """A consumption extends its messages until they are done, also if they are not acked through themselves."""
    feed: Any = message._broker
    if type(feed) is Feed:
        feed.done(message)


class _Within:
    def __init__(self, client: ConnectedBroker, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            before = SECONDS.set(self._seconds)
            try:
                return await method(*args, **options)
            finally:
                SECONDS.reset(before)

        return call


# -- processes ---------------------------------------------------------------------------------------------------------

_CLIENTS: WeakSet[ConnectedBroker] = WeakSet()
_LEFT_BEHIND: list[Any] = []
_PROCESS: list[int] = []  # the one that has used gRPC


def _note_process() -> None:
    """gRPC does not survive a fork: a child that touches it crashes. Better an error that says what to do."""
    if not _PROCESS:
        _PROCESS.append(os.getpid())
    elif _PROCESS[0] != os.getpid():
        raise BadRequest(
            "this process was forked from one that had already used a Heapline client, and gRPC does not survive "
            "that: use clients only after the fork (connect() alone does not connect), or start processes with "
            "'spawn'"
        )


def _in_child() -> None:
    for client in list(_CLIENTS):
        client._forget()


os.register_at_fork(after_in_child=_in_child)
