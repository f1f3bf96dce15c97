"""`heapline replay read|start|list|show|cancel`: read the stream of a topic again, or enqueue its messages again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, cast

import typer
from msgspec import Meta
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from heapline.cli.connection import NetworkGroup
from heapline.cli.message_view import ago, delivered_json, moment, preview
from heapline.cli.options import POSITION_HELP, Pair, Panel, Position, Seconds, Time, TopicName, Value, pair
from heapline.cli.output import (
    Output,
    bold,
    count,
    counted,
    facts_table,
    harmless,
    make_console,
    progress_bar,
)
from heapline.contract.broker import Broker
from heapline.contract.stream import ReplayFilter, ReplayInfo, StreamMessage

POLL_SECONDS = 0.2  # between two checks of a replay that is followed
ROWS, TARGET = Panel("Which rows"), Panel("How they are enqueued")
INFO_JSON = "one object per replay."

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to read: name, or namespace/name.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the replay.")]
FollowOption = Annotated[bool, "--follow -f", "Wait until the replay has ended; exit code 1 if it failed."]


_FAST_HELP = "Only current messages: each once, in its current state, without removed ones."


def _selection(
    start: Annotated[Position, f"First row: {POSITION_HELP}.", ROWS] = "earliest",
    end: Annotated[Position, "Position to stop before. Default: the end now.", ROWS] = None,
    partition: Annotated[list[int] | None, "Only this one; repeatable.", ROWS, Meta(ge=0)] = None,
    fast: Annotated[bool, _FAST_HELP, ROWS] = False,
    key: Annotated[str | None, "Only this partition key.", ROWS] = None,
    header: Annotated[list[Pair] | None, "Only with this; repeatable.", ROWS] = None,
    priority_min: Annotated[int | None, "Smallest priority.", ROWS] = None,
    priority_max: Annotated[int | None, "Largest priority.", ROWS] = None,
    allow_gaps: Annotated[bool, "Begin where the log does, though earlier rows were reclaimed.", ROWS] = False,
    rate: Annotated[float | None, "Maximum number of rows per second."] = None,
) -> dict[str, Any]:
    """Return the arguments of Broker.replay and start_replay that select rows."""
    headers = dict(map(pair, header or ()))
    where = ReplayFilter(key=key, headers=headers, priority_min=priority_min, priority_max=priority_max)
    return {
        "start": start,
        "end": end,
        "partitions": partition or None,
        "mode": "fast" if fast else "all",
        "where": None if where == ReplayFilter() else where,
        "rate": rate,
        "allow_gaps": allow_gaps,
    }


app = NetworkGroup(
    "replay",
    example="replay read jobs --start 1h",
    more="""The stream of a topic has one row for each message, at the position where the message became due.

    Enqueue the last hour in another topic, each message exactly once:
    [cyan]heapline replay start monday jobs --into jobs-again --start 1h --follow[/cyan]""",
)


@app.call(
    "read",
    example="jobs --start 2h --header kind=order -n 20",
    json="one object per row, with the names of the HTTP API.",
    selection=_selection,
)
async def read_command(
    hl: Broker,
    out: Output,
    selection: dict[str, Any],
    topic: TopicArgument,
    checkpoint: Annotated[str | None, "Continue where the last read with this name ended.", Value("NAME")] = None,
    limit: Annotated[int | None, "-n", "Maximum number of rows.", Meta(ge=1)] = None,
) -> None:
    """Read the stream of a topic. Nothing is leased or changed."""
    rows = hl.replay(topic, checkpoint=checkpoint, count=limit, **selection)
    number = 0
    async with contextlib.aclosing(cast(Any, rows)):
        async for row in cast(AsyncIterator[StreamMessage], rows):
            number += 1
            out.row(delivered_json(row, "offset"), _line(row))
    if not out.as_json and not number:
        out.console.print(f"{bold(topic)} has no matching rows")


@app.call(
    "start",
    example="monday jobs --into jobs-again --start 1h --rate 500 --follow",
    json=INFO_JSON,
    selection=_selection,
)
async def start_command(
    hl: Broker,
    out: Output,
    selection: dict[str, Any],
    name: NameArgument,
    topic: TopicArgument,
    into: Annotated[TopicName | None, "Target topic. Default: the same topic."] = None,
    priority: Annotated[int | None, "New priority of the messages.", TARGET] = None,
    delay: Annotated[Seconds | None, "Due this long after they are enqueued.", TARGET] = None,
    deliver_at: Annotated[Time | None, "Due at this time.", TARGET] = None,
    keep_due: Annotated[bool, "With --fast: delayed messages keep their due time.", TARGET] = False,
    limit: Annotated[int | None, "-n", "Maximum number of messages.", Meta(ge=1)] = None,
    follow: FollowOption = False,
) -> None:
    """Enqueue the messages of a stream again, each exactly once. The server does it, across restarts.

    The headers of a message say where it came from. Repeating the command returns the same replay. "An hour ago" means
    another time on each run, so use --start 2030-01-31T12:00:00Z to repeat it.
    """
    target = {"priority": priority, "delay": delay, "deliver_at": deliver_at, "keep_due": keep_due}
    info = await hl.start_replay(name, topic, into=into, count=limit, **selection, **target)  # type: ignore[arg-type]
    await _report(hl, out, info, follow)


@app.call("list", example="", json=INFO_JSON)
async def list_command(hl: Broker, out: Output) -> None:
    """List the replays that are running or have recently ended."""
    names = ("name", "from", "into", "state", "done", "replayed", "skipped", "started")
    empty = "there are no replays; see [cyan]heapline replay start --help[/cyan]"
    out.table(await hl.list_replays(), names, _cells, right=(4, 5, 6), empty=empty)


@app.call("show", example="monday --follow", json=INFO_JSON)
async def show_command(hl: Broker, out: Output, name: NameArgument, follow: FollowOption = False) -> None:
    """Show the progress of a replay, and what it waits for."""
    await _report(hl, out, await hl.get_replay(name), follow)


@app.call("cancel", example="monday", json=INFO_JSON)
async def cancel_command(hl: Broker, out: Output, name: NameArgument) -> None:
    """Cancel a replay. Messages that it has enqueued stay."""
    await _report(hl, out, await hl.cancel_replay(name), False)


async def _report(hl: Broker, out: Output, info: ReplayInfo, follow: bool) -> None:
    if follow:
        info = await _follow(hl, info)
    out.row(info, _facts(info))
    if follow and info.state == "failed":
        raise typer.Exit(1)


async def _follow(hl: Broker, info: ReplayInfo) -> ReplayInfo:
    with progress_bar(make_console(stderr=True)) as bar:
        total = sum(info.ends[p] - start for p, start in info.starts.items())
        task = bar.add_task(escape(info.name), total=total)
        while True:
            done = round(info.done_share * total)
            waiting = f" (waiting: {info.error})" if info.error and info.state == "running" else ""
            bar.update(task, completed=done, description=escape(info.name + waiting))
            if info.state != "running":
                return info
            await asyncio.sleep(POLL_SECONDS)
            info = await hl.get_replay(info.name)


def _state(info: ReplayInfo) -> str:
    return "waiting" if info.state == "running" and info.error else info.state


def _cells(info: ReplayInfo) -> tuple[str, ...]:
    done = f"{info.done_share:.0%}", count(info.replayed), count(info.skipped)
    return info.name, info.source, info.into, _state(info), *done, ago(info.started_at)


def _facts(info: ReplayInfo) -> Table:
    offsets = ", ".join(f"{p} at {info.positions[p]} of {start}–{info.ends[p]}" for p, start in info.starts.items())
    waits = info.state == "running"
    facts: list[tuple[str, str | Text | None]] = [
        ("state", f"[bold]{_state(info)}[/bold], {info.done_share:.0%} is done"),
        ("from", escape(info.source) + (" (fast)" if info.mode == "fast" else "")),
        ("into", escape(info.into)),
        ("replayed", counted(info.replayed, "message") + ("" if info.count is None else f" of {count(info.count)}")),
        ("skipped", counted(info.skipped, "row")),
        ("partitions", offsets),
        ("gaps", ", ".join(f"{p}: rows below {first} were reclaimed" for p, first in info.gaps.items()) or None),
        ("rate", None if info.rate is None else f"{info.rate:g} per second"),
        ("started", moment(info.started_at)),
        ("waiting for" if waits else "error", harmless(info.error or "")),
    ]
    return facts_table(f"replay {escape(info.name)}", facts)


def _line(row: StreamMessage) -> Text:
    at = f"{row.partition}:{row.offset}".ljust(10)
    return Text.assemble((at, "dim"), (row.message_id, "bold"), f" priority {row.priority}  ", preview(row.payload))
