"""The fake disk promises exactly what a real one does."""

from __future__ import annotations

import errno
import random

import pytest

from heapline.contract.errors import DirectoryLocked
from heapline.journal.disk import SECTOR, Disk, File
from tests.simulation.fake_disk import FakeDisk, PowerCut


def synced_file(disk: FakeDisk, data: bytes, path: str = "/d/f") -> File:
    disk.mkdir("/d")
    disk.fsync_dir("/")
    file = disk.create(path)
    disk.fsync_dir("/d")
    file.pwritev([data], 0)
    file.fdatasync()
    return file


def outcomes(disk: FakeDisk, path: str = "/d/f", tries: int = 200) -> set[bytes | None]:
    """Return what many power cuts at this one time leave of a file; None if it is missing."""
    found: set[bytes | None] = set()
    for seed in range(tries):
        after = disk.crash(random.Random(seed))
        found.add(after.contents().get(path))
    return found


def test_fake_disk_implements_the_disk_protocol() -> None:
    disk: Disk = FakeDisk()
    assert disk.exists("/")


def test_synced_bytes_survive_a_power_cut() -> None:
    disk = FakeDisk()
    synced_file(disk, b"abc" * 1000)
    assert outcomes(disk) == {b"abc" * 1000}


def test_unsynced_sectors_survive_whole_or_not_at_all() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"o" * 2 * SECTOR)
    file.pwritev([b"n" * 2 * SECTOR], 0)
    o, n = b"o" * SECTOR, b"n" * SECTOR
    assert outcomes(disk) == {o + o, o + n, n + o, n + n}


def test_write_inside_a_sector_leaves_the_rest_of_it() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"o" * SECTOR)
    file.pwritev([b"new"], 100)
    changed = b"o" * 100 + b"new" + b"o" * (SECTOR - 103)
    assert disk.read_file("/d/f") == changed
    assert outcomes(disk) == {b"o" * SECTOR, changed}


def test_unsynced_size_may_be_lost() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"")
    file.pwritev([b"x" * 100], 0)
    assert {b"", b"x" * 100} <= outcomes(disk)


