"""The journal: durable bytes. It knows nothing of priorities, message leases or asyncio.

disk             the disk as a protocol, and the real one
block, unit      the content of one commit
segment          one file: its header, name, growth and units
unit_planner     assigns positions to blocks and frames (memory only)
writer           writes sealed units (I/O)
journal          planner and writer as one object
sectors, tail    tell a torn write from damage
recovery         reads all units back, checked
log_bounds       how far the log is durable; the first offset that can be read
records          messages by position, from memory or disk
index            finds units by partition, offset, id and time
seek, reader     the log by unit, offset, id and time
snapshot         the state at a unit, so that opening is fast
reclaim          deletes old segments unless a reader needs them
spares           reserved space for a full disk
small_files      checkpoints and jobs of replays
verify, backup   for the command line: check, repair, copy
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
from heapline.journal.records import BadRecord, CacheBudget, RecordCache, RecordReader, Records
from heapline.journal.recovery import scan
from heapline.journal.snapshot import Snapshot, SnapshotStore
from heapline.journal.spares import SparePool
from heapline.journal.unit import UNIT_BYTES_MAX, BlockRef, Frame, SealedUnit, Unit
from heapline.journal.writer import SyncPolicy

__all__ = [
    "UNIT_BYTES_MAX",
    "BadRecord",
    "Block",
    "BlockRef",
    "CacheBudget",
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
    "scan",
    "write_lease",
]
