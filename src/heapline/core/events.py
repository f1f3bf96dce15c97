"""What can happen to messages, as columns: the vocabulary of the journal.

Every event is one struct; its columns are int64 arrays with one entry per row (message). An event without messages
takes one row. On disk an event is a msgpack array that starts with its tag, kind·16 + version.

Ritual for changing an event (on-disk version): never edit a struct's fields in place. Add a struct with the next
version in its tag, keep the old one and apply both, add a journal written by the old one to tests/fixtures.
A reader that meets a tag it does not know refuses (`UnknownFormat`), it never skips.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.errors import UnknownFormat

I64 = npt.NDArray[np.int64]
Column = np.ndarray  # annotation of an int64 column in the structs below


class Event(msgspec.Struct, array_like=True, gc=False):
    """Base: every event knows how many rows (offsets) it takes."""

    def rows(self) -> int:
        return 1


class IdEvent(Event, gc=False):
    """An event whose rows are the messages in `ids`."""

    ids: Column

    def rows(self) -> int:
        return len(self.ids)


class ProducerRows(msgspec.Struct, array_like=True, gc=False):
    """The part of an enqueue that one producer numbered: row numbers, sequences, payload fingerprints (uint32)."""

    producer: str
    epoch: int
    answered_below: int
    index: Column
    seqs: Column
    prints: bytes


class KeyRows(msgspec.Struct, array_like=True, gc=False):
    """The part of an enqueue that carries idempotency keys, as 16-byte hashes."""

    index: Column
    hashes: bytes
    prints: bytes
    scopes: bytes
    expires: Column


class Enqueued(Event, tag=0x011, gc=False):
    """Messages came in; their rows stand in block `block` of the same unit, from row `start`."""

    block: int
    start: int
    count: int
    seq: int  # spine sequence of the first; those that are due at once are eligible from here
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

    attempts: bytes  # number of this delivery, a byte a row
    grants: list[Grant]
    at: int
    seq: int
    limit: int | None = None  # heap key under which the spine allowed it; None = no other partition had anything


class LeaseExpired(IdEvent, tag=0x031, gc=False):
    dues: Column  # when each is ready again


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


class Fired(IdEvent, tag=0x081, gc=False):
    """Delayed messages became due and took their place in the stream, in this order."""

    positions: Column
    wall: bool  # from the wall-time wheel
    seq: int


class FiredInTurn(IdEvent, tag=0x082, gc=False):
    """The same where fairness keys take turns: a message gets its turn as it becomes ready, unless it is a retry."""

    positions: Column
    wall: bool
    seq: int
    keys: Column  # heap keys, with the turns


class FiredAgain(Fired, tag=0x083, gc=False):
    """The same when some of them have had their place in the stream before: rescheduled to later when they were ready,
    or replayed dead letters. They get no other."""

    again: bytes  # a byte a row: 1 = it had its place


class FiredInTurnAgain(FiredInTurn, tag=0x084, gc=False):
    """Both at once."""

    again: bytes


class FiredCount(Event, tag=0x091, gc=False):
    """The same on a topic without streams: only how many, which is enough to replay.

    One row, however many fired, as all events that name no messages: rows are what readers of the log find in columns,
    and there is none here to find. Whoever writes and whoever reads counts by `rows()` alone, so offsets agree; that it
    is 1 is on disk, in all offsets behind, and stays. Rows of a stream are another thing, and this kind has none.
    """

    count: int
    wall: bool
    seq: int


class DeadLettered(IdEvent, tag=0x0A1, gc=False):
    reason: str
    at: int
    kept: bool  # False: the topic has no dead-letter queue and the message is gone


class Replayed(IdEvent, tag=0x0B1, gc=False):
    """Dead letters came back with no attempts. due 0 = ready at once; expires 0 = never."""

    dues: Column
    expires: Column
    seq: int


class ReplayedInTurn(IdEvent, tag=0x0B2, gc=False):
    """The same where fairness keys take turns: those that are ready at once get theirs."""

    dues: Column
    expires: Column
    seq: int
    keys: Column  # heap keys, with the turns


class DeadDeleted(IdEvent, tag=0x0C1, gc=False):
    pass


class Cancelled(IdEvent, tag=0x0D1, gc=False):
    positions: Column
    delayed: bytes  # a byte a row: 1 = it stood in a wheel, 0 = in the heap


class Rescheduled(IdEvent, tag=0x0E1, gc=False):
    positions: Column
    delayed: bytes  # where it stood before, as above
    priorities: Column
    keys: Column
    dues: Column  # 0 = ready at once
    expires: Column  # 0 = never
    wall: bool  # dues are wall time
    seq: int
    expires_wall: bool  # expires are wall time


class RescheduledAgain(Rescheduled, tag=0x0E2, gc=False):
    """The same of messages that wait, though they have had their place in the stream: they get no other."""


class Expired(IdEvent, tag=0x0F1, gc=False):
    """The time-to-live of these ended. Those in `leased` are out with a worker and go when they come back."""

    positions: Column
    delayed: bytes  # where it stood, as above; 2 = it came back from a lease
    leased: Column
    at: int

    def rows(self) -> int:
        return len(self.ids) + len(self.leased)


class Purged(Event, tag=0x101, gc=False):
    """Everything ready and delayed in the partition went; `count` messages."""

    count: int
    at: int


class Moved(Event, tag=0x111, gc=False):
    """Records were rewritten into this unit's block so that their old segment can go."""

    block: int
    start: int
    count: int

    def rows(self) -> int:
        return self.count


