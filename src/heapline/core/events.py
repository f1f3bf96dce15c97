"""The journal's events: everything that can happen to messages, as columns.

Every event is one struct; its columns are int64 arrays with one entry per row (message). An event that names no
messages takes one row. A kind has optional columns (None if absent) rather than variants of itself. On disk an event is
a msgpack array that starts with its tag, kind·16 + version; an absent column is one nil byte.

To change an event once a version has been released, never edit a struct's fields in place. Add a struct with the next
version in its tag, keep the old one, apply both, and add a journal written by the old one to tests/fixtures. A reader
refuses an unknown tag (`UnknownFormat`); it never skips one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.contract.errors import UnknownFormat

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Column = np.ndarray  # annotation of an int64 column in the structs below


class Event(msgspec.Struct, array_like=True, gc=False):
    """Base of all events. `rows` is the number of rows (offsets) that the event takes."""

    def rows(self) -> int:
        return 1


class IdEvent(Event, gc=False):
    """An event whose rows are the messages in `ids`."""

    ids: Column

    def rows(self) -> int:
        return len(self.ids)


class ProducerRows(msgspec.Struct, array_like=True, gc=False):
    """The rows of an enqueue that one producer numbered: row numbers, sequences, payload fingerprints (uint32)."""

    producer: str
    epoch: int
    answered_below: int
    index: Column
    seqs: Column
    prints: bytes


class KeyRows(msgspec.Struct, array_like=True, gc=False):
    """The rows of an enqueue that carry idempotency keys, as 16-byte hashes."""

    index: Column
    hashes: bytes
    prints: bytes
    scopes: bytes
    expires: Column


class Enqueued(Event, tag=0x011, gc=False):
    """Messages were enqueued; their records are in block `block` of the same unit, from row `start`."""

    block: int
    start: int
    count: int
    seq: int  # spine sequence of the first; messages without a delay are eligible from here
    producers: list[ProducerRows] = []
    keys: KeyRows | None = None

    def rows(self) -> int:
        return self.count


class Grant(msgspec.Struct, array_like=True, gc=False):
    """One pop's share of a lease event: the next `count` rows."""

    count: int
    deadline: int
    holder: str | None
    request_id: str | None


class Leased(IdEvent, tag=0x021, gc=False):
    """Each row's lease token is the row's own offset."""

    attempts: bytes  # number of this delivery, a byte per row
    grants: list[Grant]
    at: int
    seq: int
    limit: int | None = None  # heap key below which the spine allowed it; None = all other partitions were empty


class LeaseExpired(IdEvent, tag=0x031, gc=False):
    dues: Column  # when each becomes ready again


class Acked(IdEvent, tag=0x041, gc=False):
    tokens: Column


class Nacked(IdEvent, tag=0x051, gc=False):
    tokens: Column
    dues: Column
    reason: str | None


class Released(IdEvent, tag=0x061, gc=False):
    tokens: Column
    seq: int


class Extended(IdEvent, tag=0x071, gc=False):
    tokens: Column
    deadlines: Column


class Fired(Event, tag=0x081, gc=False):
    """Delayed messages became due.

    On a topic with streams or fairness keys, `ids` and `positions` name them in the order in which they became ready.
    Otherwise only `count` is recorded, which is enough to replay the wheel. Such an event takes one row however many
    messages fired, like every event that names no messages.
    """

    wall: bool  # from the wall-time wheel
    seq: int
    ids: Column | None = None
    positions: Column | None = None
    keys: Column | None = None  # heap keys with turns, on topics with fairness keys; a retry keeps the turn it had
    again: bytes | None = None  # a byte per row: 1 = the message already has its offset in the stream and gets no other
    count: int | None = None  # how many fired, if they are not named

    def rows(self) -> int:
        return 1 if self.ids is None else len(self.ids)


class DeadLettered(IdEvent, tag=0x091, gc=False):
    reason: str
    at: int
    kept: bool  # False: the topic has no dead-letter queue and the message was dropped


class Replayed(IdEvent, tag=0x0A1, gc=False):
    """Dead letters return to the queue with no attempts."""

    dues: Column  # 0 = ready immediately
    expires: Column  # 0 = never
    seq: int
    keys: Column | None = None  # heap keys with turns, on topics with fairness keys


class DeadDeleted(IdEvent, tag=0x0B1, gc=False):
    expired: bool = False  # not by a call: because of their age, or of the number or size of all dead letters

    @property
    def reason(self) -> str | None:
        return "expired as a dead letter" if self.expired else None


