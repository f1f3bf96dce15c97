"""The files of topics: find them under a path, and read them with or without a running engine.

Reads the catalog if there is one. If the catalog is corrupt, or the path is the directory of a single topic, names are
taken from the directories. Only reads, except for a small reader lease beside a running engine, so that no segment is
deleted meanwhile. A closed journal is read up to its last complete unit, as opening would do. The journal of a running
engine is read up to its durable end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from heapline.cli.output import not_a_directory
from heapline.contract.config import TopicConfig, parse_topic
from heapline.contract.errors import BadRequest, CorruptionError, TopicNotFound
from heapline.core.now import Now
from heapline.engine.catalog import FILE as CATALOG
from heapline.engine.catalog import Catalog
from heapline.engine.recovery import apply_units, check_records, newest_state, stored_snapshots
from heapline.engine.topic import Topic
from heapline.journal import (
    Disk,
    File,
    LogReader,
    ReaderLease,
    RealDisk,
    Unit,
    end_lease,
    write_lease,
)
from heapline.journal.recovery import Scan
from heapline.journal.segment import numbered, segment_path

READER_LEASE_MS = 10 * 60 * 1000
_FOLDER = re.compile(r"(?P<name>.+)\.(?P<incarnation>\d+)")


@dataclass(frozen=True, slots=True)
class TopicFiles:
    """One topic on disk. Without a readable catalog its config is unknown."""

    topic: str
    folder: str
    incarnation: int | None = None
    config: TopicConfig | None = None
    id_suffix: int = 0  # the low bits of its messages' ULIDs


@dataclass(slots=True)
class DataDirectory:
    root: str  # the data directory, or the directory of a single topic
    topics: list[TopicFiles]
    catalog_damage: str = ""
    unnamed: list[str] = field(default_factory=list)  # folders that are not in the catalog

    @property
    def catalog_path(self) -> str:
        return f"{self.root}/{CATALOG}"

    @property
    def lock_path(self) -> str:
        return f"{self.root}/LOCK"

    def is_open(self) -> bool:
        """Return whether a process has the directory open. Tries a shared lock and releases it immediately."""
        try:
            fd = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(fd)
        return False


# -- finding -----------------------------------------------------------------------------------------------------------


def find_topics(path: Path, topic: str | None = None) -> DataDirectory:
    """Return the topics of a data directory, or the topic whose directory this is. Only `topic`, if it is given."""
    if not path.is_dir():
        raise BadRequest(f"{not_a_directory(path)}; use a data directory, or the directory of one topic")
    if (path / CATALOG).exists() or (path / "topics").is_dir():
        directory = _read_directory(str(path))
    elif any(path.glob("*.seg")):
        directory = _single_topic(path.resolve())
    else:
        raise BadRequest(
            f"{str(path)!r} does not contain a queue; use a data directory of heapline, or the directory of one topic"
        )
    if topic is not None:
        # Internal topics have names that parse_topic rejects.
        is_known = any(files.topic == topic for files in directory.topics)
        wanted = topic if is_known else "/".join(parse_topic(topic)).removeprefix("default/")
        directory.topics = [files for files in directory.topics if files.topic == wanted]
        if not directory.topics:
            raise TopicNotFound(topic)
    return directory


def _read_directory(root: str) -> DataDirectory:
    paths = sorted(Path(root).glob("topics/*/*"))
    folders = [str(p.relative_to(root)) for p in paths if p.is_dir() and any(p.glob("*.seg"))]
    try:
        entries = list(Catalog(RealDisk(), root).entries.values())
    except CorruptionError as error:
        return DataDirectory(root, [_guess(root, folder) for folder in folders], catalog_damage=str(error))
    topics = [TopicFiles(e.topic, f"{root}/{e.folder}", e.incarnation, e.config, e.id_suffix) for e in entries]
    named = {e.folder for e in entries}
    unnamed = [folder for folder in folders if folder not in named]
    return DataDirectory(root, sorted(topics, key=lambda t: t.topic), unnamed=unnamed)


def _guess(root: str, folder: str) -> TopicFiles:
    """Take the name of a topic from its directory."""
    _, namespace, last = folder.split("/")
    match = _FOLDER.fullmatch(last)
    name = match["name"] if match else last
    return TopicFiles(name if namespace == "default" else f"{namespace}/{name}", f"{root}/{folder}")


def _single_topic(folder: Path) -> DataDirectory:
    """Return the topic of one directory. If it is part of a data directory, use that directory's catalog."""
    root = folder.parents[2] if len(folder.parents) > 2 else folder
    if (root / CATALOG).exists():
        directory = _read_directory(str(root))
        directory.topics = [t for t in directory.topics if t.folder == str(folder)]
        if directory.topics:
            return directory
    return DataDirectory(str(folder), [TopicFiles(folder.name, str(folder))])


