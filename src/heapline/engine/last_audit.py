"""The file `audit` beside a topic's journal: the result of the last audit that was recorded.

VERSION 1: checksum and version (`journal/small_files.py`), then a `TopicAudit` in msgpack. To change the contents: only
add fields, with defaults; otherwise bump the version and keep reading the old one.

The file is replaced atomically, and is durable before the call that records it returns. A kill leaves the result
before, or the new one. The file is in its topic's directory, so it ends with the topic. A file that is damaged or of
another version does not keep its topic from being served: a warning is logged, and the topic counts as not audited
until the next result replaces the file. Backups omit it, because the copy was not audited.
"""

from __future__ import annotations

import msgspec

from heapline.contract.message import TopicAudit
from heapline.journal.disk import Disk
from heapline.journal.small_files import sealed, unsealed
from heapline.logs import Log

log = Log("heapline.engine")
FILE = "audit"
VERSION = 1
_decode = msgspec.msgpack.Decoder(TopicAudit).decode


def read_audit(disk: Disk, directory: str) -> TopicAudit | None:
    """Return the result, or None if there is none that can be read. Blocks on the disk."""
    try:
        return _decode(unsealed(VERSION, bytes(disk.read_file(f"{directory}/{FILE}"))))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.warning("audit result cannot be read; audit the topic again", cause=str(error), directory=directory)
        return None


def write_audit(disk: Disk, directory: str, found: TopicAudit) -> None:
    """Replace the result. Durable on return. Blocks on the disk."""
    disk.write_file_atomic(f"{directory}/{FILE}", sealed(VERSION, msgspec.msgpack.encode(found)))
