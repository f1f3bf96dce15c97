"""The key-value store on a NATS JetStream bucket. It decides nothing; it translates NATS's answers.

A revision is the sequence number of the bucket's stream. Every write carries the revision it expects of its key, so a
writer that is late, cut off or resumed changes nothing. Error 10071 is `Conflict`. A timeout, a lost connection and a
stream without a leader are `ConnectionLost`: the write may have been applied, or may still be, because the client sends
its buffer after a reconnect. Reads ask the stream's leader, which may be a former one; listings ask any replica. A
large value is sent again only if it has changed; otherwise polling every two seconds would dominate a cluster's
traffic.

An expired or deleted key leaves a marker for a while. `get` hides it, `create` overwrites it at its revision, and any
other revision conflicts with it, including that of the expired value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from heapline.assign import nats_bucket
from heapline.assign.cancellation import honor_cancellation
from heapline.assign.errors import BadConfig, ConnectionLost
from heapline.assign.kv import Conflict, Entry

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

T = TypeVar("T")

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
TTL = "Nats-TTL"
OPERATION = "KV-Operation"
MARKER = "Nats-Marker-Reason"
WRONG_REVISION = (10071, 10164)
NO_MESSAGE = 10037
HEADERS_MAX = 64 << 10  # reserved below max_payload: a larger message makes the server drop the connection
LARGE_VALUE = 4096  # bytes from which a known value is not read again
REREAD_SECONDS = 30.0  # seconds after which it is read again anyway, so that a recreated bucket is noticed
PAGE_KEYS = 500  # keys per page of a listing
EVENTS_MAX = 256  # unread events per watcher; beyond, the watcher must poll


class NatsKV:
    """A store in a JetStream bucket.

    >>> kv = await NatsKV.connect("nats://127.0.0.1:4222", bucket="workers", replicas=3)  # doctest: +SKIP
    >>> manager = Manager(config, kv, source)  # doctest: +SKIP
    """

    def __init__(self, client: Client, bucket: str, *, answer_within: float = 5.0) -> None:
        """Use `connect` or `open` instead: they check the server and the bucket."""
        self.bucket = bucket
        self._prefix, self._event_prefix = f"$KV.{bucket}.", nats_bucket.event_subject(bucket)
        self._timeout = answer_within
        self._reconnect: Callable[[], Awaitable[Client]] | None = None  # set if `connect` opened the connection
        self._reconnecting, self._is_closing = asyncio.Lock(), False
        self._watchers: set[asyncio.Queue[Entry | None]] = set()
        self._large: dict[str, tuple[Entry, float]] = {}  # large values as last read, and when
        self._use(client)

    def _use(self, client: Client) -> None:
        self._client, self._jetstream = client, client.jetstream(timeout=self._timeout)

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        bucket: str = nats_bucket.BUCKET,
        replicas: int = 1,
        answer_within: float = 5.0,
        connect_within: float = 10.0,
        create: bool = True,
        **options: Any,
    ) -> NatsKV:
        """Open a connection and the bucket. `options` are those of `nats.connect` (TLS, credentials, …)."""
        kv: NatsKV | None = None

        def recheck() -> None:
            if kv is not None:
                kv._request_recheck()

        async def dial() -> Client:
            return await nats_bucket.connect(servers, connect_within, recheck, **options)

        client = await dial()
        try:
            kv = await cls._opened(client, bucket, replicas, answer_within, connect_within, create)
        except BaseException:
            await client.close()
            raise
        kv._reconnect = dial
        return kv

    @classmethod
    async def open(
        cls,
        client: Client,
        *,
        bucket: str = nats_bucket.BUCKET,
        replicas: int = 1,
        answer_within: float = 5.0,
        connect_within: float = 10.0,
    ) -> NatsKV:
        """Open the bucket on the caller's connection; see `nats_bucket.CONNECTION_OPTIONS` for suitable settings."""
        nats_bucket.check_version(client)
        return await cls._opened(client, bucket, replicas, answer_within, connect_within, True)

    @classmethod
    async def _opened(
        cls, client: Client, bucket: str, replicas: int, answer_within: float, connect_within: float, create: bool
    ) -> NatsKV:
        jetstream = client.jetstream(timeout=min(answer_within, 2.0))
        if create:
            await nats_bucket.open_bucket(jetstream, bucket, replicas, connect_within)
        else:
            await nats_bucket.find_bucket(jetstream, bucket, connect_within)
        return cls(client, bucket, answer_within=answer_within)

    async def close(self) -> None:
        """Close the connection if `connect` opened it."""
        self._is_closing = True
        if self._reconnect is not None and not self._client.is_closed:
            await self._client.close()

    async def __aenter__(self) -> NatsKV:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the KV protocol

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        try:
            return await self._write(key, value, 0, ttl)
        except Conflict:
            message = await self._last(key)
            if message is None or not is_marker(message.headers):
                raise
            return await self._write(key, value, int(message.seq), ttl)

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        if revision < 1:
            raise Conflict(key)
        return await self._write(key, value, revision, ttl)

    async def delete(self, key: str, revision: int) -> None:
        if revision < 1:
            raise Conflict(key)
        await self._write(key, b"", revision, nats_bucket.MARKER_SECONDS, {OPERATION: "DEL"})

    async def get(self, key: str) -> Entry | None:
        known, read_at = self._large.get(key, (None, 0.0))
        if known is None or time.monotonic() > read_at + REREAD_SECONDS:
            message = await self._last(key)
        elif (message := await self._last(key, known.revision)) is None:
            return known  # unchanged since then
        self._large.pop(key, None)
        if message is None or is_marker(message.headers):
            return None
        entry = Entry(key, message.data or b"", int(message.seq))
        if len(entry.value) >= LARGE_VALUE:
            self._large[key] = (entry, time.monotonic())
        return entry

    async def entries(self, prefix: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        after = 0
        while True:
            page, is_last = await self._call(self._page(self._prefix + subject_pattern(prefix), after + 1))
            for key, revision, entry in page:
                after = max(after, revision)
                # A key written between two pages is in both; the second entry is current.
                found.pop(key, None)
                if entry is not None:
                    found[key] = entry
            if is_last:
                return sorted(found.values())

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        events: asyncio.Queue[Entry | None] = asyncio.Queue(EVENTS_MAX)

        async def on_message(message: Msg) -> None:
            if events in self._watchers:  # the client may call this after the watcher ended
                put_event(events, self._entry_of(message))

        await self._reopen()
        client = self._client
        self._watchers.add(events)
        try:
            subscription = await self._call(
                client.subscribe(self._event_prefix + subject_pattern(prefix), cb=on_message)
            )
            try:
                while not client.is_closed:
                    with contextlib.suppress(TimeoutError):  # a closed client raises nothing: check regularly
                        async with asyncio.timeout(1.0):
                            entry = await events.get()
                        yield entry
            finally:
                if not client.is_closed:
                    with contextlib.suppress(ConnectionLost):  # it would hide the cancellation that ends this watch
                        await self._call(subscription.unsubscribe())
        finally:
            self._watchers.discard(events)
        raise ConnectionLost("the connection is closed")

    # --- NATS requests

    async def _write(
        self, key: str, value: bytes, revision: int, ttl: float | None, headers: dict[str, str] | None = None
    ) -> int:
        await self._reopen()
        largest = self._client.max_payload - HEADERS_MAX
        if len(value) > largest:
            raise BadConfig(
                f"{key!r} would be {len(value)} bytes, and this NATS server accepts {largest}; raise its max_payload "
                "or use fewer partitions"
            )
        headers = {**(headers or {}), EXPECTED: str(revision)}
        if ttl is not None:
            headers[TTL] = f"{max(1, math.ceil(ttl))}s"  # NATS takes whole seconds; expiring later is allowed
        ack = await self._call(self._jetstream.publish(self._prefix + key, value, headers=headers), key)
        return int(ack.seq)

    async def _last(self, key: str, newer_than: int | None = None) -> Any:
        """Return the last message of a key, possibly a marker, or None if there is none (newer than `newer_than`)."""
        await self._reopen()
        stream, subject = f"KV_{self.bucket}", self._prefix + key
        if newer_than is None:
            return await self._call(self._jetstream.get_msg(stream, subject=subject))
        # There is one message per key, so the first after a revision is also the last.
        return await self._call(self._jetstream.get_msg(stream, seq=newer_than + 1, subject=subject, next=True))

    async def _page(self, subject: str, start: int) -> tuple[list[tuple[str, int, Entry | None]], bool]:
        """Return the next keys from a sequence number on, with None for markers, and whether there are no more."""
        await self._reopen()
        inbox = self._client.new_inbox()
        request = json.dumps({"seq": start, "next_by_subj": subject, "batch": PAGE_KEYS}).encode()
        subscription = await self._client.subscribe(inbox)
        page: list[tuple[str, int, Entry | None]] = []
        try:
            await self._client.publish(f"$JS.API.DIRECT.GET.KV_{self.bucket}", request, reply=inbox)
            while True:
                message = await subscription.next_msg(timeout=self._timeout)
                headers = message.headers or {}
                match headers.get("Status"):
                    case None:
                        key = headers["Nats-Subject"].removeprefix(self._prefix)
                        revision = int(headers["Nats-Sequence"])
                        page.append((key, revision, None if is_marker(headers) else Entry(key, message.data, revision)))
                    case "204":
                        return page, int(headers.get("Nats-Num-Pending", 0)) == 0
                    case "404":
                        return page, True
                    case status:
                        raise ConnectionLost(f"the listing was rejected with {status}")
        finally:
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def _call(self, operation: Awaitable[T], key: str = "") -> T:
        """Run an operation and translate NATS's errors. Return None if nothing was found."""
        from nats import errors
        from nats.js import errors as js_errors

        try:
            return await honor_cancellation(operation)
        except js_errors.APIError as error:
            if error.err_code in WRONG_REVISION:
                raise Conflict(key) from None
            if error.err_code == NO_MESSAGE:
                return None  # type: ignore[return-value]
            raise ConnectionLost(
                f"NATS rejected the request with {error.err_code or error.code}: {error.description}"
            ) from None
        except (errors.NoRespondersError, js_errors.NoStreamResponseError):
            raise ConnectionLost("the bucket has no leader at present") from None
        except TimeoutError:
            raise ConnectionLost("no answer") from None
        except (errors.Error, OSError) as error:
            raise ConnectionLost(f"the connection failed: {type(error).__name__}") from None

    async def _reopen(self) -> None:
        """Connect again if the client has closed itself for good; other interruptions it handles itself."""
        if not self._client.is_closed or self._reconnect is None or self._is_closing:
            return
        async with self._reconnecting:
            if self._client.is_closed:
                self._use(await self._reconnect())
                self._request_recheck()

    def _request_recheck(self) -> None:
        """Tell all watchers to poll, because events may have been lost."""
        for events in tuple(self._watchers):
            put_event(events, None)

    def _entry_of(self, message: Msg) -> Entry | None:
        headers = message.headers or {}
        if is_marker(headers) or "Nats-Sequence" not in headers:
            return None
        return Entry(message.subject.removeprefix(self._event_prefix), message.data, int(headers["Nats-Sequence"]))


def is_marker(headers: Any) -> bool:
    """Return whether a message marks its key as removed instead of holding a value."""
    return bool(headers) and (MARKER in headers or headers.get(OPERATION) in ("DEL", "PURGE"))


def subject_pattern(prefix: str) -> str:
    """Return a key prefix as a NATS subject pattern."""
    return prefix + ">" if prefix == "" or prefix.endswith(".") else prefix


def put_event(events: asyncio.Queue[Entry | None], entry: Entry | None) -> None:
    """Add an event; if the queue is full, replace all with one that says to poll."""
    if events.full():
        while not events.empty():
            events.get_nowait()
        entry = None
    events.put_nowait(entry)
