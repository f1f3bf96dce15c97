"""Schedules of an embedded broker fire on time and once each, despite crashes, full disks and corruption."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import (
    BadRequest,
    CorruptionError,
    HeaplineError,
    PayloadTooLarge,
    ScheduleNotFound,
    StaleSequence,
    StorageFull,
    TopicNotFound,
    TopicReloading,
)  # fmt: skip
from heapline.contract.schedules import make_schedule
from heapline.core.schedules.book import Book
from heapline.engine.schedules import firings
from heapline.engine.schedules.store import ScheduleStore
from heapline.testing import HandClock
from heapline.testing.memory import MemoryBroker
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.node import Node
from tests.unit.engine.rig import SMALL, Rig, opened

AT = "heapline-scheduled-at"
STORE = "_system/schedules"


async def fired(hl: Any, topic: str = "jobs") -> list[str]:
    """Ack all ready firings and return their times."""
    found = []
    while messages := await hl.pop(topic, 100):
        found += [m.headers[AT] for m in messages]
        await hl.ack(messages)
    return sorted(found)


async def pass_time(rig: Rig, seconds: float) -> None:
    rig.clock.advance(seconds)
    await rig.hl.fire_schedules()


# -- crashes -----------------------------------------------------------------------------------------------------------


@functools.cache
def scheduled_on_disk() -> FakeDisk:
    node = Node(0, BrokerConfig(spare_segment_bytes=0))

    async def make() -> None:
        await node.hl.create_topic("jobs", **SMALL, partitions=2, dedup_window=1.0)
        await node.hl.create_schedule("tick", every=10, topic="jobs", misfire="all")

    node.live(lambda: [make()])
    return node.disk


class Crashing:
    """Fire a schedule with the power cut at a given disk operation, and reopen when the topic has long
    forgotten which keys it saw."""

    def __init__(self, seed: int) -> None:
        self.node = Node(seed, BrokerConfig(spare_segment_bytes=0, reclaim_interval=3600.0))
        self.node.disk = scheduled_on_disk().crash(self.node.rng)
        self.seen: list[str] = []
        self.owed: list[str] = []

    def run(self, steps: int, steps_of_open: int | None = None) -> bool:
        """Whether the power was cut before the end."""
        self.node.disk.cut_power_in(steps)
        cut = self.node.live(lambda: [asyncio.sleep(21)]) == "crash"
        self.node.clock.advance(150)
        if steps_of_open is not None:
            self.node.disk.cut_power_in(steps_of_open)
            self.node.live(lambda: [self.node.hl.fire_schedules()])
        self.node.live(lambda: [self._look()])
        return cut

    async def _look(self) -> None:
        await self.node.hl.fire_schedules()
        info = await self.node.hl.get_schedule("tick")
        assert info.fired_at is not None
        assert info.created_at is not None
        self.seen = await fired(self.node.hl)
        count = (info.fired_at - info.created_at) // timedelta(seconds=10)
        moments = [info.created_at + n * timedelta(seconds=10) for n in range(1, count + 1)]
        self.owed = [moment.isoformat(timespec="milliseconds") for moment in moments]
        assert count >= 15

    def judge(self) -> None:
        assert len(set(self.seen)) == len(self.seen), "none twice"
        assert self.seen == self.owed, "none missing"


@pytest.fixture
def recognized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how the topic recognized its firings."""
    found: list[str] = []
    enqueue = firings._enqueue

    async def watched(*args: Any) -> int:
        try:
            new = await enqueue(*args)
        except StaleSequence:
            found.append("stale")
            raise
        if new < len(args[1]):
            found.append("duplicate")
        return new

    monkeypatch.setattr(firings, "_enqueue", watched)
    return found


def test_power_cut_at_every_step_of_a_firing_leaves_each_firing_once(recognized: list[str]) -> None:
    for steps in range(1000):
        world = Crashing(steps)
        cut = world.run(steps)
        world.judge()
        if not cut:
            assert set(recognized) & {"stale", "duplicate"}, "some cuts are between the firing and its mark"
            return
    pytest.fail("it never finished")


