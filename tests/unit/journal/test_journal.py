"""The journal end to end on an in-memory disk: committed units are read back, at the returned positions."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from heapline.contract.errors import JournalCorrupt, StorageFull, TopicReloading
from heapline.journal.block import make_block, new_rows
from heapline.journal.disk import RealDisk
from heapline.journal.journal import Journal
from heapline.journal.spares import SparePool
from heapline.journal.unit import UNIT_BYTES_MAX, Frame
from heapline.journal.unit_planner import BLOCK_ENTRY_BYTES, FRAME_ENTRY_BYTES
from heapline.journal.writer import SyncPolicy
from tests.unit.journal.rig import PATH, MemoryDisk, commit, contents, open_journal, policies, put, write_units


def test_committed_units_exist_after_reopening() -> None:
    disk = MemoryDisk()
    journal, units = open_journal(disk)
    assert units == []
    write_units(journal, [10, 600, 0, 3000])
    _, units = open_journal(disk.copy())
    assert [u.number for u in units] == [1, 2, 3, 4]
    assert [bytes(u.payloads(u.blocks[0])) for u in units] == [b"\2" * 10, b"\3" * 600, b"", b"\5" * 3000]
    assert [u.time for u in units] == [1001, 1002, 1003, 1004]


def test_uncommitted_units_do_not_exist_after_reopening() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10])
    put(journal, [b"open"])
    put(journal, [b"sealed"])
    journal.seal()
    _, units = open_journal(disk.copy())
    assert [u.number for u in units] == [1]


def test_writing_continues_after_reopening_and_after_a_snapshot() -> None:
    disk = MemoryDisk()
    for round_ in range(5):
        journal, units = open_journal(disk, after_unit=max(0, 2 * round_ - 1))
        assert [u.number for u in units] == ([2 * round_] if round_ else [])
        assert journal.open_unit_number == 2 * round_ + 1
        write_units(journal, [9000, 9000], start=2 * round_ + 1)
        journal.close()
    _, units = open_journal(disk)
    assert [u.number for u in units] == list(range(1, 11))


def test_positions_are_known_before_the_write_and_read_the_record_after_it() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    positions = put(journal, [b"one", b"two"], smalls=[b"k1", b""])
    records, missing = journal.cached(positions)
    assert len(missing) == 0
    assert (records.payloads, records.smalls) == ([b"one", b"two"], [b"k1", b""])
    commit(journal)
    loaded = journal.load(positions[::-1])
    assert (loaded.payloads, loaded.smalls) == ([b"two", b"one"], [b"", b"k1"])
    assert loaded.rows["id"].tolist() == [2, 1]
    assert not loaded.bad


def test_units_fill_a_segment_to_its_exact_end() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=16 << 10)
    space = (16 << 10) - 512
    # Find the payload whose unit, with its planned bounds, takes all remaining space.
    largest = max(n for n in range(space - 1000, space) if _fits(journal, n))
    positions = [put(journal, [b"a" * largest]), put(journal, [b"b" * largest], first_id=2)]
    commit(journal)
    _, units = open_journal(disk.copy())
    assert [(u.segment, u.offset, u.end) for u in units] == [(1, 512, 16 << 10), (2, 512, 16 << 10)]
    assert journal.load(np.concatenate(positions)).payloads == [b"a" * largest, b"b" * largest]
    assert commit_small(journal) == 3
    assert [u.segment for u in open_journal(disk)[1]] == [1, 2, 3]


def _fits(journal: Journal, size: int) -> bool:
    try:
        journal.room(make_block(new_rows(1), None, [b"x" * size]).nbytes + 11)
    except ValueError:
        return False
    return True


def commit_small(journal: Journal) -> int:
    put(journal, [b"small"], first_id=99)
    return commit(journal)


def test_oversized_data_is_rejected_before_anything_changes() -> None:
    journal, _ = open_journal(MemoryDisk(), segment_bytes=64 << 20)
    put(journal, [bytes(300 << 10)])
    with pytest.raises(ValueError, match="do not fit"):
        journal.room(UNIT_BYTES_MAX)
    assert journal.next_unit == 2
    journal.room(UNIT_BYTES_MAX - (256 << 10))
    assert journal.open_unit_number == 2


def test_adding_without_calling_room_is_rejected() -> None:
    journal, _ = open_journal(MemoryDisk(), segment_bytes=8192)
    with pytest.raises(ValueError, match="call room first"):
        journal.add_block(make_block(new_rows(1), None, [bytes(8000)]))
    with pytest.raises(ValueError, match="call room first"):
        journal.add_frames([Frame(0, 0, 1, bytes(8000))])


def test_bounds_of_meta_entries_hold_for_the_largest_numbers() -> None:
    journal, _ = open_journal(MemoryDisk(), segment_bytes=1 << 20)
    big = 2**63 - 1
    for _ in range(200):
        journal.add_frames([Frame(big, big, big, b"", big)])
    planned = journal.open_bytes
    unit = journal.seal()
    assert unit is not None
    assert unit.nbytes <= planned
    assert len(unit.meta) <= 16 + 200 * FRAME_ENTRY_BYTES
    assert BLOCK_ENTRY_BYTES >= 1 + 4 * 5


def test_unit_that_must_be_sealed_for_room_is_committed_first() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=16 << 10)
    put(journal, [bytes(9000)], time=50)
    put(journal, [bytes(9000)], first_id=2, time=60)
    first, second = journal.take_sealed()[0], journal.seal(70, 70)
    assert second is not None
    assert (first.number, first.time, second.number, second.segment) == (1, 60, 2, 2)
    with pytest.raises(ValueError, match="unit 1 must be committed before"):
        journal.commit(second)
    journal.commit(first)
    journal.commit(second)
    assert journal.durable_unit == 2


def test_journal_time_never_goes_back() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    for time in (100, 90, 110):
        put(journal, [b"x"])
        commit(journal, time)
    journal, units = open_journal(disk)
    assert [u.time for u in units] == [100, 100, 110]
    put(journal, [b"x"])
    commit(journal, 5)
    assert open_journal(disk)[1][-1].time == 110


def test_commit_is_one_write_one_sync_and_the_watermark() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10])
    for number in range(2, 5):
        put(journal, [b"x" * 100, b"y"], first_id=number)
        put(journal, [b"z"], first_id=number)
        unit = journal.seal()
        assert unit is not None
        disk.log.clear()
        journal.commit(unit)
        segment = f"{PATH}/0000000001.seg"
        assert disk.log == [("pwritev", segment), ("fdatasync", segment), ("pwritev", f"{PATH}/watermark")]


def test_rolling_over_to_a_prepared_segment_costs_no_more() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8192)
    write_units(journal, [5000])
    put(journal, [bytes(5000)], first_id=2)
    unit = journal.seal()
    assert unit is not None
    assert unit.segment == 2
    journal.prepare()
    assert not journal.wants_prepare
    disk.log.clear()
    journal.commit(unit)
    assert [what for what, _ in disk.log] == ["pwritev", "fdatasync", "pwritev"]


def test_new_segment_is_durable_under_its_name_before_it_holds_a_unit() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8192)
    disk.log.clear()
    write_units(journal, [5000, 5000])
    path = f"{PATH}/0000000002.seg"
    steps = [step for step in disk.log if step[1] in (path, path + ".tmp", PATH)]
    assert steps[:4] == [
        ("create", path + ".tmp"),
        ("zero", path + ".tmp"),
        ("fdatasync", path + ".tmp"),
        ("rename", path),
    ]
    assert steps[4] == ("fsync_dir", PATH)
    assert steps.index(("fsync_dir", PATH)) < steps.index(("pwritev", path))


@pytest.mark.parametrize("policy", policies())
def test_sync_policies_differ_in_what_is_durable(policy: SyncPolicy) -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, policy=policy)
    disk.log.clear()
    write_units(journal, [10, 10])
    synced = [path for what, path in disk.log if what == "fdatasync"]
    assert len(synced) == (2 if policy == "commit" else 0)
    assert journal.written_unit == 2
    assert journal.durable_unit == (2 if policy == "commit" else 0)
    visible = len(list(journal.reader().read_units()))
    assert visible == (0 if policy == "interval" else 2)
    journal.sync()
    assert journal.durable_unit == 2
    assert len(list(journal.reader().read_units())) == 2


def test_relaxed_policies_sync_a_segment_before_the_next() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, policy="os", segment_bytes=8192)
    write_units(journal, [5000, 5000])
    assert journal.durable_unit == 1


@pytest.mark.parametrize("what", ["pwritev", "fdatasync"])
def test_error_in_commit_poisons_the_journal(what: str) -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10])
    put(journal, [b"x"], first_id=2)
    unit = journal.seal()
    assert unit is not None

    def fail(step: str, path: str) -> None:
        if step == what and path.endswith(".seg"):
            raise OSError(errno.EIO, "broken")

    disk.on_step = fail
    with pytest.raises(OSError, match="broken"):
        journal.commit(unit)
    disk.on_step = lambda step, path: None
    for call in (
        lambda: journal.commit(unit),
        journal.prepare,
        journal.sync,
        lambda: journal.room(1),
        lambda: journal.add_frames([Frame(0, 0, 0, b"")]),
        journal.seal,
    ):
        with pytest.raises(TopicReloading):
            call()
    assert journal.poisoned is not None


def test_unit_left_in_the_page_cache_by_a_failed_sync_is_rewritten_on_open() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10])
    put(journal, [b"x"], first_id=2)
    unit = journal.seal()
    assert unit is not None

    def fail(step: str, path: str) -> None:
        if step == "fdatasync":
            # The kernel marks the pages clean nevertheless, so nothing would write them again.
            disk.files[path].unsynced.clear()
            raise OSError(errno.EIO, "broken")

    disk.on_step = fail
    with pytest.raises(OSError, match="broken"):
        journal.commit(unit)
    disk.on_step = lambda step, path: None
    disk.log.clear()
    _, units = open_journal(disk)
    assert [u.number for u in units] == [1, 2]
    path = f"{PATH}/0000000001.seg"
    assert disk.log.index(("pwritev", path)) < disk.log.index(("fdatasync", path))


def test_building_before_the_end_of_recovery_raises() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    write_units(journal, [10])
    journal, units = Journal.open(disk, PATH)
    with pytest.raises(RuntimeError, match="iterator"):
        journal.room(10)
    assert len(list(units)) == 1
    journal.room(10)


def test_different_config_is_rejected() -> None:
    disk = MemoryDisk()
    open_journal(disk)
    with pytest.raises(JournalCorrupt, match="config says"):
        Journal.open(disk, PATH, segment_bytes=4096)
    with pytest.raises(JournalCorrupt, match="incarnation"):
        list(Journal.open(disk, PATH, incarnation=8)[1])
    with pytest.raises(FileExistsError):
        Journal.create(disk, PATH, incarnation=8, segment_bytes=8192)
    with pytest.raises(ValueError, match="steps of 512"):
        Journal.create(disk, PATH + "2", incarnation=8, segment_bytes=5000)
    with pytest.raises(ValueError, match="sync policy"):
        list(Journal.open(disk, PATH, policy="never")[1])  # type: ignore[arg-type]


def test_interrupted_creation_leaves_no_partial_journal() -> None:
    probe = MemoryDisk()
    Journal.create(probe, PATH, incarnation=7, segment_bytes=8192)
    for stop in range(1, probe.steps + 1):
        disk = MemoryDisk()

        def die(what: str, path: str, disk: MemoryDisk = disk, stop: int = stop) -> None:
            if disk.steps == stop:
                raise KeyboardInterrupt

        disk.on_step = die
        with pytest.raises(KeyboardInterrupt):
            Journal.create(disk, PATH, incarnation=7, segment_bytes=8192)
        disk.on_step = lambda what, path: None
        if disk.exists(PATH):
            assert open_journal(disk)[1] == []
        else:
            Journal.create(disk, PATH, incarnation=7, segment_bytes=8192)
            assert open_journal(disk)[1] == []


# --- space ------------------------------------------------------------------------------------------------------------


def full_disk(disk: MemoryDisk) -> None:
    disk.space = sum(len(inode.blocks) for inode in disk.files.values()) * 4096


def test_growth_stops_without_space_and_spares_and_resumes() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 20)
    full_disk(disk)
    put(journal, [bytes(600_000)])
    assert journal.wants_prepare
    assert not journal.prepare()
    assert not journal.can_grow
    assert len(disk.files[f"{PATH}/0000000001.seg"].data) == 1 << 20  # growing left no hole
    commit(journal)  # units planned within the existing space are still written
    disk.space = None
    assert journal.prepare()
    assert journal.can_grow
    assert len(open_journal(disk.copy())[1]) == 1


def test_commit_without_space_fails_without_losing_existing_units() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 20)
    write_units(journal, [10])
    full_disk(disk)
    put(journal, [bytes(3_000_000)], first_id=2)
    unit = journal.seal()
    assert unit is not None
    assert not journal.prepare()
    with pytest.raises(StorageFull):
        journal.commit(unit)
    assert journal.poisoned is not None
    disk.space = None
    assert [u.number for u in open_journal(disk)[1]] == [1]


def test_spare_takes_over_in_the_middle_of_a_segment() -> None:
    disk = MemoryDisk()
    spares = SparePool(disk, "/data/spares", 8 << 20)
    assert spares.fill()
    journal, _ = open_journal(disk, segment_bytes=8 << 20, spares=spares)
    first = put(journal, [b"before"])
    commit(journal)
    assert journal.load(first).payloads == [b"before"]  # holds the old file open
    full_disk(disk)
    second = put(journal, [b"x" * 3_000_000], first_id=2)
    assert journal.seal() is not None
    assert not journal.prepare()
    assert spares.available == 1
    assert not journal.can_grow
    (unit,) = journal.take_sealed()
    journal.commit(unit)
    assert journal.load(np.concatenate([first, second])).payloads == [b"before", b"x" * 3_000_000]
    assert [u.number for u in open_journal(disk.copy())[1]] == [1, 2]
    assert not [p for p in disk.files if p.endswith(".tmp")]
    disk.space = None
    assert journal.prepare()
    assert spares.available == 2


def test_spare_becomes_the_next_segment() -> None:
    disk = MemoryDisk()
    spares = SparePool(disk, "/data/spares", 1 << 20)
    assert spares.fill()
    journal, _ = open_journal(disk, segment_bytes=1 << 20, spares=spares)
    full_disk(disk)
    for number in range(1, 4):
        put(journal, [bytes([number]) * 600_000], first_id=number)
        commit(journal)
    assert spares.available == 0
    put(journal, [b"\4" * 600_000], first_id=4)
    with pytest.raises(StorageFull):
        commit(journal)
    assert [(u.number, u.segment) for u in open_journal(disk.copy())[1]] == [(1, 1), (2, 2), (3, 3)]


def test_preparing_ahead_never_takes_a_spare() -> None:
    disk = MemoryDisk()
    spares = SparePool(disk, "/data/spares", 1 << 20)
    assert spares.fill()
    journal, _ = open_journal(disk, segment_bytes=1 << 20, spares=spares)
    full_disk(disk)
    put(journal, [bytes(600_000)])
    assert not journal.prepare()
    assert spares.available == 2


def test_pool_keeps_complete_spares_and_removes_the_rest() -> None:
    disk = MemoryDisk()
    assert SparePool(disk, "/data/spares", 8192).fill()
    disk.create("/data/spares/9.spare.tmp")
    disk.create("/data/spares/10.spare").fallocate(0, 4096)
    again = SparePool(disk, "/data/spares", 8192)
    assert again.available == 2
    assert disk.listdir("/data/spares") == ["1.spare", "2.spare"]
    taken = [again.take(), again.take(), again.take()]
    assert taken[2] is None
    assert None not in taken[:2]
    disk.space = 0
    assert not again.fill()
    assert not again.plenty
    with pytest.raises(ValueError, match="cannot serve"):
        open_journal(disk.copy(), segment_bytes=16384, spares=again)


# --- the real disk ----------------------------------------------------------------------------------------------------


def test_round_trip_on_the_real_disk(tmp_path: object) -> None:
    disk, path = RealDisk(), f"{tmp_path}/topic"
    Journal.create(disk, path, incarnation=3, segment_bytes=1 << 20)
    spares = SparePool(disk, f"{tmp_path}/spares", 1 << 20)
    assert spares.fill()
    journal, units = Journal.open(disk, path, spares=spares)
    assert list(units) == []
    positions = []
    for number in range(1, 30):
        positions.append(put(journal, [bytes([number]) * 100_000], first_id=number))
        commit(journal)
    want = [bytes([number]) * 100_000 for number in range(1, 30)]
    assert journal.load(np.concatenate(positions)).payloads == want
    journal.close()
    journal, units = Journal.open(disk, path)
    assert [payload for _, _, payload in contents(units)] == want
    journal.close()
