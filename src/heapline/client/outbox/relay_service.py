"""Run a relay as a process, for the two commands that start one: choose its broker, and stop it on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from heapline.client.connect import connect_from_env
from heapline.client.outbox.relay import OutboxRelay
from heapline.contract.errors import BadRequest

#: Seconds that a call may take. Well below the relay's lease, so that a relay keeps its lanes while its server is
#: unavailable, and stops soon after a signal.
DEADLINE = 10.0


def broker_of(to: str | None, data: str | os.PathLike[str] | None, key_file: str | os.PathLike[str] | None) -> Any:
    """Return a broker to enter: a server, given or named by the environment, or a directory that this process opens."""
    if data is None:
        return connect_from_env(url=to, key_file=key_file, deadline=DEADLINE)
    if to is not None:
        raise BadRequest("give a server or a data directory, not both")
    from heapline import open as open_directory

    return open_directory(data)


async def serve(
    database: Any,
    *,
    to: str | None = None,
    data: str | os.PathLike[str] | None = None,
    key_file: str | os.PathLike[str] | None = None,
    once: bool = False,
    **settings: Any,
) -> int:
    """Relay until SIGTERM or SIGINT, or once. Return how many rows were relayed."""
    async with broker_of(to, data, key_file) as broker, OutboxRelay(database, broker, **settings) as relay:
        if once:
            await relay.run_once()
            return relay.relayed
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, relay.stop)
        await relay.turn()  # a database without tables raises now instead of being retried
        await relay.run()
        return relay.relayed