def test_power_cut_during_recovery_from_one_leaves_each_firing_once() -> None:
    whole = Crashing(0)
    whole.run(1 << 30)
    for steps, steps_of_open in itertools.product(range(20, 60, 9), range(10, 60, 7)):
        world = Crashing(steps)
        world.run(steps, steps_of_open)
        world.judge()


async def test_firing_whose_number_was_forgotten_is_not_fired_again(
    recognized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is lost, and the topic's window passes: keys would be forgotten; numbers are refused as stale."""
    async with opened(topic={"dedup_window": 1.0}) as rig:
        await rig.hl.create_schedule("tick", every=10, topic="jobs", misfire="all")
        write = ScheduleStore.write
        monkeypatch.setattr(ScheduleStore, "write", _refused)
        await pass_time(rig, 10)
        monkeypatch.setattr(ScheduleStore, "write", write)
        rig.clock.advance(300)
        await rig.hl.enqueue("jobs", b"", headers={AT: "another"})  # a partition forgets old keys when it changes
        await pass_time(rig, 40)
        assert recognized == ["stale", "stale"], "together with later ones, then alone"
        assert len(await fired(rig.hl)) == 35 + 1
        assert (await rig.hl.get_schedule("tick")).fired_count == 35


async def _refused(*args: Any) -> None:
    raise TopicReloading(STORE, "the disk is gone")


# -- in time -----------------------------------------------------------------------------------------------------------


async def test_schedule_fires_on_time_and_shows_the_next_firing() -> None:
    async with opened() as rig:
        made = await rig.hl.create_schedule(
            "a", cron="0 3 * * *", tz="Europe/Berlin", topic="jobs", payload=b"x", key="k"
        )  # fmt: skip
        assert (made.name, made.topic, made.tz, made.state) == ("a", "jobs", "Europe/Berlin", "active")
        assert str(made.next_at) == "2026-01-01 02:00:00+00:00"
        await pass_time(rig, 2 * 3600 - 1)
        assert await rig.hl.pop("jobs") == []
        await pass_time(rig, 1)
        message = (await rig.hl.pop("jobs"))[0]
        assert (message.payload, message.key) == (b"x", "k")
        assert message.headers == {"heapline-schedule": "default/a", AT: "2026-01-01T02:00:00.000+00:00"}
        info = await rig.hl.get_schedule("a")
        assert (str(info.fired_at), info.fired_count) == ("2026-01-01 02:00:00+00:00", 1)
        assert str(info.next_at) == "2026-01-02 02:00:00+00:00"


def test_scheduler_fires_due_schedules_automatically() -> None:
    node = Node(1, BrokerConfig(spare_segment_bytes=0))

    async def work() -> None:
        await node.hl.create_topic("jobs", **SMALL)
        await node.hl.create_schedule("tick", every=60, topic="jobs")
        await asyncio.sleep(59.9)
        assert await fired(node.hl) == []
        await asyncio.sleep(0.2)
        assert len(await fired(node.hl)) == 1
        node.clock.jump_wall(3600)
        await asyncio.sleep(11)
        assert len(await fired(node.hl)) == 1, "after the clock is set forward, what is owed fires once"

    assert node.live(lambda: [work()]) == "done"


@pytest.mark.parametrize(("misfire", "count"), [("skip", 0), ("once", 1), ("all", 4)])
async def test_misfire_policy_decides_what_fires_after_downtime(misfire: str, count: int) -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=3600, topic="jobs", misfire=misfire)
        await rig.hl.close()
        rig.clock.advance(4.5 * 3600)
        await rig.open()
        await rig.hl.fire_schedules()
        assert len(await fired(rig.hl)) == count
        assert rig.hl.topics.schedules.missed == 1
        await pass_time(rig, 1800)
        assert len(await fired(rig.hl)) == 1, "then on time again"