class ProducerOpened(Event, tag=0x121, gc=False):
    producer: str
    epoch: int
    partitions: int


class ConfigChanged(Event, tag=0x131, gc=False):
    config: bytes  # JSON


class Paused(Event, tag=0x141, gc=False):
    until: int | None  # wall ms


class Resumed(Event, tag=0x151, gc=False):
    pass


class Throttled(Event, tag=0x161, gc=False):
    """The partition is left out of pops, or no longer."""

    throttled: bool
    reason: str


class Grown(Event, tag=0x1A1, gc=False):
    """The topic got more partitions; stands in partition 0. What was recorded before lies where `before` of them
    placed it."""

    before: int
    after: int
    at: int
    until: int  # by then every idempotency key of the window scope that was recorded before has expired


class BatchPrepared(Event, tag=0x171, gc=False):
    """One partition's share of a part: records that are durable, and that nobody sees until the batch is committed."""

    block: int
    start: int
    count: int  # 0: the share is empty, or all of it was known already; then there is no block
    batch_id: str
    part: str
    topics: list[str]  # all that the part spans: it is whole when each of them holds its share
    fingerprint: bytes  # of the whole part, to tell a repeat from another of the same name
    at: int
    index: Column  # which rows of the topic's share the records are
    known: Column  # which rows were left out as duplicates
    known_ids: Column  # and the messages that those repeat
    producers: list[ProducerRows] = []
    keys: KeyRows | None = None


class BatchCommitted(IdEvent, tag=0x181, gc=False):
    """Messages of prepared parts take their place in the queue; what else these parts held goes."""

    batch_id: str
    parts: list[str]  # of the named ones, those that this event attaches
    seq: int
    at: int
    more: bool  # another event of this batch follows; otherwise all that is left of the batch goes
    keys: Column  # where fairness keys take turns: heap keys, with the turns; else empty

    def rows(self) -> int:
        return len(self.ids) or 1


class BatchPlaced(BatchCommitted, tag=0x182, gc=False):
    """The same on a topic with streams: who follows it finds the records without looking for the prepared parts."""

    positions: Column
    ready: bytes  # a byte a row: 1 = due at once


class BatchAborted(Event, tag=0x191, gc=False):
    """All prepared parts of the batch went."""

    batch_id: str
    at: int


class GroupCreated(Event, tag=0x1B1, gc=False):
    """A consumer group starts reading this partition; stands in every partition of the topic."""

    group: str
    offset: int  # where it starts
    count: int  # of stream rows below that
    config: bytes  # JSON
    at: int


class GroupAcked(Event, tag=0x1C1, gc=False):
    """A group is done with rows of the stream: all below `committed`, and all within the ranges above it."""

    group: str
    committed: int
    count: int  # of stream rows below `committed`
    starts: Column
    ends: Column  # exclusive
    counts: Column  # how many rows of each range are done by this event
    again: Column  # offsets of replayed dead letters that were acked
    at: int


