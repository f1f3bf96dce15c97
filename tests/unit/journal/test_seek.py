"""Seeking by time and wall time: the same result as a naive scan however the clock jumps, with few reads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, JournalCorrupt
from heapline.journal import index as index_module
from heapline.journal.index import SegmentIndex, parse_index, parse_wall_max
from heapline.journal.journal import Journal
from heapline.journal.reader import LogReader
from heapline.journal.recovery import scan
from heapline.journal.unit import Frame, Unit
from tests.unit.journal.rig import PATH, MemoryDisk, open_journal, put

Step = tuple[int, int, int, int]  # partition, payload bytes, ms since the previous step, jump of the wall clock


def write(steps: list[Step], segment_bytes: int = 16 << 10) -> tuple[MemoryDisk, LogReader, list[Unit]]:
    """Write one unit per step; return the disk, the writer's own reader and the units of a scan."""
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=segment_bytes)
    for _ in writing(journal, steps):
        pass
    return disk, journal.reader(), list(scan(disk, PATH))


def writing(journal: Journal, steps: list[Step]) -> Iterator[int]:
    offsets, now, ahead = [0, 0, 0], 1000, 0
    for number, (partition, size, passed, jump) in enumerate(steps):
        now, ahead = now + passed, ahead + jump
        put(journal, [b"x" * size] * 2, partition=partition, first_offset=offsets[partition], first_id=10 * number + 1)
        offsets[partition] += 2
        journal.seal(now, now + ahead)
        if journal.wants_prepare:
            journal.prepare()
        for unit in journal.take_sealed():
            journal.commit(unit)
        yield now


def naive(units: list[Unit], partition: int, *, time: int | None = None, wall: int | None = None) -> int:
    """Return the first row at or after the first unit that reached the time, or the end."""
    reached, end = False, 0
    for unit in units:
        reached = reached or (unit.time >= time if time is not None else unit.wall >= (wall or 0))
        for frame in (f for f in unit.frames if f.partition == partition):
            if reached:
                return frame.first_offset
            end = frame.first_offset + frame.row_count
    return end


