"""`heapline replay read|start|list|show|cancel`: the stream of a topic once more, to the terminal or into a topic."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.text import Text

from heapline.broker import Broker
from heapline.cli.connection import over_network
from heapline.cli.messages import ago, clock, harmless, preview, print_json
from heapline.cli.present import columns_table, count, facts_table, make_console, progress_bar
from heapline.cli.units import duration, moment, pair, past
from heapline.streams import Place, ReplayFilter, ReplayInfo, StreamMessage
from heapline.wire.json_replays import StreamRowTold
from heapline.wire.json_shapes import shown

LOOK_SECONDS = 0.2  # between two looks at a replay that is followed
WHICH, HOW = "Which rows", "How they go in"
_OFFSETS = re.compile(r"\d+:\d+(,\d+:\d+)*\Z")


def place(text: str) -> Any:
    """
    >>> place("latest"), place("120"), place("0:120,3:7")
    ('latest', 120, {0: 120, 3: 7})
    """
    text = str(text).strip()
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if _OFFSETS.match(text):
        return {int(p): int(offset) for p, _, offset in (part.partition(":") for part in text.split(","))}
    try:
        return past(text)
    except typer.BadParameter:
        raise typer.BadParameter(
            f"{text!r} is no place in the log: write earliest, latest, a moment as 2030-01-31T12:00:00Z, how long ago "
            "as 2h, an offset as 120, or offsets by partition as 0:120,1:80"
        ) from None


TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Whose stream: name, or namespace/name.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The replay's name.")]
StartOption = Annotated[
    Any, typer.Option(
        "--start", parser=place, metavar="PLACE", rich_help_panel=WHICH,
        help="From here: earliest, latest, a moment as 2030-01-31T12:00:00Z, how long ago as 2h, an offset as 120, or "
        "offsets by partition as 0:120,1:80.",
    ),
]  # fmt: skip
EndOption = Annotated[
    Any, typer.Option(
        "--end", parser=place, metavar="PLACE", rich_help_panel=WHICH,
        help="Up to here. Without it: to what is there now.",
    ),
]  # fmt: skip
PartitionOption = Annotated[
    list[int] | None, typer.Option("--partition", min=0, help="Only these; may be repeated.", rich_help_panel=WHICH)
]
FastOption = Annotated[
    bool, typer.Option(
        "--fast", rich_help_panel=WHICH,
        help="Only what still matters: each message once, as it stands now, and none that is gone.",
    ),
]  # fmt: skip
KeyOption = Annotated[str | None, typer.Option("--key", help="Of this partition key.", rich_help_panel=WHICH)]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="With this header; may be repeated.", rich_help_panel=WHICH),
]
LowOption = Annotated[
    int | None, typer.Option("--priority-min", help="Of this priority or more.", rich_help_panel=WHICH)
]
HighOption = Annotated[
    int | None, typer.Option("--priority-max", help="Of this priority or less.", rich_help_panel=WHICH)
]
RateOption = Annotated[float | None, typer.Option("--rate", help="At most so many a second.")]
InfoJsonOption = Annotated[bool, typer.Option("--json", help="For programs: one JSON object a replay.")]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Wait until it has ended, with a bar; fails if it failed.")
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""What was, again: read the stream of a topic, or put its messages into a topic once more.

    A message stands in the stream where it fell due, whatever became of it afterwards.

    Look at the last hour:  [cyan]heapline replay read jobs --start 1h[/cyan]

    Put it into another topic, each message exactly once:
    [cyan]heapline replay start monday jobs --into jobs-again --start 1h --follow[/cyan]
    """,
)


@app.command("read")
@over_network
async def read_command(
    hl: Broker, topic: TopicArgument, start: StartOption = "earliest", end: EndOption = None,
    partition: PartitionOption = None, fast: FastOption = False, key: KeyOption = None, header: HeaderOption = None,
    priority_min: LowOption = None, priority_max: HighOption = None, rate: RateOption = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="NAME", help="Go on where the last reading of this name was.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one JSON object a row, with the names of the HTTP API.")
    ] = False,
) -> None:  # fmt: skip
    """Read the stream of a topic. Nothing is leased and nothing changes.

    Example:  [cyan]heapline replay read jobs --start 2h --header kind=order -n 20[/cyan]
    """
    rows = hl.replay(
        topic, start=cast(Place, start), end=end, partitions=partition or None, mode="fast" if fast else "all",
        where=_filter(key, header, priority_min, priority_max), rate=rate, checkpoint=checkpoint,
    )  # fmt: skip
    console, number = make_console(), 0
    async with contextlib.aclosing(cast(Any, rows)):
        async for row in cast(AsyncIterator[StreamMessage], rows):
            if number == limit:
                break
            number += 1
            if as_json:
                print_json(_told(row))
            else:
                console.print(_line(row))
    if not as_json and not number:
        console.print(f"no rows of [bold]{escape(topic)}[/bold] match")


