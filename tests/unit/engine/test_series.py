"""The depths and rates that a broker keeps: what is sampled, and the files."""

from __future__ import annotations

import msgspec
import pytest

from heapline.contract.errors import TopicNotFound
from heapline.engine.series import FILE, VERSION
from heapline.journal.small_files import sealed as sealed_file
from tests.unit.engine.rig import PATH, Rig, opened


async def test_samples_are_depths_and_what_was_done_since() -> None:
    async with opened(series=True) as rig:
        await rig.topic("other")
        await rig.hl.enqueue("jobs", b"a")
        await rig.hl.enqueue("jobs", b"b", delay=3600)
        await rig.hl.enqueue("other", b"c")
        rig.clock.advance(10)
        await rig.hl.topics.series.sample()
        await rig.hl.ack(await rig.hl.pop("jobs"))
        rig.clock.advance(10)
        await rig.hl.topics.series.sample()
        found = await rig.hl.stats_series("jobs")
        assert (found.topic, found.interval, found.seconds) == ("jobs", 10, [10, 10])
        assert (found.enqueued, found.done, found.failed) == ([2, 0], [0, 1], [0, 0])
        assert (found.ready, found.delayed, found.oldest_wait) == ([1, 0], [1, 1], [10, 0])
        assert found.times[1] - found.times[0] == 10
        total = await rig.hl.stats_series()
        assert (total.topic, total.enqueued, total.ready) == ("", [3, 0], [2, 1])
        with pytest.raises(TopicNotFound):
            await rig.hl.stats_series("nothing")


async def test_series_survive_a_restart() -> None:
    async with opened(series=True) as rig:
        for _ in range(3):
            await rig.hl.enqueue("jobs", b"x")
            rig.clock.advance(10)
            await rig.hl.topics.series.sample()
        before = await rig.hl.stats_series("jobs"), await rig.hl.stats_series()
        await rig.reopen()
        assert (await rig.hl.stats_series("jobs"), await rig.hl.stats_series()) == before
        assert before[0].enqueued == [1, 1, 1]


async def test_memory_and_file_of_a_busy_topic_stay_within_20_kb() -> None:
    async with opened(series=True) as rig:
        series = rig.hl.topics.series
        for n in range(9000):  # more than a day
            rig.clock.advance(10)
            if n % 3 == 0:
                await rig.hl.enqueue("jobs", b"x")
            await series.sample()
        kept = series.of(rig.runner())
        assert kept is not None
        assert 15_000 < kept.nbytes <= 20_000
        await series.write()
        sizes = [len(inode.data) for path, inode in rig.disk.walk() if path.endswith(f"/{FILE}")]
        assert len(sizes) == 2  # of the topic, and of all together
        assert all(1_000 < size <= 20_000 for size in sizes)


async def test_idle_topic_has_no_file_and_a_deleted_one_leaves_none() -> None:
    async with opened(series=True) as rig:
        await rig.topic("idle")
        await rig.hl.enqueue("jobs", b"x")
        await rig.reopen()
        assert sorted(path.removeprefix(PATH) for path in rig.files(f"/{FILE}")) == [
            "/series", "/topics/default/jobs.1/series"
        ]  # fmt: skip
        await rig.hl.enqueue("jobs", b"x")
        rig.clock.advance(10)
        await rig.hl.topics.series.sample()
        await rig.hl.delete_topic("jobs")
        await rig.hl.topics.series.write()
        await rig.hl.topics.series.sample()
        assert [path.removeprefix(PATH) for path in rig.files(f"/{FILE}")] == ["/series"]


def sealed(state: object) -> bytes:
    return sealed_file(VERSION, msgspec.msgpack.encode(state))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"\x00" * 300,
        b"\x01\x02\x03\x04\x02\x90",
        sealed([[], [["x"], None]]),
        sealed([[], [[1, 2], None]]),
        sealed([[], [7, None]]),
        sealed([[[b"xyz", False]] * 3, [None, None]]),
        sealed([7, [None, None]]),
        sealed(["", "ab"]),
        sealed([]),
    ],
)
async def test_damaged_file_is_begun_again(content: bytes) -> None:
    async with opened(series=True) as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.clock.advance(10)
        await rig.hl.topics.series.sample()
        await rig.hl.close()
        for path in rig.files(f"/{FILE}"):
            rig.disk.write_file_atomic(path, content)
        await rig.open()
        assert (await rig.hl.stats_series("jobs")).times == []
        await rig.hl.enqueue("jobs", b"x")
        rig.clock.advance(10)
        await rig.hl.topics.series.sample()
        assert (await rig.hl.stats_series("jobs")).enqueued == [1]


async def test_points_older_than_a_day_and_before_since_are_left_out() -> None:
    async with opened(series=True) as rig:
        for _ in range(2):
            await rig.hl.enqueue("jobs", b"x")
            rig.clock.advance(20 * 3600)
            await rig.hl.topics.series.sample()
        found = await rig.hl.stats_series("jobs")
        assert len(found.times) == 2
        rig.clock.advance(10 * 3600)
        assert (await rig.hl.stats_series("jobs")).times == found.times[1:]


async def test_broker_that_keeps_none_says_so() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        found = await rig.hl.stats_series("jobs")
        assert (found.interval, found.times) == (0, [])
        await rig.reopen()
        assert rig.files(f"/{FILE}") == []


async def test_full_disk_costs_only_the_series(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(series=True)
    await rig.open()
    await rig.topic()
    await rig.hl.enqueue("jobs", b"x")

    def full(path: str, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.disk, "write_file_atomic", full)
    await rig.hl.topics.series.sample()
    await rig.hl.topics.series.write()
    monkeypatch.undo()
    await rig.reopen()
    assert (await rig.hl.stats("jobs")).ready == 1
    await rig.hl.close()
