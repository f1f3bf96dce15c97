"""Small files are durable when `write` returns, and their folder appears with the first one."""

from __future__ import annotations

import random

from heapline.journal.small_files import SmallFiles
from heapline.testing.memory_disk import MemoryDisk
from tests.simulation.fake_disk import FakeDisk


def test_written_file_survives_a_power_cut_with_its_folder() -> None:
    disk = FakeDisk()
    disk.mkdir("/t")
    disk.fsync_dir("/")
    SmallFiles(disk, "/t/replays").write("c.json", b"1")
    for seed in range(20):
        after = disk.crash(random.Random(seed))
        assert SmallFiles(after, "/t/replays").read_all() == {"c.json": b"1"}


def test_folder_of_a_process_that_was_killed_before_it_was_durable_becomes_durable() -> None:
    disk = FakeDisk()
    disk.mkdir("/t")
    disk.fsync_dir("/")
    disk.mkdir("/t/replays")  # killed here
    SmallFiles(disk, "/t/replays").write("c.json", b"1")
    for seed in range(20):
        after = disk.crash(random.Random(seed))
        assert SmallFiles(after, "/t/replays").read_all() == {"c.json": b"1"}


def test_missing_folder_holds_nothing_and_is_not_created() -> None:
    disk = MemoryDisk()
    disk.mkdir("/t")
    files = SmallFiles(disk, "/t/replays")
    assert (files.read("c.json"), files.names(), files.read_all()) == (None, [], {})
    files.write_all({})
    assert not disk.exists("/t/replays")


def test_unfinished_and_deleted_files_are_not_listed() -> None:
    disk = MemoryDisk()
    disk.mkdir("/t")
    files = SmallFiles(disk, "/t/replays")
    files.write_all({"a": b"1", "b": b"2"})
    disk.create("/t/replays/c.tmp").close()
    files.delete("a")
    assert files.read_all() == {"b": b"2"}