async def test_thousands_of_due_schedules_are_all_fired() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("s0", every=60, topic="jobs")
        for n in range(600):
            rig.hl.topics.schedules._book.set(make_schedule(f"s{n}", every=60, topic="jobs"), 0)
        await pass_time(rig, 60)
        assert (await rig.hl.stats("jobs")).ready == 600
        commits = rig.hl.topics.schedules.store.topic.runner.counters.commits  # type: ignore[union-attr]
        assert commits < 100, "their marks are written together"


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_full_topic_is_reported_and_retried() -> None:
    async with opened(topic={"max_backlog": 1}) as rig:
        await rig.hl.enqueue("jobs", b"in the way")
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        await pass_time(rig, 60)
        info = await rig.hl.get_schedule("a")
        assert info.state == "failing"
        assert "max_backlog" in str(info.problem)
        assert info.fired_count == 0
        await rig.hl.purge("jobs")
        await pass_time(rig, 4.9)
        assert (await rig.hl.get_schedule("a")).state == "failing", "it is not retried continuously"
        await pass_time(rig, 0.2)
        assert (await rig.hl.get_schedule("a")).state == "active"
        assert len(await fired(rig.hl)) == 1


async def test_schedule_of_a_deleted_topic_stays_and_reports_it() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        await rig.hl.create_topic("others", **SMALL)
        await rig.hl.create_schedule("b", every=60, topic="others")
        await rig.hl.delete_topic("jobs")
        await pass_time(rig, 60)
        assert "does not exist" in str((await rig.hl.get_schedule("a")).problem)
        assert len(await fired(rig.hl, "others")) == 1, "it delays no other schedule"
        await rig.reopen()
        await rig.hl.fire_schedules()
        assert "does not exist" in str((await rig.hl.get_schedule("a")).problem)
        await rig.topic()
        await pass_time(rig, 5)
        assert len(await fired(rig.hl)) == 1
        await rig.hl.delete_topic("jobs")
        rig.clock.advance(60)
        await rig.hl.delete_schedule("a")
        assert [info.name for info in await rig.hl.list_schedules()] == ["b"]


async def test_failed_schedule_write_keeps_the_stored_schedule() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        rig.disk.inject("pwritev", errno.EIO, path=STORE)
        with pytest.raises(TopicReloading):
            await rig.hl.pause_schedule("a")
        await _until_known(rig)
        assert (await rig.hl.get_schedule("a")).state == "active"
        await pass_time(rig, 60)
        assert len(await fired(rig.hl)) == 1


async def test_failed_write_of_a_mark_fires_nothing_twice(recognized: list[str]) -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        rig.disk.inject("pwritev", errno.EIO, path=STORE)
        await pass_time(rig, 60)
        await _until_known(rig)
        await pass_time(rig, 5)
        assert recognized == ["duplicate"]
        assert len(await fired(rig.hl)) == 1
        assert (await rig.hl.get_schedule("a")).fired_count == 1