class GroupFailed(IdEvent, tag=0x1D1, gc=False):
    """Deliveries to a group failed (nacked or timed out); each comes again when its back-off is over."""

    group: str
    offsets: Column
    positions: Column
    failures: Column  # deliveries that failed so far
    dues: Column
    reason: str
    at: int


class GroupDead(IdEvent, tag=0x1E1, gc=False):
    """Rows that a group gave up. They count as done (as in GroupAcked), and go on holding their messages."""

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


class GroupReset(Event, tag=0x1F1, gc=False):
    """A group goes on from another place of this partition, whatever it had done."""

    group: str
    offset: int
    count: int  # of stream rows below that
    at: int


class GroupDeleted(Event, tag=0x201, gc=False):
    """A group is gone from this partition; stands in every partition of the topic."""

    group: str
    at: int


class GroupMembers(Event, tag=0x211, gc=False):
    """Who is in a group and who reads which partition, whole; stands in partition 0."""

    group: str
    generation: int
    members: list[str]
    readers: list[str]  # names that `owners` and `targets` point to: members, and some who have gone
    partitions: Column
    owners: Column  # who may hold rows of the partition; -1 = nobody
    targets: Column  # who is to read it next, or still; -1 = nobody
    at: int


class GroupDeadDeleted(IdEvent, tag=0x221, gc=False):
    """Dead letters of a group were dropped."""

    group: str
    offsets: Column
    at: int


class GroupDeadReplayed(IdEvent, tag=0x231, gc=False):
    """Dead letters of a group are delivered to it once more, with no failures."""

    group: str
    offsets: Column
    dues: Column
    at: int


AnyEvent = (
    Enqueued | Leased | LeaseExpired | Acked | Nacked | Released | Extended | Fired | FiredInTurn | FiredCount
    | DeadLettered | Replayed | ReplayedInTurn | DeadDeleted | Cancelled | Rescheduled | Expired | Purged | Moved
    | ProducerOpened | ConfigChanged | Paused | Resumed | Throttled | Grown | BatchPrepared | BatchCommitted
    | BatchAborted | GroupCreated | GroupAcked | GroupFailed | GroupDead | GroupReset | GroupDeleted | GroupMembers
    | GroupDeadDeleted | GroupDeadReplayed | FiredAgain | FiredInTurnAgain | RescheduledAgain | BatchPlaced
)  # fmt: skip

#: Words for the kinds, as they stand in the log that people and Spark read.
KIND_NAMES: dict[type[Event], str] = {
    Enqueued: "enqueued", Leased: "leased", LeaseExpired: "lease_expired", Acked: "acked", Nacked: "nacked",
    Released: "released", Extended: "extended", Fired: "fired", FiredInTurn: "fired", FiredCount: "fired_count",
    DeadLettered: "dead_lettered", Replayed: "replayed", ReplayedInTurn: "replayed", DeadDeleted: "dead_deleted",
    Cancelled: "cancelled",
    Rescheduled: "rescheduled", Expired: "expired", Purged: "purged", Moved: "moved",
    ProducerOpened: "producer_opened", ConfigChanged: "config_changed", Paused: "paused", Resumed: "resumed",
    Throttled: "throttled",
    Grown: "grown",
    BatchPrepared: "batch_prepared", BatchCommitted: "batch_committed", BatchAborted: "batch_aborted",
    GroupCreated: "group_created", GroupAcked: "group_acked", GroupFailed: "group_failed", GroupDead: "group_dead",
    GroupReset: "group_reset", GroupDeleted: "group_deleted", GroupMembers: "group_members",
    GroupDeadDeleted: "group_dead_deleted", GroupDeadReplayed: "group_dead_replayed",
    FiredAgain: "fired", FiredInTurnAgain: "fired", RescheduledAgain: "rescheduled", BatchPlaced: "batch_committed",
}  # fmt: skip


def _encode_column(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<i8").tobytes()
    raise TypeError(f"cannot encode {type(value)}")


def _decode_column(kind: type, value: Any) -> I64:
    if kind is np.ndarray and isinstance(value, bytes):
        return np.frombuffer(value, dtype="<i8")
    raise TypeError(f"cannot decode {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_decoder = msgspec.msgpack.Decoder(list[AnyEvent], dec_hook=_decode_column)
EMPTY: I64 = np.zeros(0, dtype=np.int64)


def encode_event(event: Any) -> bytes:
    return _encoder.encode(event)


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
