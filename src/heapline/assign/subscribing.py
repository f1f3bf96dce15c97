"""A JetStream consumer for each partition that this worker holds: made, pulled from, repaired, and let go.

**Who gets a message.** The consumer of a partition is durable and has its name from the partition, so the next holder
goes on where the last one stopped. A handler is only called while `holds` says that the partition is held, asked right
before; what has arrived and may not be handled goes back to the server at once. `update_subscriptions` returns when no
handler of a removed partition runs any more: only then the manager confirms, and somebody else is given it.

**What cannot be promised.** A process that stands still in the middle of a handler is not stopped by anybody, and the
next holder may meanwhile get the same message. Pass the fence to what you write to (docs/assign.md).

**What fails** is tried again by the config's retries, then at every reconciliation, which also asks the server whether
each consumer is still there. Subscribing never fails a hook: partitions that go must not wait for those that come.
"""

# ruff: noqa: RUF009 - a Duration is a descriptor, made once for the class.

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from heapline.assign.config import RetryConfig
from heapline.assign.durations import Duration
from heapline.assign.errors import BadConfig
from heapline.assign.heeding import heeding
from heapline.assign.model import Partition
from heapline.assign.nats_bucket import require_nats
from heapline.assign.pulling import Pull
from heapline.assign.subscription_health import Health, HealthCollector
from heapline.errors import HeaplineError
from heapline.logs import Log

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from prometheus_client import CollectorRegistry

log = Log("heapline.assign")

Handler = Callable[[Partition, "Msg"], Awaitable[object]]
UNFIT = re.compile(r"[^A-Za-z0-9_-]")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
GLANCE = 0.05  # seconds between two looks whether a partition is held again


@dataclass(frozen=True, kw_only=True)
class SubscriptionConfig:
    stream: str  # the stream whose messages are shared out
    subject_prefix: str = ""  # a partition's subject is prefix.keys.suffix
    subject_suffix: str = ""
    consumer_prefix: str = "heapline"  # consumers are named prefix-keys-hash; another prefix is another set of readers
    max_retries: int = 3  # tries after the first, before a subscription waits for the next reconciliation
    retry_backoff: Duration = Duration(
        1.0
    )  # before the first retry, then doubling; and before a failed message comes again
    reconcile_interval: Duration = Duration(30.0)  # between two looks at whether everything is as it should be
    ack_wait: Duration = Duration(30.0)  # the longest that a handler may take before its message is given out again
    batch: int = 16  # messages asked for at once, for each partition

    def __post_init__(self) -> None:
        for name in ("stream", "consumer_prefix"):
            if not NAME.match(str(getattr(self, name))):
                raise BadConfig(f"{name}={getattr(self, name)!r}: use 1 to 64 of the letters a-z A-Z 0-9 _ -")
        for name in ("reconcile_interval", "ack_wait"):
            if getattr(self, name) <= 0:
                raise BadConfig(f"{name} must be more than 0")
        if type(self.batch) is not int or not 1 <= self.batch <= 10_000:
            raise BadConfig(f"batch={self.batch!r} must be a whole number from 1 to 10000")
        self.retry  # noqa: B018 - checks max_retries and retry_backoff

    @property
    def retry(self) -> RetryConfig:
        longest = max(float(self.reconcile_interval), float(self.retry_backoff))
        return RetryConfig(max_retries=self.max_retries, initial_delay=self.retry_backoff, max_delay=longest)

    def consumer(self, partition: Partition) -> str:
        """The consumer's name: readable, and different for different partitions."""
        readable = UNFIT.sub("_", partition.id)[:64]
        return f"{self.consumer_prefix}-{readable}-{xxhash.xxh3_64_hexdigest(partition.id.encode())}"


class SubscriptionHelper:
    """
    >>> helper = SubscriptionHelper(nc, SubscriptionConfig(stream="work"), holds=lambda p: manager.holds(p))
    ... # doctest: +SKIP
    >>> async def changed(added, removed):  # doctest: +SKIP
    ...     await helper.update_subscriptions(added, removed, handle)
    """

    def __init__(
        self, client: Client, config: SubscriptionConfig, *, holds: Callable[[Partition], bool],
        on_error: Callable[[Exception], object] | None = None,
    ) -> None:  # fmt: skip
        require_nats()
        self._client, self._config, self._holds, self._on_error = client, config, holds, on_error
        self._lanes: dict[Partition, _Lane] = {}
        self._reconciler: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._counts = Health()

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(sorted(self._lanes))

    def health(self) -> Health:
        lanes = self._lanes.values()
        return replace(
            self._counts, wanted=len(self._lanes), active=sum(lane.is_active for lane in lanes),
            failing=sum(lane.is_failing for lane in lanes),
        )  # fmt: skip

    def register_metrics(self, manager: str = "default", registry: CollectorRegistry | None = None) -> None:
        """Show `health()` on a registry of prometheus_client; the process's common one if none is given."""
        HealthCollector(self.health, manager).register(registry)

    async def update_subscriptions(
        self, added: Iterable[Partition], removed: Iterable[Partition], handler: Handler
    ) -> None:
        """Let go of some and begin with others. Repeating it does no harm."""
        if not inspect.iscoroutinefunction(handler) and not inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        ):
            raise BadConfig("a handler is an async function: async def handle(partition, message)")
        async with self._changing:
            await self._drop(removed)
            for partition in added:
                if partition not in self._lanes:
                    self._lanes[partition] = _Lane(self, partition, handler)
            if self._reconciler is None:
                self._reconciler = asyncio.create_task(self._reconciling(), name="assign reconciling")

    async def _drop(self, partitions: Iterable[Partition]) -> None:
        going = [lane for partition in partitions if (lane := self._lanes.pop(partition, None)) is not None]
        await asyncio.gather(*(lane.stop() for lane in going))

    async def close(self) -> None:
        """Let go of everything; handlers that run are waited for."""
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.gather(self._reconciler, return_exceptions=True)
            self._reconciler = None
        async with self._changing:
            await self._drop(list(self._lanes))

    async def __aenter__(self) -> SubscriptionHelper:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- reconciling

    async def _reconciling(self) -> None:
        while True:
            await asyncio.sleep(float(self._config.reconcile_interval))
            await self.reconcile()

    async def reconcile(self) -> None:
        """Look now whether each consumer is there, and try again what was given up."""
        for lane in list(self._lanes.values()):
            if lane.is_failing or (lane.is_active and not await self._exists(lane.partition)):
                self._counts.repaired += 1
                lane.restart()

    async def _exists(self, partition: Partition) -> bool:
        nats = require_nats()
        try:
            jetstream = self._client.jetstream()
            await heeding(jetstream.consumer_info(self._config.stream, self._config.consumer(partition)))
        except nats.js.errors.NotFoundError:
            return False
        except (nats.errors.Error, TimeoutError, OSError):
            return True  # nobody can say; the lane itself will notice
        return True

    def _tell(self, error: Exception, partition: Partition) -> None:
        log.warning("assign.subscription", partition=partition.id, error=type(error).__name__)
        if self._on_error is not None:
            self._on_error(error)


