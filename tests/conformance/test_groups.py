"""Topics read as streams by consumer groups, one call at a time. Subscriptions are in test_subscriptions.py."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.stream import Fetched, StreamMessage
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, all_fired, drain, put

pytestmark = pytest.mark.feature("groups")

WAIT = 8.0  # seconds to wait for what must arrive


async def fetch(hl: Any, member: str = "m", *, session: str | None = None, group: str = "g", **options: Any) -> Fetched:
    """Fetch what a member gets without waiting."""
    found: Fetched = await hl.group_fetch("jobs", group, member, session=session or f"s-{member}", **options)
    return found


async def rows(hl: Any, member: str = "m", **options: Any) -> list[StreamMessage]:
    """Fetch rows; there must be some."""
    async with asyncio.timeout(WAIT):
        fetched = await fetch(hl, member, wait=WAIT, **options)
        while not fetched.batches:  # the first fetch may only report its partitions
            fetched = await fetch(hl, member, wait=WAIT, **options)
    return [row for batch in fetched.batches for row in batch.messages()]


async def all_rows(hl: Any, count: int, member: str = "m", **options: Any) -> list[StreamMessage]:
    """Fetch this many rows, in as many fetches as needed."""
    found: list[StreamMessage] = []
    while len(found) < count:
        found += await rows(hl, member, **options)
    assert len(found) == count
    return found


def offsets(some: list[StreamMessage]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in some:
        found.setdefault(row.partition, []).append(row.offset)
    return found


async def ack(hl: Any, some: list[StreamMessage], member: str = "m", session: str | None = None) -> None:
    await hl.group_ack("jobs", "g", member, offsets(some), session=session or f"s-{member}")


async def nack(hl: Any, some: list[StreamMessage], member: str = "m", reason: str | None = None) -> None:
    await hl.group_nack("jobs", "g", member, offsets(some), session=f"s-{member}", reason=reason)


async def lag(hl: Any, group: str = "g") -> int:
    return sum(o.lag for o in await hl.group_offsets("jobs", group))


def payloads(some: list[StreamMessage]) -> list[bytes]:
    return [row.payload for row in some]


# -- what a group sees -------------------------------------------------------------------------------------------------


async def test_group_sees_every_message_in_due_order_not_by_priority(jobs: Any) -> None:
    await put(jobs, 3, 1, 2)
    await put(jobs, 9)
    found = await all_rows(jobs, 4)
    assert payloads(found) == [b"3", b"1", b"2", b"9"]
    assert [row.priority for row in found] == [3, 1, 2, 9]
    assert [row.attempts for row in found] == [1, 1, 1, 1]
    assert sorted(row.offset for row in found) == [row.offset for row in found]


async def test_row_has_every_field_of_its_message(world: World, jobs: Any) -> None:
    sent = await jobs.enqueue("jobs", b"body", priority=-5, key="k", headers={"a": "b"})
    await jobs.enqueue("jobs", b"bare")
    full, bare = await all_rows(jobs, 2)
    assert (full.topic, full.id, full.payload, full.priority, full.key, full.headers) == (
        "jobs", sent.id, b"body", -5, "k", {"a": "b"},
    )  # fmt: skip
    assert (bare.key, bare.headers) == (None, {})
    assert abs(full.enqueued_at - world.now()) < timedelta(seconds=1)


async def test_delayed_message_gets_its_offset_when_it_fires(world: World, jobs: Any) -> None:
    await jobs.enqueue("jobs", b"late", delay=5)
    await jobs.enqueue("jobs", b"soon")
    (first,) = await all_rows(jobs, 1)
    assert first.payload == b"soon"
    await world.advance(6)
    await all_fired(jobs)
    await jobs.enqueue("jobs", b"last")
    assert payloads(await all_rows(jobs, 2)) == [b"late", b"last"]
    assert payloads(await all_rows(jobs, 3, "other", group="later")) == [b"soon", b"late", b"last"]


async def test_workers_and_groups_do_not_touch_each_other(jobs: Any) -> None:
    await put(jobs, 2, 1)
    assert await drain(jobs) == [b"1", b"2"]
    found = await all_rows(jobs, 2)
    assert payloads(found) == [b"2", b"1"]
    await ack(jobs, found)
    await put(jobs, 3)
    await ack(jobs, await all_rows(jobs, 1))
    assert (await jobs.stats("jobs")).ready == 1
    assert payloads(await all_rows(jobs, 3, group="another")) == [b"2", b"1", b"3"]


async def test_message_cancelled_before_its_due_time_is_never_delivered(world: World, jobs: Any) -> None:
    gone = await jobs.enqueue("jobs", b"gone", delay=5)
    await jobs.enqueue("jobs", b"stays", delay=5)
    await jobs.cancel("jobs", gone.id)
    await world.advance(6)
    await all_fired(jobs)
    assert payloads(await all_rows(jobs, 1)) == [b"stays"]
    assert await lag(jobs) == 1


async def test_max_messages_limits_outstanding_rows(jobs: Any) -> None:
    await put(jobs, *range(10))
    first = await rows(jobs, max_messages=3)
    assert payloads(first) == [b"0", b"1", b"2"]
    second = await rows(jobs, max_messages=4)
    assert payloads(second) == [b"3", b"4", b"5", b"6"]


async def test_start_sets_the_first_offset_of_a_new_group(world: World, jobs: Any) -> None:
    await put(jobs, 1)
    await world.advance(10)
    moment = world.now()
    await world.advance(10)
    await put(jobs, 2)
    await jobs.create_group("jobs", "latest", start="latest")
    await jobs.create_group("jobs", "time", start=moment)
    await put(jobs, 3)
    assert payloads(await all_rows(jobs, 3, group="early")) == [b"1", b"2", b"3"]
    assert payloads(await all_rows(jobs, 2, group="time")) == [b"2", b"3"]
    assert payloads(await all_rows(jobs, 1, group="latest")) == [b"3"]


# -- acks --------------------------------------------------------------------------------------------------------------


async def test_committed_offset_is_the_highest_with_nothing_unacked_below(jobs: Any) -> None:
    await put(jobs, 0, 1, 2)
    a, b, c = await all_rows(jobs, 3)
    await ack(jobs, [c])
    (reported,) = await jobs.group_offsets("jobs", "g")
    assert (reported.lag, reported.outstanding) == (2, 2)
    assert reported.committed <= a.offset
    await ack(jobs, [a])
    (reported,) = await jobs.group_offsets("jobs", "g")
    assert a.offset < reported.committed <= b.offset
    await ack(jobs, [b])
    (reported,) = await jobs.group_offsets("jobs", "g")
    assert reported.committed > c.offset
    assert (reported.lag, reported.outstanding, reported.retrying, reported.dead) == (0, 0, 0, 0)


async def test_lag_is_0_when_all_is_acked_and_counts_due_rows(world: World, jobs: Any) -> None:
    await put(jobs, *range(5))
    await jobs.enqueue("jobs", b"x", delay=5)
    await ack(jobs, await all_rows(jobs, 5))
    assert await lag(jobs) == 0
    await world.advance(6)
    await all_fired(jobs)
    assert await lag(jobs) == 1
    await ack(jobs, await all_rows(jobs, 1))
    assert await lag(jobs) == 0


async def test_acking_an_acked_row_succeeds(jobs: Any) -> None:
    await put(jobs, 1, 2)
    found = await all_rows(jobs, 2)
    await ack(jobs, found)
    await ack(jobs, found)
    assert await lag(jobs) == 0


async def test_ack_reports_unheld_rows_after_acking_the_others(world: World, jobs: Any) -> None:
    await jobs.create_group("jobs", "g", ack_timeout=5.0, member_lease=300.0)
    await put(jobs, 1, 2)
    (a,) = await rows(jobs, max_messages=1)
    await world.advance(6)
    (b,) = await rows(jobs, max_messages=1)
    if b.offset == a.offset:
        (b,) = await rows(jobs, max_messages=1)
    await world.advance(0)
    with pytest.raises(heapline.DeliveryLost) as reported:
        await jobs.group_ack("jobs", "g", "m", {0: [b.offset, 1 << 40]}, session="s-m")
    assert (reported.value.partitions, reported.value.offsets) == ([0], [1 << 40])
    assert (reported.value.topic, reported.value.group) == ("jobs", "g")


# -- failures ----------------------------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"backoff": {"base": 1.0, "factor": 1.0, "jitter": 0.0}, "ack_timeout": 5.0}


@pytest.mark.usefixtures("fake_time")
async def test_nacked_row_is_redelivered_after_backoff_without_blocking_others(world: World, jobs: Any) -> None:
    await jobs.create_group("jobs", "g", member_lease=600.0, **QUICK)
    await put(jobs, 1, 2)
    a, b = await all_rows(jobs, 2)
    await nack(jobs, [a], reason="not now")
    await ack(jobs, [b])
    assert (await fetch(jobs)).batches == []
    (reported,) = await jobs.group_offsets("jobs", "g")
    assert (reported.lag, reported.retrying, reported.outstanding) == (1, 1, 0)
    await world.advance(2)
    (again,) = await all_rows(jobs, 1)
    assert (again.offset, again.id, again.payload, again.attempts) == (a.offset, a.id, b"1", 2)
    await ack(jobs, [again])
    assert await lag(jobs) == 0


@pytest.mark.usefixtures("fake_time")
async def test_row_not_acked_in_time_is_redelivered(world: World, jobs: Any) -> None:
    await jobs.create_group("jobs", "g", member_lease=600.0, **QUICK)
    await put(jobs, 1)
    (a,) = await all_rows(jobs, 1)
    await world.advance(7)
    await world.advance(2)
    (again,) = await all_rows(jobs, 1)
    assert (again.offset, again.attempts) == (a.offset, 2)


@pytest.mark.usefixtures("fake_time")
async def test_row_that_failed_too_often_is_a_dead_letter_of_the_group_alone(world: World, jobs: Any) -> None:
    await jobs.create_group("jobs", "g", member_lease=600.0, max_retries=1, **QUICK)
    sent = await jobs.enqueue("jobs", b"bad", priority=4, key="k", headers={"a": "b"})
    await put(jobs, 7)
    a, b = await all_rows(jobs, 2)
    await nack(jobs, [a], reason="first")
    await world.advance(2)
    (again,) = await all_rows(jobs, 1)
    await nack(jobs, [again], reason="second")
    await ack(jobs, [b])
    (dead,) = await jobs.group_dead_list("jobs", "g")
    assert (dead.partition, dead.offset, dead.id, dead.attempts, dead.reason) == (0, a.offset, sent.id, 2, "second")
    assert (dead.payload, dead.priority, dead.key, dead.headers) == (b"bad", 4, "k", {"a": "b"})
    assert abs(dead.died_at - world.now()) < timedelta(seconds=5)
    (reported,) = await jobs.group_offsets("jobs", "g")
    assert (reported.lag, reported.dead) == (0, 1)
    assert (await jobs.stats("jobs")).dead == 0, "the topic's own dead letters are separate"


async def dead_letters(hl: Any, count: int) -> list[StreamMessage]:
    """Make dead letters of rows of a group without retries."""
    await hl.create_group("jobs", "g", member_lease=600.0, max_retries=0, **QUICK)
    await put(hl, *range(count))
    found = await all_rows(hl, count)
    await nack(hl, found, reason="no")
    return found


async def test_dead_letters_are_replayed_all_or_some(jobs: Any) -> None:
    _a, b, _c = await dead_letters(jobs, 3)
    assert await jobs.group_dead_replay("jobs", "g", {0: [b.offset, 1 << 40]}) == 1
    (again,) = await all_rows(jobs, 1)
    assert (again.offset, again.payload) == (b.offset, b"1")
    await ack(jobs, [again])
    assert await jobs.group_dead_replay("jobs", "g") == 2
    assert sorted(payloads(await all_rows(jobs, 2))) == [b"0", b"2"]
    assert await jobs.group_dead_list("jobs", "g") == []


async def test_dead_letters_are_deleted_all_or_some(jobs: Any) -> None:
    a, b, _c = await dead_letters(jobs, 3)
    assert await jobs.group_dead_delete("jobs", "g", {0: [a.offset]}) == 1
    assert [d.offset for d in await jobs.group_dead_list("jobs", "g", 1)] == [b.offset]
    assert await jobs.group_dead_delete("jobs", "g") == 2
    assert await jobs.group_dead_list("jobs", "g") == []
    assert (await fetch(jobs)).batches == []


# -- going back --------------------------------------------------------------------------------------------------------


async def test_reset_to_earliest_and_latest(jobs: Any) -> None:
    await put(jobs, 1, 2)
    await ack(jobs, await all_rows(jobs, 2))
    (reported,) = await jobs.reset_offsets("jobs", "g", to="earliest")
    assert reported.lag == 2
    assert payloads(await all_rows(jobs, 2)) == [b"1", b"2"]
    (reported,) = await jobs.reset_offsets("jobs", "g", to="latest")
    assert reported.lag == 0
    await put(jobs, 3)
    assert payloads(await all_rows(jobs, 1)) == [b"3"]


async def test_reset_to_an_offset_and_to_offsets_by_partition(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2)
    hl: Any = world.broker
    for n in range(10):
        await hl.enqueue("jobs", str(n).encode(), key=f"k{n}")
    found = await all_rows(hl, 10)
    await ack(hl, found)
    first = [row for row in found if row.partition == 0]
    await hl.reset_offsets("jobs", "g", to={0: first[1].offset})
    assert payloads(await all_rows(hl, len(first) - 1)) == payloads(first[1:])
    assert await lag(hl) == len(first) - 1
    await hl.reset_offsets("jobs", "g", to=0)
    assert await lag(hl) == 10
    await hl.reset_offsets("jobs", "g", to="latest", partitions=[1])
    assert await lag(hl) == len(first)


async def test_group_can_be_reset_to_a_time(world: World, jobs: Any) -> None:
    await put(jobs, 1)
    await world.advance(10)
    moment = world.now()
    await world.advance(10)
    await put(jobs, 2, 3)
    await ack(jobs, await all_rows(jobs, 3))
    await jobs.reset_offsets("jobs", "g", to=moment)
    assert payloads(await all_rows(jobs, 2)) == [b"2", b"3"]


# -- members -----------------------------------------------------------------------------------------------------------


async def spread(hl: Any, *members: str) -> dict[str, set[int]]:
    """Return what each member reads once all know of each other."""
    for _ in range(3):
        shares = {m: set((await fetch(hl, m)).partitions) for m in members}
    return shares


async def test_members_share_the_partitions_and_nothing_is_held_by_two(world: World, topic: MakeTopic) -> None:
    await topic(partitions=4)
    hl: Any = world.broker
    shares = await spread(hl, "a", "b")
    assert shares["a"] | shares["b"] == {0, 1, 2, 3}
    assert not shares["a"] & shares["b"]
    assert {len(shares["a"]), len(shares["b"])} == {2}
    for n in range(40):
        await hl.enqueue("jobs", str(n).encode(), key=f"k{n}")
    seen: dict[tuple[int, int], str] = {}
    for member in ("a", "b", "a", "b"):
        for batch in (await fetch(hl, member)).batches:
            assert batch.partition in shares[member]
            for offset in batch.offsets.tolist():
                assert (batch.partition, offset) not in seen
                seen[batch.partition, offset] = member
    assert len(seen) == 40
    info = await hl.get_group("jobs", "g")
    assert {m: set(p) for m, p in info.members.items()} == shares
    assert {o.partition: o.member for o in info.offsets} == {p: m for m, some in shares.items() for p in some}


async def test_partition_changes_owner_only_without_outstanding_rows(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2)
    hl: Any = world.broker
    for n in range(20):
        await hl.enqueue("jobs", str(n).encode(), key=f"k{n}")
    held = await all_rows(hl, 20, "a")
    before = await fetch(hl, "a")
    await fetch(hl, "b")
    after = await fetch(hl, "a")
    assert after.generation > before.generation
    assert len(after.partitions) == 1, "one is revoked"
    assert (await fetch(hl, "b")).partitions == [], "and is not assigned while its rows are outstanding"
    await ack(hl, held, "a")
    fetched = await fetch(hl, "b", wait=WAIT)
    assert sorted(fetched.partitions + after.partitions) == [0, 1]
    assert await lag(hl) == 0


async def test_rows_of_a_leaving_member_are_redelivered_without_an_attempt(jobs: Any) -> None:
    await put(jobs, 1, 2)
    held = await all_rows(jobs, 2, "a")
    assert (await fetch(jobs, "b")).batches == []
    await jobs.group_leave("jobs", "g", "a", session="s-a")
    found = await all_rows(jobs, 2, "b")
    assert [(row.offset, row.attempts) for row in found] == [(row.offset, 1) for row in held]
    await ack(jobs, found, "b")
    assert list((await jobs.get_group("jobs", "g")).members) == ["b"]


async def test_new_session_takes_over_a_members_name_and_rows(jobs: Any) -> None:
    await put(jobs, 1, 2)
    held = await all_rows(jobs, 2, session="old")
    found = await all_rows(jobs, 2, session="new")
    assert payloads(found) == payloads(held)
    for call in (
        fetch(jobs, session="old"), ack(jobs, held, session="old"),
        jobs.group_nack("jobs", "g", "m", offsets(held), session="old"),
        jobs.group_leave("jobs", "g", "m", session="old"),
    ):  # fmt: skip
        with pytest.raises(heapline.MemberReplaced) as reported:
            await call
    assert (reported.value.topic, reported.value.group, reported.value.member) == ("jobs", "g", "m")
    await ack(jobs, found, session="new")
    assert await lag(jobs) == 0


@pytest.mark.usefixtures("fake_time")
async def test_silent_member_is_removed_and_its_rows_redelivered(world: World, jobs: Any) -> None:
    await jobs.create_group("jobs", "g", member_lease=20.0, **QUICK)
    await put(jobs, 1)
    await all_rows(jobs, 1, "silent")
    await world.advance(15)
    await fetch(jobs, "b")
    await world.advance(10)
    (row,) = await all_rows(jobs, 1, "b")
    assert row.attempts == 2
    assert list((await jobs.get_group("jobs", "g")).members) == ["b"]


async def test_waiting_fetch_is_woken_by_new_rows(jobs: Any) -> None:
    await fetch(jobs)
    await put(jobs, 1)
    assert payloads(await all_rows(jobs, 1)) == [b"1"]


# -- groups ------------------------------------------------------------------------------------------------------------


async def test_group_is_created_read_listed_and_deleted(world: World, jobs: Any) -> None:
    made = await jobs.create_group("jobs", "b", ack_timeout=12.5, max_retries=3)
    assert (made.name, made.topic, made.members, made.lag, made.holding) == ("b", "jobs", {}, 0, True)
    assert (made.config.ack_timeout, made.config.max_retries) == (12.5, 3)
    assert await jobs.get_group("jobs", "b") == made
    await jobs.create_group("jobs", "a")
    assert sorted(info.name for info in await jobs.list_groups("jobs")) == ["a", "b"]
    await jobs.delete_group("jobs", "b")
    assert [info.name for info in await jobs.list_groups("jobs")] == ["a"]
    with pytest.raises(heapline.GroupNotFound):
        await jobs.get_group("jobs", "b")


async def test_recreating_a_group_keeps_it_and_rejects_other_settings(jobs: Any) -> None:
    await jobs.create_group("jobs", "g", max_retries=3)
    await put(jobs, 1)
    await ack(jobs, await all_rows(jobs, 1))
    again = await jobs.create_group("jobs", "g", start="earliest", max_retries=3)
    assert again.lag == 0
    with pytest.raises(heapline.GroupExists) as reported:
        await jobs.create_group("jobs", "g", max_retries=4)
    assert (reported.value.topic, reported.value.group, reported.value.differing) == ("jobs", "g", ["max_retries"])


async def test_observer_shows_its_lag_and_is_moved_by_resets_alone(jobs: Any) -> None:
    await put(jobs, 1)
    info = await jobs.create_group("jobs", "o", observer=True)
    assert (info.lag, info.holding) == (1, False)
    await put(jobs, 2)
    assert await lag(jobs, "o") == 2
    with pytest.raises(heapline.BadRequest, match="observer"):
        await fetch(jobs, group="o")
    await jobs.reset_offsets("jobs", "o", to="latest")
    assert await lag(jobs, "o") == 0


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_groups_keep_their_offsets_across_a_restart(world: World, topic: MakeTopic, memory: Any) -> None:
    await topic()
    hl: Any = world.broker
    await hl.create_group("jobs", "g", max_retries=0, **QUICK)
    await put(hl, 0, 1, 2, 3)
    a, b, c, _d = await all_rows(hl, 4)
    await ack(hl, [a, c])
    await nack(hl, [b], reason="no")
    before = await hl.get_group("jobs", "g")
    hl = await world.reopen(memory)
    after = await hl.get_group("jobs", "g")
    assert (after.config, after.lag, after.members) == (before.config, 1, before.members)
    assert [dead.offset for dead in await hl.group_dead_list("jobs", "g")] == [b.offset]
    assert payloads(await all_rows(hl, 1)) == [b"3"], "deliveries are not recorded, so it is delivered again"
    assert payloads(await all_rows(hl, 4, group="made-later")) == [b"0", b"1", b"2", b"3"]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ü", "-a", "x" * 200, 5, None])
async def test_bad_names_are_refused(jobs: Any, name: Any) -> None:
    calls = [
        lambda: jobs.create_group("jobs", name), lambda: jobs.group_fetch("jobs", name, "m", session="s"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(heapline.RequestError):
            await call()
    assert await jobs.list_groups("jobs") == []


@pytest.mark.parametrize("name", ["", "x" * 300, "\ud800", 5, None])
async def test_bad_names_of_members_and_sessions_are_refused(jobs: Any, name: Any) -> None:
    await jobs.create_group("jobs", "g")
    for member, session in ((name, "s"), ("m", name)):
        for call in (
            lambda m, s: jobs.group_fetch("jobs", "g", m, session=s),
            lambda m, s: jobs.group_ack("jobs", "g", m, {0: [1]}, session=s),
            lambda m, s: jobs.group_leave("jobs", "g", m, session=s),
        ):
            with pytest.raises(heapline.BadRequest):
                await call(member, session)
    assert (await jobs.get_group("jobs", "g")).members == {}


async def test_topic_without_streams_has_no_groups(world: World, topic: MakeTopic) -> None:
    await topic(streams=False)
    hl: Any = world.broker
    for call in (hl.create_group("jobs", "g"), hl.group_fetch("jobs", "g", "m", session="s")):
        with pytest.raises(heapline.BadRequest, match="streams"):
            await call


async def test_missing_group_or_topic_raises_not_found(jobs: Any) -> None:
    for call in (
        jobs.get_group("jobs", "g"), jobs.delete_group("jobs", "g"), jobs.group_offsets("jobs", "g"),
        jobs.reset_offsets("jobs", "g", to="earliest"), jobs.group_dead_list("jobs", "g"),
        jobs.group_dead_replay("jobs", "g"), jobs.group_dead_delete("jobs", "g"),
        jobs.group_ack("jobs", "g", "m", {0: [1]}, session="s"),
    ):  # fmt: skip
        with pytest.raises(heapline.GroupNotFound) as reported:
            await call
        assert (reported.value.topic, reported.value.group) == ("jobs", "g")
    for call in (jobs.create_group("none", "g"), jobs.list_groups("none"), jobs.get_group("none", "g")):
        with pytest.raises(heapline.TopicNotFound):
            await call


@pytest.mark.parametrize(
    "place", ["middle", -1, 1.5, None, True, datetime(2030, 1, 1), {0: -1}, {"0": 1}, {0: "x"}, [1], b"earliest"]
)
async def test_invalid_reset_offsets_are_refused_and_change_nothing(jobs: Any, place: Any) -> None:
    await jobs.create_group("jobs", "g")
    before = await jobs.get_group("jobs", "g")
    for call in (
        lambda: jobs.create_group("jobs", "other", start=place), lambda: jobs.reset_offsets("jobs", "g", to=place),
        lambda: jobs.group_fetch("jobs", "other", "m", session="s", start=place),
    ):  # fmt: skip
        with pytest.raises(heapline.RequestError):
            await call()
    assert await jobs.list_groups("jobs") == [before]


@pytest.mark.parametrize("config", [{"ack_timeout": -1}, {"nonsense": 1}, {"max_retries": 999}, {"observer": "yes"}])
async def test_bad_settings_are_refused(jobs: Any, config: dict[str, Any]) -> None:
    for call in (jobs.create_group("jobs", "g", **config), fetch(jobs, config=config)):
        with pytest.raises(heapline.BadRequest):
            await call
    assert await jobs.list_groups("jobs") == []


@pytest.mark.parametrize("rows", [{0: [-1]}, {0: "12"}, {0: [1.5]}, {"0": [1]}, {-1: [1]}, {0: 5}, [1], None])
async def test_malformed_rows_are_rejected(jobs: Any, rows: Any) -> None:
    await put(jobs, 1)
    await all_rows(jobs, 1)
    for call in (jobs.group_ack, jobs.group_nack):
        with pytest.raises(heapline.BadRequest):
            await call("jobs", "g", "m", rows, session="s-m")
    assert await lag(jobs) == 1


async def test_unknown_partitions_are_rejected(jobs: Any) -> None:
    await jobs.create_group("jobs", "g")
    for to, partitions in (("earliest", [7]), ({7: 1}, None)):
        with pytest.raises(heapline.BadRequest):
            await jobs.reset_offsets("jobs", "g", to=to, partitions=partitions)


def test_every_broker_has_groups(broker: Broker) -> None:
    assert isinstance(broker, Broker)
