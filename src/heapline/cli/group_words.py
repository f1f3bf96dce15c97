"""How a place in a stream and rows of it are typed and named on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.messages import harmless
from heapline.cli.present import count
from heapline.cli.units import pair, past

PLACE_HELP = (
    "earliest, latest, an offset (of each partition), 0=120,1=95 (partition=offset), a moment as 2030-01-31T12:00:00Z, "
    "or how long ago, as 2h."
)
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
RowsArgument = Annotated[list[str] | None, typer.Argument(metavar="P:OFFSET", help="Only these rows, as 0:17.")]


def place(text: Any) -> Any:
    """
    >>> place("latest"), place("120"), place("0=120,1=95")
    ('latest', 120, {0: 120, 1: 95})
    """
    text = str(text).strip()
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if "=" in text:
        return {_number(p): _number(offset) for p, offset in map(pair, text.split(","))}
    try:
        return past(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is no place in a stream: write {PLACE_HELP}") from None


def rows_named(texts: list[str]) -> dict[int, list[int]]:
    """
    >>> rows_named(["0:17", "1:3", "0:18"])
    {0: [17, 18], 1: [3]}
    """
    found: dict[int, list[int]] = {}
    for text in texts:
        partition, _, offset = text.partition(":")
        found.setdefault(_number(partition), []).append(_number(offset))
    return found


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise typer.BadParameter(f"{text!r} is no number from 0 on")


def member_shown(name: str) -> str:
    r"""A member gives itself any name: one must not move the cursor of whoever looks.

    >>> member_shown("m\x1b[2J[red]")
    'm\\x1b[2J\\[red]'
    """
    return escape(harmless(name).plain)


def rows_word(number: int) -> str:
    return "1 row" if number == 1 else f"{count(number)} rows"
