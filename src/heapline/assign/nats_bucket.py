"""Where a crowd meets in NATS: a connection that never gives up, and a bucket that is made the way nats_kv.py needs it.

**The server** must be 2.12 or newer: 2.9 was seen to lose acknowledged writes after a partition, and per-key ttls need
2.11. **The connection** looks every second whether its server answers, and goes to another one within milliseconds;
the client's own defaults (two minutes, two seconds, sixty tries) would end every lease. **The bucket** keeps one value
for each key, lets a write bring its ttl, leaves a marker where a key expired, and publishes every write that was
carried out under `heapline.assign.<bucket>.<key>`, which is what `watch` listens to: no consumer stands between,
so none can be lost with its node.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from heapline.assign.errors import BadConfig, ConnectionLost
from heapline.logs import Log

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import StreamConfig

log = Log("heapline.assign")

T = TypeVar("T")

OLDEST = (2, 12)
BUCKET = "heapline-assign"
BUCKET_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
MARKER_SECONDS = 5.0  # how long it stays visible that a key expired
NO_PEERS = 10005  # too few nodes are up for so many replicas
HOPELESS = (10074,)  # replicas without a cluster: no waiting helps
QUIET = 10.0  # seconds in which the same trouble is told once
PAUSE = 0.2  # between two tries to reach a cluster that is just coming up

#: What a lease of a few seconds needs. Whoever brings a connection of his own is wise to set the same.
CONNECTION_OPTIONS: dict[str, Any] = {
    "name": "heapline.assign",
    "connect_timeout": 2,
    "reconnect_time_wait": 0.05,
    "max_reconnect_attempts": -1,
    "ping_interval": 1,
    "max_outstanding_pings": 2,
    "pending_size": 16 << 20,
}


def require_nats() -> Any:
    """The client library, or an error that says how to get it."""
    try:
        import nats
    except ImportError:
        raise BadConfig("this needs nats-py: run pip install 'heapline[nats]'") from None
    return nats


async def connect(
    servers: str | Sequence[str], within: float, on_reconnect: Callable[[], None] | None = None, **options: Any
) -> Client:
    """A connection to any of these servers; `options` are those of `nats.connect`, over ours."""
    nats = require_nats()

    async def reconnected() -> None:
        if on_reconnect is not None:
            on_reconnect()

    given = {**CONNECTION_OPTIONS, "reconnected_cb": reconnected, "error_cb": Complaints().hear, **options}
    try:
        async with asyncio.timeout(within):
            client: Client = await nats.connect(servers if isinstance(servers, str) else list(servers), **given)
    except (TimeoutError, OSError, nats.errors.Error):
        # Neither the address nor the reason is told: either may hold credentials.
        raise ConnectionLost(f"no NATS server let us in within {within:g} s") from None
    try:
        check_version(client)
    except BadConfig:
        await client.close()
        raise
    return client


class Complaints:
    """What the client says went wrong, to the log: it says the same twenty times a second while a server is away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}

    async def hear(self, error: Exception) -> None:
        # Only what a server says about permissions is told in its own words: others may hold an address.
        detail = str(error) if "permissions" in str(error).lower() else type(error).__name__
        now = self._clock()
        if now >= self._told.get(detail, -math.inf) + QUIET:
            if len(self._told) >= 100:
                self._told.clear()
            self._told[detail] = now
            log.warning("assign.nats_error", detail=detail)


def check_version(client: Client) -> None:
    version = client.connected_server_version
    if (version.major, version.minor) < OLDEST:
        raise BadConfig(
            f"this NATS server is {version.major}.{version.minor}.{version.patch}; heapline.assign needs "
            f"{OLDEST[0]}.{OLDEST[1]} or newer, because older ones can lose acknowledged writes or know no ttl of keys"
        )


def check_bucket_name(bucket: str) -> None:
    if not BUCKET_NAME.match(bucket):
        raise BadConfig(f"{bucket!r} is not a bucket's name: use 1 to 128 of the letters a-z A-Z 0-9 _ -")


def news_subject(bucket: str) -> str:
    """Under which subject, followed by a key, carried-out writes are published."""
    return f"heapline.assign.{bucket}."


async def open_bucket(jetstream: JetStreamContext, bucket: str, replicas: int, within: float) -> None:
    """Make the bucket if it is not there; refuse one that was made otherwise."""
    check_bucket_name(bucket)
    await _insist(lambda: _find_or_make(jetstream, bucket, replicas), bucket, within)


async def find_bucket(jetstream: JetStreamContext, bucket: str, within: float) -> None:
    """Only look whether the bucket is there and of our kind."""
    check_bucket_name(bucket)
    found = await _insist(lambda: _config_of(jetstream, bucket), bucket, within)
    if found is None:
        raise BadConfig(f"there is no bucket {bucket!r} on this server: no crowd has met here yet")
    _check(bucket, found)


async def _insist(attempt: Callable[[], Awaitable[T]], bucket: str, within: float) -> T:
    """A cluster that is coming up, or has lost its leader, refuses for a while."""
    nats = require_nats()
    last = "JetStream does not answer; is it enabled?"
    try:
        async with asyncio.timeout(within):
            while True:
                try:
                    return await attempt()
                except (nats.errors.NoRespondersError, nats.js.errors.NoStreamResponseError, nats.errors.TimeoutError):
                    pass
                except nats.js.errors.APIError as error:
                    last = f"{error.description} ({error.err_code})"
                    if error.err_code in HOPELESS or (error.code not in (500, 503) and error.err_code != NO_PEERS):
                        raise BadConfig(f"NATS refuses bucket {bucket!r}: {last}") from None
                except nats.errors.Error as error:
                    last = type(error).__name__
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        raise ConnectionLost(f"bucket {bucket!r} could not be opened within {within:g} s: {last}") from None


async def _find_or_make(jetstream: JetStreamContext, bucket: str, replicas: int) -> None:
    from nats.js import api

    nats = require_nats()
    found = await _config_of(jetstream, bucket)
    if found is None:
        config = api.KeyValueConfig(
            bucket=bucket, description="heapline.assign: workers, leader and assignment of a crowd", history=1,
            replicas=replicas, storage=api.StorageType.FILE, direct=True, limit_marker_ttl=MARKER_SECONDS,
            republish=api.RePublish(src=f"$KV.{bucket}.>", dest=f"{news_subject(bucket)}>"),
        )  # fmt: skip
        try:
            await jetstream.create_key_value(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != 10058:  # somebody else has made it, with other replicas, in between
                raise
        found = await _config_of(jetstream, bucket)
        if found is None:
            raise nats.errors.NoRespondersError
    _check(bucket, found)


async def _config_of(jetstream: JetStreamContext, bucket: str) -> StreamConfig | None:
    nats = require_nats()
    try:
        return (await jetstream.stream_info(f"KV_{bucket}")).config
    except nats.js.errors.NotFoundError:
        return None


def _check(bucket: str, config: StreamConfig) -> None:
    news = None if config.republish is None else config.republish.dest
    fits = config.max_msgs_per_subject == 1 and bool(config.allow_msg_ttl) and bool(config.allow_direct)
    if not (fits and bool(config.subject_delete_marker_ttl) and news == f"{news_subject(bucket)}>"):
        raise BadConfig(
            f"bucket {bucket!r} was not made by heapline.assign (it needs history 1, per-message ttl, delete markers, "
            "direct gets and republishing): name another one, or remove it and let it be made"
        )
