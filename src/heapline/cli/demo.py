"""`heapline demo`: a queue is filled, its worker killed with SIGKILL halfway, and nothing is lost.

The worker is a process of its own (this module run with `python -m`) that has the directory open; it tells over a
pipe what it popped and which acks were answered. Everything is judged by demo_ledger.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import heapline
from heapline.cli.demo_ledger import Ledger, number_of, payload_of, priorities_of
from heapline.cli.present import count, facts_table, make_console, progress_bar, rate, seconds
from heapline.journal import RealDisk, verify

TOPIC = "demo"
BATCH = 1000
LEASE, LEASE_SMALL = 3.0, 1.0  # seconds that what the dead worker held stays its own; a small demo waits less
MESSAGES_MIN = 100
GIVE_UP = 60.0  # seconds without any sign of life from the worker


@dataclass(slots=True)
class Run:
    """What the demo measured, for the closing table."""

    total: int
    batch: int
    lease: float
    filled_in: float = 0.0
    worked_in: float = 0.0
    acked_at_kill: int = 0
    reopened_in: float = 0.0
    found: str = ""
    held_by_dead: int = 0
    drained: int = 0
    drained_in: float = 0.0
    faults: list[str] = field(default_factory=list)


def demo(
    messages: Annotated[int, typer.Option(min=MESSAGES_MIN, help="How many messages to send through.")] = 200_000,
    dir: Annotated[Path | None, typer.Option(help="Where to put the queue; must not exist or be empty.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the directory behind, to look into it.")] = False,
) -> None:
    """See a queue survive [bold]kill -9[/bold], in well under a minute.

    Fills a queue, lets a worker process take messages out in order of priority, kills it halfway with SIGKILL, opens
    the directory again, takes out the rest, and checks every single message.

    Example:  [cyan]heapline demo --messages 50000[/cyan]

    Look inside afterwards:  [cyan]heapline demo --keep --dir ./demo && heapline journal stats ./demo[/cyan]
    """
    console = make_console()
    directory, made = _directory(dir)
    try:
        run, ledger = _play(console, directory, messages)
    finally:
        if not keep:
            shutil.rmtree(directory / "data", ignore_errors=True)
            if made:
                shutil.rmtree(directory, ignore_errors=True)
    console.print(_closing_table(run, ledger))
    if keep:
        console.print(f"The queue is kept: heapline journal stats {directory / 'data'}")
    if run.faults:
        console.print(f"[bold red]FAILED: {'; '.join(run.faults)}[/bold red]")
        raise typer.Exit(1)
    console.print("[bold green]Nothing lost, nothing out of order, nothing served twice after its ack.[/bold green]")


def _directory(wanted: Path | None) -> tuple[Path, bool]:
    """Where the demo plays, and whether it is ours to remove."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="heapline-demo-")), True
    made = not wanted.exists()
    wanted.mkdir(parents=True, exist_ok=True)
    if any(wanted.iterdir()):
        raise typer.BadParameter(f"{wanted} is not empty: name a directory that does not exist yet")
    return wanted, made


