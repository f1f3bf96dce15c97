"""`heapline schedule create|list|show|pause|resume|delete`: messages that are enqueued by the calendar."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from heapline.broker import Broker
from heapline.cli.asking import YesOption, ask
from heapline.cli.connection import over_network
from heapline.cli.messages import TopicArgument, ago, harmless, print_json, whole
from heapline.cli.present import columns_table, count, facts_table, make_console
from heapline.cli.units import duration, moment, pair, span
from heapline.model import EPOCH
from heapline.schedules import ScheduleInfo
from heapline.schedules.cron import cron_times
from heapline.wire.json_schedules import tell_schedule

WHEN, MESSAGE = "When it fires", "What it enqueues"
SHOWN = 3  # of the firings after the next one
STYLES = {"active": "green", "paused": "yellow", "failing": "red", "over": "dim"}

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule: name, or namespace/name.")]
JsonOption = Annotated[
    bool, typer.Option(
        "--json", help="For programs: one JSON object a schedule, with the names of the HTTP API (name, topic, state, "
        "next_at, fired_count, …); the payload is payload_text, or payload in base64 if it is not UTF-8.",
    ),
]  # fmt: skip

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Schedules: messages that the server enqueues by itself, at times of day or at intervals, once each.

    Example:  [cyan]heapline schedule create nightly jobs report --cron "0 3 * * *" --tz Europe/Berlin[/cyan]
    """,
)


