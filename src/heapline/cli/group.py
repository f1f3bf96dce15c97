"""`heapline group …`: the consumer groups of a topic, their progress, their rows and their dead letters.

`group read` prints rows before it acks them: if it fails in between, a row is printed twice rather than never.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from heapline.cli.connection import NetworkGroup, TopicArgument
from heapline.cli.message_view import ago, message_json, preview, print_stream_rows
from heapline.cli.options import POSITION_HELP, Panel, Position, Seconds, YesOption, span
from heapline.cli.output import Output, alarm, bold, columns_table, confirm, count, counted, facts_table, harmless
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest
from heapline.contract.stream import GroupDeadLetter, GroupInfo, GroupOffset
from heapline.contract.subscription import Subscription
from heapline.wire.json_forms import to_json

SETTINGS = Panel("Settings")
NOTHING = 3  # exit code of a read that got no row
OUTSTANDING_MAX = 1000  # rows that are delivered and not acked
GROUP_JSON = (
    "one object per group, with name, topic, lag, members, offsets (one per partition: committed, end, lag, "
    "outstanding, retrying, dead, member) and config."
)
OFFSETS_JSON = "one object per partition: partition, committed, end, lag, outstanding, retrying, dead, member."
DEAD_JSON = "one object per row: partition, offset, message_id, attempts, reason, died_at, payload_text or payload."
COUNT_JSON = '{"count": NUMBER}.'
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")]
RowsArgument = Annotated[list[str] | None, typer.Argument(metavar="P:OFFSET", help="Only these rows, such as 0:17.")]
AllOption = Annotated[bool, "--all", "All dead letters of the group."]

app = NetworkGroup(
    "group",
    example="group read jobs --group billing",
    more="Each group reads every message of a topic in due order, and can rewind. Reading also creates a group. "
    "Groups do not affect workers that pop.",
)
dead_app = NetworkGroup(
    "group dead",
    example="group dead list jobs billing",
    help="List, replay and delete the dead letters of a group: rows that failed too often.",
)
app.add_typer(dead_app, name="dead")


# -- reading -----------------------------------------------------------------------------------------------------------


@app.call(
    "read",
    example="jobs --group billing",
    json="one object per row: partition, offset, message_id, attempts, priority, enqueued_at, key, headers, "
    "payload_text or payload.",
)
async def read_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    group: Annotated[str, "-g", "Group to read for; created if it does not exist."],
    max_rows: Annotated[int | None, "--max -n", "Maximum number of rows.", Meta(ge=1)] = None,
    follow: Annotated[bool, "-f", "Keep reading new rows until Ctrl-C."] = False,
    wait: Annotated[Seconds, "-w", "End when no row has arrived for this long."] = 1.0,
    ack: Annotated[
        bool, "--ack/--no-ack", "Ack rows after they are printed; otherwise the group reads them again."
    ] = True,
    member: Annotated[str | None, "Name of the member. Default: a new unique name."] = None,
    start: Annotated[Position, f"Where a new group starts: {POSITION_HELP}."] = "earliest",
) -> None:
    """Read a topic as a member of a group: rows in due order, each acked after it is printed.

    Follow it:  [cyan]heapline group read jobs -g billing -f --json | my-program[/cyan]

    Only look, without changing anything:  [cyan]heapline group read jobs -g billing --no-ack[/cyan]

    Other members of the group read other partitions. Exit code 3 if no row arrived.
    """
    credits = OUTSTANDING_MAX if max_rows is None else min(max_rows, OUTSTANDING_MAX)
    async with hl.subscribe(
        topic, group=group, member=member, credits=credits, batches=True, start=start
    ) as subscription:
        printed = await _print_rows(out, subscription, max_rows, None if follow else wait, ack=ack)
    if not printed:
        if not out.as_json:
            out.note(await _empty_group_help(hl, topic, group))
        raise typer.Exit(NOTHING)
    outcome = "acked" if ack else "not acked: the group will read them again"
    out.note(f"{counted(printed, 'row')} {outcome}", "dim")


async def _print_rows(
    out: Output, subscription: Subscription, limit: int | None, wait: float | None, *, ack: bool
) -> int:
    """Print rows until none has arrived for `wait` seconds, and ack them. Return their number."""
    rows, printed = aiter(subscription), 0
    while limit is None or printed < limit:
        try:
            async with asyncio.timeout(wait):
                batch = await anext(rows, None)
        except TimeoutError:
            break
        if batch is None:
            break
        left = len(batch) if limit is None else min(len(batch), limit - printed)
        print_stream_rows(out, batch.messages()[:left])
        sys.stdout.flush()
        printed += left
        if ack:
            await subscription.ack({batch.partition: batch.offsets[:left].tolist()})
        elif printed >= OUTSTANDING_MAX:
            break  # no more rows arrive while these are outstanding
    return printed


async def _empty_group_help(hl: Broker, topic: str, group: str) -> str:
    offsets = await hl.group_offsets(topic, group)
    lag = sum(o.lag for o in offsets)
    text = f"no row arrived for group {bold(group)} of {escape(topic)}"
    if not lag:
        return f"{text}: it has read everything"
    readers = sorted({o.member for o in offsets if o.member is not None})
    others = f"; read by {', '.join(map(member_name, readers))}" if readers else ""
    return f"{text} ({counted(lag, 'row')} behind{others}; wait longer with --wait 1m)"


def member_name(name: str) -> str:
    r"""Return a member's name as markup. Members choose their names, which must not move the cursor.

    >>> member_name("m\x1b[2J[red]")
    'm\\x1b[2J\\[red]'
    """
    return escape(harmless(name).plain)


# -- groups ------------------------------------------------------------------------------------------------------------


def group_settings(
    ack_timeout: Annotated[Seconds | None, "Redeliver a row that is not acked after this long.", SETTINGS] = None,
    max_retries: Annotated[
        int | None, "Deliveries after the first until a row is a dead letter; 0 to 250.", SETTINGS
    ] = None,
    member_lease: Annotated[Seconds | None, "Remove a member that is silent for this long.", SETTINGS] = None,
    unused_after: Annotated[
        Seconds | None, "Stop holding the journal for a group unused for this long.", SETTINGS
    ] = None,
    observer: Annotated[
        bool | None, "Only report the lag: the group has no members and holds nothing.", SETTINGS
    ] = None,
) -> dict[str, Any]:
    """Return the settings that are given."""
    return {name: value for name, value in locals().items() if value is not None}


@app.call("create", example="jobs billing --start latest", json=GROUP_JSON, settings=group_settings)
async def create_command(
    hl: Broker,
    out: Output,
    settings: dict[str, Any],
    topic: TopicArgument,
    group: GroupArgument,
    start: Annotated[Position, f"Where the group starts: {POSITION_HELP}."] = "earliest",
) -> None:
    """Create a group. Running it again with the same settings changes nothing.

    Start yesterday, with a minute per row:
    [cyan]heapline group create jobs audit --start 1d --ack-timeout 1m[/cyan]
    """
    info = await hl.create_group(topic, group, start=start, **settings)
    out.row(to_json(info), f"group {bold(info.name)} of {info.topic} is ready: {_lag_summary(info)}")
    if not info.config.observer:
        out.hint(f"read it with:  heapline group read {info.topic} --group {escape(info.name)}")


@app.call("list", example="jobs", json=GROUP_JSON)
async def list_command(hl: Broker, out: Output, topic: TopicArgument) -> None:
    """List the groups of a topic, and how far behind each is."""
    infos = sorted(await hl.list_groups(topic), key=lambda info: info.name)
    names = ("group", "lag", "out", "dead", "members", "state", "used")
    empty = f"{bold(topic)} has no groups; create one with:  heapline group create {escape(topic)} NAME"
    out.table(infos, names, _cells, right=(1, 2, 3, 4), empty=empty, json=to_json)


@app.call("show", example="jobs billing", json=GROUP_JSON)
async def show_command(hl: Broker, out: Output, topic: TopicArgument, group: GroupArgument) -> None:
    """Show a group: its lag, its settings, and its members with their partitions."""
    info = await hl.get_group(topic, group)
    title = escape(f"{info.name} of {info.topic}")
    out.row(to_json(info), facts_table(title, _facts(info)), _offsets_table(info.offsets))


@app.call("offsets", example="jobs billing", json=OFFSETS_JSON)
async def offsets_command(hl: Broker, out: Output, topic: TopicArgument, group: GroupArgument) -> None:
    """Show how far a group has read each partition, and which member reads it."""
    out.rows(await hl.group_offsets(topic, group), _offsets_table, empty="")


@app.call("reset", example="jobs billing --where earliest", json=OFFSETS_JSON)
async def reset_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    group: GroupArgument,
    where: Annotated[Position, f"Where the group continues: {POSITION_HELP}."],
    partitions: Annotated[list[int] | None, "--partition", "Only this partition; repeatable."] = None,
    yes: YesOption = False,
) -> None:
    """Move a group to another position. Asks first.

    Moved back, the group reads rows again. Moved forward, it never reads the rows that it skips.

    An hour back:  [cyan]heapline group reset jobs billing --where 1h[/cyan]
    """
    if not yes:
        info = await hl.get_group(topic, group)
        confirm(f"Reset group {info.name} of {info.topic} ({_lag_summary(info)})?", yes)
    offsets = await hl.reset_offsets(topic, group, to=where, partitions=partitions or None)
    out.rows(offsets, _offsets_table, empty="")


@app.call("delete", example="jobs billing", json='{"topic": NAME, "group": NAME, "deleted": true}.')
async def delete_command(
    hl: Broker, out: Output, topic: TopicArgument, group: GroupArgument, yes: YesOption = False
) -> None:
    """Delete a group with its offsets and dead letters. The topic and its messages stay. Asks first."""
    info = await hl.get_group(topic, group)
    members = f", {counted(len(info.members), 'active member')}" if info.members else ""
    confirm(f"Delete group {info.name} of {info.topic} ({_lag_summary(info)}{members})?", yes)
    await hl.delete_group(topic, group)
    deleted = {"topic": info.topic, "group": info.name, "deleted": True}
    out.row(deleted, f"group {bold(info.name)} of {info.topic} deleted")


# -- dead letters ------------------------------------------------------------------------------------------------------


@dead_app.call("list", example="jobs billing", json=DEAD_JSON)
async def dead_list_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    group: GroupArgument,
    limit: Annotated[int, "-n", "Maximum number of rows.", Meta(ge=1)] = 100,
) -> None:
    """List the dead letters of a group, and why they failed."""
    letters = await hl.group_dead_list(topic, group, limit)
    empty = f"group {bold(group)} of {escape(topic)} has no dead letters"
    names = ("row", "message_id", "tries", "died", "reason", "payload")
    out.table(letters, names, _dead_cells, right=(2,), empty=empty, json=message_json, limit=limit)


@dead_app.call("replay", example="jobs billing --all", json=COUNT_JSON)
async def dead_replay_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    group: GroupArgument,
    rows: RowsArgument = None,
    everything: AllOption = False,
) -> None:
    """Deliver dead letters of a group to it again, with all their retries."""
    named = _chosen("replay", topic, group, rows, everything)
    replayed = await hl.group_dead_replay(topic, group, named)
    out.row({"count": replayed}, f"{counted(replayed, 'row')} will be delivered to group {bold(group)} again")
    wanted = sum(len(set(offsets)) for offsets in (named or {}).values())
    if replayed < wanted:
        raise BadRequest(
            f"{wanted - replayed} of the {wanted} rows are not dead letters of group {group}: they were replayed or "
            f"deleted before (heapline group dead list {topic} {group} shows the dead letters)"
        )


@dead_app.call("delete", example="jobs billing 0:17", json=COUNT_JSON)
async def dead_delete_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    group: GroupArgument,
    rows: RowsArgument = None,
    everything: AllOption = False,
    yes: YesOption = False,
) -> None:
    """Delete dead letters of a group permanently. The topic's messages stay. Asks first."""
    named = _chosen("delete", topic, group, rows, everything)
    which = "all dead letters" if everything else counted(len(set(rows or ())), "row")
    confirm(f"Permanently delete {which} of group {group} of {topic}?", yes)
    deleted = await hl.group_dead_delete(topic, group, named)
    out.row({"count": deleted}, f"{counted(deleted, 'row')} of group {bold(group)} deleted")


