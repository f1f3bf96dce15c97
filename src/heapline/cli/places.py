"""Where topics lie on disk: from a path that somebody typed to the folders of topics, and whether they are in use.

Reads the catalog if there is one; if it does not check, or a lone topic's folder was named, the folders speak for
themselves. Nothing here looks into journals, and nothing is written.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from heapline.config import TopicConfig, parse_topic
from heapline.engine.catalog import FILE as CATALOG
from heapline.engine.catalog import Catalog
from heapline.errors import BadRequest, CorruptionError, TopicNotFound
from heapline.journal import Disk, RealDisk

_FOLDER = re.compile(r"(?P<name>.+)\.(?P<incarnation>\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """One topic on disk. Without a readable catalog its config is not known."""

    topic: str
    folder: str
    incarnation: int | None = None
    config: TopicConfig | None = None


@dataclass(slots=True)
class Places:
    root: str  # the data directory, or the lone folder itself
    topics: list[Place]
    catalog_damage: str = ""
    unnamed: list[str] = field(default_factory=list)  # folders that the catalog does not name

    @property
    def catalog_path(self) -> str:
        return f"{self.root}/{CATALOG}"

    @property
    def lock_path(self) -> str:
        return f"{self.root}/LOCK"


def find_topics(path: Path, topic: str | None = None, disk: Disk | None = None) -> Places:
    """The topics under a data directory, or the one whose folder this is; only `topic` if that is given."""
    if not path.is_dir():
        raise BadRequest(f"there is no directory {str(path)!r}: name a data directory, or the folder of one topic")
    disk = disk or RealDisk()
    if (path / CATALOG).exists() or (path / "topics").is_dir():
        places = _of_data_directory(str(path), disk)
    elif any(path.glob("*.seg")):
        places = _of_folder(path.resolve(), disk)
    else:
        raise BadRequest(
            f"{str(path)!r} holds no queue: name a directory that heapline.open(…) made, or the folder of one topic"
        )
    if topic is not None:
        # The broker's own have names that users cannot give, and operators can.
        known = any(place.topic == topic for place in places.topics)
        wanted = topic if known else "/".join(parse_topic(topic)).removeprefix("default/")
        places.topics = [place for place in places.topics if place.topic == wanted]
        if not places.topics:
            raise TopicNotFound(topic)
    return places


def _of_data_directory(root: str, disk: Disk) -> Places:
    folders = _folders(root)
    try:
        entries = list(Catalog(disk, root).entries.values())
    except CorruptionError as error:
        return Places(root, [_guess(root, folder) for folder in folders], catalog_damage=str(error))
    topics = [Place(e.topic, f"{root}/{e.folder}", e.incarnation, e.config) for e in entries]
    named = {e.folder for e in entries}
    return Places(root, sorted(topics, key=lambda t: t.topic), unnamed=[f for f in folders if f not in named])


def _folders(root: str) -> list[str]:
    found = sorted(Path(root).glob("topics/*/*"))
    return [str(p.relative_to(root)) for p in found if p.is_dir() and any(p.glob("*.seg"))]


def _guess(root: str, folder: str) -> Place:
    _, namespace, last = folder.split("/")
    match = _FOLDER.fullmatch(last)
    name = match["name"] if match else last
    return Place(name if namespace == "default" else f"{namespace}/{name}", f"{root}/{folder}")


def _of_folder(folder: Path, disk: Disk) -> Places:
    """A lone folder; if it lies in a data directory, that directory's catalog knows more of it."""
    root = folder.parents[2] if len(folder.parents) > 2 else folder
    if (root / CATALOG).exists():
        places = _of_data_directory(str(root), disk)
        places.topics = [t for t in places.topics if t.folder == str(folder)]
        if places.topics:
            return places
    return Places(str(folder), [Place(folder.name, str(folder))])


def is_open(places: Places) -> bool:
    """Whether a process has the directory open. Asks for a shared lock and lets it go at once."""
    try:
        fd = os.open(places.lock_path, os.O_RDONLY | os.O_CLOEXEC)
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
