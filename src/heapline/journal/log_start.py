"""The first offset of each partition whose log can be read completely: a small file, absent for most topics.

A partition's log starts with the first row of its first segment, with one exception. A prepared message is in the log
at the row of its commit, but its record is where it was prepared, possibly in an earlier segment. When that segment is
deleted, the commit's row remains but can no longer be read. The log then starts after that row.

LOG_START_VERSION 1: magic, version, number of partitions, an offset for each, crc32c. To change it after a release,
bump the version, keep the old reader, add a fixture. The file is written atomically and durably before the segment is
deleted; offsets only rise. After a kill in between, readers see a start that is later than necessary, never too early.
A corrupt file counts as absent; then a reader meets such rows without warning and reports them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import zip_longest

from crc32c import crc32c

from heapline.contract.errors import UnknownFormat
from heapline.journal.disk import Disk

LOG_START_MAGIC = b"HEAPLOG0"
LOG_START_VERSION = 1
_HEAD = struct.Struct("<8sBxxxI")


def log_start_path(directory: str) -> str:
    return f"{directory}/log_start"


def read_log_start(disk: Disk, directory: str) -> list[int]:
    """Return the first offset per partition; 0 or a missing entry means no restriction."""
    path = log_start_path(directory)
    try:
        data = disk.read_file(path)
    except FileNotFoundError:
        return []
    body = data[:-4]
    if len(body) < _HEAD.size or crc32c(body).to_bytes(4, "little") != data[-4:]:
        return []
    magic, version, count = _HEAD.unpack_from(body)
    if magic != LOG_START_MAGIC or len(body) != _HEAD.size + 8 * count:
        return []
    if version != LOG_START_VERSION:
        raise UnknownFormat(path, version)
    return list(struct.unpack_from(f"<{count}q", body, _HEAD.size))


def raise_log_start(disk: Disk, directory: str, starts: Sequence[int]) -> None:
    """Raise the start of the log to these offsets. Durable on return."""
    before = read_log_start(disk, directory)
    offsets = [max(pair) for pair in zip_longest(before, starts, fillvalue=0)]
    if offsets == before:
        return
    body = _HEAD.pack(LOG_START_MAGIC, LOG_START_VERSION, len(offsets)) + struct.pack(f"<{len(offsets)}q", *offsets)
    disk.write_file_atomic(log_start_path(directory), body + crc32c(body).to_bytes(4, "little"))