@app.command("create")
@over_network
async def create_command(
    hl: Broker, name: NameArgument, topic: TopicArgument,
    payload: Annotated[str, typer.Argument(metavar="PAYLOAD", help="The message, as text.")] = "",
    cron: Annotated[
        str | None, typer.Option(
            "--cron", metavar="EXPRESSION", rich_help_panel=WHEN, help="Minute, hour, day of month, month, day of "
            'week: "30 3 * * 1-5" is half past three on working days; or @hourly, @daily, @weekly, @monthly.',
        ),
    ] = None,
    every: Annotated[
        float | None, typer.Option(
            "--every", metavar="DURATION", parser=duration, rich_help_panel=WHEN, help="Instead: 90s, 15m, 6h, …",
        ),
    ] = None,
    tz: Annotated[
        str | None, typer.Option(
            "--tz", metavar="ZONE", rich_help_panel=WHEN, help="Whose clock --cron means, with its daylight saving: "
            "Europe/Berlin; UTC if not given.",
        ),
    ] = None,
    starts: Annotated[
        datetime | None, typer.Option(
            "--starts", metavar="WHEN", parser=moment, rich_help_panel=WHEN,
            help="Nothing before this moment, 2030-01-31T12:00:00Z; with --every it is the first firing.",
        ),
    ] = None,
    ends: Annotated[
        datetime | None,
        typer.Option("--ends", metavar="WHEN", parser=moment, rich_help_panel=WHEN, help="Nothing from then on."),
    ] = None,
    misfire: Annotated[
        str, typer.Option(
            "--misfire", metavar="POLICY", rich_help_panel=WHEN, help="What becomes of firings that fell into a time "
            "when the server was not running: skip them, enqueue the latest once, or all of them.",
        ),
    ] = "once",
    grace: Annotated[
        float, typer.Option(
            "--grace", metavar="DURATION", parser=duration, rich_help_panel=WHEN,
            help="So late a firing is still in time, whatever --misfire says.",
        ),
    ] = "60s",  # type: ignore[assignment]
    makeup_max: Annotated[
        int, typer.Option("--makeup-max", rich_help_panel=WHEN, help="So many at most with --misfire all.")
    ] = 100,
    priority: Annotated[int, typer.Option("--priority", "-p", rich_help_panel=MESSAGE, help="As in heapline put.")] = 0,
    key: Annotated[str | None, typer.Option("--key", rich_help_panel=MESSAGE, help="Its partition key.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(
            "--header", "-H", metavar="NAME=VALUE", rich_help_panel=MESSAGE, help="A header; may be given again.",
        ),
    ] = None,
    ttl: Annotated[
        float | None, typer.Option(
            "--ttl", metavar="DURATION", parser=duration, rich_help_panel=MESSAGE,
            help="It expires if nobody takes it so long after it was fired.",
        ),
    ] = None,
    max_retries: Annotated[
        int | None, typer.Option("--max-retries", rich_help_panel=MESSAGE, help="Deliveries after the first.")
    ] = None,
    fairness_key: Annotated[
        str | None, typer.Option("--fairness-key", rich_help_panel=MESSAGE, help="As in heapline put.")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Make a schedule, or change the one of that name. What was due before the change has been fired by then.

    Every night at three in Berlin, summer and winter:
    [cyan]heapline schedule create nightly jobs report --cron "0 3 * * *" --tz Europe/Berlin[/cyan]

    Every quarter of an hour, and each one that was missed too:
    [cyan]heapline schedule create sync jobs '{"what": "sync"}' --every 15m --misfire all[/cyan]
    """
    info = await hl.create_schedule(
        name, topic=topic, payload=payload.encode("utf-8", "surrogateescape"), cron=cron, every=every, tz=tz,
        starts=starts, ends=ends, misfire=misfire, grace=grace, makeup_max=makeup_max, priority=priority, key=key,
        headers=dict(pair(text) for text in header or ()) or None, ttl=ttl, max_retries=max_retries,
        fairness_key=fairness_key,
    )  # fmt: skip
    if as_json:
        _print(info)
        return
    console = make_console()
    into = f"enqueues into [bold]{escape(info.topic)}[/bold]"
    console.print(f"schedule [bold]{escape(info.name)}[/bold] {into} {escape(_timing(info))}")
    _say_next(console, info)


@app.command("list")
@over_network
async def list_command(hl: Broker, as_json: JsonOption = False) -> None:
    """Which schedules there are, and when each fires next, in your own time zone.

    Example:  [cyan]heapline schedule list[/cyan]
    """
    infos = await hl.list_schedules()
    if as_json:
        for info in infos:
            _print(info)
    elif infos:
        names = ("schedule", "topic", "when", "state", "next", "fired")
        rows = [
            (escape(i.name), escape(i.topic), escape(_timing(i)), _state(i), _next(i), count(i.fired_count))
            for i in infos
        ]
        console = make_console()
        console.print(columns_table("", names, rows, right=(5,)))
        for info in infos:
            if info.problem is not None:
                console.print(Text.assemble((info.name, "bold"), " does not fire: ", harmless(info.problem)))
    else:
        console = make_console()
        console.print("there are no schedules yet; make one with:")
        console.print("  heapline schedule create nightly jobs report --cron '0 3 * * *' --tz Europe/Berlin")


@app.command("show")
@over_network
async def show_command(hl: Broker, name: NameArgument, as_json: JsonOption = False) -> None:
    """All about one schedule: when it fires, what it enqueues, and how it stands.

    Example:  [cyan]heapline schedule show nightly[/cyan]
    """
    info = await hl.get_schedule(name)
    if as_json:
        _print(info)
    else:
        make_console().print(facts_table(escape(info.name), _facts(info)))


@app.command("pause")
@over_network
async def pause_command(hl: Broker, name: NameArgument, as_json: JsonOption = False) -> None:
    """Let it fire nothing until it is resumed, also over restarts of the server.

    Example:  [cyan]heapline schedule pause nightly[/cyan]
    """
    info = await hl.pause_schedule(name)
    if as_json:
        _print(info)
        return
    console = make_console()
    console.print(f"schedule [bold]{escape(info.name)}[/bold] is paused")
    console.print(f"[dim]go on with:  heapline schedule resume {escape(info.name)}[/dim]")


@app.command("resume")
@over_network
async def resume_command(hl: Broker, name: NameArgument, as_json: JsonOption = False) -> None:
    """Let a paused schedule go on. What fell due during the pause is not made up.

    Example:  [cyan]heapline schedule resume nightly[/cyan]
    """
    info = await hl.resume_schedule(name)
    if as_json:
        _print(info)
        return
    console = make_console()
    console.print(f"schedule [bold]{escape(info.name)}[/bold] goes on")
    _say_next(console, info)


@app.command("delete")
@over_network
async def delete_command(
    hl: Broker, name: NameArgument, yes: YesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help='For programs: {"name": NAME, "deleted": true}.')] = False,
) -> None:  # fmt: skip
    """Delete a schedule; what it has enqueued stays in the topic. Asks first.

    Example:  [cyan]heapline schedule delete nightly[/cyan]
    """
    info = await hl.get_schedule(name)
    ask(f"Delete the schedule {info.name}, which enqueues into {info.topic} {_timing(info)}?", yes)
    await hl.delete_schedule(name)
    if as_json:
        print_json({"name": info.name, "deleted": True})
    else:
        make_console().print(f"schedule [bold]{escape(info.name)}[/bold] is deleted")


# -- showing -----------------------------------------------------------------------------------------------------------


def _print(info: ScheduleInfo) -> None:
    print_json(tell_schedule(info, "text"))


def _timing(info: ScheduleInfo) -> str:
    if info.every is not None:
        return f"every {span(info.every)}"
    return f"at {info.cron} {info.tz}"


def _state(info: ScheduleInfo) -> str:
    return f"[{STYLES[info.state]}]{info.state}[/]"


def _local(at: datetime | None) -> str:
    """In the zone of whoever looks."""
    return "" if at is None else at.astimezone().strftime("%a %Y-%m-%d %H:%M:%S %Z")


def _next(info: ScheduleInfo) -> str:
    if info.next_at is None:
        return ""
    late = info.next_at <= datetime.now(UTC)
    return "now" if late else f"{_local(info.next_at)}, {ago(info.next_at)}"


def _say_next(console: Console, info: ScheduleInfo) -> None:
    if info.paused_at is not None:
        console.print(f"it is paused; go on with:  heapline schedule resume {escape(info.name)}")
    elif info.next_at is not None:
        console.print(f"it fires next {_next(info)}")


def _facts(info: ScheduleInfo) -> list[tuple[str | Text, str | Text]]:
    given: list[tuple[str, Any]] = [
        ("priority", info.priority or None), ("key", info.key), ("fairness key", info.fairness_key),
        ("ttl", None if info.ttl is None else span(info.ttl)), ("max retries", info.max_retries),
        *((f"header {name}", value) for name, value in info.headers.items()),
    ]  # fmt: skip
    return [
        ("state", _state(info)),
        *([("problem", harmless(info.problem))] if info.problem else []),
        ("topic", harmless(info.topic)),
        ("when", harmless(_timing(info))),
        *((name, _local(at)) for name, at in (("starts", info.starts), ("ends", info.ends)) if at is not None),
        ("next", _next(info) or "never" if info.paused_at is None else "not while it is paused"),
        *(("and then", _local(at)) for at in islice(_following(info), SHOWN)),
        ("fired", f"{count(info.fired_count)} times" + (f", last {ago(info.fired_at)}" if info.fired_at else "")),
        ("missed ones", _misfire(info)),
        ("message", whole(info.payload)),
        *((name, harmless(str(value))) for name, value in given if value is not None),
    ]


def _misfire(info: ScheduleInfo) -> str:
    words = {
        "skip": "are left out", "once": "are made up by the latest one",
        "all": f"are all made up, {info.makeup_max} at most",
    }  # fmt: skip
    return f"{words[info.misfire]}; late is later than {span(info.grace)}"


def _following(info: ScheduleInfo) -> Iterator[datetime]:
    """The firings after the next one, as far as this machine can tell."""
    at = info.next_at
    while at is not None:
        if info.every is not None:
            at += timedelta(seconds=info.every)
        else:
            found = cron_times(info.cron or "", info.tz or "UTC").next((at - EPOCH) // timedelta(seconds=1))
            at = None if found is None else EPOCH + timedelta(seconds=found)
        if at is None or (info.ends is not None and at >= info.ends):
            return
        yield at
