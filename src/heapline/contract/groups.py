"""Consumer groups: a topic read as a stream, by members that share its partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from heapline.contract.call import Command, Count, Page, Repeat, Right, call_family
from heapline.contract.check import compile_check, fail
from heapline.contract.columns import Columns, Int64, Uint8, pack, unpack
from heapline.contract.config import GroupConfig
from heapline.contract.errors import BadRequest
from heapline.contract.fields import (
    ANSWER_BYTES,
    OFFSET_MAX,
    Cursor,
    GroupName,
    Instant,
    Limit,
    MaxBytes,
    Offset,
    Partition,
    Reason,
    Seconds,
    ShortName,
    Topic,
)
from heapline.contract.stream import Fetched, GroupDeadLetter, GroupInfo, GroupOffset, Place, StreamBatch
from heapline.contract.topics import _settings_of

FETCH_MESSAGES_MAX = 1_000_000
#: Settings of a group as a caller gives them.
GroupSettings = _settings_of(GroupConfig, "GroupSettings")


class Position(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A position in the log of every partition: exactly one of these."""

    edge: Literal["earliest", "latest"] | None = None
    offset: Offset | None = None  # of each partition
    offsets: dict[int, int] | None = None  # by partition
    at: Instant | None = None  # by wall time

    def __post_init__(self) -> None:
        _check_position(self)
        if sum(v is not None for v in (self.edge, self.offset, self.offsets, self.at)) != 1:
            raise BadRequest("a position is one of edge, offset, offsets and at")
        if self.offsets is not None:
            if not self.offsets:
                raise BadRequest("offsets must name a partition; give {partition: offset}, or omit it")
            for partition, offset in self.offsets.items():
                _check_offset("a partition", partition)
                _check_offset(f"the offset of partition {partition}", offset)


