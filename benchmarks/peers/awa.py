"""awa: background jobs on PostgreSQL, written in Rust; its client and workers run in the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.peer import Running
from benchmarks.peers.pg_server import DURABILITY, PgServer


class Awa:
    driver: ClassVar[str] = "awa"
    durability: ClassVar[str] = DURABILITY

    def __init__(self, home: Path) -> None:
        self._home = home
        self._server = PgServer(home)
        self._python = Path()

    def install(self) -> None:
        self._server.install()
        self._python = install.venv(self._home, "awa-pg", "asyncpg", "uvloop")

    @property
    def python(self) -> str:
        """The interpreter that has its client, once installed."""
        return str(self._python)

    @property
    def version(self) -> str:
        return f"{install.package_versions(self._python, 'awa-pg')}; {self._server.version}"

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        with self._server.start(directory) as (pid, port):
            yield Running(pid, port, str(self._python))
