"""`heapline topic …`: the topics of a server. Their settings are in topic_settings.py."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from rich.markup import escape
from rich.table import Table

from heapline.cli.connection import NetworkGroup, TopicArgument
from heapline.cli.message_view import clock
from heapline.cli.options import Seconds, Time, YesOption
from heapline.cli.output import (
    Output,
    bold,
    columns_table,
    confirm,
    count,
    counted,
    facts_table,
    harmless,
    size,
)
from heapline.cli.topic_settings import DEFAULTS, as_settings, changed_topic, config_fields, new_topic, shown
from heapline.cli.units import span
from heapline.contract.broker import Broker
from heapline.contract.config import parse_topic
from heapline.contract.errors import BadRequest, PermissionDenied, TopicNotFound
from heapline.contract.message import PartitionStats, TopicInfo, TopicStats

JSON_HELP = (
    "one object per topic, with topic, incarnation, config (its settings, in seconds and bytes) and, if you may read "
    "them, stats (ready, delayed, leased, dead, …)."
)

app = NetworkGroup(
    """Create, inspect, change and delete topics.

    Example:  [cyan]heapline topic create jobs && heapline put jobs hello && heapline topic list[/cyan]
    """
)


@app.call("create", json=JSON_HELP, settings=new_topic)
async def create_command(hl: Broker, out: Output, settings: dict[str, Any], topic: TopicArgument) -> None:
    """Create a topic. Running it again with the same settings changes nothing.

    Example:  [cyan]heapline topic create jobs[/cyan]

    Largest priority first, leases of a minute, dead after three retries:
    [cyan]heapline topic create mail --mode max --visibility-default 1m --max-retries-default 3[/cyan]
    """
    info = await hl.create_topic(topic, **config_fields(settings, DEFAULTS.backoff))
    out.row(
        _json(info),
        f"topic {bold(info.name)} is ready: {_summary(info)}",
        f"[dim]enqueue a message with:  heapline put {info.name} hello[/dim]",
    )


@app.call("list", json=JSON_HELP)
async def list_command(hl: Broker, out: Output) -> None:
    """List all topics, and how many messages each holds.

    Example:  [cyan]heapline topic list[/cyan]
    """
    infos = sorted(await hl.list_topics(), key=lambda info: info.name)
    all_stats = await asyncio.gather(*(_stats(hl, info.name) for info in infos))
    out.table(
        zip(infos, all_stats, strict=True),
        ("topic", "ready", "delayed", "leased", "dead", "oldest"),
        lambda found: (found[0].name, *_cells(found[1])),
        right=(1, 2, 3, 4, 5),
        empty="there are no topics; create one with:  heapline topic create jobs",
        json=lambda found: _json(*found),
    )


@app.call("show", json=JSON_HELP)
async def show_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    settings: Annotated[bool, "Show all settings, even those with default values."] = False,
) -> None:
    """Show the state and the settings of a topic.

    Example:  [cyan]heapline topic show jobs[/cyan]
    """
    info = await _info(hl, topic)
    stats = await _stats(hl, topic)
    tables: list[Table | str] = []
    if stats is not None:
        tables.append(facts_table(info.name, _state_facts(stats)))
        if len(stats.partitions) > 1:
            tables.append(_partitions_table(stats.partitions))
    out.row(_json(info, stats), *tables, *_settings_tables(info, everything=settings))


@app.call("update", json=JSON_HELP, settings=changed_topic)
async def update_command(hl: Broker, out: Output, settings: dict[str, Any], topic: TopicArgument) -> None:
    """Change settings of a topic. Settings that you omit stay, and delivery continues meanwhile.

    Example:  [cyan]heapline topic update jobs --max-retries-default 5 --backoff-base 10s[/cyan]

    Settings that cannot be changed later: --mode, --aging, --fairness, --segment-bytes, --streams.
    """
    if not settings:
        raise BadRequest("no change given; use at least one setting, see heapline topic update --help")
    before = await _info(hl, topic)
    info = await hl.update_topic(topic, **config_fields(settings, before.config.backoff))
    old, new = as_settings(before.config), as_settings(info.config)
    changed = [(n, shown(n, old[n]), bold(shown(n, new[n]))) for n in new if new[n] != old[n]]
    table = columns_table(f"changed topic {info.name}", ("setting", "before", "now"), changed)
    out.row(_json(info), table if changed else f"topic {bold(info.name)} already has these settings")


@app.call("pause", json='{"topic": NAME, "paused": true, "until": TIME or null}.')
async def pause_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    duration: Annotated[Seconds | None, "--for", "Resume automatically after this long."] = None,
    until: Annotated[Time | None, "Resume automatically at 2030-01-31T12:00:00Z."] = None,
) -> None:
    """Stop delivering messages of a topic. You can still enqueue, ack and inspect.

    Example:  [cyan]heapline topic pause jobs[/cyan]

    For an hour:  [cyan]heapline topic pause jobs --for 1h[/cyan]
    """
    if duration is not None and until is not None:
        raise BadRequest("--for and --until exclude each other; omit one")
    if duration is not None:
        until = datetime.now(UTC) + timedelta(seconds=duration)
    await hl.pause_topic(topic, until)
    end = "" if until is None else f" until {clock(until)}"
    resume = f"[dim]resume it with:  heapline topic resume {topic}[/dim]"
    out.row({"topic": topic, "paused": True, "until": until}, f"topic {bold(topic)} is paused{end}", resume)


@app.call("resume", json='{"topic": NAME, "paused": false}.')
async def resume_command(hl: Broker, out: Output, topic: TopicArgument) -> None:
    """Resume delivery of a paused topic.

    Example:  [cyan]heapline topic resume jobs[/cyan]
    """
    await hl.resume_topic(topic)
    out.row({"topic": topic, "paused": False}, f"topic {bold(topic)} delivers messages")


@app.call("purge", json='{"topic": NAME, "count": NUMBER}.')
async def purge_command(hl: Broker, out: Output, topic: TopicArgument, yes: YesOption = False) -> None:
    """Remove all ready and delayed messages of a topic. Leased messages and dead letters stay. Asks first.

    Example:  [cyan]heapline topic purge jobs[/cyan]
    """
    info = await _info(hl, topic)
    if not yes:
        stats = await _stats(hl, topic)
        held = (
            "all waiting messages" if stats is None else f"{count(stats.ready)} ready, {count(stats.delayed)} delayed"
        )
        confirm(f"Permanently remove {held} of topic {info.name}?", yes)
    purged = await hl.purge(topic)
    out.row({"topic": info.name, "count": purged}, f"{counted(purged, 'message')} removed from topic {bold(info.name)}")


@app.call("delete", json='{"topic": NAME, "deleted": true}.')
async def delete_command(hl: Broker, out: Output, topic: TopicArgument, yes: YesOption = False) -> None:
    """Delete a topic permanently, with its messages, dead letters and journal. Asks first.

    Example:  [cyan]heapline topic delete jobs[/cyan]
    """
    info = await _info(hl, topic)
    if not yes:
        stats = await _stats(hl, topic)
        confirm(f"Permanently delete topic {info.name}, with {_depths(stats) if stats else 'all its messages'}?", yes)
    await hl.delete_topic(topic)
    out.row({"topic": info.name, "deleted": True}, f"topic {bold(info.name)} deleted")


async def _info(hl: Broker, topic: str) -> TopicInfo:
    wanted = parse_topic(topic)
    for info in await hl.list_topics():
        if parse_topic(info.name) == wanted:
            return info
    raise TopicNotFound(topic)


async def _stats(hl: Broker, topic: str) -> TopicStats | None:
    """Return the statistics, or None if the caller lacks the right or the topic was deleted meanwhile."""
    try:
        return await hl.stats(topic)
    except (PermissionDenied, TopicNotFound):
        return None


def _json(info: TopicInfo, stats: TopicStats | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {"topic": info.name, "incarnation": info.incarnation, "config": info.config}
    return fields if stats is None else fields | {"stats": stats}


# -- for people --------------------------------------------------------------------------------------------------------


def _summary(info: TopicInfo) -> str:
    first = "smallest" if info.config.mode == "min" else "largest"
    lease = span(info.config.visibility_default)
    return f"{first} priority first, leases of {lease}, {counted(info.config.partitions, 'partition')}"


def _depths(stats: TopicStats) -> str:
    states = ("ready", "delayed", "leased", "dead")
    return ", ".join(f"{count(getattr(stats, state))} {state}" for state in states)


def _cells(stats: TopicStats | PartitionStats | None) -> tuple[str, ...]:
    if stats is None:
        return ("?",) * 5
    depths = count(stats.ready), count(stats.delayed), count(stats.leased), _dead(stats.dead)
    if isinstance(stats, PartitionStats):
        return *depths, "" if stats.throttled is None else escape(harmless(stats.throttled).plain) or "yes"
    return *depths, "paused" if stats.paused else _age(stats.oldest_ready_age)


def _dead(number: int) -> str:
    return f"[red]{count(number)}[/red]" if number else "0"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else span(round(seconds) if seconds >= 1 else seconds)


def _state_facts(stats: TopicStats) -> list[tuple[str, str]]:
    age = _age(stats.oldest_ready_age)
    names = {"enqueued": "enqueued", "acked": "acked", "nacked": "nacked", "lease_timeouts": "timed out"}
    totals = ", ".join(f"{count(getattr(stats, f'{name}_total'))} {text}" for name, text in names.items())
    facts = [
        ("ready", count(stats.ready) + (f", oldest for {age}" if age else "")),
        ("delayed", count(stats.delayed) + _next_due(stats)),
        ("leased", count(stats.leased)),
        ("dead", _dead(stats.dead)),
        ("since the server started", totals),
        ("journal", f"{size(stats.journal_bytes)} in {counted(stats.journal_segments, 'segment')}"),
        ("durability", stats.durability),
    ]
    return [("delivery", "[yellow]paused[/yellow]"), *facts] if stats.paused else facts


def _next_due(stats: TopicStats) -> str:
    for bucket in stats.due_histogram:
        if bucket.count and bucket.within is not None:
            return f", next within {span(bucket.within)}" if bucket.within else ", next due now"
    return ""


def _partitions_table(partitions: list[PartitionStats]) -> Table:
    names = ("partition", "ready", "delayed", "leased", "dead", "throttled")
    rows = [(str(partition.partition), *_cells(partition)) for partition in partitions]
    return columns_table("", names, rows, right=(0, 1, 2, 3, 4))


def _settings_tables(info: TopicInfo, *, everything: bool) -> list[Table | str]:
    values, usual = as_settings(info.config), as_settings(DEFAULTS)
    rows = [
        (name, shown(name, value) if value == usual[name] else bold(shown(name, value)))
        for name, value in values.items()
        if everything or value != usual[name]
    ]
    tables: list[Table | str] = [facts_table("settings", rows)] if rows else []
    if not everything:
        tables.append(
            f"[dim]all {'other ' if rows else ''}settings have default values; see them with --settings[/dim]"
        )
    return tables
