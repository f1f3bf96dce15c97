"""The `heapline` command: which subcommands there are, and nothing of what they do.

Each subcommand lives in a module of its own beside this one and is imported only when it is asked for, so that
`heapline --version` stays quick and a subcommand may need an extra that is not installed. A module offers either a
typer app called `app` (a group of commands) or a function of the subcommand's own name (a single command).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command as build_command

from heapline.errors import BadRequest, HeaplineError

#: Subcommands in the order in which a newcomer meets them; `name` is the module `heapline.cli.name`.
SUBCOMMANDS = (
    "demo", "serve", "topic", "put", "peek", "pop", "get", "dlq", "group", "replay", "schedule", "worker", "top",
    "bench", "journal", "backup", "keys", "users", "certs", "outbox", "assign", "sink", "pipeline",
)  # fmt: skip
#: Those that need the server's packages; all others do with the client's, or with none.
WITH_SERVER = ("serve", "keys", "users", "certs")


#: What becomes of output, and of the files that a command writes: said in one line.
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def command_of(module: Any, name: str) -> Any:
    """The command that a module offers: its `app`, or its function of that name."""
    if hasattr(module, "app"):
        command = build_command(module.app)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command()(getattr(module, name))
        command = build_command(single)
    command.name = name
    return command


class Subcommands(TyperGroup):
    """Finds subcommands by name; a module that is not there is a command that does not exist."""

    def main(self, *args: Any, **options: Any) -> Any:
        _prepare_streams()
        return super().main(*args, **options)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in SUBCOMMANDS if find_spec(f"heapline.cli.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            module = importlib.import_module(f"heapline.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if str(error.name).startswith("heapline"):
                raise
            return _needs_extra(cmd_name, str(error.name))
        return command_of(module, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Heapline's errors are written for people: they need no traceback."""
        try:
            return super().invoke(ctx)
        except HeaplineError as error:
            typer.secho(f"{type(error).__name__}: {error}", err=True, fg="red")
            raise typer.Exit(1) from error
        except OSError as error:
            if error.errno not in NOT_WRITTEN:
                raise
            typer.secho(f"the output could not be written, so it is not complete: {error.strerror}", err=True, fg="red")
            raise typer.Exit(1) from error


def _prepare_streams() -> None:
    """What was closed is empty, or goes nowhere; a terminal that cannot show a character gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _needs_extra(name: str, missing: str) -> Any:
    """Stands in for a command whose packages are not installed, so that `heapline --help` still lists it."""
    stand_in = typer.Typer(add_completion=False, rich_markup_mode="rich")
    extra = "server" if name in WITH_SERVER else "client"

    @stand_in.command(
        name, help=f"Needs the {extra}'s packages: pip install 'heapline\\[{extra}]'",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )  # fmt: skip
    def explain() -> None:
        raise BadRequest(f"`heapline {name}` needs {missing!r}: run pip install 'heapline[{extra}]'")

    return build_command(stand_in)


app = typer.Typer(
    name="heapline",
    cls=Subcommands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,  # payloads may be secret
    epilog="Every command explains itself: [bold]heapline COMMAND --help[/bold]",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"heapline {version('heapline')}")
        raise typer.Exit


@app.callback()
def heapline(
    _version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A durable priority and time queue: [bold]what should be done next?[/bold]

    See it survive a crash:  [cyan]heapline demo[/cyan]

    Serve one, and use it:  [cyan]heapline serve[/cyan], then [cyan]heapline topic create jobs[/cyan]

    Look into a data directory:  [cyan]heapline journal verify data[/cyan]
    """
