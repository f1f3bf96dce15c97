"""Reclaiming: which segments may go, and how they go. Whether anything in them is still live is not known here.

Only the first segment can go, so that those present stay without gaps. It may go when the segment after it has been
begun durably, everything in it lies at or below the older of two verified snapshots, and no reader holds it.

A reader of the directory, perhaps in another process, holds a lease file `readers/<name>.lease` (JSON: pid, segment,
expires_at in wall ms) and all segments from that number on. One that cannot be read holds everything: better a full
disk than a scan that loses its place. The reader opens its file after writing its lease; if the segment went in
between, opening says so and it starts again.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from heapline.errors import BadName, ConflictError
from heapline.journal.disk import Disk
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import index_path, segment_path


class SegmentHeld(ConflictError):
    """The segment is still needed; `detail` says by what. Stays in the process, so it stands here, not in errors.py."""

    fields = ("segment", "detail")

    def __init__(self, segment: int, detail: str) -> None:
        self.segment, self.detail = segment, detail
        super().__init__(f"segment {segment} cannot be deleted: {detail}")


@dataclass(frozen=True, slots=True)
class ReaderLease:
    name: str
    pid: int
    segment: int
    expires_at: int


def _lease_path(directory: str, name: str) -> str:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise BadName("reader", name)
    return f"{directory}/readers/{name}.lease"


def write_lease(disk: Disk, directory: str, lease: ReaderLease) -> None:
    """Take or renew a lease: hold its segment and all after it until it expires."""
    body = {"pid": lease.pid, "segment": lease.segment, "expires_at": lease.expires_at}
    disk.mkdir(f"{directory}/readers")
    disk.write_file_atomic(_lease_path(directory, lease.name), json.dumps(body).encode())


def end_lease(disk: Disk, directory: str, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(_lease_path(directory, name))


def read_leases(disk: Disk, directory: str, now: int) -> list[ReaderLease]:
    """The leases in force at wall time `now`; files of expired ones are removed."""
    try:
        names = [n[:-6] for n in disk.listdir(f"{directory}/readers") if n.endswith(".lease")]
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        try:
            body = json.loads(disk.read_file(_lease_path(directory, name)))
            lease = ReaderLease(name, int(body["pid"]), int(body["segment"]), int(body["expires_at"]))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            lease = ReaderLease(name, 0, 0, now)
        if lease.expires_at < now:
            end_lease(disk, directory, name)
        else:
            found.append(lease)
    return found


def held_by(disk: Disk, directory: str, segment: int, *, older_unit: int, durable_unit: int, now: int) -> str:
    """What still needs the segment, in words; empty if nothing does."""
    present = list_segments(disk, directory)
    if segment != present[0]:
        return f"segment {present[0]} comes before it"
    following = read_header(disk, directory, segment + 1) if len(present) > 1 else None
    if following is None or following.first_unit > durable_unit:
        return "it is the last one with durable units"
    if following.first_unit - 1 > older_unit:
        return f"it holds units up to {following.first_unit - 1}, the older snapshot is of unit {older_unit}"
    for lease in read_leases(disk, directory, now):
        if lease.segment <= segment:
            return f"reader {lease.name!r} (pid {lease.pid}) is at segment {lease.segment}"
    return ""


def delete_segment(disk: Disk, directory: str, segment: int, *, older_unit: int, durable_unit: int, now: int) -> None:
    """Delete the first segment and its index, durably. SegmentHeld if something still needs it.

    Killed in between: the segment is there or not; an index without segment is removed at the next open.
    Afterwards tell the journal's `records.forget(segment)`.
    """
    holder = held_by(disk, directory, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
    if holder:
        raise SegmentHeld(segment, holder)
    disk.unlink(segment_path(directory, segment))
    disk.fsync_dir(directory)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(index_path(directory, segment))
