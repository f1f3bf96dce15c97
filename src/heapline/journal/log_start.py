"""From where on a log can be shown whole, by partition: a small file beside the segments, absent for most topics.

A partition's log starts with the first row of its first segment, with one exception. A prepared message stands in the
log at the row of its commit, but its record lies where it was prepared, perhaps segments before that. When such a
segment goes, the commit's row is still there and cannot be shown any more. So then the log starts behind that row.

LOG_START_VERSION 1 (ritual: bump, keep the old reader, add a fixture): magic, version, number of partitions, an offset
for each, crc32c. Written whole, durably, before the segment goes; offsets only rise. Killed in between, readers are
told a start that is later than it need be, never one that is too early. One that does not check counts as absent: then
a reader comes upon such rows unwarned, and says so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import zip_longest

from crc32c import crc32c

from heapline.errors import UnknownFormat
from heapline.journal.disk import Disk

LOG_START_MAGIC = b"HEAPLOG0"
LOG_START_VERSION = 1
_HEAD = struct.Struct("<8sBxxxI")


def log_start_path(directory: str) -> str:
    return f"{directory}/log_start"


def read_log_start(disk: Disk, directory: str) -> list[int]:
    """By partition; 0, or none at all for the last ones: nothing is to be heeded."""
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
    """No row below these is told of from now on. Durable on return."""
    before = read_log_start(disk, directory)
    offsets = [max(pair) for pair in zip_longest(before, starts, fillvalue=0)]
    if offsets == before:
        return
    body = _HEAD.pack(LOG_START_MAGIC, LOG_START_VERSION, len(offsets)) + struct.pack(f"<{len(offsets)}q", *offsets)
    disk.write_file_atomic(log_start_path(directory), body + crc32c(body).to_bytes(4, "little"))
