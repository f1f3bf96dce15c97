"""`heapline backup --data DIR --to DIR`: a copy of a data directory, also of one that a server is using.

Each topic's folder is copied so that it is whole at one moment (journal/backup.py); moments of different topics lie
apart. Four orders matter. The catalog is read first and written last: so a copy that was cut off has none and is not
taken for a backup, a topic that grows meanwhile has a journal ahead of its catalog, which opening expects, and one that
is deleted meanwhile is left out. The broker's own journal, which says what was decided on batches over several topics,
is copied after all others: whatever they left undecided it has decided or will, and decisions are kept for days. The
journal of the schedules is copied before them: a firing that it does not know yet is recognised by its topic. And so
are the files that say how far replays are: what they are behind they repeat or recognise, what they are ahead of they
would leave out.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from heapline.cli.present import make_console
from heapline.clock import SystemClock
from heapline.engine.catalog import FILE as CATALOG
from heapline.engine.catalog import Catalog, Entry
from heapline.engine.decisions import NAMESPACE as SYSTEM
from heapline.engine.replays.files import FOLDER as REPLAYS
from heapline.engine.replays.files import make_folder
from heapline.engine.schedules.store import NAME as SCHEDULES
from heapline.errors import BadRequest, CorruptionError
from heapline.journal import Disk, RealDisk
from heapline.journal.backup import Copied, copy_topic

LEFT_OUT = {CATALOG, "LOCK", "auth.lock"}


def backup(
    data: Annotated[Path, typer.Option("--data", "-d", envvar="HEAPLINE_DATA", help="The data directory.")],
    to: Annotated[Path, typer.Option("--to", help="Where the copy goes; it must not be there yet.")],
) -> None:
    """Copy a data directory while it is in use, or while it is not.

    Whatever was answered before the command began is in the copy. Keys and users are copied too: keep it as safe as
    the original. To restore, serve the copy, or a copy of it.

    Example:  [cyan]heapline backup --data data --to backups/monday && heapline journal verify backups/monday[/cyan]
    """
    if not (data / CATALOG).exists():
        raise BadRequest(f"{str(data)!r} holds no queue: name a server's data directory with --data")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BadRequest(f"{str(to)!r} is there already: name a directory that is not")
    console, disk = make_console(), RealDisk()
    catalog = Catalog(disk, str(data))
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    total, kept = 0, {}
    replays = _read_notes(disk, f"{data}/{REPLAYS}")
    for entry in sorted(catalog.entries.values(), key=_turn):
        copied = _copy_one(disk, data, to, entry)
        if copied is None:
            console.print(f"{escape(entry.topic)}: deleted meanwhile, left out")
            continue
        kept[entry.namespace, entry.name] = entry
        total += copied.bytes
        console.print(f"{escape(entry.topic)}: up to unit {copied.unit}, {copied.segments} segments")
    _write_notes(disk, f"{to}/{REPLAYS}", replays)
    _copy_files(data, to)
    catalog.write_copy(f"{to}/{CATALOG}", kept)
    disk.fsync_dir(str(to.resolve().parent))
    console.print(f"[green]{len(kept)} topics, {total} bytes[/green] in {escape(str(to))}")


def _turn(entry: Entry) -> int:
    if entry.namespace != SYSTEM:
        return 1
    return 0 if entry.name == SCHEDULES else 2


def _copy_one(disk: Disk, data: Path, to: Path, entry: Entry) -> Copied | None:
    """None: the topic has gone."""
    target = f"{to}/{entry.folder}"
    disk.mkdir(os.path.dirname(target))
    checkpoints = _read_notes(disk, f"{data}/{entry.folder}/{REPLAYS}")
    try:
        copied = copy_topic(disk, f"{data}/{entry.folder}", target, SystemClock().wall_ms)
    except (FileNotFoundError, CorruptionError):
        if entry in Catalog(disk, str(data)).entries.values():
            raise
        disk.remove_tree(target)
        return None
    _write_notes(disk, f"{target}/{REPLAYS}", checkpoints)
    return copied


def _read_notes(disk: Disk, folder: str) -> dict[str, bytes]:
    """Small files that are replaced whole: one that goes meanwhile is over."""
    found = {}
    for name in disk.listdir(folder) if disk.exists(folder) else ():
        with contextlib.suppress(FileNotFoundError):
            if not name.endswith(".tmp"):
                found[name] = bytes(disk.read_file(f"{folder}/{name}"))
    return found


def _write_notes(disk: Disk, folder: str, notes: dict[str, bytes]) -> None:
    if notes:
        make_folder(disk, folder)
    for name, content in notes.items():
        disk.write_file_atomic(f"{folder}/{name}", content)


def _copy_files(data: Path, to: Path) -> None:
    """Keys, users, the audit log: small files that are replaced whole or only appended to. For their owner alone."""
    for path in sorted(data.iterdir()):
        if path.is_symlink() or not path.is_file() or path.name in LEFT_OUT or path.name.endswith(".tmp"):
            continue
        content = path.read_bytes()
        fd = os.open(to / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
