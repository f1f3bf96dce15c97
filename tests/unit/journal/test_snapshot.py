"""Snapshots: the newest valid one is loaded, two are kept, and none is ever incomplete."""

from __future__ import annotations

import errno
import random

import pytest
from crc32c import crc32c

from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.journal.snapshot import SnapshotStore
from tests.unit.journal.rig import MemoryDisk, PowerCut

PATH = "/data/snapshots"


def two_snapshots() -> MemoryDisk:
    disk = MemoryDisk()
    store = SnapshotStore(disk, PATH)
    assert store.load_newest() is None
    store.write(10, b"state ten", {"run-0-1": [b"abc", memoryview(b"def")], "run-1-1": [b""]})
    store.write(20, b"state twenty", {"run-0-1": None, "run-0-2": [b"more"]})
    return disk


def test_newest_snapshot_is_loaded_with_its_blobs() -> None:
    store = SnapshotStore(two_snapshots(), PATH)
    found = store.load_newest()
    assert found is not None
    assert (found.unit, found.state) == (20, b"state twenty")
    assert {name: bytes(blob) for name, blob in found.blobs.items()} == {"run-0-1": b"abcdef", "run-0-2": b"more"}
    assert store.damaged == []
    assert bytes(store.load(10).blobs["run-1-1"]) == b""


def test_corrupt_newest_snapshot_falls_back_to_the_older() -> None:
    disk = two_snapshots()
    for path in (f"{PATH}/{20:016d}.snap", f"{PATH}/run-0-2.blob"):
        size = len(disk.files[path].data)
        for at in range(size):
            flipped = disk.copy()
            flipped.files[path].data[at] ^= 4
            cut = disk.copy()
            del cut.files[path].data[at:]
            for damaged in (flipped, cut):
                store = SnapshotStore(damaged, PATH)
                found = store.load_newest()
                assert found is not None
                assert (found.unit, found.state) == (10, b"state ten")
                assert [error.path for error in store.damaged] == [path]
    gone = disk.copy()
    gone.unlink(f"{PATH}/run-0-2.blob")
    assert SnapshotStore(gone, PATH).load_newest().unit == 10  # type: ignore[union-attr]


def test_without_a_valid_snapshot_none_is_loaded_and_all_are_listed() -> None:
    disk = two_snapshots()
    disk.files[f"{PATH}/run-0-1.blob"].data[-1] ^= 1
    store = SnapshotStore(disk, PATH)
    assert store.load_newest() is None
    assert len(store.damaged) == 2
    with pytest.raises(SnapshotCorrupt):
        store.load(10)


def test_blob_swapped_for_another_valid_one_is_damage() -> None:
    disk = two_snapshots()
    disk.files[f"{PATH}/run-0-2.blob"] = disk.files[f"{PATH}/run-0-1.blob"]
    assert SnapshotStore(disk, PATH).load_newest().unit == 10  # type: ignore[union-attr]


def test_newer_version_is_rejected_not_skipped() -> None:
    disk = two_snapshots()
    data = disk.files[f"{PATH}/{20:016d}.snap"].data
    data[8] = 2
    data[-4:] = crc32c(bytes(data[:-4])).to_bytes(4, "little")
    with pytest.raises(UnknownFormat):
        SnapshotStore(disk, PATH).load_newest()


def test_blob_of_an_earlier_snapshot_is_not_written_again() -> None:
    disk = two_snapshots()
    store = SnapshotStore(disk, PATH)
    store.load_newest()
    disk.log.clear()
    store.write(30, b"s", {"run-0-1": [b"abcdef"], "run-0-2": None})
    assert not [path for what, path in disk.log if what == "create" and "blob" in path]
    with pytest.raises(ValueError, match="other bytes"):
        store.write(40, b"s", {"run-0-1": [b"longer than before"]})
    with pytest.raises(ValueError, match="pass its bytes"):
        store.write(40, b"s", {"run-0-9": None})
    with pytest.raises(ValueError, match="not a blob name"):
        store.write(40, b"s", {"../run": [b""]})
    with pytest.raises(ValueError, match="not newer"):
        store.write(30, b"s", {})


def test_leftover_blob_of_a_killed_write_is_not_trusted() -> None:
    disk = two_snapshots()
    disk.create(f"{PATH}/run-0-3.blob").pwritev([b"half"], 0)
    store = SnapshotStore(disk, PATH)
    store.load_newest()
    store.write(30, b"s", {"run-0-3": [b"whole"]})
    assert bytes(SnapshotStore(disk, PATH).load(30).blobs["run-0-3"]) == b"whole"


def test_two_verified_snapshots_and_their_blobs_are_kept() -> None:
    disk = two_snapshots()
    store = SnapshotStore(disk, PATH)
    assert store.older_unit == 0
    store.load_newest()
    assert store.older_unit == 0  # this process has not verified the older one
    store.write(30, b"state thirty", {"run-0-2": None, "run-0-3": [b"x"]})
    assert (store.older_unit, store.newest_unit) == (20, 30)
    assert disk.listdir(PATH) == [
        f"{20:016d}.snap",
        f"{30:016d}.snap",
        "run-0-1.blob",
        "run-0-2.blob",
        "run-0-3.blob",
    ]
    assert SnapshotStore(disk, PATH).load(20).state == b"state twenty"


def test_failed_write_leaves_earlier_snapshots_in_force() -> None:
    disk = two_snapshots()
    store = SnapshotStore(disk, PATH)
    store.load_newest()
    disk.space = 0
    with pytest.raises(OSError, match="no space") as caught:
        store.write(30, b"s", {"run-0-3": [bytes(10_000)]})
    assert caught.value.errno == errno.ENOSPC
    assert not [p for p in disk.files if p.endswith(".part")]
    disk.space = None
    assert SnapshotStore(disk, PATH).load_newest().unit == 20  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["blob", "snap"])
def test_snapshot_that_cannot_be_read_back_does_not_count(kind: str) -> None:
    disk = two_snapshots()
    store = SnapshotStore(disk, PATH)
    store.load_newest()

    def spoil(what: str, path: str) -> None:
        if what == "fdatasync" and kind in path:
            disk.files[path].data[-1] ^= 1

    disk.on_step = spoil
    with pytest.raises(SnapshotCorrupt):
        store.write(30, b"s", {"run-0-3": [b"x"]})
    disk.on_step = lambda what, path: None
    assert store.newest_unit == 20
    again = SnapshotStore(disk, PATH)
    assert again.load_newest().unit == 20  # type: ignore[union-attr]
    assert again.damaged == []


def test_power_cut_anywhere_leaves_a_complete_snapshot() -> None:
    for stop in range(1, 60):
        disk = two_snapshots()
        store = SnapshotStore(disk, PATH)
        store.load_newest()
        last = disk.steps + stop

        def die(what: str, path: str, disk: MemoryDisk = disk, last: int = last) -> None:
            if disk.steps >= last:
                raise PowerCut

        disk.on_step = die
        try:
            store.write(30, b"state thirty", {"run-0-2": None, "run-0-3": [bytes(3000)]})
            finished = True
        except PowerCut:
            finished = False
        for seed in range(3):
            again = SnapshotStore(disk.cut_power(random.Random(seed)), PATH)
            found = again.load_newest()
            assert found is not None
            assert found.unit == 30 or (not finished and found.unit == 20)
            assert again.damaged == []
            again.write(40, b"on", {"run-0-3": [b"other"] if found.unit == 20 else None})
        if finished:
            break
    else:
        pytest.fail("the run never ended")
