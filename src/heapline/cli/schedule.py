"""`heapline schedule create|list|show|pause|resume|delete`: messages that the server enqueues by the calendar."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from heapline.cli.connection import NetworkGroup, TopicArgument
from heapline.cli.message import message_fields
from heapline.cli.message_view import Facts, ago, full_payload, message_json
from heapline.cli.options import Panel, Seconds, Time, Value, YesOption, span
from heapline.cli.output import Output, bold, confirm, count, facts_table, harmless
from heapline.contract.broker import Broker
from heapline.contract.cron import cron_times
from heapline.contract.message import EPOCH
from heapline.contract.schedules import ScheduleInfo

WHEN = Panel("When it fires")
FIRINGS_SHOWN = 3  # after the next one
STYLES = {"active": "green", "paused": "yellow", "failing": "red", "over": "dim"}
JSON_HELP = (
    "one object per schedule, with the names of the HTTP API (name, topic, state, next_at, fired_count, …); the "
    "payload is payload_text, or payload in base64 if it is not UTF-8."
)
CRON_HELP = (
    'Minute, hour, day of month, month, day of week. "30 3 * * 1-5" is half past three on working days. Also: @hourly, '
    "@daily, @weekly, @monthly."
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Schedule name, or namespace/name.")]

app = NetworkGroup("schedule", example='schedule create nightly jobs report --cron "0 3 * * *" --tz Europe/Berlin')


def firing(
    cron: Annotated[str | None, CRON_HELP, WHEN, Value("EXPRESSION")] = None,
    every: Annotated[Seconds | None, "Interval instead of --cron: 90s, 15m, 6h.", WHEN] = None,
    tz: Annotated[str | None, "Time zone of --cron, such as Europe/Berlin. Default: UTC.", WHEN, Value("ZONE")] = None,
    starts: Annotated[
        Time | None, "No firing before 2030-01-31T12:00:00Z. With --every, the time of the first.", WHEN
    ] = None,
    ends: Annotated[Time | None, "No firing from this time on.", WHEN] = None,
    misfire: Annotated[
        str,
        "What to do with firings missed while the server was down: skip them, enqueue the latest once, or all.",
        WHEN,
        Value("skip|once|all"),
    ] = "once",
    grace: Annotated[Seconds, "A firing this late still counts as on time, whatever --misfire says.", WHEN] = 60.0,
    makeup_max: Annotated[int, "Maximum number of missed firings with --misfire all.", WHEN] = 100,
) -> dict[str, Any]:
    """Return when a schedule fires, and what happens to missed firings."""
    return locals()


@app.call("create", json=JSON_HELP, times=firing, message=message_fields)
async def create_command(
    hl: Broker,
    out: Output,
    times: dict[str, Any],
    message: dict[str, Any],
    name: NameArgument,
    topic: TopicArgument,
    payload: Annotated[str, typer.Argument(metavar="PAYLOAD", help="Message text.")] = "",
) -> None:
    """Create a schedule, or change the schedule of that name. Firings due before the change have been enqueued.

    Every night at three in Berlin, in summer and winter:
    [cyan]heapline schedule create nightly jobs report --cron "0 3 * * *" --tz Europe/Berlin[/cyan]

    Every 15 minutes, including the missed ones:
    [cyan]heapline schedule create sync jobs '{"what": "sync"}' --every 15m --misfire all[/cyan]
    """
    message["payload"] = payload.encode("utf-8", "surrogateescape")
    info = await hl.create_schedule(name, topic=topic, **times, **message)
    text = f"schedule {bold(info.name)} enqueues into {bold(info.topic)} {escape(_timing(info))}"
    out.row(message_json(info), text, *_next_firing(info))


@app.call("list", example="", json=JSON_HELP)
async def list_command(hl: Broker, out: Output) -> None:
    """List all schedules, and when each fires next in your time zone."""
    infos = await hl.list_schedules()
    names = ("schedule", "topic", "when", "state", "next", "fired")
    empty = (
        "there are no schedules; create one with:\n"
        "  heapline schedule create nightly jobs report --cron '0 3 * * *' --tz Europe/Berlin"
    )
    out.table(infos, names, _cells, right=(5,), empty=empty, json=message_json)
    for info in infos:
        if info.problem is not None and not out.as_json:
            out.console.print(Text.assemble((info.name, "bold"), " does not fire: ", harmless(info.problem)))


@app.call("show", example="nightly", json=JSON_HELP)
async def show_command(hl: Broker, out: Output, name: NameArgument) -> None:
    """Show one schedule: when it fires, what it enqueues, and its state."""
    info = await hl.get_schedule(name)
    out.row(message_json(info), facts_table(escape(info.name), _facts(info)))


@app.call("pause", example="nightly", json=JSON_HELP)
async def pause_command(hl: Broker, out: Output, name: NameArgument) -> None:
    """Stop a schedule until it is resumed, across restarts of the server."""
    info = await hl.pause_schedule(name)
    out.row(message_json(info), f"schedule {bold(info.name)} is paused", *_next_firing(info))


@app.call("resume", example="nightly", json=JSON_HELP)
async def resume_command(hl: Broker, out: Output, name: NameArgument) -> None:
    """Resume a paused schedule. Firings missed during the pause are not made up."""
    info = await hl.resume_schedule(name)
    out.row(message_json(info), f"schedule {bold(info.name)} is active", *_next_firing(info))


@app.call("delete", example="nightly", json='{"name": NAME, "deleted": true}.')
async def delete_command(hl: Broker, out: Output, name: NameArgument, yes: YesOption = False) -> None:
    """Delete a schedule. Messages that it has enqueued stay in the topic. Asks first."""
    info = await hl.get_schedule(name)
    confirm(f"Delete schedule {info.name}, which enqueues into {info.topic} {_timing(info)}?", yes)
    await hl.delete_schedule(name)
    out.row({"name": info.name, "deleted": True}, f"schedule {bold(info.name)} deleted")


# -- for people --------------------------------------------------------------------------------------------------------


def _timing(info: ScheduleInfo) -> str:
    return f"every {span(info.every)}" if info.every is not None else f"at {info.cron} {info.tz}"


def _state(info: ScheduleInfo) -> str:
    return f"[{STYLES[info.state]}]{info.state}[/]"


def _local(at: datetime | None) -> str:
    """Return a time in the local time zone."""
    return "" if at is None else at.astimezone().strftime("%a %Y-%m-%d %H:%M:%S %Z")


def _next(info: ScheduleInfo) -> str:
    if info.next_at is None:
        return ""
    is_late = info.next_at <= datetime.now(UTC)
    return "now" if is_late else f"{_local(info.next_at)}, {ago(info.next_at)}"


def _next_firing(info: ScheduleInfo) -> list[str]:
    if info.paused_at is not None:
        return [f"[dim]resume it with:  heapline schedule resume {escape(info.name)}[/dim]"]
    return [f"next firing: {_next(info)}"] if info.next_at is not None else []


def _cells(info: ScheduleInfo) -> tuple[str, ...]:
    names = escape(info.name), escape(info.topic), escape(_timing(info))
    return *names, _state(info), _next(info), count(info.fired_count)


def _facts(info: ScheduleInfo) -> Facts:
    return [
        ("state", _state(info)),
        ("problem", harmless(info.problem or "")),
        ("topic", harmless(info.topic)),
        ("when", harmless(_timing(info))),
        ("starts", _local(info.starts)),
        ("ends", _local(info.ends)),
        ("next", _next(info) or "never" if info.paused_at is None else "not while it is paused"),
        *(("and then", _local(at)) for at in islice(_following(info), FIRINGS_SHOWN)),
        ("fired", f"{count(info.fired_count)} times" + (f", last {ago(info.fired_at)}" if info.fired_at else "")),
        ("missed firings", _misfire(info)),
        ("message", full_payload(info.payload)),
        ("priority", str(info.priority or "")),
        ("key", harmless(info.key or "")),
        ("fairness key", harmless(info.fairness_key or "")),
        ("ttl", None if info.ttl is None else span(info.ttl)),
        ("max retries", None if info.max_retries is None else str(info.max_retries)),
        *((Text.assemble("header ", harmless(name)), harmless(value)) for name, value in info.headers.items()),
    ]


def _misfire(info: ScheduleInfo) -> str:
    policies = {
        "skip": "skipped",
        "once": "made up by the latest one",
        "all": f"all made up, at most {info.makeup_max}",
    }
    return f"{policies[info.misfire]}; a firing is missed if it is more than {span(info.grace)} late"


def _following(info: ScheduleInfo) -> Iterator[datetime]:
    """Yield the firings after the next one, calculated on this machine."""
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
