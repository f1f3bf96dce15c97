"""`heapline demo`: fill a queue, kill its worker with SIGKILL halfway, and check that nothing is lost.

The worker is a process of its own (this module run with `python -m`) that has the directory open. It reports over a
pipe which messages it popped and which acks were answered. The ledger checks every delivery and every ack against
payloads, priorities and an order that are computed here from message numbers. It trusts nothing that the queue says.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.console import Console

import heapline
from heapline.cli.output import count, facts_table, make_console, progress_bar, rate, seconds
from heapline.journal import RealDisk
from heapline.journal.verify import verify

TOPIC = "demo"
BATCH = 1000
LEASE, LEASE_SMALL = 3.0, 1.0  # seconds that the dead worker's messages stay leased; a small demo waits less
MESSAGES_MIN = 100
WORKER_TIMEOUT = 60.0  # seconds without any sign of life from the worker
PRIORITIES = 1000
_SEED = 20_240_101


@dataclass(slots=True)
class Run:
    """Measurements of the demo, for the closing table."""

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
    messages: Annotated[int, "Number of messages.", Meta(ge=MESSAGES_MIN)] = 200_000,
    dir: Annotated[Path | None, "Directory for the queue; must not exist or be empty."] = None,
    keep: Annotated[bool, "Keep the directory, so that you can inspect it."] = False,
    serve: Annotated[bool, "Instead, serve a queue under a synthetic load until Ctrl-C, with its dashboard."] = False,
) -> None:
    """Watch a queue survive [bold]kill -9[/bold], in less than a minute.

    Fills a queue, lets a worker process take messages in order of priority, kills it halfway with SIGKILL, opens the
    directory again, takes the remaining messages, and checks every message.

    Example:  [cyan]heapline demo --messages 50000[/cyan]

    See a queue at work:  [cyan]heapline demo --serve[/cyan]

    Inspect it afterwards:  [cyan]heapline demo --keep --dir ./demo && heapline journal stats ./demo/data[/cyan]
    """
    console = make_console()
    directory, is_new = _directory(dir)
    if serve:
        _serve(directory, is_new, keep)
        return
    try:
        run, ledger = _play(console, directory, messages)
    finally:
        if not keep:
            shutil.rmtree(directory / "data", ignore_errors=True)
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
    console.print(_closing_table(run, ledger))
    if keep:
        console.print(f"The queue is kept; inspect it with:  heapline journal stats {directory / 'data'}")
    if run.faults:
        console.print(f"[bold red]FAILED: {'; '.join(run.faults)}[/bold red]")
        raise typer.Exit(1)
    console.print("[bold green]Nothing lost, nothing out of order, nothing delivered again after its ack.[/bold green]")


def _serve(directory: Path, is_new: bool, keep: bool) -> None:
    from heapline.cli.demo_load import serve_demo

    try:
        serve_demo(directory / "data")
    finally:
        if not keep:
            shutil.rmtree(directory if is_new else directory / "data", ignore_errors=True)


def _directory(wanted: Path | None) -> tuple[Path, bool]:
    """Return the directory of the demo, and whether the demo created it."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="heapline-demo-")), True
    is_new = not wanted.exists()
    wanted.mkdir(parents=True, exist_ok=True)
    if any(wanted.iterdir()):
        raise typer.BadParameter(f"{wanted} is not empty; choose a directory that does not exist")
    return wanted, is_new


