"""Opening and closing a directory: one process at a time, and nothing half-created survives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import heapline
from heapline.contract.message import from_ms
from heapline.engine import EmbeddedBroker
from heapline.engine.snapshot_state import STATE_VERSION, freeze, thaw
from tests.unit.engine import held_io
from tests.unit.engine.rig import PATH, Rig, opened, settle

CHILD = """
import asyncio, sys, heapline

async def main():
    try:
        async with heapline.open(sys.argv[1], spare_segment_bytes=0):
            print("opened")
    except heapline.DirectoryLocked as error:
        print(type(error).__name__, error)

asyncio.run(main())
"""


def open_elsewhere(path: Path) -> str:
    """Return the output of another process that opens the directory."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    return done.stdout


async def test_second_process_on_a_directory_is_advised_to_run_a_server(tmp_path: Path) -> None:
    async with heapline.open(tmp_path / "data", spare_segment_bytes=0) as hl:
        said = await asyncio.to_thread(open_elsewhere, tmp_path / "data")
        assert said.startswith("DirectoryLocked")
        assert "run `heapline serve`" in said
        await hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1000)
    assert await asyncio.to_thread(open_elsewhere, tmp_path / "data") == "opened\n"


async def test_directory_open_in_this_process_is_refused_too(tmp_path: Path) -> None:
    async with heapline.open(tmp_path / "data", spare_segment_bytes=0):
        with pytest.raises(heapline.DirectoryLocked, match="heapline serve"):
            async with heapline.open(tmp_path / "data"):
                pass
        with pytest.raises(heapline.DirectoryLocked):
            heapline.open_sync(tmp_path / "data").__enter__()


async def test_new_directory_is_created_with_all_its_parents(tmp_path: Path) -> None:
    async with heapline.open(str(tmp_path / "a" / "b" / "c"), spare_segment_bytes=0) as hl:
        assert await hl.list_topics() == []
    assert (tmp_path / "a" / "b" / "c").is_dir()


@pytest.mark.parametrize("path", ["file", "file/data"])
async def test_file_in_place_of_a_directory_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(heapline.BadRequest, match="a part of the path is a file; choose another path"):
        async with EmbeddedBroker(str(tmp_path / path)):
            pass
    assert (tmp_path / "file").read_text() == "x"


async def test_open_close_open_close_changes_nothing(tmp_path: Path) -> None:
    async with heapline.open(tmp_path, spare_segment_bytes=1 << 20) as hl:
        await hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1000)
        await hl.enqueue("jobs", b"x", priority=3)
    for _ in range(5):
        async with heapline.open(tmp_path, spare_segment_bytes=1 << 20) as hl:
            assert [(i.payload, i.priority) for i in await hl.peek("jobs")] == [(b"x", 3)]
            assert await hl.offsets("jobs") == {0: (0, 1)}


