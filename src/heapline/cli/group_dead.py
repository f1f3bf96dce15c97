"""`heapline group dead list|replay|delete`: rows that a group gave up. The topic's own dead letters are dlq's."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import ROUNDED
from rich.markup import escape
from rich.table import Table

from heapline.broker import GroupBroker
from heapline.cli.asking import YesOption, ask
from heapline.cli.connection import over_network
from heapline.cli.group_words import GroupArgument, RowsArgument, rows_named, rows_word
from heapline.cli.messages import TopicArgument, ago, harmless, preview, print_json
from heapline.cli.present import make_console
from heapline.errors import BadRequest
from heapline.streams import GroupDeadLetter
from heapline.wire.json_groups import tell_dead

AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]
CountJsonOption = Annotated[bool, typer.Option("--json", help='For programs: {"count": how many}.')]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Rows that a group failed too often. They are kept until they are replayed or deleted.

    Example:  [cyan]heapline group dead list jobs billing[/cyan]
    """,
)


@app.command("list")
@over_network
async def list_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    as_json: Annotated[
        bool, typer.Option(
            "--json", help="For programs: one JSON object a row: partition, offset, message_id, attempts, reason, "
            "died_at, payload_text or payload.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """The rows that a group gave up, and why.

    Example:  [cyan]heapline group dead list jobs billing[/cyan]
    """
    letters = await hl.group_dead_list(topic, group, limit)
    if as_json:
        for letter in letters:
            print_json(tell_dead(letter, "text"))
        return
    console = make_console()
    if not letters:
        console.print(f"group [bold]{escape(group)}[/bold] of {escape(topic)} has given up nothing")
        return
    console.print(_table(letters))
    if len(letters) == limit:
        console.print(f"[dim]there may be more: --limit {limit * 10}[/dim]")


@app.command("replay")
@over_network
async def replay_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument, rows: RowsArgument = None,
    everything: AllOption = False, as_json: CountJsonOption = False,
) -> None:  # fmt: skip
    """Deliver dead letters of a group to it once more, as if they had never failed.

    Example:  [cyan]heapline group dead replay jobs billing --all[/cyan]
    """
    _check_chosen("replay", topic, group, rows, everything)
    named = rows_named(rows) if rows else {}
    replayed = await hl.group_dead_replay(topic, group, named or None)
    _told(replayed, f"come to group [bold]{escape(group)}[/bold] again", as_json)
    count = sum(len(set(offsets)) for offsets in named.values())
    if replayed < count:
        raise BadRequest(
            f"{count - replayed} of the {count} rows named no dead letter of group {group}: it was replayed or deleted "
            f"before (heapline group dead list {topic} {group} shows what there is)"
        )


@app.command("delete")
@over_network
async def delete_command(
    hl: GroupBroker, topic: TopicArgument, group: GroupArgument, rows: RowsArgument = None,
    everything: AllOption = False, yes: YesOption = False, as_json: CountJsonOption = False,
) -> None:  # fmt: skip
    """Delete dead letters of a group for good; the topic's messages stay. Asks first.

    Example:  [cyan]heapline group dead delete jobs billing 0:17[/cyan]
    """
    _check_chosen("delete", topic, group, rows, everything)
    which = "all dead letters" if everything else rows_word(len(set(rows or ())))
    ask(f"Delete {which} of group {group} of {topic} for good?", yes)
    deleted = await hl.group_dead_delete(topic, group, rows_named(rows) if rows else None)
    _told(deleted, f"of group [bold]{escape(group)}[/bold] deleted", as_json)


def _told(number: int, what: str, as_json: bool) -> None:
    if as_json:
        print_json({"count": number})
    else:
        make_console().print(f"{rows_word(number)} {what}")


def _check_chosen(verb: str, topic: str, group: str, rows: list[str] | None, everything: bool) -> None:
    if bool(rows) == everything:
        raise BadRequest(
            f"say which ones: rows as 0:17 (partition:offset), or --all (heapline group dead list {topic} {group} "
            f"shows them; heapline group dead {verb} --help tells more)"
        )


def _table(letters: list[GroupDeadLetter]) -> Table:
    table = Table(box=ROUNDED)
    for name in ("row", "message_id", "tries", "died", "reason", "payload"):
        table.add_column(name, justify="right" if name == "tries" else "left", overflow="fold")
    for letter in letters:
        table.add_row(
            f"{letter.partition}:{letter.offset}", letter.message_id, str(letter.attempts), ago(letter.died_at),
            harmless(letter.reason), preview(letter.payload),
        )  # fmt: skip
    return table
