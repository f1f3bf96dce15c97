"""Many connections with one call in flight each: enqueues on the native wire, and over HTTP and JSON.

Commits can only be shared across connections here. The baseline is the bare frame server under the same load.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from benchmarks.drivers.proc import cpu_seconds
from benchmarks.drivers.window import PAYLOAD, own_cpu_seconds, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server import targets
from benchmarks.server.bare_server import connected
from benchmarks.server.schedule import percentile
from benchmarks.server.spawned import Serving, bare_server, heapline_server
from benchmarks.server.targets import Bound, judged
from heapline.client.transports.native import NativeBroker

Call = Callable[[], Awaitable[object]]
TOPIC = "connections"


@dataclass
class Load:
    """The calls completed by all connections, over all rounds."""

    seconds: float = 0.0
    server_s: float = 0.0
    client_s: float = 0.0
    times: list[float] = field(default_factory=list)

    async def add(self, calls: list[Call], server: Serving, seconds: float) -> None:
        began, client, spent = perf_counter(), own_cpu_seconds(), cpu_seconds(server.pid)

        async def repeat(call: Call) -> None:
            while (start := perf_counter()) < began + seconds:
                await call()
                self.times.append(perf_counter() - start)

        await asyncio.gather(*map(repeat, calls))
        self.seconds += perf_counter() - began
        self.server_s += cpu_seconds(server.pid) - spent
        self.client_s += own_cpu_seconds() - client

    @property
    def rate(self) -> float:
        return len(self.times) / self.seconds

    def us(self, spent: float) -> float:
        return spent / len(self.times) * 1e6


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 2.0) if quick else (5, 3.0)
    native, http, bare = Load(), Load(), Load()
    with heapline_server(directory / "ours") as server, bare_server(directory / "bare") as floor:
        for number in range(rounds):
            yield Step("separate connections", number, rounds)
            run_loop(over_native(server, native, seconds))
            run_loop(over_frames(floor, bare, seconds))
            run_loop(over_http(server, http, seconds))
        run_loop(check(server, len(native.times) + len(http.times)))
    yield from figures(native, http, bare)


async def over_native(server: Serving, load: Load, seconds: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(NativeBroker(server.target, credential=server.credential()))
            for _ in range(targets.CONNECTIONS)
        ]
        await clients[0].create_topic(TOPIC)
        await load.add([lambda hl=hl: hl.enqueue(TOPIC, PAYLOAD) for hl in clients], server, seconds)  # type: ignore[misc]


async def over_frames(server: Serving, load: Load, seconds: float) -> None:
    clients = [await connected(server.port) for _ in range(targets.CONNECTIONS)]
    await load.add([lambda client=client: client.call(PAYLOAD, 8) for client in clients], server, seconds)  # type: ignore[misc]


async def over_http(server: Serving, load: Load, seconds: float) -> None:
    """HTTP/1.1 by hand, because a client library would take most of the time."""
    body = json.dumps({"topic": TOPIC, "payload": base64.b64encode(PAYLOAD).decode()}).encode()
    head = f"POST /v1/enqueue HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {server.credential()}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    pairs = [await asyncio.open_connection("127.0.0.1", server.http_port) for _ in range(targets.HTTP_CONNECTIONS)]

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in answer.split(b"\r\n")[1:-2])
        reported = await reader.readexactly(int(fields[b"content-length"]))
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"HTTP answered {answer[:40]!r} {reported[:200]!r}")

    await load.add([lambda pair=pair: call(*pair) for pair in pairs], server, seconds)  # type: ignore[misc]
    for _, writer in pairs:
        writer.close()


async def check(server: Serving, count: int) -> None:
    async with NativeBroker(server.target, credential=server.credential()) as hl:
        if (waiting := (await hl.stats(TOPIC)).ready) != count:
            raise RuntimeError(f"{waiting} messages wait, but {count} calls were answered")


def figures(native: Load, http: Load, bare: Load) -> Iterator[Figure]:
    what = f"enqueue, {targets.CONNECTIONS} connections, one call in flight each"
    bounds = (
        Bound("≥", targets.CONNECTIONS_PER_S, "calls/s"),
        Bound("<", targets.CONNECTIONS_P95_MS, "ms"),
        Bound("≤", targets.CONNECTIONS_SERVER_US, "µs"),
    )
    yield from rows(what, native, bare, bounds)
    what = f"enqueue over HTTP and JSON, {targets.HTTP_CONNECTIONS} connections"
    yield from rows(what, http, bare, (Bound("≥", targets.HTTP_PER_S, "calls/s"), None, None))


def rows(
    what: str, ours: Load, bare: Load, bounds: tuple[Bound | None, Bound | None, Bound | None]
) -> Iterator[Figure]:
    p95 = [percentile(load.times, 95) * 1e3 for load in (ours, bare)]
    server, client = ([load.us(getattr(load, side)) for load in (ours, bare)] for side in ("server_s", "client_s"))
    for name, unit, (value, base), bound in (
        ("", "calls/s", (ours.rate, bare.rate), bounds[0]),
        (", p95", "ms", p95, bounds[1]),
        (": CPU of the server", "µs/call", server, bounds[2]),
        (": CPU of the client", "µs/call", client, None),
    ):
        yield figure(what + name, value, unit, base, value / base, *judged(bound, value), "lower" if name else "higher")
