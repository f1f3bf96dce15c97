"""`heapline dlq list|replay|delete`: the dead letters of a topic."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from heapline.cli.connection import OptionSet, TopicArgument, over_network
from heapline.cli.main import CommandGroup
from heapline.cli.message_view import JSON_HELP, message_json, messages_table
from heapline.cli.output import Output, YesOption, bold, confirm, count, counted
from heapline.cli.units import option, past_option
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest
from heapline.contract.ids import parse_id
from heapline.contract.message import DlqFilter

PANEL = "Which dead letters"
COUNT_MAX = 100  # letters counted before a question: they are transferred with their payloads
COUNT_JSON = '{"count": NUMBER}.'

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Only these messages.")]
AllOption = Annotated[bool, option("--all", "All dead letters.", panel=PANEL)]


def _filter(**given: Any) -> DlqFilter | None:
    where = DlqFilter(**given)
    return None if where == DlqFilter() else where


_AFTER_HELP = "Died after this time: 2030-01-31T12:00:00Z, or how long ago, such as 2h."
_REASON_HELP = "Only letters whose reason contains this text (case-insensitive)."
FILTER = OptionSet(
    {
        "reason": (Annotated[str | None, option("--reason", _REASON_HELP, panel=PANEL)], None),
        "key": (Annotated[str | None, option("--key", "Only this partition key.", panel=PANEL)], None),
        "priority_min": (Annotated[int | None, option("--priority-min", "Smallest priority.", panel=PANEL)], None),
        "priority_max": (Annotated[int | None, option("--priority-max", "Largest priority.", panel=PANEL)], None),
        "died_after": (Annotated[datetime | None, past_option("--died-after", _AFTER_HELP, PANEL)], None),
        "died_before": (
            Annotated[datetime | None, past_option("--died-before", "Died before this time.", PANEL)],
            None,
        ),
    },
    _filter,
)

app = CommandGroup(
    """List, replay and delete dead letters: messages that have no retries left, or that were buried.

    Example:  [cyan]heapline dlq list jobs --reason timeout[/cyan]
    """
)


@app.command("list")
@over_network(json=JSON_HELP, where=FILTER)
async def list_command(
    hl: Broker,
    out: Output,
    where: DlqFilter | None,
    topic: TopicArgument,
    limit: Annotated[int, option("--limit -n", "Maximum number of dead letters.", min=1)] = 100,
) -> None:
    """List the dead letters of a topic and why they died, oldest first.

    Example:  [cyan]heapline dlq list jobs --died-after 1h[/cyan]
    """
    infos = await hl.dlq_list(topic, limit, where=where)
    empty = f"{bold(topic)} has no {'matching ' if where else ''}dead letters"
    out.rows(infos, lambda infos: messages_table(out.console, infos, dead=True), empty=empty, json=message_json)
    if len(infos) == limit and not out.as_json:
        out.console.print(f"[dim]there may be more; use --limit {limit * 10}[/dim]")


@app.command("replay")
@over_network(json=COUNT_JSON, where=FILTER)
async def replay_command(
    hl: Broker,
    out: Output,
    where: DlqFilter | None,
    topic: TopicArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    rate: Annotated[float | None, option("--rate", "Maximum number that become due per second.")] = None,
) -> None:
    """Return dead letters to their topic, with all their retries.

    Example:  [cyan]heapline dlq replay jobs --all --rate 50[/cyan]
    """
    _check_chosen("replay", topic, ids, everything, where)
    replayed = await hl.dlq_replay(topic, ids or None, where=where, rate=rate)
    out.row({"count": replayed}, f"{counted(replayed, 'dead letter')} replayed into {bold(topic)}")
    named = len({parse_id(id)[0] for id in ids or ()})
    if replayed < named and where is None:  # a letter that a filter excludes is not an error
        raise BadRequest(
            f"{named - replayed} of the {named} ids are not dead letters of {topic}: they were replayed or deleted "
            f"before, or belong to another topic (heapline dlq list {topic} shows the dead letters)"
        )


@app.command("delete")
@over_network(json=COUNT_JSON, where=FILTER)
async def delete_command(
    hl: Broker,
    out: Output,
    where: DlqFilter | None,
    topic: TopicArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    yes: YesOption = False,
) -> None:
    """Delete dead letters permanently. Asks first.

    Example:  [cyan]heapline dlq delete jobs --died-before 30d[/cyan]
    """
    _check_chosen("delete", topic, ids, everything, where)
    where = DlqFilter() if everything else where  # an empty filter matches all letters, explicitly
    if not yes:
        confirm(f"Permanently delete {await _describe(hl, topic, ids, where)} of {topic}?", yes)
    deleted = await hl.dlq_delete(topic, ids or None, where=where)
    out.row({"count": deleted}, f"{counted(deleted, 'dead letter')} of {bold(topic)} deleted")


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