def _check_offset(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        fail(name, "an integer from 0 to 2^62", value)


_check_position = compile_check(Position)
EARLIEST = Position(edge="earliest")


def position(name: str, place: Any) -> Position:
    """Read a place as people write it: "earliest", "latest", an offset, {partition: offset} or a datetime."""
    if isinstance(place, str) and place in ("earliest", "latest"):
        return Position(edge=place)  # type: ignore[arg-type]
    if isinstance(place, datetime):
        return Position(at=place)
    if isinstance(place, Mapping):
        return Position(offsets=dict(place))
    if type(place) is int:
        return Position(offset=place)
    raise BadRequest(
        f'{name} must be "earliest", "latest", an offset, {{partition: offset}} or a time with a zone, got {place!r}'
    )


def place_of(where: Position) -> Place:
    """Return a position as people write it."""
    for value in (where.edge, where.offset, where.offsets):
        if value is not None:
            return value
    assert where.at is not None
    return where.at


class PartitionRows(Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one partition, by offset."""

    partition: Partition
    offsets: memoryview  # int64

    def __post_init__(self) -> None:
        if self.offsets.nbytes % 8:
            raise BadRequest(f"column offsets must have 8 bytes for each row, got {self.offsets.nbytes}")
        if self.offsets.nbytes and min(self.offsets.cast("B").cast("q")) < 0:
            raise BadRequest(f"offsets of partition {self.partition} must be from 0 to 2^62")


def pack_offsets(offsets: Any) -> list[PartitionRows]:
    """Rows as people name them, {partition: offsets}; partitions without offsets are left out."""
    if not isinstance(offsets, Mapping):
        raise BadRequest(f"offsets must be {{partition: [offset, …]}}, got {str(offsets)[:80]!r}")
    rows = []
    for partition, some in offsets.items():
        _check_offset("a partition", partition)
        column = _column(partition, some)
        if column.nbytes:
            rows.append(PartitionRows(partition, column))
    return rows


def _column(partition: int, some: Any) -> memoryview:
    data = getattr(some, "data", None)
    if isinstance(data, memoryview) and data.format in ("l", "q") and data.contiguous:  # a numpy array of int64
        column = data.cast("B")
    else:
        try:
            values = list(some)
        except TypeError:
            values = [None]
        if any(type(v) is not int and (isinstance(v, bool) or not hasattr(v, "__index__")) for v in values):
            raise BadRequest(f"offsets of partition {partition} must be a list of integers")
        column = pack(values)
    if column.nbytes:
        numbers = column.cast("q")
        if min(numbers) < 0 or max(numbers) > OFFSET_MAX:
            raise BadRequest(f"offsets of partition {partition} must be from 0 to 2^62")
    return column


def unpack_offsets(rows: list[PartitionRows]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for share in rows:
        found.setdefault(share.partition, []).extend(unpack(share.offsets))
    return found


class StreamRow(Struct, frozen=True, omit_defaults=True):
    """One row of a stream, where a fetch is answered in rows."""

    offset: int
    id: int
    payload: bytes
    priority: int
    attempts: int
    enqueued_ms: int
    key: str | None = None
    fairness_key: str | None = None
    headers: dict[str, str] | None = None


class StreamRows(Columns, frozen=True):
    """Rows of one partition in the order of delivery."""

    offsets: Int64
    ids: Int64
    payloads: list[bytes]
    priorities: Int64
    attempts: Uint8  # deliveries to the group, this one among them
    enqueued_ms: Int64
    keys: list[str | None] | None = None
    fairness_keys: list[str | None] | None = None
    headers: list[dict[str, str] | None] | None = None

    row: ClassVar[type[Any]] = StreamRow


class PartitionBatch(Struct, frozen=True):
    partition: int
    rows: StreamRows


class FetchedRows(Struct, frozen=True, omit_defaults=True):
    """The rows that a member received, and the partitions that it reads now."""

    topic: str
    generation: int  # increases whenever partitions are reassigned
    partitions: list[int]
    batches: list[PartitionBatch] = []
    id_suffix: int = 0  # of the topic: the low bits of its messages' ULIDs


def fetched(rows: FetchedRows) -> Fetched:
    return Fetched(step_batches(rows.topic, rows.batches, rows.id_suffix), rows.partitions, rows.generation)


def step_batches(topic: str, batches: Sequence[PartitionBatch], id_suffix: int) -> list[StreamBatch]:
    """Rows as batches whose columns are arrays over the same memory."""
    import numpy as np

    def column(packed: Any) -> Any:
        return np.frombuffer(packed, dtype="<i8")

    return [
        StreamBatch(
            None,
            topic,
            batch.partition,
            column(batch.rows.offsets),
            column(batch.rows.ids),
            batch.rows.payloads,
            column(batch.rows.priorities),
            np.frombuffer(batch.rows.attempts, dtype=np.uint8).astype(np.int64),
            column(batch.rows.enqueued_ms),
            batch.rows.keys,
            batch.rows.headers,
            batch.rows.fairness_keys,
            id_suffix=id_suffix,
        )
        for batch in batches
    ]


def pack_batch(batch: StreamBatch) -> PartitionBatch:
    """Return rows as a result has them, without a copy of any column. Payloads may stay in one buffer."""
    import numpy as np

    def packed(column: Any) -> memoryview:
        return memoryview(np.ascontiguousarray(column).data).cast("B")

    rows = StreamRows(
        packed(batch.offsets),
        packed(batch.ids),
        batch.payloads,  # type: ignore[arg-type]
        packed(batch.priorities),
        packed(batch.attempts.astype(np.uint8)),
        packed(batch.enqueued_ms),
        batch.keys,  # type: ignore[arg-type]
        batch.fairness_keys,  # type: ignore[arg-type]
        batch.headers,  # type: ignore[arg-type]
    )
    return PartitionBatch(batch.partition, rows)


class LostRows(Struct, frozen=True, omit_defaults=True):
    """Rows that the member no longer held. All others were settled."""

    lost: list[PartitionRows] = []


group_call = call_family(feature="groups")
ONE = "/v1/heaps/{topic}:groups/{group}"


@group_call(
    id=0x50, rpc="CreateGroup", http="POST /v1/heaps/{topic}:groups", needs=Right.ADMIN, audit=("group",), status=201
)
class CreateGroup(Command[GroupInfo]):
    """Create a consumer group that begins at `start`.

    Creating it again with equal settings changes nothing; with other settings raises GroupExists.
    """

    topic: Topic
    group: GroupName
    start: Position = EARLIEST
    config: GroupSettings = GroupSettings()  # type: ignore[valid-type]


@group_call(id=0x51, rpc="GetGroup", http=f"GET {ONE}", needs=Right.CONSUME)
class GetGroup(Command[GroupInfo]):
    """Return a group, its members and offsets."""

    topic: Topic
    group: GroupName


@group_call(id=0x52, rpc="ListGroups", http="GET /v1/heaps/{topic}:groups", needs=Right.CONSUME)
class ListGroups(Command[Page[GroupInfo]]):
    """List the groups of a topic, by name."""

    topic: Topic
    cursor: Cursor | None = None
    limit: Limit = 1000


@group_call(
    id=0x53,
    rpc="DeleteGroup",
    http=f"DELETE {ONE}",
    needs=Right.ADMIN,
    repeat=Repeat.ONCE,
    destroys=True,
    audit=("group",),
)
class DeleteGroup(Command[None]):
    """Delete a group with its offsets and dead letters. The topic's messages stay."""

    topic: Topic
    group: GroupName


class GroupOffsets(Struct, frozen=True):
    offsets: list[GroupOffset]


@group_call(id=0x54, rpc="GroupOffsets", http=f"GET {ONE}/offsets", needs=Right.CONSUME)
class GetGroupOffsets(Command[GroupOffsets]):
    """Return how far a group is in each partition."""

    topic: Topic
    group: GroupName


@group_call(
    id=0x55,
    rpc="ResetOffsets",
    http=f"POST {ONE}:reset",
    needs=Right.ADMIN,
    repeat=Repeat.ONCE,
    destroys=True,
    audit=("group",),
)
class ResetOffsets(Command[GroupOffsets]):
    """Let a group continue from another position. An observer group is moved on by the same call."""

    topic: Topic
    group: GroupName
    to: Position
    partitions: list[Partition] | None = None


@group_call(id=0x56, rpc="GroupFetch", http=f"POST {ONE}:fetch", needs=Right.CONSUME, waits=True)
class GroupFetch(Command[FetchedRows], gc=False):
    """One step of a subscription: join if necessary, renew the member's lease, and take rows.

    The group is created if it does not exist. Waits up to `wait` seconds for the first row, or for its partitions
    to change.
    """

    topic: Topic
    group: GroupName
    member: ShortName
    session: Annotated[str, Meta(min_length=1, max_length=256)]
    max_messages: Annotated[int, Meta(ge=0, le=FETCH_MESSAGES_MAX)] = 1000
    max_bytes: MaxBytes = ANSWER_BYTES
    wait: Seconds = 0.0
    start: Position = EARLIEST
    config: GroupSettings = GroupSettings()  # type: ignore[valid-type]


@group_call(id=0x57, rpc="GroupAck", http=f"POST {ONE}:ack", needs=Right.CONSUME, repeat=Repeat.SETTLES)
class GroupAck(Command[LostRows], gc=False):
    """Settle rows as done."""

    topic: Topic
    group: GroupName
    member: ShortName
    rows: list[PartitionRows]
    session: Annotated[str, Meta(min_length=1, max_length=256)]


@group_call(id=0x58, rpc="GroupNack", http=f"POST {ONE}:nack", needs=Right.CONSUME, repeat=Repeat.SETTLES)
class GroupNack(Command[LostRows], gc=False):
    """Have rows delivered again after the group's backoff."""

    topic: Topic
    group: GroupName
    member: ShortName
    rows: list[PartitionRows]
    session: Annotated[str, Meta(min_length=1, max_length=256)]
    reason: Reason | None = None


@group_call(id=0x59, rpc="GroupLeave", http=f"POST {ONE}:leave", needs=Right.CONSUME)
class GroupLeave(Command[None]):
    """Leave a group. Its rows go to other members immediately."""

    topic: Topic
    group: GroupName
    member: ShortName
    session: Annotated[str, Meta(min_length=1, max_length=256)]


@group_call(id=0x5A, rpc="GroupDeadList", http=f"GET {ONE}:dead", needs=Right.CONSUME)
class ListGroupDeadLetters(Command[Page[GroupDeadLetter]]):
    """List the rows that a group gave up."""

    topic: Topic
    group: GroupName
    limit: Limit = 100
    cursor: Cursor | None = None
    max_bytes: MaxBytes = ANSWER_BYTES


@group_call(
    id=0x5B,
    rpc="GroupDeadReplay",
    http=f"POST {ONE}:replay-dead",
    needs=Right.ADMIN,
    repeat=Repeat.ONCE,
    audit=("group",),
)
class ReplayGroupDeadLetters(Command[Count]):
    """Deliver a group's dead letters to it again, all or these, and return how many."""

    topic: Topic
    group: GroupName
    rows: list[PartitionRows] | None = None


@group_call(
    id=0x5C,
    rpc="GroupDeadDelete",
    http=f"POST {ONE}:delete-dead",
    needs=Right.ADMIN,
    repeat=Repeat.ONCE,
    destroys=True,
    audit=("group",),
)
class DeleteGroupDeadLetters(Command[Count]):
    """Delete a group's dead letters, all or these, and return how many."""

    topic: Topic
    group: GroupName
    rows: list[PartitionRows] | None = None
