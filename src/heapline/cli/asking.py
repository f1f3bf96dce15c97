"""Before something is destroyed: ask, unless `--yes` was given. The question goes to stderr, apart from output."""

from __future__ import annotations

from typing import Annotated

import typer

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def ask(question: str, yes: bool) -> None:
    """Returns if it is meant; otherwise the command ends, with exit code 1."""
    if yes:
        return
    try:
        meant = typer.confirm(question, err=True)
    except typer.Abort:
        typer.echo(err=True)
        typer.echo("nobody answered, so nothing was changed: with --yes it does not ask", err=True)
        raise typer.Exit(1) from None
    if not meant:
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)
