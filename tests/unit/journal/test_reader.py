"""The log by unit, offset, id and time: the same results as a naive scan, and never beyond the watermark."""

from __future__ import annotations

import random

import pytest

from heapline.contract.errors import BadRequest, JournalCorrupt
from heapline.journal import index as index_module
from heapline.journal.journal import Journal
from heapline.journal.reader import LogReader, Place
from heapline.journal.recovery import scan
from heapline.journal.unit import Frame, Unit
from tests.unit.journal.rig import PATH, MemoryDisk, commit, contents, open_journal, put, write_units


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryDisk, Journal]:
    """Write many small segments with three partitions, one of them mostly silent; some frames lack ids or rows."""
    monkeypatch.setattr(index_module, "ENTRY_EVERY_BYTES", 4096)
    monkeypatch.setattr(index_module, "_NEVER", -4096)
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=16 << 10)
    rng = random.Random(3)
    offsets, next_id, now = [0, 0, 0], 10, 1000
    for step in range(150):
        for partition in (0, 1) if step % 40 else (0, 1, 2):
            if rng.random() < 0.3:
                rows = rng.randrange(3)
                journal.room(20)
                journal.add_frames([Frame(partition, offsets[partition], rows, b"acked", -1)])
            else:
                rows = rng.randrange(1, 5)
                messages = [b"x" * rng.randrange(400)] * rows
                put(journal, messages, partition=partition, first_offset=offsets[partition], first_id=next_id)
                next_id += 10
            offsets[partition] += rows
        now += rng.choice([0, 0, 1, 50])
        commit(journal, now)
    assert len(disk.listdir(PATH)) > 15
    return disk, journal


def naive(units: list[Unit], partition: int, **target: int) -> Place | None:
    found = None
    for unit in units:
        for frame in (f for f in unit.frames if f.partition == partition):
            if "offset" in target and frame.first_offset + frame.row_count > target["offset"]:
                return unit.segment, unit.offset
            if "time" in target and unit.time >= target["time"]:
                return unit.segment, unit.offset
            if "id" in target and 0 <= frame.first_id <= target["id"]:
                found = unit.segment, unit.offset
    return found


@pytest.mark.parametrize("stored", ["all", "none", "damaged"])
def test_lookups_equal_a_naive_scan(busy: tuple[MemoryDisk, Journal], stored: str) -> None:
    disk, journal = busy
    journal.prepare()
    indexes = [p for p in disk.files if p.endswith(".idx")]
    assert len(indexes) >= 5
    for path in indexes:
        if stored == "none":
            disk.unlink(path)
        elif stored == "damaged":
            disk.files[path].data[40] ^= 1
    units = list(scan(disk, PATH))
    for reader in (journal.reader(), LogReader(disk, PATH)):
        for partition in range(4):
            for offset in range(0, 400, 23):
                assert reader.locate(partition, offset=offset) == naive(units, partition, offset=offset)
            for id_ in range(0, 2600, 137):
                assert reader.locate(partition, id=id_) == naive(units, partition, id=id_)
            for time in range(900, units[-1].time + 5, 97):
                assert reader.locate(partition, time=time) == naive(units, partition, time=time)


def test_units_are_read_from_any_number_and_position(busy: tuple[MemoryDisk, Journal]) -> None:
    disk, journal = busy
    units = list(scan(disk, PATH))
    whole = contents(units)
    for reader in (journal.reader(), LogReader(disk, PATH)):
        for start in (0, 1, 2, 77, 150, 151):
            assert contents(reader.read_units(start_unit=start)) == whole[max(0, start - 1) :]
        for unit in units[::29]:
            place = (unit.segment, unit.offset)
            assert contents(reader.read_units(place=place)) == whole[unit.number - 1 :]


def test_locate_requires_exactly_one_target(busy: tuple[MemoryDisk, Journal]) -> None:
    for targets in ({}, {"offset": 1, "id": 2}):
        with pytest.raises(BadRequest):
            busy[1].reader().locate(0, **targets)


def test_index_is_sparse(busy: tuple[MemoryDisk, Journal]) -> None:
    _, journal = busy
    index = journal.reader().index(2)
    entries = index.of(0)
    assert 1 <= len(entries) <= 2 * ((16 << 10) // 4096 + 1)


def test_readers_stop_at_the_watermark() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10, 10])
    mark = bytes(disk.files[f"{PATH}/watermark"].data)
    write_units(journal, [10], start=3)
    disk.files[f"{PATH}/watermark"].data[:] = mark
    reader = LogReader(disk, PATH)
    assert [u.number for u in reader.read_units()] == [1, 2]
    assert [u.number for u in reader.read_units(durable_only=False)] == [1, 2, 3]


def test_reader_continues_when_more_is_written() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8192)
    reader, seen = LogReader(disk, PATH), 0
    for number in range(1, 12):
        write_units(journal, [2500], start=number)
        fresh = [u.number for u in reader.read_units(start_unit=seen + 1)]
        assert fresh == [number]
        assert reader.locate(0, offset=number - 1) is not None
        seen = number


def test_damage_below_the_watermark_is_reported_with_its_byte() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10, 10, 10])
    second = list(scan(disk, PATH))[1]
    disk.files[f"{PATH}/0000000001.seg"].data[second.offset + 100] ^= 1
    reader = LogReader(disk, PATH)
    found = []
    with pytest.raises(JournalCorrupt) as caught:
        found.extend(unit.number for unit in reader.read_units())
    assert caught.value.offset == second.offset
    del disk.files[f"{PATH}/watermark"]
    with pytest.raises(JournalCorrupt, match="watermark"):
        list(reader.read_units())


def test_reclaimed_start_is_reported() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8192)
    write_units(journal, [2500] * 8)
    disk.unlink(f"{PATH}/0000000001.seg")
    reader = LogReader(disk, PATH)
    for start in ({"start_unit": 1}, {"place": (1, 512)}):
        with pytest.raises(BadRequest, match="reclaimed"):
            list(reader.read_units(**start))  # type: ignore[arg-type]
    assert next(iter(reader.read_units())).segment == 2
