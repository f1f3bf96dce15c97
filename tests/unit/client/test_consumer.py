"""consume(): prefetching, extension of leases, and release. On a broker in memory, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import heapline
from heapline.client.consumer import Consumer, consume
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import (
    Closed,
    LeaseLost,
    PermissionDenied,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
)
from heapline.contract.message import Message, Outgoing
from heapline.engine import EmbeddedBroker
from heapline.testing import FakeClock
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.loop import run
from tests.simulation.sim_io import SimIo

DAY = 86400.0


class Fragile:
    """A broker whose methods can be made to fail one by one."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self.failures: dict[str, list[Exception]] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._broker, name)
        if name in ("pop_stream", "stats"):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self.failures.get(name):
                raise self.failures[name].pop(0)
            return await method(*args, **options)

        return call


def simulated(test: Callable[[Fragile], Awaitable[None]]) -> Callable[[], None]:
    async def go(clock: FakeClock) -> None:
        broker = EmbeddedBroker(
            "/data",
            config=BrokerConfig(spare_segment_bytes=0, reclaim_interval=3600),
            disk=FakeDisk(),
            clock=clock,
            io=SimIo(random.Random(1)),
        )
        async with broker:
            await broker.create_topic(
                "jobs", segment_bytes=1 << 20, max_payload_bytes=1 << 16, lease_max=2 * DAY, visibility_default=20.0
            )
            await test(Fragile(broker))

    def wrapped() -> None:
        clock = FakeClock()
        run(go(clock), clock)

    wrapped.__name__ = test.__name__
    return wrapped


async def put(hl: Any, count: int, first: int = 0) -> None:
    await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(first, first + count)])


async def counts(hl: Any) -> tuple[int, int]:
    stats = await hl.stats("jobs")
    return stats.ready, stats.leased


async def settle(messages: Consumer[Message], here: int) -> None:
    while len(messages.prefetcher._here) != here:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0.001)


@simulated
async def test_messages_arrive_in_order_and_end_when_acked(hl: Fragile) -> None:
    await put(hl, 5)
    got = []
    async with consume(hl, "jobs") as messages:
        async for message in messages:
            got.append(message.payload)
            await message.ack()
            if len(got) == 5:
                break
    assert got == [b"0", b"1", b"2", b"3", b"4"]
    assert await counts(hl) == (0, 0)


@simulated
async def test_nothing_is_prefetched_with_many_consumers(hl: Fragile) -> None:
    await put(hl, 100)
    async with consume(hl, "jobs", prefetch=1) as messages:
        held = await asyncio.gather(*(anext(messages) for _ in range(40)))
        assert await counts(hl) == (60, 40)
        for message in held[1:]:
            await message.ack()
        await anext(messages)
        await settle(messages, 1)
        assert await counts(hl) == (58, 3), "few are left: one is prefetched besides the two in progress"


@simulated
async def test_at_most_prefetch_messages_are_prefetched(hl: Fragile) -> None:
    await put(hl, 10)
    for prefetch in (0, 1, 4):
        async with consume(hl, "jobs", prefetch=prefetch) as messages:
            message = await anext(messages)
            await asyncio.sleep(1)
            assert await counts(hl) == (9 - prefetch, 1 + prefetch)
            await message.release()


@simulated
async def test_default_prefetch_is_one_so_urgent_messages_wait_for_one(hl: Fragile) -> None:
    await put(hl, 5, first=10)
    async with consume(hl, "jobs") as messages:
        await (await anext(messages)).ack()
        await settle(messages, 1)
        await hl.enqueue("jobs", b"urgent", priority=0)
        got = [(await anext(messages)).payload for _ in range(2)]
    assert got == [b"11", b"urgent"]


@simulated
async def test_unstarted_messages_are_released_immediately_without_an_attempt(hl: Fragile) -> None:
    await put(hl, 5)
    messages = consume(hl, "jobs", prefetch=3)
    first = await anext(messages)
    await settle(messages, 3)
    await messages.aclose()
    assert await counts(hl) == (4, 1), "the one being handled stays leased"
    await first.ack()
    assert [m.attempts for m in await hl.pop("jobs", 9)] == [1, 1, 1, 1]
    with pytest.raises(StopAsyncIteration):
        await anext(messages)
    await messages.aclose()


