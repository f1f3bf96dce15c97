"""The client that programs use: the wire client, made to last, quick for single calls, and safe to repeat.

Every call is repeated over broken connections until its deadline (retrying.py). Single enqueues and acks of many
coroutines travel together (coalescing.py). What it enqueues is numbered under a name of its own (numbered.py), pops
carry a request id, and acts on leases their tokens: so a call whose answer was lost is made again and counts once.

It connects when it is first used, belongs to the event loop that used it, and does not survive a fork once it was used.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any, cast
from weakref import WeakSet

import msgspec

from heapline.broker import Held, MessageId
from heapline.client.calls import Calls
from heapline.client.checks import check_outgoing
from heapline.client.consuming import PREFETCH, Consumption, Feed, consume
from heapline.client.forking import check_process, watch
from heapline.client.lanes import Lanes
from heapline.client.patience import DEADLINE, SECONDS, check_deadline, passes_by_itself, pauses
from heapline.client.retrying import RetryingCalls
from heapline.client.returning import Returns
from heapline.client.subscribing import PushedMember
from heapline.client.target import ClientTls, parse_target
from heapline.client.wire import WireBroker
from heapline.engine.calls import Identity
from heapline.engine.replays.asking import Mark, Request
from heapline.engine.replays.delivering import Step
from heapline.engine.requests import listed
from heapline.errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    HeaplineError,
    LeaseLost,
    MessageNotFound,
)
from heapline.model import Enqueued, IdempotencyScope, LogFrame, Message, Outgoing
from heapline.producer import Producer
from heapline.wire.columns import ints, read_ints

ENDED_BY_BURY = ("dead", "dropped")
CLOSE_SECONDS = 5.0  # for what was prefetched to go back


class ConnectedBroker(WireBroker):
    """Made by `heapline.connect`. Use it with `async with`, or as it is and `close` it.

    What happens to a call whose answer is lost:

    - enqueue, enqueue_batch, prepare_batch, commit_batch, pop, ack, extend, cancel: made again, and counts once.
    - nack, release, bury: made again; a lease that is over by then is no error, but bury looks whether the message is
      dead, and raises LeaseLost if it is not.
    - create_topic, update_topic, pause_topic, resume_topic, set_partition_throttled, snapshot, open_producer,
      create_schedule, pause_schedule, resume_schedule and all that only read: made again, which is as good as once.
      abort_batch may then say that there were no parts left.
    - reschedule: made again; a `delay` counts from the last try.
    - group_ack, group_nack, group_leave and create_group: made again, which is as good as once. What a group_fetch took
      whose answer was lost comes again when its time is over; a subscription goes on by itself.
    - purge, delete_topic, delete_schedule, dlq_replay, dlq_delete, delete_group, reset_offsets, group_dead_replay,
      group_dead_delete, forget_sink: not made again, since they would also hit what came in between. They raise
      UnavailableError, which says that they may have been carried out.
    """

    def __init__(
        self, endpoints: Sequence[str], *, credential: str | None = None, tls: ClientTls | None = None,
        deadline: float = DEADLINE, find_credential: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(endpoints[0], credential=credential, tls=tls)
        for endpoint in endpoints:
            parse_target(endpoint, tls)
        check_deadline("deadline", deadline)
        self._endpoints = tuple(endpoints)
        self._deadline = deadline
        self._find_credential = find_credential
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retrying: RetryingCalls | None = None
        self._lanes: Lanes | None = None
        self._feeds: WeakSet[Feed] = WeakSet()
        self._members: WeakSet[PushedMember] = WeakSet()
        watch(self)

    async def __aenter__(self) -> ConnectedBroker:
        self.reopen()
        return self

    def reopen(self) -> None:
        """After `close`: it connects when it is next used."""
        self._closed = False

    @property
    def calls(self) -> RetryingCalls:  # type: ignore[override]
        if self._loop is not asyncio.get_running_loop() or self._retrying is None:
            self._begin()
        assert self._retrying is not None
        return self._retrying

    @property
    def lanes(self) -> Lanes:
        if self._loop is not asyncio.get_running_loop() or self._lanes is None:
            self._begin()
        assert self._lanes is not None
        return self._lanes

    def _begin(self) -> None:
        """First use: here and now is where it belongs to."""
        if self._closed:
            raise Closed
        if self._loop is not None and not self._loop.is_closed():
            raise BadRequest(
                "this client belongs to another event loop, which is still open: connect once for each loop, "
                "or use heapline.connect_sync from several threads"
            )
        check_process()
        self._loop = asyncio.get_running_loop()
        self._returns = Returns(self.release)
        self._retrying = RetryingCalls(self._endpoints, self._make_calls, self._deadline)
        self._name, self._pops = secrets.token_hex(8), count(1)
        self._lanes = Lanes(self._retrying, self._returns.own, self._deadline)

    def _make_calls(self, endpoint: str) -> Calls:
        # A server that is only starting leaves its key just before it listens; one on a new directory, another key.
        self._credential = self._find_credential() or self._credential
        return Calls(endpoint, self._credential, None, late=self._late, tls=self._tls)

    def forget(self) -> Any:
        """See forking.py."""
        left = self._retrying, self._loop, self._returns, self._lanes
        self._loop = self._retrying = self._lanes = None
        return left

    async def close(self) -> None:
        """What is under way is finished, what was prefetched is released; then the connection ends."""
        self._closed = True
        retrying, loop = self._retrying, self._loop
        if retrying is None or loop is not asyncio.get_running_loop():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(feed.close() for feed in self._feeds), *(m.end() for m in self._members))
        await self._returns.close()
        self.lanes.end(Closed())
        await retrying.close()
        await self._returns.close()
        self._loop = self._retrying = self._lanes = None

    def within(self, seconds: float) -> ConnectedBroker:
        """The same client with another deadline: `await hl.within(2).enqueue(…)`."""
        check_deadline("seconds", seconds)
        return cast(ConnectedBroker, _Within(self, seconds))

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
        if headers:  # as they are now: the message may wait behind a call, and what was not checked could fail others
            message = msgspec.structs.replace(message, headers=dict(headers))
        if SECONDS.get() is None:
            return await self.lanes.enqueue(topic, message)
        (result,) = await self.lanes.send(topic, [message], False)  # with a deadline of its own it goes by itself
        if result.error is not None:
            raise result.error
        return result

    async def send_batch(
        self, topic: str, messages: list[Outgoing], atomic: bool, identity: Identity | None
    ) -> list[Enqueued]:
        """Numbered here unless the caller has done it; so every batch can be repeated."""
        if identity is not None or not messages:
            return await super().send_batch(topic, messages, atomic, identity)
        if atomic and SECONDS.get() is None:
            return await self.lanes.enqueue_batch(topic, messages)
        return await self.lanes.send(topic, messages, atomic)

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        """Repeated under one request id: leases that a lost answer gave are found again. The deadline is on top of
        `wait`. A pop that is cancelled or given up gives back what it still gets."""
        self.calls  # noqa: B018 - it begins here
        named = f"{self._name}-{next(self._pops)}" if request_id is None else request_id
        options: dict[str, Any] = {
            "visibility": visibility, "holder": holder, "max_bytes": max_bytes, "request_id": named,
        }  # fmt: skip
        try:
            return await super().pop(topic, max_messages, wait=wait, **options)
        except (asyncio.CancelledError, DeadlineExceeded) as error:
            if request_id is None and getattr(error, "reached", True):
                self._returns.own(self._give_back_named(topic, options))
            raise

    async def _popped(self, request: Any) -> list[Message]:
        """Leases that a lost answer gave are as old as that: they are renewed, or who works would take them for new."""
        answer, repeated = await self.calls.ask("Pop", request)
        messages = self._messages(answer)
        if not repeated or not messages or not request.HasField("visibility"):
            return messages
        lost: list[int] = []
        try:
            await self.extend(messages, request.visibility)
        except LeaseLost as error:
            lost = error.lost
        return [message for message in messages if message.id not in lost]

    async def _give_back_named(self, topic: str, options: dict[str, Any]) -> None:
        """Whether a pop that nobody waits for leased something is told by repeating it; what it says goes back."""
        SECONDS.set(None)  # in this task: whose pop it was, has no more time
        options["visibility"] = None  # not renewed
        with contextlib.suppress(HeaplineError):
            if messages := await super().pop(topic, 1, **options):
                await self.release(messages)

    async def ack(self, messages: Held) -> None:
        """Joins other acks that are made meanwhile. Repeating an ack is good as long as its token is remembered."""
        if type(messages) is Message and SECONDS.get() is None:
            _tell_feed(messages)
            await self.lanes.ack(messages.topic, messages.id, messages.token)
        else:
            await super().ack(messages)

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
        if doubt and method == "GroupNack":
            told.ClearField("lost")  # by the first try, or by their time
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

    def _member(self) -> PushedMember:
        """Of a subscription: its rows are pushed."""
        member = PushedMember(self)
        self._members.add(member)
        return member

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

    async def replay_steps(self, asked: Request, checkpoint: str | None = None) -> AsyncIterator[Step]:
        """Goes on where it was when a connection breaks; gives up when a deadline passes without anything new."""
        tries, until = pauses(), self.calls.until()
        loop = asyncio.get_running_loop()
        while True:
            try:
                async for step in super().replay_steps(asked, checkpoint):
                    yield step
                    start, end = Mark(offsets=step.positions), Mark(offsets=step.ends)
                    partitions = sorted(step.ends)
                    asked = msgspec.structs.replace(asked, start=start, end=end, partitions=partitions)
                    checkpoint = None
                    tries, until = pauses(), self.calls.until()
                return
            except HeaplineError as error:
                pause = next(tries)
                if not passes_by_itself(error) or self._closed:
                    raise
                if loop.time() + pause >= until:
                    raise self.calls.out_of_time("Replay", f"the connection broke ({error})") from None
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
