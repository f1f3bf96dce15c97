"""`heapline dlq list|replay|delete`: the dead letters of a topic."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.asking import YesOption, ask
from heapline.cli.connection import over_network
from heapline.cli.messages import JsonOption, TopicArgument, print_infos, print_json, show_messages
from heapline.cli.present import count, make_console
from heapline.cli.units import past
from heapline.errors import BadRequest
from heapline.model import DlqFilter
from heapline.ulid import parse_id

PANEL = "Which ones"
COUNT_MAX = 100  # letters that are counted before a question: they come with their payloads

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Only these messages.")]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.", rich_help_panel=PANEL)]
ReasonOption = Annotated[
    str | None,
    typer.Option("--reason", help="Whose reason has this in it, in upper or lower case.", rich_help_panel=PANEL),
]
KeyOption = Annotated[str | None, typer.Option("--key", help="Of this partition key.", rich_help_panel=PANEL)]
LowOption = Annotated[
    int | None, typer.Option("--priority-min", help="Of this priority or more.", rich_help_panel=PANEL)
]
HighOption = Annotated[
    int | None, typer.Option("--priority-max", help="Of this priority or less.", rich_help_panel=PANEL)
]
AfterOption = Annotated[
    datetime | None, typer.Option(
        "--died-after", parser=past, metavar="WHEN", rich_help_panel=PANEL,
        help="Died after this: a moment as 2030-01-31T12:00:00Z, or how long ago, as 2h.",
    ),
]  # fmt: skip
BeforeOption = Annotated[
    datetime | None,
    typer.Option("--died-before", parser=past, metavar="WHEN", rich_help_panel=PANEL, help="Died before this."),
]
CountJsonOption = Annotated[bool, typer.Option("--json", help='For programs: {"count": how many}.')]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Dead letters: messages whose retries are used up, or that were buried.

    Example:  [cyan]heapline dlq list jobs --reason timeout[/cyan]
    """,
)


@app.command("list")
@over_network
async def list_command(
    hl: Broker, topic: TopicArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    reason: ReasonOption = None, key: KeyOption = None, priority_min: LowOption = None, priority_max: HighOption = None,
    died_after: AfterOption = None, died_before: BeforeOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """The dead letters of a topic and why they died, oldest first.

    Example:  [cyan]heapline dlq list jobs --died-after 1h[/cyan]
    """
    where = _filter(reason, key, priority_min, priority_max, died_after, died_before)
    infos = await hl.dlq_list(topic, limit, where=where)
    if as_json:
        print_infos(infos)
    elif infos:
        console = make_console()
        show_messages(console, infos, dead=True)
        if len(infos) == limit:
            console.print(f"[dim]there may be more: --limit {limit * 10}[/dim]")
    else:
        make_console().print(f"no dead letters {'match' if where else 'lie'} in [bold]{escape(topic)}[/bold]")


@app.command("replay")
@over_network
async def replay_command(
    hl: Broker, topic: TopicArgument, ids: IdsArgument = None, everything: AllOption = False,
    reason: ReasonOption = None, key: KeyOption = None, priority_min: LowOption = None, priority_max: HighOption = None,
    died_after: AfterOption = None, died_before: BeforeOption = None,
    rate: Annotated[float | None, typer.Option("--rate", help="At most so many a second fall due.")] = None,
    as_json: CountJsonOption = False,
) -> None:  # fmt: skip
    """Bring dead letters back into their topic, as if they had never been tried.

    Example:  [cyan]heapline dlq replay jobs --all --rate 50[/cyan]
    """
    where = _filter(reason, key, priority_min, priority_max, died_after, died_before)
    _check_chosen("replay", topic, ids, everything, where)
    replayed = await hl.dlq_replay(topic, ids or None, where=where, rate=rate)
    if as_json:
        print_json({"count": replayed})
    else:
        make_console().print(f"{_letters(replayed)} replayed into [bold]{escape(topic)}[/bold]")
    named = len({parse_id(id) for id in ids or ()})
    if replayed < named and where is None:  # one that a filter left out is no mistake
        raise BadRequest(
            f"{named - replayed} of the {named} ids named no dead letter of {topic}: it was replayed or deleted "
            f"before, or the id is of another topic (heapline dlq list {topic} shows what there is)"
        )


@app.command("delete")
@over_network
async def delete_command(
    hl: Broker, topic: TopicArgument, ids: IdsArgument = None, everything: AllOption = False,
    reason: ReasonOption = None, key: KeyOption = None, priority_min: LowOption = None, priority_max: HighOption = None,
    died_after: AfterOption = None, died_before: BeforeOption = None, yes: YesOption = False,
    as_json: CountJsonOption = False,
) -> None:  # fmt: skip
    """Delete dead letters for good. Asks first.

    Example:  [cyan]heapline dlq delete jobs --died-before 30d[/cyan]
    """
    where = _filter(reason, key, priority_min, priority_max, died_after, died_before)
    _check_chosen("delete", topic, ids, everything, where)
    where = DlqFilter() if everything else where  # which matches all, and says that it is meant
    if not yes:
        ask(f"Delete {await _how_many(hl, topic, ids, where)} of {topic} for good?", yes)
    deleted = await hl.dlq_delete(topic, ids or None, where=where)
    if as_json:
        print_json({"count": deleted})
    else:
        make_console().print(f"{_letters(deleted)} of [bold]{escape(topic)}[/bold] deleted")


def _filter(
    reason: str | None, key: str | None, low: int | None, high: int | None, after: datetime | None,
    before: datetime | None,
) -> DlqFilter | None:  # fmt: skip
    where = DlqFilter(reason=reason, key=key, priority_min=low, priority_max=high, died_after=after, died_before=before)
    return None if where == DlqFilter() else where


def _check_chosen(verb: str, topic: str, ids: Any, everything: bool, where: DlqFilter | None) -> None:
    if everything and (ids or where):
        raise BadRequest("--all means all of them: leave it away to choose by id or with an option")
    if not (everything or ids or where):
        raise BadRequest(
            f"say which ones: ids, an option such as --reason, or --all (heapline dlq list {topic} shows them; "
            f"heapline dlq {verb} --help tells more)"
        )


async def _how_many(hl: Broker, topic: str, ids: list[str] | None, where: DlqFilter | None) -> str:
    """How many letters a question is about; ids that were named are taken at their word."""
    if ids:
        return _letters(len(set(ids)))
    if where == DlqFilter():
        return f"all {_letters((await hl.stats(topic)).dead)}"
    found = len(await hl.dlq_list(topic, COUNT_MAX, where=where))
    return f"{count(found)} dead letters or more" if found == COUNT_MAX else _letters(found)


def _letters(number: int) -> str:
    return "1 dead letter" if number == 1 else f"{count(number)} dead letters"
