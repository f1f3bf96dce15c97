"""`heapline group create|list|show|offsets|reset|delete|read|dead`: the groups of a topic, and how far each is."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from heapline.broker import GroupBroker
from heapline.cli import group_dead
from heapline.cli.asking import YesOption, ask
from heapline.cli.connection import over_network
from heapline.cli.group_read import read_command
from heapline.cli.group_words import PLACE_HELP, GroupArgument, member_shown, place, rows_word
from heapline.cli.messages import TopicArgument, ago, print_json
from heapline.cli.present import columns_table, count, facts_table, make_console
from heapline.cli.units import duration, span
from heapline.config import GroupConfig
from heapline.streams import GroupInfo, GroupOffset
from heapline.wire.json_groups import tell_group

DEFAULTS = GroupConfig()
SETTINGS = "Settings"
JsonOption = Annotated[
    bool, typer.Option(
        "--json", help="For programs: one JSON object a group, with group, topic, lag, members, offsets (one a "
        "partition: committed, end, lag, outstanding, retrying, dead, member) and config.",
    ),
]  # fmt: skip
OffsetsJsonOption = Annotated[
    bool, typer.Option(
        "--json", help="For programs: one JSON object a partition: partition, committed, end, lag, outstanding, "
        "retrying, dead, member.",
    ),
]  # fmt: skip

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Consumer groups: each sees every message of a topic, in the order of falling due, and can go back.

    Workers that pop are not touched by them. A group is made by reading, too:

    Example:  [cyan]heapline group read jobs --group billing[/cyan]
    """,
)


def _duration(flag: str, help: str) -> Any:
    return typer.Option(flag, metavar="DURATION", parser=duration, rich_help_panel=SETTINGS, help=help)


