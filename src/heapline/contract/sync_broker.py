"""The methods of a broker for code that does not await: an event loop in a thread of its own runs the broker.

Every method is the one of `Broker`; this class only waits for it. Messages, rows and subscriptions that it returns act
on it, so `message.ack()` blocks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from heapline.contract.broker import Broker, Methods
from heapline.contract.errors import BadRequest, Closed
from heapline.contract.message import LogFrame, Message
from heapline.contract.stream import Place, StreamBatch, StreamMessage
from heapline.contract.sync_subscription import SyncSubscription

T = TypeVar("T")


class SyncMessage(Message):
    """A leased message whose acts block."""

    __slots__ = ()

    def ack(self) -> None:  # type: ignore[override]
        self._sync.ack(self)

    def nack(self, backoff: float | None = None, reason: str | None = None) -> None:  # type: ignore[override]
        self._sync.nack(self, backoff=backoff, reason=reason)

    def release(self) -> None:  # type: ignore[override]
        self._sync.release(self)

    def extend(self, seconds: float) -> None:  # type: ignore[override]
        self._sync.extend(self, seconds)

    def bury(self, reason: str | None = None) -> None:  # type: ignore[override]
        self._sync.bury(self, reason=reason)

    @property
    def _sync(self) -> SyncBroker:
        return cast("SyncBroker", self._broker)


class SyncBroker(Methods):
    """Use it with `with`. Safe to call from several threads."""

    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _broker: Any = None

    def __init__(self, open: Callable[[], Coroutine[Any, Any, Broker]]) -> None:
        self._open = open
        self._lock = threading.Lock()  # around handing work to the loop, and ending it

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._start()
        try:
            self._broker = self._run(self._open())
        except BaseException:
            self._stop()
            raise
        return self

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

    def _start(self) -> None:
        ready = threading.Event()
        loop = asyncio.new_event_loop()

        def serve() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(ready.set)
            loop.run_forever()
            loop.run_until_complete(_cancel_the_rest())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        self._loop = loop
        self._thread = threading.Thread(target=serve, name="heapline", daemon=True)
        self._thread.start()
        ready.wait()

    def _stop(self) -> None:
        """Stop the loop. What was handed to it before is cancelled, and its callers receive Closed."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    # -- calls -----------------------------------------------------------------------------------------------------

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

    def _refuse_own_thread(self, work: Coroutine[Any, Any, Any]) -> None:
        """A call from within the loop would wait for itself, forever."""
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread, as it should be
            if asyncio.get_running_loop() is self._loop:
                work.close()
                raise BadRequest("on_assigned and on_revoked run in the broker's own thread; call it from another one")

    def _inner(self) -> Any:
        if self._broker is None:
            raise Closed
        return self._broker

    def _blocking(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The method of this name, waited for. See `broker.method`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._own(self._run(getattr(self._inner(), name)(*args, **kwargs)))

        call.__name__, call.__doc__ = name, function.__doc__
        whole = inspect.signature(function)
        call.__signature__ = whole.replace(parameters=list(whole.parameters.values())[1:])  # type: ignore[attr-defined]
        return call

    def _own(self, result: Any) -> Any:
        """Messages act on this broker."""
        if isinstance(result, list) and result and type(result[0]) is Message:
            return [_sync_message(self, m) for m in result]
        return result

    def subscribe(self, topic: str, *, group: str, **options: Any) -> SyncSubscription:
        """`with hl.subscribe("jobs", group="billing") as rows: …`, and iterate; see Broker.subscribe."""
        broker = self._inner()

        async def begin() -> Any:
            return broker.subscribe(topic, group=group, **options)

        return SyncSubscription(self._run, self._run(begin()))

    def read_log(self, topic: str, partition: int = 0, start: int = 0, end: int | None = None) -> Iterator[LogFrame]:
        """Read the events of a partition, one durable frame at a time."""
        return self._iterate(self._inner().read_log(topic, partition, start, end))

    def replay(
        self,
        topic: str,
        *,
        start: Place = "earliest",
        end: Place | None = None,
        checkpoint: str | None = None,
        batches: bool = False,
        **options: Any,
    ) -> Iterator[StreamMessage | StreamBatch]:
        """Read the stream again; see Broker.replay."""
        # A row is done when the next one is requested. Without a checkpoint nothing counts, so rows come in batches.
        whole = batches or checkpoint is None
        rows = self._inner().replay(topic, start=start, end=end, checkpoint=checkpoint, batches=whole, **options)
        if batches or not whole:
            return self._iterate(rows)
        return (row for batch in self._iterate(rows) for row in batch.messages())

    def _iterate(self, rows: Any) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(rows, None)

        try:
            while (row := self._run(following())) is not None:
                yield row
        finally:
            if self._broker is not None and threading.current_thread() is not self._thread:
                self._run(rows.aclose())


def _sync_message(broker: SyncBroker, m: Message) -> SyncMessage:
    return SyncMessage(
        broker,  # type: ignore[arg-type]
        m.topic,
        m.partition,
        m.id,
        m.token,
        m.payload,
        m.priority,
        m.attempts,
        m.key,
        m._headers,
        m._enqueued_ms,
        m._deadline_ms,
        m.fairness_key,
        m.id_suffix,
    )


async def _cancel_the_rest() -> None:
    """End what still runs when the loop has stopped: threads wait for it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
