"""Settings of a worker pool: names, durations and limits. All workers of a pool should use the same settings.

Durations may be written as text ("30s", "1m30s") or as seconds, and are always read as seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from heapline.assign.errors import BadConfig

#: The prefix becomes part of a key in the store, so only characters that every store accepts.
PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
WORKER_ID_MAX_MAX = 999_999
EXAMPLES = ("development", "production", "high_churn")
TIMEOUTS = ("operation_timeout", "election_timeout", "startup_timeout", "shutdown_timeout")
SECONDS_MAX = 366 * 86400.0
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(value: object, name: str = "duration") -> float:
    """Convert a duration to seconds: a number of seconds, or text such as "30s", "1.5s", "250ms" or "1m30s"."""
    if isinstance(value, str):
        text = value.strip()
        parts = PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise BadConfig(
                f'{name}={value!r} is not a duration; use a form such as "30s" or "1m30s", or a number of seconds'
            )
        found = sum(float(number) * UNITS[unit] for number, unit in parts)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    else:
        raise BadConfig(f'{name}={value!r} is not a duration; use a form such as "30s", or a number of seconds')
    if not (math.isfinite(found) and 0 <= found <= SECONDS_MAX):
        raise BadConfig(f"{name}={value!r} is out of range; it must be from 0 to {SECONDS_MAX:.0f} seconds")
    return found


class Duration:
    """A dataclass field that accepts text or a number and is always read as seconds."""

    def __init__(self, default: float) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._slot = "_" + name

    def __get__(self, instance: Any, owner: type) -> float:
        # A dataclass reads a field's default from the class.
        return self._default if instance is None else float(instance.__dict__[self._slot])

    def __set__(self, instance: Any, value: float | str) -> None:
        instance.__dict__[self._slot] = seconds(value, self._name)


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Number and spacing of retries: of claims, documents, partition listings, subscriptions and hooks.

    After the last retry start() and refresh_partitions() raise. A running worker does not give up: it continues at
    max_delay, or at heartbeat_interval where its lease or the assignment is at stake.
    """

    max_retries: int = 3  # retries after the first attempt
    initial_delay: Duration = Duration(1.0)  # before the first retry
    max_delay: Duration = Duration(30.0)  # the longest delay
    backoff: float = 2.0  # factor from one delay to the next; 1 = constant

    def __post_init__(self) -> None:
        _whole("max_retries", self.max_retries, 0, 1_000_000)
        _between("backoff", self.backoff, 1.0, 1000.0)
        if self.initial_delay > self.max_delay:
            raise BadConfig(f"initial_delay={self.initial_delay:g} must not exceed max_delay={self.max_delay:g}")

    def delay(self, retry: int) -> float:
        """Return the seconds to wait before retry number 0, 1, 2, …"""
        # The cap keeps the power from overflowing a float; max_delay is reached long before.
        return float(min(self.max_delay, self.initial_delay * self.backoff ** min(retry, 64)))

    def endless_delay(self, retry: int) -> float:
        """Return the seconds to wait before retry number 0, 1, 2, …: max_delay once max_retries are used up."""
        return self.delay(retry) if retry < self.max_retries else self.max_delay


@dataclass(frozen=True, kw_only=True)
class AssignmentConfig:
    """The conditions under which partitions may move."""

    min_rebalance_threshold: float = 0.15  # smallest share of the total weight worth moving; 0 to 1
    rebalance_cooldown: Duration = Duration(10.0)  # between two planned rebalances; a crash does not wait for it

    def __post_init__(self) -> None:
        _between("min_rebalance_threshold", self.min_rebalance_threshold, 0.0, 1.0)


