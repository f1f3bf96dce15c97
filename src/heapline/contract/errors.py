"""Everything Heapline raises on purpose, as one tree.

The leaf says what happened, the branch says what the caller should do about it:

    HeaplineError
    ├── RequestError            yours to fix: the call changed nothing
    │   ├── BadRequest              an argument is malformed
    │   ├── BadName                 a topic, namespace or producer name is malformed
    │   ├── PayloadTooLarge         a payload over the topic's max_payload_bytes
    │   ├── TopicNotFound
    │   ├── TopicExists             a topic of that name has different settings
    │   ├── MessageNotFound
    │   ├── ScheduleNotFound
    │   ├── GroupNotFound
    │   ├── GroupExists             a group of that name has different settings
    │   ├── ReplayNotFound
    │   ├── ReplayExists            a replay of that name has different settings
    │   ├── UnknownPart             a commit names a part that is not prepared
    │   ├── Unauthenticated         the server does not know who is calling
    │   ├── PermissionDenied        the caller's scopes do not allow the call
    │   ├── ConfirmationNeeded      a destructive call without its confirmation token
    │   ├── Unsupported             the broker lacks the call's feature
    │   └── Closed                  the broker was closed
    ├── ConflictError           another caller or an event came first
    │   ├── LeaseLost               the lease ended before this call
    │   ├── DeliveryLost            stream rows that the group member no longer holds
    │   ├── MemberReplaced          another subscription took the member's name
    │   ├── StaleEpoch              a newer producer of that name exists
    │   ├── StaleSequence           a sequence below answered_below, or older than the window
    │   ├── IdempotencyConflict     the same identity with another payload
    │   ├── BatchDecided            the batch was committed
    │   ├── MessageLeased           the message is leased to a worker
    │   └── DirectoryLocked         another process has the data directory open
    ├── UnavailableError        retry later
    │   ├── ResourceExhausted       a configured limit is reached
    │   │   ├── StorageFull         no space for another segment
    │   │   └── RateLimited         too many requests; has the time until the next one is accepted
    │   ├── BatchInDoubt            an identity is in a batch that is not decided yet
    │   ├── TopicReloading          a write failed; the topic is being reloaded from disk
    │   └── DeadlineExceeded
    └── CorruptionError         stop: durable bytes are corrupt
        ├── JournalCorrupt          names the segment and byte
        ├── SnapshotCorrupt
        ├── RecordCorrupt           one message's bytes; the rest of the topic serves
        └── UnknownFormat           written by a newer version

Errors carry their data as attributes and say what to do next. `facts()` returns those attributes as plain data, so
that a server can send an error and a client can raise the same class again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class HeaplineError(Exception):
    """Base of everything Heapline raises on purpose."""

    #: Attribute names that carry the error's data, in constructor order.
    fields: ClassVar[tuple[str, ...]] = ()
    #: True if a client had to repeat the call, and an earlier attempt may have succeeded.
    repeated: bool = False

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fields}

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling between processes: pickle calls a class with its args, which here are the text alone."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[HeaplineError], args: tuple[Any, ...], state: dict[str, Any]) -> HeaplineError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class RequestError(HeaplineError):
    """The request is invalid as sent; fix it. Nothing was changed."""


class BadRequest(RequestError, ValueError):
    fields = ("detail",)

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class BadName(RequestError, ValueError):
    fields = ("kind", "name")

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(
            f"{name!r} is not a {kind} name; use 1 to 128 of the letters a-z A-Z 0-9 . _ -, "
            "starting with a letter or digit; a topic may be written namespace/name"
        )


class PayloadTooLarge(RequestError, ValueError):
    fields = ("size", "limit", "topic")

    def __init__(self, size: int, limit: int, topic: str) -> None:
        self.size, self.limit, self.topic = size, limit, topic
        self._explain("the topic's max_payload_bytes")

    @classmethod
    def over_server_limit(cls, size: int, limit: int, topic: str) -> PayloadTooLarge:
        """Return the error for a payload over the server's limit, which applies to all topics."""
        error = cls(size, limit, topic)
        error._explain("the server's payload_bytes_max")
        return error

    def _explain(self, setting: str) -> None:
        self.args = (
            f"a payload of {self.size} bytes for topic {self.topic!r} is over the limit of {self.limit} ({setting}); "
            "store the data elsewhere and enqueue a reference, or raise that limit",
        )


