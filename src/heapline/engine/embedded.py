"""The embedded broker: the contract of `broker.py` on a directory, in this process.

Each method checks its arguments, asks the topic's runner, and shapes the answer. What happens is decided in
`core`, when it is answered in `runner.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import structlog

from heapline.broker import Held, MessageId
from heapline.clock import Clock, SystemClock
from heapline.config import FIXED_FIELDS, NAME, BrokerConfig, TopicConfig, make_config, parse_topic
from heapline.core.events import ConfigChanged, Paused, Resumed
from heapline.core.partition import Draw, Found, Partition
from heapline.core.state import DEAD, LEASED
from heapline.engine import facts
from heapline.engine.admission import EnqueueCall, Identity, batch_bytes_max, check_batch_bytes
from heapline.engine.catalog import Catalog, Entry
from heapline.engine.columns import (
    Columns,
    are_plain,
    check_moment,
    check_one,
    check_priority,
    check_seconds,
    to_ms,
)  # fmt: skip
from heapline.engine.delivery import PopCall
from heapline.engine.io import Io, ThreadIo
from heapline.engine.loading import Loader
from heapline.engine.log import first_offsets, frames
from heapline.engine.runner import TopicRunner
from heapline.errors import (
    BadName,
    BadRequest,
    Closed,
    CorruptionError,
    HeaplineError,
    LeaseLost,
    MessageLeased,
    MessageNotFound,
    TopicExists,
    TopicNotFound,
)  # fmt: skip
from heapline.journal.disk import Disk, RealDisk
from heapline.journal.records import CacheBudget
from heapline.journal.spares import SparePool
from heapline.model import (
    DlqFilter,
    Enqueued,
    IdempotencyScope,
    LeaseRef,
    LogFrame,
    Message,
    MessageInfo,
    Now,
    Outgoing,
    PartitionStats,
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer
from heapline.ulid import parse_id, to_ulid

log = structlog.get_logger("heapline.engine")

DURABILITY = {
    "commit": "every answer is durable",
    "interval": "answers of the last fsync interval may be lost in a power failure",
    "os": "answers may be lost in a power failure, whenever the operating system last wrote",
}
POP_MESSAGES_MAX = 100_000
PEEK_MAX = 10_000


class EmbeddedBroker:
    """Made by `heapline.open`; use it as an async context manager."""

    def __init__(
        self, path: str, *, config: BrokerConfig | None = None, disk: Disk | None = None, io: Io | None = None,
        clock: Clock | None = None, draw: Draw | None = None,
    ) -> None:  # fmt: skip
        self._path = path
        self._config = config or BrokerConfig()
        self._disk: Disk = disk or RealDisk()
        self._io: Io | None = io
        self._clock: Clock = clock or SystemClock()
        self._draw: Draw = draw or np.random.default_rng().random
        self._runners: dict[str, TopicRunner] = {}
        self._refused: dict[str, CorruptionError] = {}
        self._budget = CacheBudget(self._config.cache_bytes)
        self._pools: dict[int, SparePool] = {}
        self._catalog: Catalog | None = None
        self._lock: Any = None
        self._admin = asyncio.Lock()
        self._closed = False

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> EmbeddedBroker:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> None:
        if self._io is None:
            self._io = ThreadIo()
        self._catalog = await self._io.run(self._open_directory)
        loads = [self._load(entry) for entry in self._catalog.entries.values()]
        await asyncio.gather(*loads)

    def _open_directory(self) -> Catalog:
        self._disk.mkdir(self._path)
        self._lock = self._disk.lock(f"{self._path}/LOCK")
        catalog = Catalog(self._disk, self._path)
        self._sweep(catalog)
        return catalog

    def _sweep(self, catalog: Catalog) -> None:
        """Remove folders of topics that were deleted, or never finished being made."""
        kept = {entry.folder for entry in catalog.entries.values()}
        top = f"{self._path}/topics"
        if not self._disk.exists(top):
            return
        for namespace in self._disk.listdir(top):
            for folder in self._disk.listdir(f"{top}/{namespace}"):
                if f"topics/{namespace}/{folder}" not in kept:
                    self._disk.remove_tree(f"{top}/{namespace}/{folder}")

    async def _load(self, entry: Entry) -> None:
        runner = TopicRunner(self._loader(entry), self._io_or_fail(), self._clock, self._config, self)
        try:
            await runner.start()
        except CorruptionError as error:
            log.error("topic refused", topic=entry.topic, error=str(error))
            self._refused[entry.topic] = error
        else:
            self._runners[entry.topic] = runner

    def _loader(self, entry: Entry) -> Loader:
        return Loader(
            self._disk, f"{self._path}/{entry.folder}", entry.topic, entry.incarnation, entry.config,
            clock=self._clock, draw=self._draw, spares=self._pool(entry.config.segment_bytes), budget=self._budget,
        )  # fmt: skip

    def _pool(self, segment_bytes: int) -> SparePool | None:
        """Spare segments, shared by the topics whose segments are no larger."""
        if not self._config.spare_segment_bytes:
            return None
        size = max(segment_bytes, self._config.spare_segment_bytes)
        if size not in self._pools:
            self._pools[size] = SparePool(self._disk, f"{self._path}/spare/{size}", size)
        return self._pools[size]

    def _io_or_fail(self) -> Io:
        if self._io is None or self._closed:
            raise Closed
        return self._io

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for runner in self._runners.values():
            if runner.is_serving and runner.journal.written_unit > runner.snapshot_unit:
                try:
                    await runner.upkeep.snapshot()
                except (HeaplineError, OSError) as error:
                    log.warning("no snapshot on close", topic=runner.name, error=str(error))
        await asyncio.gather(*(runner.close() for runner in self._runners.values()))
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._io is not None:
            self._io.close()

    def _runner(self, topic: str) -> TopicRunner:
        if self._closed:
            raise Closed
        runner = self._runners.get(topic)
        if runner is None:
            namespace, name = parse_topic(topic)
            short = Entry(namespace=namespace, name=name, incarnation=0, config=_DEFAULT).topic
            runner = self._runners.get(short)
            if runner is None:
                if short in self._refused:
                    raise self._refused[short]
                raise TopicNotFound(topic)
        return runner

    # -- topics ----------------------------------------------------------------------------------------------------

    def _entry(self, topic: str) -> Entry:
        namespace, name = parse_topic(topic)
        entry = self._catalog_or_fail().entries.get((namespace, name))
        if entry is None:
            raise TopicNotFound(topic)
        return entry

    def _catalog_or_fail(self) -> Catalog:
        if self._catalog is None or self._closed:
            raise Closed
        return self._catalog

    async def create_topic(self, topic: str, **config: Any) -> TopicInfo:
        namespace, name = parse_topic(topic)
        wanted = make_config(config)
        io = self._io_or_fail()
        async with self._admin:
            catalog = self._catalog_or_fail()
            entry = catalog.entries.get((namespace, name))
            if entry is not None:
                differing = [f for f in TopicConfig.__struct_fields__ if getattr(wanted, f) != getattr(entry.config, f)]
                if differing:
                    raise TopicExists(topic, differing)
                return _info(entry)
            # The folder first, then the catalog: a folder that the catalog does not name is swept at the next open.
            entry = await io.run(self._make_topic, namespace, name, wanted)
            await self._load(entry)
            return _info(entry)

    def _make_topic(self, namespace: str, name: str, config: TopicConfig) -> Entry:
        catalog = self._catalog_or_fail()
        entry = catalog.planned(namespace, name, config)
        folder = f"{self._path}/topics/{namespace}"
        self._disk.mkdir(folder)
        self._disk.fsync_dir(f"{self._path}/topics")
        self._disk.fsync_dir(self._path)
        self._disk.remove_tree(f"{self._path}/{entry.folder}")
        self._loader(entry).create()
        return catalog.add(namespace, name, config)

    async def update_topic(self, topic: str, **config: Any) -> TopicInfo:
        runner = self._runner(topic)
        async with self._admin:
            entry = self._entry(topic)
            wanted = make_config(config, entry.config)
            fixed = [f for f in FIXED_FIELDS if getattr(wanted, f) != getattr(entry.config, f)]
            if fixed:
                raise BadRequest(f"{', '.join(fixed)} of a topic cannot be changed: make another topic and move over")
            entry = await self._io_or_fail().run(self._catalog_or_fail().change, entry, wanted)
            runner.loader.config = wanted

            def decide(now: Now) -> None:
                runner.topic.config = wanted
                for partition in runner.topic.partitions:
                    partition.config = wanted
                runner.emit(runner.topic.partitions[0], ConfigChanged(msgspec.json.encode(wanted)), now)

            await runner.call(decide)
            return _info(entry)

    async def list_topics(self) -> list[TopicInfo]:
        entries = self._catalog_or_fail().entries.values()
        return sorted((_info(e) for e in entries), key=lambda info: info.name)

    async def delete_topic(self, topic: str) -> None:
        io = self._io_or_fail()
        async with self._admin:
            entry = self._entry(topic)
            # The catalog first: from then on the topic is gone, and its folder is swept now or at the next open.
            await io.run(self._catalog_or_fail().remove, entry)
            self._refused.pop(entry.topic, None)
            runner = self._runners.pop(entry.topic, None)
            if runner is not None:
                await runner.close(TopicNotFound(topic))
            await io.run(self._disk.remove_tree, f"{self._path}/{entry.folder}")

    async def purge(self, topic: str) -> int:
        runner = self._runner(topic)

        def decide(now: Now) -> int:
            count = 0
            for partition in runner.topic.partitions:
                event = partition.decide_purge(now)
                if event is not None:
                    count += event.count
                    runner.emit(partition, event, now)
            return count

        return await runner.call(decide)

    async def pause_topic(self, topic: str, until: datetime | None = None) -> None:
        runner = self._runner(topic)
        if until is not None:
            check_moment("until", until)
        moment = None if until is None else to_ms(until)
        await runner.call(lambda now: runner.emit(runner.topic.partitions[0], Paused(moment), now))

    async def resume_topic(self, topic: str) -> None:
        runner = self._runner(topic)

        def decide(now: Now) -> None:
            if runner.topic.paused:
                runner.emit(runner.topic.partitions[0], Resumed(), now)

        await runner.call(decide)

    async def snapshot(self, topic: str) -> None:
        await self._runner(topic).upkeep.snapshot()

    async def stats(self, topic: str) -> TopicStats:
        runner = self._runner(topic)
        usage = await self._io_or_fail().run(self._usage, runner.loader.directory)
        return await runner.call(lambda now: _stats(runner, usage))

    def _usage(self, directory: str) -> tuple[int, int]:
        total = count = 0
        for name in self._disk.listdir(directory):
            if name.endswith(".seg"):
                file = self._disk.open(f"{directory}/{name}")
                total += file.size()
                file.close()
                count += 1
        return total, count

    # -- in --------------------------------------------------------------------------------------------------------

    async def enqueue(
        self, topic: str, payload: bytes, *, priority: int = 0, key: str | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, headers: Mapping[str, str] | None = None, ttl: float | None = None,
        max_retries: int | None = None, idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, seq: int | None = None,
        answered_below: int | None = None,
    ) -> Enqueued:  # fmt: skip
        runner = self._runner(topic)
        message = Outgoing(
            payload, priority, key, delay, deliver_at, headers, ttl, max_retries, idempotency_key, idempotency_scope,
            seq,
        )  # fmt: skip
        check_one(message, runner.topic.config, runner.name)
        if producer is not None:
            results = await self.enqueue_batch(topic, [message], producer=producer)
            return results[0]
        identity = _identity(producer_id, epoch, answered_below, [message])
        result: Enqueued = await runner.enqueue(EnqueueCall(runner.future(), message=message, identity=identity))
        return result

    async def enqueue_batch(
        self, topic: str, messages: Sequence[Outgoing], *, atomic: bool = True, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, answered_below: int | None = None,
    ) -> list[Enqueued]:  # fmt: skip
        runner = self._runner(topic)
        messages = list(messages)
        errors = _check_all(messages, runner, atomic)
        good = [m for i, m in enumerate(messages) if i not in errors] if errors else messages
        if not good:
            return [Enqueued(0, error=errors[i]) for i in range(len(messages))]
        if producer is not None:
            results = await self._enqueue_numbered(runner, topic, good, atomic, producer)
        else:
            identity = _identity(producer_id, epoch, answered_below, good)
            results = await self._enqueue_all(runner, good, atomic, identity)
        if not errors:
            return results
        rest = iter(results)
        return [Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(len(messages))]

    async def _enqueue_numbered(
        self, runner: TopicRunner, topic: str, messages: list[Outgoing], atomic: bool, producer: Producer
    ) -> list[Enqueued]:
        line = await producer.line(self, runner.name)
        if any(m.seq is not None for m in messages):
            raise BadRequest("a Producer gives the numbers itself: leave seq away")
        answered_below = line.answered_below
        first = producer.take(line, len(messages))
        numbered = [msgspec.structs.replace(m, seq=first + i) for i, m in enumerate(messages)]
        identity = Identity(producer.producer_id, line.epoch, answered_below)
        try:
            return await self._enqueue_all(runner, numbered, atomic, identity)
        finally:
            producer.answered(line, first)

    async def _enqueue_all(
        self, runner: TopicRunner, messages: list[Outgoing], atomic: bool, identity: Identity | None
    ) -> list[Enqueued]:
        call = EnqueueCall(runner.future(), columns=Columns(messages), atomic=atomic, identity=identity)
        segment_bytes = runner.topic.config.segment_bytes
        if atomic:
            check_batch_bytes(call.nbytes, segment_bytes)
        elif len(messages) > 1 and call.nbytes > min(CHUNK_BYTES, batch_bytes_max(segment_bytes)):
            half = len(messages) // 2
            first = await self._enqueue_all(runner, messages[:half], atomic, identity)
            return first + await self._enqueue_all(runner, messages[half:], atomic, identity)
        results: list[Enqueued] = await runner.enqueue(call)
        return results

    async def open_producer(self, topic: str, producer_id: str) -> int:
        if not isinstance(producer_id, str) or not NAME.match(producer_id):
            raise BadName("producer", str(producer_id))
        runner = self._runner(topic)
        return await runner.call(lambda now: runner.admission.open_producer(producer_id, None, now))

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        runner = self._runner(topic)
        config = runner.topic.config
        seconds = config.visibility_default if visibility is None else visibility
        if visibility is not None:
            check_seconds("visibility", visibility, 0.001)
            if visibility > config.lease_max:
                raise BadRequest(f"visibility={visibility} is over the topic's lease_max of {config.lease_max} seconds")
        if wait:
            check_seconds("wait", wait)
        _check_int("max_messages", max_messages, 1, POP_MESSAGES_MAX)
        _check_int("max_bytes", max_bytes, 1, 1 << 40)
        call = PopCall(
            runner.future(), max_messages, max_bytes, max(1, round(seconds * 1000)), holder, request_id, wait > 0
        )  # fmt: skip
        messages: list[Message] = await runner.pop(call, wait)
        return messages

    async def ack(self, messages: Held) -> None:
        lost: list[int] = []
        topic = ""
        if type(messages) is Message:
            topic = messages.topic
            lost = await self._runner(topic).ack([messages.id], [messages.token])
        else:
            for topic, ids, tokens in _by_topic(_listed(messages)):
                lost += await self._runner(topic).ack(ids, tokens)
        if lost:
            raise LeaseLost(lost, topic)

    async def nack(self, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None:
        if backoff is not None:
            check_seconds("backoff", backoff)
        _check_reason(reason)
        wait = None if backoff is None else delay_ms(backoff)

        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            runner.counters.nacked += len(ids)
            return runner.emit_decision(p, p.decide_nack(ids, tokens, now, wait, reason), now)

        await self._on_leases(messages, decide)

    async def release(self, messages: Held) -> None:
        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            return runner.emit_decision(p, p.decide_release(ids, tokens, now, runner.topic.take_seq(len(ids))), now)

        await self._on_leases(messages, decide)

    async def extend(self, messages: Held, seconds: float) -> None:
        check_seconds("seconds", seconds, 0.001)
        extend_ms = round(seconds * 1000)

        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            return runner.emit_decision(p, p.decide_extend(ids, tokens, now, extend_ms), now)

        await self._on_leases(messages, decide)
        deadline = {}
        for m in _listed(messages):
            if isinstance(m, Message):
                runner = self._runners.get(m.topic)
                if runner is not None:
                    lease = runner.topic.partitions[m.partition].leases.by_id.get(m.id)
                    if lease is not None and lease[0] == m.token:
                        deadline[m.id] = m._deadline_ms = lease[3]

    async def bury(self, messages: Held, *, reason: str | None = None) -> None:
        _check_reason(reason)

        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            return runner.emit_decision(p, p.decide_bury(ids, tokens, now, reason), now)

        await self._on_leases(messages, decide)

    async def _on_leases(self, messages: Held, decide: Any) -> None:
        """Act on leases of any topics; raises LeaseLost for those that were not held, after the rest is done."""
        lost: list[int] = []
        topic = ""
        for topic, ids, tokens in _by_topic(_listed(messages)):
            runner = self._runner(topic)

            def run(now: Now, runner: TopicRunner = runner, ids: Any = ids, tokens: Any = tokens) -> list[int]:
                missing: list[int] = []
                for partition, part_ids, part_tokens in runner.by_partition(ids, tokens):
                    missing += decide(runner, partition, part_ids, part_tokens, now)
                return missing

            lost += await runner.call(run)
        if lost:
            raise LeaseLost(lost, topic)

    # -- by id -----------------------------------------------------------------------------------------------------

    async def _record(self, runner: TopicRunner, position: int) -> facts.Record | None:
        """A message's record, or None if it does not check."""
        positions = np.array([position], dtype=np.int64)
        records, missing = runner.journal.cached(positions)
        if len(missing):
            records = await runner.io.run(runner.journal.load, positions)
        return None if records.bad else facts.Record(records, 0)

    async def _find(self, runner: TopicRunner, id: int) -> Found | None:
        return await runner.call(lambda now: _owner(runner, id).find(id))

    async def get(self, topic: str, message_id: MessageId) -> MessageInfo:
        runner = self._runner(topic)
        id = parse_id(message_id)
        found = await self._find(runner, id)
        record = None if found is None else await self._record(runner, found.position)
        partition = _owner(runner, id)
        found = partition.find(id)  # again: reading may have taken a while
        if found is None:
            return facts.departed(partition, runner.name, id)
        return facts.living(partition, runner.name, id, found, record)

    async def peek(self, topic: str, limit: int = 10) -> list[MessageInfo]:
        runner = self._runner(topic)
        _check_int("limit", limit, 1, PEEK_MAX)

        def decide(now: Now) -> list[tuple[int, int, Partition]]:
            rows = [
                (key, id, p)
                for p in runner.topic.partitions
                for key, id in zip(*(c.tolist() for c in p.eligible(limit)[:2]), strict=True)
            ]
            return sorted(rows, key=lambda row: row[:2])[:limit]

        infos = []
        for _, id, partition in await runner.call(decide):
            found = partition.find(id)
            if found is not None:
                record = await self._record(runner, found.position)
                infos.append(facts.living(partition, runner.name, id, found, record))
        return infos

    async def cancel(self, topic: str, message_id: MessageId) -> None:
        runner = self._runner(topic)
        id = parse_id(message_id)

        def decide(now: Now) -> None:
            partition = _owner(runner, id)
            found = _waiting(partition, runner.name, id)
            runner.emit(partition, partition.decide_cancel(id, found), now)

        await runner.call(decide)

    async def reschedule(
        self, topic: str, message_id: MessageId, *, delay: float | None = None, deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        runner = self._runner(topic)
        id = parse_id(message_id)
        if delay is not None:
            check_seconds("delay", delay)
        if deliver_at is not None:
            check_moment("deliver_at", deliver_at)
        if priority is not None:
            check_priority(priority)
        if delay is not None and deliver_at is not None:
            raise BadRequest("give delay or deliver_at, not both")
        if delay is None and deliver_at is None and priority is None:
            raise BadRequest("nothing to change: give delay, deliver_at or priority")
        found = await runner.call(lambda now: _waiting(_owner(runner, id), runner.name, id))
        record = await self._record(runner, found.position)
        if record is None:
            raise MessageNotFound(runner.name, to_ulid(id))
        plan = _Reschedule(id, record, delay, deliver_at, priority)
        await runner.call(lambda now: plan.carry_out(runner, now))

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def _dead(
        self, runner: TopicRunner, ids: Sequence[MessageId] | None, where: DlqFilter | None, limit: int | None = None
    ) -> list[tuple[MessageInfo, facts.Record | None]]:
        """The dead letters asked for, oldest first, with their records."""
        wanted = None if ids is None else {parse_id(i) for i in ids}

        def decide(now: Now) -> list[tuple[int, int, Partition]]:
            return sorted(
                ((dead.at, id, p) for p in runner.topic.partitions for id, dead in p.dead.items()
                 if wanted is None or id in wanted),
                key=lambda row: row[:2],
            )  # fmt: skip

        found: list[tuple[MessageInfo, facts.Record | None]] = []
        for _, id, partition in await runner.call(decide):
            place = partition.find(id)
            if place is None or place.place != DEAD:
                continue
            record = await self._record(runner, place.position)
            info = facts.living(partition, runner.name, id, place, record)
            if where is None or facts.matches(info, where):
                found.append((info, record))
                if limit is not None and len(found) >= limit:
                    break
        return found

    async def dlq_list(self, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        _check_int("limit", limit, 1, 1 << 31)
        return [info for info, _ in await self._dead(self._runner(topic), None, where, limit)]

    async def dlq_replay(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:  # fmt: skip
        runner = self._runner(topic)
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate <= 1e6):
            raise BadRequest(f"rate is messages a second, over 0 and at most 1e6, not {rate!r}")
        dead = await self._dead(runner, ids, where)

        def decide(now: Now) -> int:
            shares: dict[int, tuple[list[int], list[int], list[int]]] = {}
            count = 0
            for info, record in dead:
                if info.id not in runner.topic.partitions[info.partition].dead:
                    continue
                due = 0 if rate is None or not count else now.steady + round(count * 1000 / rate)
                ttl = record.ttl_ms if record is not None else 0
                share = shares.setdefault(info.partition, ([], [], []))
                share[0].append(info.id)
                share[1].append(due)
                share[2].append((due or now.steady) + ttl if ttl else 0)
                count += 1
            for number, (share_ids, dues, expires) in shares.items():
                partition = runner.topic.partitions[number]
                seq = runner.topic.take_seq(len(share_ids))
                runner.emit(partition, partition.decide_replay(share_ids, dues, expires, seq), now)
            return count

        return await runner.call(decide)

    async def dlq_delete(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int:
        runner = self._runner(topic)
        if ids is None and where is None:
            raise BadRequest("say which: ids=[…], or where=heapline.DlqFilter(…) (an empty filter matches all)")
        dead = await self._dead(runner, ids, where)

        def decide(now: Now) -> int:
            count = 0
            for partition in runner.topic.partitions:
                mine = [i.id for i, _ in dead if i.partition == partition.number and i.id in partition.dead]
                if mine:
                    runner.emit(partition, partition.decide_dlq_delete(mine), now)
                    count += len(mine)
            return count

        return await runner.call(decide)

    # -- the log ---------------------------------------------------------------------------------------------------

    async def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        runner = self._runner(topic)
        ends = await runner.call(lambda now: [p.offset for p in runner.topic.partitions])
        starts = await runner.io.run(first_offsets, runner.journal.reader(), len(ends))
        pairs = zip(starts, ends, strict=True)
        return {p: (end if start is None else start, end) for p, (start, end) in enumerate(pairs)}

    async def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        runner = self._runner(topic)
        _check_int("partition", partition, 0, len(runner.topic.partitions) - 1)
        _check_int("start", start, 0, 1 << 62)
        reader = runner.journal.reader()
        found = frames(reader, runner.name, partition, start, end)
        while True:
            batch = await runner.io.run(_take, found, LOG_FRAMES)
            for frame in batch:
                yield frame
            if len(batch) < LOG_FRAMES:
                return


LOG_FRAMES = 16
CHUNK_BYTES = 3 << 20
_DEFAULT = TopicConfig()


class _Reschedule:
    """A reschedule whose record has been read; carried out in a turn."""

    def __init__(
        self, id: int, record: facts.Record, delay: float | None, deliver_at: datetime | None, priority: int | None
    ) -> None:
        self._id = id
        self._record = record
        self._delay = delay
        self._deliver_at = deliver_at
        self._priority = priority

    def carry_out(self, runner: TopicRunner, now: Now) -> None:
        partition = _owner(runner, self._id)
        found = _waiting(partition, runner.name, self._id)
        touched = partition.touched.get(self._id)
        record = self._record
        due, wall = None, found.wall
        if self._delay is not None:
            due, wall = now.steady + delay_ms(self._delay), False
        elif self._deliver_at is not None:
            due, wall = to_ms(self._deliver_at), True
        if due is not None:
            expires = due + record.ttl_ms if record.ttl_ms else 0
        elif touched is not None:
            expires, wall = touched.expires, touched.expires_wall
        else:
            expires, wall = (record.due_at + record.ttl_ms if record.ttl_ms else 0), record.wall
        priority = self._priority
        if priority is None:
            priority = touched.priority if touched is not None else None
        if priority is None:
            priority = record.priority
        event = partition.decide_reschedule(
            self._id, found, now, runner.topic.take_seq(), priority=priority, enqueued_at=record.enqueued_at,
            due=due, wall=wall, expires=expires,
        )  # fmt: skip
        runner.emit(partition, event, now)


def _take(found: Any, count: int) -> list[LogFrame]:
    batch: list[LogFrame] = []
    for frame in found:
        batch.append(frame)
        if len(batch) == count:
            break
    return batch


def _info(entry: Entry) -> TopicInfo:
    return TopicInfo(name=entry.topic, incarnation=entry.incarnation, config=entry.config)


def _owner(runner: TopicRunner, id: int) -> Partition:
    return facts.owner_of(runner.topic.partitions, runner.name, id)


def _waiting(partition: Partition, topic: str, id: int) -> Found:
    """Where a message waits; refuses those that are out, dead or gone."""
    found = partition.find(id)
    if found is None or found.place == DEAD:
        raise MessageNotFound(topic, to_ulid(id))
    if found.place == LEASED:
        raise MessageLeased(topic, to_ulid(id))
    return found


def _identity(
    producer_id: str | None, epoch: int | None, answered_below: int | None, messages: Sequence[Outgoing]
) -> Identity | None:
    if producer_id is None:
        if epoch is not None or answered_below is not None or any(m.seq is not None for m in messages):
            raise BadRequest("epoch, seq and answered_below go with producer_id; or pass producer=heapline.Producer(…)")
        return None
    if not isinstance(producer_id, str) or not NAME.match(producer_id):
        raise BadName("producer", str(producer_id))
    if any(m.seq is None for m in messages):
        raise BadRequest("with producer_id every message needs its seq")
    _check_int("epoch", epoch, 1, 1 << 62)
    if answered_below is not None:
        _check_int("answered_below", answered_below, 0, 1 << 62)
    assert epoch is not None
    return Identity(producer_id, epoch, answered_below or 0)


def _check_all(messages: list[Outgoing], runner: TopicRunner, atomic: bool) -> dict[int, HeaplineError]:
    """Errors by row; the first one is raised if the batch is atomic."""
    config = runner.topic.config
    if are_plain(messages, config):
        return {}
    errors: dict[int, HeaplineError] = {}
    for i, message in enumerate(messages):
        try:
            if not isinstance(message, Outgoing):
                raise BadRequest(f"a batch holds heapline.Outgoing(…), not {type(message).__name__}")
            check_one(message, config, runner.name)
        except HeaplineError as error:
            if atomic:
                raise
            errors[i] = error
    return errors


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name} is an int from {low} to {high}, not {value!r}")


def _check_reason(reason: Any) -> None:
    if reason is not None and not (isinstance(reason, str) and len(reason) <= 4096):
        raise BadRequest("reason is a str of at most 4096 characters")


def _listed(messages: Held) -> list[Message | LeaseRef]:
    if isinstance(messages, Message | LeaseRef):
        return [messages]
    listed = list(messages)
    for kind in set(map(type, listed)):
        if not issubclass(kind, Message | LeaseRef):
            raise BadRequest(f"give messages that pop returned, not {kind.__name__}")
    return listed


def _by_topic(messages: list[Message | LeaseRef]) -> list[tuple[str, list[int], list[int]]]:
    topics = dict.fromkeys([m.topic for m in messages])
    if len(topics) == 1:
        return [(messages[0].topic, [m.id for m in messages], [m.token for m in messages])]
    return [
        (topic, [m.id for m in messages if m.topic == topic], [m.token for m in messages if m.topic == topic])
        for topic in topics
    ]


def _stats(runner: TopicRunner, usage: tuple[int, int]) -> TopicStats:
    topic, counters = runner.topic, runner.counters
    partitions = [
        PartitionStats(
            partition=p.number, ready=p.ready, delayed=p.delayed, leased=len(p.leases), dead=len(p.dead),
            offset=p.offset,
        )
        for p in topic.partitions
    ]  # fmt: skip
    return TopicStats(
        topic=runner.name,
        ready=sum(p.ready for p in partitions),
        delayed=sum(p.delayed for p in partitions),
        leased=sum(p.leased for p in partitions),
        dead=sum(p.dead for p in partitions),
        paused=topic.paused,
        durability=DURABILITY[topic.config.fsync],
        partitions=partitions,
        enqueued_total=runner.admission.enqueued,
        duplicates_total=runner.admission.duplicates,
        leased_total=runner.delivery.leased,
        acked_total=counters.acked,
        nacked_total=counters.nacked,
        lease_timeouts_total=counters.timeouts,
        dead_total=counters.dead,
        expired_total=counters.expired,
        commits_total=counters.commits,
        journal_bytes=usage[0],
        journal_segments=usage[1],
        journal_bytes_written_total=counters.bytes_written,
        memory_bytes=sum(p.nbytes for p in topic.partitions) + topic.live.nbytes,
        clock_jumps_total=runner.steady.jumps,
        reloads_total=counters.reloads,
        corrupt_records_total=counters.corrupt,
    )
