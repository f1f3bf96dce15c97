"""The client for code that does not await: the same client, run by a thread of its own, safe for many threads.

The thread starts with the first call. A forked child starts its own thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any, Self, TypeVar

from heapline.client.batch_consumer import BATCH, BatchLease, BatchPrefetcher
from heapline.client.consumer import PREFETCH, Consumer, Prefetcher
from heapline.client.sdk import ConnectedBroker
from heapline.client.transports.transport import closed
from heapline.contract.errors import Closed
from heapline.contract.leases import Leased, Pop
from heapline.contract.message import LogFrame
from heapline.contract.stream import StreamBatch, StreamMessage
from heapline.contract.sync_broker import SyncBroker, SyncLeasedBatch, SyncMessage, SyncSubscription, _sync_message

T = TypeVar("T")


class SyncClient(SyncBroker):
    """Created by `heapline.connect_sync`. Use it with `with`, or call `close` when you are done."""

    _broker: ConnectedBroker | None

    def __init__(self, client: ConnectedBroker) -> None:
        super().__init__(client.__aenter__)
        self._client = client
        self._broker = client
        self._pid = os.getpid()
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        self._broker = self._client
        self._client.reopen()
        return self

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._pid != os.getpid():  # the thread stayed with the parent
            self._loop, self._thread, self._pid = None, None, os.getpid()
            self._lock, self._starting = threading.Lock(), threading.Lock()
        with self._starting:
            if self._broker is None:
                work.close()
                raise closed()
            if self._loop is None:
                self._start()
        try:
            return super()._run(work)
        except Closed:
            if self._broker is None:
                raise closed() from None
            raise

    def _inner(self) -> Any:
        if self._broker is None:
            raise closed()
        return self._broker

    def close(self) -> None:
        if self._pid != os.getpid():  # only the parent has something to close
            self._broker = None
            return
        with self._starting:
            broker, self._broker = self._broker, None
        if broker is not None and self._loop is not None:
            with contextlib.suppress(Closed):
                super()._run(self._client.close())
            self._stop()

    def renew(self, api_key: str) -> None:
        """Replace the key or token, before the old one expires; see ConnectedBroker.renew."""
        self._run(self._client.renew(api_key))

    def within(self, seconds: float) -> SyncClient:
        """This client with another deadline: `hl.within(2).enqueue(…)`."""
        return _SyncWithin(self, seconds)

    def consume(
        self, topic: str, *, prefetch: int = PREFETCH, visibility: float | None = None, holder: str | None = None
    ) -> SyncConsumer[SyncMessage]:
        """`for message in hl.consume("jobs"): …`; prefetched messages are returned when the loop ends."""
        pop = Pop(topic, visibility=visibility, holder=holder)
        return self._adopt(Prefetcher(self._client, pop, prefetch, partial(_sync_message, self)))

    def consume_batches(
        self,
        topic: str,
        max_messages: int = BATCH,
        *,
        prefetch: int = PREFETCH,
        visibility: float | None = None,
        holder: str | None = None,
    ) -> SyncConsumer[SyncLeasedBatch]:
        """`for batch in hl.consume_batches("jobs"): …`; see heapline.consume_batches."""

        def bind(leased: Leased) -> SyncLeasedBatch:
            return SyncLeasedBatch(BatchLease(self, leased), leased)

        pop = Pop(topic, max_messages, visibility=visibility, holder=holder)
        return self._adopt(BatchPrefetcher(self._client, pop, prefetch, bind))

    def _adopt(self, prefetcher: Prefetcher) -> SyncConsumer[Any]:
        async def begin() -> Consumer[Any]:
            consumer: Consumer[Any] = Consumer(prefetcher)
            self._client.adopt(consumer)
            return consumer

        return SyncConsumer(self, self._run(begin()))


class SyncConsumer(Iterator[T]):
    """Messages of a topic. When the program no longer holds it, prefetched messages are returned."""

    def __init__(self, client: SyncClient, consumer: Consumer[T]) -> None:
        self._client, self._consumer = client, consumer

    def __iter__(self) -> SyncConsumer[T]:
        return self

    def __next__(self) -> T:
        message = self._next()
        if message is None:
            raise StopIteration
        return message

    def _next(self) -> T | None:
        consumer = self._consumer

        async def following() -> T | None:
            return await anext(consumer, None)

        return self._client._run(following())

    @contextlib.contextmanager
    def item(self) -> Iterator[T]:
        """The next message, for one block: nacked if the block raises, released if it was not settled."""
        message = self._next()
        if message is None:
            raise closed()
        settle = self._consumer.prefetcher.settle
        try:
            yield message
        except Exception as error:
            with contextlib.suppress(Exception):
                self._client._run(settle(message, failure=f"{type(error).__name__}: {error}"[:1000]))
            raise
        except BaseException:
            with contextlib.suppress(Exception):
                self._client._run(settle(message))
            raise
        self._client._run(settle(message))

    def __enter__(self) -> SyncConsumer[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release messages that were not started, and end the iteration."""
        if self._client._broker is not None:
            self._client._run(self._consumer.aclose())

    def __del__(self) -> None:
        if threading.current_thread() is not self._client._thread:  # where the consumer closes itself
            with contextlib.suppress(Exception):
                self.close()


class _SyncWithin(SyncClient):
    """A client with another deadline, which runs where the client runs."""

    def __init__(self, client: SyncClient, seconds: float) -> None:
        self._parent, self._view = client, client._client.within(seconds)

    def __enter__(self) -> Self:
        self._parent.__enter__()
        return self

    def close(self) -> None:
        self._parent.close()

    def renew(self, api_key: str) -> None:
        self._parent.renew(api_key)

    def within(self, seconds: float) -> SyncClient:
        return self._parent.within(seconds)

    def consume(self, topic: str, **options: Any) -> SyncConsumer[SyncMessage]:
        return self._parent.consume(topic, **options)

    def consume_batches(self, topic: str, *size: Any, **options: Any) -> SyncConsumer[SyncLeasedBatch]:
        return self._parent.consume_batches(topic, *size, **options)

    def subscribe(self, topic: str, **options: Any) -> SyncSubscription:
        return self._parent.subscribe(topic, **options)

    def read_log(self, topic: str, *range: Any, **options: Any) -> Iterator[LogFrame]:
        return self._parent.read_log(topic, *range, **options)

    def replay(self, topic: str, **options: Any) -> Iterator[StreamMessage | StreamBatch]:
        return self._parent.replay(topic, **options)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._parent._run(work)

    def _inner(self) -> Any:
        self._parent._inner()
        return self._view

    def _own(self, result: Any) -> Any:
        return self._parent._own(result)
