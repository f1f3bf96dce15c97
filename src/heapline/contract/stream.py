"""Types for reading a topic as a stream: rows, batches of rows, groups, replays.

A *row* of the stream is a message at the position where it became due. This module decides nothing; a row only has a
reference to its subscription. Columns are numpy arrays, shared between groups: do not modify them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from heapline.contract.config import GroupConfig
from heapline.contract.ids import to_ulid
from heapline.contract.message import Delivered, repr_with_ulid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    I64 = npt.NDArray[np.int64]
else:
    I64 = Sequence  # for help(): numpy is loaded only by programs that use it

#: Where a group starts or continues: an offset per partition, a wall-clock time, or one end of the retained log.
Place = Literal["earliest", "latest"] | int | datetime | Mapping[int, int]
#: Rows to settle: {partition: offsets}.
Offsets = Mapping[int, Sequence[int]]


class Settles(Protocol):
    """The interface that acks and nacks of a row call: a subscription."""

    async def ack(self, rows: Any) -> None: ...

    async def nack(self, rows: Any, *, reason: str | None = None) -> None: ...


class StreamMessage(Delivered, msgspec.Struct, eq=False):
    """One row of the stream, delivered to a member of a group. Ack it when it is done."""

    _settles: Settles | None
    topic: str
    partition: int
    offset: int  # its position in the partition
    id: int
    payload: bytes
    priority: int  # as enqueued, even if it was rescheduled since
    attempts: int  # the number of this delivery to the group, 1 on the first
    key: str | None
    _headers: dict[str, str] | None
    _enqueued_ms: int
    fairness_key: str | None = None
    id_suffix: int = 0  # the topic's

    async def ack(self) -> None:
        if self._settles is not None:  # rows of a replay belong to no group
            await self._settles.ack(self)

    async def nack(self, reason: str | None = None) -> None:
        if self._settles is not None:
            await self._settles.nack(self, reason=reason)

    def __repr__(self) -> str:
        where = f"{self.topic!r} {self.partition}:{self.offset}"
        return f"<StreamMessage {self.message_id} at {where}, attempt {self.attempts}, {len(self.payload)} bytes>"


class Payloads(Sequence[bytes]):
    """Payloads in one buffer; each is copied out on access."""

    __slots__ = ("data", "ends", "starts")

    def __init__(self, data: memoryview, starts: I64, ends: I64) -> None:
        self.data, self.starts, self.ends = data, starts, ends

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Payloads(self.data, self.starts[at], self.ends[at])
        return bytes(self.data[int(self.starts[at]) : int(self.ends[at])])

    def __iter__(self) -> Iterator[bytes]:
        data, whole = self.data, self.data.obj
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        if isinstance(whole, bytes) and len(whole) == len(data):  # slice directly, without a view per payload
            return iter([whole[a:b] for a, b in spans])
        return (bytes(data[a:b]) for a, b in spans)


class StreamBatch(msgspec.Struct, eq=False):
    """Rows of one partition, as columns in the order of delivery. Ack all, or some offsets with `subscription`."""

    _settles: Settles | None
    topic: str
    partition: int
    offsets: I64
    ids: I64
    payloads: Sequence[bytes]
    priorities: I64
    attempts: I64
    enqueued_ms: I64
    keys: Sequence[str | None] | None = None  # None if no row has one, like the next two columns
    headers: Sequence[dict[str, str] | None] | None = None
    fairness_keys: Sequence[str | None] | None = None
    id_suffix: int = 0  # the topic's

    def __len__(self) -> int:
        return len(self.offsets)

    def messages(self) -> list[StreamMessage]:
        columns = (
            repeat(self._settles),
            repeat(self.topic),
            repeat(self.partition),
            self.offsets.tolist(),
            self.ids.tolist(),
            self.payloads,
            self.priorities.tolist(),
            self.attempts.tolist(),
            self.keys or repeat(None),
            self.headers or repeat(None),
            self.enqueued_ms.tolist(),
            self.fairness_keys or repeat(None),
            repeat(self.id_suffix),
        )
        return list(map(StreamMessage, *columns))

    async def ack(self) -> None:
        if self._settles is not None:
            await self._settles.ack(self)

    async def nack(self, reason: str | None = None) -> None:
        if self._settles is not None:
            await self._settles.nack(self, reason=reason)


Rows = StreamMessage | StreamBatch | Iterable[StreamMessage | StreamBatch]


class Fetched(NamedTuple):
    """The rows that a member got, and its current partitions. The broker reports assignments in no other way."""

    batches: list[StreamBatch]
    partitions: list[int]  # partitions that it reads
    generation: int  # increases whenever partitions are reassigned
    waited: float = 0.0  # seconds since the first of the batches arrived, if they were pushed: their age


class GroupOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a group in one partition."""

    partition: int
    committed: int  # nothing below this offset is unacked
    end: int  # the offset after the last row
    lag: int  # stream rows that are not done; 0 = all are done
    outstanding: int = 0  # delivered, not acked yet
    retrying: int = 0  # failed, will be redelivered
    dead: int = 0  # dead letters of the group
    member: str | None = None  # the member that reads it


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    topic: str
    config: GroupConfig
    generation: int
    members: dict[str, list[int]]  # member -> partitions that it reads
    offsets: list[GroupOffset]
    used_at: datetime | None = None  # last ack, reset or join
    holding: bool = True  # whether it keeps the journal from its offsets on

    @property
    def lag(self) -> int:
        return sum(offset.lag for offset in self.offsets)


class GroupDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A row that a group gave up on. It is kept until it is replayed or deleted."""

    partition: int
    offset: int
    id: int
    attempts: int
    reason: str
    died_at: datetime | None = None
    payload: bytes | None = None
    priority: int | None = None
    key: str | None = None
    headers: dict[str, str] = {}
    id_suffix: int = 0  # the topic's

    @property
    def message_id(self) -> str:
        return to_ulid(self.id, self.id_suffix)

    def __repr__(self) -> str:
        return repr_with_ulid(self)


class ReplayFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the messages to replay. A field that is not given matches all."""

    priority_min: int | None = None
    priority_max: int | None = None
    key: str | None = None
    headers: dict[str, str] = {}  # all of these, with these values


class ReplayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A replay into a topic: its request and its progress."""

    name: str
    source: str
    into: str
    mode: Literal["all", "fast"]
    state: Literal["running", "done", "cancelled", "failed"]
    replayed: int  # messages enqueued to the topic
    skipped: int  # rows that the filter or the mode excluded
    starts: dict[int, int]  # partition -> first offset
    positions: dict[int, int]  # partition -> next offset
    ends: dict[int, int]  # partition -> end offset
    rate: float | None = None
    error: str | None = None
    started_at: datetime | None = None
    gaps: dict[int, int] = {}  # partition -> where the log starts, if earlier rows that were requested are reclaimed
    count: int | None = None  # messages after which it is done, if it does not reach the ends before

    @property
    def done_share(self) -> float:
        """The completed share, 0 to 1, of the log rows between the starts and the ends, or of `count`."""
        whole = sum(self.ends[p] - start for p, start in self.starts.items())
        done = sum(self.positions[p] - start for p, start in self.starts.items())
        share = done / whole if whole else 1.0
        return share if self.count is None else max(share, self.replayed / self.count)


class GroupEvents(Protocol):
    """Callbacks for assigned and revoked partitions; both may be coroutine functions."""

    def __call__(self, partitions: list[int]) -> Any: ...
