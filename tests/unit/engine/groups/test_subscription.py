"""A subscription: credits, heartbeats, partitions that are assigned and revoked, joined acks, and how it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from heapline.contract import subscription
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, DeliveryLost, MemberReplaced, ResourceExhausted, TopicReloading
from heapline.contract.member_rows import offsets_of
from heapline.contract.message import Outgoing
from heapline.contract.stream import StreamBatch
from heapline.contract.subscription import Subscription
from heapline.engine.groups import admin
from heapline.testing import MemoryBroker

SMALL: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 256 << 10}


class Watched(MemoryBroker):
    """Counts the calls of a subscription, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.failing = 0
        self.held: asyncio.Event | None = None

    async def group_fetch(self, *args: Any, **more: Any) -> Any:
        self.calls["fetch" if more.get("max_messages") else "beat"] += 1
        if self.failing:
            self.failing -= 1
            raise TopicReloading("jobs", "a test")
        return await super().group_fetch(*args, **more)

    async def group_ack(self, *args: Any, **more: Any) -> None:
        self.calls["ack"] += 1
        if self.held is not None:
            await self.held.wait()
        await super().group_ack(*args, **more)


async def world(count: int = 0, **topic: Any) -> Watched:
    hl = Watched()
    await hl.__aenter__()
    await hl.create_topic("jobs", **{**SMALL, **topic})
    if count:
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=str(i)) for i in range(count)])
    return hl


async def take(subscription: Subscription, count: int) -> list[Any]:
    return [await anext(subscription) for _ in range(count)]


