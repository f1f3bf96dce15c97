"""Small files that replays keep their place in: one line of version and checksum, then JSON; replaced whole.

    heapline-replay 1 <crc32c of the rest, eight digits>\n{…}

FILE_VERSION 1. Ritual for changing what is in them: fields are only added, with defaults; else bump the version and
keep reading the old one. A file that does not check is damage, and is never taken for an empty one.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import TypeVar

import msgspec
from crc32c import crc32c

from heapline.errors import CorruptionError, UnknownFormat
from heapline.journal.disk import Disk

T = TypeVar("T")
FILE_VERSION = 1
FOLDER = "replays"  # of a data directory: jobs; of a topic: checkpoints. `heapline backup` knows it
_FIRST_LINE = re.compile(rb"heapline-replay (\d+) ([0-9a-f]{8})\n")


async def to_its_end(writing: asyncio.Future[None]) -> None:
    """A thread does not stop when its caller is cancelled: what is written next must come after it."""
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def make_folder(disk: Disk, path: str) -> None:
    if not disk.exists(path):
        disk.mkdir(path)
        disk.fsync_dir(os.path.dirname(path))


def save(disk: Disk, path: str, content: msgspec.Struct) -> None:
    body = msgspec.json.encode(content)
    disk.write_file_atomic(path, b"heapline-replay %d %08x\n" % (FILE_VERSION, crc32c(body)) + body)


def load(disk: Disk, path: str, kind: type[T]) -> T | None:
    """None if there is no such file."""
    try:
        data = disk.read_file(path)
    except FileNotFoundError:
        return None
    first = _FIRST_LINE.match(data)
    if first is not None and int(first[1]) != FILE_VERSION:
        raise UnknownFormat(path, int(first[1]))
    body = data[first.end() :] if first is not None else b""
    if first is None or crc32c(body) != int(first[2], 16):
        raise CorruptionError(f"{path} does not match its checksum: delete it, and begin that replay anew")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{path} cannot be read ({error}): it may be a newer version's") from error
