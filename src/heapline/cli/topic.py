"""`heapline topic …`: the topics of a server, and their settings as flags.

Each field of TopicConfig, and of its backoff, is a flag. The table says how it is typed and described; a test enforces
that no field is missing. TopicConfig decides, at the server, whether a value is valid.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NamedTuple

import msgspec
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from heapline.cli.connection import NetworkGroup, TopicArgument
from heapline.cli.message_view import clock, rounded, states_of
from heapline.cli.options import Panel, Seconds, Size, Time, Value, YesOption, pair, span, with_signature
from heapline.cli.output import (
    Output,
    alarm,
    bold,
    columns_table,
    confirm,
    count,
    counted,
    depths,
    facts_table,
    harmless,
    size,
)
from heapline.contract.broker import Broker
from heapline.contract.config import FIXED_FIELDS, Aging, Backoff, TopicConfig
from heapline.contract.errors import BadRequest, PermissionDenied, TopicNotFound, Unsupported
from heapline.contract.message import LogStats, PartitionStats, TopicInfo, TopicStats
from heapline.wire.json_forms import to_json

JSON_HELP = (
    "one object per topic, with topic, incarnation, config (its settings, in seconds and bytes) and, if you may read "
    "them, stats (ready, delayed, leased, dead, …)."
)

# -- settings ----------------------------------------------------------------------------------------------------------

DEFAULTS = TopicConfig()
BACKOFF = "backoff_"
_FLAGS = {"ordering": "--aging", "partition_weights": "--partition-weight"}


class Setting(NamedTuple):
    name: str  # a field of the config, or backoff_ and a field of the backoff
    kind: Any  # the annotation of an option's value
    help: str
    panel: Panel


#: Panel -> name, the annotation of the option's value, and help. A name is a field of the config, or of its backoff.
_TABLE: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "Order": (
        ("mode", Annotated[str, Value("min|max")], "Which priority is served first: the smallest or the largest."),
        ("ordering", Annotated[float, Value("RATE")], "How much more urgent waiting messages become per second."),
        ("fairness", Annotated[str, Value("none|keys")], "keys: within a priority, fairness keys take turns."),
        ("partitions", int, "1 to 1024; can grow, never shrink. Order holds across all partitions."),
        ("k", int, "A popped message is among the k best; 1 means exact order."),
        ("strategy", str, "How pops choose partitions: best_first, round_robin or weighted. Only best_first keeps "
         "the order across partitions."),
        ("partition_weights", Annotated[list[str], Value("P=WEIGHT")], "Share of a partition, such as 0=2.5, for "
         "--strategy weighted; repeatable."),
        ("max_staleness", Seconds, "Age at which a partition's candidate is fetched again; 0 means no limit."),
        ("min_freshness", Seconds, "How long a new best message must be known before it is delivered."),
    ),
    "Delivery": (
        ("visibility_default", Seconds, "Length of a lease if the pop does not set one."),
        ("lease_max", Seconds, "How long after its pop a lease can be extended."),
        ("max_inflight", int, "Maximum number of leased messages; 0 means no limit."),
        ("max_inflight_per_key", int, "Maximum number of leased messages per fairness key; needs --fairness keys."),
        ("max_pops_per_second", float, "Maximum number of messages delivered per second; 0 means no limit."),
    ),
    "Retries": (
        ("max_retries_default", int, "Deliveries after the first until a message is dead; 0 to 250."),
        ("backoff_base", Seconds, "Delay before the first retry."),
        ("backoff_factor", float, "Factor by which each further delay grows; 1 means constant."),
        ("backoff_max", Seconds, "Longest delay."),
        ("backoff_jitter", float, "Random share of a delay; 0 to 1."),
        ("dlq", bool, "Keep dead messages, so that you can inspect and replay them."),
        ("dlq_retention", Seconds, "How long dead letters are kept; 0 means forever."),
        ("dlq_max_letters", int, "Number of dead letters above which the oldest are deleted; 0 means no limit."),
        ("dlq_max_bytes", Size, "Size of dead letters above which the oldest are deleted; 0 means no limit."),
    ),
    "Limits": (
        ("max_backlog", int, "Maximum number of ready and delayed messages; 0 means no limit."),
        ("max_payload_bytes", Size, "Largest payload that is accepted."),
        ("dedup_window", Seconds, "How long idempotency keys are remembered."),
    ),
    "Network": (
        ("compression", Annotated[str, Value("none|zstd")], "zstd: compress calls and answers over 4KiB if client and "
         "server have zstd; over gRPC, gzip answers."),
    ),
    "Storage": (
        ("retention", Seconds, "How long the journal of removed messages, or on PostgreSQL their events, are kept."),
        ("retention_bytes", Size, "Journal size above which the oldest of that is deleted; 0 means no limit."),
        ("retention_margin", int, "Rows to keep before the offset of the slowest group."),
        ("retention_hard_bytes", Size, "Journal size above which even unread rows are deleted; 0 means no limit."),
        ("retention_hard_age", Seconds, "Age at which even unread rows are deleted; 0 means no limit."),
        ("segment_bytes", Size, "Size of a journal file, 1MiB to 1GiB."),
        ("fsync", str, "commit: acknowledged data is on disk. interval and os do not guarantee that."),
        ("fsync_interval", Seconds, "Time between syncs, with --fsync interval."),
        ("tick", Seconds, "How late an idle timer may fire, 10ms to 1s."),
        ("streams", bool, "Record which messages became due, so that groups can read the topic."),
    ),
}  # fmt: skip
SETTINGS = [Setting(*row, Panel(panel)) for panel, rows in _TABLE.items() for row in rows]


def _options(updating: bool) -> dict[str, tuple[Any, Any]]:
    return {setting.name: (_annotation(setting, updating), None) for setting in SETTINGS}


def _annotation(setting: Setting, updating: bool) -> Any:
    flag = _FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
    if setting.kind is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    is_fixed = setting.name in FIXED_FIELDS
    help = setting.help
    if is_fixed:
        help += " Cannot be changed later."
    if not updating:
        help += f" \\[default: {shown(setting.name, as_settings(DEFAULTS)[setting.name])}]"
    more = {"hidden": updating and is_fixed, "show_default": False}
    return Annotated[setting.kind | None, flag, help, setting.panel, more]


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were typed."""
    return {name: value for name, value in values.items() if value not in (None, [])}


