"""Delete old segments, unless a reader needs them. Whether anything in them is still live is not known here.

Only the first segment can be deleted, so that the remaining ones have no gaps. It may be deleted when the next segment
has durable units, everything in it is at or below the older of two verified snapshots, and no reader holds it.

*Reader leases.* A reader of the directory, possibly in another process, has a lease file `readers/<name>.lease` (JSON:
pid, segment, expires_at in wall ms), which holds all segments from that number on. An unreadable lease holds
everything: a full disk is better than a scan that loses its position. The reader opens the segment after writing its
lease. If the segment was deleted in between, opening fails and the reader starts again.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from heapline.contract.config import NAME
from heapline.contract.errors import BadName, ConflictError
from heapline.journal.disk import Disk
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import index_path, segment_path


class ReaderLease(msgspec.Struct, frozen=True):
    """A reader's claim to a segment and all later ones."""

    name: str
    pid: int
    segment: int
    expires_at: int


def _lease_path(directory: str, name: str) -> str:
    if NAME.match(name) is None:
        raise BadName("reader", name)
    return f"{directory}/readers/{name}.lease"


def write_lease(disk: Disk, directory: str, lease: ReaderLease) -> None:
    """Take or renew a lease: hold its segment and all later ones until it expires."""
    body = {"pid": lease.pid, "segment": lease.segment, "expires_at": lease.expires_at}
    disk.mkdir(f"{directory}/readers")
    disk.write_file_atomic(_lease_path(directory, lease.name), msgspec.json.encode(body))


def hold_segments(disk: Disk, directory: str, name: str, first: int, until: int) -> None:
    """Hold segments from `first` on until a wall time in ms, under a reader's name, for this process."""
    write_lease(disk, directory, ReaderLease(name, os.getpid(), first, until))


def end_lease(disk: Disk, directory: str, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(_lease_path(directory, name))


def read_leases(disk: Disk, directory: str, now: int) -> list[ReaderLease]:
    """Return the leases in force at wall time `now`, and remove the files of expired ones."""
    try:
        files = [n for n in disk.listdir(f"{directory}/readers") if n.endswith(".lease")]
    except FileNotFoundError:
        return []
    found = []
    for file in files:
        name, path = file.removesuffix(".lease"), f"{directory}/readers/{file}"
        try:
            body = msgspec.json.decode(disk.read_file(path))
            lease = ReaderLease(name, int(body["pid"]), int(body["segment"]), int(body["expires_at"]))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            lease = ReaderLease(name, 0, 0, now)
        if lease.expires_at < now:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(path)
        else:
            found.append(lease)
    return found


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
