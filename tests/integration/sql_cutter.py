"""Cuts nodes of the Postgres broker off from their servers at any statement or command, as a crash does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase

asyncpg = pytest.importorskip("asyncpg")
redis = pytest.importorskip("redis.asyncio")

CALLS = ("execute", "fetch", "fetchrow", "fetchval", "copy_records_to_table")
#: Shrinking takes minutes here, and histories are short anyway.
PHASES = (Phase.explicit, Phase.generate)


class Cut(ConnectionError):
    """The node is dead: no statement reaches the server, no answer reaches the node."""


class Cutter:
    """Cuts a node off from the servers at its n-th statement or command, before or after it is executed."""

    def __init__(self) -> None:
        self.left: int | None = None  # statements until the cut; None: no cut
        self.is_after = False

    def wrap(self, call: Any) -> Any:
        async def cuttable(connection: Any, *args: Any, **options: Any) -> Any:
            if self.left is None:
                return await call(connection, *args, **options)
            self.left -= 1
            if self.left > 0:
                return await call(connection, *args, **options)
            if self.left == 0 and self.is_after:
                await call(connection, *args, **options)
            raise Cut

        return cuttable


cutter = Cutter()


@contextlib.contextmanager
def cuttable_connections() -> Iterator[None]:
    """Let all connections of this process to Postgres and Redis be cut."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(asyncpg.Connection, name, cutter.wrap(getattr(asyncpg.Connection, name)))
        patch.setattr(redis.Redis, "execute_command", cutter.wrap(redis.Redis.execute_command))
        yield
