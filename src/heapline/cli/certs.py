"""`heapline certs dev DIR`: certificates for trying TLS and mTLS on one's own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from heapline.cli.present import make_console
from heapline.clock import SystemClock
from heapline.server.auth.dev_certs import make_dev_certs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Certificates for TLS and mTLS.

    Example:  [cyan]heapline certs dev certs[/cyan]
    """,
)


@app.callback()
def certs() -> None:
    """Keep `dev` a subcommand, though it is the only one."""


@app.command("dev")
def dev_command(
    directory: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Another name or address of the server; may be given again.")
    ] = None,
) -> None:
    """Make a development CA, and a server and a client certificate signed by it (all 0600, good for a year).

    For localhost, 127.0.0.1 and ::1. The CA's own key is thrown away, so nobody can sign more with it.

    Example:  [cyan]heapline certs dev certs --host queue.internal[/cyan]
    """
    console = make_console()
    for path in make_dev_certs(directory, SystemClock().wall_ms(), host or ()):
        console.print(escape(str(path)))
