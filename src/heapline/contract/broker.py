"""The methods of every broker, each made from a command, and `do`, which an implementation supplies.

A broker is anything that answers commands: the embedded engine, a client over a wire, a router over several brokers,
or a wrapper that retries, traces or joins calls and passes them on to another `do`. The methods are written once.
`Broker` runs them on asyncio, `SyncBroker` (sync_broker.py) in code that does not await; both show the same names,
arguments and help, and type checkers know what each returns.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

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
from heapline.contract.call import HERE, Command, Context, Count, Feed, Page
from heapline.contract.check import build
from heapline.contract.columns import pack, pack_one, unpack
from heapline.contract.config import GroupConfig, TopicConfig, check_names, plain_settings
from heapline.contract.errors import BadRequest, DeliveryLost, HeaplineError, LeaseLost
from heapline.contract.groups import EARLIEST, fetched, pack_offsets, position, unpack_offsets
from heapline.contract.ids import shown_ids
from heapline.contract.keywords import GroupKeywords, ScheduleKeywords, TopicKeywords
from heapline.contract.leased_batch import LeasedBatch, LeasedColumns
from heapline.contract.leases import messages_of
from heapline.contract.message import (
    DlqFilter,
    Enqueued,
    IdempotencyScope,
    LeaseRef,
    LogFrame,
    Message,
    MessageInfo,
    Outgoing,
    TopicInfo,
)
from heapline.contract.messages import NewMessages, check_messages, enqueued, pack_messages, pack_plain
from heapline.contract.producer import Producer
from heapline.contract.schedules import ScheduleInfo, make_schedule
from heapline.contract.stream import (
    Fetched,
    GroupDeadLetter,
    GroupEvents,
    GroupInfo,
    GroupOffset,
    Offsets,
    Place,
    ReplayFilter,
    ReplayInfo,
    StreamBatch,
    StreamMessage,
)

if TYPE_CHECKING:
    from heapline.contract.subscription import Subscription
    from heapline.contract.sync_broker import SyncBroker, SyncLeasedBatch, SyncMessage

A = TypeVar("A")
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
L = TypeVar("L", covariant=True)
B = TypeVar("B", covariant=True)
Held = Message | LeaseRef | LeasedColumns[Any] | Iterable[Message | LeaseRef]
MessageId = str | int
LIST_PAGE = 1000


class method(Generic[P, A, S]):
    """A method of a broker: a coroutine on a `Broker`, a plain function on a `SyncBroker`."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, A]]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.function.__name__ = self._name = name
        self.function.__qualname__ = f"Broker.{name}"

    @overload
    def __get__(self, broker: Broker, owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, broker: SyncBroker, owner: type) -> Callable[P, S]: ...

    @overload
    def __get__(self, broker: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, broker: Any, owner: type) -> Any:
        if broker is None:
            return self.function  # a function, so that help() and inspect.signature() show the arguments
        if isinstance(broker, Broker):
            return MethodType(self.function, broker)
        return broker._blocking(self._name, self.function)


def plain(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, A]]) -> method[P, A, A]:
    """A method that returns the same on both kinds of broker."""
    return method(function)


class PopMethod(Protocol[L, B]):
    """The type of `pop`: with lazy=True it returns a batch instead of a list."""

    @overload
    def __call__(
        self,
        topic: str,
        max_messages: int = 1,
        *,
        visibility: float | None = None,
        wait: float = 0.0,
        holder: str | None = None,
        max_bytes: int = 2 << 20,
        request_id: str | None = None,
        lazy: Literal[False] = False,
    ) -> L: ...

    @overload
    def __call__(
        self,
        topic: str,
        max_messages: int = 1,
        *,
        visibility: float | None = None,
        wait: float = 0.0,
        holder: str | None = None,
        max_bytes: int = 2 << 20,
        request_id: str | None = None,
        lazy: Literal[True],
    ) -> B: ...


class leasing(method[..., Any, Any]):
    """A method that returns leased messages."""

    @overload
    def __get__(
        self, broker: Broker, owner: type
    ) -> PopMethod[Coroutine[Any, Any, list[Message]], Coroutine[Any, Any, LeasedBatch]]: ...

    @overload
    def __get__(self, broker: SyncBroker, owner: type) -> PopMethod[list[SyncMessage], SyncLeasedBatch]: ...

    @overload
    def __get__(self, broker: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, broker: Any, owner: type) -> Any:
        return super().__get__(broker, owner)


