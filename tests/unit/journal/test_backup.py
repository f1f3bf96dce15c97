"""Copy a topic while files are deleted: the copy starts over or takes the next best file, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import heapline
from heapline.contract.errors import JournalCorrupt, UnavailableError
from heapline.journal.backup import LEASE_MS, TRIES, copy_topic
from heapline.journal.disk import File, RealDisk
from heapline.journal.log_bounds import Watermark, read_watermark
from heapline.journal.reclaim import read_leases
from heapline.journal.recovery import scan
from heapline.journal.segment import FIRST_UNIT_AT, segment_path, set_followed
from heapline.journal.snapshot import SnapshotStore

NOW = 1_700_000_000_000


class Meddling(RealDisk):
    """A disk that calls a test's function before every file is opened or read."""

    def __init__(self, meddle: Callable[[str], None]) -> None:
        self._meddle = meddle

    def open(self, path: str, *, write: bool = False) -> File:
        self._meddle(path)
        return super().open(path, write=write)

    def read_file(self, path: str) -> bytes:
        self._meddle(path)
        return super().read_file(path)

    def fsync_dir(self, path: str) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a topic with two snapshots, and messages after them in a second segment."""
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", segment_bytes=1 << 20)
        for _ in range(2):
            hl.enqueue("jobs", b"x")
            hl.snapshot("jobs")
        for _ in range(3):
            hl.enqueue("jobs", bytes(400_000))
    return str(tmp_path / "data" / "topics" / "default" / "jobs.1")


def copy(folder: str, meddle: Callable[[str], None]) -> tuple[str, int, int]:
    """Copy the topic and return the copy's directory, its snapshot's unit and its last unit."""
    target = folder + "-copy"
    reported = copy_topic(Meddling(meddle), folder, target, lambda: NOW)
    return target, reported.snapshot_unit, reported.unit


def fail(times: int, suffix: str) -> Callable[[str], None]:
    """Report the file as missing this many times."""
    left = [times]

    def meddle(path: str) -> None:
        if path.endswith(suffix) and "-copy" not in path and left[0]:
            left[0] -= 1
            raise FileNotFoundError(path)

    return meddle


def held(folder: str) -> list[int]:
    return [lease.segment for lease in read_leases(RealDisk(), folder, NOW)]


def test_segments_are_held_during_the_copy_and_not_after(folder: str) -> None:
    seen: list[list[int]] = []

    def look(path: str) -> None:
        if path.endswith(".seg") and "-copy" not in path:
            seen.append(held(folder))

    copy(folder, look)
    assert len(seen) >= 2
    assert all(first == [1] for first in seen)
    assert held(folder) == []
    assert LEASE_MS > 60_000


def test_deleted_segment_makes_the_copy_start_over(folder: str) -> None:
    opened: list[str] = []
    gone = fail(1, "0000000002.seg")

    def meddle(path: str) -> None:
        opened.append(path)
        if any(p.endswith("0000000001.seg") for p in opened):  # it is being copied, not just read
            gone(path)

    target, snapshot, unit = copy(folder, meddle)
    assert len([p for p in opened if p.endswith("0000000001.seg") and "-copy" not in p]) >= 2
    assert sorted(p.name for p in Path(target).glob("*.seg")) == ["0000000001.seg", "0000000002.seg"]
    assert unit >= snapshot > 0


def test_deleted_snapshot_is_replaced_by_the_other(folder: str) -> None:
    older, newest = SnapshotStore(RealDisk(), f"{folder}/snapshots").units()
    _, snapshot, _ = copy(folder, fail(1, f"{newest:016d}.snap"))
    assert snapshot == older
    assert len(list(Path(folder + "-copy", "snapshots").glob("*.snap"))) == 1


def test_copy_of_a_constantly_changing_topic_fails_and_holds_nothing(folder: str) -> None:
    with pytest.raises(UnavailableError, match=str(TRIES)):
        copy(folder, fail(1000, "0000000002.seg"))
    assert held(folder) == []


def test_copy_of_a_segment_whose_header_is_being_rewritten_is_whole(folder: str) -> None:
    """The copy reads it while the writer announces the next segment."""
    source, torn = Path(folder, "0000000002.seg"), [False]
    whole = source.read_bytes()

    def meddle(path: str) -> None:
        if path == str(source) and Path(folder + "-copy", "0000000001.seg").exists():  # this one is copied next
            source.write_bytes(whole if torn[0] else whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
            torn[0] = True

    target, snapshot, unit = copy(folder, meddle)
    assert torn == [True]
    assert list(scan(RealDisk(), target, known_durable=snapshot))[-1].number == unit


@pytest.mark.parametrize("behind", [0, 1, 4])
def test_copy_after_a_power_cut_includes_units_after_an_old_watermark(folder: str, behind: int) -> None:
    disk = RealDisk()
    units = list(scan(disk, folder))
    (mark,) = [found for found in [read_watermark(disk, folder)] if found is not None]
    old = Watermark(0, 0, 1, FIRST_UNIT_AT, 0, mark.incarnation)  # as it was synced when the topic was created
    if behind:
        u = units[-1 - behind]
        old = Watermark(u.number, u.number, u.segment, u.end, u.time, mark.incarnation)
    Path(folder, "watermark").write_bytes(old.pack())
    target, snapshot, unit = copy(folder, lambda path: None)
    assert unit == units[-1].number >= snapshot > 0
    assert [u.number for u in scan(disk, target, known_durable=snapshot)] == [u.number for u in units]
    assert read_watermark(disk, target) == mark


def test_topic_without_a_watermark_is_refused(folder: str) -> None:
    Path(folder, "watermark").unlink()
    with pytest.raises(JournalCorrupt, match="watermark"):
        copy(folder, lambda path: None)
    assert held(folder) == []


def test_missing_topic_raises_file_not_found(folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        copy(folder + "-nowhere", lambda path: None)


def test_copy_ends_with_its_last_segment_though_the_next_one_is_about_to_begin(folder: str) -> None:
    disk = RealDisk()
    mark = read_watermark(disk, folder)
    assert mark is not None
    file = disk.open(segment_path(folder, mark.segment), write=True)
    set_followed(file, True)
    file.close()
    target, _, last = copy(folder, lambda path: None)
    assert [unit.number for unit in scan(disk, target)][-1] == last