async def steps(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_embedded_broker_implements_the_contract_of_groups() -> None:
    broker: Broker = MemoryBroker()
    subscription: type[Subscription] = Subscription
    assert broker is not subscription


async def test_outstanding_rows_never_exceed_the_credits() -> None:
    async with await world(50) as hl, hl.subscribe("jobs", group="g", credits=10) as subscription:
        got = await take(subscription, 10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await anext(subscription)
        (offset,) = await hl.group_offsets("jobs", "g")
        assert offset.outstanding == 10
        await subscription.ack(got[3:6])
        assert [row.payload for row in await take(subscription, 3)] == [b"10", b"11", b"12"]


async def test_batches_are_columns_and_are_acked_whole() -> None:
    async with await world(50) as hl:
        async with hl.subscribe("jobs", group="g", batches=True) as subscription:
            batch: StreamBatch = await anext(subscription)
            assert [bytes(p) for p in batch.payloads] == [b"%d" % i for i in range(50)]
            await batch.ack()
        assert (await hl.get_group("jobs", "g")).lag == 0


async def test_acks_during_another_ack_are_joined() -> None:
    async with await world(50) as hl, hl.subscribe("jobs", group="g") as subscription:
        got = await take(subscription, 50)
        hl.held = asyncio.Event()
        acks = []
        for row in got:
            acks.append(asyncio.ensure_future(row.ack()))
            await steps(2)
        hl.held.set()
        await asyncio.gather(*acks)
        assert hl.calls["ack"] == 2
        assert (await hl.get_group("jobs", "g")).lag == 0


async def test_joined_acks_report_lost_rows_only_to_their_callers() -> None:
    async with await world(3) as hl, hl.subscribe("jobs", group="g", member="m") as subscription:
        got = await take(subscription, 3)
        hl.held = asyncio.Event()
        first = asyncio.ensure_future(got[0].ack())
        await steps()
        others = [asyncio.ensure_future(got[1].ack()), asyncio.ensure_future(subscription.ack({0: [12345]}))]
        await steps()
        hl.held.set()
        await first
        await others[0]
        with pytest.raises(DeliveryLost) as lost:
            await others[1]
        assert (lost.value.partitions, lost.value.offsets) == ([0], [12345])


async def test_slow_consumer_sends_heartbeats() -> None:
    more: dict[str, Any] = {"member": "m", "credits": 5, "member_lease": 0.3}
    async with await world(5) as hl, hl.subscribe("jobs", group="g", **more) as subscription:
        got = await take(subscription, 5)
        generation = (await hl.get_group("jobs", "g")).generation
        async with asyncio.timeout(10):
            while hl.calls["beat"] < 5:  # noqa: ASYNC110 - over more than one lease
                await asyncio.sleep(0.005)
        info = await hl.get_group("jobs", "g")
        assert (list(info.members), info.generation) == (["m"], generation)
        await subscription.ack(got)


async def test_forgotten_rows_are_redelivered_even_if_they_used_all_credits() -> None:
    more: dict[str, Any] = {"credits": 2, "ack_timeout": 0.1, "backoff": {"base": 0.0, "jitter": 0.0}}
    async with await world(3) as hl, hl.subscribe("jobs", group="g", member_lease=0.3, **more) as subscription:
        first = await take(subscription, 2)
        async with asyncio.timeout(10):
            again = await take(subscription, 2)
        assert {(row.offset, row.attempts) for row in again} == {(row.offset, 2) for row in first}


async def test_buffered_rows_past_their_deadline_are_not_delivered() -> None:
    async with await world(5) as hl, hl.subscribe("jobs", group="g") as subscription:
        assert len(await take(subscription, 2)) == 2
        subscription._rows_until = 0.0  # as if the consumer were slow
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await anext(subscription)


async def test_members_receive_assigned_and_revoked_partitions() -> None:
    reported: list[tuple[str, list[int]]] = []

    async def revoked(partitions: list[int]) -> None:
        reported.append(("a lost", partitions))

    async with await world(partitions=2) as hl:
        first = hl.subscribe(
            "jobs", group="g", on_assigned=lambda partitions: reported.append(("a got", partitions)), on_revoked=revoked
        )
        async with first:
            assert reported == [("a got", [0, 1])]
            second = hl.subscribe("jobs", group="g", on_assigned=lambda p: reported.append(("b got", p)))
            async with second:
                await steps()
                assert reported[1:] in ([("b got", [1]), ("a lost", [1])], [("b got", [0]), ("a lost", [0])])
                assert sorted(first.partitions + second.partitions) == [0, 1]
            await steps()
            assert reported[-1][0] == "a got"
            assert first.partitions == [0, 1]


async def test_closing_releases_unacked_rows_immediately() -> None:
    async with await world(10) as hl:
        async with hl.subscribe("jobs", group="g") as first:
            got = await take(first, 10)
            await first.ack(got[:4])
        async with hl.subscribe("jobs", group="g") as second:
            again = await take(second, 6)
            assert [row.payload for row in again] == [b"%d" % i for i in range(4, 10)]
            assert {row.attempts for row in again} == {1}


async def test_replaced_member_raises_on_iteration() -> None:
    async with await world() as hl, hl.subscribe("jobs", group="g", member="m") as first:
        waiting = asyncio.ensure_future(anext(first))
        await steps()
        async with hl.subscribe("jobs", group="g", member="m") as second:
            with pytest.raises(MemberReplaced):
                await waiting
            await hl.enqueue("jobs", b"x")
            assert (await anext(second)).payload == b"x"
            await first.close()
            assert list((await hl.get_group("jobs", "g")).members) == ["m"], (
                "closing the old one does not end the new one"
            )


async def test_transient_errors_are_not_raised() -> None:
    async with await world(3) as hl:
        hl.failing = 2
        async with hl.subscribe("jobs", group="g", credits=1) as subscription:
            for i in range(3):
                hl.failing = 1
                row = await anext(subscription)
                assert row.payload == b"%d" % i
                await row.ack()


async def test_iteration_ends_when_the_subscription_or_the_broker_closes() -> None:
    hl = await world()
    subscription = hl.subscribe("jobs", group="g")
    waiting = asyncio.ensure_future(anext(subscription, "end"))
    await steps()
    await subscription.close()
    assert await waiting == "end"
    async with hl.subscribe("jobs", group="g") as other:
        waiting = asyncio.ensure_future(anext(other, "end"))
        await steps()
        await hl.close()
        assert await waiting == "end"


async def test_invalid_subscription_raises_when_it_begins() -> None:
    async with await world() as hl:
        with pytest.raises(BadRequest, match="credits"):
            hl.subscribe("jobs", group="g", credits=0)
        with pytest.raises(BadRequest, match="no setting"):
            await hl.subscribe("jobs", group="g", color="red").__aenter__()
        async with hl.subscribe("jobs", group="g") as subscription:
            with pytest.raises(BadRequest, match="ack rows"):
                await subscription.ack("x")


def test_rows_to_settle_are_accepted_in_any_shape() -> None:
    assert {p: offsets.tolist() for p, offsets in offsets_of({1: (2, 3)}).items()} == {1: [2, 3]}
    assert offsets_of([]) == {}


# -- members that left leave no state ----------------------------------------------------------------------------------


async def members(hl: Watched) -> list[str]:
    return list((await hl.get_group("jobs", "g")).members)


async def test_member_is_removed_if_its_hook_raises_while_joining() -> None:
    def refuse(partitions: list[int]) -> None:
        raise ValueError("not these")

    async with await world() as hl:
        with pytest.raises(ValueError, match="not these"):
            async with hl.subscribe("jobs", group="g", member="m", on_assigned=refuse):
                pass
        assert await members(hl) == []


async def test_member_cancelled_while_joining_is_removed_and_may_rejoin() -> None:
    reported: list[list[int]] = []

    async def slow(partitions: list[int]) -> None:
        reported.append(partitions)
        if len(reported) == 1:
            await asyncio.Event().wait()

    async with await world(1) as hl:
        subscription = hl.subscribe("jobs", group="g", member="m", on_assigned=slow)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await anext(subscription)
        assert await members(hl) == []
        async with asyncio.timeout(5):
            await (await anext(subscription)).ack()
        assert reported == [[0], [0]]
        await subscription.close()


async def test_member_whose_hook_raised_later_leaves_when_it_is_closed() -> None:
    def refuse(partitions: list[int]) -> None:
        raise ValueError("not yet")

    async with await world(partitions=2) as hl:
        async with hl.subscribe("jobs", group="g", member="m", on_revoked=refuse) as subscription:
            await hl.group_fetch("jobs", "g", "n", session="s")
            async with asyncio.timeout(5):
                with pytest.raises(ValueError, match="not yet"):
                    await anext(subscription)
        assert await members(hl) == ["n"]


async def test_closing_ends_a_subscription_that_is_still_joining() -> None:
    async with await world() as hl:
        hl.failing = 1_000_000
        subscription = hl.subscribe("jobs", group="g", member="m")
        asking = asyncio.ensure_future(anext(subscription))
        await steps()
        async with asyncio.timeout(5):
            await subscription.close()
            with pytest.raises(StopAsyncIteration):
                await asking


async def test_subscription_may_be_closed_by_its_own_hook() -> None:
    async with await world(partitions=2) as hl:

        async def close(partitions: list[int]) -> None:
            await subscription.close()

        for hook in ("on_assigned", "on_revoked"):
            subscription = hl.subscribe("jobs", group="g", member="m", **{hook: close})
            async with asyncio.timeout(5):
                if hook == "on_revoked":
                    await subscription.__aenter__()
                    await hl.group_fetch("jobs", "g", "n", session="s")
                with pytest.raises(StopAsyncIteration):
                    await anext(subscription)
                while "m" in await members(hl):
                    await steps()


# -- joined acks, and slow consumers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{0: [-1]}, {"0": [1]}, {-1: [0]}, {0: [1.5]}, {0: [1 << 64]}, {0: 7}, {0: "12"}])
async def test_malformed_ack_is_rejected_without_affecting_joined_acks(wrong: Any) -> None:
    async with await world(2) as hl, hl.subscribe("jobs", group="g") as subscription:
        got = await take(subscription, 2)
        answers = await asyncio.gather(got[0].ack(), subscription.ack(wrong), got[1].ack(), return_exceptions=True)
        assert isinstance(answers[1], BadRequest)
        assert (answers[0], answers[2]) == (None, None)
        assert (await hl.get_group("jobs", "g")).lag == 0


async def test_ack_is_abandoned_at_its_rows_deadline_however_long_each_try_takes() -> None:
    async with await world(1) as hl, hl.subscribe("jobs", group="g", ack_timeout=0.05) as subscription:
        (row,) = await take(subscription, 1)
        tries = 0

        async def hang(*args: Any, **more: Any) -> None:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0.06)
            raise TopicReloading("jobs", "a test")

        hl.group_ack = hang  # type: ignore[method-assign]
        with pytest.raises(TopicReloading):
            await row.ack()
        assert tries == 1


async def test_buffered_rows_that_timed_out_are_not_delivered(clock: list[float]) -> None:
    async with await world(10) as hl, hl.subscribe("jobs", group="g", ack_timeout=60.0, credits=10) as subscription:
        first = await take(subscription, 1)
        clock[0] += 61.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await take(subscription, 1)
        assert first[0].payload == b"0"


async def test_prefetched_rows_shrink_for_a_slow_consumer_and_grow_for_a_fast_one(clock: list[float]) -> None:
    async with await world(1000) as hl, hl.subscribe("jobs", group="g", ack_timeout=60.0, credits=64) as subscription:
        for _ in range(3):
            await take(subscription, 1)
            clock[0] += 61.0
        assert subscription._window <= 24
        for _ in range(20):
            await subscription.ack(await take(subscription, 12))
        assert subscription._window > 24


async def test_unread_subscription_stops_fetching() -> None:
    short = {"ack_timeout": 0.02, "member_lease": 0.03}
    async with await world(1000) as hl, hl.subscribe("jobs", group="g", credits=10, **short) as subscription:
        await take(subscription, 1)
        await asyncio.sleep(0.1)
        fetches, beats = hl.calls["fetch"], hl.calls["beat"]
        while hl.calls["beat"] < beats + 5:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
        assert hl.calls["fetch"] == fetches


async def test_member_and_group_limits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.core.groups.group.MEMBERS_MAX", 1)
    monkeypatch.setattr(admin, "GROUPS_MAX", 1)
    async with await world() as hl, hl.subscribe("jobs", group="g", member="m"), asyncio.timeout(5):
        for group, text in (("g", "members of group 'g'"), ("h", "groups of topic 'jobs'")):
            with pytest.raises(ResourceExhausted, match=text):
                await hl.subscribe("jobs", group=group, member="n").__aenter__()
        await hl.group_fetch("jobs", "g", "m", session="another")  # existing members may join again


async def test_acks_of_non_members_leave_no_state() -> None:
    async with await world(1) as hl:
        await hl.create_group("jobs", "g")
        for number in range(3):
            with pytest.raises(DeliveryLost):
                await hl.group_ack("jobs", "g", f"nobody-{number}", {0: [0]}, session="s")
        assert hl.topics.runner("jobs").streams.sessions._current == {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which a subscription's clock is ahead."""
    ahead = [0.0]
    monkeypatch.setattr(subscription, "_now", lambda: asyncio.get_running_loop().time() + ahead[0])
    return ahead
