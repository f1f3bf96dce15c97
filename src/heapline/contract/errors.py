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

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform

E = TypeVar("E", bound="type[HeaplineError]")


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


@dataclass_transform()
def error(text: str) -> Callable[[E], E]:
    """Declare an error by its fields, which become its constructor's arguments, and by the text composed of them."""

    def declare(kind: E) -> E:
        inherited = {name: kind.__init__.__annotations__[name] for name in kind.fields}
        hints = inherited | kind.__annotations__
        kind.fields = tuple(hints)
        defaults = {name: f" = {getattr(kind, name)!r}" for name in hints if hasattr(kind, name)}
        parameters = ", ".join(f"{name}: {hint}{defaults.get(name, '')}" for name, hint in hints.items())
        facts = ", ".join(f"{name}={name}" for name in hints)
        made: dict[str, Any] = {"compose": compose}
        exec(f"def __init__(self, {parameters}) -> None:\n compose(self, {facts})", made)
        kind.__init__ = made["__init__"]  # type: ignore[method-assign]
        return kind

    def compose(self: HeaplineError, **facts: Any) -> None:
        self.__dict__.update(facts)
        self.args = (text.format_map(facts),)

    return declare


class RequestError(HeaplineError):
    """The request is invalid as sent; fix it. Nothing was changed."""


@error("{detail}")
class BadRequest(RequestError, ValueError):
    detail: str


@error(
    "{name!r} is not a {kind} name; use 1 to 128 of the letters a-z A-Z 0-9 . _ -, "
    "starting with a letter or digit; a topic may be written namespace/name"
)
class BadName(RequestError, ValueError):
    kind: str
    name: str


@error(
    "a payload of {size} bytes for topic {topic!r} is over the limit of {limit} (the topic's max_payload_bytes); store "
    "the data elsewhere and enqueue a reference, or raise that limit"
)
class PayloadTooLarge(RequestError, ValueError):
    size: int
    limit: int
    topic: str

    @classmethod
    def over_server_limit(cls, size: int, limit: int, topic: str) -> PayloadTooLarge:
        """Return the error for a payload over the server's limit, which applies to all topics."""
        error = cls(size, limit, topic)
        error.args = (error.args[0].replace("the topic's max_payload_bytes", "the server's payload_bytes_max"),)
        return error


@error("topic {topic!r} does not exist; create it with create_topic({topic!r})")
class TopicNotFound(RequestError, LookupError):
    topic: str


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


@error(
    "topic {topic!r} holds no message {message_id}: it was acked, cancelled, expired or purged, "
    "or the id is of another topic; check both"
)
class MessageNotFound(RequestError, LookupError):
    topic: str
    message_id: str


@error("schedule {schedule!r} does not exist; check its name, or create it with create_schedule")
class ScheduleNotFound(RequestError, LookupError):
    schedule: str


@error(
    "part {part!r} of batch {batch_id!r} is not prepared, or not in all of its topics, so nothing was "
    "committed: prepare it again (the same content may be repeated), or abort the batch"
)
class UnknownPart(RequestError, LookupError):
    batch_id: str
    part: str


@error("{detail}")
class Unauthenticated(RequestError):
    """The caller is not authenticated. The error never says whether the name or the secret is wrong."""

    detail: str


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


@error(
    "{call} of {topic!r} cannot be undone; to confirm it, repeat the same call soon with the "
    "confirmation token of this error"
)
class ConfirmationNeeded(RequestError):
    call: str
    topic: str  # or the key, user, schedule or sink that the call is about
    token: str


@error("topic {topic!r} has no group {group!r}; create it with create_group, or subscribe to it")
class GroupNotFound(RequestError, LookupError):
    topic: str
    group: str


class GroupExists(RequestError):
    fields = ("topic", "group", "differing")

    def __init__(self, topic: str, group: str, differing: list[str]) -> None:
        self.topic, self.group, self.differing = topic, group, differing
        super().__init__(
            f"group {group!r} of topic {topic!r} already exists with different settings ({', '.join(differing)}); use "
            "those, or delete the group first"
        )


@error("replay {name!r} does not exist; list_replays() shows those that do")
class ReplayNotFound(RequestError, LookupError):
    name: str


@error(
    "replay {name!r} already exists with different settings; choose another name "
    "(get_replay({name!r}) shows its settings)"
)
class ReplayExists(RequestError):
    name: str


@error("this broker does not support {call} (feature {feature!r}); describe() lists its features")
class Unsupported(RequestError):
    """The broker lacks the feature that a call belongs to."""

    call: str
    feature: str


CLOSED = "this broker is not open; use it inside `async with heapline.open(...)` or `with heapline.open_sync(...)`"


@error(CLOSED)
class Closed(RequestError):
    """The broker was closed."""


class ConflictError(HeaplineError):
    """Another caller or an event came first. Nothing was changed."""