@pytest.mark.parametrize(
    "config",
    [
        {"color": "red"}, {"cache_bytes": -1}, {"cache_bytes": "much"}, {"uncommitted_bytes_max": 0},
        {"uncommitted_wait": -1}, {"fire_slice": 0}, {"rewrite_below": 2}, {"reclaim_interval": 0},
        {"snapshot_interval": float("nan")}, {"spare_segment_bytes": 5},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_broker_setting_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    for open_it in (heapline.open, heapline.open_sync):
        with pytest.raises(heapline.BadRequest):
            open_it(tmp_path, **config)
    assert list(tmp_path.iterdir()) == []


# -- closed ------------------------------------------------------------------------------------------------------------


async def test_every_call_on_an_unopened_broker_raises() -> None:
    rig = Rig()
    hl = await rig.open()
    await rig.topic()
    await hl.close()
    await hl.close()  # closing again is allowed
    for broker in (hl, EmbeddedBroker(PATH, disk=rig.disk)):
        calls = [
            lambda b: b.enqueue("jobs", b"x"), lambda b: b.pop("jobs"), lambda b: b.create_topic("jobs"),
            lambda b: b.list_topics(), lambda b: b.stats("jobs"), lambda b: b.delete_topic("jobs"),
            lambda b: b.ack(heapline.LeaseRef("jobs", 1, 1)), lambda b: b.get("jobs", 1),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(heapline.Closed, match=r"heapline\.open"):
                await call(broker)


async def test_waiting_pop_raises_closed_when_the_broker_closes() -> None:
    rig = Rig()
    hl = await rig.open()
    await rig.topic()
    pop = asyncio.create_task(hl.pop("jobs", wait=60))
    await hl.stats("jobs")
    await hl.close()
    with pytest.raises(heapline.Closed):
        await pop


async def test_broker_that_fails_to_open_releases_the_directory() -> None:
    rig = Rig()
    rig.disk.inject("listdir")
    rig.disk.mkdir(f"{PATH}/topics")
    with pytest.raises(OSError, match="injected"):
        await rig.open()
    await rig.open()
    await rig.hl.close()


# -- what is in the directory ------------------------------------------------------------------------------------------


async def test_incomplete_topic_is_removed_and_can_be_recreated() -> None:
    async with opened() as rig:
        rig.disk.inject("rename", path="catalog")  # the folder exists, its name is not in the catalog
        with pytest.raises(OSError, match="injected"):
            await rig.topic("half")
        with pytest.raises(heapline.TopicNotFound):
            await rig.hl.stats("half")
        hl = await rig.reopen()
        assert not any("/half." in path for path in rig.files(""))
        await rig.topic("half")
        await hl.enqueue("half", b"x")


async def test_topic_with_a_failed_deletion_still_exists() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.disk.inject("rename", path="catalog")
        with pytest.raises(OSError, match="injected"):
            await rig.hl.delete_topic("jobs")
        assert len(await rig.hl.pop("jobs")) == 1


async def test_undeleted_topic_directory_is_removed_at_the_next_open() -> None:
    async with opened() as rig:
        rig.disk.inject("unlink", path="/jobs.")
        await rig.hl.delete_topic("jobs")
        assert await rig.hl.list_topics() == []
        assert any("/jobs." in path for path in rig.files(""))
        await rig.topic("jobs")
        assert (await rig.hl.stats("jobs")).ready == 0
        await rig.hl.delete_topic("jobs")
        await rig.reopen()
        assert not any("/jobs." in path for path in rig.files(""))


async def test_damaged_topic_is_refused_by_name_while_the_others_serve() -> None:
    async with opened() as rig:
        await rig.topic("other")
        for i in range(20):
            await rig.hl.enqueue("jobs", b"%d" % i * 200)
        await rig.hl.enqueue("other", b"fine")
        await rig.hl.close()
        for path in rig.files(".snap"):
            if "/jobs." in path:
                rig.disk.unlink(path)
        rig.disk.damage(next(p for p in rig.files(".seg") if "/jobs." in p), 4)
        hl = await rig.open()
        for call in (hl.pop, hl.stats, hl.purge, hl.peek):
            with pytest.raises(heapline.JournalCorrupt, match=r"\.seg"):
                await call("jobs")
        assert len(await hl.pop("other")) == 1
        assert [info.name for info in await hl.list_topics()] == ["jobs", "other"]
        assert [stats.topic for stats in await hl.list_stats()] == ["other"]
        await hl.delete_topic("jobs")
        await rig.topic("jobs")
        await hl.enqueue("jobs", b"anew")


async def test_statistics_omit_a_topic_that_is_deleted_meanwhile() -> None:
    async with opened() as rig:
        await rig.topic("other")
        rig.io.hold = {"_usages"}
        calls = [asyncio.ensure_future(call) for call in (rig.hl.list_stats(), rig.hl.stats("jobs"))]
        await settle()
        await rig.hl.delete_topic("jobs")
        rig.io.release()
        listed, one = await asyncio.gather(*calls, return_exceptions=True)
        assert [stats.topic for stats in listed] == ["other"]
        assert isinstance(one, heapline.TopicNotFound)


async def test_statistics_omit_a_topic_that_is_reloading() -> None:
    async with opened() as rig:
        await rig.topic("other")
        rig.runner().poison(OSError("disk"))
        assert [stats.topic for stats in await rig.hl.list_stats()] == ["other"]


async def test_topic_without_its_files_is_corrupt_and_not_empty() -> None:
    async with opened() as rig:
        await rig.topic("other")
        await rig.hl.close()
        rig.disk.remove_tree(f"{PATH}/topics/default/jobs.1")
        hl = await rig.open()
        with pytest.raises(heapline.CorruptionError):
            await hl.enqueue("jobs", b"x")
        await hl.enqueue("other", b"x")


async def test_catalog_of_a_newer_version_is_refused() -> None:
    async with opened() as rig:
        await rig.hl.close()
        catalog = f"{PATH}/catalog.json"
        rig.disk.write_file_atomic(catalog, rig.disk.read_file(catalog).replace(b'"version": 1', b'"version": 99'))
        with pytest.raises(heapline.UnknownFormat, match="99"):
            await rig.open()


async def test_snapshot_state_of_another_version_is_refused() -> None:
    async with opened() as rig:
        topic = rig.hl.topics._runners["jobs"].loaded.topic
        state = msgspec.msgpack.decode(freeze(topic, 1).encode())
        assert state[0] == STATE_VERSION == 1
        with pytest.raises(heapline.UnknownFormat, match=r"x\.snap has format version 2"):
            thaw(topic, msgspec.msgpack.encode([2, *state[1:]]), {}, 0, 0, "x.snap")


async def test_clock_set_back_while_closed_repeats_no_id_and_ends_no_lease_early() -> None:
    async with opened() as rig:
        first = [(await rig.hl.enqueue("jobs", b"x")).id for _ in range(3)]
        (m,) = await rig.hl.pop("jobs", visibility=60)
        await rig.hl.close()
        rig.clock.jump_wall(-86400)
        hl = await rig.open()
        again = [(await hl.enqueue("jobs", b"x")).id for _ in range(3)]
        assert min(again) > max(first)
        rig.clock.advance(50)
        assert (await hl.get("jobs", m.id)).state == "leased"
        rig.clock.advance(20)
        await hl.stats("jobs")
        assert (await hl.get("jobs", m.id)).state == "delayed"


@pytest.mark.parametrize("jump", [3600, -3600])
async def test_wall_clock_jump_is_counted_and_moves_only_wall_times(jump: int) -> None:
    async with opened() as rig:
        moment = from_ms(rig.clock.wall_ms()) + timedelta(seconds=100)
        delay = (await rig.hl.enqueue("jobs", b"delay", delay=100)).id
        at = (await rig.hl.enqueue("jobs", b"at", deliver_at=moment)).id
        lease = (await rig.hl.enqueue("jobs", b"leased")).id
        await rig.hl.pop("jobs", visibility=150)

        async def states() -> list[str]:
            for _ in range(2):
                stats = await rig.hl.stats("jobs")
            assert stats.log.clock_jumps_total == 1
            return [(await rig.hl.get("jobs", id)).state for id in (delay, at, lease)]

        rig.clock.jump_wall(jump)
        rig.clock.advance(2)  # the wall clock is read every second while something depends on it
        assert await states() == ["delayed", "ready" if jump > 0 else "delayed", "leased"]
        rig.clock.advance(100)
        assert await states() == ["ready", "ready" if jump > 0 else "delayed", "leased"]
        rig.clock.advance(3600)
        assert (await states())[:2] == ["ready", "ready"]


async def test_reboot_while_closed_changes_nothing() -> None:
    async with opened() as rig:
        late = (await rig.hl.enqueue("jobs", b"late", delay=1000)).id
        lease = (await rig.hl.enqueue("jobs", b"leased")).id
        await rig.hl.pop("jobs", visibility=500)
        await rig.hl.close()
        rig.clock.advance(400)
        rig.clock.reboot()
        hl = await rig.open()
        rig.clock.advance(90)
        await hl.stats("jobs")
        assert [(await hl.get("jobs", id)).state for id in (late, lease)] == ["delayed", "leased"]
        rig.clock.advance(20)
        await hl.stats("jobs")
        assert (await hl.get("jobs", lease)).state == "delayed"
        rig.clock.advance(500)
        await hl.stats("jobs")
        assert (await hl.get("jobs", late)).state == "ready"


def test_directory_is_not_used_after_its_lock_was_released() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        rig.disk.inject("fdatasync", path=".seg")
        rig.io.hold = {"load"}
        with pytest.raises(heapline.TopicReloading):
            await hl.enqueue("jobs", b"x")
        await held_io.spin()
        closing = asyncio.ensure_future(hl.close())
        await held_io.spin()
        assert not closing.done()
        assert rig.disk._locks
        rig.io.let_go()
        await closing
        assert not rig.disk._locks

    held_io.play(scene)


def test_closing_one_topic_does_not_change_the_budget_shared_with_another() -> None:
    """Files are closed in a thread; memory is released by the event loop alone."""

    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", bytes(1000))
        journal = hl.topics._runners["jobs"].loaded.journal
        thread = threading.Thread(target=journal.close)
        thread.start()
        thread.join()
        assert hl.topics.directory.budget.used_bytes > 1000
        await hl.topics._runners["jobs"].close()
        assert hl.topics.directory.budget.used_bytes == 0

    held_io.play(scene)
