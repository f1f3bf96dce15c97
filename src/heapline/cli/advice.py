"""Errors of a broker in the words of the command line: which command helps, which option, where a key was looked for.

An error keeps its class and its facts; only its text changes, and only where the command line knows better.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heapline.broker import Broker
from heapline.cli.present import some
from heapline.client.target import parse_target
from heapline.errors import (
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

TOPICS_SHOWN = 10
START = "heapline serve --data data"
KNOCK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Where:
    """Which server was asked, and which key was shown to it."""

    endpoints: Sequence[str]
    key_from: Path | None  # None: no key was found
    local_key_file: Path | None  # where the key of a server on this machine would be; None: the server is elsewhere

    @property
    def servers(self) -> str:
        return ", ".join(self.endpoints)

    async def is_listening(self) -> bool:
        """Whether anybody takes a connection there, whatever he may speak."""
        for endpoint in self.endpoints:
            host, _, port = parse_target(endpoint)[0].rpartition(":")
            with contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(KNOCK_SECONDS):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                return True
        return False


async def advised(error: HeaplineError, hl: Broker, where: Where) -> HeaplineError:
    """The error to show; the connection is still open, so the server can be asked what there is."""
    if isinstance(error, TopicNotFound):
        return _saying(error, await _missing_topic(error, hl))
    if isinstance(error, ScheduleNotFound):
        return _saying(error, await _missing_schedule(error, hl))
    if isinstance(error, TopicExists):
        return _saying(error, _other_settings(error))
    if isinstance(error, GroupNotFound):
        return _saying(error, await _missing_group(error, hl))
    if isinstance(error, GroupExists):
        return _saying(error, _other_group_settings(error))
    if isinstance(error, Unauthenticated):
        return _saying(error, _no_entry(where))
    if isinstance(error, UnavailableError) and not error.reached:
        return _saying(UnavailableError(), await _unreached(where))
    if isinstance(error, DeadlineExceeded):
        return _saying(error, f"{error}. {await _late(where)}")
    return error


async def _missing_schedule(error: ScheduleNotFound, hl: Broker) -> str:
    text = f"there is no schedule {error.schedule!r}"
    try:
        names = [info.name for info in await hl.list_schedules()]
    except HeaplineError:
        names = []
    if names:
        return f"{text}; there are {some(names, TOPICS_SHOWN)}"
    return f"{text}, and no other. Make one with: heapline schedule create NAME TOPIC --every 1h"


async def _missing_topic(error: TopicNotFound, hl: Broker) -> str:
    text = f"there is no topic {error.topic!r}"
    try:
        names = sorted(info.name for info in await hl.list_topics())
    except HeaplineError:
        names = []
    if names:
        text += f"; there are {some(names, TOPICS_SHOWN)}"
    return f"{text}. Make it with: heapline topic create {error.topic}"


def _other_settings(error: TopicExists) -> str:
    return (
        f"topic {error.topic!r} exists with another {', '.join(error.differing)}: change what can be changed with "
        f"heapline topic update {error.topic}, or pick another name"
    )


async def _missing_group(error: GroupNotFound, hl: Any) -> str:
    text = f"topic {error.topic!r} has no group {error.group!r}"
    try:
        names = sorted(info.name for info in await hl.list_groups(error.topic))
    except HeaplineError:
        names = []
    if names:
        text += f"; there are {some(names, TOPICS_SHOWN)}"
    return f"{text}. Make it with: heapline group create {error.topic} {error.group}"


def _other_group_settings(error: GroupExists) -> str:
    return (
        f"group {error.group!r} of topic {error.topic!r} exists with another {', '.join(error.differing)}: pick "
        f"another name, or delete it first with: heapline group delete {error.topic} {error.group}"
    )


def _no_entry(where: Where) -> str:
    if where.key_from is not None:
        return (
            f"the server at {where.servers} does not know the key in {str(where.key_from)!r}: it may be another "
            "server's, or revoked. Name a file with a good one: --key-file FILE"
        )
    text = f"the server at {where.servers} wants an API key, and none was found: --key-file and "
    text += "HEAPLINE_API_KEY_FILE name no file"
    if where.local_key_file is not None:
        text += f", and {str(where.local_key_file)!r} cannot be read (HEAPLINE_DATA names the server's data directory)"
    return f"{text}. A key is made with: heapline keys create"


async def _unreached(where: Where) -> str:
    if await where.is_listening():
        return f"{where.servers}: no connection came about, so nothing was changed. {_OTHERWISE}"
    return f"nobody listens at {where.servers}, so nothing was changed. {_start(where)}"


async def _late(where: Where) -> str:
    if await where.is_listening():
        return f"{_OTHERWISE} It may also be busy: --timeout gives it longer"
    return f"Nobody listens at {where.servers} now. {_start(where)}"


_OTHERWISE = (
    "Somebody listens there: does it speak TLS and this command not, or the other way round (--ca FILE, "
    "heaplines://HOST:PORT)? Is it the gRPC port?"
)


def _start(where: Where) -> str:
    if where.local_key_file is not None:
        return f"Start a server with: {START}; or name another one: --to HOST:PORT"
    return "Check --to (or HEAPLINE_URL), and the network"


def _saying(error: HeaplineError, text: str) -> HeaplineError:
    changed = copy.copy(error)
    changed.args = (text,)
    return changed