def config_fields(settings: dict[str, Any], backoff: Backoff) -> dict[str, Any]:
    """Return the arguments of create_topic and update_topic. Fields of the backoff that are not given stay."""
    fields = {name: value for name, value in settings.items() if not name.startswith(BACKOFF)}
    parts = {name.removeprefix(BACKOFF): value for name, value in settings.items() if name.startswith(BACKOFF)}
    if parts:
        fields["backoff"] = msgspec.structs.replace(backoff, **parts)
    if "ordering" in fields:
        fields["ordering"] = Aging(fields["ordering"])
    if "partition_weights" in fields:
        fields["partition_weights"] = dict(_weight(text) for text in fields["partition_weights"])
    return fields


def _weight(text: str) -> tuple[int, float]:
    partition, weight = pair(text)
    try:
        return int(partition), float(weight)
    except ValueError:
        raise BadRequest(f"--partition-weight {text!r} is invalid; use PARTITION=WEIGHT, such as 0=2.5") from None


def as_settings(config: TopicConfig) -> dict[str, Any]:
    """Return every setting of a topic by its name in the table."""
    values = {s.name: getattr(config, s.name) for s in SETTINGS if not s.name.startswith(BACKOFF)}
    return values | {f"{BACKOFF}{name}": value for name, value in msgspec.structs.asdict(config.backoff).items()}


def shown(name: str, value: Any) -> str:
    """Return the value of a setting in the form in which it is typed."""
    kind = next(setting.kind for setting in SETTINGS if setting.name == name)
    if kind is Seconds:
        return span(value)
    if kind is Size:
        return size(value).replace(" ", "").replace(".0", "")
    if isinstance(value, Aging):
        return f"{value.rate:g} per second"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{partition}={weight:g}" for partition, weight in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


