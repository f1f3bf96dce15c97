"""A relay as a process: which broker it talks to, and that it ends on SIGTERM. For the two commands that start one."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from heapline.client.connecting import connect_from_env
from heapline.client.outbox.relay import OutboxRelay
from heapline.errors import BadRequest

#: Seconds that a call may take. Well below the relay's lease, so that one whose server is away keeps its lanes, and
#: ends soon when it is told to.
DEADLINE = 10.0


def broker_of(to: str | None, data: str | os.PathLike[str] | None, key_file: str | os.PathLike[str] | None) -> Any:
    """A broker to enter: a server, as given or as the environment says, or a directory that this process opens."""
    if data is None:
        return connect_from_env(url=to, key_file=key_file, deadline=DEADLINE)
    if to is not None:
        raise BadRequest("give a server or a data directory, not both")
    from heapline.engine import open as open_directory

    return open_directory(data)


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
