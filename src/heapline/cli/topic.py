"""`heapline topic create|list|show|update|delete`: the topics of a server. Their settings are topic_settings.py's."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.asking import YesOption, ask
from heapline.cli.connection import over_network
from heapline.cli.messages import TopicArgument, print_json
from heapline.cli.present import columns_table, count, facts_table, make_console, size
from heapline.cli.topic_settings import DEFAULTS, as_settings, config_fields, shown, with_settings
from heapline.cli.units import span
from heapline.config import parse_topic
from heapline.errors import BadRequest, PermissionDenied, TopicNotFound
from heapline.model import PartitionStats, TopicInfo, TopicStats

JsonOption = Annotated[
    bool, typer.Option(
        "--json", help="For programs: one JSON object a topic, with topic, incarnation, config (its settings; seconds "
        "and bytes) and, where it is known, stats (ready, delayed, leased, dead, …).",
    ),
]  # fmt: skip

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""The topics of a server: make, look at, change, delete them.

    Example:  [cyan]heapline topic create jobs && heapline put jobs hello && heapline topic list[/cyan]
    """,
)


@app.command("create")
@over_network
@with_settings(updating=False)
async def create_command(
    hl: Broker, topic: TopicArgument, settings: dict[str, Any], as_json: JsonOption = False
) -> None:
    """Make a topic. Once more with the same settings is fine, and changes nothing.

    Example:  [cyan]heapline topic create jobs[/cyan]

    Largest first, a minute to work, dead after three retries:
    [cyan]heapline topic create mail --mode max --visibility-default 1m --max-retries-default 3[/cyan]
    """
    info = await hl.create_topic(topic, **config_fields(settings, DEFAULTS.backoff))
    if as_json:
        print_json(_told(info))
        return
    console = make_console()
    console.print(f"topic [bold]{escape(info.name)}[/bold] is there: {_in_words(info)}")
    console.print(f"[dim]put something in:  heapline put {escape(info.name)} hello[/dim]")


@app.command("list")
@over_network
async def list_command(hl: Broker, as_json: JsonOption = False) -> None:
    """Which topics there are, and what waits in them.

    Example:  [cyan]heapline topic list[/cyan]
    """
    infos = sorted(await hl.list_topics(), key=lambda info: info.name)
    found = list(zip(infos, await asyncio.gather(*(_stats(hl, info.name) for info in infos)), strict=True))
    if as_json:
        for info, stats in found:
            print_json(_told(info, stats))
    elif found:
        names = ("topic", "ready", "delayed", "leased", "dead", "oldest")
        rows = [(escape(info.name), *_figures(stats)) for info, stats in found]
        make_console().print(columns_table("", names, rows, right=(1, 2, 3, 4, 5)))
    else:
        make_console().print("there are no topics yet; make one with:  heapline topic create jobs")


@app.command("show")
@over_network
async def show_command(
    hl: Broker, topic: TopicArgument, as_json: JsonOption = False,
    settings: Annotated[bool, typer.Option("--settings", help="All settings, also those that are default.")] = False,
) -> None:  # fmt: skip
    """What waits in a topic, how it is doing, and how it is set up.

    Example:  [cyan]heapline topic show jobs[/cyan]
    """
    info = await _info(hl, topic)
    stats = await _stats(hl, topic)
    if as_json:
        print_json(_told(info, stats))
        return
    console = make_console()
    if stats is not None:
        console.print(facts_table(escape(info.name), _state(stats)))
        if len(stats.partitions) > 1:
            _show_partitions(console, stats.partitions)
    _show_settings(console, info, everything=settings)


@app.command("update")
@over_network
@with_settings(updating=True)
async def update_command(
    hl: Broker, topic: TopicArgument, settings: dict[str, Any], as_json: JsonOption = False
) -> None:
    """Change settings of a topic; what is not named stays. Workers and messages go on meanwhile.

    Example:  [cyan]heapline topic update jobs --max-retries-default 5 --backoff-base 10s[/cyan]

    What cannot be changed later: --mode, --aging, --fairness, --segment-bytes, --streams.
    """
    if not settings:
        raise BadRequest("nothing to change was named: give at least one setting, see heapline topic update --help")
    before = await _info(hl, topic)
    info = await hl.update_topic(topic, **config_fields(settings, before.config.backoff))
    if as_json:
        print_json(_told(info))
        return
    old, new = as_settings(before.config), as_settings(info.config)
    changed = [(n, shown(n, old[n]), f"[bold]{escape(shown(n, new[n]))}[/bold]") for n in new if new[n] != old[n]]
    console = make_console()
    if changed:
        console.print(columns_table(f"{escape(info.name)} was changed", ("setting", "before", "now"), changed))
    else:
        console.print(f"topic [bold]{escape(info.name)}[/bold] was so already; nothing was changed")