new_topic = with_signature(lambda **values: _given(values), _options(updating=False))
#: Flags of fixed settings are hidden in --help but accepted, so that the topic explains why they cannot change.
changed_topic = with_signature(lambda **values: _given(values), _options(updating=True))


# -- commands ----------------------------------------------------------------------------------------------------------

app = NetworkGroup("topic", example="topic create jobs && heapline put jobs hello && heapline topic list")


@app.call("create", example="jobs", json=JSON_HELP, settings=new_topic)
async def create_command(hl: Broker, out: Output, settings: dict[str, Any], topic: TopicArgument) -> None:
    """Create a topic. Running it again with the same settings changes nothing.

    Largest priority first, leases of a minute, dead after three retries:
    [cyan]heapline topic create mail --mode max --visibility-default 1m --max-retries-default 3[/cyan]
    """
    info = await hl.create_topic(topic, **config_fields(settings, DEFAULTS.backoff))
    out.row(
        _json(info),
        f"topic {bold(info.name)} is ready: {_summary(info)}",
        f"[dim]enqueue a message with:  heapline put {info.name} hello[/dim]",
    )


@app.call("list", example="", json=JSON_HELP)
async def list_command(hl: Broker, out: Output) -> None:
    """List all topics, and how many messages each holds."""
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


@app.call("show", example="jobs", json=JSON_HELP)
async def show_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    settings: Annotated[bool, "Show all settings, even those with default values."] = False,
) -> None:
    """Show the state and the settings of a topic."""
    info = await hl.get_topic(topic)
    stats = await _stats(hl, topic)
    tables: list[Table | str] = []
    if stats is not None:
        tables.append(facts_table(info.name, _state_facts(stats)))
        if len(stats.partitions) > 1:
            tables.append(_partitions_table(stats.partitions))
    out.row(_json(info, stats), *tables, *_settings_tables(info, everything=settings))


@app.call("update", example="jobs --max-retries-default 5 --backoff-base 10s", json=JSON_HELP, settings=changed_topic)
async def update_command(hl: Broker, out: Output, settings: dict[str, Any], topic: TopicArgument) -> None:
    """Change settings of a topic. Settings that you omit stay, and delivery continues meanwhile.

    Settings that cannot be changed later: --mode, --aging, --fairness, --segment-bytes, --streams.
    """
    if not settings:
        raise BadRequest("no change given; use at least one setting, see heapline topic update --help")
    before = await hl.get_topic(topic)
    info = await hl.update_topic(topic, **config_fields(settings, before.config.backoff))
    old, new = as_settings(before.config), as_settings(info.config)
    changed = [(n, shown(n, old[n]), bold(shown(n, new[n]))) for n in new if new[n] != old[n]]
    table = columns_table(f"changed topic {info.name}", ("setting", "before", "now"), changed)
    out.row(_json(info), table if changed else f"topic {bold(info.name)} already has these settings")