class Cancelled(IdEvent, tag=0x0C1, gc=False):
    positions: Column
    delayed: bytes  # a byte per row: 1 = it was in a wheel, 0 = in the heap


class Rescheduled(IdEvent, tag=0x0D1, gc=False):
    positions: Column
    delayed: bytes  # where each message was before, as in Cancelled
    priorities: Column
    keys: Column
    dues: Column  # 0 = ready immediately
    expires: Column  # 0 = never
    wall: bool  # dues are wall time
    seq: int
    expires_wall: bool  # expires are wall time
    again: bytes | None = None  # a byte per row: 1 = the message already has its offset in the stream, as in Fired


class Expired(IdEvent, tag=0x0E1, gc=False):
    """Messages reached the end of their TTL. Those in `leased` are removed when their leases end."""

    positions: Column
    delayed: bytes  # where each was, as in Cancelled; 2 = its lease just ended
    leased: Column
    at: int

    def rows(self) -> int:
        return len(self.ids) + len(self.leased)


class Purged(Event, tag=0x0F1, gc=False):
    """All `count` ready and delayed messages of the partition were removed."""

    count: int
    at: int


class Moved(Event, tag=0x101, gc=False):
    """Records were copied into this unit's block so that their old segment can be deleted."""

    block: int
    start: int
    count: int

    def rows(self) -> int:
        return self.count


class ProducerOpened(Event, tag=0x111, gc=False):
    producer: str
    epoch: int
    partitions: int


class ConfigChanged(Event, tag=0x121, gc=False):
    config: bytes  # JSON


class Paused(Event, tag=0x131, gc=False):
    until: int | None  # wall ms


class Resumed(Event, tag=0x141, gc=False):
    pass


class Throttled(Event, tag=0x151, gc=False):
    """The partition is excluded from pops, or included again."""

    throttled: bool
    reason: str


class Grown(Event, tag=0x161, gc=False):
    """The topic got more partitions; recorded in partition 0. Earlier messages were placed over `before` partitions."""

    before: int
    after: int
    at: int
    until: int  # when the last idempotency key of the window scope that was recorded before has expired


class BatchPrepared(Event, tag=0x171, gc=False):
    """One partition's share of a part: durable records that stay invisible until the batch is committed."""

    block: int
    start: int
    count: int  # 0 = the share is empty or consists of duplicates; then there is no block
    batch_id: str
    part: str
    topics: list[str]  # every topic of the part; it is complete when each of them holds its share
    fingerprint: bytes  # of the complete part, to tell a retry from another part of the same name
    at: int
    index: Column  # row numbers of the records in the topic's share
    known: Column  # row numbers that were left out as duplicates
    known_ids: Column  # the messages that those duplicate
    producers: list[ProducerRows] = []
    keys: KeyRows | None = None


class BatchCommitted(IdEvent, tag=0x181, gc=False):
    """Messages of prepared parts enter the queue; the other messages of these parts are dropped.

    On a topic with streams it also records `positions` and `ready`, so that a stream reader finds the records without
    reading the prepared parts.
    """

    batch_id: str
    parts: list[str]  # of the committed parts, those whose messages this event adds
    seq: int
    at: int
    more: bool  # another event of this batch follows; otherwise all that is left of the batch is dropped
    keys: Column | None = None  # heap keys with turns, on topics with fairness keys
    positions: Column | None = None
    ready: bytes | None = None  # a byte per row: 1 = due immediately

    def rows(self) -> int:
        return len(self.ids) or 1


class BatchAborted(Event, tag=0x191, gc=False):
    """All prepared parts of the batch were dropped."""

    batch_id: str
    at: int


class GroupCreated(Event, tag=0x1A1, gc=False):
    """A consumer group starts reading this partition; recorded in every partition of the topic."""

    group: str
    offset: int  # where it starts
    count: int  # stream rows below that
    config: bytes  # JSON
    at: int


class GroupAcked(Event, tag=0x1B1, gc=False):
    """A group finished stream rows: all below `committed`, and all within the ranges above it."""

    group: str
    committed: int
    count: int  # stream rows below `committed`
    starts: Column
    ends: Column  # exclusive
    counts: Column  # rows of each range that this event finishes
    again: Column  # offsets of replayed dead letters that were acked
    at: int


class GroupFailed(IdEvent, tag=0x1C1, gc=False):
    """Deliveries to a group failed (nacked or timed out); each is redelivered after its backoff."""

    group: str
    offsets: Column
    positions: Column
    failures: Column  # failed deliveries so far
    dues: Column
    reason: str
    at: int


