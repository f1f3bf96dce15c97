"""The `heapline` command: the table of subcommands, and how their errors are shown.

A subcommand's module is imported only when the subcommand runs. `heapline --help` and shell completion use the table
below, so they stay fast, and a subcommand may need an extra that is not installed.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as build_command

from heapline.cli.options import declare, paragraphs, with_example
from heapline.contract.errors import BadRequest, HeaplineError

F = TypeVar("F", bound=Callable[..., Any])
TRACEBACK = "HEAPLINE_TRACEBACK"  # environment variable: show tracebacks of expected failures too


class Lazy(NamedTuple):
    """A subcommand that is imported when it runs."""

    module: str  # below heapline.cli
    help: str  # the first sentence of the command's own help; a test compares them
    attribute: str = "app"  # a typer app (a group of commands) or a function (a single command)
    extra: str = "client"  # the extra to install if an import fails


#: Subcommands in the order in which a newcomer meets them.
SUBCOMMANDS = {
    "demo": Lazy("demo", "Watch a queue survive [bold]kill -9[/bold], in less than a minute.", "demo"),
    "serve": Lazy("serve", "Serve a queue to other processes.", "serve", "server"),
    "dashboard": Lazy("dashboard", "Open the dashboard of a server in your browser, logged in.", "dashboard"),
    "topic": Lazy("topic", "Create, inspect, change and delete topics."),
    "put": Lazy("message", "Enqueue a message, or a file of messages.", "put"),
    "peek": Lazy("message", "Show the messages that would be popped next, best first.", "peek"),
    "explain": Lazy("inspection", "Show which messages would be popped next and why, best first.", "explain"),
    "pop": Lazy("message", "Lease the best messages that are due, and print them.", "pop"),
    "get": Lazy("message", "Show one message in any state, including recently removed ones.", "get"),
    "cancel": Lazy("message", "Remove waiting messages before they are delivered.", "cancel"),
    "reschedule": Lazy("message", "Change the due time or the priority of waiting messages.", "reschedule"),
    "history": Lazy("inspection", "Show what happened to one message, from the journal.", "history"),
    "search": Lazy("inspection", "Show the messages in a topic that contain a text.", "search"),
    "lease": Lazy("inspection", "List who holds which messages, and take them back."),
    "series": Lazy("inspection", "Show depths and rates over the last 24 hours, of a topic or of all.", "series"),
    "dlq": Lazy("dlq", "List, replay and delete dead letters."),
    "group": Lazy("group", "Manage consumer groups."),
    "replay": Lazy("replay", "Read past messages of a topic, or enqueue them again."),
    "schedule": Lazy("schedule", "Manage schedules: messages enqueued at times of day or at intervals."),
    "worker": Lazy("worker", "Run the tasks of an app.", "worker"),
    "top": Lazy("top", "Watch the topics of a server: depths, rates, waits and leases.", "top"),
    "bench": Lazy("bench", "Measure the speed of a server, next to the bare machine.", "bench"),
    "journal": Lazy("journal", "Check, inspect and repair the files of a data directory."),
    "backup": Lazy("backup", "Copy a data directory, even while a server is using it.", "backup"),
    "keys": Lazy("auth", "Create, list and revoke API keys.", "keys_app", "server"),
    "users": Lazy("auth", "Manage users, who log in with email and password.", "users_app", "server"),
    "certs": Lazy("auth", "Create certificates for TLS and mTLS.", "certs_app", "server"),
    "outbox": Lazy("outbox", "Relay messages that were written in a database transaction.", extra="outbox"),
    "assign": Lazy("assign", "Watch worker pools that share partitions (heapline.assign)."),
    "sink": Lazy("sink", "List and reset the sinks that write to a server, such as Spark streams."),
    "pipeline": Lazy("pipeline", "Run Spark jobs on the log of a queue, here or on a cluster."),
}  # fmt: skip


class _FlagHelp:
    """Shows a flag in --help as a flag, without the type of its value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_FlagHelp, TyperCommand):
    """A command of `heapline`."""


