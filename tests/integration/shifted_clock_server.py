"""A real server process whose wall clock a test sets while it runs.

    python -m tests.integration.shifted_clock_server serve --data DIR --grpc-port 0 --http-port 0 --offset FILE

The file contains the milliseconds by which the wall clock is ahead of the system's (negative: behind); it is read
with the wall clock. Boot time is the system's own: setting a clock does not change how fast time passes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from typing import Any

from heapline.clock import SystemClock


class ShiftedClock(SystemClock):
    def __init__(self, offset: Path) -> None:
        self._offset = offset

    def wall_ms(self) -> int:
        return super().wall_ms() + int(self._offset.read_text(encoding="ascii"))

    def shift(self, ms: int) -> None:
        """Set the wall clock for every process that reads this file."""
        fresh = self._offset.with_suffix(".new")
        fresh.write_text(str(ms), encoding="ascii")
        fresh.replace(self._offset)  # a reader never sees a partial number


def main() -> None:
    from heapline.cli.serve import make_broker
    from heapline.server.server import make_guard, serve
    from heapline.server.settings import read_settings

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["serve"])
    for flag in ("--data", "--offset"):
        parser.add_argument(flag, type=Path, required=True)
    for flag in ("--port", "--grpc-port", "--http-port"):
        parser.add_argument(flag, type=int, required=True)
    flags = vars(parser.parse_args())
    del flags["command"]
    clock = ShiftedClock(flags.pop("offset"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = read_settings(None, **flags)
    asyncio.run(serve(settings, make_guard(settings, clock), make_broker(settings, clock), _say))


def _say(server: Any) -> None:
    ports = f"gRPC on port {server.grpc_port}, HTTP on port {server.http_port}"
    print(f"serving: Heapline on port {server.port}, {ports}", flush=True)


if __name__ == "__main__":
    main()