@app.command("start")
@over_network
async def start_command(
    hl: Broker, name: NameArgument, topic: TopicArgument,
    into: Annotated[
        str | None, typer.Option("--into", metavar="TOPIC", help="Into this topic. Without it: the same.")
    ] = None,
    start: StartOption = "earliest", end: EndOption = None, partition: PartitionOption = None,
    fast: FastOption = False, key: KeyOption = None, header: HeaderOption = None, priority_min: LowOption = None,
    priority_max: HighOption = None, rate: RateOption = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="With this priority, not their own.", rich_help_panel=HOW)
    ] = None,
    delay: Annotated[
        float | None, typer.Option(
            "--delay", parser=duration, metavar="DURATION", rich_help_panel=HOW, help="Due so long after they go in.",
        ),
    ] = None,
    deliver_at: Annotated[
        datetime | None, typer.Option(
            "--deliver-at", parser=moment, metavar="WHEN", rich_help_panel=HOW, help="Due at this moment.",
        ),
    ] = None,
    keep_due: Annotated[
        bool, typer.Option("--keep-due", rich_help_panel=HOW, help="With --fast: what waits for its time waits on.")
    ] = False,
    follow: FollowOption = False, as_json: InfoJsonOption = False,
) -> None:  # fmt: skip
    """Put the messages of a stream into a topic, each exactly once; the server does it, also over restarts.

    A message says in its headers where it came from. The same command again gets the same replay; but "an hour ago" is
    another moment each time, so for that write --start 2030-01-31T12:00:00Z.

    Example:  [cyan]heapline replay start monday jobs --into jobs-again --start 1h --rate 500 --follow[/cyan]
    """
    info = await hl.start_replay(
        name, topic, into=into, start=cast(Place, start), end=end, partitions=partition or None,
        mode="fast" if fast else "all", where=_filter(key, header, priority_min, priority_max), rate=rate,
        priority=priority, delay=delay, deliver_at=deliver_at, keep_due=keep_due,
    )  # fmt: skip
    await _tell(hl, info, follow, as_json)


@app.command("list")
@over_network
async def list_command(hl: Broker, as_json: InfoJsonOption = False) -> None:
    """The replays into topics: those that run, and those that ended of late.

    Example:  [cyan]heapline replay list[/cyan]
    """
    infos = await hl.list_replays()
    if as_json:
        for info in infos:
            print_json(info)
    elif infos:
        rows = [
            (info.name, info.source, info.into, _state(info), f"{info.done_share:.0%}", count(info.replayed),
             count(info.skipped), ago(info.started_at))
            for info in infos
        ]  # fmt: skip
        names = ("name", "from", "into", "state", "done", "replayed", "skipped", "started")
        make_console().print(columns_table("", names, rows, right=(4, 5, 6)))
    else:
        make_console().print("no replays: [cyan]heapline replay start --help[/cyan] tells how to begin one")


@app.command("show")
@over_network
async def show_command(
    hl: Broker, name: NameArgument, follow: FollowOption = False, as_json: InfoJsonOption = False
) -> None:
    """How far a replay into a topic is, and what it waits for, if it does.

    Example:  [cyan]heapline replay show monday --follow[/cyan]
    """
    await _tell(hl, await hl.get_replay(name), follow, as_json)


@app.command("cancel")
@over_network
async def cancel_command(hl: Broker, name: NameArgument, as_json: InfoJsonOption = False) -> None:
    """End a replay into a topic. What is in the topic stays there.

    Example:  [cyan]heapline replay cancel monday[/cyan]
    """
    await _tell(hl, await hl.cancel_replay(name), False, as_json)


async def _tell(hl: Broker, info: ReplayInfo, follow: bool, as_json: bool) -> None:
    if follow:
        info = await _follow(hl, info)
    if as_json:
        print_json(info)
    else:
        make_console().print(_facts(info))
    if follow and info.state == "failed":
        raise typer.Exit(1)


async def _follow(hl: Broker, info: ReplayInfo) -> ReplayInfo:
    with progress_bar(make_console(stderr=True)) as bar:
        whole = sum(info.ends[p] - start for p, start in info.starts.items())
        task = bar.add_task(escape(info.name), total=whole)
        while True:
            done = sum(info.positions[p] - start for p, start in info.starts.items())
            waits = f" (waits: {info.error})" if info.error and info.state == "running" else ""
            bar.update(task, completed=done, description=escape(info.name + waits))
            if info.state != "running":
                return info
            await asyncio.sleep(LOOK_SECONDS)
            info = await hl.get_replay(info.name)


def _state(info: ReplayInfo) -> str:
    return "waits" if info.state == "running" and info.error else info.state


def _facts(info: ReplayInfo) -> Any:
    where = ", ".join(f"{p} at {info.positions[p]} of {start}–{info.ends[p]}" for p, start in info.starts.items())
    return facts_table(f"replay {escape(info.name)}", [
        ("state", f"[bold]{_state(info)}[/bold], {info.done_share:.0%} of the log is read"),
        ("from", f"{escape(info.source)}" + (" (fast)" if info.mode == "fast" else "")), ("into", escape(info.into)),
        ("replayed", "1 message" if info.replayed == 1 else f"{count(info.replayed)} messages"),
        ("skipped", "1 row" if info.skipped == 1 else f"{count(info.skipped)} rows"),
        ("partitions", where),
        *([("rate", f"{info.rate:g} a second")] if info.rate is not None else []),
        *([("started", f"{clock(info.started_at)} ({ago(info.started_at)})")] if info.started_at else []),
        *([("waits for" if info.state == "running" else "because", harmless(info.error))] if info.error else []),
    ])  # fmt: skip


def _filter(key: str | None, headers: list[str] | None, low: int | None, high: int | None) -> ReplayFilter | None:
    where = ReplayFilter(key=key, headers=dict(map(pair, headers or [])), priority_min=low, priority_max=high)
    return None if where == ReplayFilter() else where


def _told(row: StreamMessage) -> StreamRowTold:
    return StreamRowTold(
        message_id=row.message_id, id=str(row.id), partition=row.partition, offset=row.offset, priority=row.priority,
        enqueued_at=row.enqueued_at, key=row.key, fairness_key=row.fairness_key, headers=row.headers or None,
        **shown(row.payload, "text"),
    )  # fmt: skip


def _line(row: StreamMessage) -> Text:
    place = f"{row.partition}:{row.offset}".ljust(10)
    return Text.assemble((place, "dim"), (row.message_id, "bold"), f" priority {row.priority}  ", preview(row.payload))
