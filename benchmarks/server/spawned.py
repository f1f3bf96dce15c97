"""Processes that a benchmark starts and ends: our server as users run it, and others that listen on a port."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

START_S = 60.0
PORTS = re.compile(r"serving: Heapline on port (\d+), gRPC on port (\d+), HTTP on port (\d+)")
STOP_S = 20.0
T = TypeVar("T")


@dataclass(frozen=True)
class Serving:
    """A running server."""

    pid: int
    port: int
    directory: Path
    grpc_port: int = 0
    http_port: int = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def key_file(self) -> Path:
        return self.directory / "admin.key"

    def credential(self) -> str:
        return self.key_file.read_text().strip()


@contextlib.contextmanager
def heapline_server(directory: Path) -> Iterator[Serving]:
    """`heapline serve` on an empty directory, with keys as for users."""
    directory.mkdir(parents=True, exist_ok=True)
    ports = ["--port", "0", "--grpc-port", "0", "--http-port", "0"]
    command = [sys.executable, "-m", "heapline", "serve", "--data", str(directory), *ports]
    said = directory.with_suffix(".log")
    with said.open("w") as log, child(command, log) as process:
        found = wait_for(process, said, lambda: PORTS.search(said.read_text()))
        port, grpc_port, http_port = map(int, found.groups())
        yield Serving(process.pid, port, directory, grpc_port, http_port)


@contextlib.contextmanager
def bare_server(directory: Path) -> Iterator[Serving]:
    """See bare_server.py."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.server.bare_server", str(directory / "file")]
    said = directory.with_suffix(".log")
    with said.open("w") as log, child(command, log) as process:
        found = wait_for(process, said, lambda: re.search(r"serving on port (\d+)", said.read_text()))
        yield Serving(process.pid, int(found.group(1)), directory)


@contextlib.contextmanager
def child(command: list[str], log: IO[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is terminated when the block ends, and killed if it does not end. It stays in our process group:
    the harness ends the whole group of a benchmark that hangs."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], said: Path, ready: Callable[[], T | None]) -> T:
    """Return the first true result of `ready()`; if there is none, raise an error with the process's last output."""
    give_up = time.monotonic() + START_S
    while not (answer := ready()):
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"the server did not start; its last output: {said.read_text()[-500:].strip()}")
        time.sleep(0.02)
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
