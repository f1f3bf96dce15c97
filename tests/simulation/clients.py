"""Seeded clients of a simulated node: producers, workers, an operator, and one that empties everything at the end.

A client's state (leases, messages whose enqueue was not answered) outlives the node: after a crash it continues with
it, as real clients do. Every call is in the history. Faults are injected elsewhere.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from heapline.contract.message import Enqueued, LeaseRef, Message, MessageInfo, Outgoing
from tests.simulation.evidence import DRAIN
from tests.simulation.history import Call, Dead, Got, Reply, Sent, fairness_key_of, payload_of
from tests.simulation.node import Node, Unexpected

CALL_SECONDS_MAX = 300.0
PRIORITIES = (-(1 << 63), -5, 0, 1, 2, 3, 3, 3, 7, (1 << 63) - 1)
HELD_MAX = 200
PARTITIONS_MAX = 24  # of a topic that grows repeatedly


class Numbered(NamedTuple):
    """A message with everything that a repeated send must repeat."""

    sent: Sent
    key: str | None = None
    idempotency_key: str | None = None
    seq: int | None = None

    def outgoing(self, is_fair: bool = False) -> Outgoing:
        sent = self.sent
        at = None if sent.deliver_at_ms is None else datetime.fromtimestamp(sent.deliver_at_ms / 1000, UTC)
        return Outgoing(
            sent.payload, sent.priority, self.key, sent.delay, at, {"name": sent.name} if self.key else None, sent.ttl,
            sent.max_retries, self.idempotency_key, None, self.seq, fairness_key_of(sent.name) if is_fair else None,
        )  # fmt: skip


class Batch(NamedTuple):
    topic: str
    messages: list[Numbered]
    atomic: bool
    producer_id: str | None = None
    epoch: int | None = None


class Budget:
    """Steps that all clients share."""

    def __init__(self, steps: int) -> None:
        self.left = steps


class Client:
    def __init__(self, node: Node, name: str, seed: int, topics: list[str], budget: Budget) -> None:
        self.node, self.name, self.topics, self.budget = node, name, topics, budget
        self.rng = random.Random(f"{name} {seed}")

    async def run(self) -> None:
        while self.budget.left > 0 and self.topics:
            self.budget.left -= 1
            await self.act(self.rng.choice(self.topics))
            await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.01, 0.1, 1.0)))

    async def act(self, topic: str) -> None:
        raise NotImplementedError

    async def call(
        self, verb: str, topic: str, work: Awaitable[Any], read: Callable[[Any], Any] = lambda answer: answer,
        patience: float | None = None, **args: Any,
    ) -> Call:  # fmt: skip
        """Make one call on the broker. With `patience` the client gives up after that time, without an outcome."""
        limit = CALL_SECONDS_MAX if patience is None else patience
        try:
            return await self.node.history.record(
                self.name, verb, topic, asyncio.wait_for(_awaited(work), limit), read, **args
            )
        except TimeoutError:
            if patience is None:
                raise Unexpected(f"{verb} was not answered within {limit} s of virtual time") from None
            return self.node.history.calls[-1]
        finally:
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # the node crashed before the call began; Python warns of a coroutine that never ran


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


class Producer(Client):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._count = 0
        self._again: list[Batch] = []  # sent, and not answered
        self._lines: dict[str, tuple[int, int]] = {}  # topic -> epoch and next number

    async def act(self, topic: str) -> None:
        again = [batch for batch in self._again if batch.topic in self.topics]
        if again and self.rng.random() < 0.5:
            batch = self.rng.choice(again)
            self._again.remove(batch)
        else:
            batch = await self._new_batch(topic)
        await self._send(batch)

    async def _send(self, batch: Batch) -> None:
        hl, rng = self.node.hl, self.rng
        patience = rng.uniform(0, 0.01) if rng.random() < 0.03 else None
        below = self._answered_below(batch)
        outgoing = [m.outgoing(self.is_fair(batch.topic)) for m in batch.messages]
        work = hl.enqueue_batch(
            batch.topic, outgoing, atomic=batch.atomic, producer_id=batch.producer_id, epoch=batch.epoch,
            answered_below=below,
        )  # fmt: skip
        call = await self.call(
            "enqueue", batch.topic, work, _reported, patience,
            messages=[m.sent for m in batch.messages], atomic=batch.atomic, seqs=[m.seq for m in batch.messages],
            below=below,
        )  # fmt: skip
        can_repeat = all(m.idempotency_key is not None or m.seq is not None for m in batch.messages)
        if call.outcome == "unknown" and can_repeat:
            self._again.append(batch)
        elif call.outcome == "ok" and can_repeat and rng.random() < 0.05:
            self._again.append(batch)  # a client sends it again although it was answered

    def _answered_below(self, batch: Batch) -> int | None:
        """Return the lowest number without an answer, including numbers that may be sent again."""
        if batch.producer_id is None:
            return None
        open_ones = [
            m.seq for other in (*self._again, batch) if other.topic == batch.topic and other.producer_id is not None
            for m in other.messages if m.seq is not None
        ]  # fmt: skip
        return min(open_ones)

    async def _new_batch(self, topic: str) -> Batch:
        rng = self.rng
        count = rng.choice((1, 1, 1, 2, 5, 20))
        style = rng.choice(("plain", "key", "seq"))
        messages = [self._message(style != "plain", small=count > 5) for _ in range(count)]
        atomic = rng.random() < 0.8
        if style == "key":
            messages = [m._replace(idempotency_key=f"key-{m.sent.name}") for m in messages]
        elif style == "seq":
            line = await self._line(topic)
            if line is not None:
                epoch, first = line
                self._lines[topic] = (epoch, first + count)
                messages = [m._replace(seq=first + i) for i, m in enumerate(messages)]
                return Batch(topic, messages, atomic, self.name, epoch)
            messages = [m._replace(sent=m.sent._replace(identified=False)) for m in messages]
        return Batch(topic, messages, atomic)

    async def _line(self, topic: str) -> tuple[int, int] | None:
        if topic not in self._lines:
            call = await self.call("open_producer", topic, self.node.hl.open_producer(topic, self.name))
            if call.outcome != "ok":
                return None
            self._lines[topic] = (call.result, 0)
        return self._lines[topic]

    def is_fair(self, topic: str) -> bool:
        return self.node.history.topics[topic].fairness == "keys"

    def _message(self, identified: bool, small: bool) -> Numbered:
        rng = self.rng
        priorities = PRIORITIES[1:-1] if any(map(self.is_fair, self.topics)) else PRIORITIES
        self._count += 1
        name = f"{self.name}-{self._count}"
        size = rng.choice((0, 10, 100, 600, 600, 5_000) if small else (0, 100, 600, 5_000, 20_000, 60_000, 120_000))
        delay = rng.choice((None, None, None, 0.001, 0.5, 3.0, 30.0))
        deliver_at = None
        if delay is None and rng.random() < 0.08:
            deliver_at = self.node.clock.wall_ms() + rng.choice((-5_000, 500, 10_000, 60_000))
        sent = Sent(
            name, payload_of(name, size), rng.choice(priorities), delay, deliver_at,
            rng.choice((0.5, 5.0, 60.0)) if rng.random() < 0.08 else None,
            rng.choice((0, 1, 5)) if rng.random() < 0.2 else None, identified,
        )  # fmt: skip
        return Numbered(sent, key=f"k{rng.randrange(20)}" if rng.random() < 0.3 else None)


class Worker(Client):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[tuple[str, Got]] = []

    async def act(self, topic: str) -> None:
        held = [h for h in self.held if h[0] in self.topics]
        if held and self.rng.random() < 0.6:
            await self._finish(held)
        else:
            await self._pop(topic)

    async def _pop(self, topic: str) -> None:
        rng = self.rng
        count = rng.choice((1, 1, 2, 5, 20, 100))
        visibility = rng.choice((0.05, 0.5, 3.0, 20.0))
        wait = rng.choice((0.0, 0.0, 0.2, 2.0))
        patience = rng.uniform(0, 0.05) if rng.random() < 0.03 else None
        work = self.node.hl.pop(
            topic, count, visibility=visibility, wait=wait, holder=self.name, max_bytes=rng.choice((1, 50_000, 2 << 20))
        )  # fmt: skip
        call = await self.call("pop", topic, work, _got, patience, count=count, visibility_ms=round(visibility * 1000))
        if call.outcome == "ok":
            self.held += [(topic, got) for got in call.result]
            del self.held[:-HELD_MAX]  # a worker that forgets: those leases expire

    async def _finish(self, held: list[tuple[str, Got]]) -> None:
        rng, hl = self.rng, self.node.hl
        topic = rng.choice(held)[0]
        # One lease of a message at a time: `LeaseLost` names messages, not leases.
        mine = list({got.id: (of, got) for of, got in held if of == topic}.values())
        some = rng.sample(mine, min(len(mine), rng.choice((1, 2, 10, 100))))
        leases = [(got.id, got.token) for _, got in some]
        refs = [LeaseRef(topic, *lease) for lease in leases]
        verb = rng.choice(("ack", "ack", "ack", "nack", "release", "extend", "bury", "forget"))
        if verb == "ack":
            call = await self.call("ack", topic, hl.ack(refs), leases=leases)
            if call.outcome == "unknown" and rng.random() < 0.5:
                return  # retries later
        elif verb == "nack":
            backoff = rng.choice((None, 0.0, 0.3, 5.0))
            await self.call("nack", topic, hl.nack(refs, backoff=backoff, reason="why"), leases=leases, backoff=backoff)
        elif verb == "release":
            await self.call("release", topic, hl.release(refs), leases=leases)
        elif verb == "extend":
            await self._extend(topic, [got for _, got in some])
            return
        elif verb == "bury":
            await self.call("bury", topic, hl.bury(refs, reason="bad luck"), leases=leases)
        gone = {(topic, *lease) for lease in leases}
        self.held = [h for h in self.held if (h[0], h[1].id, h[1].token) not in gone]

    async def _extend(self, topic: str, gots: list[Got]) -> None:
        hl, seconds = self.node.hl, self.rng.choice((0.1, 2.0, 10.0))
        messages = [
            Message(hl, topic, g.id >> 12 & 1023, g.id, g.token, g.payload, g.priority, g.attempts, None, None,
                    g.enqueued_ms, g.deadline_ms)
            for g in gots
        ]  # fmt: skip

        def deadlines(_: Any) -> dict[str, Any]:
            return {"lost": [], "deadlines": {m.id: m._deadline_ms for m in messages}}

        leases = [(g.id, g.token) for g in gots]
        await self.call("extend", topic, hl.extend(messages, seconds), deadlines, leases=leases, seconds=seconds)


class Operator(Client):
    async def act(self, topic: str) -> None:
        hl, rng = self.node.hl, self.rng
        id = self._some_id(topic)
        verb = rng.choice(
            ("cancel", "reschedule", "reschedule", "get", "peek", "dlq_list", "dlq_replay", "dlq_delete", "pause",
             "throttle", "purge", "snapshot", "stats", "log", "update")
        )  # fmt: skip
        if verb == "cancel" and id is not None:
            await self.call("cancel", topic, hl.cancel(topic, id), id=id)
        elif verb == "reschedule" and id is not None:
            delay, priority = rng.choice(((None, 4), (2.0, None), (0.0, -9), (10.0, 100)))
            work = hl.reschedule(topic, id, delay=delay, priority=priority)
            await self.call("reschedule", topic, work, id=id, delay=delay, priority=priority)
        elif verb == "get" and id is not None:
            await self.call("get", topic, hl.get(topic, id), lambda info: (info.id, info.state), id=id)
        elif verb == "peek":
            await self.call("peek", topic, hl.peek(topic, 20), lambda infos: [info.id for info in infos])
        elif verb == "dlq_list":
            await self.call("dlq_list", topic, hl.dlq_list(topic, limit=1000), _dead)
        elif verb == "dlq_replay":
            await self.call("dlq_replay", topic, hl.dlq_replay(topic, rate=rng.choice((None, 5.0))))
        elif verb == "dlq_delete" and id is not None:
            await self.call("dlq_delete", topic, hl.dlq_delete(topic, ids=[id]), ids=[id])
        elif verb == "pause" and rng.random() < 0.5:
            await self._pause(topic)
        elif verb == "throttle" and rng.random() < 0.5:
            await self._throttle(topic)
        elif verb == "purge" and rng.random() < 0.1:
            await self.call("purge", topic, hl.purge(topic))
        elif verb == "snapshot":
            await self.call("snapshot", topic, hl.snapshot(topic))
        elif verb == "stats":
            await self.call("stats", topic, hl.stats(topic), lambda s: (s.ready, s.delayed, s.leased, s.dead))
        elif verb == "log":
            await self.call("log", topic, read_whole_log(self.node, topic))
        elif verb == "update":
            await self._update(topic)

    async def _update(self, topic: str) -> None:
        """Change something invisible, and occasionally grow, whether or not an earlier growth succeeded."""
        hl, rng = self.node.hl, self.rng
        settings: dict[str, Any] = {"dedup_window": 86400.0 + rng.randrange(3)}
        grow = rng.choice((0, 0, 1, 1, 2, 6))
        if grow:
            counts = {info.name: info.config.partitions for info in await hl.list_topics()}
            settings["partitions"] = min(PARTITIONS_MAX, counts[topic] + grow)
        await self.call("update", topic, hl.update_topic(topic, **settings), lambda _: settings)

    async def _pause(self, topic: str) -> None:
        hl, rng = self.node.hl, self.rng
        until = None
        if rng.random() < 0.5:
            until = datetime.fromtimestamp(self.node.clock.wall_ms() / 1000 + 3, UTC)
        await self.call("pause", topic, hl.pause_topic(topic, until), until=until)
        await asyncio.sleep(rng.choice((0.1, 2.0)))
        await self.call("resume", topic, hl.resume_topic(topic))

    async def _throttle(self, topic: str) -> None:
        hl, rng = self.node.hl, self.rng
        partition = rng.randrange(self.node.history.topics[topic].partitions)
        work = hl.set_partition_throttled(topic, partition, True, "the operator says so")
        await self.call("throttle", topic, work, partition=partition)
        await asyncio.sleep(rng.choice((0.1, 2.0)))
        await self.call("unthrottle", topic, hl.set_partition_throttled(topic, partition, False), partition=partition)

    def _some_id(self, topic: str) -> int | None:
        """Return an id that some client has received, recently or long ago."""
        answers = [c for c in self.node.history.calls[-400:] if c.topic == topic and c.outcome == "ok" and c.result]
        found = [row.id for c in answers if c.verb in ("enqueue", "pop", "dlq_list") for row in c.result]
        return self.rng.choice(found) if found else None


class Drainer(Client):
    """Empties every topic at the end: waits for delayed and leased messages, pops and acks all, lists dead letters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.name = DRAIN

    async def run(self) -> None:
        for topic in self.topics:
            await self.call("resume", topic, self.node.hl.resume_topic(topic))
            for partition in range(self.node.history.topics[topic].partitions):
                work = self.node.hl.set_partition_throttled(topic, partition, False)
                await self.call("unthrottle", topic, work, partition=partition)
            await self._drain(topic)

    async def _drain(self, topic: str) -> None:
        hl = self.node.hl
        for turn in range(1500):  # some topics limit the rate
            call = await self.call(
                "pop", topic, hl.pop(topic, 100, visibility=60.0), _got, count=100, visibility_ms=60_000
            )
            if call.outcome == "ok" and call.result:
                leases = [(got.id, got.token) for got in call.result]
                await self.call("ack", topic, hl.ack([LeaseRef(topic, *lease) for lease in leases]), leases=leases)
                continue
            stats = await self.call("stats", topic, hl.stats(topic), lambda s: (s.ready, s.delayed, s.leased, s.dead))
            if call.outcome == "ok" and stats.outcome == "ok" and not any(stats.result[:3]):
                break
            if isinstance(stats.error, Exception) and topic in self.node.history.damaged:
                return  # refused by name, as promised
            await asyncio.sleep(0.1 if turn < 100 else 2.0)
        else:
            raise Unexpected(f"topic {topic} could not be emptied: {stats.line()}")
        listed = await self.call("dlq_list", topic, hl.dlq_list(topic, limit=1 << 20), _dead)
        log = await self.call("log", topic, read_whole_log(self.node, topic))
        if listed.outcome == log.outcome == "ok":
            self.node.history.drained.add(topic)
            if stats.result[3] != len(listed.result):
                raise Unexpected(f"topic {topic} counts {stats.result[3]} dead letters and lists {len(listed.result)}")


async def read_whole_log(node: Node, topic: str) -> list[tuple[int, int, int]]:
    """Read all frames; offsets must be without gaps up to the end. (partition, start, end) of each."""
    spans = []
    for partition, (start, end) in (await node.hl.offsets(topic)).items():
        at = None
        async for frame in node.hl.read_log(topic, partition, start, end):
            if at is not None and frame.offset != at:
                raise Unexpected(f"{topic}/{partition}: the log continues at {frame.offset}, not at {at}")
            at = frame.offset + frame.row_count
        if at is not None and at < end:
            raise Unexpected(f"{topic}/{partition}: the log ends at {at}, before {end}")
        spans.append((partition, start, end))
    return spans


def _reported(answer: list[Enqueued]) -> list[Reply]:
    return [Reply(e.id, e.duplicate, type(e.error).__name__ if e.error else "") for e in answer]


def _got(messages: list[Message]) -> list[Got]:
    return [
        Got(m.id, m.token, m.payload, m.priority, m.attempts, m._enqueued_ms, m._deadline_ms) for m in messages
    ]  # fmt: skip


def _dead(infos: list[MessageInfo]) -> list[Dead]:
    return [Dead(i.id, i.payload, i.reason or "") for i in infos]