# -- reading -----------------------------------------------------------------------------------------------------------


class CountingDisk(RealDisk):
    """A disk that reports how many bytes are read from its files, for a progress bar."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        self._on_read = on_read

    def open(self, path: str, *, write: bool = False) -> File:
        file = super().open(path, write=write)
        read = file.pread

        def pread(n: int, off: int) -> bytes:
            data = read(n, off)
            self._on_read(len(data))
            return data

        file.pread = pread  # type: ignore[method-assign]
        return file


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def segment_sizes(disk: Disk, folder: str) -> dict[int, int]:
    """Return the file size of each segment by its number."""
    sizes = {}
    for number in numbered(disk.listdir(folder), ".seg"):
        with contextlib.suppress(FileNotFoundError):  # reclaimed meanwhile
            file = disk.open(segment_path(folder, number))
            sizes[number] = file.size()
            file.close()
    return sizes


@contextlib.contextmanager
def reader_lease(disk: Disk, folder: str, running: bool) -> Iterator[None]:
    """Keep a running engine from deleting segments meanwhile. Does nothing if the directory is not writable."""
    name = f"cli-{os.getpid()}"
    is_taken = False
    if running:
        with contextlib.suppress(OSError, IndexError):
            first = numbered(disk.listdir(folder), ".seg")[0]
            write_lease(disk, folder, ReaderLease(name, os.getpid(), first, wall_ms() + READER_LEASE_MS))
            is_taken = True
    try:
        yield
    finally:
        if is_taken:
            end_lease(disk, folder, name)


def units_of(
    disk: Disk, files: TopicFiles, running: bool, after_unit: int = 0, segment_bytes: int | None = None
) -> Iterator[Unit]:
    """Yield the valid units after the given one."""
    if running:
        reader = LogReader(disk, files.folder)
        if after_unit < reader.watermark().visible:
            yield from reader.read_units(start_unit=after_unit + 1 if after_unit else 0)
    else:
        expected = {"incarnation": files.incarnation, "segment_bytes": segment_bytes}
        yield from Scan(disk, files.folder, after_unit=after_unit, known_durable=after_unit, **expected)


def empty_topic(files: TopicFiles) -> Topic:
    assert files.config is not None
    wall = wall_ms()
    return Topic(files.topic, files.config, Now(wall, wall), np.zeros)  # only a running engine draws random backoffs


def rebuild(disk: Disk, files: TopicFiles, running: bool) -> Topic:
    """Build the topic's state as the engine does when it opens the topic."""
    assert files.config is not None
    snapshots = stored_snapshots(disk, files.folder)
    topic, unit = newest_state(disk, files.folder, snapshots, lambda: empty_topic(files), wall_ms())
    apply_units(topic, units_of(disk, files, running, unit, files.config.segment_bytes), files.folder, unit)
    check_records(topic, disk, files.folder)
    return topic


def depths(topic: Topic) -> dict[str, int]:
    """Return the number of messages by state."""
    return {
        "ready": topic.ready,
        "delayed": sum(p.entries.delayed for p in topic.partitions),
        "leased": topic.leased,
        "dead": sum(len(p.entries.dead) for p in topic.partitions),
    }