SECTIONS: dict[str, type[AssignmentConfig | RetryConfig]] = {"assignment": AssignmentConfig, "retry": RetryConfig}


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a worker pool.

    >>> Config(heartbeat_ttl="15s", heartbeat_interval=5).heartbeat_ttl
    15.0
    """

    worker_id_prefix: str = "worker"  # ids are <prefix>-<number>
    worker_id_min: int = 0  # lowest number
    worker_id_max: int = 99  # highest number; it limits the number of workers
    worker_id_ttl: Duration = Duration(30.0)  # how long a crashed worker's id stays reserved for it
    heartbeat_interval: Duration = Duration(2.0)  # between two lease renewals, and between two polls of the store
    # Length of a lease: a crash is detected after it. A store that takes 4–9 s to fail over ends shorter leases; 15 s
    # outlast a failover.
    heartbeat_ttl: Duration = Duration(6.0)
    cold_start_window: Duration = Duration(30.0)  # wait for more workers when the pool starts
    planned_scale_window: Duration = Duration(10.0)  # wait for further changes when workers join or leave
    restart_detection_ratio: float = 0.5  # below this share of the last workers, assume a restart; 0 to 1
    operation_timeout: Duration = Duration(10.0)  # for one store operation, or one partition listing
    election_timeout: Duration = Duration(5.0)  # for one ElectionAgent call
    startup_timeout: Duration = Duration(30.0)  # for start(): id, election, first assignment
    shutdown_timeout: Duration = Duration(10.0)  # for stop(): hooks, id, leadership
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.worker_id_prefix, str) or not PREFIX.match(self.worker_id_prefix):
            raise BadConfig(
                f"worker_id_prefix={self.worker_id_prefix!r}; use 1 to 64 of the characters a-z A-Z 0-9 _ -, starting "
                "with a letter or digit"
            )
        _whole("worker_id_min", self.worker_id_min, 0, WORKER_ID_MAX_MAX)
        _whole("worker_id_max", self.worker_id_max, self.worker_id_min, WORKER_ID_MAX_MAX)
        _between("restart_detection_ratio", self.restart_detection_ratio, 0.0, 1.0)
        for name in ("heartbeat_interval", *TIMEOUTS):
            if getattr(self, name) <= 0:
                raise BadConfig(f"{name} must be greater than 0")
        if self.heartbeat_ttl < 2 * self.heartbeat_interval:
            raise BadConfig(
                f"heartbeat_ttl={self.heartbeat_ttl:g} must be at least twice heartbeat_interval="
                f"{self.heartbeat_interval:g}; otherwise one late heartbeat ends a lease"
            )
        if self.worker_id_ttl < self.heartbeat_ttl:
            raise BadConfig(
                f"worker_id_ttl={self.worker_id_ttl:g} must not be less than heartbeat_ttl={self.heartbeat_ttl:g}: "
                "an id becomes free only after its worker's lease has ended"
            )
        for name, kind in SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise BadConfig(f"{name} must be {kind.__name__}(…); use Config.from_dict for plain values")

    def worker_ids(self) -> Iterator[str]:
        """Return all possible ids in the order in which they are tried."""
        return (f"{self.worker_id_prefix}-{n}" for n in range(self.worker_id_min, self.worker_id_max + 1))

    @property
    def store_timeout(self) -> float:
        """Seconds for a store operation whose delay could end a lease: short enough to leave time for another try."""
        return min(self.operation_timeout, max(self.heartbeat_interval, self.heartbeat_ttl / 4))

    def to_dict(self) -> dict[str, Any]:
        """Return plain names and values, durations in seconds. `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        given = _known(cls, "config", values)
        for name, kind in SECTIONS.items():
            if name in given and not isinstance(given[name], kind):
                given[name] = kind(**_known(kind, name, given[name]))
        return cls(**given)

    @classmethod
    def from_yaml(cls, source: str | Path) -> Config:
        """Read the text of a YAML document, or the file at a `Path`."""
        try:
            import yaml
        except ImportError:
            raise BadConfig("reading YAML needs PyYAML; install heapline[assign], or use Config.from_dict") from None
        try:
            values = yaml.safe_load(source.read_text(encoding="utf-8") if isinstance(source, Path) else source)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadConfig(f"invalid YAML: {error}") from None
        except OSError as error:
            raise BadConfig(f"cannot read {source}: {error.strerror}") from None
        return cls.from_dict({} if values is None else values)

    @classmethod
    def example(cls, name: str) -> Config:
        """Return an example config by name: development, production (64 workers) or high_churn."""
        return cls.from_yaml(example_text(name))


def example_text(name: str) -> str:
    if name not in EXAMPLES:
        raise BadConfig(f"example config {name!r} does not exist; choose {', '.join(EXAMPLES)}")
    return (files("heapline.assign") / "examples" / f"{name}.yaml").read_text(encoding="utf-8")


def _known(kind: type, what: str, values: object) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise BadConfig(f"{what} must be a mapping of names to values, not {type(values).__name__}")
    names = [each.name for each in fields(kind)]
    if unknown := [str(name) for name in values if name not in names]:
        raise BadConfig(f"{what} has no field {', '.join(unknown)}; its fields are {', '.join(names)}")
    return dict(values)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadConfig(f"{name}={value!r} must be a whole number from {low} to {high}")


def _between(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise BadConfig(f"{name}={value!r} must be a number from {low:g} to {high:g}")
