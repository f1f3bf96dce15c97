"""What a command wants from whoever sits there: an answer before something is destroyed, unless `--yes` was given, and
that Ctrl-C ends it also while it waits for input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def ask(question: str, yes: bool) -> None:
    """Returns if it is meant; otherwise the command ends, with exit code 1. Output stays free of the question."""
    if yes:
        return
    answer = _answer(question)
    if answer is None:
        typer.echo(err=True)
        typer.echo("nobody answered, so nothing was changed: with --yes it does not ask", err=True)
        raise typer.Exit(1)
    if answer not in ("y", "yes"):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)


def _answer(question: str) -> str | None:
    """What was typed; None if nobody did. (`typer.confirm` would leave a blank in the output.)"""
    typer.echo(f"{question} [y/N]: ", nl=False, err=True)
    try:
        with interruptible():
            line = sys.stdin.readline()
    except (KeyboardInterrupt, UnicodeDecodeError):
        return None
    return line.strip().lower() if line else None


@contextmanager
def interruptible() -> Iterator[None]:
    """Around a read that blocks inside an event loop: the loop's own way to take Ctrl-C waits for the read to end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