def _chosen(verb: str, topic: str, group: str, rows: list[str] | None, everything: bool) -> dict[int, list[int]] | None:
    """Return the offsets of the named rows by partition, or None for all rows."""
    if bool(rows) == everything:
        raise BadRequest(
            f"select rows such as 0:17 (partition:offset), or --all (heapline group dead list {topic} {group} shows "
            f"them; see heapline group dead {verb} --help)"
        )
    named: dict[int, list[int]] = {}
    for row in rows or ():
        partition, _, offset = row.partition(":")
        named.setdefault(_number(partition), []).append(_number(offset))
    return named or None


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise typer.BadParameter(f"{text!r} is not a number from 0; use PARTITION:OFFSET, such as 0:17")


# -- for people --------------------------------------------------------------------------------------------------------


def _offsets_table(offsets: list[GroupOffset]) -> Table:
    names = ("partition", "committed", "end", "lag", "out", "retrying", "dead", "member")
    rows = []
    for o in offsets:
        position = str(o.partition), count(o.committed), count(o.end), _lag(o.lag)
        failed = count(o.retrying), alarm(o.dead)
        rows.append((*position, count(o.outstanding), *failed, member_name(o.member or "")))
    if len(offsets) > 1:
        lag, out, retrying, dead = (
            count(sum(getattr(o, name) for o in offsets)) for name in ("lag", "outstanding", "retrying", "dead")
        )
        rows.append(("all", "", "", lag, out, retrying, dead, ""))
    return columns_table("", names, rows, right=(0, 1, 2, 3, 4, 5, 6))


