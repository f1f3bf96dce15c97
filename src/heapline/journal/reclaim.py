"""Reclaiming: which segments may be deleted, and how. Whether anything in them is still live is not known here.

Only the first segment can be deleted, so that the remaining ones have no gaps. It may be deleted when the next segment
has durable units, everything in it is at or below the older of two verified snapshots, and no reader holds it.
"""

from __future__ import annotations

import contextlib

from heapline.contract.errors import ConflictError
from heapline.journal.disk import Disk
from heapline.journal.reader_lease import read_leases
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import index_path, segment_path


class SegmentHeld(ConflictError):
    """The segment is still needed; `detail` says by what.

    It never crosses a process boundary, so it is not in errors.py.
    """

    fields = ("segment", "detail")

    def __init__(self, segment: int, detail: str) -> None:
        self.segment, self.detail = segment, detail
        super().__init__(f"cannot delete segment {segment}: {detail}")


def held_by(disk: Disk, directory: str, segment: int, *, older_unit: int, durable_unit: int, now: int) -> str:
    """Describe what still needs the segment; empty if nothing does."""
    present = list_segments(disk, directory)
    if segment != present[0]:
        return f"segment {present[0]} must be deleted first"
    following = read_header(disk, directory, segment + 1) if len(present) > 1 else None
    if following is None or following.first_unit > durable_unit:
        return "it is the last segment with durable units"
    if following.first_unit - 1 > older_unit:
        return f"it holds units up to {following.first_unit - 1}, but the older snapshot is of unit {older_unit}"
    for lease in read_leases(disk, directory, now):
        if lease.segment <= segment:
            return f"reader {lease.name!r} (pid {lease.pid}) is at segment {lease.segment}"
    return ""


def delete_segment(disk: Disk, directory: str, segment: int, *, older_unit: int, durable_unit: int, now: int) -> None:
    """Delete the first segment and its index, durably. Raise SegmentHeld if it is still needed.

    After a kill in between, the segment exists or not; the next open removes an index without its segment. Afterwards
    call `records.forget(segment)` of the journal.
    """
    holder = held_by(disk, directory, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
    if holder:
        raise SegmentHeld(segment, holder)
    disk.unlink(segment_path(directory, segment))
    disk.fsync_dir(directory)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(index_path(directory, segment))
