"""Every method of a broker, once: `Broker` runs them on asyncio, `SyncBroker` in code that does not await.

Most are made from a command. The others read arguments as people write them (arguments.py), or settle leases of several
topics (settlement.py). Both kinds of broker show the same names, arguments and help, and type checkers know what each
returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Unpack

from heapline.contract import (
    admin,
    batches,
    dead_letters,
    groups,
    inspection,
    leases,
    log,
    messages,
    replays,
    schedules,
    topics,
)
from heapline.contract.arguments import (
    MessageId,
    check_member,
    check_unnumbered,
    group_settings,
    listed_ids,
    listed_messages,
    log_range,
    messages_by_topic,
    topic_settings,
)
from heapline.contract.call import Count
from heapline.contract.columns import pack_one
from heapline.contract.errors import BadRequest, DeliveryLost, HeaplineError, LeaseLost
from heapline.contract.groups import EARLIEST, fetched, pack_offsets, position, unpack_offsets
from heapline.contract.ids import shown_ids
from heapline.contract.keywords import GroupKeywords, ScheduleKeywords, TopicKeywords
from heapline.contract.leased_batch import LeasedBatch, LeasedColumns
from heapline.contract.leases import messages_of
from heapline.contract.message import DlqFilter, Enqueued, IdempotencyScope, Message, MessageInfo, Outgoing, TopicInfo
from heapline.contract.messages import NewMessages, check_messages, enqueued, pack_messages, pack_plain
from heapline.contract.method import command, every, leasing, listing, plain
from heapline.contract.producer import Producer
from heapline.contract.schedules import ScheduleInfo, make_schedule
from heapline.contract.settlement import Held, listed, raise_worst, set_deadlines, settle
from heapline.contract.stream import (
    Fetched,
    GroupDeadLetter,
    GroupInfo,
    GroupOffset,
    Offsets,
    Place,
    ReplayFilter,
    ReplayInfo,
)

LIST_PAGE = 1000


def _count(result: Any) -> int:
    count: int = result.count
    return count


class Methods:
    """Every method of a broker, once."""

    # -- topics ----------------------------------------------------------------------------------------------------

    @plain
    async def create_topic(self: Any, /, topic: str, **config: Unpack[TopicKeywords]) -> TopicInfo:
        """Create a topic. `config` are fields of TopicConfig.

        Creating it again with equal settings changes nothing; with other settings raises TopicExists.
        """
        info: TopicInfo = await self.do(topics.CreateTopic(topic, topic_settings(config)))
        return info

    @plain
    async def update_topic(self: Any, /, topic: str, **config: Unpack[TopicKeywords]) -> TopicInfo:
        """Change settings of a topic; those that are not given keep their value."""
        info: TopicInfo = await self.do(topics.UpdateTopic(topic, topic_settings(config)))
        return info

    list_topics = listing(topics.ListTopics)
    get_topic = command(topics.GetTopic)
    delete_topic = command(topics.DeleteTopic)
    stats = command(topics.Stats)
    list_stats = listing(topics.ListStats)
    purge = command(topics.Purge, _count)
    purge_count = command(topics.CountPurge)
    pause_topic = command(topics.PauseTopic)
    resume_topic = command(topics.ResumeTopic)
    set_partition_throttled = command(topics.SetPartitionThrottled)
    snapshot = command(topics.Snapshot)
    record_audit = command(topics.RecordAudit)

    # -- in --------------------------------------------------------------------------------------------------------

    @plain
    async def enqueue(
        self: Any,
        topic: str,
        payload: bytes,
        *,
        priority: int = 0,
        key: str | None = None,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        ttl: float | None = None,
        max_retries: int | None = None,
        idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None,
        producer: Producer | None = None,
        producer_id: str | None = None,
        epoch: int | None = None,
        seq: int | None = None,
        answered_below: int | None = None,
        fairness_key: str | None = None,
    ) -> Enqueued:
        """Enqueue one message. Answered when it is durable."""
        if headers is not None and type(headers) is not dict:
            headers = dict(headers) if isinstance(headers, Mapping) else headers
        if producer is not None:
            check_unnumbered([], producer_id, epoch, seq, answered_below)
        command = messages.Enqueue(
            topic,
            payload,
            priority,
            key,
            delay,
            deliver_at,
            headers,
            ttl,
            max_retries,
            idempotency_key,
            idempotency_scope,
            fairness_key,
            producer_id,
            epoch,
            seq,
            answered_below,
        )
        if producer is not None:
            message = Outgoing(**{name: getattr(command, name) for name in Outgoing.__struct_fields__})
            (result,) = await _enqueue_numbered(self, topic, [message], True, producer)
            return result
        enqueued: Enqueued = await self.do(command)
        return enqueued

    @plain
    async def enqueue_batch(
        self: Any,
        topic: str,
        messages: Sequence[Outgoing],
        *,
        atomic: bool = True,
        producer: Producer | None = None,
        producer_id: str | None = None,
        epoch: int | None = None,
        answered_below: int | None = None,
    ) -> list[Enqueued]:
        """Enqueue messages, all or none. With atomic=False each result carries its own error."""
        given = listed_messages(messages)
        if producer is None and (plain := pack_plain(given)) is not None:
            return await _enqueue(self, topic, plain, atomic, producer_id, epoch, answered_below)
        errors = check_messages(given, atomic)
        good = [m for i, m in enumerate(given) if i not in errors] if errors else given
        if producer is not None:
            check_unnumbered(good, producer_id, epoch, answered_below)
            results = await _enqueue_numbered(self, topic, good, atomic, producer)
        else:
            batch = pack_messages(good) if good else NewMessages([])
            results = await _enqueue(self, topic, batch, atomic, producer_id, epoch, answered_below)
        if not errors:
            return results
        rest = iter(results)
        return [Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(len(given))]

    open_producer = command(messages.OpenProducer, lambda opened: opened.epoch)

    # -- prepared batches ------------------------------------------------------------------------------------------

    @plain
    async def prepare_batch(
        self: Any,
        batch_id: str,
        part: str,
        messages: Mapping[str, Sequence[Outgoing]] | Sequence[Outgoing],
        *,
        topic: str | None = None,
        producer_id: str | None = None,
        epoch: int | None = None,
        answered_below: int | None = None,
        sink: str | None = None,
        version: int | None = None,
    ) -> dict[str, list[Enqueued]]:
        """Store one part of a batch, durable and invisible: messages by topic, or a list with `topic`.

        Repeating it with the same content returns the same ids; with other content it raises IdempotencyConflict. With
        the sink and version of the later commit, a part that comes too late is always rejected; see PrepareBatch.
        """
        by_topic = messages_by_topic(messages, topic)
        for share in by_topic.values():
            check_messages(share, True)
        shares = [batches.Share(name, pack_messages(share)) for name, share in by_topic.items()]
        prepared = await self.do(
            batches.PrepareBatch(batch_id, part, shares, producer_id, epoch, answered_below, sink=sink, version=version)
        )
        names = list(by_topic)
        return {name: enqueued(share.results) for name, share in zip(names, prepared.shares, strict=True)}

    @plain
    async def commit_batch(
        self: Any, batch_id: str, parts: Sequence[str], *, sink: str | None = None, version: int | None = None
    ) -> int:
        """Make exactly the named parts visible, in all topics together, and drop the others; see CommitBatch."""
        if isinstance(parts, str | bytes) or not isinstance(parts, Iterable):
            raise BadRequest(f"parts must be a list of part names, got {parts!r}")
        result: Count = await self.do(batches.CommitBatch(batch_id, list(parts), sink, version))
        return result.count

    abort_batch = command(batches.AbortBatch, _count)
    list_batches = listing(batches.ListBatches)
    list_sinks = listing(batches.ListSinks)
    forget_sink = command(batches.ForgetSink, lambda result: result.known)

    # -- out -------------------------------------------------------------------------------------------------------

    @leasing
    async def pop(
        self: Any,
        topic: str,
        max_messages: int = 1,
        *,
        visibility: float | None = None,
        wait: float = 0.0,
        holder: str | None = None,
        max_bytes: int = 2 << 20,
        request_id: str | None = None,
        lazy: bool = False,
    ) -> list[Message] | LeasedBatch:
        """Lease the best messages that are due. Waits up to `wait` seconds for the first one.

        With lazy=True the messages are columns, a LeasedBatch: no object is created for a message until it is accessed.
        """
        leased = await self.do(leases.Pop(topic, max_messages, visibility, wait, holder, max_bytes, request_id))
        return LeasedBatch(self, leased) if lazy else messages_of(self, leased)

    @plain
    async def ack(self: Any, messages: Held) -> None:
        """Settle leased messages as done. Acks all it can, then raises LeaseLost if some were not held."""
        if type(messages) is Message:
            keys = leases.LeaseKeys(pack_one(messages.id), pack_one(messages.token))
            settled = await self.do(leases.Ack(messages.topic, keys))
            if settled.lost:
                shown = shown_ids(settled.lost, messages.id_suffix)
                raise LeaseLost.showing(settled.lost, messages.topic, shown)
            return
        await settle(self, messages, leases.Ack)

    @plain
    async def nack(self: Any, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None:
        """Return messages for redelivery after the topic's backoff, or after `backoff` seconds."""
        await settle(self, messages, leases.Nack, backoff, reason)

    @plain
    async def release(self: Any, messages: Held) -> None:
        """Return messages immediately, without counting an attempt."""
        await settle(self, messages, leases.Release)

    @plain
    async def extend(self: Any, messages: Held, seconds: float) -> None:
        """Let leases end `seconds` from now instead; `message.deadline` shows it."""
        held = messages if isinstance(messages, LeasedColumns) else listed(messages)
        answers = await settle(self, held, leases.Extend, seconds, is_raised=False)
        extended = [(share, answer) for share, answer in answers if not isinstance(answer, HeaplineError)]
        if isinstance(held, LeasedColumns):
            for _, answer in extended:
                held.set_deadlines(answer.deadline_ms)
        else:
            set_deadlines(held, extended)
        raise_worst(answers)

    @plain
    async def bury(self: Any, messages: Held, *, reason: str | None = None) -> None:
        """Make leased messages dead letters."""
        await settle(self, messages, leases.Bury, reason)

    # -- by id -----------------------------------------------------------------------------------------------------

    get = command(messages.GetMessage)
    scan_messages = command(messages.ScanMessages)
    split_messages = command(messages.SplitMessages)

    @plain
    async def peek(self: Any, topic: str, limit: int = 10) -> list[MessageInfo]:
        """Return the next messages without leasing them."""
        return await every(self, messages.Peek(topic, limit), limit)

    cancel = command(messages.Cancel)

    @plain
    async def reschedule(
        self: Any,
        topic: str,
        message_id: MessageId,
        *,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:
        """Change when or how urgently a waiting message is served. What is not given stays."""
        await self.do(messages.Reschedule(topic, message_id, delay, deliver_at, priority))

    explain = command(inspection.Explain)
    message_history = command(inspection.MessageHistory)
    search_messages = command(inspection.SearchMessages)
    due_times = command(inspection.GetDueTimes)

    @plain
    async def list_leases(
        self: Any, topic: str, limit: int = 100, *, holder: str | None = None
    ) -> list[inspection.HeldLease]:
        """Return the leases of a topic, the oldest first: who holds which message, since when and until when."""
        page = min(limit, LIST_PAGE) if type(limit) is int and limit > 0 else limit
        return await every(self, inspection.ListLeases(topic, holder, None, page), limit)

    end_leases = command(inspection.EndLeases, _count)
    list_workers = listing(inspection.ListWorkers)
    stats_series = command(inspection.StatsSeries)

    # -- dead letters ----------------------------------------------------------------------------------------------

    @plain
    async def dlq_list(self: Any, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        """Return dead letters, oldest first."""
        page = min(limit, LIST_PAGE) if type(limit) is int and limit > 0 else limit
        return await every(self, dead_letters.ListDeadLetters(topic, page, None, where), limit)

    @plain
    async def dlq_replay(
        self: Any,
        topic: str,
        ids: Sequence[MessageId] | None = None,
        *,
        where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:
        """Make dead letters ready again with no attempts, at most `rate` per second, and return how many."""
        result: Count = await self.do(dead_letters.ReplayDeadLetters(topic, listed_ids(ids), where, rate))
        return result.count

    @plain
    async def dlq_delete(
        self: Any, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int:
        """Delete dead letters and return how many."""
        result: Count = await self.do(dead_letters.DeleteDeadLetters(topic, listed_ids(ids), where))
        return result.count

    dlq_groups = command(dead_letters.GroupDeadLetters)
    dlq_count = command(dead_letters.CountDeadLetters)

    # -- consumer groups -------------------------------------------------------------------------------------------

    @plain
    async def create_group(
        self: Any, /, topic: str, group: str, *, start: Place = "earliest", **config: Unpack[GroupKeywords]
    ) -> GroupInfo:
        """Create a consumer group that begins at `start`. `config` are fields of GroupConfig."""
        info: GroupInfo = await self.do(
            groups.CreateGroup(topic, group, position("start", start), group_settings(config))
        )
        return info

    get_group = command(groups.GetGroup)

    @plain
    async def list_groups(self: Any, topic: str) -> list[GroupInfo]:
        """Return the groups of a topic, by name."""
        return await every(self, groups.ListGroups(topic))

    delete_group = command(groups.DeleteGroup)
    group_offsets = command(groups.GetGroupOffsets, lambda result: result.offsets)

    @plain
    async def reset_offsets(
        self: Any, topic: str, group: str, *, to: Place, partitions: Sequence[int] | None = None
    ) -> list[GroupOffset]:
        """Let a group continue from another position. An observer group is moved on by the same call."""
        chosen = None if partitions is None else list(partitions)
        result: groups.GroupOffsets = await self.do(groups.ResetOffsets(topic, group, position("to", to), chosen))
        return result.offsets

    @plain
    async def group_fetch(
        self: Any,
        topic: str,
        group: str,
        member: str,
        *,
        session: str,
        max_messages: int = 1000,
        max_bytes: int = 2 << 20,
        wait: float = 0.0,
        start: Place = "earliest",
        config: Mapping[str, Any] | None = None,
    ) -> Fetched:
        """One step of a subscription: join if necessary, renew the member's lease, and take rows."""
        check_member(member, session)
        where = EARLIEST if start == "earliest" else position("start", start)
        chosen = group_settings(config or {})
        ask = groups.GroupFetch(topic, group, member, session, max_messages, max_bytes, wait, where, chosen)
        return fetched(await self.do(ask))

    @plain
    async def group_ack(self: Any, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        """Settle rows as done. Acks all it can, then raises DeliveryLost if the member no longer held some."""
        check_member(member, session)
        if rows := pack_offsets(offsets):
            lost = await self.do(groups.GroupAck(topic, group, member, rows, session))
            _raise_lost(lost, topic, group)

    @plain
    async def group_nack(
        self: Any, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None:
        """Have rows delivered again after the group's backoff."""
        check_member(member, session)
        if rows := pack_offsets(offsets):
            lost = await self.do(groups.GroupNack(topic, group, member, rows, session, reason))
            _raise_lost(lost, topic, group)

    @plain
    async def group_leave(self: Any, topic: str, group: str, member: str, *, session: str) -> None:
        """Leave a group. The member's rows go to other members immediately."""
        check_member(member, session)
        await self.do(groups.GroupLeave(topic, group, member, session))

    @plain
    async def group_dead_list(self: Any, topic: str, group: str, limit: int = 100) -> list[GroupDeadLetter]:
        """Return the rows that a group gave up."""
        page = min(limit, LIST_PAGE) if type(limit) is int and limit > 0 else limit
        return await every(self, groups.ListGroupDeadLetters(topic, group, page), limit)

    @plain
    async def group_dead_replay(self: Any, topic: str, group: str, offsets: Offsets | None = None) -> int:
        """Deliver dead letters of a group to it again, all or these, and return how many."""
        rows = None if offsets is None else pack_offsets(offsets)
        result: Count = await self.do(groups.ReplayGroupDeadLetters(topic, group, rows))
        return result.count

    @plain
    async def group_dead_delete(self: Any, topic: str, group: str, offsets: Offsets | None = None) -> int:
        """Delete dead letters of a group, all or these, and return how many."""
        rows = None if offsets is None else pack_offsets(offsets)
        result: Count = await self.do(groups.DeleteGroupDeadLetters(topic, group, rows))
        return result.count

    # -- replays ---------------------------------------------------------------------------------------------------

    @plain
    async def start_replay(
        self: Any,
        name: str,
        topic: str,
        *,
        into: str | None = None,
        start: Place = "earliest",
        end: Place | None = None,
        partitions: Sequence[int] | None = None,
        mode: replays.Mode = "all",
        where: ReplayFilter | None = None,
        rate: float | None = None,
        priority: int | None = None,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        keep_due: bool = False,
        allow_gaps: bool = False,
        count: int | None = None,
    ) -> ReplayInfo:
        """Enqueue a stream's messages into a topic (the same one by default), each exactly once, across restarts.

        `allow_gaps` is that of `replay`; the result's `gaps` then says where the log starts. With `count` it is done
        after that many messages.
        """
        first, last, chosen = log_range(start, end, partitions)
        command = replays.StartReplay(
            name,
            topic,
            into,
            first,
            last,
            chosen,
            mode,
            where,
            rate,
            priority,
            delay,
            deliver_at,
            keep_due,
            allow_gaps,
            count,
        )
        info: ReplayInfo = await self.do(command)
        return info

    get_replay = command(replays.GetReplay)
    list_replays = listing(replays.ListReplays)
    cancel_replay = command(replays.CancelReplay)

    # -- schedules -------------------------------------------------------------------------------------------------

    @plain
    async def create_schedule(
        self: Any,
        /,
        name: str,
        *,
        topic: str,
        payload: bytes = b"",
        cron: str | None = None,
        every: float | timedelta | None = None,
        tz: str | None = None,
        **more: Unpack[ScheduleKeywords],
    ) -> ScheduleInfo:
        """Enqueue a message at each of these times, once each. Creating it again under the same name changes it.

        `more`: starts, ends, misfire, grace, makeup_max, and the message's priority, key, headers, ttl, max_retries,
        fairness_key.
        """
        fields: dict[str, Any] = {"topic": topic, "payload": payload, "cron": cron, "every": every, "tz": tz, **more}
        make_schedule(name, **fields)  # its errors are worded for a schedule
        fields |= {n: v.total_seconds() for n, v in fields.items() if isinstance(v, timedelta)}
        info: ScheduleInfo = await self.do(schedules.CreateSchedule(name, **fields))
        return info

    get_schedule = command(schedules.GetSchedule)
    list_schedules = listing(schedules.ListSchedules)
    pause_schedule = command(schedules.PauseSchedule)
    resume_schedule = command(schedules.ResumeSchedule)
    delete_schedule = command(schedules.DeleteSchedule)

    # -- the log, the broker ---------------------------------------------------------------------------------------

    @plain
    async def offsets(self: Any, topic: str) -> dict[int, tuple[int, int]]:
        """Return {partition: (start, end)} of what can be read; the end is the durable end."""
        found = await self.do(log.GetOffsets(topic))
        return dict(enumerate(zip(found.starts, found.ends, strict=True)))

    describe = command(admin.Describe)
    read_audit = command(admin.ReadAudit)


async def _enqueue(
    broker: Any,
    topic: str,
    batch: NewMessages,
    atomic: bool,
    producer_id: str | None = None,
    epoch: int | None = None,
    answered_below: int | None = None,
) -> list[Enqueued]:
    ask = messages.EnqueueBatch(topic, batch, atomic, producer_id, epoch, answered_below)
    return enqueued(await broker.do(ask))


async def _enqueue_numbered(
    broker: Any, topic: str, outgoing: list[Outgoing], atomic: bool, producer: Producer
) -> list[Enqueued]:
    def send(numbered: list[Outgoing], epoch: int, answered_below: int) -> Awaitable[list[Enqueued]]:
        batch = pack_messages(numbered)
        return _enqueue(broker, topic, batch, atomic, producer.producer_id, epoch, answered_below)

    return await producer.enqueue(broker, topic, outgoing, send)


def _raise_lost(result: groups.LostRows, topic: str, group: str) -> None:
    if result.lost:
        pairs = [(p, o) for p, offsets in unpack_offsets(result.lost).items() for o in offsets]
        raise DeliveryLost([p for p, _ in pairs], [o for _, o in pairs], topic, group)