@app.call("pause", example="jobs", json='{"topic": NAME, "paused": true, "until": TIME or null}.')
async def pause_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    duration: Annotated[Seconds | None, "--for", "Resume automatically after this long."] = None,
    until: Annotated[Time | None, "Resume automatically at 2030-01-31T12:00:00Z."] = None,
) -> None:
    """Stop delivering messages of a topic. You can still enqueue, ack and inspect.

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


@app.call("resume", example="jobs", json='{"topic": NAME, "paused": false}.')
async def resume_command(hl: Broker, out: Output, topic: TopicArgument) -> None:
    """Resume delivery of a paused topic."""
    await hl.resume_topic(topic)
    out.row({"topic": topic, "paused": False}, f"topic {bold(topic)} delivers messages")


@app.call("purge", example="jobs", json='{"topic": NAME, "count": NUMBER}.')
async def purge_command(hl: Broker, out: Output, topic: TopicArgument, yes: YesOption = False) -> None:
    """Remove all ready and delayed messages of a topic. Leased messages and dead letters stay.

    Asks first; messages that are enqueued meanwhile then stay too.
    """
    info, before = await hl.get_topic(topic), None
    if not yes:
        held = "all waiting messages"
        with contextlib.suppress(PermissionDenied, Unsupported):
            found = await hl.purge_count(topic)
            held, before = counted(found.count, "waiting message"), found.as_of
        confirm(f"Permanently remove {held} of topic {info.name}?", yes)
    purged = await hl.purge(topic, enqueued_before=before)
    out.row({"topic": info.name, "count": purged}, f"{counted(purged, 'message')} removed from topic {bold(info.name)}")


@app.call("delete", example="jobs", json='{"topic": NAME, "deleted": true}.')
async def delete_command(hl: Broker, out: Output, topic: TopicArgument, yes: YesOption = False) -> None:
    """Delete a topic permanently, with its messages, dead letters and journal. Asks first."""
    info = await hl.get_topic(topic)
    if not yes:
        stats = await _stats(hl, topic)
        held = depths(states_of(stats)) if stats else "all its messages"
        confirm(f"Permanently delete topic {info.name}, with {held}?", yes)
    await hl.delete_topic(topic)
    out.row({"topic": info.name, "deleted": True}, f"topic {bold(info.name)} deleted")


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


def _cells(stats: TopicStats | PartitionStats | None) -> tuple[str, ...]:
    if stats is None:
        return ("?",) * 5
    depths = count(stats.ready), count(stats.delayed), count(stats.leased), alarm(stats.dead)
    if isinstance(stats, PartitionStats):
        return *depths, "" if stats.throttled is None else escape(harmless(stats.throttled).plain) or "yes"
    return *depths, "paused" if stats.paused else rounded(stats.oldest_ready_age)


def _state_facts(stats: TopicStats) -> list[tuple[str, str | Text | None]]:
    age = rounded(stats.oldest_ready_age)
    names = {"enqueued": "enqueued", "acked": "acked", "nacked": "nacked", "lease_timeouts": "timed out"}
    totals = ", ".join(f"{count(getattr(stats, f'{name}_total'))} {text}" for name, text in names.items())
    return [
        ("delivery", "[yellow]paused[/yellow]" if stats.paused else ""),
        ("ready", count(stats.ready) + (f", oldest for {age}" if age else "")),
        ("delayed", count(stats.delayed) + _next_due(stats)),
        ("leased", count(stats.leased)),
        ("dead", alarm(stats.dead)),
        ("since the server started", totals),
        ("journal", _journal(stats.log) if stats.log is not None else ""),
        ("durability", stats.durability),
        ("last audit", _audit(stats.log)),
    ]


def _audit(log: LogStats | None) -> Text | None:
    found = None if log is None else log.audit
    if found is None:
        return None
    verdict = f"{count(found.lost)} lost, {count(found.doubled)} doubled, {count(found.early)} early"
    broken = f"; broken: {', '.join(found.refuted)}" if found.refuted else ""
    others = f", with {counted(found.topics - 1, 'other topic')}" if found.topics > 1 else ""
    rest = f"{broken}; {counted(found.messages, 'message')}{others}, up to {clock(found.until)}"
    return Text.assemble((verdict, "red" if found.refuted else "green"), harmless(rest))


@app.call("due", example="jobs", json="one object: overdue, hour (by minute), day (by half hour), later.")
async def due_command(hl: Broker, out: Output, topic: TopicArgument) -> None:
    """Show when delayed messages become due, over the next hour and day, and where many do at once."""
    found = await hl.due_times(topic)
    spans = [part for part in (*found.hour, *found.day[2:]) if part.count]
    cells = [
        (clock(part.at), span(part.seconds), count(part.count), "[yellow]herd[/yellow]" if part.is_herd else "")
        for part in spans
    ]
    rest = depths({name: n for name, n in (("overdue", found.overdue), ("later", found.later)) if n})
    names = ("from", "within", "messages", "")
    shown: list[Table | str] = [columns_table("", names, cells, right=(1, 2))] if cells else []
    shown += [rest] if rest else []
    out.row(to_json(found), *(shown or [f"nothing is delayed in {bold(topic)}"]))


def _journal(log: LogStats) -> str:
    return f"{size(log.journal_bytes)} in {counted(log.journal_segments, 'segment')}"


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