def _dead_cells(letter: GroupDeadLetter) -> tuple[str | Text, ...]:
    row = f"{letter.partition}:{letter.offset}", letter.message_id, str(letter.attempts), ago(letter.died_at)
    return *row, harmless(letter.reason), preview(letter.payload)


def _cells(info: GroupInfo) -> tuple[str, ...]:
    out, dead = sum(o.outstanding for o in info.offsets), sum(o.dead for o in info.offsets)
    counts = _lag(info.lag), count(out), alarm(dead), count(len(info.members))
    return escape(info.name), *counts, _state(info), ago(info.used_at)


def _state(info: GroupInfo) -> str:
    if info.config.observer:
        return "observer"
    return "holds the journal" if info.holding else "[yellow]unused[/yellow]"


def _facts(info: GroupInfo) -> list[tuple[str, str]]:
    config = info.config
    members = []
    for name, partitions in sorted(info.members.items()):
        read = ", ".join(map(str, partitions)) or "nothing (there are more members than partitions)"
        members.append(f"{member_name(name)} reads {read}")
    return [
        ("lag", _lag_summary(info)),
        ("state", _state(info)),
        ("members", "\n".join(members) or "none"),
        ("generation", f"{count(info.generation)} (increases when partitions move between members)"),
        ("redelivery", f"{span(config.ack_timeout)} after a delivery without ack, at most {config.max_retries} times"),
        ("member timeout", span(config.member_lease)),
        ("used", ago(info.used_at)),
    ]


def _lag_summary(info: GroupInfo) -> str:
    return f"{counted(info.lag, 'row')} behind" if info.lag else "up to date"


def _lag(number: int) -> str:
    return f"[bold]{count(number)}[/bold]" if number else "0"
