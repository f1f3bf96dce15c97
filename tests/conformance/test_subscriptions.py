"""`subscribe` on every broker: rows, batches, credits, moves between members, and the end of a subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import heapline
from heapline.contract.stream import StreamBatch, StreamMessage
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put

pytestmark = pytest.mark.feature("groups")


async def take(subscription: Any, count: int) -> list[Any]:
    """Read this many rows, or batches."""
    found: list[Any] = []
    async with asyncio.timeout(20):
        async for row in subscription:
            found.append(row)
            if len(found) == count:
                break
    return found


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


async def lag(hl: Any) -> int:
    return sum(o.lag for o in await hl.group_offsets("jobs", "g"))


async def test_rows_arrive_in_order_and_end_when_acked(jobs: Any) -> None:
    await put(jobs, *range(20))
    async with jobs.subscribe("jobs", group="g", member="m") as rows:
        found = await take(rows, 20)
        assert [row.payload for row in found] == [str(n).encode() for n in range(20)]
        assert isinstance(found[0], StreamMessage)
        for row in found[:10]:
            await row.ack()
        await rows.ack(found[10:])
        assert await lag(jobs) == 0


async def test_batches_are_columns_and_are_acked_whole_or_in_part(jobs: Any) -> None:
    await put(jobs, *range(20))
    async with jobs.subscribe("jobs", group="g", member="m", batches=True) as batches:
        found: list[StreamBatch] = []
        while sum(map(len, found)) < 20:
            found += await take(batches, 1)
        assert [p for batch in found for p in batch.payloads] == [str(n).encode() for n in range(20)]
        assert found[0].ids.dtype == found[0].offsets.dtype == "int64"
        first = found[0]
        await batches.ack({first.partition: first.offsets[:5].tolist()})
        assert await lag(jobs) == 15
        for batch in found:
            await batch.ack()
        assert await lag(jobs) == 0


async def test_subscribe_creates_the_group_with_its_start_and_settings(jobs: Any) -> None:
    await put(jobs, 1)
    async with jobs.subscribe("jobs", group="g", member="m", start="latest", ack_timeout=77.0, max_retries=2) as rows:
        await until(lambda: is_member(jobs, "m"))
        await put(jobs, 2)
        (row,) = await take(rows, 1)
        assert row.payload == b"2"
        info = await jobs.get_group("jobs", "g")
        assert (info.config.ack_timeout, info.config.max_retries) == (77.0, 2)


async def is_member(hl: Any, member: str, group: str = "g") -> bool:
    try:
        return member in (await hl.get_group("jobs", group)).members
    except heapline.GroupNotFound:
        return False


async def test_outstanding_rows_are_limited_by_credits(jobs: Any) -> None:
    await put(jobs, *range(30))
    async with jobs.subscribe("jobs", group="g", member="m", credits=10) as rows:
        found = await take(rows, 10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(aiter(rows))
        (reported,) = await jobs.group_offsets("jobs", "g")
        assert reported.outstanding == 10
        await rows.ack(found[:4])
        more = await take(rows, 4)
        assert [row.payload for row in more] == [b"10", b"11", b"12", b"13"]
        (reported,) = await jobs.group_offsets("jobs", "g")
        assert reported.outstanding <= 10


async def test_backlog_is_delivered_as_rows_are_acked(world: World, topic: MakeTopic) -> None:
    await topic(partitions=3)
    hl: Any = world.broker
    await put(hl, *range(2500))
    seen: list[tuple[int, int]] = []
    async with hl.subscribe("jobs", group="g", member="m", credits=100, batches=True) as batches:
        async with asyncio.timeout(30):
            async for batch in batches:
                seen += [(batch.partition, offset) for offset in batch.offsets.tolist()]
                await batch.ack()
                if len(seen) >= 2500:
                    break
        assert await lag(hl) == 0
    assert len(set(seen)) == len(seen) == 2500
    for partition in range(3):
        offsets = [o for p, o in seen if p == partition]
        assert offsets == sorted(offsets)


async def test_nacked_row_is_redelivered_with_its_next_attempt(jobs: Any) -> None:
    await put(jobs, 1)
    backoff = {"base": 0.0, "max": 0.0, "jitter": 0.0}
    async with jobs.subscribe("jobs", group="g", member="m", backoff=backoff) as rows:
        (row,) = await take(rows, 1)
        await row.nack("try again")
        (again,) = await take(rows, 1)
        assert (again.offset, again.attempts) == (row.offset, 2)
        await again.ack()
    assert await lag(jobs) == 0


async def test_subscription_reports_assigned_and_revoked_partitions(world: World, topic: MakeTopic) -> None:
    await topic(partitions=4)
    hl: Any = world.broker
    reported: list[tuple[str, list[int]]] = []

    async def assigned(partitions: list[int]) -> None:
        reported.append(("assigned", sorted(partitions)))

    def revoked(partitions: list[int]) -> None:
        reported.append(("revoked", sorted(partitions)))

    async with hl.subscribe("jobs", group="g", member="a", on_assigned=assigned, on_revoked=revoked) as first:
        reading = asyncio.ensure_future(take(first, 1000))
        await until(lambda: has(first, 4))
        assert reported == [("assigned", [0, 1, 2, 3])]
        async with hl.subscribe("jobs", group="g", member="b") as second:
            other = asyncio.ensure_future(take(second, 1000))
            await until(lambda: has(second, 2))
            await until(lambda: has(first, 2))
            assert sorted(first.partitions + second.partitions) == [0, 1, 2, 3]
            assert reported[1] == ("revoked", sorted(second.partitions))
            other.cancel()
        await until(lambda: has(first, 4))
        assert reported[-1][0] == "assigned"
        reading.cancel()


async def has(subscription: Any, count: int) -> bool:
    return len(subscription.partitions) == count


async def test_closing_leaves_the_group_and_releases_unacked_rows(jobs: Any) -> None:
    await put(jobs, *range(5))
    async with jobs.subscribe("jobs", group="g", member="a") as rows:
        found = await take(rows, 5)
        await rows.ack(found[:2])
    assert (await jobs.get_group("jobs", "g")).members == {}
    async with jobs.subscribe("jobs", group="g", member="b") as rows:
        again = await take(rows, 3)
    assert [(row.payload, row.attempts) for row in again] == [(b"2", 1), (b"3", 1), (b"4", 1)]


async def test_subscription_without_a_name_gets_one_of_its_own(jobs: Any) -> None:
    await put(jobs, 1)
    async with jobs.subscribe("jobs", group="g") as rows, jobs.subscribe("jobs", group="g") as other:
        assert rows.member
        assert rows.member != other.member
        (row,) = await take(rows, 1)
        await row.ack()


async def test_another_subscription_of_the_same_member_takes_over(jobs: Any) -> None:
    await put(jobs, 1)
    async with jobs.subscribe("jobs", group="g", member="m") as old:
        (held,) = await take(old, 1)
        async with jobs.subscribe("jobs", group="g", member="m") as new:
            (row,) = await take(new, 1)
            assert row.offset == held.offset
            with pytest.raises(heapline.MemberReplaced):
                await take(old, 1)
            with pytest.raises(heapline.MemberReplaced):
                await held.ack()
            await row.ack()
            assert await lag(jobs) == 0


async def test_rejections_are_raised_to_the_iterating_caller(world: World, topic: MakeTopic) -> None:
    hl: Any = world.broker
    with pytest.raises(heapline.TopicNotFound):
        async with hl.subscribe("none", group="g") as rows:
            await take(rows, 1)
    await topic(streams=False)
    with pytest.raises(heapline.BadRequest, match="streams"):
        async with hl.subscribe("jobs", group="g") as rows:
            await take(rows, 1)


@pytest.mark.parametrize(
    "options", [{"credits": 0}, {"credits": "x"}, {"group": ""}, {"member": ""}, {"start": "middle"},
                {"nonsense": 1}, {"ack_timeout": -1}], ids=str,
)  # fmt: skip
async def test_bad_options_are_refused(jobs: Any, options: dict[str, Any]) -> None:
    with pytest.raises(heapline.RequestError):
        async with jobs.subscribe("jobs", **{"group": "g", **options}) as rows:
            await take(rows, 1)
    assert await jobs.list_groups("jobs") == []


async def test_two_groups_see_everything_each(jobs: Any) -> None:
    await put(jobs, *range(10))
    for group in ("a", "b"):
        async with jobs.subscribe("jobs", group=group, member="m") as rows:
            assert [row.payload for row in await take(rows, 10)] == [str(n).encode() for n in range(10)]


async def test_deleted_group_ends_its_subscriptions_without_being_recreated(jobs: Any) -> None:
    async with jobs.subscribe("jobs", group="g", member="m") as rows:
        await jobs.delete_group("jobs", "g")
        with pytest.raises(heapline.GroupNotFound):
            await take(rows, 1)
    assert await jobs.list_groups("jobs") == []


@pytest.mark.usefixtures("fake_time")
async def test_member_that_waits_for_rows_stays_in_the_group(world: World, jobs: Any) -> None:
    async with jobs.subscribe("jobs", group="g", member="m", member_lease=5.0) as rows:
        await until(lambda: has(rows, 1))
        for _ in range(6):
            await world.advance(2)
            await asyncio.sleep(0)
        assert await is_member(jobs, "m")
        await put(jobs, 1)
        assert [row.payload for row in await take(rows, 1)] == [b"1"]
