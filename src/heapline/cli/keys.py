"""`heapline keys create|list|revoke`: the API keys of a data directory.

Works on the directory itself, also beside a server that runs on it: that one notices within a second. A key's secret
is printed once, alone on stdout, and stands nowhere else.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from heapline.cli.auth_files import DATA, DataOption, open_auth
from heapline.cli.present import columns_table, make_console, moment
from heapline.cli.views import print_json
from heapline.server.auth.store import KeyRecord

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a key instead of a table.")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""API keys: who may produce, consume or administer which topics.

    Example:  [cyan]heapline keys create --name billing --scope "orders/*:produce"[/cyan]

    A server that runs on the same directory notices every change within a second.
    """,
)


@app.command("create")
def create_command(
    name: Annotated[str, typer.Option("--name", "-n", help="What the key is for; shown in lists.")],
    scope: Annotated[
        list[str],
        typer.Option(
            "--scope", "-s", help="PATTERN:ACTIONS; may be given again. A star stands for any part of a name; "
            "actions are produce, consume, admin."
        ),
    ],
    data: DataOption = DATA,
) -> None:  # fmt: skip
    """Make a key and print its secret, once. It cannot be shown again: only its hash is kept.

    Example:  [cyan]heapline keys create --name worker --scope "orders/*:consume" --scope "jobs:produce,consume"[/cyan]

    Straight into a file:  [cyan](umask 077; heapline keys create -n worker -s "jobs:consume" > worker.key)[/cyan]
    """
    auth = open_auth(data)
    with auth.audited("keys.create") as about:
        record, secret = auth.keys.create(name, scope)
        about(record.id)
    note = make_console(stderr=True)
    note.print(f"key [bold]{record.id}[/bold] made; this is the only time that its secret is shown:")
    typer.echo(secret.reveal())


@app.command("list")
def list_command(data: DataOption = DATA, as_json: JsonOption = False) -> None:
    """Which keys there are, what they may do, and when they were last used (to the minute).

    Example:  [cyan]heapline keys list --data data[/cyan]
    """
    records = open_auth(data).keys.list()
    if as_json:
        for record in records:
            print_json(_shown(record))
        return
    rows = [
        (r.id, escape(r.name), "\n".join(r.scopes), moment(r.created_at), _when(r.last_used_at), _state(r))
        for r in records
    ]
    make_console().print(columns_table("API keys", ("id", "name", "scopes", "created", "last used", "state"), rows))


@app.command("revoke")
def revoke_command(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `list` shows it.")], data: DataOption
) -> None:
    """End a key for good. Its open streams end too. Revoking again changes nothing.

    Example:  [cyan]heapline keys revoke 9f86d081884c7d65[/cyan]
    """
    auth = open_auth(data)
    with auth.audited("keys.revoke") as about:
        record = auth.keys.revoke(key_id)
        about(record.id)
    make_console().print(f"key [bold]{record.id}[/bold] ({escape(record.name)}) is revoked")


def _shown(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.id, "name": record.name, "scopes": list(record.scopes), "created_at": record.created_at,
        "last_used_at": record.last_used_at, "revoked_at": record.revoked_at,
    }  # fmt: skip


def _when(ms: int | None) -> str:
    return moment(ms) if ms is not None else "never"


def _state(record: KeyRecord) -> str:
    return "[green]good[/green]" if record.revoked_at is None else f"[red]revoked {moment(record.revoked_at)}[/red]"