class _Lane:
    """One partition's subscription: a task that lives until `stop`."""

    def __init__(self, helper: SubscriptionHelper, partition: Partition, handler: Handler) -> None:
        self._helper, self._config, self._counts = helper, helper._config, helper._counts
        self.partition, self._handler = partition, handler
        self.is_active = self.is_failing = self._is_stopping = False
        self._handling = asyncio.Lock()  # held while a handler runs: nothing cancels it then
        self._again = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"assign subscription {partition.id}")

    async def stop(self) -> None:
        self._is_stopping = True
        async with self._handling:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def restart(self) -> None:
        self._again.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            self._again.clear()
            try:
                if not self._helper._holds(self.partition):
                    await asyncio.sleep(GLANCE)  # a lease that is over, or the manager has yet to begin
                    continue
                await self._make_consumer()
                self.is_active, self.is_failing, failures = True, False, 0
                await self._until_again(self._pull())
            except Exception as error:
                self._counts.retries += 1
                failures += 1
                self._helper._tell(error, self.partition)
                self.is_active, self.is_failing = False, failures > self._config.max_retries
                await self._pause(failures)
            finally:
                self.is_active = False

    async def _pause(self, failures: int) -> None:
        if self.is_failing:
            await self._again.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.retry.delay(failures - 1)):
                await self._again.wait()

    async def _until_again(self, work: Awaitable[None]) -> None:
        """Carry on until a reconciliation says to begin anew."""
        pulling, again = asyncio.ensure_future(work), asyncio.ensure_future(self._again.wait())
        try:
            await asyncio.wait((pulling, again), return_when=asyncio.FIRST_COMPLETED)
        finally:
            again.cancel()
            async with self._handling:
                pulling.cancel()
            ended = await asyncio.gather(pulling, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]

    async def _make_consumer(self) -> None:
        from nats.js import api

        config = api.ConsumerConfig(
            durable_name=self._config.consumer(self.partition),
            filter_subject=self.partition.subject(self._config.subject_prefix, self._config.subject_suffix),
            ack_policy=api.AckPolicy.EXPLICIT,
            deliver_policy=api.DeliverPolicy.ALL,
            ack_wait=float(self._config.ack_wait),
            max_ack_pending=max(1000, self._config.batch),
        )
        await heeding(self._helper._client.jetstream().add_consumer(self._config.stream, config))

    async def _pull(self) -> None:
        """Messages one after the other, as long as the partition is held."""
        config = self._config
        pull = Pull(self._helper._client, config.stream, config.consumer(self.partition), config.batch)
        in_hand: Msg | None = None
        await pull.open()
        try:
            while self._helper._holds(self.partition):
                in_hand = await pull.next()
                async with self._handling:
                    if self._is_stopping or not self._helper._holds(self.partition):
                        return
                    message, in_hand = in_hand, None
                    await self._handle(message)
        finally:
            # First the request is withdrawn: what goes back before that could come to ourselves again.
            arrived = await pull.close()
            for left in arrived if in_hand is None else [in_hand, *arrived]:
                await self._give_back(left)

    async def _handle(self, message: Msg) -> None:
        self._counts.delivered += 1
        try:
            await self._handler(self.partition, message)
        except Exception as error:
            self._counts.handler_failures += 1
            self._helper._tell(error, self.partition)
            await self._answer(message.nak(delay=float(self._config.retry_backoff)))
            return
        if self._helper._holds(self.partition):
            # Without the partition the message may be somebody else's by now, who will answer for it.
            await self._answer(message.ack())

    async def _give_back(self, message: Msg) -> None:
        self._counts.given_back += 1
        await self._answer(message.nak())

    async def _answer(self, answering: Awaitable[None]) -> None:
        """An answer that is lost costs a redelivery. A handler may also have answered itself."""
        nats = require_nats()
        with contextlib.suppress(nats.errors.Error, OSError, HeaplineError):
            await heeding(answering)
