"""`heapline assign watch`: show workers that share partitions and coordinate in NATS. Reads only.

A live screen fits any terminal from 40 columns. Without a terminal the output is plain lines, or JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from heapline.assign.overview import Move, Overview, Sample, WorkerView, moves, overview
from heapline.cli.main import CommandGroup
from heapline.cli.options import Env, JsonOption
from heapline.cli.output import count, make_console, print_json

if TYPE_CHECKING:
    from heapline.assign.kv import KV

CONNECT_WITHIN = 5.0  # seconds
POLL_SECONDS = 1.0  # between two reads when no change is reported
CANCEL_AGAIN = 2.0  # seconds until a task that survived its cancellation is cancelled again
DEBOUNCE_SECONDS = 0.1  # changes within this time are shown together
STYLES = {"live": "green", "released": "yellow", "ended": "red", "barred": "red", "gone": "dim"}
MOVES_SHOWN = 5
MOVES_KEPT = 1000
OTHER_LINES = 9  # lines of a screen that are not workers: head, column names, moves, rules
LATE_SECONDS = 3.0  # without a heartbeat, until a worker is shown as silent

app = CommandGroup("assign", example="assign watch --nats nats://127.0.0.1:4222")


@app.command(example="--nats nats://127.0.0.1:4222 --once --json")
def watch(
    nats: Annotated[
        str, "URL of a NATS server, or several separated by commas.", Env("HEAPLINE_NATS_URL")
    ] = "nats://127.0.0.1:4222",
    bucket: Annotated[str, "Bucket in which the workers coordinate."] = "heapline-assign",
    once: Annotated[bool, "Print the current state and exit."] = False,
    as_json: JsonOption = False,
) -> None:
    """Show workers live: their leader, their partitions, and what moves. Stop with Ctrl-C.

    The state may be a few seconds old: it is for people, not for programs that make decisions.
    """
    asyncio.run(_until_stopped(_watch(nats.split(","), bucket, once, as_json)))


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Stop on Ctrl-C. Cancel again while a library swallows the cancellation."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await _cancel(working)
    if not working.cancelled():
        working.result()


async def _cancel(task: asyncio.Future[None]) -> None:
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN)


async def _watch(servers: list[str], bucket: str, once: bool, as_json: bool) -> None:
    from heapline.assign.nats_kv import NatsKV

    console = make_console()
    view: View = PlainLines(console, bucket)
    if as_json:
        view = JsonLines()
    elif console.is_terminal and not once:
        view = LiveScreen(console, bucket, time.monotonic)
    async with await NatsKV.connect(servers, bucket=bucket, create=False, connect_within=CONNECT_WITHIN) as kv:
        with view:
            async with contextlib.aclosing(_samples(kv)) as samples:
                async for sample in samples:
                    view.show(sample)
                    if once and sample.seen is not None:
                        return


async def _samples(kv: KV) -> AsyncGenerator[Sample, None]:
    """Yield the state whenever it may have changed, and at least every second."""
    from heapline.assign.errors import ConnectionLost

    changed = asyncio.Event()
    listening = asyncio.create_task(_listen(kv, changed))
    before: Overview | None = None
    try:
        while True:
            changed.clear()
            try:
                state = overview(await kv.entries(""))
            except ConnectionLost as error:
                yield Sample(None, [], error.detail)
            else:
                yield Sample(state, [] if before is None else moves(before, state))
                before = state
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await changed.wait()
            await asyncio.sleep(DEBOUNCE_SECONDS)
    finally:
        await _cancel(listening)


async def _listen(kv: KV, changed: asyncio.Event) -> None:
    from heapline.assign.errors import ConnectionLost

    while True:
        with contextlib.suppress(ConnectionLost):
            async with contextlib.aclosing(kv.watch("")) as events:
                async for _ in events:
                    changed.set()
        await asyncio.sleep(POLL_SECONDS)


# -- views -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Screen:
    """One sample, laid out for the terminal that it is printed on."""

    bucket: str
    state: Overview
    moved: Sequence[Move] = ()
    ages: Mapping[str, float] = field(default_factory=dict)  # worker -> seconds since its last heartbeat
    trouble: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        lines = max(3, height - OTHER_LINES) if console.is_terminal else len(self.state.workers)
        yield Group(self._head(), self._workers(lines), *self._last_moves())

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(40, options.max_width)

    def _head(self) -> Text:
        state = self.state
        leader = f"led by {state.leader} (epoch {state.epoch})" if state.leader else "no leader"
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(self.bucket, "bold")
        head.append(f"  version {state.version} {state.lifecycle.replace('_', ' ')}  {leader}\n")
        live = sum(seat.standing == "live" for seat in state.workers)
        head.append(f"{count(live)} workers, {count(state.partition_count)} partitions")
        if state.unheld:
            head.append(f", {count(len(state.unheld))} without a worker", "yellow")
        if self.trouble:
            head.append(f"  {self.trouble}", "red")
        return head

    def _workers(self, lines: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
        for name in ("worker", "state", "held", "weight", "moving"):
            table.add_column(name, justify="right" if name in ("held", "weight") else "left", no_wrap=True)
        table.add_column("partitions", no_wrap=True, overflow="ellipsis", ratio=1)
        seats = self.state.workers
        shown = seats if len(seats) <= lines else seats[: lines - 1]
        for seat in shown:
            table.add_row(*self._row(seat))
        if len(shown) < len(seats):
            table.add_row(Text(f"and {len(seats) - len(shown)} more", "dim"))
        return table

    def _row(self, seat: WorkerView) -> list[Text]:
        state = Text(seat.standing, STYLES.get(seat.standing, ""))
        if seat.standing == "live" and (age := self.ages.get(seat.worker, 0.0)) >= LATE_SECONDS:
            state = Text(f"silent {age:.0f} s", "yellow")
        moving = Text()
        if seat.leaving:
            moving.append(f"-{len(seat.leaving)} ", "yellow")
        if seat.coming:
            moving.append(f"+{len(seat.coming)}", "cyan")
        name = Text(("* " if seat.leads else "  ") + seat.worker, "bold" if seat.leads else "")
        held, weight = Text(count(len(seat.partitions))), Text(count(seat.weight))
        return [name, state, held, weight, moving, Text(" ".join(seat.partitions), "dim")]

    def _last_moves(self) -> list[Text]:
        if not self.moved:
            return []
        lines = [Text(f"last moves, of {count(len(self.moved))}:", "dim")]
        return lines + [
            Text(f"  {move_text(move)}", no_wrap=True, overflow="ellipsis") for move in self.moved[-MOVES_SHOWN:]
        ]


def move_text(move: Move) -> str:
    """
    >>> move_text(Move("tool1.a", "worker-0", "worker-2", 7))
    'tool1.a: worker-0 → worker-2, fence 7'
    """
    if not move.target:
        return f"{move.partition}: {move.source} → none"
    return f"{move.partition}: {move.source or 'none'} → {move.target}, fence {move.fence}"


class View(contextlib.ExitStack):
    """Shows samples, one after the other."""

    def show(self, sample: Sample) -> None:
        raise NotImplementedError


class LiveScreen(View):
    """The terminal's alternate screen."""

    def __init__(self, console: Console, bucket: str, clock: Callable[[], float]) -> None:
        super().__init__()
        self._bucket, self._clock = bucket, clock
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._moved: deque[Move] = deque(maxlen=MOVES_KEPT)
        self._heartbeats: dict[str, tuple[int, float]] = {}  # worker -> revision of its key, and when it changed
        self._state = Overview()

    def __enter__(self) -> LiveScreen:
        self.enter_context(self._live)
        return self

    def show(self, sample: Sample) -> None:
        self._moved.extend(sample.moved)
        self._state = sample.seen or self._state
        screen = Screen(self._bucket, self._state, list(self._moved), self._ages(), sample.trouble)
        self._live.update(screen, refresh=True)

    def _ages(self) -> dict[str, float]:
        """Return the seconds since each worker's key changed."""
        now = self._clock()
        for seat in self._state.workers:
            if self._heartbeats.get(seat.worker, (-1, 0.0))[0] != seat.revision:
                self._heartbeats[seat.worker] = (seat.revision, now)
        return {worker: now - at for worker, (_, at) in self._heartbeats.items()}