@simulated
async def test_break_releases_prefetched_messages(hl: Fragile) -> None:
    await put(hl, 5)
    async for message in consume(hl, "jobs", prefetch=3):
        await asyncio.sleep(0.1)
        await message.ack()
        break
    gc.collect()
    await asyncio.sleep(0.1)
    assert await counts(hl) == (4, 0)


@simulated
async def test_close_ends_the_wait_of_an_iterating_caller(hl: Fragile) -> None:
    messages = consume(hl, "jobs")
    waiting = asyncio.ensure_future(anext(messages, None))
    await asyncio.sleep(1)
    await messages.aclose()
    assert await waiting is None
    await put(hl, 1)
    assert await counts(hl) == (1, 0), "and no pop is left that would lease it"


@simulated
async def test_leases_of_prefetched_and_handled_messages_are_extended_for_a_day(hl: Fragile) -> None:
    await put(hl, 3)
    async with consume(hl, "jobs", prefetch=2, visibility=600) as messages:
        handled = await anext(messages)
        await settle(messages, 2)
        await asyncio.sleep(DAY)
        assert await counts(hl) == (0, 3)
        await handled.ack()
        for _ in range(2):
            message = await anext(messages)
            assert message.attempts == 1
            await message.ack()
    assert await counts(hl) == (0, 0)


