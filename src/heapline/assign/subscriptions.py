"""One JetStream consumer per held partition: created, pulled from, repaired and released.

**Delivery.** A partition's consumer is durable and named after the partition, so the next holder continues where the
last one stopped. A handler runs only while `holds` confirms the partition, checked right before each call; messages
that may not be handled are returned to the server immediately. `update_subscriptions` returns when no handler of a
removed partition is running. Only then does the manager confirm, and another worker is granted the partition.

**Limits.** A process that is suspended inside a handler cannot be stopped, and the next holder may get the same message
meanwhile. Pass the fence to the systems that you write to (docs/assign.md).

**Failures** are retried as configured, then at every reconciliation, which also checks that each consumer still exists.
Subscribing never fails a hook, because dropping partitions must not wait for adding others.
"""

# ruff: noqa: RUF009 - a Duration is a descriptor, created once for the class.

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from heapline.assign.cancellation import honor_cancellation, on_loop, running_loop, wait_for_event
from heapline.assign.config import Duration, RetryConfig
from heapline.assign.errors import BadConfig, ConnectionLost
from heapline.assign.hooks import is_async
from heapline.assign.metrics import Health, HealthCollector
from heapline.assign.nats_bucket import require_nats
from heapline.assign.partitions import Partition
from heapline.contract.errors import HeaplineError
from heapline.logs import Log

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from prometheus_client import CollectorRegistry


log = Log("heapline.assign")

Handler = Callable[[Partition, "Msg"], Awaitable[object]]
INVALID_IN_NAME = re.compile(r"[^A-Za-z0-9_-]")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
HOLD_CHECK_INTERVAL = 0.05  # seconds between checks whether a partition is held again
EXPIRES = 10.0  # seconds that a request waits at the server
GRACE = 2.0  # additional seconds before silence means that the request is lost
#: Statuses of a request that ended unfilled without an error: the server's 404 and 408.
EMPTY = ("404", "408")


@dataclass(frozen=True, kw_only=True)
class SubscriptionConfig:
    """Settings of a SubscriptionHelper."""

    stream: str  # the stream whose messages are divided among the workers
    subject_prefix: str = ""  # a partition's subject is <prefix>.<keys>.<suffix>
    subject_suffix: str = ""
    # consumers are named <prefix>-<keys>-<hash>; another prefix is another set of readers
    consumer_prefix: str = "heapline"
    max_retries: int = 3  # retries before a subscription waits for the next reconciliation
    # Delay before the first retry, then doubling, and before a failed message is redelivered.
    retry_backoff: Duration = Duration(1.0)
    reconcile_interval: Duration = Duration(30.0)  # between two checks of all subscriptions
    ack_wait: Duration = Duration(30.0)  # longest handler run before the message is redelivered
    batch: int = 16  # messages requested at a time, per partition

    def __post_init__(self) -> None:
        for name in ("stream", "consumer_prefix"):
            if not NAME.match(str(getattr(self, name))):
                raise BadConfig(f"{name}={getattr(self, name)!r}; use 1 to 64 of the characters a-z A-Z 0-9 _ -")
        for name in ("reconcile_interval", "ack_wait"):
            if getattr(self, name) <= 0:
                raise BadConfig(f"{name} must be greater than 0")
        if type(self.batch) is not int or not 1 <= self.batch <= 10_000:
            raise BadConfig(f"batch={self.batch!r} must be a whole number from 1 to 10000")
        self.retry  # noqa: B018 - validates max_retries and retry_backoff

    @property
    def retry(self) -> RetryConfig:
        longest = max(self.reconcile_interval, self.retry_backoff)
        return RetryConfig(max_retries=self.max_retries, initial_delay=self.retry_backoff, max_delay=longest)

    def consumer(self, partition: Partition) -> str:
        """Return the consumer's name: readable and unique per partition."""
        readable = INVALID_IN_NAME.sub("_", partition.id)[:64]
        return f"{self.consumer_prefix}-{readable}-{xxhash.xxh3_64_hexdigest(partition.id.encode())}"


