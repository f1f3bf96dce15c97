"""The key-value contract on a NATS JetStream bucket. Decides nothing; says what an answer of NATS means.

A revision is the bucket's stream sequence. Every write carries the revision that it expects of its key, so a writer
that is late, cut off or woken up changes nothing. `10071` is `Conflict`; a timeout, a lost connection and a stream
without a leader are `ConnectionLost`: the write may have been carried out, or may be yet (the client sends what it has
buffered after a reconnection). Reads ask the stream's leader, which may be a former one; listings ask any replica. A
large value is only sent again when it has changed: a crowd that looks every two seconds would else be most of a
cluster's traffic.

A key whose ttl has ended, or that was deleted, leaves a marker for a while. `get` does not show it, `create` writes
over it by its revision, and every other revision conflicts with it: also that of the value which expired.
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
from heapline.assign.errors import BadConfig, ConnectionLost
from heapline.assign.heeding import heeding
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
HEADERS_MAX = 64 << 10  # kept free below max_payload: a message over it makes the server drop the connection
LARGE = 4096  # bytes from which on a value that we know is not read again
REREAD = 30.0  # seconds after which it is all the same, lest a bucket that was made anew goes unnoticed
PAGE = 500  # keys in one answer of a listing
NEWS_MAX = 256  # that a watcher has not looked at yet; above, it is told to look


class NatsKV:
    """
    >>> kv = await NatsKV.connect("nats://127.0.0.1:4222", bucket="crowd", replicas=3)  # doctest: +SKIP
    >>> manager = Manager(config, kv, source)  # doctest: +SKIP
    """

    def __init__(self, client: Client, bucket: str, *, answer_within: float = 5.0) -> None:
        """Use `connect` or `open`, which see to it that server and bucket are fit for it."""
        self.bucket = bucket
        self._prefix, self._news = f"$KV.{bucket}.", nats_bucket.news_subject(bucket)
        self._timeout = answer_within
        self._reconnect: Callable[[], Awaitable[Client]] | None = None  # if the connection is our own
        self._reconnecting, self._is_closing = asyncio.Lock(), False
        self._watchers: set[asyncio.Queue[Entry | None]] = set()
        self._large: dict[str, tuple[Entry, float]] = {}  # large values as they were read last, and when
        self._use(client)

    def _use(self, client: Client) -> None:
        self._client, self._jetstream = client, client.jetstream(timeout=self._timeout)

    @classmethod
    async def connect(
        cls, servers: str | Sequence[str], *, bucket: str = nats_bucket.BUCKET, replicas: int = 1,
        answer_within: float = 5.0, connect_within: float = 10.0, create: bool = True, **options: Any,
    ) -> NatsKV:  # fmt: skip
        """A connection of its own, and the bucket; `options` are those of `nats.connect` (TLS, credentials, …)."""
        kv: NatsKV | None = None

        def look() -> None:
            if kv is not None:
                kv._look()

        async def dial() -> Client:
            return await nats_bucket.connect(servers, connect_within, look, **options)

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
        cls, client: Client, *, bucket: str = nats_bucket.BUCKET, replicas: int = 1, answer_within: float = 5.0,
        connect_within: float = 10.0,
    ) -> NatsKV:  # fmt: skip
        """The bucket on a connection that somebody else opens and closes: see `nats_bucket.CONNECTION_OPTIONS`."""
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
        """Close the connection, if `connect` opened it."""
        self._is_closing = True
        if self._reconnect is not None and not self._client.is_closed:
            await self._client.close()

    async def __aenter__(self) -> NatsKV:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the contract

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
        if known is None or time.monotonic() > read_at + REREAD:
            message = await self._last(key)
        elif (message := await self._last(key, known.revision)) is None:
            return known  # nothing was written since
        self._large.pop(key, None)
        if message is None or is_marker(message.headers):
            return None
        entry = Entry(key, message.data or b"", int(message.seq))
        if len(entry.value) >= LARGE:
            self._large[key] = (entry, time.monotonic())
        return entry

    async def entries(self, prefix: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        after = 0
        while True:
            page, is_last = await self._ask(self._page(self._prefix + pattern(prefix), after + 1))
            for key, revision, entry in page:
                after = max(after, revision)
                # Whoever wrote between two pages stands in both of them, the second time as it is now.
                found.pop(key, None)
                if entry is not None:
                    found[key] = entry
            if is_last:
                return sorted(found.values())

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        news: asyncio.Queue[Entry | None] = asyncio.Queue(NEWS_MAX)

        async def hear(message: Msg) -> None:
            if news in self._watchers:  # the client may go on after its subscriber was cancelled
                put(news, self._entry_of(message))

        await self._open_again()
        client = self._client
        self._watchers.add(news)
        try:
            subscription = await self._ask(client.subscribe(self._news + pattern(prefix), cb=hear))
            try:
                while not client.is_closed:
                    with contextlib.suppress(TimeoutError):  # a client that was closed tells nobody: look now and then
                        async with asyncio.timeout(1.0):
                            entry = await news.get()
                        yield entry
            finally:
                if not client.is_closed:
                    with contextlib.suppress(ConnectionLost):  # else it would hide why we end: a cancellation
                        await self._ask(subscription.unsubscribe())
        finally:
            self._watchers.discard(news)
        raise ConnectionLost("the connection is closed")

    # --- how NATS is asked

    async def _write(
        self, key: str, value: bytes, revision: int, ttl: float | None, headers: dict[str, str] | None = None
    ) -> int:
        await self._open_again()
        largest = self._client.max_payload - HEADERS_MAX
        if len(value) > largest:
            raise BadConfig(
                f"{key!r} would be {len(value)} bytes, and this NATS server takes {largest}: raise its max_payload, or "
                "share fewer partitions"
            )
        headers = {**(headers or {}), EXPECTED: str(revision)}
        if ttl is not None:
            headers[TTL] = f"{max(1, math.ceil(ttl))}s"  # it takes whole seconds; later is always allowed
        ack = await self._ask(self._jetstream.publish(self._prefix + key, value, headers=headers), key)
        return int(ack.seq)

    async def _last(self, key: str, newer_than: int | None = None) -> Any:
        """The last message of a key, which may be a marker; None if there is none (that is newer)."""
        await self._open_again()
        stream, subject = f"KV_{self.bucket}", self._prefix + key
        if newer_than is None:
            return await self._ask(self._jetstream.get_msg(stream, subject=subject))
        # There is one message for each key, so the next one after a revision is the last one.
        return await self._ask(self._jetstream.get_msg(stream, seq=newer_than + 1, subject=subject, next=True))

    async def _page(self, subject: str, start: int) -> tuple[list[tuple[str, int, Entry | None]], bool]:
        """The next keys from a sequence on, each as it stands or None for a marker, and whether there are no more."""
        await self._open_again()
        inbox = self._client.new_inbox()
        request = json.dumps({"seq": start, "next_by_subj": subject, "batch": PAGE}).encode()
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
                        raise ConnectionLost(f"the listing was refused with {status}")
        finally:
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def _ask(self, asking: Awaitable[T], key: str = "") -> T:
        """An operation, with NATS' errors in the words of the contract. Nothing found is None."""
        from nats import errors
        from nats.js import errors as js_errors

        try:
            return await heeding(asking)
        except js_errors.APIError as error:
            if error.err_code in WRONG_REVISION:
                raise Conflict(key) from None
            if error.err_code == NO_MESSAGE:
                return None  # type: ignore[return-value]
            raise ConnectionLost(f"NATS refused with {error.err_code or error.code}: {error.description}") from None
        except (errors.NoRespondersError, js_errors.NoStreamResponseError):
            raise ConnectionLost("the bucket has no leader now") from None
        except TimeoutError:
            raise ConnectionLost("no answer") from None
        except (errors.Error, OSError) as error:
            raise ConnectionLost(f"the connection failed: {type(error).__name__}") from None

    async def _open_again(self) -> None:
        """The client reconnects by itself, unless it has closed itself for good."""
        if not self._client.is_closed or self._reconnect is None or self._is_closing:
            return
        async with self._reconnecting:
            if self._client.is_closed:
                self._use(await self._reconnect())
                self._look()

    def _look(self) -> None:
        """Events may have been lost."""
        for news in tuple(self._watchers):
            put(news, None)

    def _entry_of(self, message: Msg) -> Entry | None:
        headers = message.headers or {}
        if is_marker(headers) or "Nats-Sequence" not in headers:
            return None
        return Entry(message.subject.removeprefix(self._news), message.data, int(headers["Nats-Sequence"]))


def is_marker(headers: Any) -> bool:
    """Whether a message says that its key is gone, instead of holding a value."""
    return bool(headers) and (MARKER in headers or headers.get(OPERATION) in ("DEL", "PURGE"))


def pattern(prefix: str) -> str:
    """The contract's prefix as NATS writes it."""
    return prefix + ">" if prefix == "" or prefix.endswith(".") else prefix


def put(news: asyncio.Queue[Entry | None], entry: Entry | None) -> None:
    """Hand on an event; too many become one that says to look."""
    if news.full():
        while not news.empty():
            news.get_nowait()
        entry = None
    news.put_nowait(entry)