class LeaseLost(ConflictError):
    """Some leases had ended. `lost` holds their message ids (int); the call succeeded for all others."""

    fields = ("lost", "topic")

    def __init__(self, lost: list[int], topic: str) -> None:
        self.lost, self.topic = lost, topic
        self._explain([str(id) for id in lost[:3]])

    @classmethod
    def showing(cls, lost: list[int], topic: str, shown: list[str]) -> LeaseLost:
        """Return the error with its first ids in the form in which people know them."""
        error = cls(lost, topic)
        error._explain(shown[:3])
        return error

    def _explain(self, shown: list[str]) -> None:
        more = ", …" if len(self.lost) > len(shown) else ""
        self.args = (
            f"the lease of {len(self.lost)} message(s) of topic {self.topic!r} had ended ({', '.join(shown)}{more}): "
            "they were settled before, or the lease expired and they are redelivered; settle each message once, and "
            "extend leases in time or pop with a longer visibility",
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


@error(
    "another subscription took the name of member {member!r} of group {group!r} of topic {topic!r}; stop this "
    "one, or choose another name for it"
)
class MemberReplaced(ConflictError):
    topic: str
    group: str
    member: str


@error(
    "producer {producer_id!r} sent epoch {epoch}, but epoch {current} is open: another process "
    "took this producer's name; stop this one, or choose another name for it"
)
class StaleEpoch(ConflictError):
    producer_id: str
    epoch: int
    current: int


@error(
    "producer {producer_id!r} sent sequence {seq}, but all sequences below {answered_below} were answered; "
    "use a higher sequence for a new message"
)
class StaleSequence(ConflictError):
    producer_id: str
    seq: int
    answered_below: int


@error(
    "{identity} was used before, for message {message_id}, with another payload: "
    "use a new idempotency key or sequence for a new message"
)
class IdempotencyConflict(ConflictError):
    identity: str
    message_id: str


@error("batch {batch_id!r} {decision}, which cannot be undone; use a new batch id for other parts")
class BatchDecided(ConflictError):
    batch_id: str
    decision: str


@error("message {message_id} of topic {topic!r} is leased to a worker; wait until it is acked or the lease ends")
class MessageLeased(ConflictError):
    topic: str
    message_id: str


@error(
    "another process has {path!r} open; to share one queue between processes, run `heapline serve` and connect to it"
)
class DirectoryLocked(ConflictError):
    path: str


class UnavailableError(HeaplineError):
    """Temporarily unavailable; the same call may succeed later."""

    #: False if it is certain that the call never left the client.
    reached: bool = True


@error("{what}: the limit of {limit} is reached; retry later, or raise the limit")
class ResourceExhausted(UnavailableError):
    what: str
    limit: int


@error(
    "the disk is full: enqueues are refused until space is freed; pop, ack and purge still work, "
    "so the queue can be drained"
)
class StorageFull(ResourceExhausted):
    what: str = "free disk space in spare segments"
    limit: int = 2


@error("{what} are over the limit of {limit}: nothing was changed; retry in {retry_after} s")
class RateLimited(ResourceExhausted):
    retry_after: int  # whole seconds


@error(
    "{identity} is in batch {batch_id!r}, which is prepared and not decided, so this may be a duplicate; "
    "retry when that batch is committed or aborted"
)
class BatchInDoubt(UnavailableError):
    identity: str
    batch_id: str


@error(
    "a write to the journal of topic {topic!r} failed ({cause}); the outcome of this call is unknown "
    "and the topic is being reloaded from disk: retry with the same idempotency key"
)
class TopicReloading(UnavailableError):
    topic: str
    cause: str


@error("{what} took longer than its deadline: its outcome is unknown; retry")
class DeadlineExceeded(UnavailableError, TimeoutError):
    what: str


class CorruptionError(HeaplineError):
    """Durable bytes are corrupt. Nothing is guessed; run `heapline journal verify`."""


@error(
    "journal file {path} is damaged at byte {offset}: {detail}. The topic is not served; "
    "see `heapline journal verify`, restore a backup, or run `heapline journal repair`"
)
class JournalCorrupt(CorruptionError):
    path: str
    offset: int
    detail: str


@error("snapshot file {path} is damaged: {detail}; see `heapline journal verify`, or restore a backup")
class SnapshotCorrupt(CorruptionError):
    path: str
    detail: str


@error(
    "the record of message {message_id} of topic {topic!r} ({path} at byte {offset}) is corrupt; "
    "it is not delivered; see `heapline journal verify`"
)
class RecordCorrupt(CorruptionError):
    topic: str
    message_id: str
    path: str
    offset: int


@error("{path} has format version {version}, which this Heapline cannot read; upgrade Heapline")
class UnknownFormat(CorruptionError):
    path: str
    version: int