@app.command("delete")
@over_network
async def delete_command(
    hl: Broker, topic: TopicArgument, yes: YesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help='For programs: {"topic": NAME, "deleted": true}.')] = False,
) -> None:  # fmt: skip
    """Delete a topic with everything in it, for good: messages, dead letters, its journal. Asks first.

    Example:  [cyan]heapline topic delete jobs[/cyan]
    """
    info = await _info(hl, topic)
    if not yes:
        stats = await _stats(hl, topic)
        held = _counts(stats) if stats is not None else "all its messages"
        ask(f"Delete topic {info.name} for good, with {held}?", yes)
    await hl.delete_topic(topic)
    if as_json:
        print_json({"topic": info.name, "deleted": True})
    else:
        make_console().print(f"topic [bold]{escape(info.name)}[/bold] is deleted")


# -- what is known -----------------------------------------------------------------------------------------------------


async def _info(hl: Broker, topic: str) -> TopicInfo:
    wanted = parse_topic(topic)
    for info in await hl.list_topics():
        if parse_topic(info.name) == wanted:
            return info
    raise TopicNotFound(topic)


async def _stats(hl: Broker, topic: str) -> TopicStats | None:
    """None if the caller may not know; a topic that goes meanwhile tells nothing either."""
    try:
        return await hl.stats(topic)
    except (PermissionDenied, TopicNotFound):
        return None


def _told(info: TopicInfo, stats: TopicStats | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {"topic": info.name, "incarnation": info.incarnation, "config": info.config}
    return told if stats is None else told | {"stats": stats}


# -- for people --------------------------------------------------------------------------------------------------------


def _in_words(info: TopicInfo) -> str:
    config = info.config
    first = "smallest" if config.mode == "min" else "largest"
    partitions = "1 partition" if config.partitions == 1 else f"{config.partitions} partitions"
    return f"{first} priority first, leases of {span(config.visibility_default)}, {partitions}"


def _counts(stats: TopicStats) -> str:
    return (
        f"{count(stats.ready)} ready, {count(stats.delayed)} delayed, {count(stats.leased)} leased, "
        f"{count(stats.dead)} dead"
    )


def _figures(stats: TopicStats | None) -> tuple[str, ...]:
    if stats is None:
        return ("?",) * 5
    oldest = "paused" if stats.paused else _age(stats.oldest_ready_age)
    return count(stats.ready), count(stats.delayed), count(stats.leased), _dead(stats.dead), oldest


def _dead(number: int) -> str:
    return f"[red]{count(number)}[/red]" if number else "0"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else span(round(seconds) if seconds >= 1 else seconds)


def _state(stats: TopicStats) -> list[tuple[str, str]]:
    facts = [
        ("ready", count(stats.ready) + (f", the oldest for {age}" if (age := _age(stats.oldest_ready_age)) else "")),
        ("delayed", count(stats.delayed) + _due(stats)), ("leased", count(stats.leased)), ("dead", _dead(stats.dead)),
        ("since it was opened", f"{count(stats.enqueued_total)} enqueued, {count(stats.acked_total)} acked, "
         f"{count(stats.nacked_total)} nacked, {count(stats.lease_timeouts_total)} timed out"),
        ("journal", f"{size(stats.journal_bytes)} in {stats.journal_segments} segment(s)"),
        ("durability", escape(stats.durability)),
    ]  # fmt: skip
    return [("delivery", "[yellow]paused[/yellow]"), *facts] if stats.paused else facts


def _due(stats: TopicStats) -> str:
    for bucket in stats.due_histogram:
        if bucket.count and bucket.within is not None:
            when = f"within {span(bucket.within)}" if bucket.within else "due now"
            return f", the next {when}"
    return ""


def _show_partitions(console: Console, partitions: list[PartitionStats]) -> None:
    names = ("partition", "ready", "delayed", "leased", "dead", "throttled")
    rows = [
        (str(p.partition), count(p.ready), count(p.delayed), count(p.leased), _dead(p.dead),
         "" if p.throttled is None else escape(p.throttled) or "yes")
        for p in partitions
    ]  # fmt: skip
    console.print(columns_table("", names, rows, right=(0, 1, 2, 3, 4)))


def _show_settings(console: Console, info: TopicInfo, *, everything: bool) -> None:
    values, usual = as_settings(info.config), as_settings(DEFAULTS)
    rows = [
        (name, escape(shown(name, value)) if value == usual[name] else f"[bold]{escape(shown(name, value))}[/bold]")
        for name, value in values.items()
        if everything or value != usual[name]
    ]
    if rows:
        console.print(facts_table("settings", rows))
    if not everything:
        other = "all other settings are" if rows else "all settings are"
        console.print(f"[dim]{other} default; see them with --settings[/dim]")
