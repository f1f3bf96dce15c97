"""consume_batches(): whose leases are extended, and until when. On a broker in memory, in virtual time."""

from __future__ import annotations

import asyncio
import gc

import pytest

from heapline.client.batch_consumer import BatchPrefetcher, consume_batches
from heapline.contract.errors import BadRequest
from heapline.contract.leases import Ack
from tests.unit.client.test_consumer import Fragile, counts, put, simulated

MINUTE = 60.0  # three times the topic's visibility


@simulated
async def test_leases_of_prefetched_and_held_batches_are_extended(hl: Fragile) -> None:
    await put(hl, 6)
    async with consume_batches(hl, "jobs", 3) as batches:
        first = await anext(batches)
        await asyncio.sleep(5 * MINUTE)
        assert await counts(hl) == (0, 6)
        second = await anext(batches)
        await first.ack()
        await second.ack()
    assert (await hl.stats("jobs")).acked_total == 6


@simulated
async def test_message_or_part_of_a_discarded_batch_keeps_its_leases(hl: Fragile) -> None:
    await put(hl, 3)
    for kept in ("message", "part"):
        async with consume_batches(hl, "jobs", 3, prefetch=0) as batches:
            batch = await anext(batches)
            held = batch[2] if kept == "message" else batch[1:]
            del batch
            gc.collect()
            await asyncio.sleep(5 * MINUTE)
            assert await counts(hl) == (0, 3), kept
            del held
            gc.collect()
            await asyncio.sleep(5 * MINUTE)
            assert await counts(hl) == (3, 0), kept
    assert (await hl.stats("jobs")).lease_timeouts_total == 6


@simulated
async def test_partly_settled_batch_is_extended_until_all_is_settled(hl: Fragile) -> None:
    await put(hl, 4)
    async with consume_batches(hl, "jobs", 4, prefetch=0) as batches:
        batch = await anext(batches)
        await batch[0].ack()
        await batch[1:3].ack()
        await asyncio.sleep(5 * MINUTE)
        assert await counts(hl) == (0, 1)
        await batch[3].ack()
        await asyncio.sleep(MINUTE)
        assert not batches.prefetcher._leases, "none of its messages is leased"
    assert (await hl.stats("jobs")).acked_total == 4


@simulated
async def test_settled_batch_is_not_extended(hl: Fragile) -> None:
    await put(hl, 2)
    async with consume_batches(hl, "jobs", 2, prefetch=0) as batches:
        batch = await anext(batches)
        await batch.nack(backoff=3600)
        calls = len(hl.calls)
        await asyncio.sleep(MINUTE)
        assert "do" not in hl.calls[calls:], "an extension"


@simulated
async def test_batch_acked_through_its_client_is_not_extended(hl: Fragile) -> None:
    await put(hl, 3)
    async with consume_batches(hl, "jobs", 3, prefetch=0) as batches:
        batch = await anext(batches)
        prefetcher = batches.prefetcher
        assert isinstance(prefetcher, BatchPrefetcher)
        prefetcher.settled(Ack("jobs", batch[:1].leases))
        assert prefetcher._leases, "only part of it was settled"
        prefetcher.settled(Ack("other", batch.leases))
        assert prefetcher._leases, "of another topic"
        prefetcher.settled(Ack("jobs", batch.leases))
        assert not prefetcher._leases
        await batch.ack()


@simulated
async def test_prefetched_batch_whose_lease_was_lost_is_not_delivered(hl: Fragile) -> None:
    await put(hl, 4)
    async with consume_batches(hl, "jobs", 2) as batches:
        first = await anext(batches)
        while len(batches.prefetcher._here) != 1:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.001)
        await hl.release(batches.prefetcher._here[0])
        await asyncio.sleep(MINUTE)
        second = await anext(batches)
        assert second.attempts == [1, 1]
        assert await counts(hl) == (0, 4)
        await hl.ack(first)
        await hl.ack(second)


@simulated
async def test_closing_returns_all_prefetched_batches_even_if_one_was_lost(hl: Fragile) -> None:
    await put(hl, 6)
    async with consume_batches(hl, "jobs", 2, prefetch=2) as batches:
        await (await anext(batches)).ack()
        while len(batches.prefetcher._here) != 2:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.001)
        await hl.ack(batches.prefetcher._here[0])
    assert await counts(hl) == (2, 0)


@simulated
async def test_unsettled_item_of_batches_is_released_even_if_a_part_was_acked(hl: Fragile) -> None:
    await put(hl, 3)
    async with consume_batches(hl, "jobs", 3, prefetch=0) as batches:
        async with batches.item() as batch:
            await batch[:1].ack()
        assert await counts(hl) == (2, 0)
        with pytest.raises(RuntimeError):
            async with batches.item() as batch:
                raise RuntimeError("bad day")
    assert await counts(hl) == (0, 0), "nacked: they wait for their backoff"
    assert (await hl.stats("jobs")).delayed == 2


def test_bad_options_of_batches_are_refused() -> None:
    for size in (0, -1, "many"):
        with pytest.raises(BadRequest, match="max_messages"):
            consume_batches(None, "jobs", size)  # type: ignore[arg-type]