def test_truncation_happens_or_does_not() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"abcd" * SECTOR)
    file.truncate(SECTOR)
    assert outcomes(disk) == {b"abcd" * SECTOR, b"abcd" * (SECTOR // 4)}
    file.fdatasync()
    assert outcomes(disk) == {b"abcd" * (SECTOR // 4)}


def test_unsynced_name_may_be_lost_with_all_its_synced_bytes() -> None:
    disk = FakeDisk()
    disk.mkdir("/d")
    disk.fsync_dir("/")
    file = disk.create("/d/f")
    file.pwritev([b"x"], 0)
    file.fdatasync()
    assert outcomes(disk) == {None, b"x"}
    disk.fsync_dir("/d")
    assert outcomes(disk) == {b"x"}


def test_directory_in_an_unsynced_parent_may_be_lost_with_its_files() -> None:
    disk = FakeDisk()
    disk.mkdir("/d")
    disk.write_file_atomic("/d/f", b"x")
    assert outcomes(disk) == {None, b"x"}


def test_rename_between_directories_is_atomic() -> None:
    disk = FakeDisk()
    synced_file(disk, b"x", "/d/f")
    disk.mkdir("/e")
    disk.fsync_dir("/")
    disk.rename("/d/f", "/e/g")
    seen = {frozenset(disk.crash(random.Random(seed)).contents()) for seed in range(100)}
    assert seen == {frozenset({"/d/f"}), frozenset({"/e/g"})}


def test_name_changes_of_a_directory_survive_in_their_order() -> None:
    disk = FakeDisk()
    disk.mkdir("/d")
    disk.fsync_dir("/")
    for name in "abc":
        disk.create(f"/d/{name}").close()
    seen = {"".join(p[-1] for p in disk.crash(random.Random(seed)).contents()) for seed in range(200)}
    assert seen == {"", "a", "ab", "abc"}


def test_rename_replaces_atomically() -> None:
    disk = FakeDisk()
    disk.mkdir("/d")
    disk.fsync_dir("/")
    disk.write_file_atomic("/d/f", b"old")
    disk.write_file_atomic("/d/f", b"new")
    assert outcomes(disk) == {b"new"}
    file = disk.create("/d/f.tmp")
    file.pwritev([b"newer"], 0)
    file.fdatasync()
    disk.rename("/d/f.tmp", "/d/f")
    assert outcomes(disk) == {b"new", b"newer"}


def test_bytes_of_a_failed_sync_may_be_readable_but_never_reach_the_disk() -> None:
    shown_but_lost = False
    for seed in range(50):
        disk = FakeDisk(seed=seed)
        file = synced_file(disk, b"o" * SECTOR)
        file.pwritev([b"n" * SECTOR], 0)
        disk.inject("fdatasync")
        with pytest.raises(OSError, match="injected"):
            file.fdatasync()
        file.fdatasync()  # "succeeds" but proves nothing
        shown = disk.read_file("/d/f") == b"n" * SECTOR
        shown_but_lost |= shown and outcomes(disk, tries=5) == {b"o" * SECTOR}
    assert shown_but_lost


def test_bytes_lost_in_a_failed_sync_can_be_rewritten() -> None:
    for seed in range(50):
        disk = FakeDisk(seed=seed)
        file = synced_file(disk, b"o" * SECTOR)
        file.pwritev([b"n" * SECTOR], 0)
        disk.inject("fdatasync")
        with pytest.raises(OSError, match="injected"):
            file.fdatasync()
        file.pwritev([b"n" * SECTOR], 0)
        file.fdatasync()
        assert outcomes(disk, tries=5) == {b"n" * SECTOR}


def test_full_disk_refuses_growth_and_accepts_overwrites() -> None:
    disk = FakeDisk(capacity=8192)
    file = synced_file(disk, bytes(4096))
    for grow in (
        lambda: file.zero(4096, 8192),
        lambda: file.fallocate(0, 16384),
        lambda: file.pwritev([bytes(5000)], 4096),
    ):
        with pytest.raises(OSError, match="No space") as caught:
            grow()
        assert caught.value.errno == errno.ENOSPC
    file.pwritev([b"y" * 4096], 0)
    file.fdatasync()
    assert disk.used == 4096
    disk.unlink("/d/f")
    assert disk.used == 0


def test_hole_takes_no_space_until_it_is_written() -> None:
    disk = FakeDisk(capacity=4096)
    file = synced_file(disk, b"")
    file.truncate(1 << 20)
    assert disk.used == 0
    assert file.pread(10, 1000) == bytes(10)


def test_faults_occur_when_scheduled() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"x" * 10)
    disk.inject("pread", path="/d/f", after=1, times=2)
    assert file.pread(1, 0) == b"x"
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            file.pread(1, 0)
    assert file.pread(1, 0) == b"x"


def test_faults_occur_at_a_rate() -> None:
    disk = FakeDisk(seed=3)
    file = synced_file(disk, b"x")
    disk.rates["pread"] = 0.5
    failed = 0
    for _ in range(100):
        try:
            file.pread(1, 0)
        except OSError:
            failed += 1
    assert 20 < failed < 80


@pytest.mark.parametrize("how", ["garbage", "zeros", "flip"])
def test_corrupt_sector_returns_other_bytes(how: str) -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"x" * 3 * SECTOR)
    disk.damage("/d/f", 1, how)
    data = file.pread(3 * SECTOR, 0)
    assert data[:SECTOR] == data[2 * SECTOR :] == b"x" * SECTOR
    assert data[SECTOR : 2 * SECTOR] != b"x" * SECTOR
    assert outcomes(disk, tries=3) == {data}


def test_unreadable_sector_fails_until_it_is_written_again() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"x" * 3 * SECTOR)
    disk.damage("/d/f", 1, "eio")
    assert file.pread(SECTOR, 0) == b"x" * SECTOR
    for reader in (file, disk.crash().open("/d/f")):
        with pytest.raises(OSError, match="cannot be read"):
            reader.pread(10, SECTOR)
    file.pwritev([b"y" * SECTOR], SECTOR)
    assert file.pread(1, SECTOR) == b"y"


def test_power_is_cut_during_an_operation_and_stays_off() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"x")
    disk.cut_power_in(1)
    file.pwritev([b"y"], 0)
    with pytest.raises(PowerCut):
        file.fdatasync()
    with pytest.raises(PowerCut):
        disk.read_file("/d/f")
    assert disk.crash().read_file("/d/f") in (b"x", b"y")


def test_one_lock_at_a_time_and_none_after_a_crash() -> None:
    disk = FakeDisk()
    disk.mkdir("/d")
    lock = disk.lock("/d/LOCK")
    with pytest.raises(DirectoryLocked):
        disk.lock("/d/LOCK")
    lock.release()
    disk.lock("/d/LOCK")
    disk.fsync_dir("/")
    disk.crash().lock("/d/LOCK")


def test_closed_or_read_only_file_refuses() -> None:
    disk = FakeDisk()
    file = synced_file(disk, b"x")
    with pytest.raises(OSError, match="not open for writing"):
        disk.open("/d/f").pwritev([b"y"], 0)
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.pread(1, 0)


def test_the_same_seed_leaves_the_same_disk() -> None:
    def after(seed: int) -> dict[str, bytes]:
        disk = FakeDisk(seed=1)
        file = synced_file(disk, b"o" * 20 * SECTOR)
        file.pwritev([b"n" * 20 * SECTOR], 0)
        return disk.crash(random.Random(seed)).contents()

    assert [after(s) for s in range(20)] == [after(s) for s in range(20)]
    assert len({after(s)["/d/f"] for s in range(20)}) > 1
