"""Settings: the config of a topic (part of the data), of a consumer group, and of a broker (of one process).

All processes that serve a topic must agree on its `TopicConfig`, so it is stored with the topic. A `BrokerConfig` is
local to one process and is never stored. Only `cli/` reads flags and environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from heapline.contract.check import build, compile_check, describe_types, fail
from heapline.contract.errors import BadName, BadRequest, Unsupported

C = TypeVar("C", "TopicConfig", "GroupConfig", "BrokerConfig")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
DEFAULT_NAMESPACE = "default"
PASSING = "sdk-"  # how the names of producers begin that last as long as a client: see core/dedup/sequences.py

PARTITIONS_MAX = 1024  # 10 bits of an id
PAYLOAD_BYTES_MAX = (4 << 20) - (128 << 10)  # a frame, which any replicated log must carry, is 4 MiB − 64 KiB
MAX_RETRIES_MAX = 250  # attempts are 8 bits of a position
SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 1 << 20, 1 << 30
AGE_MAX = 100 * 366 * 86400.0  # seconds
#: The features (contract/call.py) that some settings need. A broker without them accepts only the default.
PARTITIONS, FAIRNESS, LOG = {"feature": "partitions"}, {"feature": "fairness"}, {"feature": "log"}
EVENTS = {"feature": "events"}

# The types of settings, with their bounds and the feature that they need.
Nearness = Annotated[int, Meta(ge=1, le=1 << 31)]
Lease = Annotated[float, Meta(ge=0.001, le=366 * 86400.0)]
Window = Annotated[float, Meta(ge=0.0, le=366 * 86400.0)]
Age = Annotated[float, Meta(ge=0.0, le=AGE_MAX)]
Retries = Annotated[int, Meta(ge=0, le=MAX_RETRIES_MAX)]
PayloadBytes = Annotated[int, Meta(ge=1, le=PAYLOAD_BYTES_MAX)]
Inflight = Annotated[int, Meta(ge=0, le=1 << 31)]
Backlog = Annotated[int, Meta(ge=0, le=1 << 40)]
Letters = Annotated[int, Meta(ge=0, le=1 << 40)]
PartitionCount = Annotated[int, Meta(ge=1, le=PARTITIONS_MAX, extra=PARTITIONS)]
PartitionNumber = Annotated[int, Meta(ge=0, le=PARTITIONS_MAX - 1)]
Strategy = Annotated[Literal["best_first", "round_robin", "weighted"], Meta(extra=PARTITIONS)]
Weights = Annotated[dict[PartitionNumber, Annotated[float, Meta(ge=0.001, le=1000.0)]], Meta(extra=PARTITIONS)]
Staleness = Annotated[float, Meta(ge=0.0, le=86400.0, extra=PARTITIONS)]
Freshness = Annotated[float, Meta(ge=0.0, le=3600.0, extra=PARTITIONS)]
Fairness = Annotated[Literal["none", "keys"], Meta(extra=FAIRNESS)]
KeyInflight = Annotated[int, Meta(ge=0, le=1 << 31, extra=FAIRNESS)]
PopRate = Annotated[float, Meta(ge=0.0, le=1e7, extra=FAIRNESS)]
Streams = Annotated[bool, Meta(extra=LOG)]
KeptSeconds = Annotated[float, Meta(ge=0.0, le=AGE_MAX, extra=LOG)]
Retention = Annotated[float, Meta(ge=0.0, le=AGE_MAX, extra=EVENTS)]
KeptAmount = Annotated[int, Meta(ge=0, le=1 << 60, extra=LOG)]
SegmentBytes = Annotated[int, Meta(ge=SEGMENT_BYTES_MIN, le=SEGMENT_BYTES_MAX, extra=LOG)]
Fsync = Annotated[Literal["commit", "interval", "os"], Meta(extra=LOG)]
FsyncInterval = Annotated[float, Meta(ge=0.001, le=60.0, extra=LOG)]
Tick = Annotated[float, Meta(ge=0.01, le=1.0, extra=LOG)]


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wait after a failure: ``min(max, base · factor^(attempts−1))``, spread by ±jitter.

    >>> Backoff(base=5.0, max=60.0)
    Backoff(base=5.0, factor=2.0, max=60.0, jitter=0.2)
    """

    base: float = 1.0  # seconds before the first retry; 0 = immediately
    factor: float = 2.0  # growth per attempt; 1 = constant
    max: float = 600.0  # seconds, the longest wait
    jitter: float = 0.2  # share of the wait that is random, so that failures are not retried in step; 0 = none

    def validate(self) -> None:
        # The config is stored as JSON, which does not have infinity.
        finite = math.isfinite(self.max) and math.isfinite(self.factor)
        if not (finite and 0 <= self.base <= self.max and self.factor >= 1 and 0 <= self.jitter <= 1):
            raise BadRequest(f"{self} is not a backoff; it needs 0 <= base <= max, factor >= 1 and 0 <= jitter <= 1")


