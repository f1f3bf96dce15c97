"""The blocking facade: the same broker, run by a thread of its own.

Every method of the contract is there without `await`; messages act on the facade too (`m.ack()` blocks).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from heapline.config import BrokerConfig
from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.sync_streams import SyncSubscription
from heapline.errors import BadRequest, Closed
from heapline.model import LeaseRef, LogFrame, Message
from heapline.streams import StreamBatch, StreamMessage

T = TypeVar("T")


class SyncMessage:
    """A leased message whose acts block."""

    __slots__ = ("_broker", "_message")

    def __init__(self, broker: SyncBroker, message: Message) -> None:
        self._broker = broker
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def ack(self) -> None:
        self._broker.ack(self)

    def nack(self, backoff: float | None = None, reason: str | None = None) -> None:
        self._broker.nack(self, backoff=backoff, reason=reason)

    def release(self) -> None:
        self._broker.release(self)

    def extend(self, seconds: float) -> None:
        self._broker.extend(self, seconds)

    def bury(self, reason: str | None = None) -> None:
        self._broker.bury(self, reason=reason)

    def __repr__(self) -> str:
        return repr(self._message)


class SyncBroker:
    """Made by `heapline.open_sync`; use it with `with`. Safe to call from several threads."""

    _kind: ClassVar[type] = EmbeddedBroker  # whose methods there are
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _broker: Any = None

    def __init__(self, path: str, config: BrokerConfig) -> None:
        self._path = path
        self._config = config
        self._lock = threading.Lock()  # around handing work to the loop, and ending it

    def __enter__(self) -> SyncBroker:
        self._start()
        try:
            self._broker = self._run(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def _start(self) -> None:
        ready = threading.Event()
        loop = asyncio.new_event_loop()

        def serve() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(ready.set)
            loop.run_forever()
            loop.run_until_complete(_end_the_rest())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        self._loop = loop
        self._thread = threading.Thread(target=serve, name="heapline", daemon=True)
        self._thread.start()
        ready.wait()

    async def _open(self) -> EmbeddedBroker:
        return await EmbeddedBroker(self._path, config=self._config).__aenter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            broker, self._broker = self._broker, None
        if broker is not None:
            self._run(broker.close())
            self._stop()

    def _stop(self) -> None:
        """Whatever was handed to the loop before is there when it stops: those who wait for it are told."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _refuse_own_thread(self, work: Coroutine[Any, Any, Any]) -> None:
        """Who calls from within the loop would wait for himself, for ever."""
        with contextlib.suppress(RuntimeError):  # no loop runs here, as it should be
            if asyncio.get_running_loop() is self._loop:
                work.close()
                raise BadRequest("on_assigned and on_revoked run in the broker's own thread: call it from another one")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._refuse_own_thread(work)
        with self._lock:
            if self._loop is None:
                work.close()
                raise Closed
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Closed from None  # by another thread, while this one waited
        except BaseException:
            future.cancel()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every other method is the broker's own, waited for."""
        if name.startswith("_") or not hasattr(self._kind, name):
            raise AttributeError(f"a broker has no {name!r}")
        if self._broker is None:
            raise Closed
        return self._blocking(getattr(self._broker, name), name)

    def _blocking(self, method: Callable[..., Coroutine[Any, Any, Any]], name: str) -> Callable[..., Any]:

        def call(*args: Any, **kwargs: Any) -> Any:
            named = {key: _unwrap(value) for key, value in kwargs.items()}
            return self._wrap(self._run(method(*map(_unwrap, args), **named)))

        call.__name__ = name
        call.__doc__ = method.__doc__
        return call

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, list) and result and isinstance(result[0], Message):
            return [SyncMessage(self, m) for m in result]
        return result

    def subscribe(self, topic: str, **options: Any) -> SyncSubscription:
        """`with hl.subscribe("jobs", group="billing") as rows: …`, and iterate; see GroupBroker.subscribe."""
        broker = self._broker
        if broker is None:
            raise Closed

        async def begin() -> Any:
            return broker.subscribe(topic, **options)

        return SyncSubscription(self._run, self._run(begin()))

    def read_log(self, topic: str, partition: int = 0, start: int = 0, end: int | None = None) -> Iterator[LogFrame]:
        if self._broker is None:
            raise Closed
        frames = self._broker.read_log(topic, partition, start, end)

        async def following() -> LogFrame | None:
            return await anext(frames, None)

        while (frame := self._run(following())) is not None:
            yield frame

    def replay(
        self, topic: str, *, checkpoint: str | None = None, batches: bool = False, **options: Any
    ) -> Iterator[StreamMessage | StreamBatch]:
        """As the broker's own, without `await`."""
        if self._broker is None:
            raise Closed
        # A row is done when the next one is asked for; where nobody keeps count they are fetched by the batch.
        whole = batches or checkpoint is None
        rows = self._broker.replay(topic, checkpoint=checkpoint, batches=whole, **options)
        return self._replayed(rows, whole and not batches)

    def _replayed(self, rows: Any, unpack: bool) -> Iterator[StreamMessage | StreamBatch]:
        async def following() -> StreamMessage | StreamBatch | None:
            return await anext(rows, None)

        try:
            while (row := self._run(following())) is not None:
                if unpack:
                    yield from row.messages()  # type: ignore[union-attr]
                else:
                    yield row
        finally:
            if self._broker is not None and threading.current_thread() is not self._thread:
                self._run(rows.aclose())


async def _end_the_rest() -> None:
    """What still runs when the loop has been stopped: somebody waits for it in another thread."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _unwrap(value: Any) -> Any:
    """The broker's own message behind one of ours, alone or in any collection."""
    if isinstance(value, SyncMessage):
        return value._message
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | LeaseRef):
        return [v._message if isinstance(v, SyncMessage) else v for v in value]
    return value
