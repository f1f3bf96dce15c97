"""After a crash or damage: exactly what was committed, or an error that names the file; never silently less."""

from __future__ import annotations

import itertools
import random

import pytest
from crc32c import crc32c
from msgspec.structs import replace

from heapline.contract.errors import CorruptionError, JournalCorrupt, UnknownFormat
from heapline.journal.disk import SECTOR
from heapline.journal.journal import Journal
from heapline.journal.log_bounds import Watermark
from heapline.journal.recovery import Scan, read_header, scan
from heapline.journal.segment import SegmentHeader, parse_segment_header
from heapline.journal.unit import Unit, crc_seed
from heapline.journal.writer import SyncPolicy
from tests.unit.journal.rig import (
    PATH,
    MemoryDisk,
    PowerCut,
    commit,
    contents,
    open_journal,
    policies,
    put,
    write_units,
)

SEGMENT = f"{PATH}/0000000001.seg"
MARK = f"{PATH}/watermark"
Contents = list[tuple[int, bytes, bytes]]


def three_units(segment_bytes: int = 16 << 10) -> tuple[MemoryDisk, Contents]:
    """Return a journal whose last unit has several sectors, one of them all zeros."""
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=segment_bytes)
    write_units(journal, [10, 700])
    put(journal, [b"start" + bytes(1200) + b"end", b"second"], smalls=[b"key", b""], first_id=3, first_offset=2)
    commit(journal)
    disk = disk.copy()
    return disk, contents(open_journal(disk.copy())[1])


def recovered(disk: MemoryDisk) -> Contents | str:
    """Open the journal and return its contents, or the path named by the error."""
    try:
        _, units = open_journal(disk)
    except (JournalCorrupt, UnknownFormat) as error:
        return error.path
    return contents(units)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_watermark", [True, False])
def test_no_flipped_byte_loses_a_committed_unit(with_watermark: bool) -> None:
    disk, whole = three_units()
    end = Scan(disk, PATH)
    list(end)
    used = end.end
    rng = random.Random(4)
    places = {*range(96), *range(512, 600), *range(used - 700, used + 40), *rng.sample(range(used, 16 << 10), 60)}
    places |= set(rng.sample(range(used), 400))
    for at in sorted(places):
        damaged = disk.copy()
        if not with_watermark:
            damaged.unlink(MARK)
        damaged.files[SEGMENT].data[at] ^= 1 << rng.randrange(8)
        found = recovered(damaged)
        # After the end it may pass for the rest of a torn write: cutting it loses nothing.
        assert found == SEGMENT or (at >= used and found == whole), at


def test_flipped_table_entry_of_a_zero_sector_is_not_a_torn_write() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=16 << 10)
    put(journal, [bytes(3000)])
    commit(journal)
    scan_ = Scan(disk, PATH)
    (unit,) = list(scan_)
    disk.unlink(MARK)
    table_at = unit.offset + unit.header.table_at
    for sector in range(unit.header.sectors):
        damaged = disk.copy()
        damaged.files[SEGMENT].data[table_at + 4 * sector] ^= 2
        assert recovered(damaged) == SEGMENT, sector


@pytest.mark.parametrize("with_watermark", [True, False])
def test_no_truncation_loses_a_committed_unit(with_watermark: bool) -> None:
    disk, whole = three_units()
    for size in [*range(0, 16 << 10, 128), (16 << 10) - 1]:
        cut = disk.copy()
        if not with_watermark:
            cut.unlink(MARK)
        del cut.files[SEGMENT].data[size:]
        assert recovered(cut) == SEGMENT, size
    assert recovered(disk) == whole


def test_damaged_or_truncated_watermark_changes_nothing() -> None:
    disk, whole = three_units()
    for at in range(64):
        damaged = disk.copy()
        damaged.files[MARK].data[at] ^= 0x40
        assert recovered(damaged) == whole
        cut = disk.copy()
        del cut.files[MARK].data[at:]
        assert recovered(cut) == whole