def _play(console: Console, directory: Path, total: int) -> tuple[Run, Ledger]:
    data = str(directory / "data")
    # A small demo has several batches too, some of them after the kill.
    batch, lease = min(BATCH, max(10, total // 20)), LEASE if total >= 20 * BATCH else LEASE_SMALL
    run, ledger = Run(total, batch, lease), Ledger(priorities_of(total))
    console.print(f"[bold]1.[/bold] Enqueue {count(total)} messages of 256 bytes with random priorities into {data}")
    ids = asyncio.run(_fill(console, data, run, ledger))
    speed = rate(total, run.filled_in)
    console.print(
        f"   in {seconds(run.filled_in)}: {speed}, each batch of {count(batch)} fsynced before it was acknowledged"
    )
    console.print("[bold]2.[/bold] A worker process pops the most urgent first and acks; halfway it gets kill -9")
    pid = _work_and_kill(console, data, run, ledger)
    console.print(
        f"   process {pid} killed after {count(run.acked_at_kill)} answered acks, {seconds(run.worked_in)} of work"
    )
    console.print("[bold]3.[/bold] Open the directory again, as after any crash, and pop the rest")
    asyncio.run(_recover_and_drain(console, data, run, ledger, ids))
    console.print("[bold]4.[/bold] Check every message and every byte of the journal")
    report = verify(RealDisk(), f"{data}/topics/default/{TOPIC}.1")
    run.faults = ledger.faults() + [f"{d.path} is damaged at byte {d.offset}: {d.detail}" for d in report.damage]
    console.print(f"   {count(report.units)} units in {report.segments} segment(s): {len(report.damage)} damaged")
    return run, ledger


async def _fill(console: Console, data: str, run: Run, ledger: Ledger) -> list[int]:
    """Enqueue all messages. Return their ids by message number."""
    ids: list[int] = []
    async with heapline.open(data) as hl:
        # Without backoff the messages of the dead worker are redelivered as soon as their leases end.
        await hl.create_topic(TOPIC, backoff=heapline.Backoff(base=0.0))
        start = time.perf_counter()
        with progress_bar(console) as bar:
            task = bar.add_task("enqueued", total=run.total)
            for first in range(0, run.total, run.batch):
                numbers = range(first, min(first + run.batch, run.total))
                outgoing = [heapline.Outgoing(payload_of(n), priority=ledger.priorities[n]) for n in numbers]
                ids += [result.id for result in await hl.enqueue_batch(TOPIC, outgoing)]
                bar.advance(task, len(numbers))
        run.filled_in = time.perf_counter() - start
    return ids


def _work_and_kill(console: Console, data: str, run: Run, ledger: Ledger) -> int:
    """Start the worker, kill it halfway, and read everything that it reported before. Return its process id."""
    command = [sys.executable, "-m", "heapline.cli.demo", data, *map(str, (run.batch, run.lease, run.total))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as worker:
        try:
            assert worker.stdout is not None
            start = 0.0
            with progress_bar(console) as bar:
                task = bar.add_task("acked by the worker", total=run.total)
                for line in worker.stdout:
                    start = start or time.perf_counter()  # its startup does not count
                    if not line.endswith(b"\n"):
                        break  # cut off by the kill: does not count as reported
                    report = json.loads(line)
                    if "popped" in report:
                        ledger.popped(report["popped"], report["attempts"])
                    else:
                        ledger.acked(report["acked"])
                        bar.update(task, completed=(acked := ledger.acked_count))
                        if acked >= run.total // 2 and worker.poll() is None:
                            worker.kill()
            run.worked_in = time.perf_counter() - start
        finally:
            worker.kill()
    run.acked_at_kill = ledger.acked_count
    if not run.acked_at_kill:
        console.print(f"[bold red]the worker process ended unexpectedly with code {worker.returncode}[/bold red]")
        raise typer.Exit(1)
    return worker.pid


async def _recover_and_drain(console: Console, data: str, run: Run, ledger: Ledger, ids: list[int]) -> None:
    start = time.perf_counter()
    async with heapline.open(data) as hl:
        run.reopened_in = time.perf_counter() - start
        stats = await hl.stats(TOPIC)
        run.held_by_dead = stats.leased
        run.found = f"{count(stats.ready)} ready, {count(stats.leased)} still leased to the dead worker"
        console.print(f"   recovered in [bold]{seconds(run.reopened_in)}[/bold]: {run.found}")
        for number in ledger.in_doubt():
            if await _is_acked(hl, ids[number]):
                ledger.found_acked(number)
        start = time.perf_counter()
        with progress_bar(console) as bar:
            task = bar.add_task("the rest", total=run.total, completed=run.acked_at_kill)
            await _drain(hl, ledger, run, lambda n, what: bar.update(task, advance=n, description=what))
        run.drained_in = time.perf_counter() - start
    if run.held_by_dead:
        console.print(f"   its leases ended after {run.lease:.0f} s without an ack: those messages were redelivered")


async def _is_acked(hl: heapline.Broker, id: int) -> bool:
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
        show(len(messages), "the rest" if stats.ready else "waiting until the dead worker's leases end")
        if not (stats.ready or stats.leased or stats.delayed):
            return


def _closing_table(run: Run, ledger: Ledger) -> Any:
    def verdict(number: int) -> str:
        return f"[bold {'green' if not number else 'red'}]{count(number)}[/]"

    worked = f"{count(run.acked_at_kill)} in {seconds(run.worked_in)} ({rate(run.acked_at_kill, run.worked_in)})"
    rows = [
        ("enqueued", f"{count(run.total)} in {seconds(run.filled_in)} ({rate(run.total, run.filled_in)})"),
        ("popped and acked by the worker", worked),
        ("killed with SIGKILL", f"after {count(run.acked_at_kill)} answered acks of {count(run.total)}"),
        ("recovery", f"{seconds(run.reopened_in)}: {run.found}"),
        ("acked, but the response was lost", f"{count(sum(ledger.known_acked))} (recorded, so never delivered again)"),
        ("popped, but not acked by it", f"{count(ledger.redelivered)} (redelivered when their leases ended)"),
        ("popped and acked after recovery", f"{count(run.drained)} in {seconds(run.drained_in)}"),
        ("lost", verdict(ledger.lost)),
        ("out of order", verdict(ledger.out_of_order)),
        ("delivered again after an answered ack", verdict(ledger.after_ack)),
        ("payloads damaged", verdict(ledger.damaged)),
    ]
    return facts_table("Result", rows)


async def _worker(data: str, batch: int, lease: float, total: int) -> None:
    """Pop and ack until killed. The next pop runs while an ack is in flight.

    If it is killed late, it waits with the rest of the messages and with leases, so that there is something to recover.
    """

    async def ack(messages: list[heapline.Message], numbers: list[int]) -> None:
        lost: set[int] = set()
        try:
            await hl.ack(messages)
        except heapline.LeaseLost as error:
            lost.update(error.lost)
        _report({"acked": [n for n, m in zip(numbers, messages, strict=True) if m.id not in lost]})

    async with heapline.open(data) as hl:
        acking: asyncio.Task[None] | None = None
        popped = 0
        while messages := await hl.pop(TOPIC, batch, visibility=lease, holder="the worker", wait=WORKER_TIMEOUT):
            numbers = [number_of(m.payload) for m in messages]
            _report({"popped": numbers, "attempts": [m.attempts for m in messages]})
            if acking is not None:
                await acking
            if popped >= total * 3 // 4:
                await asyncio.sleep(WORKER_TIMEOUT)
            popped += len(messages)
            acking = asyncio.create_task(ack(messages, numbers))


def _report(event: dict[str, list[int]]) -> None:
    sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
    sys.stdout.flush()


# -- the ledger --------------------------------------------------------------------------------------------------------


def payload_of(number: int) -> bytes:
    """Return 256 bytes that are unique to a number, so that a swapped or damaged payload is detected."""
    head = number.to_bytes(8, "big")
    return head + blake2b(head, digest_size=62).digest() * 4


def number_of(payload: bytes) -> int:
    """Return the number of a message, or -1 if its payload is damaged."""
    number = int.from_bytes(payload[:8], "big")
    return number if payload == payload_of(number) else -1


def priorities_of(total: int) -> list[int]:
    draw = random.Random(_SEED)
    return [draw.randrange(PRIORITIES) for _ in range(total)]


@dataclass(slots=True)
class Ledger:
    """The deliveries of each message, and whether its ack was answered."""

    priorities: Sequence[int]
    delivered: list[int] = field(init=False)  # deliveries of each message
    answered: bytearray = field(init=False)  # 1 if the ack was answered
    known_acked: bytearray = field(init=False)  # 1 if an ack without response turned out to be recorded
    rank: list[int] = field(init=False)  # position in the order that priorities demand
    out_of_order: int = 0
    after_ack: int = 0  # deliveries of messages whose ack had been answered
    damaged: int = 0  # payloads that differ from what was enqueued
    redelivered: int = 0  # deliveries after the first
    _last_first: int = -1
    _last_redelivered: int = -1

    def __post_init__(self) -> None:
        total = len(self.priorities)
        self.delivered = [0] * total
        self.answered, self.known_acked = bytearray(total), bytearray(total)
        self.rank = [0] * total
        for rank, number in enumerate(sorted(range(total), key=lambda n: (self.priorities[n], n))):
            self.rank[number] = rank

    def popped(self, numbers: Iterable[int], attempts: Iterable[int]) -> None:
        """Record a batch. Ranks of first deliveries must increase, and so must ranks of redeliveries."""
        for number, attempt in zip(numbers, attempts, strict=True):
            if not 0 <= number < len(self.priorities):
                self.damaged += 1
                continue
            self.after_ack += self.answered[number] | self.known_acked[number]
            self.delivered[number] += 1
            rank = self.rank[number]
            if attempt == 1:
                self.out_of_order += rank <= self._last_first
                self._last_first = rank
            else:
                self.redelivered += 1
                self.out_of_order += rank <= self._last_redelivered
                self._last_redelivered = rank

    def acked(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.answered[number] = 1

    def found_acked(self, number: int) -> None:
        self.known_acked[number] = 1

    def in_doubt(self) -> list[int]:
        """Return the messages that were delivered and whose ack was not answered."""
        return [n for n, times in enumerate(self.delivered) if times and not self.answered[n]]

    @property
    def acked_count(self) -> int:
        return sum(self.answered)

    @property
    def lost(self) -> int:
        """Messages that were enqueued and never acked."""
        acks = zip(self.answered, self.known_acked, strict=True)
        return sum(1 for answered, known in acks if not (answered or known))

    def faults(self) -> list[str]:
        """Return all broken promises; empty if the queue kept them."""
        named = [
            (self.lost, "lost"),
            (self.out_of_order, "out of order"),
            (self.after_ack, "delivered again after their ack was answered"),
            (self.damaged, "with a damaged payload"),
        ]
        return [f"{number} message(s) {what}" for number, what in named if number]


if __name__ == "__main__":
    asyncio.run(_worker(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
