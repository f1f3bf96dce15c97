"""Opening a directory: missing files are rejected, newer topics than the catalog stay, and time continues."""

from __future__ import annotations

import errno

import pytest

import heapline
from heapline.contract.errors import JournalCorrupt
from tests.unit.engine.rig import SMALL, opened


async def test_missing_segment_with_living_records_below_the_snapshot_is_refused_by_name() -> None:
    async with opened() as rig:
        for _ in range(12):
            await rig.hl.enqueue_batch("jobs", [heapline.Outgoing(b"x" * 60_000) for _ in range(3)])
        await rig.hl.snapshot("jobs")
        first = sorted(rig.files(".seg"))[0]
        await rig.hl.close()
        rig.disk.unlink(first)
        await rig.open()
        with pytest.raises(JournalCorrupt, match=first.rpartition("/")[2]):
            await rig.hl.stats("jobs")


async def test_state_that_does_not_replay_refuses_its_topic_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await rig.topic("other")
        await rig.hl.enqueue("jobs", b"x")
        await rig.hl.close()
        from heapline.engine.topic import Topic

        replay = Topic.replay

        def broken(self: Topic, unit: object, directory: str) -> None:
            if self.name == "jobs":
                raise KeyError(7)
            replay(self, unit, directory)  # type: ignore[arg-type]

        monkeypatch.setattr(Topic, "replay", broken)
        for path in rig.files(".snap"):
            rig.disk.unlink(path)
        await rig.open()
        with pytest.raises(JournalCorrupt, match="does not replay"):
            await rig.hl.stats("jobs")
        assert (await rig.hl.stats("other")).ready == 0


async def test_topics_newer_than_a_restored_catalog_are_not_deleted() -> None:
    async with opened() as rig:
        old = rig.disk.read_file("/data/catalog.json")
        await rig.topic("newer")
        await rig.hl.enqueue("newer", b"kept")
        new = rig.disk.read_file("/data/catalog.json")
        await rig.hl.close()
        rig.disk.write_file_atomic("/data/catalog.json", old)
        await rig.open()
        await rig.hl.close()
        rig.disk.write_file_atomic("/data/catalog.json", new)
        await rig.open()
        assert (await rig.hl.stats("newer")).ready == 1


async def test_folder_of_a_deleted_topic_is_removed() -> None:
    async with opened() as rig:
        await rig.hl.delete_topic("jobs")
        await rig.topic("jobs")
        folder = rig.files(".seg")[0].rpartition("/")[0]
        leftover = folder.replace("jobs.2", "jobs.1")
        rig.disk.mkdir(leftover)
        await rig.reopen()
        assert rig.disk.exists(folder)
        assert not rig.disk.exists(leftover)


async def test_time_passes_while_closed_even_if_the_clock_was_ahead() -> None:
    async with opened() as rig:
        rig.clock.jump_wall(86_400)
        await rig.reopen()
        await rig.hl.enqueue("jobs", b"x", delay=3600)
        await rig.hl.close()
        rig.clock.jump_wall(-86_400)  # corrected while the broker is closed
        await rig.open()
        await rig.hl.enqueue("jobs", b"mark", priority=9)
        await rig.hl.close()
        rig.clock.advance(3601)
        await rig.open()
        assert [m.payload for m in await rig.hl.pop("jobs", 10)] == [b"x", b"mark"]


@pytest.mark.parametrize("atomic", [True, False])
async def test_producer_resends_after_a_reload_without_duplicates(atomic: bool) -> None:
    async with opened() as rig:
        producer = heapline.Producer("p")
        await rig.hl.enqueue("jobs", b"first", producer=producer)
        rig.disk.inject("fdatasync", errno.EIO, path=".seg")
        message = heapline.Outgoing(b"second")
        (result,) = await rig.hl.enqueue_batch("jobs", [message], atomic=atomic, producer=producer)
        assert (result.error, result.duplicate) == (None, False)
        assert rig.runner().counters.reloads == 1
        assert sorted(m.payload for m in await rig.hl.pop("jobs", 10)) == [b"first", b"second"]


async def test_small_segments_imply_a_small_default_payload_limit() -> None:
    async with opened() as rig:
        info = await rig.hl.create_topic("small", segment_bytes=SMALL["segment_bytes"])
        assert info.config.max_payload_bytes == SMALL["segment_bytes"] // 2
