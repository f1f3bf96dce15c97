"""The disk in memory behaves like the real one, call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import DirectoryLocked
from heapline.journal.disk import Disk, RealDisk
from heapline.testing.memory_disk import MemoryDisk

NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/a"])
NUMBERS = st.integers(0, 600)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["create", "listdir", "exists", "unlink", "mkdir", "rmdir", "remove_tree"]), NAMES),
        st.tuples(st.sampled_from(["read_file", "fsync_dir"]), NAMES),
        st.tuples(st.just("rename"), NAMES, NAMES),
        st.tuples(st.just("write_file_atomic"), NAMES, st.binary(max_size=8)),
        st.tuples(st.sampled_from(["pread", "zero", "fallocate"]), NAMES, NUMBERS, NUMBERS),
        st.tuples(st.just("pwritev"), NAMES, st.lists(st.binary(max_size=8), max_size=3), NUMBERS),
        st.tuples(st.just("truncate"), NAMES, NUMBERS),
        st.tuples(st.just("size"), NAMES),
    ),
    max_size=30,
)
ON_FILES = {"pread", "zero", "fallocate", "pwritev", "truncate", "size"}


def act(disk: Disk, top: str, call: tuple[Any, ...]) -> Any:
    """The result of a call; an error by its kind."""
    name, path, *rest = call
    rest = [f"{top}/{value}" if name == "rename" else value for value in rest]
    try:
        if name not in ON_FILES:
            result = getattr(disk, name)(f"{top}/{path}", *rest)
            if name == "create":
                result.close()
                return None
            return result
        file = disk.open(f"{top}/{path}", write=True)
        try:
            # A real pread takes (n, off), fallocate and zero (off, n): the same two numbers for both disks.
            return getattr(file, name)(*rest)
        finally:
            file.close()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return "not there"
    except OSError:
        return "refused"


@given(calls=CALLS)
def test_memory_disk_behaves_like_the_real_one(
    calls: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    real, memory = RealDisk(), MemoryDisk()
    top = str(tmp_path_factory.mktemp("disk"))
    memory.mkdir(top)
    for call in calls:
        before = act(real, top, call), act(memory, top, call)
        if call[0] == "rename" or "refused" in before or "not there" in before:
            # Renames over existing files, and which of two errors a wrong call raises, differ by file system.
            if (before[0] in ("refused", "not there")) != (before[1] in ("refused", "not there")):
                return
            continue
        assert before[0] == before[1], call
    assert tree(real, top) == tree(memory, top)


def tree(disk: Disk, path: str) -> Any:
    try:
        names = disk.listdir(path)
    except OSError:
        return disk.read_file(path)
    return {name: tree(disk, f"{path}/{name}") for name in names}


def test_lock_is_held_by_one(tmp_path: Path) -> None:
    disk = MemoryDisk()
    disk.mkdir("/d")
    lock = disk.lock("/d/LOCK")
    with pytest.raises(DirectoryLocked):
        disk.lock("/d/LOCK")
    lock.release()
    disk.lock("/d/LOCK").release()


def test_zeros_at_the_end_take_no_memory() -> None:
    disk = MemoryDisk()
    file = disk.create("/a")
    file.fallocate(0, 1 << 40)
    file.zero(1 << 20, 1 << 39)
    assert file.size() == 1 << 40
    assert file.pread(4, 1 << 30) == bytes(4)
