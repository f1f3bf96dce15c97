"""The PostgreSQL server that the suite's drivers share, and the suite's own queries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from benchmarks.drivers.window import Job, Outcome
from benchmarks.harness import SCRATCH
from benchmarks.peers.pg_server import PgServer
from benchmarks.server.driving import drive
from benchmarks.sql import targets


class Database(NamedTuple):
    pid: int  # of the server
    port: int

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def drive(self, driver: str, seconds: float, python: str | None = None, **options: str) -> Outcome:
        """Run a driver on its tables."""
        job = Job(
            port=self.port, batch=targets.BATCH, in_flight=targets.IN_FLIGHT, seconds=seconds, server_pid=self.pid,
            options={"backlog": str(targets.BACKLOG), **options},
        )  # fmt: skip
        return drive(driver, job) if python is None else drive(driver, job, python)

    def query(self, sql: str, *values: Any) -> Any:
        """Run one statement and return its first value."""
        return asyncio.run(self._query(sql, *values))

    async def _query(self, sql: str, *values: Any) -> Any:
        connection = await asyncpg.connect(self.url())
        try:
            return await connection.fetchval(sql, *values, timeout=1800)
        finally:
            await connection.close()


@contextlib.contextmanager
def started(directory: Path, **settings: str) -> Iterator[Database]:
    server = PgServer(SCRATCH / "peers" / "sql", settings)
    server.install()
    directory.mkdir(exist_ok=True)
    for above in (directory, directory.parent):
        above.chmod(0o711)  # PostgreSQL may run as another user
    with server.start(directory) as (pid, port):
        yield Database(pid, port)
