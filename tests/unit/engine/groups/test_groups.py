"""Consumer groups on an embedded broker: what members receive, in which order, and the outcome of each row."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, DeliveryLost, GroupExists, GroupNotFound, MemberReplaced
from heapline.contract.groups import PartitionRows
from heapline.contract.message import Outgoing
from heapline.contract.stream import Fetched, StreamMessage
from heapline.engine.groups import handlers
from heapline.testing import HandClock, MemoryBroker

SMALL: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 256 << 10}


async def fetch(hl: MemoryBroker, member: str = "a", group: str = "g", session: str = "s", **more: Any) -> Fetched:
    return await hl.group_fetch("jobs", group, member, session=session, **more)


def rows(fetched: Fetched) -> list[StreamMessage]:
    return [row for batch in fetched.batches for row in batch.messages()]


def payloads(fetched: Fetched) -> list[bytes]:
    return [row.payload for row in rows(fetched)]


async def ack(hl: MemoryBroker, fetched: Fetched, member: str = "a", group: str = "g", session: str = "s") -> None:
    offsets = {}
    for batch in fetched.batches:
        offsets.setdefault(batch.partition, []).extend(batch.offsets.tolist())
    await hl.group_ack("jobs", group, member, offsets, session=session)


async def lag(hl: MemoryBroker, group: str = "g") -> int:
    return sum(offset.lag for offset in await hl.group_offsets("jobs", group))


async def test_group_gets_every_message_once_and_its_lag_becomes_zero() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", **SMALL)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        info = await hl.create_group("jobs", "g")
        assert info.lag == 10
        got = await fetch(hl)
        assert payloads(got) == [b"%d" % i for i in range(10)]
        assert got.partitions == [0]
        await hl.enqueue("jobs", b"10")
        more = await fetch(hl)
        assert payloads(more) == [b"10"]
        assert await lag(hl) == 11
        await ack(hl, more)
        assert await lag(hl) == 10
        await ack(hl, got)
        assert await lag(hl) == 0
        (offset,) = await hl.group_offsets("jobs", "g")
        assert offset.outstanding == 0


async def test_old_fired_rows_and_unwritten_rows_are_delivered_together() -> None:
    clock = HandClock()
    async with MemoryBroker(clock=clock) as hl:
        await hl.create_topic("jobs", **SMALL)
        await hl.create_group("jobs", "g")
        await hl.enqueue_batch("jobs", [Outgoing(b"old %d" % i, delay=10) for i in range(3)])
        hl.topics._runners["jobs"].loaded.journal.cache.clear()
        clock.advance(10.5)
        _, got = await asyncio.gather(hl.enqueue_batch("jobs", [Outgoing(b"new")] * 3), fetch(hl, wait=5))
        for _ in range(5):
            more = await fetch(hl)
            got = Fetched(got.batches + more.batches, more.partitions, more.generation)
        assert sorted(payloads(got)) == [b"new"] * 3 + [b"old %d" % i for i in range(3)]


async def test_subscription_iterates_and_acks() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", **SMALL)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        got = []
        async with hl.subscribe("jobs", group="g", credits=3) as subscription:
            async for row in subscription:
                got.append(row.payload)
                await row.ack()
                if len(got) == 10:
                    break
            assert subscription.partitions == [0]
        assert got == [b"%d" % i for i in range(10)]
        assert await lag(hl) == 0
        assert (await hl.get_group("jobs", "g")).members == {}


async def world(clock: HandClock | None = None, **topic: Any) -> MemoryBroker:
    hl = MemoryBroker(clock)
    await hl.__aenter__()
    await hl.create_topic("jobs", **{**SMALL, **topic})
    return hl


async def let_pass(clock: HandClock, seconds: float) -> None:
    """Let time pass, and wait until everything that became due has happened."""
    clock.advance(seconds)
    for _ in range(5):
        await asyncio.sleep(0)


# -- order -------------------------------------------------------------------------------------------------------------


async def test_delayed_message_is_in_the_stream_where_it_became_due() -> None:
    clock = HandClock()
    hl = await world(clock)
    await hl.create_group("jobs", "early")
    await hl.enqueue("jobs", b"in 20", delay=20)
    await hl.enqueue("jobs", b"in 10", delay=10)
    await hl.enqueue("jobs", b"at once")
    await let_pass(clock, 11)
    await hl.enqueue("jobs", b"after 10")
    await let_pass(clock, 11)
    await hl.enqueue("jobs", b"after 20")
    expected = [b"at once", b"in 10", b"after 10", b"in 20", b"after 20"]
    assert payloads(await fetch(hl, group="early")) == expected
    assert payloads(await fetch(hl, group="late")) == expected
    await hl.close()
    async with MemoryBroker(clock, disk=hl.disk) as again:
        assert payloads(await fetch(again, group="early")) == expected
        assert payloads(await fetch(again, group="created after the restart".replace(" ", "-"))) == expected


async def test_slow_group_gets_a_delayed_message_already_acked_by_a_worker() -> None:
    clock = HandClock()
    hl = await world(clock)
    await hl.create_group("jobs", "slow")
    await hl.enqueue("jobs", b"delayed", delay=5, key="k", headers={"h": "v"})
    clock.advance(6)
    (message,) = await hl.pop("jobs", 1)
    await message.ack()
    await hl.close()
    async with MemoryBroker(clock, disk=hl.disk) as again:
        (row,) = rows(await fetch(again, group="slow"))
        assert (row.payload, row.key, row.headers, row.attempts) == (b"delayed", "k", {"h": "v"}, 1)


async def test_cancelled_and_purged_before_they_fire_are_never_seen() -> None:
    clock = HandClock()
    async with await world(clock) as hl:
        await hl.create_group("jobs", "g")
        known = await hl.enqueue("jobs", b"cancelled", delay=5)
        await hl.cancel("jobs", known.message_id)
        await hl.enqueue("jobs", b"purged", delay=5)
        await hl.purge("jobs")
        clock.advance(6)
        assert payloads(await fetch(hl)) == []
        assert await lag(hl) == 0


async def test_workers_and_groups_do_not_touch_each_other() -> None:
    async with await world() as hl:
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(4)])
        got = await fetch(hl)
        popped = await hl.pop("jobs", 10)
        assert [m.payload for m in popped] == payloads(got)
        await hl.ack(popped)
        assert await lag(hl) == 4
        await ack(hl, got)
        assert (await hl.stats("jobs")).leased == 0
        assert payloads(await fetch(hl, group="other")) == [b"%d" % i for i in range(4)]


# -- acks --------------------------------------------------------------------------------------------------------------


async def test_acks_in_any_order_and_the_committed_offset_is_the_lowest_unacked() -> None:
    async with await world() as hl:
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(5)])
        got = rows(await fetch(hl))
        for at, committed in ((3, 0), (1, 0), (0, 2), (4, 2)):
            await hl.group_ack("jobs", "g", "a", {0: [got[at].offset]}, session="s")
            (offset,) = await hl.group_offsets("jobs", "g")
            assert offset.committed == got[committed].offset if committed < 5 else offset.lag == 0
        assert await lag(hl) == 1
        await hl.group_ack("jobs", "g", "a", {0: [got[2].offset]}, session="s")
        assert await lag(hl) == 0


async def test_unacked_row_is_redelivered_then_becomes_a_dead_letter() -> None:
    clock = HandClock()
    backoff = {"base": 1.0, "factor": 1.0, "jitter": 0.0}
    async with await world(clock) as hl:
        await hl.create_group("jobs", "g", ack_timeout=10.0, max_retries=1, backoff=backoff, member_lease=1000.0)
        await hl.enqueue_batch("jobs", [Outgoing(b"bad"), Outgoing(b"good")])
        first = rows(await fetch(hl))
        await hl.group_ack("jobs", "g", "a", {0: [first[1].offset]}, session="s")
        clock.advance(10.5)
        assert payloads(await fetch(hl)) == [], "its backoff has begun"
        clock.advance(1.5)
        (row,) = rows(await fetch(hl))
        assert (row.payload, row.attempts) == (b"bad", 2)
        await let_pass(clock, 11)
        with pytest.raises(DeliveryLost) as lost:
            await hl.group_ack("jobs", "g", "a", {0: [row.offset]}, session="s")
        assert (lost.value.partitions, lost.value.offsets) == ([0], [row.offset])
        (letter,) = await hl.group_dead_list("jobs", "g")
        assert (letter.payload, letter.attempts, letter.reason, letter.id) == (b"bad", 2, "ack timeout", row.id)
        assert await lag(hl) == 0
        await hl.enqueue("jobs", b"next")
        assert payloads(await fetch(hl)) == [b"next"]


async def test_nacked_row_is_redelivered_after_backoff_across_a_restart() -> None:
    clock = HandClock()
    hl = await world(clock)
    await hl.create_group("jobs", "g", backoff={"base": 5.0, "factor": 1.0, "jitter": 0.0})
    await hl.enqueue_batch("jobs", [Outgoing(b"0"), Outgoing(b"1")])
    got = rows(await fetch(hl))
    await hl.group_nack("jobs", "g", "a", {0: [got[0].offset]}, session="s", reason="not now")
    assert (await hl.group_offsets("jobs", "g"))[0].retrying == 1
    await hl.close()
    async with MemoryBroker(clock, disk=hl.disk) as again:
        assert payloads(await fetch(again)) == [b"1"], "it was in flight when the broker ended"
        clock.advance(6)
        (row,) = rows(await fetch(again))
        assert (row.payload, row.attempts) == (b"0", 2)


async def test_group_dead_letters_can_be_replayed_or_deleted() -> None:
    async with await world() as hl:
        await hl.create_group("jobs", "g", max_retries=0)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(3)])
        got = rows(await fetch(hl))
        await hl.group_nack("jobs", "g", "a", {0: [row.offset for row in got]}, session="s", reason="no")
        assert [letter.payload for letter in await hl.group_dead_list("jobs", "g")] == [b"0", b"1", b"2"]
        assert await hl.group_dead_delete("jobs", "g", {0: [got[2].offset]}) == 1
        assert await hl.group_dead_replay("jobs", "g", {0: [got[0].offset, 99999]}) == 1
        assert await hl.group_dead_replay("jobs", "g") == 1
        again = await fetch(hl)
        assert sorted(payloads(again)) == [b"0", b"1"]
        assert await lag(hl) == 2
        await ack(hl, again)
        assert await lag(hl) == 0
        assert await hl.group_dead_list("jobs", "g") == []


# -- members -----------------------------------------------------------------------------------------------------------


async def test_partitions_are_spread_over_members_and_move_without_rows_in_flight() -> None:
    clock = HandClock()
    async with await world(clock, partitions=4) as hl:
        await hl.create_group("jobs", "g", ack_timeout=30.0, member_lease=60.0)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=str(i)) for i in range(200)])
        one = await fetch(hl, "a", session="a")
        assert one.partitions == [0, 1, 2, 3]
        two = await fetch(hl, "b", session="b")
        assert two.partitions == []
        assert rows(two) == [], "rows that a holds are not delivered to b"
        kept = (await fetch(hl, "a", session="a")).partitions
        assert len(kept) == 2
        await ack(hl, one, session="a")
        after = await fetch(hl, "b", session="b")
        assert sorted(kept + after.partitions) == [0, 1, 2, 3]
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=str(i)) for i in range(200)])
        shares = [rows(await fetch(hl, name, session=name)) for name in "ab"]
        assert {row.partition for row in shares[0]} == set(kept)
        assert {row.partition for row in shares[1]} == set(after.partitions)
        assert len(shares[0]) + len(shares[1]) == 200


async def test_leaving_member_releases_immediately_and_dead_one_by_timeout() -> None:
    clock = HandClock()
    async with await world(clock) as hl:
        await hl.create_group("jobs", "g", ack_timeout=40.0, member_lease=10.0, backoff={"base": 0.0, "jitter": 0.0})
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(3)])
        await fetch(hl, "a", session="a")
        await hl.group_leave("jobs", "g", "a", session="a")
        got = rows(await fetch(hl, "b", session="b"))
        assert [row.attempts for row in got] == [1, 1, 1], "leaving is not a failure"
        clock.advance(11)
        assert (await fetch(hl, "c", session="c")).partitions == [], "b may still process its rows"
        assert list((await hl.get_group("jobs", "g")).members) == ["c"]
        for _ in range(3):
            clock.advance(9.5)
            await fetch(hl, "c", session="c", max_messages=0)
        clock.advance(2)
        again = await fetch(hl, "c", session="c")
        assert again.partitions == [0]
        assert [(row.payload, row.attempts) for row in rows(again)] == [(b"0", 2), (b"1", 2), (b"2", 2)]


async def test_new_session_takes_over_the_name_and_rows() -> None:
    async with await world() as hl:
        await hl.enqueue("jobs", b"x")
        await fetch(hl, session="one")
        (row,) = rows(await fetch(hl, session="two"))
        assert row.attempts == 1
        for call in (fetch(hl, session="one"), hl.group_ack("jobs", "g", "a", {0: [row.offset]}, session="one")):
            with pytest.raises(MemberReplaced):
                await call
        await hl.group_ack("jobs", "g", "a", {0: [row.offset]}, session="two")
        assert await lag(hl) == 0


async def test_new_partitions_are_assigned_to_members() -> None:
    async with await world(partitions=1) as hl:
        await fetch(hl)
        await hl.update_topic("jobs", partitions=3)
        assert (await fetch(hl)).partitions == [0, 1, 2]
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=str(i)) for i in range(50)])
        got = rows(await fetch(hl))
        assert len(got) == 50
        assert {row.partition for row in got} == {0, 1, 2}


# -- waiting -----------------------------------------------------------------------------------------------------------


async def test_waiting_fetch_is_woken_by_rows_retries_and_new_partitions() -> None:
    clock = HandClock()
    async with await world(clock, partitions=2) as hl:
        await hl.create_group("jobs", "g", backoff={"base": 5.0, "factor": 1.0, "jitter": 0.0})
        await fetch(hl)
        waiting = asyncio.ensure_future(fetch(hl, wait=30.0))
        await asyncio.sleep(0)
        await hl.enqueue("jobs", b"x")
        (row,) = rows(await waiting)
        await hl.group_nack("jobs", "g", "a", {row.partition: [row.offset]}, session="s")
        waiting = asyncio.ensure_future(fetch(hl, wait=30.0))
        await asyncio.sleep(0)
        clock.advance(6)
        (again,) = rows(await waiting)
        assert again.attempts == 2
        waiting = asyncio.ensure_future(fetch(hl, wait=30.0))
        await asyncio.sleep(0)
        await fetch(hl, "b", session="b")
        assert len((await waiting).partitions) == 1
        await hl.group_ack("jobs", "g", "a", {row.partition: [row.offset]}, session="s")
        waiting = asyncio.ensure_future(fetch(hl, wait=30.0))
        await asyncio.sleep(0)
        await hl.delete_group("jobs", "g")
        with pytest.raises(GroupNotFound):
            await waiting
        with pytest.raises(GroupNotFound):
            await fetch(hl)  # a subscription does not create its group again


async def test_cancelled_fetch_loses_nothing() -> None:
    cancelled = 0
    for steps in range(12):
        async with await world() as hl:
            await fetch(hl)
            waiting = asyncio.ensure_future(fetch(hl, wait=30.0))
            await asyncio.sleep(0)
            enqueued = asyncio.ensure_future(hl.enqueue("jobs", b"x"))
            for _ in range(steps):
                await asyncio.sleep(0)
            if waiting.done():
                break
            waiting.cancel()
            cancelled += 1
            await asyncio.gather(waiting, enqueued, return_exceptions=True)
            assert payloads(await fetch(hl)) == [b"x"], f"cancelled after {steps} steps"
    assert cancelled > 2


# -- offsets -----------------------------------------------------------------------------------------------------------


async def test_group_starts_at_the_requested_offset() -> None:
    clock = HandClock()
    async with await world(clock) as hl:
        for i in range(3):
            await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i)] * 2)
            moment = clock.now()
            clock.advance(10)
        assert payloads(await fetch(hl, group="latest", start="latest")) == []
        assert payloads(await fetch(hl, group="offset", start=3)) == [b"1", b"2", b"2"]
        assert payloads(await fetch(hl, group="map", start={0: 5})) == [b"2"]
        assert payloads(await fetch(hl, group="time", start=moment)) == [b"2", b"2"]
        for group, expected in (("latest", 0), ("offset", 3), ("map", 1), ("time", 2)):
            assert await lag(hl, group) == expected


async def test_reset_group_has_the_right_lag() -> None:
    async with await world() as hl:
        await hl.create_group("jobs", "g")
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(5)])
        await ack(hl, await fetch(hl))
        (offset,) = await hl.reset_offsets("jobs", "g", to=3)
        assert (offset.committed, offset.lag) == (3, 3), "one row of the log created the group"
        assert payloads(await fetch(hl)) == [b"2", b"3", b"4"]
        (offset,) = await hl.reset_offsets("jobs", "g", to="latest")
        assert offset.lag == 0
        (offset,) = await hl.reset_offsets("jobs", "g", to="earliest")
        assert offset.lag == 5
        assert len(rows(await fetch(hl))) == 5
        with pytest.raises(BadRequest, match="beyond the end"):
            await hl.reset_offsets("jobs", "g", to=10_000)


async def test_observer_groups_show_lag_and_are_moved_by_resets() -> None:
    async with await world() as hl:
        await hl.create_group("jobs", "g", observer=True)
        await hl.enqueue_batch("jobs", [Outgoing(b"x")] * 3)
        assert await lag(hl) == 3
        with pytest.raises(BadRequest, match="observer"):
            await fetch(hl)
        await hl.reset_offsets("jobs", "g", to="latest")
        info = await hl.get_group("jobs", "g")
        assert (info.lag, info.holding) == (0, False)


# -- what is refused ---------------------------------------------------------------------------------------------------


async def test_bad_requests_say_what_to_do_and_change_nothing() -> None:
    async with await world() as hl:
        await hl.create_group("jobs", "g", ack_timeout=5.0)
        await hl.create_group("jobs", "g", ack_timeout=5.0)
        with pytest.raises(GroupExists) as error:
            await hl.create_group("jobs", "g", ack_timeout=6.0)
        assert error.value.differing == ["ack_timeout"]
        with pytest.raises(GroupExists):
            await fetch(hl, config={"ack_timeout": 6.0})
        await fetch(hl, config={"ack_timeout": 5.0})
        with pytest.raises(BadRequest, match="no setting 'nope'"):
            await hl.create_group("jobs", "h", nope=1)
        with pytest.raises(BadRequest, match="earliest"):
            await hl.create_group("jobs", "h", start="yesterday")  # type: ignore[arg-type]
        for call in (hl.get_group("jobs", "h"), hl.delete_group("jobs", "h"), hl.group_offsets("jobs", "h")):
            with pytest.raises(GroupNotFound):
                await call
        with pytest.raises(BadRequest, match="offsets"):
            await hl.group_ack("jobs", "g", "a", {0: ["x"]}, session="s")  # type: ignore[list-item]
        await hl.create_topic("plain", streams=False)
        with pytest.raises(BadRequest, match="streams=False"):
            await hl.create_group("plain", "g")
        assert [info.name for info in await hl.list_groups("jobs")] == ["g"]
        assert await hl.list_groups("plain") == []


async def test_fetches_are_limited_in_bytes_but_return_at_least_one_row() -> None:
    async with await world() as hl:
        await hl.enqueue_batch("jobs", [Outgoing(b"x" * 10_000)] * 5)
        assert len(rows(await fetch(hl, max_bytes=1))) == 1
        assert len(rows(await fetch(hl, max_bytes=30_000))) == 2
        assert len(rows(await fetch(hl))) == 2


async def test_row_shows_its_enqueue_priority_from_memory_and_disk() -> None:
    hl = await world()
    await hl.create_group("jobs", "g")
    sent = await hl.enqueue("jobs", b"x", priority=3, delay=100)
    await hl.reschedule("jobs", sent.id, delay=0, priority=7)
    assert [row.priority for row in rows(await fetch(hl))] == [3]
    await hl.close()
    async with MemoryBroker(disk=hl.disk) as again:
        assert [row.priority for row in rows(await fetch(again))] == [3]
        assert [m.priority for m in await again.pop("jobs")] == [7]


async def test_rows_of_many_shares_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joins: list[int] = []
    join = handlers.np.concatenate
    monkeypatch.setattr(handlers.np, "concatenate", lambda columns, *args: (joins.append(0), join(columns, *args))[1])
    found = handlers._columns([PartitionRows(n % 2, pack([n])) for n in range(1000)] + [PartitionRows(2, pack([]))])
    assert {partition: len(column) for partition, column in found.items()} == {0: 500, 1: 500}
    assert len(joins) == 2
