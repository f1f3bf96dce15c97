"""Settings: the config of a topic (part of the data), of a consumer group, and of a broker (of one process).

All processes that serve a topic must agree on its `TopicConfig`, so it is stored with the topic. A `BrokerConfig` is
local to one process and is never stored. Only `cli/` reads flags and environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from heapline.contract.errors import BadName, BadRequest, Unsupported

C = TypeVar("C", "TopicConfig", "GroupConfig", "BrokerConfig")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
DEFAULT_NAMESPACE = "default"
PASSING = "sdk-"  # how the names of producers begin that last as long as a client: see core/dedup/sequences.py

PARTITIONS_MAX = 1024  # 10 bits of an id
PAYLOAD_BYTES_MAX = (4 << 20) - (128 << 10)  # a frame, which any replicated log must carry, is 4 MiB − 64 KiB
MAX_RETRIES_MAX = 250  # attempts are 8 bits of a position
SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 1 << 20, 1 << 30


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

    rate: float


def aging(rate: float) -> Aging:
    return Aging(rate)


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["min", "max"] = "min"  # which priority is served first: the smallest or the largest. Fixed.
    partitions: int = 1  # 1 to 1024. Order holds over all of them; more of them spread keys. Can grow, never shrink.
    k: int = 1  # a popped message is among the k best; 1 = exact order
    strategy: Literal["best_first", "round_robin", "weighted"] = "best_first"  # how pops choose among partitions; only
    # best_first keeps the order over all of them
    partition_weights: dict[int, float] = {}  # of the weighted strategy: partition -> share; 1 where none is given
    max_staleness: float = 0.0  # seconds after which a partition's candidate is read again; 0 = no limit
    min_freshness: float = 0.0  # seconds that a new best message waits before it is delivered; 0 = none
    ordering: Literal["strict"] | Aging = "strict"  # strict, or aging(rate): waiting makes more urgent. Fixed.
    streams: bool = True  # record which messages became due, so that groups can read the topic as a stream. Fixed.
    visibility_default: float = 30.0  # seconds a popped message is leased when the pop does not say
    lease_max: float = 12 * 3600.0  # seconds from its pop past which a lease cannot be extended
    max_retries_default: int = 16  # deliveries after the first before a message is dead; 0 to 250
    backoff: Backoff = Backoff()  # waits between retries
    dlq: bool = True  # keep dead messages in the dead-letter queue; False = drop them, recorded
    retention: float = 0.0  # seconds to keep the journal of removed messages; 0 = until reclaimed
    retention_bytes: int = 0  # bytes of journal above which the oldest part is deleted, whatever its age;
    # with retention = 0 the size alone decides; 0 = no limit
    retention_margin: int = 0  # rows to keep below the lowest offset of the groups that hold the journal
    retention_hard_bytes: int = 0  # bytes above which even rows that groups have not read are deleted;
    # live messages are never deleted; 0 = no limit
    retention_hard_age: float = 0.0  # seconds after which unread rows are deleted in the same way; 0 = no limit
    dedup_window: float = 24 * 3600.0  # seconds that sequences and idempotency keys are remembered
    max_payload_bytes: int = 1 << 20  # a larger payload is rejected; at most 4 MiB − 128 KiB
    max_inflight: int = 0  # leased messages at the same time; 0 = no limit
    max_backlog: int = 0  # ready + delayed messages; 0 = no limit
    fairness: Literal["none", "keys"] = "none"  # keys: within a priority the fairness keys take turns. Fixed.
    max_inflight_per_key: int = 0  # leased messages of one fairness key; 0 = no limit. Needs fairness="keys".
    max_pops_per_second: float = 0.0  # messages handed out, best first; 0 = no limit, else 0.001 to 1e7
    segment_bytes: int = 64 << 20  # size of a journal file; 1 MiB to 1 GiB. Fixed.
    fsync: Literal["commit", "interval", "os"] = "commit"  # the last two give up the durability promises
    fsync_interval: float = 0.05  # seconds between syncs when fsync is "interval"
    tick: float = 0.1  # seconds; how late a timer may be when idle; 0.01 to 1
    compression: Literal["none", "zstd"] = "none"  # of bodies over 4 KiB between clients and servers that both have
    # zstd (over gRPC: gzip of answers); what is stored is not compressed

    def validate(self) -> None:
        self.backoff.validate()
        _between("partitions", self.partitions, 1, PARTITIONS_MAX)
        _between("k", self.k, 1, 1 << 31)
        _between("max_staleness", self.max_staleness, 0, 86400)
        _between("min_freshness", self.min_freshness, 0, 3600)
        for partition, weight in self.partition_weights.items():
            _between("a partition of partition_weights", partition, 0, PARTITIONS_MAX - 1)
            _between(f"the weight of partition {partition}", weight, 0.001, 1000)
        _between("lease_max", self.lease_max, 0.001, 366 * 86400)
        _between("visibility_default", self.visibility_default, 0.001, self.lease_max)
        _between("max_retries_default", self.max_retries_default, 0, MAX_RETRIES_MAX)
        _between("retention", self.retention, 0, 100 * 366 * 86400)
        _between("retention_bytes", self.retention_bytes, 0, 1 << 60)
        _between("retention_margin", self.retention_margin, 0, 1 << 60)
        _between("retention_hard_bytes", self.retention_hard_bytes, 0, 1 << 60)
        _between("retention_hard_age", self.retention_hard_age, 0, 100 * 366 * 86400)
        if 0 < self.retention_hard_bytes < self.retention_bytes or 0 < self.retention_hard_age < self.retention:
            raise BadRequest(
                "retention_hard_bytes and retention_hard_age end what retention_bytes and retention keep: "
                "they must not be smaller"
            )
        _between("dedup_window", self.dedup_window, 0, 366 * 86400)
        _between("max_payload_bytes", self.max_payload_bytes, 1, min(PAYLOAD_BYTES_MAX, self.segment_bytes // 2))
        _between("max_inflight", self.max_inflight, 0, 1 << 31)
        _between("max_backlog", self.max_backlog, 0, 1 << 40)
        _between("max_inflight_per_key", self.max_inflight_per_key, 0, 1 << 31)
        if self.max_pops_per_second:
            _between("max_pops_per_second", self.max_pops_per_second, 0.001, 1e7)
        _between("segment_bytes", self.segment_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
        _between("fsync_interval", self.fsync_interval, 0.001, 60)
        _between("tick", self.tick, 0.01, 1.0)
        if self.fairness == "none" and self.max_inflight_per_key:
            raise BadRequest(
                'max_inflight_per_key counts leases by fairness key; create the topic with fairness="keys"'
            )
        if self.fairness == "keys" and isinstance(self.ordering, Aging):
            raise BadRequest('fairness="keys" gives turns within a priority, which aging does not keep: choose one')
        if self.segment_bytes % 4096:
            raise BadRequest(f"segment_bytes={self.segment_bytes} must be a multiple of 4096")
        if isinstance(self.ordering, Aging) and not (0 < self.ordering.rate <= 1e6):
            raise BadRequest(f"aging({self.ordering.rate}): the rate must be over 0 and at most 1e6 units per second")


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a consumer group, stored with the group."""

    ack_timeout: float = 30.0  # seconds after which a delivery that was not acked counts as failed
    max_retries: int = 16  # deliveries after the first before a row is one of the group's dead letters; 0 to 250
    backoff: Backoff = Backoff()  # waits between deliveries of one row
    member_lease: float = 30.0  # seconds without a heartbeat after which a member is removed
    unused_after: float = 7 * 86400.0  # seconds without members or acks after which it no longer holds the journal
    observer: bool = False  # only shows its lag: has no members and never holds the journal

    def validate(self) -> None:
        self.backoff.validate()
        _between("ack_timeout", self.ack_timeout, 0.001, 366 * 86400)
        _between("max_retries", self.max_retries, 0, MAX_RETRIES_MAX)
        _between("member_lease", self.member_lease, 0.001, 366 * 86400)
        _between("unused_after", self.unused_after, 0, 100 * 366 * 86400)


