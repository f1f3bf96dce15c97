"""What people hold in their hands when they read a topic as a stream: rows, batches of rows, groups, replays.

A *row* of the stream is a message at the place where it fell due. Nothing here decides anything; a row only remembers
which subscription to ask. Columns are numpy arrays, shared between groups: nobody changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from heapline.config import GroupConfig
from heapline.model import Delivered
from heapline.ulid import to_ulid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    I64 = npt.NDArray[np.int64]

#: Where a group starts, or goes on: an offset of each partition, a moment of wall time, or one end of what is kept.
Place = Literal["earliest", "latest"] | int | datetime | Mapping[int, int]
#: What a partition is asked to settle: {partition: offsets}.
Offsets = Mapping[int, Sequence[int]]


class Settles(Protocol):
    """What a row asks when it is acked or nacked: a subscription."""

    async def ack(self, rows: Any) -> None: ...

    async def nack(self, rows: Any, *, reason: str | None = None) -> None: ...


class StreamMessage(Delivered):
    """One row of the stream, delivered to a member of a group. Ack it when it is done."""

    __slots__ = (
        "_enqueued_ms", "_headers", "_settles", "attempts", "fairness_key", "id", "key", "offset", "partition",
        "payload", "priority", "topic",
    )  # fmt: skip

    def __init__(
        self, settles: Settles | None, topic: str, partition: int, offset: int, id: int, payload: bytes, priority: int,
        attempts: int, key: str | None, headers: dict[str, str] | None, enqueued_ms: int,
        fairness_key: str | None = None,
    ) -> None:  # fmt: skip
        self._settles = settles
        self.topic = topic
        self.partition = partition
        self.offset = offset  # its place in the partition
        self.id = id
        self.payload = payload
        self.priority = priority  # as it was enqueued, whatever it was rescheduled to
        self.attempts = attempts  # the number of this delivery to the group, 1 on the first
        self.key = key
        self._headers = headers
        self._enqueued_ms = enqueued_ms
        self.fairness_key = fairness_key

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
    """Payloads that lie in one buffer; each is copied out of it when it is asked for."""

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
        if isinstance(whole, bytes) and len(whole) == len(data):  # cut at once, without a view for each
            return iter([whole[a:b] for a, b in spans])
        return (bytes(data[a:b]) for a, b in spans)


class StreamBatch:
    """Rows of one partition, as columns in the order of delivery. Ack all of it, or some offsets by `subscription`."""

    __slots__ = (
        "_settles", "attempts", "enqueued_ms", "fairness_keys", "headers", "ids", "keys", "offsets", "partition",
        "payloads", "priorities", "topic",
    )  # fmt: skip

    def __init__(
        self, settles: Settles | None, topic: str, partition: int, offsets: I64, ids: I64, payloads: Sequence[bytes],
        priorities: I64, attempts: I64, enqueued_ms: I64, keys: Sequence[str | None] | None = None,
        headers: Sequence[dict[str, str] | None] | None = None, fairness_keys: Sequence[str | None] | None = None,
    ) -> None:  # fmt: skip
        self._settles = settles
        self.topic, self.partition = topic, partition
        self.offsets, self.ids, self.payloads = offsets, ids, payloads
        self.priorities, self.attempts, self.enqueued_ms = priorities, attempts, enqueued_ms
        self.keys, self.headers, self.fairness_keys = keys, headers, fairness_keys  # None: no row has one

    def __len__(self) -> int:
        return len(self.offsets)

    def messages(self) -> list[StreamMessage]:
        columns = map(
            StreamMessage, repeat(self._settles), repeat(self.topic), repeat(self.partition), self.offsets.tolist(),
            self.ids.tolist(), self.payloads, self.priorities.tolist(), self.attempts.tolist(),
            self.keys or repeat(None), self.headers or repeat(None), self.enqueued_ms.tolist(),
            self.fairness_keys or repeat(None),
        )  # fmt: skip
        return list(columns)

    async def ack(self) -> None:
        if self._settles is not None:
            await self._settles.ack(self)

    async def nack(self, reason: str | None = None) -> None:
        if self._settles is not None:
            await self._settles.nack(self, reason=reason)


Rows = StreamMessage | StreamBatch | Iterable[StreamMessage | StreamBatch]


class Fetched(NamedTuple):
    """What a member got, and which partitions are its own now: it is told of nothing else by the broker."""

    batches: list[StreamBatch]
    partitions: list[int]  # that it reads
    generation: int  # rises whenever partitions change hands
    waited: float = 0.0  # seconds since the first of the batches arrived, where they were pushed: they are that old


class GroupOffset(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group is in one partition."""

    partition: int
    committed: int  # nothing below this offset is unacked
    end: int  # the offset after the last row
    lag: int  # rows of the stream that are not done; 0 = all is done
    outstanding: int = 0  # delivered, not acked yet
    retrying: int = 0  # failed, and coming again
    dead: int = 0  # given up: the group's dead letters
    member: str | None = None  # who reads it


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    topic: str
    config: GroupConfig
    generation: int
    members: dict[str, list[int]]  # and the partitions that each reads
    offsets: list[GroupOffset]
    used_at: datetime | None = None  # last acked, reset or joined
    holding: bool = True  # whether it keeps the journal from its offsets on

    @property
    def lag(self) -> int:
        return sum(offset.lag for offset in self.offsets)


class GroupDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A row that a group gave up; it is kept until it is replayed or deleted."""

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

    @property
    def message_id(self) -> str:
        return to_ulid(self.id)


class ReplayFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages are replayed; what is not given matches all."""

    priority_min: int | None = None
    priority_max: int | None = None
    key: str | None = None
    headers: dict[str, str] = {}  # all of these, with these values


class ReplayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A replay into a topic: what it was asked for, and how far it is."""

    name: str
    source: str
    into: str
    mode: Literal["all", "fast"]
    state: Literal["running", "done", "cancelled", "failed"]
    replayed: int  # messages that are in the topic
    skipped: int  # rows that the filter or the mode left out
    starts: dict[int, int]  # partition -> where it began
    positions: dict[int, int]  # partition -> the next offset
    ends: dict[int, int]  # partition -> where it ends
    rate: float | None = None
    error: str | None = None
    started_at: datetime | None = None

    @property
    def done_share(self) -> float:
        """0 to 1, of the rows of the log between the starts and the ends."""
        whole = sum(self.ends[p] - start for p, start in self.starts.items())
        done = sum(self.positions[p] - start for p, start in self.starts.items())
        return done / whole if whole else 1.0


class GroupEvents(Protocol):
    """Told when partitions come and go; both may be coroutine functions."""

    def __call__(self, partitions: list[int]) -> Any: ...
