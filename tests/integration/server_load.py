"""Clients of a server that is killed and restarted, and their own record of its answers.

Each client runs forever: a call that finds no server is repeated on the next one, if repeating is safe (numbers,
idempotency keys, request ids, batches), and left in doubt if not. Calls that `Record` has as answered were answered;
the server may have done more than that, never less. Clients do not know processes: `Link` has the server's address.
Commands use the native wire, and PopStream, which only gRPC has, a separate connection.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from heapline.contract.broker import Broker
from heapline.contract.errors import LeaseLost, UnavailableError
from heapline.contract.leases import Pop, messages_of
from heapline.contract.message import Enqueued, LeaseRef, Message, Outgoing
from heapline.wire.protobuf import response_of
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Requests, pop_start

T = TypeVar("T")
JOBS, MAILS = "jobs", "mails"
TOPICS: dict[str, dict[str, Any]] = {JOBS: {"partitions": 1}, MAILS: {"partitions": 3}}
PATIENCE = 60.0
WAITING_MAX = 400  # producers pause above this, so that messages are also processed to the end
REPEATABLE = 100  # numbers that a producer keeps open for repeats


class Link:
    """The server's address; None while there is none. `streams` is the same server over gRPC."""

    def __init__(self) -> None:
        self.broker: Broker | None = None
        self.streams: RawGrpc | None = None
        self._changed = asyncio.Event()
        self.refusals: list[UnavailableError] = []

    def point_to(self, broker: Broker | None, streams: RawGrpc | None = None) -> None:
        self.broker, self.streams = broker, streams
        self._changed.set()
        self._changed = asyncio.Event()

    async def other_than(self, broker: Broker | None) -> Broker:
        async with asyncio.timeout(PATIENCE):
            while self.broker is None or self.broker is broker:
                await self._changed.wait()
        return self.broker

    async def until_answered(self, act: Callable[[Broker], Awaitable[T]]) -> T:
        """Call, on one server after the other."""
        broker = None
        while True:
            broker = await self.other_than(broker)
            try:
                return await act(broker)
            except UnavailableError as error:
                self.refusals.append(error)

    async def once(self, act: Callable[[Broker], Awaitable[T]]) -> T | None:
        """Call; return None if the result is unknown. The next call waits for the next server."""
        broker = await self.other_than(None)
        try:
            return await act(broker)
        except UnavailableError as error:
            self.refusals.append(error)
            await self.other_than(broker)
            return None


@dataclass
class Group:
    """Messages that are enqueued together, or not at all."""

    topic: str
    tags: list[str]
    answered: bool = False
    dropped: bool = False  # answered as aborted


@dataclass
class Record:
    groups: list[Group] = field(default_factory=list)
    ids: dict[str, tuple[str, int]] = field(default_factory=dict)  # tag -> topic and id, as answered
    delivered: dict[tuple[str, int, int], str] = field(default_factory=dict)  # topic, id, token -> holder
    ended: list[tuple[str, str, int, int]] = field(default_factory=list)  # answered: how, topic, id, token
    ack_asked: set[tuple[str, int]] = field(default_factory=set)
    acked: dict[tuple[str, int], int] = field(default_factory=dict)  # answered: topic, id -> token
    counts: Counter[str] = field(default_factory=Counter)

    def asks(self, topic: str, tags: list[str]) -> Group:
        self.groups.append(Group(topic, tags))
        return self.groups[-1]

    def enqueued(self, group: Group, results: list[Enqueued]) -> None:
        group.answered = True
        self.counts["enqueued"] += len(results)
        for tag, result in zip(group.tags, results, strict=True):
            known = self.ids.setdefault(tag, (group.topic, result.id))
            assert known == (group.topic, result.id), f"{tag} has two ids: {known} and {result.id}"

    def repeated(self, group: Group, results: list[Enqueued]) -> None:
        self.counts["repeats refused"] += len(results)
        assert all(r.duplicate for r in results), f"{group.tags} was enqueued again"
        self.enqueued(group, results)

    def popped(self, messages: list[Message], holder: str) -> None:
        self.counts["delivered"] += len(messages)
        for m in messages:
            # A lease may be read late, when it has expired and the next holder has acked. Tokens show the order.
            acked = self.acked.get((m.topic, m.id))
            assert acked is None or m.token < acked, f"message {m.id} was acked under {acked}, now it has {m.token}"
            first = self.delivered.setdefault((m.topic, m.id, m.token), holder)
            assert first == holder, f"the lease {m.token} of message {m.id} went to {first} and to {holder}"