def test_zeroed_sector_below_the_watermark_is_corruption() -> None:
    disk, _ = three_units()
    scan_ = Scan(disk, PATH)
    last = list(scan_)[-1]
    for sector in range(last.offset, last.end, SECTOR):
        damaged = disk.copy()
        if not any(damaged.files[SEGMENT].data[sector : sector + SECTOR]):
            continue
        damaged.files[SEGMENT].data[sector : sector + SECTOR] = bytes(SECTOR)
        with pytest.raises(JournalCorrupt, match="though it was durable"):
            open_journal(damaged)


def test_zeroed_unit_in_the_middle_is_corruption_without_a_watermark() -> None:
    disk, _ = three_units()
    units = list(Scan(disk, PATH))
    for unit in units[:-1]:
        for start, end in [(unit.offset, unit.end), (unit.offset, unit.offset + SECTOR)]:
            damaged = disk.copy()
            damaged.unlink(MARK)
            damaged.files[SEGMENT].data[start:end] = bytes(end - start)
            assert recovered(damaged) == SEGMENT


def test_lost_last_unit_below_watermark_or_snapshot_is_corruption() -> None:
    disk, _ = three_units()
    last = list(Scan(disk, PATH))[-1]
    disk.files[SEGMENT].data[last.offset : last.end] = bytes(last.end - last.offset)
    assert recovered(disk.copy()) == SEGMENT
    disk.unlink(MARK)
    assert [number for number, _, _ in contents(open_journal(disk.copy())[1])] == [1, 2]
    with pytest.raises(JournalCorrupt, match="units 3 to 3 are missing"):
        list(scan(disk, PATH, after_unit=2, known_durable=3))


def many_segments() -> tuple[MemoryDisk, Contents]:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10)
    write_units(journal, [2500] * 11)
    return disk.copy(), contents(open_journal(disk.copy())[1])


def test_damage_in_any_segment_names_it_and_its_byte() -> None:
    disk, whole = many_segments()
    names = [p for p in disk.files if p.endswith(".seg")]
    assert len(names) >= 5
    rng = random.Random(5)
    for path in names[:3]:  # after the last unit of a full segment, too
        damaged = disk.copy()
        damaged.files[path].data[-1] ^= 1
        assert recovered(damaged) == path
    for path in [p for p in names if any(disk.files[p].data)]:
        used = len(disk.files[path].data.rstrip(b"\0"))
        for at in [0, 9, 60, 508, 512, 530, *rng.sample(range(used), 40)]:
            damaged = disk.copy()
            damaged.files[path].data[at] ^= 0x80
            with pytest.raises(JournalCorrupt) as caught:
                open_journal(damaged)
            assert caught.value.path == path
            assert at - 4096 <= caught.value.offset <= at
    assert recovered(disk) == whole


def test_missing_segment_is_corruption_unless_reclaimed() -> None:
    disk, whole = many_segments()
    for number in range(1, 5):
        damaged = disk.copy()
        damaged.unlink(f"{PATH}/{number:010d}.seg")
        if number == 1:
            assert recovered(damaged) == [entry for entry in whole if entry[0] > 2]
            with pytest.raises(JournalCorrupt, match="unit 2 is missing"):
                open_journal(damaged, after_unit=1)
        else:
            assert recovered(damaged) == f"{PATH}/{number:010d}.seg"


@pytest.mark.parametrize("policy", policies())
def test_removed_last_segment_is_refused_without_a_watermark(policy: SyncPolicy) -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10, policy=policy)
    ends = set()
    for number in range(1, 40):
        write_units(journal, [700], start=number)
        last = journal.reader().segments()[-1] if policy == "commit" else Scan(disk, PATH)._written[-1]
        path = f"{PATH}/{last:010d}.seg"
        if last == 1:
            continue
        ends.add(last)
        for mark in (None, disk.read_file(MARK)[:40], bytes(64)):
            damaged = disk.copy()
            damaged.unlink(path)
            damaged.unlink(MARK)
            if mark is not None:
                damaged.write_file_atomic(MARK, mark)
            assert recovered(damaged) == path, (number, mark)
    assert len(ends) > 3