class SubscriptionHelper:
    """Keeps a subscription for each held partition.

    Every method may be called from any thread. The work, including handlers, runs on one event loop, the one that the
    NATS client belongs to: that in which the helper was created, or else that of its first call.

    >>> helper = SubscriptionHelper(nc, SubscriptionConfig(stream="work"), holds=lambda p: manager.holds(p))
    ... # doctest: +SKIP
    >>> async def changed(added, removed):  # doctest: +SKIP
    ...     await helper.update_subscriptions(added, removed, handle)
    """

    def __init__(
        self,
        client: Client,
        config: SubscriptionConfig,
        *,
        holds: Callable[[Partition], bool],
        on_error: Callable[[Exception], object] | None = None,
    ) -> None:
        require_nats()
        self._client, self._config, self._holds, self._on_error = client, config, holds, on_error
        # Replaced, never changed: other threads read it.
        self._subscriptions: dict[Partition, _Subscription] = {}
        self._loop = running_loop()
        self._reconciler: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._counts = Health()

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(sorted(self._subscriptions))

    def health(self) -> Health:
        subscriptions = self._subscriptions.values()
        return replace(
            self._counts,
            wanted=len(subscriptions),
            active=sum(subscription.is_active for subscription in subscriptions),
            failing=sum(subscription.is_failing for subscription in subscriptions),
        )

    def register_metrics(self, manager: str = "default", registry: CollectorRegistry | None = None) -> None:
        """Export `health()` to a prometheus_client registry; by default to the process's default registry."""
        HealthCollector(self.health, manager).register(registry)

    async def update_subscriptions(
        self, added: Iterable[Partition], removed: Iterable[Partition], handler: Handler
    ) -> None:
        """Release removed partitions and subscribe to added ones. Safe to repeat."""
        if not is_async(handler):
            raise BadConfig("a handler must be an async function: async def handle(partition, message)")
        await self._on_its_loop(partial(self._update, tuple(added), tuple(removed), handler))

    async def _on_its_loop(self, operation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = self._loop or asyncio.get_running_loop()
        await on_loop(self._loop, operation)

    async def _update(self, added: Sequence[Partition], removed: Sequence[Partition], handler: Handler) -> None:
        async with self._changing:
            await self._drop(removed)
            new = [partition for partition in dict.fromkeys(added) if partition not in self._subscriptions]
            begun = {partition: _Subscription(self, partition, handler) for partition in new}
            self._subscriptions = self._subscriptions | begun
            if self._reconciler is None:
                self._reconciler = asyncio.create_task(self._reconcile_loop(), name="assign reconciling")

    async def _drop(self, partitions: Iterable[Partition]) -> None:
        left = dict(self._subscriptions)
        ended = [left.pop(partition) for partition in dict.fromkeys(partitions) if partition in left]
        self._subscriptions = left
        await asyncio.gather(*(subscription.stop() for subscription in ended))

    async def close(self) -> None:
        """Release all partitions. Waits for running handlers."""
        await self._on_its_loop(self._close)

    async def _close(self) -> None:
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.gather(self._reconciler, return_exceptions=True)
            self._reconciler = None
        async with self._changing:
            await self._drop(list(self._subscriptions))

    async def __aenter__(self) -> SubscriptionHelper:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- reconciling

    async def _reconcile_loop(self) -> None:
        while True:
            await asyncio.sleep(self._config.reconcile_interval)
            await self._reconcile()

    async def reconcile(self) -> None:
        """Check now that each consumer exists, and restart suspended subscriptions."""
        await self._on_its_loop(self._reconcile)

    async def _reconcile(self) -> None:
        for subscription in list(self._subscriptions.values()):
            if subscription.is_failing or (subscription.is_active and not await self._exists(subscription.partition)):
                self._counts.repaired += 1
                subscription.restart()

    async def _exists(self, partition: Partition) -> bool:
        nats = require_nats()
        try:
            jetstream = self._client.jetstream()
            await honor_cancellation(jetstream.consumer_info(self._config.stream, self._config.consumer(partition)))
        except nats.js.errors.NotFoundError:
            return False
        except (nats.errors.Error, TimeoutError, OSError):
            return True  # unknown; the subscription itself will notice
        return True

    def _report(self, error: Exception, partition: Partition) -> None:
        log.warning("assign.subscription", partition=partition.id, error=type(error).__name__)
        if self._on_error is not None:
            self._on_error(error)


class _Subscription:
    """One partition's subscription: a task that runs until `stop`."""

    def __init__(self, helper: SubscriptionHelper, partition: Partition, handler: Handler) -> None:
        self._helper, self._config, self._counts = helper, helper._config, helper._counts
        self.partition, self._handler = partition, handler
        self.is_active = self.is_failing = self._is_stopping = False
        self._handling = asyncio.Lock()  # held while a handler runs, so that nothing cancels it
        self._restart_wanted = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"assign subscription {partition.id}")

    async def stop(self) -> None:
        self._is_stopping = True
        async with self._handling:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def restart(self) -> None:
        self._restart_wanted.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            self._restart_wanted.clear()
            try:
                if not self._helper._holds(self.partition):
                    await asyncio.sleep(HOLD_CHECK_INTERVAL)  # the lease is over, or the manager has not begun yet
                    continue
                await self._create_consumer()
                self.is_active, self.is_failing, failures = True, False, 0
                await self._run_until_restart(self._pull())
            except Exception as error:
                self._counts.retries += 1
                failures += 1
                self._helper._report(error, self.partition)
                self.is_active, self.is_failing = False, failures > self._config.max_retries
                await self._pause(failures)
            finally:
                self.is_active = False

    async def _pause(self, failures: int) -> None:
        delay = None if self.is_failing else self._config.retry.delay(failures - 1)
        await wait_for_event(self._restart_wanted, delay)

    async def _run_until_restart(self, work: Awaitable[None]) -> None:
        """Work until a reconciliation requests a restart."""
        pulling, again = asyncio.ensure_future(work), asyncio.ensure_future(self._restart_wanted.wait())
        try:
            await asyncio.wait((pulling, again), return_when=asyncio.FIRST_COMPLETED)
        finally:
            again.cancel()
            async with self._handling:
                pulling.cancel()
            ended = await asyncio.gather(pulling, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]

    async def _create_consumer(self) -> None:
        from nats.js import api

        config = api.ConsumerConfig(
            durable_name=self._config.consumer(self.partition),
            filter_subject=self.partition.subject(self._config.subject_prefix, self._config.subject_suffix),
            ack_policy=api.AckPolicy.EXPLICIT,
            deliver_policy=api.DeliverPolicy.ALL,
            ack_wait=self._config.ack_wait,
            max_ack_pending=max(1000, self._config.batch),
        )
        await honor_cancellation(self._helper._client.jetstream().add_consumer(self._config.stream, config))

    async def _pull(self) -> None:
        """Handle messages one by one while the partition is held."""
        config = self._config
        pull = PullConsumer(self._helper._client, config.stream, config.consumer(self.partition), config.batch)
        unhandled: Msg | None = None
        await pull.open()
        try:
            while self._helper._holds(self.partition):
                unhandled = await pull.next()
                async with self._handling:
                    if self._is_stopping or not self._helper._holds(self.partition):
                        return
                    message, unhandled = unhandled, None
                    await self._handle(message)
        finally:
            # Withdraw the request first: a message returned before that could be redelivered here.
            arrived = await pull.close()
            for left in arrived if unhandled is None else [unhandled, *arrived]:
                await self._return_to_server(left)

    async def _handle(self, message: Msg) -> None:
        self._counts.delivered += 1
        try:
            await self._handler(self.partition, message)
        except Exception as error:
            self._counts.handler_failures += 1
            self._helper._report(error, self.partition)
            await self._acknowledge(message.nak(delay=self._config.retry_backoff))
            return
        if self._helper._holds(self.partition):
            # Without the partition, the message may belong to another worker, which acknowledges it.
            await self._acknowledge(message.ack())

    async def _return_to_server(self, message: Msg) -> None:
        self._counts.returned += 1
        await self._acknowledge(message.nak())

    async def _acknowledge(self, acknowledgment: Awaitable[None]) -> None:
        """Send an ack or nak. A lost one costs a redelivery; the handler may have sent one itself."""
        nats = require_nats()
        with contextlib.suppress(nats.errors.Error, OSError, HeaplineError):
            await honor_cancellation(acknowledgment)