@overload
def command(kind: Callable[P, Command[R]]) -> method[P, R, R]: ...


@overload
def command(kind: Callable[P, Command[R]], shape: Callable[[R], A]) -> method[P, A, A]: ...


def command(kind: Callable[P, Command[Any]], shape: Callable[[Any], Any] | None = None) -> method[P, Any, Any]:
    """The method of a command, with its arguments and its help. `shape` turns the result into what is returned."""

    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        result = await self.do(kind(*args, **kwargs))
        return result if shape is None else shape(result)

    whole = inspect.signature(kind)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = whole.replace(  # type: ignore[attr-defined]
        parameters=[first, *whole.parameters.values()], return_annotation=inspect.Signature.empty
    )
    run.__doc__ = kind.__doc__
    return method(run)


def _count(result: Any) -> int:
    count: int = result.count
    return count


def listing(kind: Callable[..., Command[Page[R]]]) -> method[[], list[R], list[R]]:
    """The method of a command that lists, without arguments. Returns the items of all pages."""

    async def run(self: Any) -> list[R]:
        return await _every(self, kind())

    run.__doc__ = kind.__doc__
    return method(run)


class Methods:
    """Every method of a broker, once."""

    # -- topics ----------------------------------------------------------------------------------------------------

    @plain
    async def create_topic(self: Any, /, topic: str, **config: Unpack[TopicKeywords]) -> TopicInfo:
        """Create a topic. `config` are fields of TopicConfig.

        Creating it again with equal settings changes nothing; with other settings raises TopicExists.
        """
        info: TopicInfo = await self.do(topics.CreateTopic(topic, _topic_settings(config)))
        return info

    @plain
    async def update_topic(self: Any, /, topic: str, **config: Unpack[TopicKeywords]) -> TopicInfo:
        """Change settings of a topic; those that are not given keep their value."""
        info: TopicInfo = await self.do(topics.UpdateTopic(topic, _topic_settings(config)))
        return info

    list_topics = listing(topics.ListTopics)
    get_topic = command(topics.GetTopic)
    delete_topic = command(topics.DeleteTopic)
    stats = command(topics.Stats)
    list_stats = listing(topics.ListStats)
    purge = command(topics.Purge, _count)
    pause_topic = command(topics.PauseTopic)
    resume_topic = command(topics.ResumeTopic)
    set_partition_throttled = command(topics.SetPartitionThrottled)
    snapshot = command(topics.Snapshot)

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
        given = _listed(messages)
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
        by_topic = _by_topic_name(messages, topic)
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
        """Make exactly the named parts visible, all at once over all topics, and drop the others; see CommitBatch."""
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
        await _settle(self, messages, leases.Ack)

    @plain
    async def nack(self: Any, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None:
        """Return messages for redelivery after the topic's backoff, or after `backoff` seconds."""
        await _settle(self, messages, leases.Nack, backoff, reason)

    @plain
    async def release(self: Any, messages: Held) -> None:
        """Return messages immediately, without counting an attempt."""
        await _settle(self, messages, leases.Release)

    @plain
    async def extend(self: Any, messages: Held, seconds: float) -> None:
        """Let leases end `seconds` from now instead; `message.deadline` shows it."""
        held = messages if isinstance(messages, LeasedColumns) else listed(messages)
        answers = await _settle(self, held, leases.Extend, seconds, is_raised=False)
        extended = [(share, answer) for share, answer in answers if not isinstance(answer, HeaplineError)]
        if isinstance(held, LeasedColumns):
            for _, answer in extended:
                held.set_deadlines(answer.deadline_ms)
        else:
            _set_deadlines(held, extended)
        _raise_worst(answers)

    @plain
    async def bury(self: Any, messages: Held, *, reason: str | None = None) -> None:
        """Make leased messages dead letters."""
        await _settle(self, messages, leases.Bury, reason)

    # -- by id -----------------------------------------------------------------------------------------------------

    get = command(messages.GetMessage)

    @plain
    async def peek(self: Any, topic: str, limit: int = 10) -> list[MessageInfo]:
        """Return the next messages without leasing them."""
        return await _every(self, messages.Peek(topic, limit), limit)

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

    @plain
    async def list_leases(
        self: Any, topic: str, limit: int = 100, *, holder: str | None = None
    ) -> list[inspection.HeldLease]:
        """Return the leases of a topic, the oldest first: who holds which message, since when and until when."""
        page = min(limit, LIST_PAGE) if type(limit) is int and limit > 0 else limit
        return await _every(self, inspection.ListLeases(topic, holder, None, page), limit)

    end_leases = command(inspection.EndLeases, _count)
    list_workers = listing(inspection.ListWorkers)

    # -- dead letters ----------------------------------------------------------------------------------------------

    @plain
    async def dlq_list(self: Any, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]:
        """Return dead letters, oldest first."""
        page = min(limit, LIST_PAGE) if type(limit) is int and limit > 0 else limit
        return await _every(self, dead_letters.ListDeadLetters(topic, page, None, where), limit)

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
        result: Count = await self.do(dead_letters.ReplayDeadLetters(topic, _ids(ids), where, rate))
        return result.count

    @plain
    async def dlq_delete(
        self: Any, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int:
        """Delete dead letters and return how many."""
        result: Count = await self.do(dead_letters.DeleteDeadLetters(topic, _ids(ids), where))
        return result.count

    # -- consumer groups -------------------------------------------------------------------------------------------

    @plain
    async def create_group(
        self: Any, /, topic: str, group: str, *, start: Place = "earliest", **config: Unpack[GroupKeywords]
    ) -> GroupInfo:
        """Create a consumer group that begins at `start`. `config` are fields of GroupConfig."""
        info: GroupInfo = await self.do(
            groups.CreateGroup(topic, group, position("start", start), _group_settings(config))
        )
        return info

    get_group = command(groups.GetGroup)

    @plain
    async def list_groups(self: Any, topic: str) -> list[GroupInfo]:
        """Return the groups of a topic, by name."""
        return await _every(self, groups.ListGroups(topic))

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
        _check_member(member, session)
        where = EARLIEST if start == "earliest" else position("start", start)
        chosen = _group_settings(config or {})
        ask = groups.GroupFetch(topic, group, member, session, max_messages, max_bytes, wait, where, chosen)
        return fetched(await self.do(ask))

    @plain
    async def group_ack(self: Any, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        """Settle rows as done. Acks all it can, then raises DeliveryLost if some were not the member's any more."""
        _check_member(member, session)
        if rows := pack_offsets(offsets):
            lost = await self.do(groups.GroupAck(topic, group, member, rows, session))
            _raise_lost(lost, topic, group)

    @plain
    async def group_nack(
        self: Any, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None:
        """Have rows delivered again after the group's backoff."""
        _check_member(member, session)
        if rows := pack_offsets(offsets):
            lost = await self.do(groups.GroupNack(topic, group, member, rows, session, reason))
            _raise_lost(lost, topic, group)

    @plain
    async def group_leave(self: Any, topic: str, group: str, member: str, *, session: str) -> None:
        """Leave a group. The member's rows go to other members immediately."""
        _check_member(member, session)
        await self.do(groups.GroupLeave(topic, group, member, session))

    @plain
    async def group_dead_list(self: Any, topic: str, group: str, limit: int = 100) -> list[GroupDeadLetter]:
        """Return the rows that a group gave up."""
        page = min(limit, LIST_PAGE) if type(limit) is int and limit > 0 else limit
        return await _every(self, groups.ListGroupDeadLetters(topic, group, page), limit)

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
    ) -> ReplayInfo:
        """Enqueue a stream's messages into a topic (the same one by default), each exactly once, across restarts."""
        first, last, chosen = _range(start, end, partitions)
        command = replays.StartReplay(
            name, topic, into, first, last, chosen, mode, where, rate, priority, delay, deliver_at, keep_due
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
        """Return {partition: (start, end)} of what can be read; the end is what is durable."""
        found = await self.do(log.GetOffsets(topic))
        return dict(enumerate(zip(found.starts, found.ends, strict=True)))

    describe = command(admin.Describe)
    read_audit = command(admin.ReadAudit)


class Broker(Methods):
    """The base of every broker. An implementation supplies `do`, `stream`, `close` and `features`."""

    features: ClassVar[frozenset[str]] = frozenset()  # empty for a client: its server's are in `describe()`

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        """Execute a command. A broker that lacks its feature raises Unsupported."""
        raise NotImplementedError

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        """The answers of a feed, one by one. Close it with `aclose` (or contextlib.aclosing) to end it early."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def leases_returned(self) -> None:
        """Wait, for some seconds at most, until what cancelled pops have leased is returned."""

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        member: str | None = None,
        credits: int = 1000,
        batches: bool = False,
        start: Place = "earliest",
        on_assigned: GroupEvents | None = None,
        on_revoked: GroupEvents | None = None,
        **config: Unpack[GroupKeywords],
    ) -> Subscription:
        """Read a topic as a member of a group, which is created if it does not exist. Use it with `async with`.

        At most `credits` rows are out at a time; more arrive as they are acked. Without `member` the subscription has
        a name of its own and leaves the group when it is closed. Another subscription of the same member takes over.
        """
        from heapline.contract.subscription import Subscription

        return Subscription(
            self,
            topic,
            group=group,
            member=member,
            credits=credits,
            batches=batches,
            start=start,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            config=config,
        )

    def replay(
        self,
        topic: str,
        *,
        start: Place = "earliest",
        end: Place | None = None,
        partitions: Sequence[int] | None = None,
        mode: replays.Mode = "all",
        where: ReplayFilter | None = None,
        rate: float | None = None,
        checkpoint: str | None = None,
        batches: bool = False,
    ) -> AsyncIterator[StreamMessage | StreamBatch]:
        """Read the stream from `start` to `end`, which is what is durable when it begins.

        mode="fast" reads only the last state of each message, and only messages that still exist. With `checkpoint`,
        a name, it continues after a crash where it was: a few rows may be delivered again, none is missing.
        """
        first, last, chosen = _range(start, end, partitions)
        feed = replays.Replay(topic, first, last, chosen, mode, where, rate, checkpoint)
        if checkpoint is None:
            return replays.deliver(self.stream(feed), None, batches)
        name = checkpoint

        async def save(positions: dict[int, int]) -> None:
            await self.do(replays.SaveCheckpoint(topic, name, positions))

        return replays.deliver(self.stream(feed), save, batches)

    def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        """Read the events of a partition, one durable frame at a time."""
        return self.stream(log.ReadLog(topic, partition, start, end))


for _name, _method in vars(Methods).items():
    if isinstance(_method, method):  # a plain function, because the descriptor would cost a call on each access
        setattr(Broker, _name, _method.function)


# -- arguments as people write them ------------------------------------------------------------------------------------


def settings(what: str, given: Mapping[str, Any], config: type[msgspec.Struct], kind: Any) -> Any:
    """Settings from keywords. A name that does not exist, or an invalid value, raises BadRequest."""
    check_names(what, given, config)
    return build(kind, plain_settings(given))


def _topic_settings(given: Mapping[str, Any]) -> Any:
    return settings("topic", given, TopicConfig, topics.TopicSettings)


def _group_settings(given: Mapping[str, Any]) -> Any:
    return settings("group", given, GroupConfig, groups.GroupSettings)


def check_unnumbered(messages: Sequence[Outgoing], *own: object) -> None:
    if any(value is not None for value in own) or any(m.seq is not None for m in messages):
        raise BadRequest("Producer sets producer_id, epoch, seq and answered_below; omit them")


def _listed(given: Any) -> list[Outgoing]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise BadRequest(f"messages must be a list of heapline.Outgoing(…), got {given!r}")
    return list(given)


def _ids(ids: Any) -> list[MessageId] | None:
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise BadRequest(f"ids must be a list of message ids, got {ids!r}")
    return list(ids)


def _by_topic_name(given: Any, topic: str | None) -> dict[str, list[Outgoing]]:
    if isinstance(given, Mapping):
        if topic is not None:
            raise BadRequest("give messages by topic, or a list with topic=…, not both")
        return {name: _listed(share) for name, share in given.items()}
    if topic is None:
        raise BadRequest("a list of messages needs topic=…; or give them as {topic: [heapline.Outgoing(…)]}")
    return {topic: _listed(given)}


def _range(start: Place, end: Place | None, partitions: Any) -> tuple[Any, Any, list[int] | None]:
    if partitions is not None:
        if isinstance(partitions, str | bytes) or not isinstance(partitions, Sequence):
            raise BadRequest(f"partitions must be a list of numbers, got {partitions!r}")
        partitions = list(partitions)
    return position("start", start), None if end is None else position("end", end), partitions


def _check_member(member: Any, session: Any) -> None:
    if member is None or session is None:
        raise BadRequest("a member of a group needs a name and a session; give both")


# -- what several methods share ----------------------------------------------------------------------------------------


async def _every(broker: Any, ask: Any, limit: int | None = None) -> list[Any]:
    """All items of a list, or the first `limit`, page by page."""
    items: list[Any] = []
    while True:
        page: Page[Any] = await broker.do(ask)
        items += page.items
        if page.cursor is None or (limit is not None and len(items) >= limit):
            return items if limit is None else items[:limit]
        ask = msgspec.structs.replace(ask, cursor=page.cursor)


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


class Share(NamedTuple):
    """The leases of one topic that a call acts on."""

    topic: str
    keys: leases.LeaseKeys
    id_suffix: int  # the topic's, or 0 if it is not known


Answers = list[tuple[Share, Any]]


async def _settle(broker: Any, held: Held, kind: Any, *options: Any, is_raised: bool = True) -> Answers:
    """Act on leases of any topics, one command per topic, on all that can be; then raise for those that could not."""
    answers: Answers = []
    for share in by_topic(held):
        try:
            answer = await broker.do(kind(share.topic, share.keys, *options))
        except HeaplineError as error:
            answer = error
        answers.append((share, answer))
    if is_raised:
        _raise_worst(answers)
    return answers


def _set_deadlines(held: list[Message | LeaseRef], extended: Answers) -> None:
    deadlines = {
        (share.topic, id, token): ms
        for share, answer in extended
        for id, token, ms in zip(
            unpack(share.keys.ids), unpack(share.keys.tokens), unpack(answer.deadline_ms), strict=True
        )
    }
    for m in held:
        if isinstance(m, Message) and deadlines.get((m.topic, m.id, m.token), -1) >= 0:
            m._deadline_ms = deadlines[m.topic, m.id, m.token]


def _raise_worst(answers: Answers) -> None:
    """Raise the first error that is not a lost lease, otherwise one LeaseLost for all that were lost."""
    for _, answer in answers:
        if isinstance(answer, HeaplineError) and not isinstance(answer, LeaseLost):
            raise answer
    lost = [(share, answer.lost) for share, answer in answers if answer.lost]
    if lost:
        shown = [id for share, ids in lost for id in shown_ids(ids, share.id_suffix)]
        topics = ", ".join(share.topic for share, _ in lost)
        raise LeaseLost.showing([id for _, ids in lost for id in ids], topics, shown)


def _raise_lost(result: groups.LostRows, topic: str, group: str) -> None:
    if result.lost:
        pairs = [(p, o) for p, offsets in unpack_offsets(result.lost).items() for o in offsets]
        raise DeliveryLost([p for p, _ in pairs], [o for _, o in pairs], topic, group)


def listed(held: Held) -> list[Message | LeaseRef]:
    """Messages or leases as a list; what was not popped raises BadRequest."""
    if isinstance(held, Message | LeaseRef):
        return [held]
    if not isinstance(held, Iterable):
        raise BadRequest(f"give messages that pop returned, got {held!r}")
    found = list(held)
    for kind in set(map(type, found)):
        if not issubclass(kind, Message | LeaseRef):
            raise BadRequest(f"give messages that pop returned, got {kind.__name__}")
        if issubclass(kind, LeaseRef):
            for m in found:
                if isinstance(m, LeaseRef) and not (_is_id(m.id) and _is_id(m.token)):
                    raise BadRequest(f"id and token of a LeaseRef must be integers from 0 to 2^63-1, got {m!r}")
    return found


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def by_topic(held: Held) -> list[Share]:
    """Return the leases of each topic."""
    if isinstance(held, LeasedColumns):
        return [Share(held.topic, held.leases, held.id_suffix)] if held else []
    found = listed(held)
    names = dict.fromkeys([m.topic for m in found])
    return [_share(name, found if len(names) == 1 else [m for m in found if m.topic == name]) for name in names]


def _share(topic: str, held: list[Message | LeaseRef]) -> Share:
    keys = leases.LeaseKeys(pack([m.id for m in held]), pack([m.token for m in held]))
    return Share(topic, keys, getattr(held[0], "id_suffix", 0))
