"""The NATS connection and bucket of a worker pool.

**The server** must be 2.12 or newer: 2.9 lost acknowledged writes after a network partition, and per-key ttls need
2.11.

**The connection** reconnects forever. It checks its server every second and switches to another within milliseconds;
the client's defaults (two minutes, two seconds, sixty tries) would end every lease.

**The bucket** keeps one value per key, lets a write carry its ttl, leaves a marker where a key expired, and publishes
every applied write under `heapline.assign.<bucket>.<key>`, to which `watch` subscribes. No JetStream consumer is
involved, so none can be lost with its node.
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

OLDEST_SERVER = (2, 12)
BUCKET = "heapline-assign"
BUCKET_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
MARKER_SECONDS = 5.0  # how long the marker of an expired key stays
NO_PEERS = 10005  # too few nodes are up for the requested replicas
FATAL_CODES = (10074,)  # replicas without a cluster: waiting does not help
REPEAT_AFTER = 10.0  # seconds before the same error is logged again
RETRY_PAUSE = 0.2  # seconds between attempts while a cluster starts

#: Settings that leases of a few seconds need. Use the same if you pass your own connection.
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
    """Import the client library, or raise BadConfig with install instructions."""
    try:
        import nats
    except ImportError:
        raise BadConfig("nats-py is not installed; run pip install 'heapline[nats]'") from None
    return nats


async def connect(
    servers: str | Sequence[str], within: float, on_reconnect: Callable[[], None] | None = None, **options: Any
) -> Client:
    """Connect to any of these servers. `options` are those of `nats.connect` and override the defaults here."""
    nats = require_nats()

    async def reconnected() -> None:
        if on_reconnect is not None:
            on_reconnect()

    given = {**CONNECTION_OPTIONS, "reconnected_cb": reconnected, "error_cb": ErrorLogger().log_error, **options}
    try:
        async with asyncio.timeout(within):
            client: Client = await nats.connect(servers if isinstance(servers, str) else list(servers), **given)
    except (TimeoutError, OSError, nats.errors.Error):
        # Neither the address nor the reason is included: either may contain credentials.
        raise ConnectionLost(f"no NATS server accepted the connection within {within:g} s") from None
    try:
        check_version(client)
    except BadConfig:
        await client.close()
        raise
    return client


class ErrorLogger:
    """Logs the client's errors without repeats.

    While a server is down, the client reports the same error twenty times a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    async def log_error(self, error: Exception) -> None:
        # Only permission errors are logged in full; other texts may contain an address.
        detail = str(error) if "permissions" in str(error).lower() else type(error).__name__
        now = self._clock()
        if now >= self._logged_at.get(detail, -math.inf) + REPEAT_AFTER:
            if len(self._logged_at) >= 100:
                self._logged_at.clear()
            self._logged_at[detail] = now
            log.warning("assign.nats_error", detail=detail)


def check_version(client: Client) -> None:
    version = client.connected_server_version
    if (version.major, version.minor) < OLDEST_SERVER:
        raise BadConfig(
            f"this NATS server is {version.major}.{version.minor}.{version.patch}; heapline.assign needs "
            f"{OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer, because older servers can lose acknowledged "
            "writes or lack per-key ttls"
        )


def check_bucket_name(bucket: str) -> None:
    if not BUCKET_NAME.match(bucket):
        raise BadConfig(f"{bucket!r} is not a bucket name; use 1 to 128 of the characters a-z A-Z 0-9 _ -")


def event_subject(bucket: str) -> str:
    """Return the subject prefix under which applied writes are published, followed by the key."""
    return f"heapline.assign.{bucket}."


async def open_bucket(jetstream: JetStreamContext, bucket: str, replicas: int, within: float) -> None:
    """Create the bucket if it does not exist. Raise BadConfig if it exists with other settings."""
    check_bucket_name(bucket)
    await _retry_while_unavailable(lambda: _find_or_create(jetstream, bucket, replicas), bucket, within)


async def find_bucket(jetstream: JetStreamContext, bucket: str, within: float) -> None:
    """Check that the bucket exists with the right settings, without creating it."""
    check_bucket_name(bucket)
    found = await _retry_while_unavailable(lambda: _config_of(jetstream, bucket), bucket, within)
    if found is None:
        raise BadConfig(f"bucket {bucket!r} does not exist on this server; no worker pool has used it yet")
    _check(bucket, found)


async def _retry_while_unavailable(attempt: Callable[[], Awaitable[T]], bucket: str, within: float) -> T:
    """Retry while a cluster starts or has lost its leader."""
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
                    if error.err_code in FATAL_CODES or (error.code not in (500, 503) and error.err_code != NO_PEERS):
                        raise BadConfig(f"NATS rejected bucket {bucket!r}: {last}") from None
                except nats.errors.Error as error:
                    last = type(error).__name__
                await asyncio.sleep(RETRY_PAUSE)
    except TimeoutError:
        raise ConnectionLost(f"cannot open bucket {bucket!r} within {within:g} s: {last}") from None


async def _find_or_create(jetstream: JetStreamContext, bucket: str, replicas: int) -> None:
    from nats.js import api

    nats = require_nats()
    found = await _config_of(jetstream, bucket)
    if found is None:
        config = api.KeyValueConfig(
            bucket=bucket,
            description="heapline.assign: workers, leader and assignment of a worker pool",
            history=1,
            replicas=replicas,
            storage=api.StorageType.FILE,
            direct=True,
            limit_marker_ttl=MARKER_SECONDS,
            republish=api.RePublish(src=f"$KV.{bucket}.>", dest=f"{event_subject(bucket)}>"),
        )
        try:
            await jetstream.create_key_value(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != 10058:  # another worker has created it meanwhile with other replicas
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
    destination = None if config.republish is None else config.republish.dest
    is_valid = config.max_msgs_per_subject == 1 and bool(config.allow_msg_ttl) and bool(config.allow_direct)
    if not (is_valid and bool(config.subject_delete_marker_ttl) and destination == f"{event_subject(bucket)}>"):
        raise BadConfig(
            f"bucket {bucket!r} was not created by heapline.assign (it needs history 1, per-message ttl, delete "
            "markers, direct gets and republishing); use another bucket, or delete this one and let it be created"
        )
