"""`heapline sink list|forget`: what was committed last by whoever writes in versions, such as Spark's streams."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.asking import YesOption, ask
from heapline.cli.connection import over_network
from heapline.cli.messages import ago, harmless, print_json
from heapline.cli.present import columns_table, count, make_console
from heapline.errors import BadRequest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Sinks: rows of commits, each with a version. A repeat of the last one, or of any before, changes nothing.

    Example:  [cyan]heapline sink list[/cyan]
    """,
)


@app.command("list")
@over_network
async def list_command(
    hl: Broker,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one JSON object a sink: name, version, batch_id, messages, "
        "topics, committed_at.")
    ] = False,
) -> None:  # fmt: skip
    """Which sinks there are, and what each has committed last. A query of Spark is [bold]query:ID[/bold], what is
    written with txnAppId is [bold]txn:ID@TOPIC[/bold].

    Example:  [cyan]heapline sink list[/cyan]
    """
    sinks = await hl.list_sinks()
    if as_json:
        for sink in sinks:
            print_json(sink)
    elif sinks:
        names = ("sink", "version", "committed", "messages", "topics")
        rows = [
            (
                escape(harmless(s.name).plain),
                count(s.version),
                ago(s.committed_at),
                count(s.messages),
                escape(_some(s.topics)),
            )
            for s in sinks
        ]
        make_console().print(columns_table("", names, rows, right=(1, 3)))
    else:
        make_console().print("no sink has committed anything yet")


@app.command("forget")
@over_network
async def forget_command(
    hl: Broker, name: Annotated[str, typer.Argument(metavar="NAME", help="The sink, as it is listed.")],
    yes: YesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help='For programs: {"name": NAME, "forgotten": true}.')] = False,
) -> None:  # fmt: skip
    """Forget what a sink has committed, so that its versions may start again. Asks first: whoever still repeats a
    commit of it, as a query of Spark does after a crash, then doubles messages.

    Example:  [cyan]heapline sink forget txn:nightly-load@orders[/cyan]
    """
    known = {sink.name: sink for sink in await hl.list_sinks()}
    if name not in known:
        raise BadRequest(f"there is no sink {name!r}: see heapline sink list")
    ask(
        f"Forget sink {name}, which stands at version {known[name].version}? A repeated commit of it would double.", yes
    )
    await hl.forget_sink(name)
    if as_json:
        print_json({"name": name, "forgotten": True})
    else:
        make_console().print(f"sink [bold]{escape(harmless(name).plain)}[/bold] is forgotten")


def _some(topics: list[str], shown: int = 4) -> str:
    more = len(topics) - shown
    return ", ".join(topics[:shown]) + (f" and {more} more" if more > 0 else "")
