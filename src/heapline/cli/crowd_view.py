"""How `heapline assign watch` shows a crowd: a live screen, also of 80 × 24 letters, plain lines, or JSON.

Asks nobody and decides nothing: it is given looks, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from heapline.assign.overview import Look, Move, Overview, Seat
from heapline.cli.present import count

STYLES = {"live": "green", "released": "yellow", "ended": "red", "barred": "red", "gone": "dim"}
MOVES_SHOWN = 5
AROUND = 9  # lines of a screen that are no workers: head, names, moves, rules
MOVES_KEPT = 1000
LATE = 3.0  # seconds without a heartbeat from which on it is shown


class Screen:
    """One look, made to fit whatever terminal it is printed on."""

    def __init__(self, bucket: str, seen: Overview, moved: Sequence[Move] = (), ages: dict[str, float] | None = None,
                 trouble: str = "") -> None:  # fmt: skip
        self._bucket, self._seen, self._moved, self._ages, self._trouble = bucket, seen, moved, ages or {}, trouble

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        room = max(3, height - AROUND) if console.is_terminal else len(self._seen.workers)
        yield Group(self._head(), self._workers(room), *self._last_moves())

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(40, options.max_width)

    def _head(self) -> Text:
        seen = self._seen
        leader = f"led by {seen.leader} (epoch {seen.epoch})" if seen.leader else "nobody leads"
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(self._bucket, "bold")
        head.append(f"  version {seen.version} {seen.lifecycle.replace('_', ' ')}  {leader}\n")
        live = sum(seat.standing == "live" for seat in seen.workers)
        head.append(f"{count(live)} workers, {count(seen.partition_count)} partitions")
        if seen.unheld:
            head.append(f", {count(len(seen.unheld))} held by nobody now", "yellow")
        if self._trouble:
            head.append(f"  {self._trouble}", "red")
        return head

    def _workers(self, room: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
        table.add_column("worker", no_wrap=True)
        table.add_column("is", no_wrap=True)
        table.add_column("held", justify="right", no_wrap=True)
        table.add_column("weight", justify="right", no_wrap=True)
        table.add_column("moving", no_wrap=True)
        table.add_column("partitions", no_wrap=True, overflow="ellipsis", ratio=1)
        seats = self._seen.workers
        shown = seats if len(seats) <= room else seats[: room - 1]
        for seat in shown:
            table.add_row(*self._row(seat))
        if len(shown) < len(seats):
            table.add_row(Text(f"and {len(seats) - len(shown)} more", "dim"))
        return table

    def _row(self, seat: Seat) -> list[Text]:
        standing = Text(seat.standing, STYLES.get(seat.standing, ""))
        if seat.standing == "live" and (age := self._ages.get(seat.worker, 0.0)) >= LATE:
            standing = Text(f"silent {age:.0f} s", "yellow")
        moving = Text()
        if seat.leaving:
            moving.append(f"-{len(seat.leaving)} ", "yellow")
        if seat.coming:
            moving.append(f"+{len(seat.coming)}", "cyan")
        return [
            Text(("* " if seat.leads else "  ") + seat.worker, "bold" if seat.leads else ""), standing,
            Text(count(len(seat.partitions))), Text(count(seat.weight)), moving,
            Text(" ".join(seat.partitions), "dim"),
        ]  # fmt: skip

    def _last_moves(self) -> list[Text]:
        if not self._moved:
            return []
        lines = [Text(f"last moves, of {count(len(self._moved))}:", "dim")]
        return lines + [
            Text(f"  {move_text(move)}", no_wrap=True, overflow="ellipsis") for move in self._moved[-MOVES_SHOWN:]
        ]


def move_text(move: Move) -> str:
    """
    >>> move_text(Move("tool1.a", "worker-0", "worker-2", 7))
    'tool1.a: worker-0 → worker-2, fence 7'
    """
    if not move.target:
        return f"{move.partition}: {move.source} → nobody"
    return f"{move.partition}: {move.source or 'nobody'} → {move.target}, fence {move.fence}"


class Shown(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, look: Look) -> None: ...


class LiveScreen:
    """The terminal's own screen, which comes back as it was."""

    def __init__(self, console: Console, bucket: str, clock: Callable[[], float]) -> None:
        self._bucket, self._clock = bucket, clock
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._moved: deque[Move] = deque(maxlen=MOVES_KEPT)
        self._beats: dict[str, tuple[int, float]] = {}
        self._seen = Overview()

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, look: Look) -> None:
        self._moved.extend(look.moved)
        self._seen = look.seen or self._seen
        screen = Screen(self._bucket, self._seen, list(self._moved), self._ages(), look.trouble)
        self._live.update(screen, refresh=True)

    def _ages(self) -> dict[str, float]:
        """Seconds since each worker's key was seen to change."""
        now = self._clock()
        for seat in self._seen.workers:
            if self._beats.get(seat.worker, (-1, 0.0))[0] != seat.revision:
                self._beats[seat.worker] = (seat.revision, now)
        return {worker: now - at for worker, (_, at) in self._beats.items()}


class PlainLines:
    """For a file or a pipe: the crowd once, then a line for each move."""

    def __init__(self, console: Console, bucket: str) -> None:
        self._console, self._bucket = console, bucket
        self._is_first = True
        self._trouble = ""

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, look: Look) -> None:
        if look.trouble and look.trouble != self._trouble:
            self._console.print(Text(look.trouble))
        self._trouble = look.trouble
        if look.seen is not None and self._is_first:
            self._is_first = False
            self._console.print(Screen(self._bucket, look.seen))
        for move in look.moved:
            self._console.print(Text(move_text(move)))


class JsonLines:
    """A line for each change; a heartbeat alone is none."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, look: Look) -> None:
        if look.seen is None:
            sys.stderr.write(look.trouble + "\n")
            return
        shown = look.seen.to_dict()
        compared = json.dumps({**shown, "workers": [{**seat, "revision": 0} for seat in shown["workers"]]})
        if look.moved or compared != self._last:
            line = {**shown, "moves": [_move_dict(move) for move in look.moved]}
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            sys.stdout.flush()
        self._last = compared


def _move_dict(move: Move) -> dict[str, Any]:
    return {"partition": move.partition, "from": move.source, "to": move.target, "fence": move.fence}
