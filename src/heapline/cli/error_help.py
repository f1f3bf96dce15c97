"""Rewrite errors for the command line: name the command or option that helps, and where a key was looked for.

An error keeps its class and its data. Only its text changes, and only where the command line knows better advice.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heapline.cli.main import TRACEBACK
from heapline.cli.output import some
from heapline.client.target import parse_target
from heapline.contract.broker import Broker
from heapline.contract.config import FIXED_FIELDS
from heapline.contract.errors import (
    DeadlineExceeded,
    GroupExists,
    GroupNotFound,
    HeaplineError,
    ScheduleNotFound,
    TopicExists,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
)

NAMES_SHOWN = 10
CONNECT_SECONDS = 2.0
#: Advice by errno, after the path and the system's own text.
_OS_ADVICE = {
    errno.EACCES: "run the command as a user that may access it, or choose another path",
    errno.EPERM: "run the command as a user that may access it, or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; choose a directory",
    errno.EEXIST: "a file is in the way; choose another path",
    errno.EISDIR: "choose a file",
    errno.EROFS: "choose a path on a writable disk",
    errno.EADDRINUSE: "another process uses this address; stop it, or choose another port",
    errno.EADDRNOTAVAIL: "this machine does not have the address; choose another --host",
}
_OUTPUT_INCOMPLETE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_WRONG_PROTOCOL = (
    "A process listens there. Check that both sides use TLS, or neither (--ca FILE, heaplines://HOST:PORT), and that "
    "it is the gRPC port"
)


def one_line(error: HeaplineError | OSError) -> str:
    """Return the line that is shown instead of a traceback."""
    if isinstance(error, HeaplineError):
        return f"{type(error).__name__}: {error}"
    text = error.strerror or str(error)
    if error.errno in _OUTPUT_INCOMPLETE:
        return f"the output is incomplete, because it could not be written: {text}"
    path = f"{str(error.filename)!r}: " if error.filename is not None else ""
    advice = _OS_ADVICE.get(error.errno or 0)
    return f"{path}{text}; {advice or f'set {TRACEBACK}=1 to see where this happened'}"


def not_a_directory(path: Path) -> str:
    """Return why a path cannot be used as an existing directory."""
    return f"{str(path)!r} is a file" if path.exists() else f"directory {str(path)!r} does not exist"


@dataclass(frozen=True, slots=True)
class Where:
    """The servers that a command called, and the key that it sent."""

    endpoints: Sequence[str]
    key_from: Path | None  # None if no key was found
    local_key_file: Path | None  # where the key of a server on this machine would be; None for another machine

    @property
    def servers(self) -> str:
        return ", ".join(self.endpoints)

    async def is_listening(self) -> bool:
        """Return whether any of the servers accepts TCP connections."""
        for endpoint in self.endpoints:
            host, _, port = parse_target(endpoint)[0].rpartition(":")
            with contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                return True
        return False


async def advised(error: HeaplineError, hl: Broker, where: Where) -> HeaplineError:
    """Return the error to show. The connection is still open, so the server can be asked which names exist."""
    text = await _advice(error, hl, where)
    if text is None:
        return error
    is_unreached = isinstance(error, UnavailableError) and not error.reached
    changed = UnavailableError() if is_unreached else copy.copy(error)
    changed.args = (text,)
    return changed


async def _advice(error: HeaplineError, hl: Any, where: Where) -> str | None:
    match error:
        case TopicNotFound(topic=topic):
            known = await _names(hl.list_topics())
            return f"topic {topic!r} does not exist{known}. Create it with: heapline topic create {topic}"
        case ScheduleNotFound(schedule=schedule):
            known = await _names(hl.list_schedules())
            advice = known or ". Create one with: heapline schedule create NAME TOPIC --every 1h"
            return f"schedule {schedule!r} does not exist{advice}"
        case GroupNotFound(topic=topic, group=group):
            known = await _names(hl.list_groups(topic))
            create = f"heapline group create {topic} {group}"
            return f"group {group!r} of topic {topic!r} does not exist{known}. Create it with: {create}"
        case TopicExists(topic=topic, differing=differing):
            fixed = ", ".join(name for name in differing if name in FIXED_FIELDS)
            change = f"{fixed} cannot be changed;" if fixed else f"change them with: heapline topic update {topic}, or"
            return (
                f"topic {topic!r} already exists with different settings ({', '.join(differing)}); "
                f"{change} choose another name"
            )
        case GroupExists(topic=topic, group=group, differing=differing):
            return (
                f"group {group!r} of topic {topic!r} already exists with different settings ({', '.join(differing)}); "
                f"choose another name, or delete it first with: heapline group delete {topic} {group}"
            )
        case Unauthenticated():
            return _key_advice(where)
        case UnavailableError(reached=False):
            if await where.is_listening():
                return f"cannot connect to {where.servers}; nothing was changed. {_WRONG_PROTOCOL}"
            return f"no server listens at {where.servers}; nothing was changed. {_start_advice(where)}"
        case DeadlineExceeded():
            if await where.is_listening():
                return f"{error}. {_WRONG_PROTOCOL}. If it is busy, wait longer with --timeout"
            return f"{error}. No server listens at {where.servers} now. {_start_advice(where)}"
    return None


async def _names(listing: Awaitable[Any]) -> str:
    """Return the existing names as the continuation of a sentence, or nothing if there are none to show."""
    try:
        names = sorted(info.name for info in await listing)
    except HeaplineError:
        return ""
    return f"; there are {some(names, NAMES_SHOWN)}" if names else ""


def _key_advice(where: Where) -> str:
    if where.key_from is not None:
        return (
            f"the server at {where.servers} rejects the key in {str(where.key_from)!r}: it belongs to another server, "
            "or is revoked. Choose a file with a valid key: --key-file FILE"
        )
    text = f"the server at {where.servers} needs an API key, and none was found: --key-file and "
    text += "HEAPLINE_API_KEY_FILE are not set"
    if where.local_key_file is not None:
        text += f", and {str(where.local_key_file)!r} cannot be read (set HEAPLINE_DATA to the server's data directory)"
    return f"{text}. Create a key with: heapline keys create"


def _start_advice(where: Where) -> str:
    if where.local_key_file is not None:
        return "Start a server with: heapline serve --data data; or choose another one: --to HOST:PORT"
    return "Check --to (or HEAPLINE_URL) and the network"