class TopicNotFound(RequestError, LookupError):
    fields = ("topic",)

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"topic {topic!r} does not exist; create it with create_topic({topic!r})")


class TopicExists(RequestError):
    fields = ("topic", "differing")

    def __init__(self, topic: str, differing: list[str]) -> None:
        self.topic, self.differing = topic, differing
        self._explain("change them with update_topic, or choose another name")

    @classmethod
    def with_fixed(cls, topic: str, differing: list[str], fixed: Sequence[str]) -> TopicExists:
        """Return the error if some of the differing settings cannot be changed."""
        error = cls(topic, differing)
        error._explain(f"{', '.join(fixed)} cannot be changed; choose another name")
        return error

    def _explain(self, advice: str) -> None:
        self.args = (
            f"topic {self.topic!r} already exists with different settings ({', '.join(self.differing)}); {advice}",
        )


class MessageNotFound(RequestError, LookupError):
    fields = ("topic", "message_id")

    def __init__(self, topic: str, message_id: str) -> None:
        self.topic, self.message_id = topic, message_id
        super().__init__(
            f"topic {topic!r} holds no message {message_id}: it was acked, cancelled, expired or purged, "
            "or the id is of another topic"
        )


class ScheduleNotFound(RequestError, LookupError):
    fields = ("schedule",)

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule
        super().__init__(f"schedule {schedule!r} does not exist; check its name, or create it with create_schedule")


class UnknownPart(RequestError, LookupError):
    fields = ("batch_id", "part")

    def __init__(self, batch_id: str, part: str) -> None:
        self.batch_id, self.part = batch_id, part
        super().__init__(
            f"part {part!r} of batch {batch_id!r} is not prepared, or not in all of its topics, so nothing was "
            "committed: prepare it again (the same content may be repeated), or abort the batch"
        )


class Unauthenticated(RequestError):
    """The caller is not authenticated. The error never says whether the name or the secret is wrong."""

    fields = ("detail",)

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class PermissionDenied(RequestError):
    """The caller lacks a right. `topic` is empty if the call concerns all topics."""

    fields = ("subject", "action", "topic")

    def __init__(self, subject: str, action: str, topic: str) -> None:
        self.subject, self.action, self.topic = subject, action, topic
        where = f"on topic {topic!r}" if topic else "on all topics"
        super().__init__(
            f"{subject!r} lacks the {action} right {where}; use a key with scope '{topic or '*'}:{action}' "
            "(`heapline keys create --scope`)"
        )


class ConfirmationNeeded(RequestError):
    fields = ("call", "topic", "token")

    def __init__(self, call: str, topic: str, token: str) -> None:
        self.call, self.topic, self.token = call, topic, token
        super().__init__(
            f"{call} of topic {topic!r} cannot be undone; to confirm it, repeat the same call soon with the "
            "confirmation token of this error"
        )


class GroupNotFound(RequestError, LookupError):
    fields = ("topic", "group")

    def __init__(self, topic: str, group: str) -> None:
        self.topic, self.group = topic, group
        super().__init__(f"topic {topic!r} has no group {group!r}; create it with create_group, or subscribe to it")


class GroupExists(RequestError):
    fields = ("topic", "group", "differing")

    def __init__(self, topic: str, group: str, differing: list[str]) -> None:
        self.topic, self.group, self.differing = topic, group, differing
        super().__init__(
            f"group {group!r} of topic {topic!r} already exists with different settings ({', '.join(differing)}); use "
            "those, or delete the group first"
        )


