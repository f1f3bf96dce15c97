"""The features of the Postgres broker, and the settings of one node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta

from heapline.contract.check import build, describe_types
from heapline.contract.config import check_config, check_names
from heapline.contract.errors import BadRequest

#: The features of the contract that this broker has.
FEATURES = frozenset({"queue", "schedules", "batches", "scan", "events"})
#: `k` of topics that MQueue's API creates: as there, many messages are prefetched.
MQUEUE_K = 1000
SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}\Z")
SHARDS_MAX = 1024
SCHEMES = ("postgresql://", "postgres://")
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


# The types of settings. Errors do not repeat URLs, which may contain passwords.
Urls = Annotated[tuple[str, ...], Meta(extra={"wanted": "secret a list of URLs"})]
Url = Annotated[str, Meta(extra={"wanted": "secret a URL"})]
Connections = Annotated[int, Meta(ge=2, le=1000)]
Poll = Annotated[float, Meta(ge=0.01, le=60.0)]
Kept = Annotated[float, Meta(ge=0.0, le=366 * 86400.0)]
Drain = Annotated[float, Meta(ge=0.0, le=86400.0)]
NodeLease = Annotated[float, Meta(ge=5.0, le=3600.0)]
Timeout = Annotated[float, Meta(ge=0.1, le=3600.0)]


class SqlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    postgres: Urls  # one URL per shard, in the order in which they were first opened
    redis: Url | None = None  # of a Redis database that only this deployment uses; None: without Redis
    schema: str = "heapline"  # of each database; created on the first open
    connections: Connections = 8  # to each shard, besides one that listens; at least 2
    poll_interval: Poll = 1.0  # seconds between checks for what other nodes did, if no notification arrives
    durability: Literal["wal", "redis", "postgres"] | None = None  # where an enqueue must be stored before it is
    # acknowledged: this node's write-ahead log, Redis or Postgres; None: wal if that directory is given, else postgres
    slow_mode: bool = False  # with durability="redis", while Redis is down: enqueue into Postgres instead of refusing
    drain_seconds: Drain | None = 10.0  # for moving enqueues to Postgres when the node stops; None: until all are there
    wal: str | None = None  # directory of this node's write-ahead log; used by one process at a time
    wal_keep: Kept = 600.0  # seconds to keep it after the flush, in case the database fails over to an older state
    node_lease: NodeLease = 60.0  # seconds that its part of message ids is reserved; renewed every third of that
    command_timeout: Timeout = 30.0  # seconds after which a statement fails

    @property
    def policy(self) -> str:
        """The time at which an enqueue is acknowledged."""
        return self.durability or ("postgres" if self.wal is None else "wal")

    def __repr__(self) -> str:  # without URLs, which may contain passwords
        return f"SqlConfig({len(self.postgres)} shards, schema={self.schema!r})"

    def validate(self) -> None:
        if not 1 <= len(self.postgres) <= SHARDS_MAX:
            raise BadRequest(f"postgres must be a list of 1 to {SHARDS_MAX} URLs, got {len(self.postgres)}")
        for url in self.postgres:
            if not url.startswith(SCHEMES):
                raise BadRequest("each of postgres must be a URL such as postgresql://user@host/database")
            _check_readable("postgres", url)
        if len(set(self.postgres)) < len(self.postgres):
            raise BadRequest("two shards have the same URL; each needs a database of its own")
        if self.redis is not None and not self.redis.startswith(REDIS_SCHEMES):
            raise BadRequest("redis must be a URL such as redis://host:6379/0, or rediss:// for TLS")
        if self.redis is not None:
            _check_readable("redis", self.redis)
        if not SCHEMA.match(self.schema):
            raise BadRequest(f"schema must be up to 48 of the letters a-z 0-9 _, got {self.schema!r}")
        if self.durability == "wal" and self.wal is None:
            raise BadRequest("durability='wal' needs a directory; give wal='…', or durability='postgres'")
        if self.durability == "redis" and self.redis is None:
            raise BadRequest("durability='redis' needs a Redis server; give redis='redis://…'")
        if self.slow_mode and self.policy != "redis":
            raise BadRequest(f"slow_mode is not used with durability={self.policy!r}; omit it")
        if self.wal is not None and self.policy != "wal":
            raise BadRequest(f"wal is not used with durability={self.policy!r}; omit it, or choose durability='wal'")


describe_types(SqlConfig)


def make_sql_config(postgres: Sequence[str], fields: dict[str, Any]) -> SqlConfig:
    """Return a validated config from the URLs and keywords."""
    if isinstance(postgres, str):
        raise BadRequest("postgres must be a list of URLs; write postgres=[url]")
    check_names("sql broker", fields, SqlConfig)
    config = build(SqlConfig, {"postgres": list(postgres), **fields})
    check_config(config)
    return config


def _check_readable(name: str, url: str) -> None:
    """Raise BadRequest if the drivers could not read this URL: their errors quote what they take for a port."""
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, strict_parsing=bool(parts.query))
        ports = [port for option, value in options if option == "port" for port in value.split(",")]
        for place in [*parts.netloc.rpartition("@")[2].split(","), *(f"host:{port}" for port in ports)]:
            _ = urlsplit(f"//{place}").port  # raises ValueError if it is not a number
    except ValueError:
        raise BadRequest(
            f"cannot read a URL of {name}; in its user and password, write / as %2F, # as %23, ? as %3F, @ as %40, "
            "[ as %5B, ] as %5D and % as %25"
        ) from None
