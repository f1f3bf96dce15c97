"""`heapline bench`: measure a server, or the engine in this process, next to the bare machine.

It uses a topic of its own, which it creates before and deletes after the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.box import ROUNDED
from rich.progress import Progress
from rich.table import Table

from heapline.cli.bench.load import NUMBER_BYTES, Loads, Measurement, bare_calls, fsynced_writes
from heapline.cli.connection import Settings, connected, settle
from heapline.cli.options import takes
from heapline.cli.output import Output, count, make_console, millis, not_a_directory, progress_bar
from heapline.cli.serve import run_fast
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, TopicExists, UnavailableError
from heapline.engine import open as open_embedded

REFRESH_SECONDS = 0.1
BASELINE_SECONDS_MAX = 4.0
TOPIC = "heapline-bench"
BACKLOG_MIN = 1 << 39  # larger than any bench
CAPTION = """\
Times are of one call; of a full cycle (enqueue, pop, ack); of a delivery from \
its due time to its arrival at a waiting consumer. Compared: the rate as a multiple \
of the baseline's rate in the same run; for a delivery, its median time."""
PERCENTS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command that select what is measured."""

    seconds: Annotated[float, "Seconds per measurement.", Meta(ge=0.1, le=600)] = 2.0
    size: Annotated[int, "Bytes per message.", Meta(ge=NUMBER_BYTES, le=1 << 20)] = 256
    concurrency: Annotated[int, "-c", "Number of coroutines.", Meta(ge=1, le=4096)] = 64
    topic: Annotated[str, "Topic that is created for the bench and deleted after it."] = TOPIC
    data: Annotated[Path | None, "Measure the engine in this process, in a scratch directory here; no server."] = None
    scratch: Annotated[Path, "Directory where the bare disk is measured; best on the server's disk."] = Path()


@takes(plan=Plan, out=Output, server=settle)
def bench(plan: Plan, out: Output, server: Settings) -> None:
    """Measure the speed of a server, next to the bare machine.

    Example:  [cyan]heapline bench[/cyan]

    The engine alone, on a disk of your choice:  [cyan]heapline bench --data /mnt/fast[/cyan]

    The bench uses a topic of its own, which must not exist, and deletes it. It slows down
    everything else that the server does, and is slowed down by it: the numbers are of
    this machine now, not of Heapline in general.
    """
    if plan.data is not None and not plan.data.is_dir():
        raise BadRequest(f"{not_a_directory(plan.data)}; choose a directory on the disk to measure")
    work = _measure_server(plan, server) if plan.data is None else _measure_embedded(plan, plan.data)
    try:
        report: Report = run_fast(_until_interrupted(work))
    except asyncio.CancelledError:
        raise typer.Exit(130) from None
    out.row(report_json(report), report_table(report))


async def _until_interrupted(work: Coroutine[Any, Any, Report]) -> Report:
    """Cancel the work on Ctrl-C and SIGTERM; it deletes its topic before it ends."""
    running = asyncio.ensure_future(work)
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, running.cancel)
    return await running


async def _measure_server(plan: Plan, settings: Settings) -> Report:
    async with connected(settings) as hl:
        return await _measure(hl, plan, f"server {settings.servers}")


async def _measure_embedded(plan: Plan, data: Path) -> Report:
    directory = tempfile.mkdtemp(prefix="heapline-bench-", dir=data)
    try:
        async with open_embedded(directory) as hl:
            return await _measure(hl, plan, "in this process")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _measure(hl: Broker, plan: Plan, where: str) -> Report:
    """Measure baselines half before and half after the loads, because the machine may be busier at one end."""
    report = Report(where, plan.size, plan.concurrency, plan.seconds)
    loads = Loads(hl, plan.topic, plan.size, plan.concurrency, plan.seconds)
    with progress_bar(make_console(stderr=True)) as bar:
        async with own_topic(hl, plan.topic):
            before = await _baselines(plan, loads.batch, bar)
            for index, name in enumerate(loads.names):
                report.rows.append(await _with_progress(bar, name, loads.run(index), loads))
                await hl.purge(plan.topic)
        after = await _baselines(plan, loads.batch, bar)
    single, batch, *bare = [a.plus(b) for a, b in zip(before, after, strict=True)]
    report.rows += [single, batch, *bare]
    one = bare[0] if bare else single
    compared = (batch.name, one.name, batch.name, one.name, single.name)
    report.baselines = dict(zip(loads.names, compared, strict=True))
    report.by_time = {loads.names[-1]}
    return report


async def _baselines(plan: Plan, batch: int, bar: Progress) -> list[Measurement]:
    seconds, found = min(plan.seconds, BASELINE_SECONDS_MAX) / 2, []
    for messages in (1, batch):
        name = f"fsynced writes of {messages}"
        work = asyncio.to_thread(fsynced_writes, plan.data or plan.scratch, name, plan.size, messages, seconds)
        found.append(await _with_progress(bar, name, work))
    if plan.data is None:
        name = "bare TCP calls"
        found.append(await _with_progress(bar, name, bare_calls(name, plan.size, plan.concurrency, seconds)))
    return found


@contextlib.asynccontextmanager
async def own_topic(hl: Broker, topic: str) -> AsyncIterator[None]:
    """Create a topic that does not exist, and delete it afterwards.

    Creating an existing topic with equal settings is not an error. So this topic gets a random limit that no other
    topic has, which also detects the topic of another bench.
    """
    creating = asyncio.ensure_future(hl.create_topic(topic, max_backlog=BACKLOG_MIN + random.randrange(BACKLOG_MIN)))
    try:
        await asyncio.shield(creating)
    except asyncio.CancelledError:  # the server may have created it nevertheless
        await creating
        await hl.delete_topic(topic)
        raise
    except TopicExists:
        raise BadRequest(
            f"topic {topic!r} already exists, and bench uses only a topic of its own; choose another name with "
            f"--topic. If an earlier bench was killed: heapline topic delete {topic}"
        ) from None
    try:
        yield
    finally:
        try:
            await hl.delete_topic(topic)
        except UnavailableError as error:
            raise UnavailableError(
                f"cannot delete the bench's topic {topic!r} ({error}); when the server is back, run "
                f"heapline topic delete {topic}"
            ) from None


async def _with_progress(
    bar: Progress, name: str, work: Awaitable[Measurement], loads: Loads | None = None
) -> Measurement:
    """Show what is being measured, and how many messages were processed so far."""
    task = bar.add_task(name, total=None)
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            await asyncio.wait((running,), timeout=REFRESH_SECONDS)
            bar.update(task, completed=loads.drive.messages if loads else 0)
    finally:
        bar.remove_task(task)
        if not running.done():
            running.cancel()
            await asyncio.wait((running,))
    return running.result()


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    where: str
    size: int
    concurrency: int
    seconds: float
    rows: list[Measurement] = field(default_factory=list)
    baselines: dict[str, str] = field(default_factory=dict)  # name of a load -> name of its baseline
    by_time: set[str] = field(default_factory=set)  # loads that are compared by medians, not by rates

    def ratio(self, load: Measurement) -> float | None:
        """Return the load's rate, or its median time, as a multiple of its baseline's."""
        base = next((row for row in self.rows if row.name == self.baselines.get(load.name)), None)
        if base is None:
            return None
        if load.name in self.by_time:
            median, bare = load.ms(50), base.ms(50)
            return None if not bare or median is None else median / bare
        return load.rate * load.calls / base.rate if base.rate else None


def report_table(report: Report) -> Table:
    """Return a table for 80 columns, in which a load names its baseline by a letter."""
    title = f"{report.where}: messages of {count(report.size)} bytes, {report.concurrency} coroutines"
    table = Table(title=title, title_justify="left", box=ROUNDED, caption=CAPTION, caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("messages/s", "p50", "p95", "p99", "compared"):
        table.add_column(name, justify="right", no_wrap=True)
    baselines = [row for row in report.rows if row.is_baseline]
    letters = {row.name: letter for row, letter in zip(baselines, "ABCDEFG", strict=False)}
    for row in report.rows:
        if not row.is_baseline:
            rate = "" if row.name in report.by_time else f"[bold green]{count(round(row.rate))}[/]"
            table.add_row(row.name, rate, *_times(row), _comparison(report, row, letters))
    table.add_section()
    for row in baselines:
        table.add_row(f"{letters[row.name]}  {row.name}", count(round(row.rate)), *_times(row), "", style="dim")
    return table


def _times(row: Measurement) -> list[str]:
    return [millis(row.ms(percent)) for percent in PERCENTS]


def _comparison(report: Report, row: Measurement, letters: dict[str, str]) -> str:
    ratio = report.ratio(row)
    if ratio is None:
        return ""
    times = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    return f"{times}× {letters[report.baselines[row.name]]}"


def report_json(report: Report) -> dict[str, Any]:
    def row_json(row: Measurement) -> dict[str, Any]:
        fields: dict[str, Any] = {"name": row.name, "messages": row.messages, "seconds": round(row.seconds, 3)}
        fields["rate"] = round(row.rate, 1)
        fields |= {f"p{percent}_ms": _rounded(row.ms(percent)) for percent in PERCENTS}
        fields["of_each"] = row.each
        if row.name in report.baselines:
            kind = "time" if row.name in report.by_time else "rate"
            baseline = {"name": report.baselines[row.name], "of": kind, "ratio": _rounded(report.ratio(row))}
            fields["baseline"] = baseline
        return fields

    settings = {name: getattr(report, name) for name in ("where", "size", "concurrency", "seconds")}
    loads = [row_json(row) for row in report.rows if not row.is_baseline]
    return {**settings, "loads": loads, "baselines": [row_json(row) for row in report.rows if row.is_baseline]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
