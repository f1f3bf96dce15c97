"""The journal: durable bytes. Knows nothing of priorities, leases or asyncio.

disk        the disk as a protocol, and the real one
block unit  what lies in a commit              sectors tail   torn or damaged?
segment     one file                           recovery walk  reading it all back, checked
planner     where things will lie (memory)     writer         putting them there (I/O)
journal     both, as one object                spares         space for a full disk
records record_reader  messages by position    index seek reader  the log by unit, offset, id, time
snapshot reclaim       what makes it short     verify repair  what the CLI offers
log_start   from where on it can be shown
"""

from __future__ import annotations

from heapline.journal.block import Block, make_block, new_rows
from heapline.journal.disk import Disk, File, Lock, RealDisk
from heapline.journal.journal import Journal
from heapline.journal.reader import LogReader
from heapline.journal.reclaim import (
    ReaderLease,
    SegmentHeld,
    delete_segment,
    end_lease,
    held_by,
    read_leases,
    write_lease,
)
from heapline.journal.record_reader import RecordReader
from heapline.journal.records import BadRecord, CacheBudget, RecordCache, Records
from heapline.journal.recovery import scan
from heapline.journal.repair import repair
from heapline.journal.snapshot import Snapshot, SnapshotStore
from heapline.journal.spares import SparePool
from heapline.journal.unit import UNIT_BYTES_MAX, BlockRef, Frame, SealedUnit, Unit
from heapline.journal.verify import Damage, Report, stats, verify
from heapline.journal.writer import SyncPolicy

__all__ = [
    "UNIT_BYTES_MAX",
    "BadRecord",
    "Block",
    "BlockRef",
    "CacheBudget",
    "Damage",
    "Disk",
    "File",
    "Frame",
    "Journal",
    "Lock",
    "LogReader",
    "ReaderLease",
    "RealDisk",
    "RecordCache",
    "RecordReader",
    "Records",
    "Report",
    "SealedUnit",
    "SegmentHeld",
    "Snapshot",
    "SnapshotStore",
    "SparePool",
    "SyncPolicy",
    "Unit",
    "delete_segment",
    "end_lease",
    "held_by",
    "make_block",
    "new_rows",
    "read_leases",
    "repair",
    "scan",
    "stats",
    "verify",
    "write_lease",
]
