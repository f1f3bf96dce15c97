"""Small files in one folder, each replaced atomically: checkpoints and jobs of replays.

Blocking: use it in I/O threads. The folder is created with the first file. The contents are not known here.
"""

from __future__ import annotations

import os

from heapline.checksum import crc32c
from heapline.journal.disk import Disk

REPLAYS = "replays"  # in a data directory: jobs; in a topic's: checkpoints


class SmallFiles:
    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk, self._folder = disk, folder
        self._is_folder_durable = False

    def path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            return bytes(self._disk.read_file(self.path(name)))
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        names = self._disk.listdir(self._folder) if self._disk.exists(self._folder) else []
        return [name for name in names if not name.endswith(".tmp")]

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file. Durable on return."""
        if not self._is_folder_durable:  # a process that was killed may have created it without syncing
            self._disk.mkdir(self._folder)
            self._disk.fsync_dir(os.path.dirname(self._folder))
            self._is_folder_durable = True
        self._disk.write_file_atomic(self.path(name), content)

    def delete(self, name: str) -> None:
        self._disk.unlink(self.path(name))

    def read_all(self) -> dict[str, bytes]:
        """Return the contents by name. A file that is deleted meanwhile is omitted."""
        contents = {name: self.read(name) for name in self.names()}
        return {name: content for name, content in contents.items() if content is not None}

    def write_all(self, contents: dict[str, bytes]) -> None:
        for name, content in contents.items():
            self.write(name, content)


def checkpoints_of(disk: Disk, directory: str) -> SmallFiles:
    """Return the checkpoints of a topic's replays to subscribers."""
    return SmallFiles(disk, f"{directory}/{REPLAYS}")


def sealed(version: int, content: bytes) -> bytes:
    """Return a file that has its checksum (4 bytes, crc32c of the rest), then the version of its format (1 byte)."""
    body = bytes([version]) + content
    return crc32c(body).to_bytes(4, "little") + body


def unsealed(version: int, raw: bytes) -> bytes:
    """Return the content of a file of this version; raise ValueError if it is damaged or of another version."""
    body = raw[4:]
    if len(body) < 2 or raw[:4] != crc32c(body).to_bytes(4, "little"):
        raise ValueError("checksum does not match")
    if body[0] != version:
        raise ValueError(f"version {body[0]} is not known")
    return body[1:]
