"""The embedded broker: the contract of `broker.py` on a directory, in this process.

Each method checks its arguments, asks the topic's runner, and shapes the answer. What happens is decided in
`core`, when it is answered in `runner.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from heapline.broker import Held, MessageId
from heapline.core.events import I64, Paused, Resumed, Throttled
from heapline.core.leases import DEADLINE
from heapline.core.partition import Partition
from heapline.engine import deadletters, lookup, raw_log, state_rows
from heapline.engine.calls import EnqueueCall, Identity, batch_bytes_max, check_batch_bytes
from heapline.engine.columns import (
    Columns,
    check_moment,
    check_one,
    check_priority,
    check_seconds,
    delay_ms,
    to_ms,
)  # fmt: skip
from heapline.engine.delivery import PopCall
from heapline.engine.log import first_offsets, frames
from heapline.engine.replays.face import ReplayFace
from heapline.engine.reporting import topic_stats
from heapline.engine.requests import (
    by_topic,
    check_all,
    check_filter,
    check_int,
    check_name,
    check_producer,
    check_reason,
    check_sink,
    check_text,
    check_unnumbered,
    identity_of,
    listed,
    messages_by_topic,
    parse_ids,
)  # fmt: skip
from heapline.engine.runner import TopicRunner
from heapline.engine.streams.calls import GroupCalls
from heapline.errors import (
    BadRequest,
    HeaplineError,
    LeaseLost,
    UnavailableError,
)  # fmt: skip
from heapline.journal.records import Records
from heapline.journal.unit import Unit
from heapline.model import (
    BatchInfo,
    DlqFilter,
    Enqueued,
    IdempotencyScope,
    LeaseRef,
    LogFrame,
    Message,
    MessageInfo,
    Now,
    Outgoing,
    Popped,
    SinkInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer
from heapline.schedules import ScheduleInfo, schedule_of
from heapline.ulid import parse_id

POP_MESSAGES_MAX = 100_000
PEEK_MAX = 10_000
GROWING_SEGMENTS = 4  # at the journal's end: those that may still be filled


class EmbeddedBroker(ReplayFace, GroupCalls):
    """Made by `heapline.open`; use it as an async context manager."""

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

    async def set_partition_throttled(
        self, topic: str, partition: int, throttled: bool, reason: str | None = None
    ) -> None:
        runner = self._runner(topic)
        if type(throttled) is not bool:
            raise BadRequest(f"throttled is True or False, not {throttled!r}")
        check_reason(reason)

        def decide(now: Now) -> None:
            check_int("partition", partition, 0, len(runner.topic.partitions) - 1)
            chosen = runner.topic.partitions[partition]
            wanted = (reason or "") if throttled else None
            if chosen.throttled != wanted:
                runner.emit(chosen, Throttled(throttled, wanted or ""), now)

        await runner.call(decide)

    async def snapshot(self, topic: str) -> None:
        await self._runner(topic).upkeep.snapshot()

    async def stats(self, topic: str) -> TopicStats:
        runner = self._runner(topic)
        usage = await self._io_or_fail().run(self._usage, runner)
        return await runner.call(lambda now: topic_stats(runner, usage, now))

    def _usage(self, runner: TopicRunner) -> tuple[int, int]:
        """Bytes and number of segments. One that has a few behind it no longer grows: its size is asked for once."""
        directory, known, sizes = runner.loader.directory, runner.segment_sizes, dict[str, int]()
        names = sorted(name for name in self._disk.listdir(directory) if name.endswith(".seg"))
        for name in names:
            if name not in known or name in names[-GROWING_SEGMENTS:]:
                with contextlib.suppress(FileNotFoundError):  # reclaimed just now
                    file = self._disk.open(f"{directory}/{name}")
                    sizes[name] = file.size()
                    file.close()
            else:
                sizes[name] = known[name]
        runner.segment_sizes = sizes
        return sum(sizes.values()), len(sizes)

    # -- in --------------------------------------------------------------------------------------------------------

    async def enqueue(
        self, topic: str, payload: bytes, *, priority: int = 0, key: str | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, headers: Mapping[str, str] | None = None, ttl: float | None = None,
        max_retries: int | None = None, idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, seq: int | None = None,
        answered_below: int | None = None, fairness_key: str | None = None,
    ) -> Enqueued:  # fmt: skip
        runner = self._runner(topic)
        message = Outgoing(
            payload, priority, key, delay, deliver_at, headers, ttl, max_retries, idempotency_key, idempotency_scope,
            seq, fairness_key,
        )  # fmt: skip
        check_one(message, runner.topic.config, runner.name)
        if producer is not None:
            check_unnumbered([message], producer_id, epoch, answered_below)
            results = await self._enqueue_numbered(runner, [message], True, producer)
            return results[0]
        identity = identity_of(producer_id, epoch, answered_below, [message])
        result: Enqueued = await runner.enqueue(EnqueueCall(runner.future(), message=message, identity=identity))
        return result

    async def enqueue_batch(
        self, topic: str, messages: Sequence[Outgoing], *, atomic: bool = True, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, answered_below: int | None = None,
    ) -> list[Enqueued]:  # fmt: skip
        runner = self._runner(topic)
        messages = list(messages)
        errors = check_all(messages, runner.topic.config, runner.name, atomic)
        good = [m for i, m in enumerate(messages) if i not in errors] if errors else messages
        if not good:
            return [Enqueued(0, error=errors[i]) for i in range(len(messages))]
        if producer is not None:
            check_unnumbered(good, producer_id, epoch, answered_below)
            results = await self._enqueue_numbered(runner, good, atomic, producer)
        else:
            identity = identity_of(producer_id, epoch, answered_below, good)
            results = await self._enqueue_all(runner, Columns(good), atomic, identity)
        if not errors:
            return results
        rest = iter(results)
        return [Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(len(messages))]

    async def enqueue_columns(self, topic: str, payloads: list[bytes], priorities: I64) -> list[int]:
        """An atomic `enqueue_batch` of messages that are columns already, with nothing but these two; their ids."""
        runner = self._runner(topic)
        columns = Columns.of(payloads, priorities)
        if not columns.are_good(runner.topic.config):  # told as by enqueue_batch
            check_all(list(map(Outgoing, payloads, priorities.tolist())), runner.topic.config, runner.name, True)
            return []  # there were none
        call = EnqueueCall(runner.future(), columns=columns, wants_ids=True)
        check_batch_bytes(call, runner.topic.config)
        ids: list[int] = await runner.enqueue(call)
        return ids

    async def enqueue_numbered_columns(
        self, topic: str, payloads: list[bytes], priorities: I64, seqs: list[int], identity: Identity, atomic: bool
    ) -> list[Enqueued] | None:
        """`enqueue_batch` of numbered messages that are columns already, with nothing else to them. None: something is
        wrong with one, which `enqueue_batch` tells."""
        runner = self._runner(topic)
        columns = Columns.of(payloads, priorities)
        columns.seqs = seqs
        if not columns.are_good(runner.topic.config):
            return None
        return await self._enqueue_all(runner, columns, atomic, identity)

    async def _enqueue_numbered(
        self, runner: TopicRunner, messages: list[Outgoing], atomic: bool, producer: Producer
    ) -> list[Enqueued]:
        def send(numbered: list[Outgoing], epoch: int, answered_below: int) -> Awaitable[list[Enqueued]]:
            identity = Identity(producer.producer_id, epoch, answered_below)
            return self._enqueue_all(runner, Columns(numbered), atomic, identity)

        return await producer.enqueue(self, runner.name, messages, send)

    async def _enqueue_all(
        self, runner: TopicRunner, columns: Columns, atomic: bool, identity: Identity | None
    ) -> list[Enqueued]:
        call = EnqueueCall(runner.future(), columns=columns, atomic=atomic, identity=identity)
        config, count = runner.topic.config, columns.count
        if atomic:
            check_batch_bytes(call, config)
        elif count > 1 and call.nbytes > min(CHUNK_BYTES, batch_bytes_max(config, count)):
            halves = columns.subset(range(count // 2)), columns.subset(range(count // 2, count))
            return [r for half in halves for r in await self._enqueue_all(runner, half, atomic, identity)]
        try:
            results: list[Enqueued] = await runner.enqueue(call)
        except UnavailableError as error:
            if atomic:
                raise
            results = [Enqueued(0, error=error)] * count  # others of the same batch may have gone in
        return results

    async def open_producer(self, topic: str, producer_id: str) -> int:
        check_producer(producer_id)
        runner = self._runner(topic)
        return await runner.call(lambda now: runner.admission.open_producer(producer_id, None, now))

    # -- prepared batches ------------------------------------------------------------------------------------------

    async def prepare_batch(
        self, batch_id: str, part: str, messages: Mapping[str, Sequence[Outgoing]] | Sequence[Outgoing], *,
        topic: str | None = None, producer_id: str | None = None, epoch: int | None = None,
        answered_below: int | None = None,
    ) -> dict[str, list[Enqueued]]:  # fmt: skip
        check_name("batch_id", batch_id)
        check_name("part", part)
        by_topic = messages_by_topic(messages, topic)
        names = self._sharers(part, by_topic)
        for name, outgoing in by_topic.items():
            check_all(outgoing, names[name].topic.config, names[name].name, atomic=True)
        everything = [message for outgoing in by_topic.values() for message in outgoing]
        identity = identity_of(producer_id, epoch, answered_below, everything)
        shares = {names[name]: Columns(outgoing) for name, outgoing in by_topic.items()}
        answers = await self._batches.prepare(batch_id, part, shares, identity)
        return {name: answers[runner] for name, runner in names.items()}

    async def prepare_columns(
        self, batch_id: str, part: str, messages: Mapping[str, tuple[list[bytes], I64, I64 | None]]
    ) -> bool:
        """`prepare_batch` of messages that are columns already: payloads, priorities and, if they have any, times (wall
        ms, 0 for none). Answers nothing but that it is durable; False: something is wrong, which `prepare_batch`
        tells."""
        check_name("batch_id", batch_id)
        check_name("part", part)
        names = self._sharers(part, messages)
        shares = {names[name]: Columns.of(*columns) for name, columns in messages.items()}
        if not shares or not all(columns.are_good(runner.topic.config) for runner, columns in shares.items()):
            return False
        await self._batches.prepare(batch_id, part, shares, None, quietly=True)
        return True

    def _sharers(self, part: str, topics: Iterable[str]) -> dict[str, TopicRunner]:
        """The topics of a part, each of which may be named once, in whichever spelling."""
        names: dict[str, TopicRunner] = {}
        seen: set[TopicRunner] = set()
        for name in topics:
            runner = names[name] = self._runner(name)
            if runner in seen:
                raise BadRequest(f"topic {runner.name!r} is given twice in part {part!r}: put its messages together")
            seen.add(runner)
        return names

    async def commit_batch(
        self, batch_id: str, parts: Sequence[str], *, sink: str | None = None, version: int | None = None
    ) -> int:
        self._catalog_or_fail()
        check_name("batch_id", batch_id)
        if isinstance(parts, str | bytes) or not isinstance(parts, Iterable):
            raise BadRequest(f"parts is a list of part names, not {parts!r}")
        for part in (parts := list(parts)):
            check_name("part", part)
        check_sink(sink, version)
        return await self._batches.commit(batch_id, parts, sink or "", -1 if version is None else version)

    async def abort_batch(self, batch_id: str) -> int:
        self._catalog_or_fail()
        check_name("batch_id", batch_id)
        return await self._batches.abort(batch_id)

    def forget_batch(self, batch_id: str) -> None:
        """Nobody will repeat this commit, so that its decision goes as soon as every topic has carried it out."""
        self._batches.nobody_repeats(batch_id)

    async def list_batches(self) -> list[BatchInfo]:
        self._catalog_or_fail()
        return await self._batches.listed()

    async def list_sinks(self) -> list[SinkInfo]:
        self._catalog_or_fail()
        return await self._batches.sinks()

    async def forget_sink(self, name: str) -> bool:
        self._catalog_or_fail()
        check_name("name", name)
        return await self._batches.forget_sink(name)

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        messages: list[Message] = await self._pop(
            self._runner(topic), max_messages, visibility, wait, holder, max_bytes, request_id, False
        )
        return messages

    async def pop_columns(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> tuple[str, Popped | None]:  # fmt: skip
        """`pop` without an object a message: the topic's name and what was leased, if anything was."""
        runner = self._runner(topic)
        popped = await self._pop(runner, max_messages, visibility, wait, holder, max_bytes, request_id, True)
        return runner.name, popped or None

    def leases_held(self, topic: str, holder: str) -> int:
        """How many leases of this topic a holder has out: counted with the leases themselves, so it never drifts."""
        return sum(partition.leases.held.get(holder, 0) for partition in self._runner(topic).topic.partitions)

    def is_repeat(self, topic: str, request_id: str) -> bool:
        """Whether an earlier pop of this name has leases that still stand."""
        return any(partition.leases.request(request_id) for partition in self._runner(topic).topic.partitions)

    async def _pop(
        self, runner: TopicRunner, max_messages: int, visibility: float | None, wait: float, holder: str | None,
        max_bytes: int, request_id: str | None, by_columns: bool,
    ) -> Any:  # fmt: skip
        config = runner.topic.config
        seconds = config.visibility_default if visibility is None else visibility
        if visibility is not None:
            check_seconds("visibility", visibility, 0.001)
            if visibility > config.lease_max:
                raise BadRequest(f"visibility={visibility} is over the topic's lease_max of {config.lease_max} seconds")
        if wait != 0.0:
            check_seconds("wait", wait)
        if holder is not None or request_id is not None:
            check_text("holder", holder)
            check_text("request_id", request_id)
        check_int("max_messages", max_messages, 1, POP_MESSAGES_MAX)
        check_int("max_bytes", max_bytes, 1, 1 << 40)
        call = PopCall(
            runner.future(), max_messages, max_bytes, max(1, round(seconds * 1000)), holder, request_id, wait > 0,
            by_columns,
        )  # fmt: skip
        return await runner.pop(call, wait)

    async def ack(self, messages: Held) -> None:
        if type(messages) is Message:
            lost = await self._runner(messages.topic).ack([messages.id], [messages.token])
            if lost:
                raise LeaseLost(lost, messages.topic)
            return
        await self._by_topic(messages, lambda runner, ids, tokens: runner.ack(ids, tokens))

    async def ack_columns(self, topic: str, ids: list[int], tokens: list[int]) -> list[int]:
        """`ack` of leases of one topic; the ids that were not held."""
        return await self._runner(topic).ack(ids, tokens)

    async def _by_topic(self, messages: Held, act: Callable[[TopicRunner, list[int], list[int]], Any]) -> None:
        """Act on leases of any topics, on all that can be; then raise for those that could not."""
        problems: list[HeaplineError] = []
        for topic, ids, tokens in by_topic(listed(messages)):
            try:
                lost = await act(self._runner(topic), ids, tokens)
            except HeaplineError as error:
                problems.append(error)
            else:
                if lost:
                    problems.append(LeaseLost(lost, topic))
        if problems:
            raise problems[0] if len(problems) == 1 else _worst(problems)

    async def nack(self, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None:
        if backoff is not None:
            check_seconds("backoff", backoff)
        check_reason(reason)
        wait = None if backoff is None else delay_ms(backoff)

        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            return runner.emit_decision(p, p.decide_nack(ids, tokens, now, wait, reason), now)

        await self._on_leases(messages, decide)

    async def release(self, messages: Held) -> None:
        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            return runner.emit_decision(p, p.decide_release(ids, tokens, now, runner.topic.take_seq(len(ids))), now)

        await self._on_leases(messages, decide)

    def release_now(self, topic: str, ids: list[int], tokens: list[int]) -> asyncio.Future[None]:
        """`release`, decided in the caller's own step: who counts leases next no longer counts these."""
        runner = self._runner(topic)

        def decide(now: Now) -> None:
            for p, part_ids, part_tokens in runner.by_partition(ids, tokens):
                seq = runner.topic.take_seq(len(part_ids))
                runner.emit_decision(p, p.decide_release(part_ids, part_tokens, now, seq), now)

        return runner.act_now(decide)

    async def extend(self, messages: Held, seconds: float) -> None:
        check_seconds("seconds", seconds, 0.001)
        extend_ms = round(seconds * 1000)

        deadlines: dict[tuple[str, int, int], int] = {}  # as decided here: what is in memory later may not be durable

        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            lost = runner.emit_decision(p, p.decide_extend(ids, tokens, now, extend_ms), now)
            for id, token in zip(ids, tokens, strict=True):
                if p.leases.holds(id, token):
                    deadlines[runner.name, id, token] = p.leases.by_id[id][DEADLINE]
            return lost

        held = listed(messages)
        try:
            await self._on_leases(held, decide)
        except LeaseLost:
            _tell_deadlines(held, deadlines)
            raise
        _tell_deadlines(held, deadlines)

    async def bury(self, messages: Held, *, reason: str | None = None) -> None:
        check_reason(reason)

        def decide(runner: TopicRunner, p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
            return runner.emit_decision(p, p.decide_bury(ids, tokens, now, reason), now)

        await self._on_leases(messages, decide)

    async def _on_leases(self, messages: Held, decide: Any) -> None:
        """The same with a decision for each partition."""

        def act(runner: TopicRunner, ids: list[int], tokens: list[int]) -> Any:
            def run(now: Now) -> list[int]:
                missing: list[int] = []
                for partition, part_ids, part_tokens in runner.by_partition(ids, tokens):
                    missing += decide(runner, partition, part_ids, part_tokens, now)
                return missing

            return runner.call(run)

        await self._by_topic(messages, act)

    # -- by id -----------------------------------------------------------------------------------------------------

    async def get(self, topic: str, message_id: MessageId) -> MessageInfo:
        return await lookup.get(self._runner(topic), parse_id(message_id))

    async def lease_of(self, topic: str, message_id: MessageId) -> tuple[int, str | None] | None:
        """Token and holder of a message's lease, if it is leased: for a face whose callers show no token."""
        return await lookup.lease_of(self._runner(topic), parse_id(message_id))

    async def peek(self, topic: str, limit: int = 10) -> list[MessageInfo]:
        check_int("limit", limit, 1, PEEK_MAX)
        return await lookup.peek(self._runner(topic), limit)

    async def cancel(self, topic: str, message_id: MessageId) -> None:
        await lookup.cancel(self._runner(topic), parse_id(message_id))

    async def reschedule(
        self, topic: str, message_id: MessageId, *, delay: float | None = None, deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        if delay is not None:
            check_seconds("delay", delay)
        if deliver_at is not None:
            check_moment("deliver_at", deliver_at)
        if priority is not None:
            check_priority(priority, self._runner(topic).topic.config)
        if delay is not None and deliver_at is not None:
            raise BadRequest("give delay or deliver_at, not both")
        if delay is None and deliver_at is None and priority is None:
            raise BadRequest("nothing to change: give delay, deliver_at or priority")
        await lookup.reschedule(self._runner(topic), parse_id(message_id), delay, deliver_at, priority)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def dlq_list(self, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        check_int("limit", limit, 1, 1 << 31)
        check_filter(where)
        return await deadletters.listed(self._runner(topic), limit, where)

    async def dlq_replay(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:  # fmt: skip
        if rate is not None and not (type(rate) in (int, float) and 0 < rate <= 1e6):
            raise BadRequest(f"rate is messages a second, over 0 and at most 1e6, not {rate!r}")
        check_filter(where)
        return await deadletters.replay(self._runner(topic), parse_ids(ids), where, rate)

    async def dlq_delete(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int:
        if ids is None and where is None:
            raise BadRequest("say which: ids=[…], or where=heapline.DlqFilter(…) (an empty filter matches all)")
        check_filter(where)
        return await deadletters.delete(self._runner(topic), parse_ids(ids), where)

    # -- schedules -------------------------------------------------------------------------------------------------

    async def create_schedule(
        self, name: str, *, topic: str, payload: bytes = b"", cron: str | None = None, every: float | None = None,
        tz: str | None = None, **more: Any,
    ) -> ScheduleInfo:  # fmt: skip
        self._catalog_or_fail()
        wanted = schedule_of(name, topic=topic, payload=payload, cron=cron, every=every, tz=tz, **more)
        return await self._schedules.set(wanted)

    async def get_schedule(self, name: str) -> ScheduleInfo:
        self._catalog_or_fail()
        return await self._schedules.get(name)

    async def list_schedules(self) -> list[ScheduleInfo]:
        self._catalog_or_fail()
        return await self._schedules.list_all()

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        self._catalog_or_fail()
        return await self._schedules.pause(name)

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        self._catalog_or_fail()
        return await self._schedules.resume(name)

    async def delete_schedule(self, name: str) -> None:
        self._catalog_or_fail()
        await self._schedules.delete(name)

    async def schedules_page(self, after: str, limit: int) -> tuple[list[ScheduleInfo], str | None]:
        """`list_schedules`, a page at a time: those after this name, and after which name there are more."""
        self._catalog_or_fail()
        return await self._schedules.page(after, limit)

    async def fire_schedules(self) -> None:
        """Fire what is due by now, and wait for it: for clocks that are moved by hand."""
        self._catalog_or_fail()
        await self._schedules.fire_due()

    # -- the log ---------------------------------------------------------------------------------------------------

    async def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        runner = self._runner(topic)
        ends = await runner.call(lambda now: [p.offset for p in runner.topic.partitions])
        if runner.topic.config.fsync != "commit":  # an end is durable, also where answers are not
            await runner.committer.between_commits(runner.journal.sync)
        starts = await runner.io.run(first_offsets, runner.journal.reader(), len(ends))
        pairs = zip(starts, ends, strict=True)
        return {p: (end if start is None else min(start, end), end) for p, (start, end) in enumerate(pairs)}

    async def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        runner = self._runner(topic)
        check_int("partition", partition, 0, len(runner.topic.partitions) - 1)
        check_int("start", start, 0, 1 << 62)
        if end is not None:
            check_int("end", end, 0, 1 << 62)
        reader = runner.journal.reader()
        if start:  # 0 means from wherever the log starts
            first = (await runner.io.run(first_offsets, reader, partition + 1))[partition]
            if first is not None and start < first:
                raise BadRequest(f"offset {start} of partition {partition} was reclaimed: the log starts at {first}")
        found = frames(reader, runner.name, partition, start, end)
        while True:
            batch = await runner.io.run(_take, found, LOG_FRAMES)
            for frame in batch:
                yield frame
            if len(batch) < LOG_FRAMES:
                return

    async def log_index(self, topic: str, after_unit: int = 0, hold: raw_log.Hold | None = None) -> raw_log.LogIndex:
        """How far the log goes and where in it things are; with `hold` it is kept from there on for a while."""
        runner = self._runner(topic)
        ends = await self.offsets(topic)
        return await runner.io.run(raw_log.index_after, runner, after_unit, ends, hold)

    async def read_units(self, topic: str, start_unit: int, end_unit: int) -> AsyncIterator[list[Unit]]:
        """The durable units of these numbers, some at a time, as they lie in the journal."""
        runner = self._runner(topic)
        found = raw_log.units_between(runner.journal.reader(), start_unit, end_unit)
        while units := await runner.io.run(raw_log.take_units, found):
            yield units

    async def pin_state(self, topic: str, dead: bool) -> state_rows.StateRows:
        """What waits in the topic, or lies dead, at one moment; where the records lie, not what is in them."""
        return await state_rows.pin(self._runner(topic), dead)

    async def read_records(self, topic: str, incarnation: int, positions: I64) -> Records:
        """The records at these positions, as `pin_state` told them. The journal must have been held since."""
        runner = self._runner(topic)
        raw_log.check_positions(runner, incarnation, positions)
        return await runner.load(positions)


LOG_FRAMES = 16
CHUNK_BYTES = 3 << 20


def _worst(problems: list[HeaplineError]) -> HeaplineError:
    """Of several topics' problems: leases lost, all of them together, unless something else went wrong."""
    lost = [p for p in problems if isinstance(p, LeaseLost)]
    if len(lost) < len(problems):
        return next(p for p in problems if not isinstance(p, LeaseLost))
    return LeaseLost([id for p in lost for id in p.lost], ", ".join(p.topic for p in lost))


def _tell_deadlines(held: list[Message | LeaseRef], deadlines: dict[tuple[str, int, int], int]) -> None:
    for m in held:
        if isinstance(m, Message):
            m._deadline_ms = deadlines.get((m.topic, m.id, m.token), m._deadline_ms)


def _take(found: Any, count: int) -> list[LogFrame]:
    batch: list[LogFrame] = []
    for frame in found:
        batch.append(frame)
        if len(batch) == count:
            break
    return batch
