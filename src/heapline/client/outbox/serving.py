"""A relay as a process: which broker it talks to, and that it ends on SIGTERM. For the two commands that start one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from heapline.client.outbox.relay import OutboxRelay
from heapline.errors import BadRequest


def broker_of(to: str | None, data: str | os.PathLike[str] | None, key_file: str | os.PathLike[str] | None) -> Any:
    """A broker to enter: a server, or a directory that this process opens for itself."""
    if data is not None:
        if to is not None:
            raise BadRequest("give a server or a data directory, not both")
        from heapline.engine import open as open_directory

        return open_directory(data)
    to = to or os.environ.get("HEAPLINE_URL")
    if to is None:
        raise BadRequest("say where the broker is: --to host:port, or HEAPLINE_URL; or --data for a directory")
    key_file = key_file or os.environ.get("HEAPLINE_API_KEY_FILE")
    from heapline.client.wire import WireBroker

    return WireBroker(to, credential=Path(key_file).read_text().strip() if key_file else None, timeout=30.0)


async def serve(
    database: Any, *, to: str | None = None, data: str | os.PathLike[str] | None = None,
    key_file: str | os.PathLike[str] | None = None, once: bool = False, **settings: Any,
) -> int:  # fmt: skip
    """Relay until SIGTERM or SIGINT, or what is there now; returns how many rows were relayed."""
    async with broker_of(to, data, key_file) as broker, OutboxRelay(database, broker, **settings) as relay:
        if once:
            await relay.run_once()
            return relay.relayed
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, relay.stop)
        await relay.turn()  # a database without tables, or none at all, is told at once and not waited for
        await relay.run()
        return relay.relayed