def test_next_segment_is_announced_after_a_kill_between_preparing_and_announcing_it() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10)
    write_units(journal, [5000])
    assert disk.exists(f"{PATH}/0000000002.seg")
    header = parse_segment_header(bytes(disk.files[SEGMENT].data[:SECTOR]), SEGMENT)
    assert header is not None
    assert header.is_followed
    disk.files[SEGMENT].data[:SECTOR] = replace(header, is_followed=False).pack()
    journal, _ = open_journal(disk)
    write_units(journal, [5000], start=2)
    disk.unlink(f"{PATH}/0000000002.seg")
    disk.unlink(MARK)
    assert recovered(disk) == f"{PATH}/0000000002.seg"


def test_header_that_is_being_rewritten_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader in another thread or process may see the new flag with the old checksum."""
    disk, _ = three_units()
    data = disk.files[SEGMENT].data
    whole, reads = bytes(data[:SECTOR]), [0]
    data[9] ^= 1

    def finish_write(operation: str, path: str) -> None:
        reads[0] += operation == "pread"
        if reads[0] == 2:
            data[:SECTOR] = whole

    monkeypatch.setattr(disk, "step", finish_write)
    assert read_header(disk, PATH, 1) == parse_segment_header(whole, SEGMENT)
    assert reads == [2]


def test_watermark_with_one_flipped_bit_still_proves_the_journals_end() -> None:
    disk, _ = three_units()
    last = list(Scan(disk, PATH))[-1]
    disk.files[SEGMENT].data[last.offset : last.end] = bytes(last.end - last.offset)
    for bit in range(8 * 64):
        damaged = disk.copy()
        damaged.files[MARK].data[bit // 8] ^= 1 << bit % 8
        assert recovered(damaged) == SEGMENT, bit


def harms(data: bytes, rng: random.Random) -> list[bytes | None]:
    """Return what may become of a file: a flipped bit somewhere, a shorter or an empty file, no file."""
    used = max(len(data.rstrip(b"\0")), 64)
    flipped = bytearray(data)
    flipped[rng.randrange(used)] ^= 1 << rng.randrange(8)
    return [bytes(flipped), data[: used // 2], b"", None]


@pytest.mark.parametrize("units", [11, 12, 13])  # in the last segment: two, one, two
def test_any_two_damaged_files_are_recovered_or_refused_by_name(units: int) -> None:
    disk = MemoryDisk()
    write_units(open_journal(disk, segment_bytes=8 << 10)[0], [2500] * units)
    disk = disk.copy()
    whole = contents(open_journal(disk.copy())[1])
    rng, paths, outcomes = random.Random(units), sorted(disk.files), set()
    assert MARK in paths
    for pair in itertools.combinations(paths, 2):
        for damage in itertools.product(*(harms(disk.read_file(path), rng) for path in pair)):
            damaged = disk.copy()
            for path, data in zip(pair, damage, strict=True):
                damaged.unlink(path)
                if data is not None:
                    damaged.write_file_atomic(path, data)
            found = recovered(damaged)
            if (SEGMENT, None) in zip(pair, damage, strict=True) and isinstance(found, list):
                # It looks reclaimed; the engine refuses that without a snapshot (check_beginning).
                assert found == whole[-len(found) :]
            else:
                assert found == whole or found in pair, (pair, [data and len(data) for data in damage])
            outcomes.add(found == whole)
    assert outcomes == {True, False}


def test_swapped_and_foreign_segments_are_rejected() -> None:
    disk, _ = many_segments()
    second, third = f"{PATH}/0000000002.seg", f"{PATH}/0000000003.seg"
    swapped = disk.copy()
    swapped.files[second], swapped.files[third] = swapped.files[third], swapped.files[second]
    assert recovered(swapped) in (second, third)
    other = MemoryDisk()
    Journal.create(other, PATH, incarnation=8, segment_bytes=8 << 10)
    foreign, _ = open_journal(other)
    write_units(foreign, [2500] * 11)
    mixed = disk.copy()
    mixed.files[second] = other.files[second]
    assert recovered(mixed) == second


def test_missing_unit_at_the_end_of_a_full_segment_is_corruption() -> None:
    disk, _ = many_segments()
    unit = [u for u in Scan(disk, PATH) if u.segment == 1][-1]
    disk.files[SEGMENT].data[unit.offset : unit.end] = bytes(unit.end - unit.offset)
    assert recovered(disk) == SEGMENT


def test_newer_format_is_reported_by_version() -> None:
    disk, _ = three_units()
    sector = bytearray(SegmentHeader(1, 16 << 10, 7, 1, 0, 0).pack())
    sector[8] = 2
    sector[-4:] = crc32c(bytes(sector[:-4])).to_bytes(4, "little")
    disk.files[SEGMENT].data[:SECTOR] = sector
    with pytest.raises(UnknownFormat):
        open_journal(disk)


def test_watermark_of_another_incarnation_is_rejected() -> None:
    disk, _ = three_units()
    disk.files[MARK].data[:] = Watermark(3, 3, 1, 4096, 0, 8).pack()
    assert recovered(disk) == MARK


# --- torn writes ------------------------------------------------------------------------------------------------------


def torn_images(before: MemoryDisk, after: MemoryDisk, path: str, stale_mark: bool) -> list[tuple[MemoryDisk, bool]]:
    """Yield every subset of the differing sectors, and whether it contains all of them."""
    old, new = before.files[path].data, after.files[path].data
    sectors = [s for s in range(0, len(new), SECTOR) if old[s : s + SECTOR] != new[s : s + SECTOR]]
    images = []
    for kept in itertools.product([False, True], repeat=len(sectors)):
        image = before.copy()
        if not stale_mark:
            image.unlink(MARK)
        for sector, keep in zip(sectors, kept, strict=True):
            if keep:
                image.files[path].data[sector : sector + SECTOR] = new[sector : sector + SECTOR]
        images.append((image, all(kept)))
    return images


@pytest.mark.parametrize("stale_mark", [True, False])
@pytest.mark.parametrize("size", [100, 2600])
@pytest.mark.parametrize("filler", [b"\0", b"x"])
def test_torn_last_unit_is_cut_for_any_subset_of_sectors(size: int, filler: bytes, stale_mark: bool) -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10)
    write_units(journal, [10, 20])
    good = contents(open_journal(disk.copy())[1])
    put(journal, [filler * size + b"end"], first_id=3)
    journal.prepare()  # its writes are synced before the commit
    before = disk.copy()
    commit(journal)
    images = torn_images(before, disk, SEGMENT, stale_mark)
    assert len(images) >= 2
    for image, is_whole in images:
        found = recovered(image)
        assert isinstance(found, list)
        assert found[:2] == good
        assert len(found) == (3 if is_whole else 2)
        # It was cut permanently: writing continues there, and everything is valid again.
        again, _ = open_journal(image)
        put(again, [b"next"], first_id=4)
        commit(again)
        assert [n for n, _, _ in contents(open_journal(image)[1])] == ([1, 2, 3, 4] if is_whole else [1, 2, 3])


@pytest.mark.parametrize("stale_mark", [True, False])
def test_torn_first_unit_of_a_new_segment_is_cut_with_its_header(stale_mark: bool) -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=4 << 10)
    write_units(journal, [2500])
    before = disk.copy()
    put(journal, [b"x" * 2500], first_id=2)
    unit = journal.seal()
    assert unit is not None
    assert unit.segment == 2
    journal.commit(unit)
    for image, is_whole in torn_images(before, disk, f"{PATH}/0000000002.seg", stale_mark):
        found = recovered(image)
        assert [n for n, _, _ in found] == ([1, 2] if is_whole else [1])  # type: ignore[misc]
        again, _ = open_journal(image)
        write_units(again, [2500], start=3)
        assert len(open_journal(image)[1]) == (3 if is_whole else 2)


def test_damage_in_a_torn_unit_is_still_damage() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10)
    write_units(journal, [10])
    before = disk.copy()
    put(journal, [b"x" * 2600], first_id=2)
    commit(journal)
    unit = list(Scan(disk, PATH))[-1]
    image = before.copy()
    image.files[SEGMENT].data[unit.offset : unit.end] = disk.files[SEGMENT].data[unit.offset : unit.end]
    image.files[SEGMENT].data[unit.offset + 1024 : unit.offset + 1536] = bytes(512)
    assert isinstance(recovered(image.copy()), list)
    image.files[SEGMENT].data[unit.offset + 600] ^= 1
    assert recovered(image) == SEGMENT


def last_unit_without_watermark() -> tuple[MemoryDisk, Unit]:
    """Return three units, the last of several sectors, judged only by its own table."""
    disk, _ = three_units()
    disk.unlink(MARK)
    return disk, list(Scan(disk, PATH))[-1]


def test_torn_unit_followed_by_bytes_is_damage() -> None:
    disk, unit = last_unit_without_watermark()
    data = disk.files[SEGMENT].data
    data[unit.end - SECTOR : unit.end] = bytes(SECTOR)
    assert isinstance(recovered(disk.copy()), list)
    data[unit.end + 5000] = 1
    assert recovered(disk) == SEGMENT


def test_table_entry_that_reads_zero_in_a_written_sector_is_damage() -> None:
    disk, unit = last_unit_without_watermark()
    table_at = unit.offset + unit.header.table_at
    for entry in range(unit.header.sectors + 1):
        damaged = disk.copy()
        damaged.files[SEGMENT].data[table_at + 4 * entry : table_at + 4 * entry + 4] = bytes(4)
        assert recovered(damaged) == SEGMENT, entry


def test_damage_in_a_unit_whose_header_was_lost_is_still_damage() -> None:
    disk, unit = last_unit_without_watermark()
    data = disk.files[SEGMENT].data
    data[unit.offset : unit.offset + SECTOR] = bytes(SECTOR)
    assert isinstance(recovered(disk.copy()), list)
    data[unit.end - SECTOR + 8] ^= 1
    assert recovered(disk) == SEGMENT


def forge(disk: MemoryDisk, unit: Unit, at: int, value: bytes) -> None:
    """Change a field of a unit's header and fix its checksum."""
    data = disk.files[f"{PATH}/{unit.segment:010d}.seg"].data
    data[unit.offset + at : unit.offset + at + len(value)] = value
    crc = crc32c(bytes(data[unit.offset : unit.offset + 60]), crc_seed(7, unit.segment))
    data[unit.offset + 60 : unit.offset + 64] = crc.to_bytes(4, "little")