class Group(_FlagHelp, TyperGroup):
    """A group of commands of `heapline`."""


class CommandGroup(typer.Typer):
    """A group of commands, with the settings that all groups share. `example` follows `heapline` in its help.

    The help of a subcommand's group begins with the sentence in SUBCOMMANDS; `more` follows. Others give their `help`.
    """

    def __init__(self, path: str, example: str, more: str = "", help: str = "", cls: type[Group] = Group) -> None:
        self._path = path
        text = with_example(f"{help or SUBCOMMANDS[path].help}\n\n{paragraphs(more)}", example)
        super().__init__(cls=cls, add_completion=False, no_args_is_help=True, rich_markup_mode="rich", help=text)
        self.callback()(lambda: None)  # otherwise a group of one command would be that command

    def command(self, name: str | None = None, *, example: str | None = None, **options: Any) -> Callable[[F], F]:
        """Register a command. `example` is its arguments in an example; None if its docstring has one."""

        def register(function: F) -> F:
            called, help = name or function.__name__, paragraphs(function.__doc__ or "")
            help = help if example is None else with_example(help, f"{self._path} {called} {example}".rstrip())
            return super(CommandGroup, self).command(called, cls=Command, help=help, **options)(declare(function))

        return register


def command_of(target: Any, name: str) -> Any:
    """Build the command of a typer app, or of a function."""
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(cls=Command, help=paragraphs(target.__doc__ or ""))(declare(target))
        target = single
    command = build_command(target)
    command.name = name
    return command


class Subcommands(Group):
    """The subcommands of `heapline`, each imported when it runs; --help and completion use the table.

    Expected failures are shown as one line, without a traceback.
    """

    table = SUBCOMMANDS
    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        if self._is_listing:
            return Command(cmd_name, help=entry.help, rich_markup_mode="rich")
        try:
            module = importlib.import_module(f"heapline.cli.{entry.module}")
        except ModuleNotFoundError as error:
            if str(error.name).startswith("heapline"):
                raise
            return _missing_extra(cmd_name, str(error.name), entry.extra)
        return command_of(getattr(module, entry.attribute), cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.table and (similar := get_close_matches(name, self.table)):
            ctx.fail(f"No such command {name!r}. Did you mean {', '.join(map(repr, similar))}?")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._is_listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._is_listing = False

    def main(self, *args: Any, **options: Any) -> Any:
        _prepare_streams()
        return super().main(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (HeaplineError, OSError) as error:
            from heapline.cli.output import one_line

            if os.environ.get(TRACEBACK) or getattr(error, "errno", None) == errno.EPIPE:
                raise
            typer.secho(one_line(error), err=True, fg="red")
            raise typer.Exit(1) from error


def _prepare_streams() -> None:
    """Replace closed streams with /dev/null, and escape characters that the terminal cannot show."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _missing_extra(name: str, missing: str, extra: str) -> Any:
    """Return a command that explains which extra to install."""

    def explain() -> None:
        raise BadRequest(f"`heapline {name}` needs {missing!r}; run pip install 'heapline[{extra}]'")

    stand_in = typer.Typer(add_completion=False, rich_markup_mode="rich")
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    help = f"Needs more packages: pip install 'heapline\\[{extra}]'"
    stand_in.command(name, cls=Command, help=help, context_settings=settings)(explain)
    return build_command(stand_in)


app = typer.Typer(
    name="heapline",
    cls=Subcommands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,  # payloads may be secret
    epilog="Help for one command:  [bold]heapline COMMAND --help[/bold]",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from heapline import accelerator

        typer.echo(f"heapline {version('heapline')}\naccelerator: {accelerator.description()}")
        raise typer.Exit


@app.callback()
def heapline(
    _version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Use a durable priority and time queue.

    Watch it survive a crash:  [cyan]heapline demo[/cyan]

    Start a server and use it:  [cyan]heapline serve[/cyan], then [cyan]heapline topic create jobs[/cyan]

    Check a data directory:  [cyan]heapline journal verify data[/cyan]
    """