class Aging(msgspec.Struct, frozen=True, tag="aging", forbid_unknown_fields=True):
    """Waiting messages become more urgent by `rate` units of priority per second."""

    rate: Annotated[float, Meta(gt=0.0, le=1e6)]


BackoffSetting = Annotated[Backoff, Meta(extra={"wanted": "a Backoff with base, factor, max and jitter"})]


def aging(rate: float) -> Aging:
    return Aging(rate)


AGING_WANTED = "'strict', or aging with a rate over 0 and at most 1000000"
Ordering = Annotated[Literal["strict"] | Aging, Meta(extra={"wanted": AGING_WANTED})]


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["min", "max"] = "min"  # which priority is served first: the smallest or the largest. Fixed.
    partitions: PartitionCount = (
        1  # 1 to 1024. Order holds over all of them; more of them spread keys. Can grow, never shrink.
    )
    k: Nearness = 1  # a popped message is among the k best; 1 = exact order
    strategy: Strategy = "best_first"  # how pops choose among partitions; only
    # best_first keeps the order over all of them
    partition_weights: Weights = {}  # of the weighted strategy: partition -> share; 1 where none is given
    max_staleness: Staleness = 0.0  # seconds after which a partition's candidate is read again; 0 = no limit
    min_freshness: Freshness = 0.0  # seconds that a new best message waits before it is delivered; 0 = none
    ordering: Ordering = "strict"  # strict, or aging(rate): waiting makes more urgent. Fixed.
    streams: Streams = True  # record which messages became due, so that groups can read the topic as a stream. Fixed.
    visibility_default: Lease = 30.0  # seconds a popped message is leased when the pop does not say
    lease_max: Lease = 12 * 3600.0  # seconds from its pop past which a lease cannot be extended
    max_retries_default: Retries = 16  # deliveries after the first before a message is dead; 0 to 250
    backoff: BackoffSetting = Backoff()  # waits between retries
    dlq: bool = True  # keep dead messages in the dead-letter queue; False = drop them, recorded
    dlq_retention: Age = 30 * 86400.0  # seconds that a dead letter is kept; 0 = forever
    dlq_max_letters: Letters = 0  # above it the oldest are deleted; 0 = no limit
    dlq_max_bytes: KeptAmount = 0  # of dead letters, above which the oldest are deleted; 0 = no limit
    retention: Retention = 0.0  # seconds to keep the journal of removed messages; 0 = until reclaimed. In Postgres:
    # seconds to keep what happened to messages; 0 = record nothing
    retention_bytes: KeptAmount = 0  # bytes of journal above which the oldest part is deleted, whatever its age;
    # with retention = 0 the size alone decides; 0 = no limit
    retention_margin: KeptAmount = 0  # rows to keep below the lowest offset of the groups that hold the journal
    retention_hard_bytes: KeptAmount = 0  # bytes above which even rows that groups have not read are deleted;
    # live messages are never deleted; 0 = no limit
    retention_hard_age: KeptSeconds = 0.0  # seconds after which unread rows are deleted in the same way; 0 = no limit
    dedup_window: Window = 24 * 3600.0  # seconds that sequences and idempotency keys are remembered
    max_payload_bytes: PayloadBytes = 1 << 20  # a larger payload is rejected; at most 4 MiB − 128 KiB
    max_inflight: Inflight = 0  # leased messages at the same time; 0 = no limit
    max_backlog: Backlog = 0  # ready + delayed messages; 0 = no limit
    fairness: Fairness = "none"  # keys: within a priority the fairness keys take turns. Fixed.
    max_inflight_per_key: KeyInflight = 0  # leased messages of one fairness key; 0 = no limit. Needs fairness="keys".
    max_pops_per_second: PopRate = 0.0  # messages delivered, best first; 0 = no limit, else 0.001 to 1e7
    segment_bytes: SegmentBytes = 64 << 20  # size of a journal file; 1 MiB to 1 GiB. Fixed.
    fsync: Fsync = "commit"  # the last two give up the durability promises
    fsync_interval: FsyncInterval = 0.05  # seconds between syncs when fsync is "interval"
    tick: Tick = 0.1  # seconds; how late a timer may be when idle; 0.01 to 1
    compression: Literal["none", "zstd"] = "none"  # of bodies over 4 KiB between clients and servers that both have
    # zstd (over gRPC: gzip of answers); what is stored is not compressed

    def validate(self) -> None:
        """Check what depends on several settings; see check_config."""
        if self.visibility_default > self.lease_max:
            fail("visibility_default", f"at most lease_max, {self.lease_max:g}", self.visibility_default)
        if 0 < self.retention_hard_bytes < self.retention_bytes or 0 < self.retention_hard_age < self.retention:
            raise BadRequest(
                "retention_hard_bytes and retention_hard_age end what retention_bytes and retention keep: "
                "they must not be smaller"
            )
        if self.max_payload_bytes > self.segment_bytes // 2:
            fail("max_payload_bytes", f"at most half of segment_bytes, {self.segment_bytes}", self.max_payload_bytes)
        if 0 < self.max_pops_per_second < 0.001:
            fail("max_pops_per_second", "0 or a number from 0.001 to 10000000", self.max_pops_per_second)
        if self.fairness == "none" and self.max_inflight_per_key:
            raise BadRequest(
                'max_inflight_per_key counts leases by fairness key; create the topic with fairness="keys"'
            )
        if self.fairness == "keys" and isinstance(self.ordering, Aging):
            raise BadRequest('fairness="keys" gives turns within a priority, which aging does not keep: choose one')
        if self.segment_bytes % 4096:
            fail("segment_bytes", "a multiple of 4096", self.segment_bytes)


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a consumer group, stored with the group."""

    ack_timeout: Lease = 30.0  # seconds after which a delivery that was not acked counts as failed
    max_retries: Retries = 16  # deliveries after the first before a row is one of the group's dead letters; 0 to 250
    backoff: BackoffSetting = Backoff()  # waits between deliveries of one row
    member_lease: Lease = 30.0  # seconds without a heartbeat after which a member is removed
    unused_after: Age = 7 * 86400.0  # seconds without members or acks after which it no longer holds the journal
    observer: bool = False  # only shows its lag: has no members and never holds the journal


#: Fields that cannot change after a topic is created, because its keys, positions and log depend on them.
FIXED_FIELDS = ("mode", "ordering", "streams", "segment_bytes", "fairness")
#: Fields that change when the topic's journal is reopened, which update_topic does automatically.
REOPENING_FIELDS = ("fsync", "tick")


@cache
def feature_fields() -> dict[str, str]:
    """Return the settings that belong to a feature (contract/call.py), as their types say, and that feature."""
    hints = get_type_hints(TopicConfig, include_extras=True)
    metas = {name: meta for name, hint in hints.items() for meta in getattr(hint, "__metadata__", ())}
    return {name: meta.extra["feature"] for name, meta in metas.items() if "feature" in (meta.extra or {})}


def check_features(config: TopicConfig, features: Collection[str]) -> None:
    """Raise Unsupported for a setting that needs a feature which the broker lacks."""
    default = TopicConfig()
    for name, feature in feature_fields().items():
        value = getattr(config, name)
        if feature not in features and value != getattr(default, name):
            raise Unsupported(f"{name}={value!r}", feature)


def make_config(fields: dict[str, Any], base: TopicConfig | None = None) -> TopicConfig:
    """Return a validated config from keywords, over `base` (or the defaults)."""
    if base is None and "max_payload_bytes" not in fields and isinstance(fields.get("segment_bytes"), int):
        # Two of the largest messages must fit into a segment, so small segments mean small messages.
        default = TopicConfig().max_payload_bytes
        fields = {"max_payload_bytes": min(default, max(1, fields["segment_bytes"] // 2)), **fields}
    return _make("topic", fields, base or TopicConfig())


def make_group_config(fields: Mapping[str, Any], base: GroupConfig | None = None) -> GroupConfig:
    """Return a validated config from keywords, over `base` (or the defaults)."""
    return _make("group", fields, base or GroupConfig())


def parse_topic(name: str) -> tuple[str, str]:
    """`namespace/name`, or just `name` in the default namespace."""
    if not isinstance(name, str):
        raise BadName("topic", repr(name))
    namespace, slash, rest = name.partition("/")
    if not slash:
        namespace, rest = DEFAULT_NAMESPACE, name
    if not NAME.match(namespace) or not NAME.match(rest):
        raise BadName("topic", name)
    return namespace, rest


def is_topic(name: str) -> bool:
    """Whether this is the name of a topic, in either spelling."""
    namespace, slash, rest = name.partition("/")
    return NAME.match(namespace) is not None and (not slash or NAME.match(rest) is not None)


def canonical_topic(name: str) -> str:
    """Return the name under which a topic is known: without the default namespace.

    >>> canonical_topic("default/jobs"), canonical_topic("shop/jobs")
    ('jobs', 'shop/jobs')
    """
    namespace, rest = parse_topic(name)
    return rest if namespace == DEFAULT_NAMESPACE else f"{namespace}/{rest}"


def short(name: str) -> str:
    """Return the name of a topic or schedule without the default namespace, whether or not it is valid.

    >>> short("default/nightly"), short("shop/nightly")
    ('nightly', 'shop/nightly')
    """
    return name.removeprefix(f"{DEFAULT_NAMESPACE}/")


def check_names(what: str, fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise BadRequest for a setting that does not exist."""
    for name in fields:
        if name not in kind.__struct_fields__:
            raise BadRequest(f"a {what} has no setting {name!r}; it has {', '.join(kind.__struct_fields__)}")