def test_unit_with_a_wrong_chain_is_rejected() -> None:
    disk, whole = three_units()
    for unit in Scan(disk, PATH):
        forged = disk.copy()
        forge(forged, unit, 8, unit.number.to_bytes(8, "little"))
        assert recovered(forged) == whole
        forge(forged, unit, 40, b"\1\2\3\4")
        assert recovered(forged) == SEGMENT
        forged = disk.copy()
        forge(forged, unit, 8, (unit.number + 1).to_bytes(8, "little"))
        assert recovered(forged) == SEGMENT


def test_segment_with_a_wrong_chain_is_rejected() -> None:
    disk, _ = many_segments()
    second = disk.files[f"{PATH}/0000000002.seg"].data
    header = parse_segment_header(bytes(second[:SECTOR]), "")
    assert header is not None
    second[:SECTOR] = replace(header, chain=header.chain ^ 1).pack()
    with pytest.raises(JournalCorrupt, match="does not follow from unit"):
        open_journal(disk)


def test_segment_header_is_rewritten_with_an_uncertain_first_unit() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=4 << 10)
    write_units(journal, [2500])
    mark = bytes(disk.files[MARK].data)
    write_units(journal, [2500], start=2)
    disk.files[MARK].data[:] = mark
    rewritten: set[int] = set()

    def note(what: str, path: str) -> None:
        if what == "fdatasync" and path.endswith("2.seg"):
            rewritten.update(disk.files[path].unsynced)

    disk.on_step = note
    _, units = open_journal(disk)
    assert rewritten == set(range(units[-1].end // SECTOR))


def test_hole_left_by_interrupted_growth_is_filled_on_open() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 20)
    write_units(journal, [10])
    inode = disk.files[SEGMENT]
    inode.data.extend(bytes(2 << 20))
    assert len(inode.blocks) * 4096 < len(inode.data)
    open_journal(disk)
    assert len(inode.blocks) * 4096 == len(inode.data)


def test_payload_that_looks_like_a_journal_does_not_affect_recovery() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=64 << 10)
    write_units(journal, [300, 300])
    stolen = bytes(disk.files[SEGMENT].data[:4096])
    other = MemoryDisk()
    Journal.create(other, PATH, incarnation=99, segment_bytes=64 << 10)
    victim, _ = open_journal(other)
    before = other.copy()
    put(victim, [bytes(512 - 64 - 80) + stolen])
    commit(victim)
    after = other.files[SEGMENT].data
    before.unlink(MARK)
    # The header's sector is lost; the payload remains, with complete units of another topic at sector boundaries.
    before.files[SEGMENT].data[1024:] = after[1024:]
    before.files[SEGMENT].data[2048:2560] = bytes(512)
    assert recovered(before) == []


