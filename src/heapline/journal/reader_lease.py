"""Reader leases: files that keep segments from being deleted while a reader needs them.

A reader of the directory, possibly in another process, has a lease file `readers/<name>.lease` (JSON: pid, segment,
expires_at in wall ms), which holds all segments from that number on. An unreadable lease holds everything: a full disk
is better than a scan that loses its position. The reader opens the segment after writing its lease. If the segment was
deleted in between, opening fails and the reader starts again.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from heapline.contract.errors import BadName
from heapline.journal.disk import Disk


@dataclass(frozen=True, slots=True)
class ReaderLease:
    """A reader's claim to a segment and all later ones."""

    name: str
    pid: int
    segment: int
    expires_at: int


def _lease_path(directory: str, name: str) -> str:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise BadName("reader", name)
    return f"{directory}/readers/{name}.lease"


def write_lease(disk: Disk, directory: str, lease: ReaderLease) -> None:
    """Take or renew a lease: hold its segment and all later ones until it expires."""
    body = {"pid": lease.pid, "segment": lease.segment, "expires_at": lease.expires_at}
    disk.mkdir(f"{directory}/readers")
    disk.write_file_atomic(_lease_path(directory, lease.name), json.dumps(body).encode())


def end_lease(disk: Disk, directory: str, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(_lease_path(directory, name))


def read_leases(disk: Disk, directory: str, now: int) -> list[ReaderLease]:
    """Return the leases in force at wall time `now`, and remove the files of expired ones."""
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