async def test_failing_store_is_not_retried_continuously(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        tries = []

        async def refused(*args: Any) -> None:
            tries.append(args)
            raise StorageFull

        monkeypatch.setattr(ScheduleStore, "write", refused)
        await pass_time(rig, 60)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(tries) == 1
        await pass_time(rig, 5)
        assert len(tries) == 2
        monkeypatch.undo()
        await pass_time(rig, 5)
        assert (await rig.hl.get_schedule("a")).fired_count == len(await fired(rig.hl)) == 1


async def test_journal_of_schedules_stays_small_however_often_they_fire() -> None:
    async with MemoryBroker(clock := HandClock(), reclaim_interval=0.01) as hl:
        await hl.create_topic("jobs", max_backlog=0)
        await hl.create_schedule("rare", cron="0 0 1 1 *", topic="jobs", payload=b"kept")
        await hl.create_schedule("often", every=60, topic="jobs", payload=bytes(200 << 10))
        for _ in range(100):  # the size of five segments
            clock.advance(60)
            await hl.fire_schedules()
        runner = hl.topics.schedules.store.topic.runner
        assert runner is not None
        async with asyncio.timeout(20):
            while runner.maintenance.segments_reclaimed_total < 3:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        hl_again = MemoryBroker(clock, disk=hl.disk)
        await hl.close()
        async with hl_again:
            infos = await hl_again.list_schedules()
            assert [(info.name, info.fired_count) for info in infos] == [("often", 100), ("rare", 0)]
            assert infos[1].payload == b"kept"


async def _until_known(rig: Rig) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await rig.hl.list_schedules()
                return
            except TopicReloading:
                await asyncio.sleep(0)


async def test_full_disk_refuses_a_schedule_and_keeps_none() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        runner = rig.hl.topics.schedules.store.topic.runner
        assert runner is not None
        rig.disk.capacity = rig.disk.used
        made = ["a"]
        with contextlib.suppress(StorageFull):
            for n in range(100):
                await rig.hl.create_schedule(f"large{n}", every=60, topic="jobs", payload=bytes(200 << 10))
                made.append(f"large{n}")
        assert len(made) < 100
        names = [info.name for info in await rig.hl.list_schedules()]
        assert names == sorted(made)
        rig.disk.capacity = None
        await rig.reopen()
        assert [info.name for info in await rig.hl.list_schedules()] == names


async def test_damaged_journal_of_schedules_keeps_topics_open() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        await rig.hl.close()
        for path in [path for path in rig.files(".seg") if STORE in path]:
            rig.disk.damage(path, 0)
        await rig.open()
        await rig.hl.enqueue("jobs", b"x")
        with pytest.raises(CorruptionError):
            await rig.hl.list_schedules()
        with pytest.raises(CorruptionError):
            await rig.hl.create_schedule("b", every=60, topic="jobs")


# -- changing ----------------------------------------------------------------------------------------------------------


async def test_due_firings_run_before_a_schedule_is_changed_paused_or_deleted() -> None:
    async with opened() as rig:
        for count, act in enumerate((
            lambda: rig.hl.create_schedule("a", every=60, topic="jobs", payload=b"new"),
            lambda: rig.hl.pause_schedule("a"),
            lambda: rig.hl.delete_schedule("a"),
        )):  # fmt: skip
            await rig.hl.create_schedule("a", every=60, topic="jobs", payload=bytes(count))
            rig.clock.advance(60)
            await act()
            assert len(await fired(rig.hl)) == 1
            if count < 2:
                await rig.hl.delete_schedule("a")


async def test_recreated_schedule_is_new_even_with_the_same_times() -> None:
    async with opened() as rig:
        for _ in range(3):
            await rig.hl.create_schedule("a", cron="0 3 * * *", topic="jobs")
            await pass_time(rig, 3 * 3600)
            assert len(await fired(rig.hl)) == 1
            await rig.hl.delete_schedule("a")
            rig.clock.jump_wall(-3 * 3600)
            await rig.reopen()
            assert await rig.hl.list_schedules() == []


async def test_equal_schedule_again_changes_nothing() -> None:
    async with opened() as rig:
        made = await rig.hl.create_schedule("a", every=60, topic="jobs")
        rig.clock.advance(30)
        assert await rig.hl.create_schedule("default/a", every=timedelta(minutes=1), topic="default/jobs") == made


async def test_pause_outlasts_a_restart_and_makes_nothing_up() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs", misfire="all")
        paused = await rig.hl.pause_schedule("a")
        assert (paused.state, paused.next_at) == ("paused", None)
        await rig.reopen()
        await pass_time(rig, 600)
        assert await fired(rig.hl) == []
        assert (await rig.hl.resume_schedule("a")).state == "active"
        await pass_time(rig, 60)
        assert len(await fired(rig.hl)) == 1


async def test_schedule_book_older_than_its_topics_does_not_fire_twice() -> None:
    """As after a restore: schedules were copied first, then one was changed and fired, then its topic was copied."""
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs", misfire="all", grace=0)
        store = rig.hl.topics.schedules.store
        old = await store.read()
        rig.clock.advance(1)
        await rig.hl.create_schedule("a", every=60, topic="jobs", misfire="all", grace=0, payload=b"new")
        await pass_time(rig, 120)
        rig.hl.topics.schedules._kept.book = Book.from_state(old)
        await pass_time(rig, 60)
        await pass_time(rig, 5)
        found = await fired(rig.hl)
        assert len(found) == len(set(found)) == 3
        assert (await rig.hl.get_schedule("a")).state == "active"


# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_message_its_topic_rejects_is_rejected_when_scheduled() -> None:
    async with opened(topic={"max_payload_bytes": 100}) as rig:
        with pytest.raises(PayloadTooLarge):
            await rig.hl.create_schedule("a", every=60, topic="jobs", payload=bytes(101))
        with pytest.raises(BadRequest, match="fairness"):
            await rig.hl.create_schedule("a", every=60, topic="jobs", fairness_key="me")
        with pytest.raises(TopicNotFound):
            await rig.hl.create_schedule("a", every=60, topic="others")
        with pytest.raises(BadRequest, match="has no evry"):
            await rig.hl.create_schedule("a", evry=60, topic="jobs")
        assert await rig.hl.list_schedules() == []
        assert await rig.hl.list_topics() != []
        for call in (rig.hl.get_schedule, rig.hl.pause_schedule, rig.hl.resume_schedule, rig.hl.delete_schedule):
            with pytest.raises(ScheduleNotFound):
                await call("a")


async def test_schedule_with_a_too_large_message_is_rejected() -> None:
    async with opened(topic={"segment_bytes": 16 << 20, "max_payload_bytes": 3 << 20}) as rig:
        with pytest.raises(BadRequest, match="elsewhere"):
            await rig.hl.create_schedule("a", every=60, topic="jobs", payload=bytes(2 << 20))
        await rig.hl.create_schedule("a", every=60, topic="jobs", payload=bytes((2 << 20) - 5000))
        await rig.reopen()
        await pass_time(rig, 60)
        assert len((await rig.hl.pop("jobs"))[0].payload) == (2 << 20) - 5000


async def test_schedules_add_no_listed_topic_and_no_files_until_used() -> None:
    async with opened() as rig:
        assert await rig.hl.list_schedules() == []
        assert not [path for path in rig.files(".seg") if STORE in path]
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        assert [info.name for info in await rig.hl.list_topics()] == ["jobs"]


async def test_closed_broker_refuses() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        await rig.hl.close()
        with pytest.raises(HeaplineError):
            await rig.hl.list_schedules()


def test_in_memory_broker_keeps_schedules_in_another_loop() -> None:
    hl = MemoryBroker()

    async def make() -> None:
        await hl.create_topic("jobs", **SMALL)
        await hl.create_schedule("a", every=60, topic="jobs")

    asyncio.run(make())
    assert [info.name for info in asyncio.run(hl.list_schedules())] == ["a"]
    hl.abandon()


# -- interrupted changes -----------------------------------------------------------------------------------------------

#: The changes in order, and the schedule after each: its payload and state, or None if it was deleted.
STEPS: list[tuple[str, dict[str, Any], tuple[bytes, str] | None]] = [
    ("create_schedule", {"every": 10, "topic": "jobs", "payload": b"old", "misfire": "all"}, (b"old", "active")),
    ("create_schedule", {"every": 10, "topic": "jobs", "payload": b"new", "misfire": "all"}, (b"new", "active")),
    ("pause_schedule", {}, (b"new", "paused")),
    ("resume_schedule", {}, (b"new", "active")),
    ("delete_schedule", {}, None),
    ("create_schedule", {"every": 10, "topic": "jobs", "payload": b"again", "misfire": "all"}, (b"again", "active")),
]


class Changing:
    """Change a schedule repeatedly while it fires, with the power cut at a given disk operation."""

    def __init__(self, seed: int) -> None:
        self.node = Node(seed, BrokerConfig(spare_segment_bytes=0, reclaim_interval=3600.0))
        self.node.disk = scheduled_on_disk().crash(self.node.rng)
        self.answered = 0
        self.found: list[tuple[bytes, str]] = []
        self.stands: tuple[bytes, str] | None = None

    def run(self, steps: int) -> bool:
        self.node.disk.cut_power_in(steps)
        cut = self.node.live(lambda: [self._work()]) == "crash"
        self.node.clock.advance(30)
        self.node.live(lambda: [self._look()])
        return cut

    async def _work(self) -> None:
        await self.node.hl.delete_schedule("tick")
        for call, fields, _ in STEPS:
            await getattr(self.node.hl, call)("mine", **fields)
            self.answered += 1
            await asyncio.sleep(11)

    async def _look(self) -> None:
        hl = self.node.hl
        await hl.fire_schedules()
        infos = [info for info in await hl.list_schedules() if info.name == "mine"]
        self.stands = (infos[0].payload, infos[0].state) if infos else None
        messages = [m for m in await hl.pop("jobs", 1000) if m.headers["heapline-schedule"] == "default/mine"]
        self.found = [(m.payload, m.headers[AT]) for m in messages]


def test_power_cut_during_a_schedule_change_is_atomic_without_double_firing() -> None:
    outcomes = set()
    for steps in range(0, 2000, 5):
        world = Changing(steps)
        cut = world.run(steps)
        stands = [None, *(after for _, _, after in STEPS)]
        assert world.stands in stands[world.answered : world.answered + 2], "answered changes are kept"
        assert len(set(world.found)) == len(world.found), "none twice"
        assert len({at for _, at in world.found}) == len(world.found), "each state fires at its own times"
        outcomes.add((world.answered, world.stands))
        if not cut:
            break
    else:
        pytest.fail("it never finished")
    payloads = [payload for payload, _ in world.found]
    assert payloads.count(b"old") == payloads.count(b"new") - 1 == 1, "paused, it fired once before and once after"
    assert any(stands[answered] != stood for answered, stood in outcomes), "some were applied but not answered"


@pytest.mark.parametrize("key", [None, "k"])
async def test_firing_is_recognised_after_its_topic_has_grown(
    key: str | None, recognized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("tick", every=10, topic="jobs", misfire="all", key=key)
        write = ScheduleStore.write
        for partitions in (3, 8):
            monkeypatch.setattr(ScheduleStore, "write", _refused)
            await pass_time(rig, 10)
            monkeypatch.setattr(ScheduleStore, "write", write)
            await rig.hl.update_topic("jobs", partitions=partitions)
            await pass_time(rig, 10)
        found = await fired(rig.hl)
        assert len(found) == len(set(found)) == 4
        assert recognized == ["duplicate", "duplicate"]


async def test_clock_set_back_fires_nothing_twice_and_is_reported() -> None:
    async with opened() as rig:
        await rig.hl.create_schedule("a", every=60, topic="jobs")
        await pass_time(rig, 120)
        rig.clock.jump_wall(-3600)
        await pass_time(rig, 600)
        assert len(await fired(rig.hl)) == 2
        assert "set back" in str((await rig.hl.get_schedule("a")).problem)
        await pass_time(rig, 3060)
        assert len(await fired(rig.hl)) == 1
        assert (await rig.hl.get_schedule("a")).problem is None


def test_blocking_facade_has_schedules(tmp_path: Path) -> None:
    with heapline.open_sync(tmp_path, spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", **SMALL)
        made = hl.create_schedule("a", every=timedelta(hours=1), topic="jobs", headers={"a": "b"})
        assert hl.list_schedules() == [made]
        assert hl.pause_schedule("a").state == "paused"
        hl.delete_schedule("a")