class Client:
    def __init__(self, link: Link, record: Record, name: str, draw: random.Random) -> None:
        self.link, self.record, self.name, self.draw = link, record, name, draw
        self.stopping = False
        self.number = 0

    async def run(self) -> None:
        while not self.stopping:
            await self.step()

    async def step(self) -> None: ...

    def tags(self, count: int) -> list[str]:
        self.number += 1
        return [f"{self.name}.{self.number}.{i}" for i in range(count)]

    def topic(self) -> str:
        return self.draw.choice([JOBS, MAILS])

    def messages(self, tags: list[str], **options: Any) -> list[Outgoing]:
        pad = b"." * self.draw.choice([0, 30, 500])
        return [Outgoing(tag.encode() + b" " + pad, self.draw.randrange(9), **options) for tag in tags]

    async def rest(self, topic: str) -> None:
        """Wait until there is space for more."""
        while not self.stopping:
            stats = await self.link.until_answered(lambda broker: broker.stats(topic))
            if stats.ready + stats.delayed < WAITING_MAX:
                return
            await asyncio.sleep(0.02)


class PlainProducer(Client):
    """Sends a batch once: if the response is lost, it may be stored or not, but completely."""

    async def step(self) -> None:
        await self.rest(topic := self.topic())
        group = self.record.asks(topic, self.tags(self.draw.choice([1, 8, 40])))
        delay = self.draw.uniform(0.02, 0.3) if self.draw.random() < 0.3 else None
        batch = self.messages(group.tags, delay=delay)
        results = await self.link.once(lambda broker: broker.enqueue_batch(topic, batch))
        if results is None:
            self.record.counts["in doubt"] += len(batch)
        else:
            self.record.enqueued(group, results)


class KeyedProducer(Client):
    """Sends under idempotency keys until answered, and repeats some afterwards."""

    async def step(self) -> None:
        await self.rest(topic := self.topic())
        group = self.record.asks(topic, self.tags(1))
        (m,) = self.messages(group.tags)

        async def send(broker: Broker) -> Enqueued:
            return await broker.enqueue(topic, m.payload, priority=m.priority, idempotency_key=group.tags[0])

        self.record.enqueued(group, [await self.link.until_answered(send)])
        if self.draw.random() < 0.3:
            self.record.repeated(group, [await self.link.until_answered(send)])


class NumberedProducer(Client):
    """Sends under numbers until answered, and repeats some afterwards."""

    async def run(self) -> None:
        self.one = self.topic()
        self.epoch = await self.link.until_answered(lambda broker: broker.open_producer(self.one, self.name))
        self.seq = 0
        await super().run()

    async def step(self) -> None:
        await self.rest(self.one)
        group = self.record.asks(self.one, self.tags(self.draw.choice([1, 5, 20])))
        batch = [msgspec.structs.replace(m, seq=self.seq + i) for i, m in enumerate(self.messages(group.tags))]
        self.seq += len(batch)
        below = max(0, self.seq - REPEATABLE)

        async def send(broker: Broker) -> list[Enqueued]:
            identity: dict[str, Any] = {"producer_id": self.name, "epoch": self.epoch, "answered_below": below}
            return await broker.enqueue_batch(self.one, batch, **identity)

        self.record.enqueued(group, await self.link.until_answered(send))
        if self.draw.random() < 0.3:
            self.record.repeated(group, await self.link.until_answered(send))


class Batcher(Client):
    """Prepares batches over both topics and decides them, each call again and again until it is answered."""

    async def step(self) -> None:
        await self.rest(JOBS)
        tags = self.tags(12)
        batch_id = tags[0]
        groups = [self.record.asks(JOBS, tags[:5]), self.record.asks(MAILS, tags[5:9])]
        lost = self.record.asks(JOBS, tags[9:])  # a part that is not named in the commit
        share = {g.topic: self.messages(g.tags) for g in groups}
        rest = self.messages(lost.tags)
        first = await self.link.until_answered(lambda broker: broker.prepare_batch(batch_id, "a", share))
        await self.link.until_answered(lambda broker: broker.prepare_batch(batch_id, "b", rest, topic=JOBS))
        if self.draw.random() < 0.25:
            await self.link.until_answered(lambda broker: broker.abort_batch(batch_id))
            for group in (*groups, lost):
                group.dropped = True
            self.record.counts["batches aborted"] += 1
            return
        count = await self.link.until_answered(lambda broker: broker.commit_batch(batch_id, ["a"]))
        assert count == 9, f"{count} of 9 messages of a batch were committed"
        lost.dropped = True
        for group in groups:
            self.record.enqueued(group, first[group.topic])
        self.record.counts["batches committed"] += 1


