"""Cost of open pages of the dashboard: a thousand topics, a hundred browsers, and a small load that changes pages.

The browsers belong to three people with the same rights. Half of them show the overview, the others the list of topics
and ten busy topics. The same load without browsers is the baseline, and the figure is the difference. Each browser must
receive updates, which proves that its page was live.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.idle import core_percent
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import BROWSERS, BROWSERS_CORE_PERCENT, BROWSERS_TOPICS, Bound
from heapline.cli.auth import open_auth
from heapline.client.transports.native import NativeBroker
from heapline.contract.message import Outgoing

PEOPLE = 3
BUSY = 10  # topics that work goes through
PERIOD_S, BATCH = 0.1, 2  # each busy topic in turn: 20 messages/s in all
SETTLE_S = 10.0  # until views refresh as rarely as their cost asks for


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    seconds = 15.0 if quick else 60.0
    with heapline_server(directory / "ours") as server:
        yield Step(f"{BROWSERS} browsers", 0, 1)
        alone, watched = run_loop(core_percents(server, seconds))
    bound = Bound("<", BROWSERS_CORE_PERCENT, "%")
    what = f"dashboard, {BROWSERS_TOPICS} topics, {BROWSERS} browsers: CPU of the server for them"
    more = watched - alone
    yield figure(what, more, "% of a core", alone, None, f"{bound} of a core", bound.holds(more), "lower")


async def core_percents(server: Serving, seconds: float) -> tuple[float, float]:
    """Return the percent of one core that the server uses under the load: without browsers, and with all of them."""
    auth = open_auth(server.directory)
    keys = [auth.keys.create(f"person {n}", ["*:consume"])[1].reveal() for n in range(PEOPLE)]
    async with contextlib.AsyncExitStack() as stack:
        hl = await stack.enter_async_context(NativeBroker(server.target, credential=server.credential()))
        for first in range(0, BROWSERS_TOPICS, 50):
            await asyncio.gather(*(hl.create_topic(f"topic-{n:04}") for n in range(first, first + 50)))
        load = await stack.enter_async_context(background(work(hl)))
        await asyncio.sleep(SETTLE_S / 2)
        alone = await core_percent(server.pid, seconds / 2)
        received = [0] * BROWSERS
        for n in range(BROWSERS):
            await stack.enter_async_context(background(browse(server, keys[n % PEOPLE], page(n), received, n)))
        await asyncio.sleep(SETTLE_S)
        settled = list(received)
        watched = await core_percent(server.pid, seconds)
        if load.done():
            await load
        silent = [page(n) for n in range(BROWSERS) if received[n] == settled[n]]
        if silent:
            raise RuntimeError(f"{len(silent)} browsers received no updates, among them one of {silent[0]}")
    return alone, watched


def page(number: int) -> str:
    if number % 2 == 0:
        return "/"
    return "/topics?sort=ready" if number % 4 == 1 else f"/topics/topic-{number // 4 % BUSY:04}"


async def work(hl: NativeBroker) -> None:
    for n in range(1 << 60):
        topic = f"topic-{n % BUSY:04}"
        await hl.enqueue_batch(topic, [Outgoing(PAYLOAD)] * BATCH)
        for message in await hl.pop(topic, BATCH - n % 2):
            await message.ack()
        await asyncio.sleep(PERIOD_S)


async def browse(server: Serving, key: str, view: str, received: list[int], number: int) -> None:
    """Log in, and read the stream of one page."""
    base = f"http://127.0.0.1:{server.http_port}/ui"
    async with httpx.AsyncClient(trust_env=False, timeout=None) as browser:
        login = await browser.post(f"{base}/login", data={"key": key})
        cookie = {"cookie": login.headers["set-cookie"].partition(";")[0]}
        async with browser.stream("GET", f"{base}/live?view={quote(view)}", headers=cookie) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                received[number] += line.startswith("data:")


@contextlib.asynccontextmanager
async def background(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
