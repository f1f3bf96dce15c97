"""beanstalkd: a work queue in C with priorities and delays, one thread, used with pipelined lines."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.peer import Running
from benchmarks.server.spawned import answers, child, free_port, wait_for


class Beanstalkd:
    driver: ClassVar[str] = "beanstalkd"
    durability: ClassVar[str] = "put and delete: binlog with an fsync on every write (-f 0); reserve: nothing"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._program = ""

    def install(self) -> None:
        found = shutil.which("beanstalkd")
        self._program = found or str(install.debian(self._home, "usr/bin/beanstalkd", "beanstalkd").resolve())

    @property
    def version(self) -> str:
        return install.run([self._program, "-v"], "no version").strip()

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        port, said = free_port(), directory / "log"
        binlog = directory / "binlog"
        binlog.mkdir()
        command = [self._program, "-b", str(binlog), "-f", "0", "-l", "127.0.0.1", "-p", str(port)]
        with said.open("w") as log, child(command, log) as process:
            wait_for(process, said, lambda: answers(port))
            yield Running(process.pid, port, sys.executable)