@pytest.fixture(autouse=True)
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make indexes as sparse, relative to small journals, as those of large ones."""
    monkeypatch.setattr(index_module, "ENTRY_EVERY_BYTES", 4096)
    monkeypatch.setattr(index_module, "_NEVER", -4096)
    monkeypatch.setattr("heapline.journal.seek.CHUNK_BYTES", 1024)


def random_steps(seed: int, count: int) -> list[Step]:
    rng = random.Random(seed)
    jumps = [0] * 30 + [-5, 40, -40, -3000, 3000]
    partitions = [0] * 27 + [1, 1, 2]
    return [
        (rng.choice(partitions), rng.randrange(600), rng.choice([0, 1, 20]), rng.choice(jumps)) for _ in range(count)
    ]


@pytest.mark.parametrize("stored", ["all", "none", "damaged"])
def test_offsets_by_time_equal_a_naive_scan(stored: str) -> None:
    disk, own, units = write(random_steps(5, 160))
    indexes = [path for path in disk.files if path.endswith(".idx")]
    assert len(indexes) > 5
    for path in indexes:
        if stored == "none":
            disk.unlink(path)
        elif stored == "damaged":
            disk.files[path].data[42] ^= 1
    walls = [unit.wall for unit in units]
    for reader in (own, LogReader(disk, PATH)):
        for partition in range(4):
            for time in range(900, units[-1].time + 50, 97):
                assert reader.offset_at(partition, time=time) == naive(units, partition, time=time)
            for wall in range(min(walls) - 10, max(walls) + 50, 197):
                assert reader.offset_at(partition, wall=wall) == naive(units, partition, wall=wall)


steps = st.tuples(
    st.integers(0, 2),
    st.sampled_from([0, 900, 2500]),
    st.sampled_from([0, 1, 30]),
    st.sampled_from([0, 0, 0, -31, 7, -90]),
)


@given(st.lists(steps, min_size=1, max_size=40), st.integers(0, 2), st.integers(-100, 600))
def test_any_wall_time_under_any_clock_jumps_equals_a_naive_scan(made: list[Step], partition: int, since: int) -> None:
    disk, own, units = write(made)
    for reader in (own, LogReader(disk, PATH)):
        assert reader.offset_at(partition, wall=1000 + since) == naive(units, partition, wall=1000 + since)
        assert reader.offset_at(partition, time=1000 + since) == naive(units, partition, time=1000 + since)


def test_nothing_written_at_or_after_a_wall_time_is_before_its_offset() -> None:
    """The clock is set back by 50 ms twice, so some times occur twice; the first occurrence counts."""
    made = [(0, 10, 10, -50 if number in (20, 35) else 0) for number in range(60)]
    _, reader, units = write(made)
    for wall in range(1000, 1600):
        offset = reader.offset_at(0, wall=wall)
        skipped = [unit.wall for unit in units if unit.frames[0].first_offset < offset]
        assert all(shown < wall for shown in skipped)


def test_all_partitions_are_cut_at_the_same_unit() -> None:
    """Partition 1 writes at 1010 after partition 0 wrote at 1100 and the clock was set back: it belongs after 1050."""
    _, reader, _ = write([(1, 10, 0, 0), (0, 10, 100, 0), (1, 10, 10, -100), (1, 10, 100, 0)])
    assert reader.offset_at(0, wall=1050) == 0
    assert reader.offset_at(1, wall=1050) == 2


def test_future_time_returns_the_end() -> None:
    _, reader, _ = write([(0, 10, 1, 0)] * 3 + [(1, 10, 1, 0)])
    assert [reader.offset_at(p, wall=1 << 50) for p in range(3)] == [6, 2, 0]
    assert [reader.offset_at(p, time=1 << 50) for p in range(3)] == [6, 2, 0]


def test_offset_at_requires_exactly_one_of_time_and_wall() -> None:
    _, reader, _ = write([(0, 10, 1, 0)])
    for both in ({}, {"time": 1, "wall": 1}):
        with pytest.raises(BadRequest, match="exactly one"):
            reader.offset_at(0, **both)


def test_silent_partition_is_found_without_reading_the_gap() -> None:
    steps = [(1, 10, 1, 0), *[(0, 1500, 1, 0)] * 300, (1, 10, 1, 0)]
    disk, _, units = write(steps, segment_bytes=64 << 10)
    reader = LogReader(disk, PATH)
    disk.log.clear()
    assert reader.offset_at(1, time=1100) == 2
    assert reader.offset_at(2, time=1100) == 0
    read = [path for what, path in disk.log if what == "pread" and path.endswith(".seg")]
    segments = len({unit.segment for unit in units})
    # At most a few sectors of each segment: its header, and some units around the time. Not 300 units.
    assert segments > 10
    assert len(read) < 4 * segments + 30


def test_reader_in_another_process_finds_what_was_written_since() -> None:
    """It indexed the segment so far; that index must not be used for the segment once it is full."""
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=32 << 10)
    reader = LogReader(disk, PATH)
    for number, now in enumerate(writing(journal, [(n % 3 // 2, 2000, 5, 0) for n in range(40)])):
        units = list(scan(disk, PATH))
        if number % 7 == 0:
            for partition in (0, 1):
                for moment in range(1005, now + 10, 25):
                    assert reader.offset_at(partition, time=moment) == naive(units, partition, time=moment)
                    assert reader.offset_at(partition, wall=moment) == naive(units, partition, wall=moment)


def test_damage_at_the_searched_position_is_reported() -> None:
    disk, _, units = write([(0, 700, 1, 0)] * 30)
    wanted = units[4]
    disk.files[f"{PATH}/{wanted.segment:010d}.seg"].data[wanted.offset + 100] ^= 1
    with pytest.raises(JournalCorrupt):
        LogReader(disk, PATH).offset_at(0, time=wanted.time)


def test_segment_reclaimed_during_a_search_is_not_an_error() -> None:
    disk, _, units = write([(0, 700, 1, 0)] * 60)
    second = next(unit for unit in units if unit.segment == 2)
    reader = LogReader(disk, PATH)

    def reclaim(what: str, path: str) -> None:
        if what == "pread" and path.endswith("1.seg"):
            disk.on_step = lambda what, path: None
            disk.unlink(f"{PATH}/0000000001.seg")
            raise FileNotFoundError(2, "no such file", path)

    disk.on_step = reclaim
    assert reader.offset_at(0, time=0) == second.frames[0].first_offset
    assert not disk.exists(f"{PATH}/0000000001.seg")


def test_index_of_another_version_is_rebuilt_from_its_segment() -> None:
    disk, own, units = write(random_steps(8, 120))
    paths = [path for path in disk.files if path.endswith(".idx")]
    for path in paths:
        number, data = int(path[-14:-4]), bytearray(own.build_index(int(path[-14:-4]), None).pack(7))
        data[8] = index_module.INDEX_VERSION + 1
        data[48:52] = crc32c(bytes(data[:48])).to_bytes(4, "little")
        data[-4:] = crc32c(bytes(data[:-4])).to_bytes(4, "little")
        assert parse_index(bytes(data), number, 7) is None
        disk.write_file_atomic(path, bytes(data))
    assert paths
    reader = LogReader(disk, PATH)
    for moment in range(900, units[-1].time, 41):
        assert reader.offset_at(0, time=moment) == naive(units, 0, time=moment)
        assert reader.offset_at(1, wall=moment) == naive(units, 1, wall=moment)


def test_highest_wall_time_is_read_from_an_indexs_first_bytes_alone() -> None:
    index = SegmentIndex(3)
    for unit, wall in enumerate([50, 90, 70], 1):
        index.add(unit, unit << 16, unit, wall, [Frame(0, unit, 1, b"")])
    data = index.pack(7)
    assert parse_wall_max(data[:64], 3, 7) == 90
    assert index.entries()["wall_before"].tolist() == [index_module.NO_WALL, 50, 90]
    for at in range(index_module.HEADER_BYTES - 4):
        assert parse_wall_max(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 : 64], 3, 7) is None
    assert parse_wall_max(data[:40], 3, 7) is None