class Consumer(Client):
    """Pops, with or without a request id, and ends the leases in one of the possible ways."""

    async def step(self) -> None:
        topic, visibility = self.topic(), self.draw.choice([0.3, 1.0, 2.0])
        count, wait = self.draw.choice([1, 5, 40]), self.draw.choice([0.0, 0.2])
        self.number += 1
        named = f"{self.name}.{self.number}" if self.draw.random() < 0.5 else None

        async def pop(broker: Broker) -> list[Message]:
            return await broker.pop(
                topic, count, visibility=visibility, wait=wait, holder=self.name, request_id=named
            )  # fmt: skip

        popped = await (self.link.until_answered(pop) if named else self.link.once(pop))
        if popped:
            self.record.popped(popped, self.name)
            await self.finish(popped)

    async def finish(self, popped: list[Message]) -> None:
        how = self.draw.choices(["ack", "nack", "release", "bury", "extend", "leave"], [60, 8, 8, 3, 8, 6])[0]
        if how == "leave":
            return
        if how == "extend":
            await self.carry_out("extend", popped)
            how = "ack"
        if self.draw.random() < 0.1:
            await asyncio.sleep(0.4)  # some leases have ended before
        await self.carry_out(how, popped)

    async def carry_out(self, how: str, messages: list[Message]) -> None:
        refs = [LeaseRef(m.topic, m.id, m.token) for m in messages]
        if how == "ack":
            self.record.ack_asked.update((m.topic, m.id) for m in messages)

        async def end(broker: Broker) -> list[int]:
            try:
                await (broker.extend(refs, 1.0) if how == "extend" else getattr(broker, how)(refs))
            except LeaseLost as error:
                return error.lost
            return []

        lost = set(await self.link.until_answered(end))
        self.record.counts[f"{how} lost"] += len(lost)
        for ref in refs:
            if ref.id not in lost:
                self.record.counts[how] += 1
                self.record.ended.append((how, ref.topic, ref.id, ref.token))
                if how == "ack":
                    self.record.acked[ref.topic, ref.id] = ref.token


class Streamer(Consumer):
    """A PopStream: gives a credit for every message that it has ended."""

    async def step(self) -> None:
        topic = self.topic()
        broker = await self.link.other_than(None)
        requests = Requests(pop_start(topic, 20, max_messages=7, visibility=1.0, holder=self.name))
        try:
            assert self.link.streams is not None
            async for answer in self.link.streams.calls.stream("PopStream", requests):
                messages = messages_of(broker, response_of(Pop).unpack(answer))
                self.record.popped(messages, self.name)
                await self.finish(messages)
                if self.stopping:
                    return
                requests.credits(len(messages))
        except UnavailableError as error:
            self.link.refusals.append(error)
            await self.link.other_than(broker)

    async def carry_out(self, how: str, messages: list[Message]) -> None:
        await super().carry_out("ack" if how == "extend" else how, messages)


class Replayer(Client):
    async def step(self) -> None:
        await asyncio.sleep(0.1)
        for topic in TOPICS:
            await self.link.until_answered(lambda broker, topic=topic: broker.dlq_replay(topic))  # type: ignore[misc]


KINDS: tuple[type[Client], ...] = (
    PlainProducer, PlainProducer, KeyedProducer, KeyedProducer, NumberedProducer, NumberedProducer, Batcher, Consumer,
    Consumer, Consumer, Streamer, Replayer,
)  # fmt: skip


async def make_topics(broker: Broker) -> None:
    for topic, config in TOPICS.items():
        await broker.create_topic(
            topic, **config, retention=3600.0, max_retries_default=4, segment_bytes=1 << 20,
            backoff={"base": 0.05, "factor": 1.5, "max": 0.2, "jitter": 0.2},
        )  # fmt: skip


class Load:
    """All kinds of clients together."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.link, self.record = Link(), Record()
        self._tasks: list[asyncio.Task[None]] = []
        names = (f"c{i}" for i in range(len(KINDS)))
        self.clients = [
            kind(self.link, self.record, name, random.Random(draw.random()))
            for kind, name in zip(KINDS, names, strict=True)
        ]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(client.run()) for client in self.clients]

    async def abandon(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_alive(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Let every client finish its step; a server must be running."""
        for client in self.clients:
            client.stopping = True
        streams = [t for t, c in zip(self._tasks, self.clients, strict=True) if isinstance(c, Streamer)]
        others = [t for t in self._tasks if t not in streams]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*others)
        for task in streams:  # they may wait for messages that will not be sent
            task.cancel()
        for end in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end
