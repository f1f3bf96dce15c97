"""`heapline backup --data DIR --to DIR`: copy a data directory, even while a server is using it.

Each topic's copy is consistent at one time (journal/backup.py); the times of different topics differ. The order of
copying matters:

- The catalog is read first and written last. So an incomplete copy has no catalog and is not mistaken for a backup, a
  topic that grows meanwhile has a journal ahead of its catalog, which opening expects, and a topic that is deleted
  meanwhile is omitted.
- The broker's own journal, with the decisions on batches over several topics, is copied after all others. So it has a
  decision for every batch that they left undecided, or will make one; decisions are kept for days.
- The journal of schedules, and the files with the progress of replays, are copied before the topics. A firing or a row
  that they do not know is recognized by its topic; one that they were ahead of would be lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from rich.markup import escape

from heapline.cli.options import Env
from heapline.cli.output import counted, make_console, size
from heapline.clock import SystemClock
from heapline.contract.errors import BadRequest, CorruptionError
from heapline.engine.catalog import FILE as CATALOG
from heapline.engine.catalog import Catalog, Entry
from heapline.engine.internal_topic import NAMESPACE as SYSTEM
from heapline.engine.schedules.store import NAME as SCHEDULES
from heapline.journal import Disk, RealDisk
from heapline.journal.backup import Copied, copy_topic
from heapline.journal.small_files import REPLAYS, SmallFiles

NOT_COPIED = {CATALOG, "LOCK", "auth.lock"}


def backup(
    data: Annotated[Path, "-d", "Data directory.", Env("HEAPLINE_DATA")],
    to: Annotated[Path, "Directory of the copy; must not exist."],
) -> None:
    """Copy a data directory, even while a server is using it.

    The copy contains everything that was acknowledged before the command started. It also contains keys and users, so
    protect it like the original. To restore, serve the copy, or a copy of it.

    Example:  [cyan]heapline backup --data data --to backups/monday && heapline journal verify backups/monday[/cyan]
    """
    if not (data / CATALOG).exists():
        raise BadRequest(f"{str(data)!r} does not contain a queue; set --data to a server's data directory")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BadRequest(f"{str(to)!r} already exists; choose a directory that does not")
    console, disk = make_console(), RealDisk()
    catalog = Catalog(disk, str(data))
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    total, kept = 0, {}
    replays = SmallFiles(disk, f"{data}/{REPLAYS}").read_all()
    for entry in sorted(catalog.entries.values(), key=_turn):
        copied = _copy_topic(disk, data, to, entry)
        if copied is None:
            console.print(f"{escape(entry.topic)}: deleted meanwhile, omitted")
            continue
        kept[entry.namespace, entry.name] = entry
        total += copied.bytes
        console.print(f"{escape(entry.topic)}: up to unit {copied.unit}, {counted(copied.segments, 'segment')}")
    SmallFiles(disk, f"{to}/{REPLAYS}").write_all(replays)
    _copy_root_files(data, to)
    catalog.write_copy(f"{to}/{CATALOG}", kept)
    disk.fsync_dir(str(to.resolve().parent))
    console.print(f"[green]{counted(len(kept), 'topic')}, {size(total)}[/green] in {escape(str(to))}")


def _turn(entry: Entry) -> int:
    if entry.namespace != SYSTEM:
        return 1
    return 0 if entry.name == SCHEDULES else 2


def _copy_topic(disk: Disk, data: Path, to: Path, entry: Entry) -> Copied | None:
    """Copy a topic. Return None if it was deleted meanwhile."""
    target = f"{to}/{entry.folder}"
    disk.mkdir(os.path.dirname(target))
    try:
        return copy_topic(disk, f"{data}/{entry.folder}", target, SystemClock().wall_ms)
    except (FileNotFoundError, CorruptionError):
        if entry in Catalog(disk, str(data)).entries.values():
            raise
        disk.remove_tree(target)
        return None


def _copy_root_files(data: Path, to: Path) -> None:
    """Copy keys, users and the audit log: small files that are replaced atomically or appended to. Mode 0600."""
    for path in sorted(data.iterdir()):
        if path.is_symlink() or not path.is_file() or path.name in NOT_COPIED or path.name.endswith(".tmp"):
            continue
        content = path.read_bytes()
        fd = os.open(to / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
