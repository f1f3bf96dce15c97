"""`heapline bench`: what is measured, where, and on which topic; the topic is made for it and deleted after it."""

from __future__ import annotations

import asyncio
import contextlib
import json as json_module
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from heapline.broker import Broker
from heapline.cli.advice import advised
from heapline.cli.bench.baselines import appends, bare_calls
from heapline.cli.bench.driving import run_loop
from heapline.cli.bench.loads import NUMBER, Loads
from heapline.cli.bench.result import Measured, Report, as_json, as_table
from heapline.cli.connection import CaOption, KeyFileOption, ToOption, connect, settle
from heapline.cli.present import make_console, progress_bar
from heapline.client.connecting import TARGET
from heapline.engine import open as open_embedded
from heapline.errors import BadRequest, HeaplineError, TopicExists, UnavailableError

CALL_SECONDS = 10.0
TICK = 0.1
BASELINE_SECONDS_MAX = 4.0
TOPIC = "heapline-bench"
BACKLOG_MIN = 1 << 39  # no bench reaches it


@dataclass(frozen=True, slots=True)
class Wanted:
    seconds: float
    size: int
    concurrency: int
    topic: str
    scratch: Path
    over_grpc: bool


def bench(
    seconds: Annotated[float, typer.Option("--seconds", help="For each measurement.", min=0.1, max=600)] = 2.0,
    size: Annotated[int, typer.Option("--size", help="Bytes of a message.", min=NUMBER, max=1 << 20)] = 256,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Coroutines.", min=1, max=4096)] = 64,
    topic: Annotated[str, typer.Option("--topic", help="Made for the bench and deleted after it.")] = TOPIC,
    data: Annotated[
        Path | None, typer.Option("--data", help="No server: the queue in this process, in a scratch directory here.")
    ] = None,
    scratch: Annotated[
        Path, typer.Option("--scratch", help="Where the bare disk is measured: best on the server's disk.")
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    to: ToOption = TARGET,
    key_file: KeyFileOption = None,
    ca: CaOption = None,
) -> None:
    """Measure a server in some seconds, next to what the bare machine does.

    Example:  [cyan]heapline bench[/cyan]

    The engine alone, on a disk of your choice:  [cyan]heapline bench --data /mnt/fast[/cyan]

    It uses a topic of its own, which must not exist, and deletes it. Whatever
    else the server does meanwhile is slowed down, and slows this down: the
    figures are of this machine now, not of Heapline in general.
    """
    wanted = Wanted(seconds, size, concurrency, topic, scratch if data is None else data, data is None)
    if data is not None and not data.is_dir():
        raise BadRequest(f"there is no directory {str(data)!r}: name one on the disk that shall be measured")
    work = _on_server(wanted, to, key_file, ca) if data is None else _embedded(wanted, data)
    try:
        report: Report = run_loop(_until_told(work))
    except asyncio.CancelledError:
        raise typer.Exit(130) from None
    if json:
        print(json_module.dumps(as_json(report)))
    else:
        make_console().print(as_table(report))


async def _until_told(work: Coroutine[Any, Any, Report]) -> Report:
    """Ctrl-C and SIGTERM end it, and what it made is deleted before it ends."""
    running = asyncio.ensure_future(work)
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, running.cancel)
    return await running


async def _on_server(wanted: Wanted, to: str, key_file: Path | None, ca: Path | None) -> Report:
    settings = settle(to, key_file, ca, CALL_SECONDS)
    async with connect(settings) as hl:
        try:
            return await _measure(hl, wanted, f"server {settings.where.servers}")
        except HeaplineError as error:
            raise await advised(error, hl, settings.where) from None


async def _embedded(wanted: Wanted, data: Path) -> Report:
    directory = tempfile.mkdtemp(prefix="heapline-bench-", dir=data)
    try:
        async with open_embedded(directory) as hl:
            return await _measure(hl, wanted, "in this process")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _measure(hl: Broker, wanted: Wanted, where: str) -> Report:
    """Baselines are measured half before and half after the loads: the machine may be busier at one end."""
    report = Report(where, wanted.size, wanted.concurrency, wanted.seconds)
    loads = Loads(hl, wanted.topic, wanted.size, wanted.concurrency, wanted.seconds)
    with progress_bar(make_console(stderr=True)) as bar:
        async with _own_topic(hl, wanted.topic):
            before = await _baselines(wanted, loads.batch, bar)
            for index, name in enumerate(loads.names):
                report.rows.append(await _shown(bar, name, loads.run(index), loads))
                await hl.purge(wanted.topic)
        after = await _baselines(wanted, loads.batch, bar)
    single, batch, *bare = [a.plus(b) for a, b in zip(before, after, strict=True)]
    report.rows += [single, batch, *bare]
    one = bare[0] if bare else single
    beside = (batch.name, one.name, batch.name, one.name, single.name)
    report.beside = dict(zip(loads.names, beside, strict=True))
    report.by_time = {loads.names[-1]}
    return report


async def _baselines(wanted: Wanted, batch: int, bar: Progress) -> list[Measured]:
    seconds, found = min(wanted.seconds, BASELINE_SECONDS_MAX) / 2, []
    for messages in (1, batch):
        name = f"fsynced writes of {messages}"
        work = asyncio.to_thread(appends, wanted.scratch, name, wanted.size, messages, seconds)
        found.append(await _shown(bar, name, work))
    if wanted.over_grpc:
        name = "bare gRPC calls"
        found.append(await _shown(bar, name, bare_calls(name, wanted.size, wanted.concurrency, seconds)))
    return found


@contextlib.asynccontextmanager
async def _own_topic(hl: Broker, topic: str) -> AsyncIterator[None]:
    """A topic that did not exist. Making one that does is no error if it has the same settings, so this has a limit
    that no other has: whoever was first, an earlier or another bench too, is told from us."""
    making = asyncio.ensure_future(hl.create_topic(topic, max_backlog=BACKLOG_MIN + random.randrange(BACKLOG_MIN)))
    try:
        await asyncio.shield(making)
    except asyncio.CancelledError:  # the server may have made it all the same
        await making
        await hl.delete_topic(topic)
        raise
    except TopicExists:
        raise BadRequest(
            f"topic {topic!r} exists, and bench works on none but its own: give another name with --topic. If an "
            f"earlier bench was killed: heapline topic delete {topic}"
        ) from None
    try:
        yield
    finally:
        try:
            await hl.delete_topic(topic)
        except UnavailableError as error:
            raise UnavailableError(
                f"the bench's topic {topic!r} could not be deleted ({error}). When the server is back, run "
                f"heapline topic delete {topic}"
            ) from None


async def _shown(bar: Progress, name: str, work: Awaitable[Measured], loads: Loads | None = None) -> Measured:
    """What is being measured, and how many messages went through so far."""
    task = bar.add_task(name, total=None)
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            await asyncio.wait((running,), timeout=TICK)
            bar.update(task, completed=loads.drive.messages if loads else 0)
    finally:
        bar.remove_task(task)
        if not running.done():
            running.cancel()
            await asyncio.wait((running,))
    return running.result()