class ReplayNotFound(RequestError, LookupError):
    fields = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"replay {name!r} does not exist; `heapline replay list` shows the replays")


class ReplayExists(RequestError):
    fields = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"replay {name!r} already exists with different settings; choose another name "
            f"(`heapline replay show {name}` shows its settings)"
        )


class Unsupported(RequestError):
    """The broker lacks the feature that a call belongs to."""

    fields = ("call", "feature")

    def __init__(self, call: str, feature: str) -> None:
        self.call, self.feature = call, feature
        super().__init__(f"this broker does not support {call} (feature {feature!r}); describe() lists its features")


class Closed(RequestError):
    def __init__(self) -> None:
        super().__init__(
            "this broker is not open; use it inside `async with heapline.open(...)` or `with heapline.open_sync(...)`"
        )


class ConflictError(HeaplineError):
    """Another caller or an event came first. Nothing was changed."""


class LeaseLost(ConflictError):
    """Some leases had ended. `lost` holds their message ids (int); the call succeeded for all others."""

    fields = ("lost", "topic")

    def __init__(self, lost: list[int], topic: str) -> None:
        self.lost, self.topic = lost, topic
        shown = ", ".join(str(i) for i in lost[:3]) + (", …" if len(lost) > 3 else "")
        super().__init__(
            f"the lease of {len(lost)} message(s) of topic {topic!r} had ended ({shown}): they were settled before, or "
            "the lease expired and they are redelivered; settle each message once, and extend leases in time or pop "
            "with a longer visibility"
        )


class DeliveryLost(ConflictError):
    """The group member no longer held some rows: `offsets` of `partitions`, in parallel. All others were settled."""

    fields = ("partitions", "offsets", "topic", "group")

    def __init__(self, partitions: list[int], offsets: list[int], topic: str, group: str) -> None:
        self.partitions, self.offsets, self.topic, self.group = partitions, offsets, topic, group
        super().__init__(
            f"this member of group {group!r} no longer held {len(offsets)} row(s) of topic {topic!r}: they were "
            "settled before, or their ack_timeout ended and they are redelivered; ack in time, or give the group a "
            "longer ack_timeout"
        )


class MemberReplaced(ConflictError):
    fields = ("topic", "group", "member")

    def __init__(self, topic: str, group: str, member: str) -> None:
        self.topic, self.group, self.member = topic, group, member
        super().__init__(
            f"another subscription took the name of member {member!r} of group {group!r} of topic {topic!r}; stop this "
            "one, or choose another name for it"
        )


class StaleEpoch(ConflictError):
    fields = ("producer_id", "epoch", "current")

    def __init__(self, producer_id: str, epoch: int, current: int) -> None:
        self.producer_id, self.epoch, self.current = producer_id, epoch, current
        super().__init__(
            f"producer {producer_id!r} sent epoch {epoch}, but epoch {current} is open: another process "
            "took this producer's name; stop this one, or choose another name for it"
        )


class StaleSequence(ConflictError):
    fields = ("producer_id", "seq", "answered_below")

    def __init__(self, producer_id: str, seq: int, answered_below: int) -> None:
        self.producer_id, self.seq, self.answered_below = producer_id, seq, answered_below
        super().__init__(
            f"producer {producer_id!r} sent sequence {seq}, but all sequences below {answered_below} were answered; "
            "use a higher sequence for a new message"
        )


class IdempotencyConflict(ConflictError):
    fields = ("identity", "message_id")

    def __init__(self, identity: str, message_id: str) -> None:
        self.identity, self.message_id = identity, message_id
        super().__init__(
            f"{identity} was used before, for message {message_id}, with another payload: "
            "use a new idempotency key or sequence for a new message"
        )


class BatchDecided(ConflictError):
    fields = ("batch_id", "decision")

    def __init__(self, batch_id: str, decision: str) -> None:
        self.batch_id, self.decision = batch_id, decision
        super().__init__(f"batch {batch_id!r} {decision}, which cannot be undone; use a new batch id for other parts")