@simulated
async def test_lease_length_defaults_to_the_topics_visibility(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs") as messages:
        message = await anext(messages)
        await asyncio.sleep(1000)
        await message.ack()
    assert 100 < hl.calls.count("extend") < 400, "every third of 20 s"


@simulated
async def test_lease_of_a_discarded_message_is_not_extended_forever(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0, visibility=30) as messages:
        await anext(messages)  # and dropped
        gc.collect()
        await asyncio.sleep(120)
        again = await anext(messages)
        assert again.attempts == 2
        await again.ack()


@simulated
async def test_settled_message_is_not_extended(hl: Fragile) -> None:
    await put(hl, 4)
    async with consume(hl, "jobs", prefetch=0, visibility=30) as messages:
        kept = [await anext(messages) for _ in range(4)]
        await kept[0].ack()
        await kept[1].nack(backoff=DAY)
        await kept[2].bury()
        await kept[3].release()
        await asyncio.sleep(100)
        assert hl.calls.count("extend") == 0


@simulated
async def test_prefetched_message_whose_lease_was_lost_is_not_delivered(hl: Fragile) -> None:
    await put(hl, 3)
    async with consume(hl, "jobs", prefetch=2, visibility=30) as messages:
        await (await anext(messages)).ack()
        await settle(messages, 2)
        stolen = messages.prefetcher._here[0]
        await hl.bury(stolen)
        await asyncio.sleep(30)  # the next extension reports it
        assert (await anext(messages)).id != stolen.id


@simulated
async def test_prefetched_message_is_not_delivered_after_its_lease_expired(hl: Fragile) -> None:
    await put(hl, 2)
    async with consume(hl, "jobs", prefetch=1, visibility=30) as messages:
        await (await anext(messages)).ack()
        await settle(messages, 1)
        hl.failures["extend"] = [UnavailableError("away")] * 1000
        await asyncio.sleep(45)
        message = await anext(messages)
        assert message.attempts == 2, "it was returned and leased again"


@simulated
async def test_failed_extension_is_retried_before_the_lease_ends(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0, visibility=30) as messages:
        message = await anext(messages)
        hl.failures["extend"] = [UnavailableError("away")] * 2
        await asyncio.sleep(100)
        await message.ack()


@simulated
async def test_explicit_extend_still_works(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0, visibility=30) as messages:
        message = await anext(messages)
        await message.extend(1000)
        before = hl.calls.count("extend")
        await asyncio.sleep(500)
        assert hl.calls.count("extend") == before
        await message.ack()


@simulated
async def test_consumer_waits_until_an_outage_ends(hl: Fragile) -> None:
    hl.failures["pop"] = [UnavailableError("away")] * 20
    async with consume(hl, "jobs") as messages:
        waiting = asyncio.ensure_future(anext(messages))
        await put(hl, 1)
        assert (await waiting).payload == b"0"


@simulated
async def test_permanent_error_ends_all_consumers(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs") as messages:
        assert (await anext(messages)).payload == b"0"
        hl.failures["pop"] = [UnavailableError("away"), Unauthenticated("the key was revoked")]
        waiting = [asyncio.ensure_future(anext(messages)) for _ in range(3)]
        for one in waiting:
            with pytest.raises(Unauthenticated, match="revoked"):
                await one
        with pytest.raises(Unauthenticated, match="revoked"):
            await anext(messages)


@simulated
async def test_missing_topic_raises_not_found(hl: Fragile) -> None:
    with pytest.raises(TopicNotFound):
        async for _ in consume(hl, "nowhere"):
            pass


@simulated
async def test_several_coroutines_share_one_consumption(hl: Fragile) -> None:
    got: list[bytes] = []
    messages = consume(hl, "jobs", prefetch=2)

    async def work() -> None:
        async for message in messages:
            got.append(message.payload)
            await asyncio.sleep(0.01)
            await message.ack()

    workers = [asyncio.ensure_future(work()) for _ in range(5)]
    await put(hl, 40)
    while len(got) < 40:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await messages.aclose()
    await asyncio.gather(*workers)
    assert sorted(got) == sorted(b"%d" % i for i in range(40))
    assert await counts(hl) == (0, 0)


@simulated
async def test_cancelled_consumer_leaves_its_message_to_another(hl: Fragile) -> None:
    async with consume(hl, "jobs", prefetch=0) as messages:
        for steps in range(30):
            asking = [asyncio.ensure_future(anext(messages)) for _ in range(2)]
            await asyncio.sleep(0.01)
            await put(hl, 1)
            for _ in range(steps):
                await asyncio.sleep(0)
            asking[0].cancel()
            done = [r for r in await asyncio.gather(asking[0], return_exceptions=True) if isinstance(r, Message)]
            if not done:
                done = [await asking[1]]
            else:
                asking[1].cancel()
                await asyncio.wait({asking[1]})
            await done[0].ack()
            await settle(messages, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefetch": -1}, "prefetch must be an integer from 0 to 100000, got -1"),
        ({"prefetch": 1.5}, "prefetch must be an integer"),
        ({"visibility": 0}, "visibility"),
        ({"holder": ""}, "holder must be a string"),
    ],
)
def test_bad_options_are_refused_when_a_consumer_is_created(options: dict[str, Any], says: str) -> None:
    with pytest.raises(heapline.BadRequest, match=says):
        consume(None, "jobs", **options)  # type: ignore[arg-type]


def test_consume_is_public() -> None:
    assert heapline.consume is consume


# -- failures in between --------------------------------------------------------------------------------------


@simulated
async def test_redelivered_message_is_kept_when_its_lost_lease_is_settled(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0, visibility=30) as messages:
        old = await anext(messages)
        hl.failures["extend"] = [UnavailableError("away")] * 5
        await asyncio.sleep(35)
        new = await anext(messages)
        assert new.attempts == 2
        with pytest.raises(LeaseLost):
            await old.ack()
        await asyncio.sleep(100)
        await new.ack()
    assert await counts(hl) == (0, 0)


@simulated
async def test_redelivered_message_is_yielded_once_with_its_current_lease(hl: Fragile) -> None:
    await put(hl, 2)
    async with consume(hl, "jobs", prefetch=1, visibility=30) as messages:
        first = await anext(messages)
        await settle(messages, 1)
        (stale,) = messages.prefetcher._here
        await hl.release(stale)
        messages.prefetcher._arrived(
            await hl.pop("jobs", visibility=30)
        )  # redelivered while its earlier delivery waits
        again = await anext(messages)
        assert again is not stale
        await again.ack()
        await first.ack()
    assert await counts(hl) == (0, 0)


@simulated
async def test_cancelled_close_still_releases_and_ends(hl: Fragile) -> None:
    for steps in range(1, 12, 2):
        await put(hl, 3)
        messages = consume(hl, "jobs", prefetch=2, visibility=30)
        first = await anext(messages)
        await settle(messages, 2)
        closing = asyncio.ensure_future(messages.aclose())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        await asyncio.sleep(5)
        assert await counts(hl) == (2, 1), "no message stays leased without a handler"
        await first.ack()
        await hl.ack(await hl.pop("jobs", 9))


@simulated
async def test_unexpected_exception_ends_the_iteration_immediately(hl: Fragile) -> None:
    hl.failures["pop"] = [ZeroDivisionError("a bug")]
    async with consume(hl, "jobs") as messages, asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            await anext(messages)


def test_consumer_of_a_closed_loop_does_not_affect_the_next_close() -> None:
    kept = []

    async def leave(clock: FakeClock) -> None:
        messages = consume(Never(), "jobs")  # type: ignore[arg-type]
        asking = asyncio.ensure_future(anext(messages, None))
        await asyncio.sleep(1)
        asking.cancel()
        kept.append(messages)

    class Never:
        async def get_topic(self, topic: str) -> Any:
            raise PermissionDenied("worker", "admin", topic)

        async def pop(self, *_: Any, **options: Any) -> list[Message]:
            await asyncio.sleep(3600)
            return []

    clock = FakeClock()
    run(leave(clock), clock)
    again = FakeClock()

    async def close() -> None:
        await kept[0].aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(kept[0])

    run(close(), again)


# -- one message per block ---------------------------------------------------------------------------------------------


@simulated
async def test_item_settled_in_its_block_is_not_settled_again(hl: Fragile) -> None:
    await put(hl, 3)
    async with consume(hl, "jobs", prefetch=0) as consumer:
        async with consumer.item() as message:
            assert message.payload == b"0"
            await message.ack()
        async with consumer.item() as message:
            await message.nack(backoff=3600)
        async with consumer.item() as message:
            await message.bury()
    assert (await hl.stats("jobs")).dead == 1
    assert await counts(hl) == (0, 0)
    assert [name for name in hl.calls if name in ("ack", "nack", "bury", "release")] == ["ack", "nack", "bury"]


@simulated
async def test_item_is_nacked_with_the_error_if_its_block_raises(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0) as consumer:
        with pytest.raises(ZeroDivisionError):
            async with consumer.item() as message:
                raise ZeroDivisionError("no")
    info = await hl.get("jobs", message.id)
    assert (info.state, info.attempts, info.reason) == ("delayed", 1, "ZeroDivisionError: no")


@simulated
async def test_error_of_a_block_after_its_message_was_settled_changes_nothing(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0) as consumer:
        with contextlib.suppress(ZeroDivisionError):
            async with consumer.item() as message:
                await message.ack()
                raise ZeroDivisionError
    assert (await hl.get("jobs", message.id)).state == "acked"


@simulated
async def test_unsettled_item_is_released(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0) as consumer:
        async with consumer.item() as message:
            pass
        info = await hl.get("jobs", message.id)
        assert (info.state, info.attempts) == ("ready", 0)


@simulated
async def test_item_whose_block_is_cancelled_is_released(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0) as consumer:

        async def work() -> None:
            async with consumer.item():
                await asyncio.sleep(3600)

        working = asyncio.ensure_future(work())
        await asyncio.sleep(1)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await counts(hl) == (1, 0)


@simulated
async def test_error_of_a_block_is_raised_even_if_its_nack_fails(hl: Fragile) -> None:
    await put(hl, 1)
    async with consume(hl, "jobs", prefetch=0) as consumer:
        hl.failures["nack"] = [UnavailableError("gone")]
        with pytest.raises(ZeroDivisionError):
            async with consumer.item():
                raise ZeroDivisionError


@simulated
async def test_item_of_a_closed_consumer_raises_closed(hl: Fragile) -> None:
    consumer = consume(hl, "jobs")
    await consumer.aclose()
    with pytest.raises(Closed, match="this consumer is closed"):
        async with consumer.item():
            pass
