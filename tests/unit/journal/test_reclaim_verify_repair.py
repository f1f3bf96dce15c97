"""Reclaim, verify, repair and the real disk: segments are deleted completely, and losses are reported exactly."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from heapline.contract.errors import BadName, DirectoryLocked, JournalCorrupt
from heapline.journal import reclaim
from heapline.journal.block import Block, make_block, new_rows
from heapline.journal.disk import RealDisk
from heapline.journal.journal import Journal
from heapline.journal.reclaim import ReaderLease, SegmentHeld, end_lease, read_leases, write_lease
from heapline.journal.recovery import scan
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.verify import repair, stats, verify
from tests.unit.journal.rig import PATH, MemoryDisk, PowerCut, contents, open_journal, write_units


def segments() -> MemoryDisk:
    """Write eleven units in five segments, two per segment."""
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10)
    write_units(journal, [2500] * 11)
    journal.prepare()
    return disk


def segment(number: int) -> str:
    return f"{PATH}/{number:010d}.seg"


def delete_segment(disk: MemoryDisk, path: str, number: int, *, older_unit: int, durable_unit: int, now: int) -> str:
    """Return what holds the segment; empty if it was deleted."""
    try:
        reclaim.delete_segment(disk, path, number, older_unit=older_unit, durable_unit=durable_unit, now=now)
    except SegmentHeld as held:
        return held.detail
    return ""


# --- reclaim ----------------------------------------------------------------------------------------------------------


def test_unneeded_segment_is_deleted_with_its_index() -> None:
    disk = segments()
    last_of_first = [u.number for u in scan(disk, PATH) if u.segment == 1][-1]
    assert disk.exists(f"{PATH}/0000000001.idx")
    assert delete_segment(disk, PATH, 1, older_unit=last_of_first, durable_unit=11, now=0) == ""
    assert not disk.exists(segment(1))
    assert not disk.exists(f"{PATH}/0000000001.idx")
    _, units = open_journal(disk, after_unit=last_of_first)
    assert [u.number for u in units] == list(range(last_of_first + 1, 12))


def test_segment_stays_while_snapshot_reader_or_order_requires_it() -> None:
    disk = segments()
    last_of_first = [u.number for u in scan(disk, PATH) if u.segment == 1][-1]
    write_lease(disk, PATH, ReaderLease("spark-1", 42, 1, 5000))

    def holder(number: int, older: int, now: int) -> str:
        return delete_segment(disk, PATH, number, older_unit=older, durable_unit=11, now=now)

    assert "older snapshot" in holder(1, last_of_first - 1, 6000)
    assert "must be deleted first" in holder(2, 11, 6000)
    write_lease(disk, PATH, ReaderLease("spark-1", 42, 1, 5000))
    assert "spark-1" in holder(1, 11, 5000)
    assert disk.exists(segment(1))
    assert holder(1, 11, 5001) == ""
    assert read_leases(disk, PATH, 0) == []


def test_last_durable_segment_is_never_deleted() -> None:
    disk = segments()
    done = 0
    while delete_segment(disk, PATH, done + 1, older_unit=99, durable_unit=11, now=0) == "":
        done += 1
    assert done == 5
    _, units = open_journal(disk, after_unit=10)
    assert [u.number for u in units] == [11]


def test_segment_stays_until_the_next_one_holds_a_durable_unit() -> None:
    disk = segments()
    first_of_second = next(u.number for u in scan(disk, PATH) if u.segment == 2)
    assert "last segment" in delete_segment(disk, PATH, 1, older_unit=99, durable_unit=first_of_second - 1, now=0)
    assert delete_segment(disk, PATH, 1, older_unit=99, durable_unit=first_of_second, now=0) == ""


def test_later_leases_hold_nothing_and_unreadable_ones_hold_everything() -> None:
    disk = segments()
    write_lease(disk, PATH, ReaderLease("later", 1, 2, 10**15))
    assert delete_segment(disk, PATH, 1, older_unit=99, durable_unit=11, now=0) == ""
    end_lease(disk, PATH, "later")
    end_lease(disk, PATH, "later")
    disk.write_file_atomic(f"{PATH}/readers/odd.lease", b"{")
    assert "odd" in delete_segment(disk, PATH, 2, older_unit=99, durable_unit=11, now=0)


@pytest.mark.parametrize("name", ["../x", "", "x" * 129, "é", "a b"])
def test_invalid_or_long_lease_name_is_rejected(name: str) -> None:
    disk = segments()
    with pytest.raises(BadName):
        write_lease(disk, PATH, ReaderLease(name, 1, 1, 1))
    with pytest.raises(BadName):
        end_lease(disk, PATH, name)
    disk.write_file_atomic(f"{PATH}/readers/{name.replace('/', '')}.lease", b"{")  # by hand: it holds everything
    assert len(read_leases(disk, PATH, 0)) == 1


# --- verify and repair ------------------------------------------------------------------------------------------------


def test_valid_journal_verifies_with_its_counts() -> None:
    disk = segments()
    report = verify(disk, PATH)
    assert report.ok
    assert (report.first_unit, report.last_unit, report.units, report.rows, report.frames) == (1, 11, 11, 11, 11)
    assert report.bytes == sum(u.header.nbytes for u in scan(disk, PATH))
    assert stats(disk, PATH) == report
    assert repair(disk, PATH) == report


def test_verify_names_damage_and_counts_what_follows_it() -> None:
    disk = segments()
    fifth = list(scan(disk, PATH))[4]
    disk.files[segment(fifth.segment)].data[fifth.offset + 300] ^= 1
    report = verify(disk, PATH)
    assert [(d.path, d.offset, d.unit) for d in report.damage] == [(segment(fifth.segment), fifth.offset, 5)]
    assert report.units == 10
    with pytest.raises(JournalCorrupt):
        stats(disk, PATH)


def test_verify_checks_every_record_by_its_own_checksum() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    good = make_block(new_rows(2), None, [b"one", b"two"])
    spoiled = bytearray(good.data)
    spoiled[160 + 3] ^= 1  # the second payload, before the unit's own checksum is computed
    journal.add_block(Block(bytes(spoiled), 2, 0, 6, len(spoiled)))
    unit = journal.seal()
    assert unit is not None
    journal.commit(unit)
    report = verify(disk, PATH)
    assert [(d.unit, d.offset, d.is_record) for d in report.damage] == [(1, 512 + 64 + 80, True)]
    assert "single records" in repair(disk, PATH).refused


def test_torn_last_unit_is_not_damage() -> None:
    disk = segments()
    disk.unlink(f"{PATH}/watermark")
    last = list(scan(disk, PATH))[-1]
    disk.files[segment(last.segment)].data[last.offset + 1024 : last.end] = bytes(last.end - last.offset - 1024)
    report = verify(disk, PATH)
    assert report.ok
    assert (report.torn_unit, report.last_unit) == (11, 10)


@pytest.mark.parametrize("damaged", [1, 2, 5, 6, 11])
def test_repair_cuts_at_the_damaged_unit_and_reports_the_loss(damaged: int) -> None:
    disk = segments()
    units = list(scan(disk, PATH))
    good = contents(units)[: damaged - 1]
    unit = units[damaged - 1]
    before = bytes(disk.files[segment(unit.segment)].data)
    spoiled = bytearray(before)
    spoiled[unit.offset + 200] ^= 1
    disk.files[segment(unit.segment)].data[:] = spoiled
    report = repair(disk, PATH)
    assert report.repaired
    assert report.cut_from_unit == damaged
    assert report.lost_units == list(range(damaged + 1, 12))
    assert (report.lost_frames, report.lost_rows) == (11 - damaged, 11 - damaged)
    aside = {p.rpartition("/")[2]: bytes(disk.files[p].data) for p in report.set_aside}
    assert aside[f"{unit.segment:010d}.seg"] == bytes(spoiled)
    assert verify(disk, PATH).ok
    journal, units = open_journal(disk)
    assert contents(units) == good
    write_units(journal, [100], start=damaged)
    assert [u.number for u in open_journal(disk)[1]] == list(range(1, damaged + 1))


@pytest.mark.parametrize("kind", ["truncated", "header", "missing", "watermark ahead"])
def test_repair_of_other_damage(kind: str) -> None:
    disk = segments()
    whole = contents(scan(disk, PATH))
    kept = 4
    if kind == "truncated":
        third = [u for u in scan(disk, PATH) if u.segment == 3]
        kept = third[0].number
        del disk.files[segment(3)].data[third[1].offset + 700 :]
    elif kind == "header":
        disk.files[segment(3)].data[20] ^= 1
    elif kind == "missing":
        disk.unlink(segment(3))
    else:
        last = list(scan(disk, PATH))[-1]
        disk.files[segment(last.segment)].data[last.offset : last.end] = bytes(last.end - last.offset)
        kept = 10
    assert repair(disk, PATH).repaired
    _, units = open_journal(disk)
    assert contents(units) == whole[:kept]


def test_repair_sets_aside_snapshots_above_the_cut_and_needs_one_below() -> None:
    disk = segments()
    store = SnapshotStore(disk, f"{PATH}/snapshots")
    store.write(3, b"s3", {})
    store.write(8, b"s8", {})
    assert delete_segment(disk, PATH, 1, older_unit=3, durable_unit=11, now=0) == ""
    sixth = next(u for u in scan(disk, PATH) if u.number == 6)
    disk.files[segment(sixth.segment)].data[sixth.offset + 100] ^= 1
    without = disk.copy()
    without.unlink(f"{PATH}/snapshots/{3:016d}.snap")
    before = {path: bytes(inode.data) for path, inode in without.files.items()}
    report = repair(without, PATH)
    assert not report.repaired
    assert "restore a backup" in report.refused
    assert {path: bytes(inode.data) for path, inode in without.files.items()} == before
    assert repair(disk, PATH).repaired
    again = SnapshotStore(disk, f"{PATH}/snapshots")
    assert again.load_newest().unit == 3  # type: ignore[union-attr]
    _, units = open_journal(disk, after_unit=3)
    assert [u.number for u in units] == [4, 5]


def test_killed_repair_can_be_run_again() -> None:
    probe = segments()
    fifth = list(scan(probe, PATH))[4]
    whole = contents(scan(probe, PATH))
    for stop in range(1, 200):
        disk = probe.copy()
        disk.files[segment(fifth.segment)].data[fifth.offset + 300] ^= 1
        first = disk.steps

        def die(what: str, path: str, disk: MemoryDisk = disk, last: int = first + stop) -> None:
            if what != "pread" and disk.steps >= last:
                raise PowerCut

        disk.on_step = die
        finished = False
        with contextlib.suppress(PowerCut):
            finished = repair(disk, PATH).repaired
        disk.on_step = lambda what, path: None
        repair(disk, PATH)
        assert contents(open_journal(disk)[1]) == whole[:4]
        if finished:
            break
    else:
        pytest.fail("the run never ended")


# --- the real disk ----------------------------------------------------------------------------------------------------


def test_real_disk_implements_the_protocol(tmp_path: Path) -> None:
    disk, path = RealDisk(), f"{tmp_path}/file"
    file = disk.create(path)
    file.pwritev([b"ab", bytearray(b"cd"), memoryview(b"ef")], 3)
    assert file.pread(100, 0) == b"\0\0\0abcdef"
    file.pwritev([b"x"] * 3000, 0)
    assert file.pread(3001, 0) == b"x" * 3000
    file.zero(10, 3 << 20)
    assert file.size() == 10 + (3 << 20)
    file.fallocate(0, 4 << 20)
    assert file.size() == 4 << 20
    assert file.pread(12, 0) == b"x" * 10 + b"\0\0"
    file.truncate(5)
    file.fdatasync()
    file.close()
    file.close()
    assert disk.read_file(path) == b"xxxxx"
    disk.write_file_atomic(path, b"new")
    assert disk.read_file(path) == b"new"
    assert disk.listdir(str(tmp_path)) == ["file"]
    disk.mkdir(f"{tmp_path}/a/b")
    disk.rename(path, f"{tmp_path}/a/b/file")
    assert disk.exists(f"{tmp_path}/a/b/file")
    disk.unlink(f"{tmp_path}/a/b/file")
    disk.rmdir(f"{tmp_path}/a/b")
    disk.remove_tree(f"{tmp_path}/a")
    disk.remove_tree(f"{tmp_path}/a")
    disk.fsync_dir(str(tmp_path))
    assert disk.listdir(str(tmp_path)) == []
    with pytest.raises(FileNotFoundError):
        disk.open(path)


def test_directory_lock_has_one_owner(tmp_path: Path) -> None:
    disk = RealDisk()
    lock = disk.lock(f"{tmp_path}/lock")
    with pytest.raises(DirectoryLocked) as caught:
        disk.lock(f"{tmp_path}/lock")
    assert caught.value.path == str(tmp_path)
    lock.release()
    lock.release()
    disk.lock(f"{tmp_path}/lock").release()


def test_real_disk_leaks_no_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    disk = RealDisk()
    Journal.create(disk, f"{tmp_path}/topic", incarnation=1, segment_bytes=1 << 20)
    journal, units = Journal.open(disk, f"{tmp_path}/topic")
    assert list(units) == []
    placed = write_units(journal, [300_000] * 8)
    for positions in placed:
        journal.load(positions)
    journal.prepare()
    journal.close()
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before
