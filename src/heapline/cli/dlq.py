"""`heapline dlq list|groups|count|replay|delete`: the dead letters of a topic."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.table import Table

from heapline.cli.connection import NetworkGroup, TopicArgument
from heapline.cli.message_view import JSON_HELP, ago, message_json, messages_table
from heapline.cli.options import Panel, Past, YesOption
from heapline.cli.output import Output, bold, columns_table, confirm, count, counted, harmless
from heapline.contract.broker import Broker
from heapline.contract.dead_letters import DeadLetterGroup
from heapline.contract.errors import BadRequest
from heapline.contract.ids import parse_id
from heapline.contract.message import DlqFilter
from heapline.wire.json_forms import to_json

PANEL = Panel("Which dead letters")
COUNT_MAX = 100  # letters counted before a question: they are transferred with their payloads
COUNT_JSON = '{"count": NUMBER}.'

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Only these messages.")]
AllOption = Annotated[bool, "--all", "All dead letters.", PANEL]


_AFTER_HELP = "Died after this time: 2030-01-31T12:00:00Z, or how long ago, such as 2h."
_REASON_HELP = "Only letters whose reason contains this text (case-insensitive)."


def _filter(
    reason: Annotated[str | None, _REASON_HELP, PANEL] = None,
    key: Annotated[str | None, "Only this partition key.", PANEL] = None,
    priority_min: Annotated[int | None, "Smallest priority.", PANEL] = None,
    priority_max: Annotated[int | None, "Largest priority.", PANEL] = None,
    died_after: Annotated[Past | None, _AFTER_HELP, PANEL] = None,
    died_before: Annotated[Past | None, "Died before this time.", PANEL] = None,
) -> DlqFilter | None:
    priorities = {"priority_min": priority_min, "priority_max": priority_max}
    where = DlqFilter(reason=reason, key=key, **priorities, died_after=died_after, died_before=died_before)
    return None if where == DlqFilter() else where


app = NetworkGroup(
    "dlq",
    example="dlq list jobs --reason timeout",
    more="A dead letter is a message that has no retries left, or that was buried.",
)


@app.call("list", example="jobs --died-after 1h", json=JSON_HELP, where=_filter)
async def list_command(
    hl: Broker,
    out: Output,
    where: DlqFilter | None,
    topic: TopicArgument,
    limit: Annotated[int, "-n", "Maximum number of dead letters.", Meta(ge=1)] = 100,
) -> None:
    """List the dead letters of a topic and why they died, oldest first."""
    infos = await hl.dlq_list(topic, limit, where=where)
    empty = f"{bold(topic)} has no {'matching ' if where else ''}dead letters"
    table = partial(messages_table, out.console, dead=True)
    out.rows(infos, table, empty=empty, json=message_json, limit=limit)


@app.call("replay", example="jobs --all --rate 50", json=COUNT_JSON, where=_filter)
async def replay_command(
    hl: Broker,
    out: Output,
    where: DlqFilter | None,
    topic: TopicArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    rate: Annotated[float | None, "Maximum number that become due per second."] = None,
) -> None:
    """Return dead letters to their topic, with all their retries."""
    _check_chosen("replay", topic, ids, everything, where)
    replayed = await hl.dlq_replay(topic, ids or None, where=where, rate=rate)
    out.row({"count": replayed}, f"{counted(replayed, 'dead letter')} replayed into {bold(topic)}")
    named = len({parse_id(id)[0] for id in ids or ()})
    if replayed < named and where is None:  # a letter that a filter excludes is not an error
        raise BadRequest(
            f"{named - replayed} of the {named} ids are not dead letters of {topic}: they were replayed or deleted "
            f"before, or belong to another topic (heapline dlq list {topic} shows the dead letters)"
        )


@app.call("delete", example="jobs --died-before 30d", json=COUNT_JSON, where=_filter)
async def delete_command(
    hl: Broker,
    out: Output,
    where: DlqFilter | None,
    topic: TopicArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    yes: YesOption = False,
) -> None:
    """Delete dead letters permanently. Asks first."""
    _check_chosen("delete", topic, ids, everything, where)
    where = DlqFilter() if everything else where  # an empty filter matches all letters, explicitly
    if not yes:
        confirm(f"Permanently delete {await _describe(hl, topic, ids, where)} of {topic}?", yes)
    deleted = await hl.dlq_delete(topic, ids or None, where=where)
    out.row({"count": deleted}, f"{counted(deleted, 'dead letter')} of {bold(topic)} deleted")


@app.call("groups", example="jobs", json="one object per group: reason, count, match, example, tasks, message_ids, …")
async def groups_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    limit: Annotated[int, "-n", "Maximum number of groups.", Meta(ge=1, le=200)] = 20,
) -> None:
    """Show the dead letters of a topic by reason, the largest group first. Numbers and ids in reasons are ignored."""
    found = await hl.dlq_groups(topic, limit)
    out.rows(found.items, _groups_table, empty=f"{bold(topic)} has no dead letters", json=to_json)
    if found.others:
        out.note(f"{counted(found.others, 'dead letter')} of other reasons", "dim")


def _groups_table(groups: list[DeadLetterGroup]) -> Table:
    rows = [
        (count(group.count), harmless(group.reason), harmless(", ".join(group.tasks)), ago(group.last_at))
        for group in groups
    ]
    return columns_table("", ("count", "reason", "tasks", "last"), rows, right=(0,))


@app.call("count", example="jobs --reason timeout", json='{"count": NUMBER, "as_of": TIME}.', where=_filter)
async def count_command(hl: Broker, out: Output, where: DlqFilter | None, topic: TopicArgument) -> None:
    """Report how many dead letters the options select, and how to replay or delete only those."""
    found = await hl.dlq_count(topic, where)
    as_of = found.as_of.isoformat().replace("+00:00", "Z")
    out.row(found, f"{counted(found.count, 'dead letter')}; to replay or delete only these, add --died-before {as_of}")


def _check_chosen(verb: str, topic: str, ids: Any, everything: bool, where: DlqFilter | None) -> None:
    if everything and (ids or where):
        raise BadRequest("--all selects all dead letters; omit it to select by id or with an option")
    if not (everything or ids or where):
        raise BadRequest(
            f"select dead letters by id, with an option such as --reason, or with --all (heapline dlq list {topic} "
            f"shows them; see heapline dlq {verb} --help)"
        )


async def _describe(hl: Broker, topic: str, ids: list[str] | None, where: DlqFilter | None) -> str:
    """Return how many letters a question is about."""
    if ids:
        return counted(len(set(ids)), "dead letter")
    if where == DlqFilter():
        return f"all {counted((await hl.stats(topic)).dead, 'dead letter')}"
    matching = len(await hl.dlq_list(topic, COUNT_MAX, where=where))
    return f"{count(matching)} dead letters or more" if matching == COUNT_MAX else counted(matching, "dead letter")
