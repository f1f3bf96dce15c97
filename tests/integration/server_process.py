"""`heapline serve` as a real process on a directory: started, asked for its ports, stopped or killed.

Its log goes to a file that outlives it, so that a test can read the logs of several processes in sequence.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

PATIENCE = 60.0  # seconds for a process to open its directory on a busy machine


class Process:
    def __init__(self, data: Path, *flags: str, module: str = "heapline", log: Path | None = None) -> None:
        self._data, self._flags, self._module = data, flags, module
        self._log = log or data.with_name(data.name + ".log")
        self.process: asyncio.subprocess.Process

    async def __aenter__(self) -> Process:
        await self.spawn()
        await self.ready()
        return self

    async def spawn(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, "serve", "--data", str(self._data), "--port", "0",
                "--grpc-port", "0", "--http-port", "0", *self._flags, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    async def ready(self) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
        found = re.search(rb"Heapline on port (\d+), gRPC on port (\d+), HTTP on port (\d+)", line)
        assert found, line + self.logged()
        self.target, self.grpc_target = (f"127.0.0.1:{int(port)}" for port in found.groups()[:2])
        self.http_port = int(found[3])

    async def __aexit__(self, *error: object) -> None:
        if any(error):
            code = self.process.returncode
            state = "is running" if code is None else f"has ended with {code}"
            print(f"server {self.process.pid} {state}; its log ends with:")
            print(self.logged()[-2000:].decode(errors="replace"))
        if self.process.returncode is None:
            await self.kill()

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def terminate(self) -> int:
        """Ask it to stop; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), PATIENCE)

    def logged(self) -> bytes:
        return self._log.read_bytes()

    def anonymous_bytes(self) -> int:
        """Return the process's own memory (RssAnon)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024

    def open_sockets(self) -> int:
        links = Path(f"/proc/{self.process.pid}/fd")
        return sum(os.readlink(link).startswith("socket:") for link in links.iterdir() if link.is_symlink())