class PullConsumer:
    """Pulls messages of one JetStream consumer in small batches without losing any.

    The client's own `fetch` loses messages that have arrived when it is cancelled; the next holder then gets them only
    after `ack_wait`. Here they stay in a queue, and `close` returns them to the caller.
    """

    def __init__(self, client: Client, stream: str, consumer: str, batch: int) -> None:
        self._client, self._batch = client, batch
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._outstanding = 0  # messages that the server may still send for the last request

    async def open(self) -> None:
        async def on_message(message: Msg) -> None:
            self._arrived.put_nowait(message)

        self._subscription = await honor_cancellation(self._client.subscribe(self._inbox, cb=on_message))

    async def next(self) -> Msg:
        """Wait for the next message. Raise ConnectionLost if the consumer no longer answers."""
        while True:
            if self._outstanding == 0 and self._arrived.empty():
                await self._request()
            try:
                async with asyncio.timeout(EXPIRES + GRACE):
                    message = await self._arrived.get()
            except TimeoutError:
                raise ConnectionLost("the consumer does not answer") from None
            if message.reply and not _status(message):
                self._outstanding = max(0, self._outstanding - 1)
                return message
            self._outstanding = 0
            if _status(message) not in EMPTY:
                raise ConnectionLost(f"the consumer ended with status {_status(message)}")

    async def _request(self) -> None:
        request = {"batch": self._batch, "expires": int(EXPIRES * 1e9)}
        await honor_cancellation(self._client.publish(self._subject, json.dumps(request).encode(), reply=self._inbox))
        self._outstanding = self._batch

    async def close(self) -> list[Msg]:
        """Stop requesting. Return the messages that arrived and were not delivered."""
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()
        left = []
        while not self._arrived.empty():
            message = self._arrived.get_nowait()
            if message.reply and not _status(message):
                left.append(message)
        return left


def _status(message: Msg) -> str:
    return (message.headers or {}).get("Status", "")
