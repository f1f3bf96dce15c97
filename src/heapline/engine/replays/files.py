"""Small files with the positions of replays: one line of version and checksum, then JSON; replaced atomically.

    heapline-replay 1 <crc32c of the rest, eight digits>
    {…}

FILE_VERSION 1. To change the contents: only add fields, with defaults; otherwise bump the version and keep reading the
old one. A file that does not pass its checksum is corrupt, and is never treated as empty.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import TypeVar

import msgspec
from crc32c import crc32c

from heapline.contract.errors import CorruptionError, UnknownFormat
from heapline.journal.disk import Disk

T = TypeVar("T")
FILE_VERSION = 1
FOLDER = "replays"  # in a data directory: jobs; in a topic: checkpoints. `heapline backup` knows it
_FIRST_LINE = re.compile(rb"heapline-replay (\d+) ([0-9a-f]{8})\n")


async def to_its_end(writing: asyncio.Future[None]) -> None:
    """Wait for a write even if the caller is cancelled: the thread continues, and the next write must follow it."""
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
    """Return the content of a file, or None if it does not exist."""
    try:
        data = disk.read_file(path)
    except FileNotFoundError:
        return None
    first = _FIRST_LINE.match(data)
    if first is not None and int(first[1]) != FILE_VERSION:
        raise UnknownFormat(path, int(first[1]))
    body = data[first.end() :] if first is not None else b""
    if first is None or crc32c(body) != int(first[2], 16):
        raise CorruptionError(f"{path} does not match its checksum; delete it and start that replay again")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{path} cannot be read ({error}): it may be a newer version's") from error
