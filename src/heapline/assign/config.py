"""What can be set: names, times and limits of a crowd of workers. All workers of one crowd should be set alike.

Durations are given as "30s" or as seconds, and are seconds (float) when read. Nothing here reads a clock or decides.
"""

# A Duration is a descriptor, made once for its class and shared as it should be.
# ruff: noqa: RUF009

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from heapline.assign.durations import Duration
from heapline.assign.errors import BadConfig

#: Part of a key of the store, so letters that every store takes.
PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
WORKER_ID_MAX_MAX = 999_999
EXAMPLES = ("development", "production", "high_churn")


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """How often, and how long apart, what failed is tried again: ids, documents, discovery, subscriptions, hooks."""

    max_retries: int = 3  # tries after the first
    initial_delay: Duration = Duration(1.0)  # before the first retry
    max_delay: Duration = Duration(30.0)  # the longest wait
    backoff: float = 2.0  # growth from one wait to the next; 1 = constant

    def __post_init__(self) -> None:
        _whole("max_retries", self.max_retries, 0, 1_000_000)
        _between("backoff", self.backoff, 1.0, 1000.0)
        if self.initial_delay > self.max_delay:
            raise BadConfig(f"initial_delay={self.initial_delay:g} must not be over max_delay={self.max_delay:g}")

    def delay(self, retry: int) -> float:
        """Seconds to wait before retry number 0, 1, 2, …"""
        # Past 64 doublings of anything the longest wait is reached; without the bound a float would overflow.
        return float(min(self.max_delay, self.initial_delay * self.backoff ** min(retry, 64)))


@dataclass(frozen=True, kw_only=True)
class AssignmentConfig:
    """When partitions are moved."""

    min_rebalance_threshold: float = 0.15  # share of the weight that must be up for moving, else it stays; 0 to 1
    rebalance_cooldown: Duration = Duration(10.0)  # between two planned rebalances; a crash does not wait for it

    def __post_init__(self) -> None:
        _between("min_rebalance_threshold", self.min_rebalance_threshold, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """
    >>> Config(heartbeat_ttl="15s", heartbeat_interval=5).heartbeat_ttl
    15.0
    """

    worker_id_prefix: str = "worker"  # ids are prefix-number
    worker_id_min: int = 0  # the first number
    worker_id_max: int = 99  # the last; there can be no more workers than numbers
    worker_id_ttl: Duration = Duration(30.0)  # a crashed worker's id is kept for it so long, then others take it
    heartbeat_interval: Duration = Duration(2.0)  # between two renewals of a worker's lease, and between two looks
    heartbeat_ttl: Duration = Duration(6.0)  # a lease's length: a crash is noticed after it. A store that needs 4–9 s
    # to fail over ends leases that are shorter than that; 15 s ride it out.
    cold_start_window: Duration = Duration(30.0)  # waited for more workers when the crowd starts
    planned_scale_window: Duration = Duration(10.0)  # the same when some come or leave
    restart_detection_ratio: float = 0.5  # fewer of the last workers than this share are there: a restart; 0 to 1
    operation_timeout: Duration = Duration(10.0)  # for one operation on the store, or one listing of partitions
    election_timeout: Duration = Duration(5.0)  # for one call of an ElectionAgent
    startup_timeout: Duration = Duration(30.0)  # for start(): id, election, first assignment
    shutdown_timeout: Duration = Duration(10.0)  # for stop(): hooks, id, leadership
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.worker_id_prefix, str) or not PREFIX.match(self.worker_id_prefix):
            raise BadConfig(
                f"worker_id_prefix={self.worker_id_prefix!r}: use 1 to 64 of the letters a-z A-Z 0-9 _ -, starting "
                "with a letter or digit"
            )
        _whole("worker_id_min", self.worker_id_min, 0, WORKER_ID_MAX_MAX)
        _whole("worker_id_max", self.worker_id_max, self.worker_id_min, WORKER_ID_MAX_MAX)
        _between("restart_detection_ratio", self.restart_detection_ratio, 0.0, 1.0)
        for name in ("heartbeat_interval", "operation_timeout", "election_timeout", "startup_timeout",
                     "shutdown_timeout"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise BadConfig(f"{name} must be more than 0")
        if self.heartbeat_ttl < 2 * self.heartbeat_interval:
            raise BadConfig(
                f"heartbeat_ttl={self.heartbeat_ttl:g} must be at least twice heartbeat_interval="
                f"{self.heartbeat_interval:g}, or one heartbeat that comes late ends a lease"
            )
        if self.worker_id_ttl < self.heartbeat_ttl:
            raise BadConfig(
                f"worker_id_ttl={self.worker_id_ttl:g} must not be under heartbeat_ttl={self.heartbeat_ttl:g}: an id "
                "is not free before its worker's lease has ended"
            )
        for name, kind in (("assignment", AssignmentConfig), ("retry", RetryConfig)):
            if not isinstance(getattr(self, name), kind):
                raise BadConfig(f"{name} must be {kind.__name__}(…); Config.from_dict takes names and values")

    def worker_ids(self) -> Iterator[str]:
        """All ids that there are, in the order in which they are tried."""
        return (f"{self.worker_id_prefix}-{n}" for n in range(self.worker_id_min, self.worker_id_max + 1))

    def to_dict(self) -> dict[str, Any]:
        """Plain names and values, durations in seconds; `from_dict` makes the same config of it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        given = _known(cls, "config", values)
        for name, kind in (("assignment", AssignmentConfig), ("retry", RetryConfig)):
            if name in given and not isinstance(given[name], kind):
                given[name] = kind(**_known(kind, name, given[name]))
        return cls(**given)

    @classmethod
    def from_yaml(cls, source: str | Path) -> Config:
        """From the text of a YAML document, or from the file at a `Path`."""
        try:
            import yaml
        except ImportError:
            raise BadConfig("reading YAML needs PyYAML: install heapline[assign], or use Config.from_dict") from None
        try:
            values = yaml.safe_load(source.read_text(encoding="utf-8") if isinstance(source, Path) else source)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadConfig(f"this is not YAML: {error}") from None
        except OSError as error:
            raise BadConfig(f"{source} cannot be read: {error.strerror}") from None
        return cls.from_dict({} if values is None else values)

    @classmethod
    def example(cls, name: str) -> Config:
        """One of the configs that come with Heapline: development, production (64 workers), high_churn."""
        return cls.from_yaml(example_text(name))


def example_text(name: str) -> str:
    if name not in EXAMPLES:
        raise BadConfig(f"there is no example config {name!r}; there are {', '.join(EXAMPLES)}")
    return (files("heapline.assign") / "examples" / f"{name}.yaml").read_text(encoding="utf-8")


def _known(kind: type, what: str, values: object) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise BadConfig(f"{what} must hold names and values, not {type(values).__name__}")
    names = [each.name for each in fields(kind)]
    if unknown := [str(name) for name in values if name not in names]:
        raise BadConfig(f"{what} has no {', '.join(unknown)}; it has {', '.join(names)}")
    return dict(values)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadConfig(f"{name}={value!r} must be a whole number from {low} to {high}")


def _between(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise BadConfig(f"{name}={value!r} must be a number from {low:g} to {high:g}")
