"""The log start file: its bytes never change, and offsets in it only rise."""

from __future__ import annotations

import pytest

from heapline.contract.errors import UnknownFormat
from heapline.journal.log_bounds import log_start_path, raise_log_start, read_log_start
from tests.simulation.fake_disk import FakeDisk

VERSION_1 = bytes.fromhex(
    "484541504c4f4730" "01000000" "03000000" "0700000000000000" "0000000000000000" "00000000000f0000"
)  # fmt: skip


def made() -> FakeDisk:
    disk = FakeDisk()
    disk.mkdir("/t")
    return disk


def test_bytes_of_version_1_stay_readable() -> None:
    disk = made()
    raise_log_start(disk, "/t", [7, 0, 15 << 40])
    data = disk.read_file(log_start_path("/t"))
    assert data[:-4] == VERSION_1
    assert data[-4:].hex() == "4bef634b"
    assert read_log_start(disk, "/t") == [7, 0, 15 << 40]


def test_offsets_only_rise_and_partitions_may_be_added() -> None:
    disk = made()
    assert read_log_start(disk, "/t") == []
    raise_log_start(disk, "/t", [5, 9])
    raise_log_start(disk, "/t", [7, 0, 1])
    assert read_log_start(disk, "/t") == [7, 9, 1]
    steps = disk.steps
    raise_log_start(disk, "/t", [1])
    assert disk.steps - steps <= 4  # read, not written
    assert read_log_start(disk, "/t") == [7, 9, 1]


@pytest.mark.parametrize("cut", [0, 3, 15, 20, 30])
def test_corrupt_file_counts_as_absent(cut: int) -> None:
    disk = made()
    raise_log_start(disk, "/t", [5, 9])
    disk.write_file_atomic(log_start_path("/t"), disk.read_file(log_start_path("/t"))[:cut])
    assert read_log_start(disk, "/t") == []


def test_unknown_version_is_rejected() -> None:
    from crc32c import crc32c

    disk = made()
    body = VERSION_1[:8] + b"\x02" + VERSION_1[9:]
    disk.write_file_atomic(log_start_path("/t"), body + crc32c(body).to_bytes(4, "little"))
    with pytest.raises(UnknownFormat):
        read_log_start(disk, "/t")