@app.command("create")
@over_network
async def create_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument,
    start: Annotated[Any, typer.Option("--start", metavar="WHERE", parser=place, help=PLACE_HELP)] = "earliest",
    ack_timeout: Annotated[float | None, _duration("--ack-timeout", "Not acked after this, a row comes again.")] = None,
    max_retries: Annotated[
        int | None, typer.Option(
            "--max-retries", rich_help_panel=SETTINGS,
            help="Deliveries after the first before a row is one of the group's dead letters; 0 to 250.",
        ),
    ] = None,
    member_lease: Annotated[float | None, _duration("--member-lease", "A member silent for this long is out.")] = None,
    unused_after: Annotated[
        float | None, _duration("--unused-after", "Unused for this long, it no longer holds the journal.")
    ] = None,
    observer: Annotated[
        bool, typer.Option("--observer", rich_help_panel=SETTINGS, help="Only shows its lag: reads and holds nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Make a group. Once more with the same settings is fine, and leaves it where it is.

    Example:  [cyan]heapline group create jobs billing --start latest[/cyan]

    From yesterday on, a minute for each row:
    [cyan]heapline group create jobs audit --start 1d --ack-timeout 1m[/cyan]
    """
    named = {
        "ack_timeout": ack_timeout, "max_retries": max_retries, "member_lease": member_lease,
        "unused_after": unused_after, "observer": observer or None,
    }  # fmt: skip
    info = await hl.create_group(topic, group, start=start, **{n: v for n, v in named.items() if v is not None})
    if as_json:
        print_json(tell_group(info))
        return
    console = make_console()
    console.print(f"group [bold]{escape(info.name)}[/bold] of {escape(info.topic)} is there: {_lag_in_words(info)}")
    if not info.config.observer:
        console.print(f"[dim]read it:  heapline group read {escape(info.topic)} --group {escape(info.name)}[/dim]")


@app.command("list")
@over_network
async def list_command(hl: GroupBroker, topic: TopicArgument, as_json: JsonOption = False) -> None:
    """The groups of a topic, and how far behind each is.

    Example:  [cyan]heapline group list jobs[/cyan]
    """
    infos = sorted(await hl.list_groups(topic), key=lambda info: info.name)
    if as_json:
        for info in infos:
            print_json(tell_group(info))
    elif infos:
        names = ("group", "lag", "out", "dead", "members", "state", "used")
        make_console().print(columns_table("", names, map(_line, infos), right=(1, 2, 3, 4)))
    else:
        make_console().print(
            f"[bold]{escape(topic)}[/bold] has no groups; make one with:  heapline group create {escape(topic)} NAME"
        )


@app.command("show")
@over_network
async def show_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument, as_json: JsonOption = False
) -> None:
    """A group: its lag, its members and what each reads, and its settings.

    Example:  [cyan]heapline group show jobs billing[/cyan]
    """
    info = await hl.get_group(topic, group)
    if as_json:
        print_json(tell_group(info))
        return
    console = make_console()
    console.print(facts_table(escape(f"{info.name} of {info.topic}"), _facts(info)))
    show_offsets(console, info.offsets)


@app.command("offsets")
@over_network
async def offsets_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument, as_json: OffsetsJsonOption = False
) -> None:
    """How far a group is in each partition, and who reads it.

    Example:  [cyan]heapline group offsets jobs billing[/cyan]
    """
    _print_offsets(await hl.group_offsets(topic, group), as_json)


@app.command("reset")
@over_network
async def reset_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument,
    where: Annotated[Any, typer.Option("--where", metavar="WHERE", parser=place, help=PLACE_HELP)],
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", help="Only this partition; repeatable.")
    ] = None,
    yes: YesOption = False, as_json: OffsetsJsonOption = False,
) -> None:  # fmt: skip
    """Let a group go on from elsewhere. Asks first.

    Back, and it sees rows again; forward, and it never sees what it skips.

    Example:  [cyan]heapline group reset jobs billing --where earliest[/cyan]

    An hour back:  [cyan]heapline group reset jobs billing --where 1h[/cyan]
    """
    if not yes:
        info = await hl.get_group(topic, group)
        ask(f"Reset group {info.name} of {info.topic} ({_lag_in_words(info)})?", yes)
    offsets = await hl.reset_offsets(topic, group, to=where, partitions=partitions or None)
    _print_offsets(offsets, as_json)


@app.command("delete")
@over_network
async def delete_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument, yes: YesOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help='For programs: {"topic": NAME, "group": NAME, "deleted": true}.')
    ] = False,
) -> None:  # fmt: skip
    """Delete a group: its offsets and its dead letters. The topic and its messages stay. Asks first.

    Example:  [cyan]heapline group delete jobs billing[/cyan]
    """
    info = await hl.get_group(topic, group)
    members = f", with {len(info.members)} member(s) reading" if info.members else ""
    ask(f"Delete group {info.name} of {info.topic} ({_lag_in_words(info)}{members})?", yes)
    await hl.delete_group(topic, group)
    if as_json:
        print_json({"topic": info.topic, "group": info.name, "deleted": True})
    else:
        make_console().print(f"group [bold]{escape(info.name)}[/bold] of {escape(info.topic)} is deleted")


app.command("read")(read_command)
app.add_typer(group_dead.app, name="dead")


# -- for people --------------------------------------------------------------------------------------------------------


def _print_offsets(offsets: list[GroupOffset], as_json: bool) -> None:
    if as_json:
        for offset in offsets:
            print_json(offset)
    else:
        show_offsets(make_console(), offsets)


def show_offsets(console: Console, offsets: list[GroupOffset]) -> None:
    names = ("partition", "committed", "end", "lag", "out", "retrying", "dead", "member")
    rows: list[tuple[str, ...]] = [
        (str(o.partition), count(o.committed), count(o.end), _lag(o.lag), count(o.outstanding), count(o.retrying),
         _dead(o.dead), member_shown(o.member or ""))
        for o in offsets
    ]  # fmt: skip
    if len(offsets) > 1:
        totals = (sum(getattr(o, name) for o in offsets) for name in ("lag", "outstanding", "retrying", "dead"))
        rows.append(("all", "", "", *map(count, totals), ""))
    console.print(columns_table("", names, rows, right=(0, 1, 2, 3, 4, 5, 6)))


def _line(info: GroupInfo) -> tuple[str, ...]:
    out, dead = sum(o.outstanding for o in info.offsets), sum(o.dead for o in info.offsets)
    used = ago(info.used_at)
    return escape(info.name), _lag(info.lag), count(out), _dead(dead), count(len(info.members)), _state(info), used


def _state(info: GroupInfo) -> str:
    if info.config.observer:
        return "observer"
    return "holds the journal" if info.holding else "[yellow]unused[/yellow]"


def _facts(info: GroupInfo) -> list[tuple[str, str]]:
    config = info.config
    members = [
        f"{member_shown(name)} reads {_numbers(partitions)}" for name, partitions in sorted(info.members.items())
    ]
    facts = [
        ("lag", _lag_in_words(info)), ("state", _state(info)),
        ("members", "\n".join(members) or "nobody reads at the moment"),
        ("generation", f"{count(info.generation)} (rises when partitions change hands)"),
        ("a row comes again", f"after {span(config.ack_timeout)} without ack, {config.max_retries} times at most"),
        ("a member is out", f"after {span(config.member_lease)} of silence"),
    ]  # fmt: skip
    return [*facts, ("used", ago(info.used_at))] if info.used_at is not None else facts


def _numbers(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions)) if partitions else "nothing (there are more members than partitions)"


def _lag_in_words(info: GroupInfo) -> str:
    return f"{rows_word(info.lag)} behind" if info.lag else "nothing is left to do"


def _lag(number: int) -> str:
    return f"[bold]{count(number)}[/bold]" if number else "0"


def _dead(number: int) -> str:
    return f"[red]{count(number)}[/red]" if number else "0"