class GroupDead(IdEvent, tag=0x1D1, gc=False):
    """A group gave up on rows. They count as finished (as in GroupAcked) and still hold their messages."""

    group: str
    offsets: Column
    positions: Column
    attempts: Column
    reason: str
    committed: int
    count: int
    starts: Column
    ends: Column
    counts: Column
    at: int


class GroupReset(Event, tag=0x1E1, gc=False):
    """A group continues from another offset of this partition, whatever it had finished."""

    group: str
    offset: int
    count: int  # stream rows below that
    at: int


class GroupDeleted(Event, tag=0x1F1, gc=False):
    """A group was deleted; recorded in every partition of the topic."""

    group: str
    at: int


class GroupMembers(Event, tag=0x201, gc=False):
    """The complete membership of a group and the reader of each partition; recorded in partition 0."""

    group: str
    generation: int
    members: list[str]
    readers: list[str]  # names that `owners` and `targets` index: members, and some that have left
    partitions: Column
    owners: Column  # the member that may hold rows of the partition; -1 = none
    targets: Column  # the member that reads it next, or still; -1 = none
    at: int


class GroupDeadDeleted(IdEvent, tag=0x211, gc=False):
    """Dead letters of a group were dropped."""

    group: str
    offsets: Column
    at: int


class GroupDeadReplayed(IdEvent, tag=0x221, gc=False):
    """Dead letters of a group are delivered to it again, with no failures counted."""

    group: str
    offsets: Column
    dues: Column
    at: int


AnyEvent = (
    Enqueued | Leased | LeaseExpired | Acked | Nacked | Released | Extended | Fired | DeadLettered | Replayed
    | DeadDeleted | Cancelled | Rescheduled | Expired | Purged | Moved | ProducerOpened | ConfigChanged | Paused
    | Resumed | Throttled | Grown | BatchPrepared | BatchCommitted | BatchAborted | GroupCreated | GroupAcked
    | GroupFailed | GroupDead | GroupReset | GroupDeleted | GroupMembers | GroupDeadDeleted | GroupDeadReplayed
)  # fmt: skip

#: The kind's name in the log that people and Spark read.
KIND_NAMES: dict[type[Event], str] = {
    Enqueued: "enqueued", Leased: "leased", LeaseExpired: "lease_expired", Acked: "acked", Nacked: "nacked",
    Released: "released", Extended: "extended", Fired: "fired", DeadLettered: "dead_lettered", Replayed: "replayed",
    DeadDeleted: "dead_deleted", Cancelled: "cancelled", Rescheduled: "rescheduled", Expired: "expired",
    Purged: "purged", Moved: "moved", ProducerOpened: "producer_opened", ConfigChanged: "config_changed",
    Paused: "paused", Resumed: "resumed", Throttled: "throttled", Grown: "grown", BatchPrepared: "batch_prepared",
    BatchCommitted: "batch_committed", BatchAborted: "batch_aborted", GroupCreated: "group_created",
    GroupAcked: "group_acked", GroupFailed: "group_failed", GroupDead: "group_dead", GroupReset: "group_reset",
    GroupDeleted: "group_deleted", GroupMembers: "group_members", GroupDeadDeleted: "group_dead_deleted",
    GroupDeadReplayed: "group_dead_replayed",
}  # fmt: skip


def _encode_column(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return (value if value.dtype == _STORED else value.astype(_STORED)).tobytes()
    raise TypeError(f"cannot encode {type(value)}")


def _decode_column(kind: type, value: Any) -> I64:
    if kind is np.ndarray and isinstance(value, bytes):
        return np.frombuffer(value, dtype="<i8")
    raise TypeError(f"cannot decode {kind}")


_STORED = np.dtype("<i8")
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_decoder = msgspec.msgpack.Decoder(list[AnyEvent], dec_hook=_decode_column)
EMPTY: I64 = np.zeros(0, dtype=np.int64)


#: Return the stored bytes of an event.
encode_event = _encoder.encode


def decode_events(data: bytes | memoryview, where: str) -> list[AnyEvent]:
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        tags = msgspec.msgpack.decode(data)
        known = {kind.__struct_config__.tag for kind in KIND_NAMES}
        for item in tags:
            if isinstance(item, list) and item and item[0] not in known:
                raise UnknownFormat(f"{where} (event kind {item[0]:#x})", int(item[0]) & 15) from error
        raise
