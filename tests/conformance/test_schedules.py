"""Schedules: messages that are enqueued at given times, once each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.errors import (
    BadName,
    BadRequest,
    PayloadTooLarge,
    ScheduleNotFound,
    TopicNotFound,
    Unsupported,
)  # fmt: skip
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World

AT = "heapline-scheduled-at"
pytestmark = [pytest.mark.feature("schedules"), pytest.mark.usefixtures("fake_time")]


async def fired(hl: Broker, topic: str = "jobs") -> list[str]:
    """Ack all ready firings and return their times."""
    found: list[str] = []
    while messages := await hl.pop(topic, 100):
        found += [m.headers[AT] for m in messages]
        await hl.ack(messages)
    return sorted(found)


def text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")


async def test_schedule_enqueues_its_message_at_each_time(world: World, jobs: Broker) -> None:
    await jobs.create_schedule(
        "nightly", cron="0 3 * * *", tz="Europe/Berlin", topic="jobs", payload=b"\x00\xffreport", priority=-7, key="k",
        headers={"a": "b"}, ttl=3600, max_retries=2,
    )  # fmt: skip
    await world.advance(2 * 3600 - 1)
    assert await jobs.pop("jobs") == []
    await world.advance(1)
    message = (await jobs.pop("jobs"))[0]
    assert (message.payload, message.priority, message.key) == (b"\x00\xffreport", -7, "k")
    assert message.headers == {"a": "b", "heapline-schedule": "default/nightly", AT: "2026-01-01T02:00:00.000+00:00"}
    await world.advance(24 * 3600)
    assert await fired(jobs) == ["2026-01-02T02:00:00.000+00:00"]


@pytest.mark.feature("fairness")
async def test_schedule_returns_every_setting_it_was_created_with(world: World, topic: MakeTopic) -> None:
    await topic("shop/jobs", fairness="keys")
    hl, now = world.broker, world.now()
    starts = (now + timedelta(hours=1)).astimezone(timezone(timedelta(hours=2)))
    made = await hl.create_schedule(
        "shop/often", every=timedelta(minutes=1), topic="shop/jobs", payload=b"\xff", starts=starts,
        ends=now + timedelta(days=1), misfire="all", grace=timedelta(seconds=5), makeup_max=7,
        priority=3, key="k", headers={"a": "ä"}, ttl=1.5, max_retries=0, fairness_key="me",
    )  # fmt: skip
    assert made == heapline.ScheduleInfo(
        name="shop/often", topic="shop/jobs", every=60.0, payload=b"\xff", starts=starts, ends=now + timedelta(days=1),
        misfire="all", grace=5.0, makeup_max=7, priority=3, key="k", headers={"a": "ä"}, ttl=1.5, max_retries=0,
        fairness_key="me", next_at=starts, created_at=now, changed_at=now,
    )  # fmt: skip
    assert made.state == "active"
    assert await hl.get_schedule("shop/often") == made
    assert await hl.list_schedules() == [made]


async def test_name_without_a_namespace_is_in_the_default_one(jobs: Broker) -> None:
    made = await jobs.create_schedule("default/a", every=60, topic="default/jobs")
    assert (made.name, made.topic, made.tz) == ("a", "jobs", None)
    assert await jobs.get_schedule("a") == made
    assert (await jobs.create_schedule("b", cron="@daily", topic="jobs")).tz == "UTC"


async def test_list_is_sorted_by_name_and_shows_each_state(world: World, jobs: Broker) -> None:
    for name in ("b", "z/a", "a"):
        await jobs.create_schedule(name, every=60, topic="jobs")
    await jobs.create_schedule("c", every=60, topic="jobs", ends=world.now() + timedelta(seconds=90))
    await jobs.pause_schedule("b")
    await world.advance(120)
    infos = await jobs.list_schedules()
    assert [(i.name, i.state, i.fired_count) for i in infos] == [
        ("a", "active", 2), ("b", "paused", 0), ("c", "over", 1), ("z/a", "active", 2)
    ]  # fmt: skip
    assert [info.next_at is None for info in infos] == [False, True, True, False]


async def test_more_schedules_than_a_page_are_all_listed(world: World, jobs: Broker) -> None:
    large = bytes(60 << 10)
    names = [f"s{n:03}" for n in range(80)]
    for name in names:
        await jobs.create_schedule(name, every=60, topic="jobs", payload=large)
    infos = await jobs.list_schedules()
    assert [info.name for info in infos] == names
    assert all(info.payload == large for info in infos)


async def test_firings_and_pauses_outlast_a_restart(world: World, jobs: Broker) -> None:
    start = world.now()
    await jobs.create_schedule("a", every=60, topic="jobs")
    await jobs.create_schedule("b", every=60, topic="jobs")
    await jobs.pause_schedule("b")
    await world.advance(60)
    before = await jobs.list_schedules()
    hl = await world.reopen("journal")
    assert await hl.list_schedules() == before
    await world.advance(59)
    assert await fired(hl) == [text(start + timedelta(seconds=60))]
    await world.advance(1)
    assert await fired(hl) == [text(start + timedelta(seconds=120))]


@pytest.mark.parametrize(("misfire", "kept"), [("skip", []), ("once", [4]), ("all", [1, 2, 3, 4])])
async def test_misfire_policy_selects_which_missed_firings_are_enqueued(
    world: World, jobs: Broker, misfire: Any, kept: list[int]
) -> None:
    start = world.now()
    await jobs.create_schedule("a", every=3600, topic="jobs", misfire=misfire)
    hl = await world.away(4.5 * 3600)
    assert await fired(hl) == [text(start + timedelta(hours=n)) for n in kept]
    await world.advance(1800)
    assert await fired(hl) == [text(start + timedelta(hours=5))], "then on time again"


async def test_daylight_saving_keeps_the_time_of_day(world: World, jobs: Broker) -> None:
    await jobs.create_schedule("a", cron="30 3 * * *", tz="Europe/Berlin", topic="jobs", misfire="all", makeup_max=1000)
    hl = await world.away(100 * 86400)
    moments = [datetime.fromisoformat(at) for at in await fired(hl)]
    assert len(moments) == 100
    assert {moment.time().hour for moment in moments} == {1, 2}
    changed = next(moment for moment in moments if moment.hour == 1)
    assert changed == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)


async def test_paused_schedule_fires_nothing_and_makes_nothing_up(world: World, jobs: Broker) -> None:
    await jobs.create_schedule("a", every=60, topic="jobs", misfire="all")
    paused = await jobs.pause_schedule("a")
    assert (paused.state, paused.paused_at, paused.next_at) == ("paused", world.now(), None)
    assert await jobs.pause_schedule("a") == paused
    await world.advance(600)
    assert await fired(jobs) == []
    resumed = await jobs.resume_schedule("a")
    assert (resumed.state, resumed.paused_at) == ("active", None)
    assert await jobs.resume_schedule("a") == resumed
    await world.advance(60)
    assert len(await fired(jobs)) == 1


async def test_deleted_schedule_stops_firing_and_its_messages_stay(world: World, jobs: Broker) -> None:
    await jobs.create_schedule("a", every=60, topic="jobs")
    await world.advance(60)
    await jobs.delete_schedule("a")
    await world.advance(600)
    assert len(await fired(jobs)) == 1
    assert await jobs.list_schedules() == []


async def test_recreating_a_schedule_under_its_name_changes_it(world: World, jobs: Broker) -> None:
    made = await jobs.create_schedule("a", every=60, topic="jobs", payload=b"old")
    await world.advance(30)
    assert await jobs.create_schedule("a", every=60, topic="jobs", payload=b"old") == made, "the same changes nothing"
    changed = await jobs.create_schedule("a", every=60, topic="jobs", payload=b"new")
    assert (changed.created_at, changed.changed_at) == (made.created_at, world.now())
    await world.advance(30)
    assert [m.payload for m in await jobs.pop("jobs", 10)] == [b"new"]


async def test_recreated_schedule_fires_from_its_new_start(world: World, jobs: Broker) -> None:
    for count in range(1, 4):
        await jobs.create_schedule("a", cron="* * * * *", topic="jobs")
        await world.advance(60)
        assert len(await fired(jobs)) == 1, count
        await jobs.delete_schedule("a")


async def test_full_topic_is_reported_and_firings_follow_later(world: World, topic: MakeTopic) -> None:
    await topic(max_backlog=1)
    hl = world.broker
    await hl.enqueue("jobs", b"in the way", headers={AT: "0"})
    await hl.create_schedule("a", every=60, topic="jobs")
    await world.advance(60)
    info = await hl.get_schedule("a")
    assert info.state == "failing"
    assert "max_backlog" in str(info.problem)
    await hl.purge("jobs")
    await world.advance(6)
    assert len(await fired(hl)) == 1
    assert (await hl.get_schedule("a")).state == "active"


async def test_schedule_of_a_deleted_topic_stays_and_reports_the_problem(world: World, jobs: Broker) -> None:
    await jobs.create_schedule("a", every=60, topic="jobs")
    await jobs.delete_topic("jobs")
    await world.advance(60)
    info = await jobs.get_schedule("a")
    assert info.state == "failing"
    assert "jobs" in str(info.problem)
    await jobs.delete_schedule("a")


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "needs cron"),
    ({"cron": "0 3 * * *", "every": 60}, "not both"),
    ({"every": 0.5}, "every=0.5"),
    ({"every": "60"}, "every='60'"),
    ({"cron": "0 3 * *"}, "five fields"),
    ({"cron": "0 3 31 2 *"}, "never"),
    ({"cron": "0 3 * * *", "tz": "Mars/Phobos"}, "Mars/Phobos"),
    ({"every": 60, "tz": "UTC"}, "tz needs cron"),
    ({"every": 60, "misfire": "maybe"}, "misfire"),
    ({"every": 60, "makeup_max": 0}, "makeup_max"),
    ({"every": 60, "starts": datetime(2026, 1, 1)}, "time zone"),
    ({"every": 60, "ends": datetime(2020, 1, 1, tzinfo=UTC)}, "never fires"),
    ({"every": 60, "payload": "text"}, "bytes"),
    ({"every": 60, "priority": 1 << 70}, "priority"),
    ({"every": 60, "headers": {"heapline-schedule": "x"}}, "heapline-schedule"),
    ({"every": 60, "headers": {"a": 1}}, "headers"),
    ({"every": 60, "ttl": -1}, "ttl"),
    ({"every": 60, "max_retries": 1000}, "max_retries"),
    ({"every": 60, "fairness_key": "x"}, "fairness"),
    ({"every": 60, "delay": 5}, "has no delay"),
]


async def test_bad_schedule_is_refused_with_what_to_do(jobs: Broker) -> None:
    for fields, reported in BAD:
        with pytest.raises((BadRequest, Unsupported), match=reported):
            await jobs.create_schedule("a", topic="jobs", **fields)
    assert await jobs.list_schedules() == []


async def test_schedule_whose_message_its_topic_rejects_is_refused(world: World, topic: MakeTopic) -> None:
    await topic(max_payload_bytes=100)
    with pytest.raises(PayloadTooLarge):
        await world.broker.create_schedule("a", every=60, topic="jobs", payload=bytes(101))
    with pytest.raises(TopicNotFound):
        await world.broker.create_schedule("a", every=60, topic="others")
    assert await world.broker.list_schedules() == []


async def test_missing_schedule_raises_not_found(broker: Broker) -> None:
    for call in (broker.get_schedule, broker.pause_schedule, broker.resume_schedule, broker.delete_schedule):
        with pytest.raises(ScheduleNotFound) as error:
            await call("a")
        assert error.value.schedule == "default/a"
        with pytest.raises(BadName):
            await call("no good name")
    with pytest.raises(BadName):
        await broker.create_schedule("a/b/c", every=60, topic="jobs")
