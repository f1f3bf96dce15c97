"""Count the distinct functions of Heapline that one warm enqueue enters: embedded, and from the SDK to a server.

    python -m benchmarks.functions [--list]

A measure of how much code a reader must know to follow one call. Comprehensions and lambdas do not count. The server
runs in this process, so its functions count too. `--list` also prints the functions, grouped by package.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import heapline

SOURCE = str(Path(heapline.__file__).parent)
WARM = 50  # calls before the counted one


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """Collect the functions under src/heapline that are entered, in every thread that starts or runs Python code."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            found.add(code)

    threading.setprofile_all_threads(note) if hasattr(threading, "setprofile_all_threads") else threading.setprofile(
        note
    )
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def count(call: Callable[[], Awaitable[Any]]) -> set[CodeType]:
    for _ in range(WARM):
        await call()
    with entered() as found:
        await call()
        await asyncio.sleep(0.05)
    return found


def print_grouped(found: set[CodeType]) -> None:
    """Print the functions by package and module, in the order of the source."""
    packages: dict[str, dict[Path, list[CodeType]]] = defaultdict(lambda: defaultdict(list))
    for code in sorted(found, key=lambda code: (code.co_filename, code.co_firstlineno)):
        module = Path(code.co_filename).relative_to(SOURCE)
        packages[module.parts[0]][module].append(code)
    for package, modules in packages.items():
        print(f"  {package}: {sum(map(len, modules.values()))}")
        for module, codes in modules.items():
            print(f"    {module}: {', '.join(code.co_qualname for code in codes)}")


async def main(listed: bool) -> None:
    from heapline.engine import EmbeddedBroker
    from heapline.server.auth.principals import NoAuthGuard
    from heapline.server.server import Server
    from heapline.server.settings import ServerSettings

    with tempfile.TemporaryDirectory() as directory:
        async with EmbeddedBroker(directory) as engine:
            await engine.create_topic("jobs")
            embedded = await count(lambda: engine.enqueue("jobs", b"x", priority=3))
            server = Server(engine, NoAuthGuard(), ServerSettings(port=0, grpc_port=0, http_port=0, stop_grace=1.0))
            await server.start()
            async with heapline.connect(f"127.0.0.1:{server.port}") as hl:
                remote = await count(lambda: hl.enqueue("jobs", b"x", priority=3))
            await server.stop()
    for name, found in (("embedded enqueue", embedded), ("SDK to server enqueue", remote)):
        print(f"{name}: {len(found)} functions in {len({code.co_filename for code in found})} files")
        if listed:
            print_grouped(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions, grouped by package")
    asyncio.run(main(parser.parse_args().list))