def _make(what: str, fields: Mapping[str, Any], base: C) -> C:
    check_names(what, fields, type(base))
    plain = msgspec.to_builtins(base) | plain_settings(fields)
    config = build(type(base), plain)
    check_config(config)
    return config


def plain_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain values; Backoff and Aging as mappings. Other objects stay, and are rejected later."""
    return {name: msgspec.to_builtins(v) if isinstance(v, msgspec.Struct) else v for name, v in fields.items()}


def check_config(config: Any) -> None:
    """Raise BadRequest for the first setting that is invalid."""
    kind = type(config)
    if kind not in _CHECKS:
        _CHECKS[kind] = compile_check(kind)
    _CHECKS[kind](config)


_CHECKS: dict[Any, Callable[[Any], None]] = {}


# The types of a broker's settings.
Memory = Annotated[int, Meta(ge=0, le=1 << 50)]
SomeMemory = Annotated[int, Meta(ge=1, le=1 << 50)]
SomeBytes = Annotated[int, Meta(ge=1, le=1 << 60)]
SpareBytes = Annotated[int, Meta(ge=0, le=SEGMENT_BYTES_MAX)]
Day = Annotated[float, Meta(ge=0.0, le=86400.0)]
Span = Annotated[float, Meta(ge=0.0, le=1e12)]
Interval = Annotated[float, Meta(ge=0.001, le=1e12)]
Slice = Annotated[int, Meta(ge=1, le=1 << 30)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Steps = Annotated[int, Meta(ge=0, le=1000)]


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache_bytes: Memory = 64 << 20  # recent records kept in memory over all topics
    uncommitted_bytes_max: SomeMemory = 64 << 20  # bytes of a topic waiting for the disk before enqueues wait
    uncommitted_wait: Day = 10.0  # seconds an enqueue waits for that before ResourceExhausted
    snapshot_bytes: SomeBytes = 128 << 20  # journal bytes after which a topic is snapshotted
    snapshot_interval: Span = 600.0  # seconds after which a changed topic is snapshotted
    fire_slice: Slice = 4096  # timers that one commit fires; a quarter of that while calls wait
    rewrite_below: Share = 0.25  # live share of a segment under which its messages are rewritten forward; 0 = never
    reclaim_interval: Interval = 5.0  # seconds between checks for segments to reclaim
    spare_segment_bytes: SpareBytes = (
        64 << 20
    )  # size of each of the two spare segments that serve a full disk; 0 = none
    batch_timeout: Interval = 86400.0  # seconds after its last part was prepared that an undecided batch is aborted
    gather_steps: Steps = (
        0  # steps of the event loop that calls gather for a turn, and while the disk is busy; 0 = none:
    )
    # calls in this process arrive together anyway, those of a server one by one
    series: bool = False  # keep depths and rates of the last day, for charts; a server does
    decision_retention: Span = 7 * 86400.0  # seconds that a committed batch is remembered, for repeated commits

    def validate(self) -> None:
        if 0 < self.spare_segment_bytes < SEGMENT_BYTES_MIN:
            wanted = f"0 or an integer from {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
            fail("spare_segment_bytes", wanted, self.spare_segment_bytes)


describe_types(TopicConfig, GroupConfig, BrokerConfig)


def make_broker_config(fields: dict[str, Any]) -> BrokerConfig:
    """Return a validated config from keywords, over the defaults."""
    return _make("broker", fields, BrokerConfig())