class PlainLines(View):
    """For a file or a pipe: the state once, then one line per move."""

    def __init__(self, console: Console, bucket: str) -> None:
        super().__init__()
        self._console, self._bucket = console, bucket
        self._is_first = True
        self._trouble = ""

    def show(self, sample: Sample) -> None:
        if sample.trouble and sample.trouble != self._trouble:
            self._console.print(Text(sample.trouble))
        self._trouble = sample.trouble
        if sample.seen is not None and self._is_first:
            self._is_first = False
            self._console.print(Screen(self._bucket, sample.seen))
        for move in sample.moved:
            self._console.print(Text(move_text(move)))


class JsonLines(View):
    """One JSON line per change. A heartbeat alone is not a change."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, Any] = {}

    def show(self, sample: Sample) -> None:
        if sample.seen is None:
            sys.stderr.write(sample.trouble + "\n")
            return
        state = sample.seen.to_dict()
        compared = {**state, "workers": [{**seat, "revision": 0} for seat in state["workers"]]}
        if sample.moved or compared != self._last:
            names = {"partition": "partition", "from": "source", "to": "target", "fence": "fence"}
            moved = [{key: getattr(move, name) for key, name in names.items()} for move in sample.moved]
            print_json({**state, "moves": moved})
            sys.stdout.flush()
        self._last = compared
