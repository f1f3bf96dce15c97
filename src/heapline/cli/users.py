"""`heapline users add|list|disable|enable|password|scopes`: the people of a data directory.

A password is asked for at the terminal or read from a file, never taken from an argument: arguments stand in the
shell's history and in the list of processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from heapline.cli.auth_files import DATA, DataOption, open_auth
from heapline.cli.present import columns_table, make_console, moment
from heapline.cli.views import print_json
from heapline.errors import BadRequest
from heapline.server.auth.private import refuse_readable_by_others
from heapline.server.auth.secret import Secret
from heapline.server.auth.store import UserRecord

EmailArgument = Annotated[str, typer.Argument(help="The user's email address; upper and lower case are the same.")]
PasswordFileOption = Annotated[
    Path | None,
    typer.Option("--password-file", help="Read the password from this file (mode 0600), or from stdin if it is -."),
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""People who log in with email and password and get a short-lived token.

    Example:  [cyan]heapline users add ada@example.org --scope "*:admin"[/cyan]

    Every change of a user ends the tokens that he has.
    """,
)


@app.command("add")
def add_command(
    email: EmailArgument,
    scope: Annotated[list[str], typer.Option("--scope", "-s", help="PATTERN:ACTIONS; may be given again.")],
    data: DataOption = DATA,
    password_file: PasswordFileOption = None,
) -> None:  # fmt: skip
    """Add a user; the password is asked for.

    Example:  [cyan]heapline users add ada@example.org --scope "orders/*:produce,consume"[/cyan]
    """
    auth = open_auth(data)
    password = _password(password_file)
    with auth.audited("users.add") as about:
        about(email)
        record = auth.users.add(email, password, scope)
    _say(record, "added")


@app.command("list")
def list_command(
    data: DataOption = DATA, as_json: Annotated[bool, typer.Option("--json", help="One JSON object a user.")] = False
) -> None:
    """Who may log in, and what they may do.

    Example:  [cyan]heapline users list --data data[/cyan]
    """
    records = open_auth(data).users.list()
    if as_json:
        for r in records:
            print_json(
                {"email": r.email, "scopes": list(r.scopes), "created_at": r.created_at, "disabled_at": r.disabled_at}
            )
        return
    rows = [(escape(r.email), "\n".join(r.scopes), moment(r.created_at), _state(r)) for r in records]
    make_console().print(columns_table("Users", ("email", "scopes", "created", "state"), rows))


@app.command("disable")
def disable_command(email: EmailArgument, data: DataOption = DATA) -> None:
    """Keep a user out; his tokens end at once.

    Example:  [cyan]heapline users disable ada@example.org[/cyan]
    """
    auth = open_auth(data)
    with auth.audited("users.disable") as about:
        about(email)
        record = auth.users.disable(email)
    _say(record, "disabled")


@app.command("enable")
def enable_command(email: EmailArgument, data: DataOption = DATA) -> None:
    """Let a disabled user in again.

    Example:  [cyan]heapline users enable ada@example.org[/cyan]
    """
    auth = open_auth(data)
    with auth.audited("users.enable") as about:
        about(email)
        record = auth.users.enable(email)
    _say(record, "enabled")


@app.command("password")
def password_command(email: EmailArgument, data: DataOption = DATA, password_file: PasswordFileOption = None) -> None:
    """Give a user another password; it is asked for.

    Example:  [cyan]heapline users password ada@example.org[/cyan]
    """
    auth = open_auth(data)
    password = _password(password_file)
    with auth.audited("users.password") as about:
        about(email)
        record = auth.users.set_password(email, password)
    _say(record, "given another password")


@app.command("scopes")
def scopes_command(
    email: EmailArgument,
    scope: Annotated[list[str], typer.Option("--scope", "-s", help="PATTERN:ACTIONS; may be given again.")],
    data: DataOption = DATA,
) -> None:
    """Give a user other scopes in place of those that he has.

    Example:  [cyan]heapline users scopes ada@example.org --scope "orders/*:consume"[/cyan]
    """
    auth = open_auth(data)
    with auth.audited("users.scopes") as about:
        about(email)
        record = auth.users.set_scopes(email, scope)
    _say(record, "given other scopes")


def _password(source: Path | None) -> Secret:
    if source is None:
        return Secret(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    if str(source) == "-":
        return Secret(sys.stdin.readline().rstrip("\r\n"))
    refuse_readable_by_others(str(source))
    try:
        return Secret(source.read_text(encoding="utf-8").rstrip("\r\n"))
    except UnicodeDecodeError:
        raise BadRequest(f"{str(source)!r} is not text") from None


def _say(record: UserRecord, what: str) -> None:
    make_console().print(f"user [bold]{escape(record.email)}[/bold] was {what}")


def _state(record: UserRecord) -> str:
    return "[green]good[/green]" if record.disabled_at is None else f"[red]disabled {moment(record.disabled_at)}[/red]"