def test_interrupted_cut_can_be_repeated() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=8 << 10)
    write_units(journal, [10])
    before = disk.copy()
    put(journal, [b"x" * 2600], first_id=2)
    commit(journal)
    for image, is_whole in torn_images(before, disk, SEGMENT, False)[1::7]:
        if is_whole:
            continue

        def die(what: str, path: str) -> None:
            if what == "fdatasync" and path == SEGMENT:
                raise PowerCut

        for seed in range(4):
            once = image.copy()
            once.on_step = die
            with pytest.raises(PowerCut):
                open_journal(once)
            assert [n for n, _, _ in recovered(once.cut_power(random.Random(seed)))] == [1]  # type: ignore[misc]


# --- power cuts anywhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", policies())
def test_power_cut_at_any_operation_keeps_every_durable_unit(policy: SyncPolicy) -> None:
    sizes = [100, 3000, 10, 5000, 700, 2500, 2500, 90]
    for stop in range(1, 400, 3 if policy == "commit" else 5):
        disk = MemoryDisk()
        journal, _ = open_journal(disk, segment_bytes=8 << 10, policy=policy)
        base = disk.steps

        def die(what: str, path: str, disk: MemoryDisk = disk, last: int = base + stop) -> None:
            if disk.steps >= last:
                raise PowerCut

        disk.on_step = die
        finished = False
        try:
            for number, size in enumerate(sizes, 1):
                put(journal, [bytes([number]) * size], first_id=number)
                commit(journal)
                if policy == "interval" and number % 3 == 0:
                    journal.sync()
            finished = True
        except PowerCut:
            pass
        durable, written = journal.durable_unit, journal.written_unit
        for seed in range(3):
            image = disk.cut_power(random.Random(stop * 10 + seed))
            again, units = open_journal(image)
            numbers = [u.number for u in units]
            assert numbers == list(range(1, len(numbers) + 1))
            assert durable <= len(numbers) <= written + 1
            for unit in units:
                assert bytes(unit.payloads(unit.blocks[0])) == bytes([unit.number]) * sizes[unit.number - 1]
            write_units(again, [50], start=len(numbers) + 1)
            assert len(open_journal(image)[1]) == len(numbers) + 1
        if finished:
            break
    else:
        pytest.fail("the run never ended")


def test_replay_from_a_snapshot_reads_only_what_is_needed() -> None:
    disk, whole = many_segments()
    for after in range(len(whole) + 1):
        assert contents(open_journal(disk.copy(), after_unit=after)[1]) == whole[after:]
    with pytest.raises(CorruptionError):
        open_journal(disk.copy(), after_unit=len(whole) + 1)


def test_leftovers_of_a_killed_run_are_removed() -> None:
    disk, whole = many_segments()
    disk.create(f"{PATH}/0000000099.seg.tmp")
    disk.create(f"{PATH}/0000000000.idx")
    assert recovered(disk) == whole
    assert not [p for p in disk.files if p.endswith((".tmp", "0000.idx"))]
