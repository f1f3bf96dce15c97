"""`heapline sink list|forget`: the last commit of every sink, such as a Spark stream."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from heapline.cli.connection import NetworkGroup
from heapline.cli.message_view import ago
from heapline.cli.options import YesOption
from heapline.cli.output import Output, bold, confirm, count, some
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest

app = NetworkGroup(
    "sink",
    example="sink list",
    more="A sink commits rows with increasing versions. Repeating a commit, or an earlier one, changes nothing.",
)


@app.call("list", example="", json="one object per sink: name, version, batch_id, messages, topics, committed_at.")
async def list_command(hl: Broker, out: Output) -> None:
    """List all sinks with their last commit.

    The sink of a Spark query is [bold]query:ID[/bold], that of a write with txnAppId [bold]txn:ID@TOPIC[/bold].
    """
    out.table(
        await hl.list_sinks(),
        ("sink", "version", "committed", "messages", "topics"),
        lambda s: (bold(s.name), count(s.version), ago(s.committed_at), count(s.messages), escape(some(s.topics, 4))),
        right=(1, 3),
        empty="no sink has committed anything",
    )


@app.call("forget", example="txn:nightly-load@orders", json='{"name": NAME, "forgotten": true}.')
async def forget_command(
    hl: Broker,
    out: Output,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the sink, as `list` shows it.")],
    yes: YesOption = False,
) -> None:
    """Forget the last commit of a sink, so that its versions can start again. Asks first.

    A client that still repeats a commit of this sink, as a Spark query does after a crash, then duplicates messages.
    """
    versions = {sink.name: sink.version for sink in await hl.list_sinks()}
    if name not in versions:
        raise BadRequest(f"sink {name!r} does not exist; see heapline sink list")
    confirm(f"Forget sink {name} at version {versions[name]}? A repeated commit would duplicate messages.", yes)
    await hl.forget_sink(name)
    out.row({"name": name, "forgotten": True}, f"sink {bold(name)} forgotten")