#: Fields that cannot change after a topic is created, because its keys, positions and log depend on them.
FIXED_FIELDS = ("mode", "ordering", "streams", "segment_bytes", "fairness")
#: Fields that change when the topic's journal is reopened, which update_topic does automatically.
REOPENING_FIELDS = ("fsync", "tick")

#: Settings that belong to a feature (contract/call.py). A broker without it accepts only their default.
FEATURE_FIELDS = {
    "partitions": "partitions",
    "strategy": "partitions",
    "partition_weights": "partitions",
    "max_staleness": "partitions",
    "min_freshness": "partitions",
    "fairness": "fairness",
    "max_inflight_per_key": "fairness",
    "max_pops_per_second": "fairness",
    "streams": "log",
    "retention": "log",
    "retention_bytes": "log",
    "retention_margin": "log",
    "retention_hard_bytes": "log",
    "retention_hard_age": "log",
    "segment_bytes": "log",
    "fsync": "log",
    "fsync_interval": "log",
    "tick": "log",
}


def check_features(config: TopicConfig, features: Collection[str]) -> None:
    """Raise Unsupported for a setting that needs a feature which the broker lacks."""
    default = TopicConfig()
    for name, feature in FEATURE_FIELDS.items():
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


def check_names(what: str, fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise BadRequest for a setting that does not exist."""
    for name in fields:
        if name not in kind.__struct_fields__:
            raise BadRequest(f"a {what} has no setting {name!r}; it has {', '.join(kind.__struct_fields__)}")


def _make(what: str, fields: Mapping[str, Any], base: C) -> C:
    check_names(what, fields, type(base))
    try:
        plain = msgspec.to_builtins(base) | {name: msgspec.to_builtins(value) for name, value in fields.items()}
        config = msgspec.convert(plain, type(base))
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequest(f"invalid settings of a {what}: {error}") from None
    config.validate()
    return config


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{name}={value} is out of range: it must be {low} to {high}")


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache_bytes: int = 64 << 20  # recent records kept in memory over all topics
    uncommitted_bytes_max: int = 64 << 20  # bytes of a topic waiting for the disk before enqueues wait
    uncommitted_wait: float = 10.0  # seconds an enqueue waits for that before ResourceExhausted
    snapshot_bytes: int = 128 << 20  # journal bytes after which a topic is snapshotted
    snapshot_interval: float = 600.0  # seconds after which a changed topic is snapshotted
    fire_slice: int = 4096  # timers that one commit fires; a quarter of that while calls wait
    rewrite_below: float = 0.25  # live share of a segment under which its messages are rewritten forward; 0 = never
    reclaim_interval: float = 5.0  # seconds between checks for segments to reclaim
    spare_segment_bytes: int = 64 << 20  # size of each of the two spare segments that serve a full disk; 0 = none
    batch_timeout: float = 86400.0  # seconds after its last part was prepared that an undecided batch is aborted
    gather_steps: int = 0  # steps of the event loop that calls gather for a turn, and while the disk is busy; 0 = none:
    # callers in this process come together by themselves, those of a server one by one
    decision_retention: float = 7 * 86400.0  # seconds that a committed batch is remembered, for repeated commits

    def validate(self) -> None:
        _between("cache_bytes", self.cache_bytes, 0, 1 << 50)
        _between("uncommitted_bytes_max", self.uncommitted_bytes_max, 1, 1 << 50)
        _between("uncommitted_wait", self.uncommitted_wait, 0, 86400)
        _between("snapshot_bytes", self.snapshot_bytes, 1, 1 << 60)
        _between("snapshot_interval", self.snapshot_interval, 0, 1e12)
        _between("fire_slice", self.fire_slice, 1, 1 << 30)
        _between("rewrite_below", self.rewrite_below, 0, 1)
        _between("reclaim_interval", self.reclaim_interval, 0.001, 1e12)
        _between("batch_timeout", self.batch_timeout, 0.001, 1e12)
        _between("decision_retention", self.decision_retention, 0, 1e12)
        _between("gather_steps", self.gather_steps, 0, 1000)
        if self.spare_segment_bytes:
            _between("spare_segment_bytes", self.spare_segment_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)


def make_broker_config(fields: dict[str, Any]) -> BrokerConfig:
    """Return a validated config from keywords, over the defaults."""
    return _make("broker", fields, BrokerConfig())
