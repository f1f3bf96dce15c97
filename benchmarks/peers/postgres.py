"""Hand-written batched SQL on PostgreSQL: COPY in, lease with SKIP LOCKED, delete; four connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.peer import Running
from benchmarks.peers.pg_server import DURABILITY, PgServer


class Postgres:
    driver: ClassVar[str] = "postgres"
    durability: ClassVar[str] = DURABILITY

    def __init__(self, home: Path) -> None:
        self._home = home
        self._server = PgServer(home)
        self._python = Path()

    def install(self) -> None:
        self._server.install()
        self._python = install.venv(self._home, "asyncpg", "uvloop")

    @property
    def version(self) -> str:
        return f"{self._server.version}; {install.package_versions(self._python, 'asyncpg')}"

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        with self._server.start(directory) as (pid, port):
            yield Running(pid, port, str(self._python))