def _play(console: Console, directory: Path, total: int) -> tuple[Run, Ledger]:
    data = str(directory / "data")
    # A small demo has batches too, some of them after the kill.
    batch, lease = min(BATCH, max(10, total // 20)), LEASE if total >= 20 * BATCH else LEASE_SMALL
    run, ledger = Run(total, batch, lease), Ledger(priorities_of(total))
    console.print(f"[bold]1.[/bold] {count(total)} messages of 256 bytes, random priorities, into {data}")
    ids = asyncio.run(_fill(console, data, run, ledger))
    console.print(
        f"   in {seconds(run.filled_in)}: {rate(total, run.filled_in)}, each batch of {count(batch)} fsynced before it "
        "was answered"
    )
    console.print("[bold]2.[/bold] A worker process pops the most urgent first and acks; halfway it gets kill -9")
    pid = _work_and_kill(console, data, run, ledger)
    console.print(
        f"   process {pid} killed after {count(run.acked_at_kill)} answered acks, {seconds(run.worked_in)} of work"
    )
    console.print("[bold]3.[/bold] The directory is opened again, as after any crash; the rest is popped")
    asyncio.run(_recover_and_drain(console, data, run, ledger, ids))
    console.print("[bold]4.[/bold] Every message and every byte of the journal is checked")
    report = verify(RealDisk(), f"{data}/topics/default/{TOPIC}.1")
    run.faults = ledger.faults() + [f"{d.path} is damaged at byte {d.offset}: {d.detail}" for d in report.damage]
    console.print(f"   {count(report.units)} units in {report.segments} segment(s): {len(report.damage)} damaged")
    return run, ledger


async def _fill(console: Console, data: str, run: Run, ledger: Ledger) -> list[int]:
    """The ids by message number."""
    ids: list[int] = []
    async with heapline.open(data) as hl:
        # What a dead worker held comes back at once when its lease ends: the demo has no time for back-off.
        await hl.create_topic(TOPIC, backoff=heapline.Backoff(base=0.0))
        begun = time.perf_counter()
        with progress_bar(console) as bar:
            task = bar.add_task("messages in", total=run.total)
            for start in range(0, run.total, run.batch):
                numbers = range(start, min(start + run.batch, run.total))
                outgoing = [heapline.Outgoing(payload_of(n), priority=ledger.priorities[n]) for n in numbers]
                ids += [answer.id for answer in await hl.enqueue_batch(TOPIC, outgoing)]
                bar.advance(task, len(numbers))
        run.filled_in = time.perf_counter() - begun
    return ids


def _work_and_kill(console: Console, data: str, run: Run, ledger: Ledger) -> int:
    """Start the worker, hear what it does, kill it halfway, and hear what it had still said before."""
    command = [sys.executable, "-m", "heapline.cli.demo", data, str(run.batch), str(run.lease)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as worker:
        try:
            assert worker.stdout is not None
            begun = 0.0
            with progress_bar(console) as bar:
                task = bar.add_task("acked by the worker", total=run.total)
                for line in worker.stdout:
                    begun = begun or time.perf_counter()  # its start-up is not its work
                    if not line.endswith(b"\n"):
                        break  # the kill cut it off: what it would have said counts as not said
                    said = json.loads(line)
                    if "popped" in said:
                        ledger.popped(said["popped"], said["attempts"])
                    else:
                        ledger.acked(said["acked"])
                        bar.update(task, completed=(acked := ledger.acked_count))
                        if acked >= run.total // 2 and worker.poll() is None:
                            worker.kill()
            run.worked_in = time.perf_counter() - begun
        finally:
            worker.kill()
    run.acked_at_kill = ledger.acked_count
    if not run.acked_at_kill:
        console.print(f"[bold red]the worker process ended by itself with code {worker.returncode}[/bold red]")
        raise typer.Exit(1)
    return worker.pid


async def _recover_and_drain(console: Console, data: str, run: Run, ledger: Ledger, ids: list[int]) -> None:
    begun = time.perf_counter()
    async with heapline.open(data) as hl:
        run.reopened_in = time.perf_counter() - begun
        stats = await hl.stats(TOPIC)
        run.held_by_dead = stats.leased
        run.found = f"{count(stats.ready)} ready, {count(stats.leased)} still leased to the dead worker"
        console.print(f"   recovered in [bold]{seconds(run.reopened_in)}[/bold]: {run.found}")
        for number in ledger.in_doubt():
            if await _is_gone(hl, ids[number]):
                ledger.found_gone(number)
        begun = time.perf_counter()
        with progress_bar(console) as bar:
            task = bar.add_task("the rest", total=run.total, completed=run.acked_at_kill)
            await _drain(hl, ledger, run, lambda n, what: bar.update(task, advance=n, description=what))
        run.drained_in = time.perf_counter() - begun
    if run.held_by_dead:
        console.print(
            f"   its leases ended after {run.lease:.0f} s without an ack: those messages came again, as they must"
        )


async def _is_gone(hl: heapline.Broker, id: int) -> bool:
    try:
        return (await hl.get(TOPIC, id)).state == "acked"
    except heapline.MessageNotFound:
        return True


async def _drain(hl: heapline.Broker, ledger: Ledger, run: Run, show: Callable[[int, str], None]) -> None:
    while messages := await hl.pop(TOPIC, run.batch, visibility=30.0, wait=run.lease + 2):
        numbers = [number_of(m.payload) for m in messages]
        ledger.popped(numbers, [m.attempts for m in messages])
        await hl.ack(messages)
        ledger.acked(n for n in numbers if n >= 0)
        run.drained += len(messages)
        stats = await hl.stats(TOPIC)
        show(len(messages), "the rest" if stats.ready else "waiting for the dead worker's leases to end")
        if not (stats.ready or stats.leased or stats.delayed):
            return


def _closing_table(run: Run, ledger: Ledger) -> Any:
    def verdict(number: int) -> str:
        return f"[bold {'green' if not number else 'red'}]{count(number)}[/]"

    rows = [
        ("messages in", f"{count(run.total)} in {seconds(run.filled_in)} ({rate(run.total, run.filled_in)})"),
        ("popped and acked by the worker",
         f"{count(run.acked_at_kill)} in {seconds(run.worked_in)} ({rate(run.acked_at_kill, run.worked_in)})"),
        ("killed with SIGKILL", f"after {count(run.acked_at_kill)} answered acks of {count(run.total)}"),
        ("recovery", f"{seconds(run.reopened_in)}: {run.found}"),
        ("acked, but the answer died with it", f"{count(sum(ledger.gone))} (recorded: they rightly never came again)"),
        ("popped, but never acked by it", f"{count(ledger.again)} (came again when their leases ended)"),
        ("popped and acked after recovery", f"{count(run.drained)} in {seconds(run.drained_in)}"),
        ("lost", verdict(ledger.lost)),
        ("out of order", verdict(ledger.out_of_order)),
        ("delivered again after an answered ack", verdict(ledger.after_ack)),
        ("payloads damaged", verdict(ledger.damaged)),
    ]  # fmt: skip
    return facts_table("What happened", rows)


async def _worker(data: str, batch: int, lease: float) -> None:
    """The one that is killed: pops and acks for ever, the next pop under way while an ack is answered."""

    async def ack(messages: list[heapline.Message], numbers: list[int]) -> None:
        lost: set[int] = set()
        try:
            await hl.ack(messages)
        except heapline.LeaseLost as error:
            lost.update(error.lost)
        _say({"acked": [n for n, m in zip(numbers, messages, strict=True) if m.id not in lost]})

    async with heapline.open(data) as hl:
        under_way: asyncio.Task[None] | None = None
        while messages := await hl.pop(TOPIC, batch, visibility=lease, holder="the worker", wait=GIVE_UP):
            numbers = [number_of(m.payload) for m in messages]
            _say({"popped": numbers, "attempts": [m.attempts for m in messages]})
            if under_way is not None:
                await under_way
            under_way = asyncio.create_task(ack(messages, numbers))


def _say(what: dict[str, list[int]]) -> None:
    sys.stdout.write(json.dumps(what, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_worker(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