class MessageLeased(ConflictError):
    fields = ("topic", "message_id")

    def __init__(self, topic: str, message_id: str) -> None:
        self.topic, self.message_id = topic, message_id
        super().__init__(
            f"message {message_id} of topic {topic!r} is leased to a worker; wait until it is acked or the lease ends"
        )


class DirectoryLocked(ConflictError):
    fields = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"another process has {path!r} open; to share one queue between processes, run `heapline serve` "
            "and connect to it"
        )


class UnavailableError(HeaplineError):
    """Temporarily unavailable; the same call may succeed later."""

    #: False if it is certain that the call never left the client.
    reached: bool = True


class ResourceExhausted(UnavailableError):
    fields: ClassVar[tuple[str, ...]] = ("what", "limit")

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit = what, limit
        super().__init__(f"{what}: the limit of {limit} is reached; retry later, or raise the limit")


class StorageFull(ResourceExhausted):
    def __init__(self, what: str = "free disk space in spare segments", limit: int = 2) -> None:
        super().__init__(what, limit)
        self.args = (
            "the disk is full: enqueues are refused until space is freed; pop, ack and purge still work, "
            "so the queue can be drained",
        )


class RateLimited(ResourceExhausted):
    fields = ("what", "limit", "retry_after")

    def __init__(self, what: str, limit: int, retry_after: int) -> None:
        super().__init__(what, limit)
        self.retry_after = retry_after  # whole seconds
        self.args = (f"{what} are over the limit of {limit}: nothing was changed; retry in {retry_after} s",)


class BatchInDoubt(UnavailableError):
    fields = ("identity", "batch_id")

    def __init__(self, identity: str, batch_id: str) -> None:
        self.identity, self.batch_id = identity, batch_id
        super().__init__(
            f"{identity} is in batch {batch_id!r}, which is prepared and not decided, so this may be a duplicate; "
            "retry when that batch is committed or aborted"
        )


class TopicReloading(UnavailableError):
    fields = ("topic", "cause")

    def __init__(self, topic: str, cause: str) -> None:
        self.topic, self.cause = topic, cause
        super().__init__(
            f"a write to the journal of topic {topic!r} failed ({cause}); the outcome of this call is unknown "
            "and the topic is being reloaded from disk: retry with the same idempotency key"
        )


class DeadlineExceeded(UnavailableError, TimeoutError):
    fields = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} took longer than its deadline: its outcome is unknown; retry")


class CorruptionError(HeaplineError):
    """Durable bytes are corrupt. Nothing is guessed; run `heapline journal verify`."""


class JournalCorrupt(CorruptionError):
    fields = ("path", "offset", "detail")

    def __init__(self, path: str, offset: int, detail: str) -> None:
        self.path, self.offset, self.detail = path, offset, detail
        super().__init__(
            f"journal file {path} is damaged at byte {offset}: {detail}. The topic is not served; "
            "see `heapline journal verify`, restore a backup, or run `heapline journal repair`"
        )


class SnapshotCorrupt(CorruptionError):
    fields = ("path", "detail")

    def __init__(self, path: str, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(f"snapshot file {path} is damaged: {detail}")


class RecordCorrupt(CorruptionError):
    fields = ("topic", "message_id", "path", "offset")

    def __init__(self, topic: str, message_id: str, path: str, offset: int) -> None:
        self.topic, self.message_id, self.path, self.offset = topic, message_id, path, offset
        super().__init__(
            f"the record of message {message_id} of topic {topic!r} ({path} at byte {offset}) is corrupt; "
            "it is not delivered; see `heapline journal verify`"
        )


class UnknownFormat(CorruptionError):
    fields = ("path", "version")

    def __init__(self, path: str, version: int) -> None:
        self.path, self.version = path, version
        super().__init__(f"{path} has format version {version}, which this Heapline cannot read; upgrade Heapline")
