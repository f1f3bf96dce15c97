"""`heapline pipeline lake show|maintain|drop`: what is in a lake, and keeping it in order. Needs no Spark."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from heapline.cli.present import columns_table, count, json_line, make_console, size
from heapline.cli.units import duration
from heapline.errors import BadRequest

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="rich",
    help="""What is in a lake, and keeping it in order.

    Example:  [cyan]heapline pipeline lake show --lake lake[/cyan]
    """,
)  # fmt: skip
LakeOption = Annotated[Path, typer.Option("--lake", metavar="DIR", help="The lake's directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One line of JSON.")]
_DAY = 86400.0


@app.command()
def show(lake: LakeOption, as_json: JsonOption = False) -> None:
    """What is in it: rows, files and days of each topic, and up to which offset.

    Example:  [cyan]heapline pipeline lake show --lake lake[/cyan]
    """
    from heapline.spark.lake.upkeep import contents

    found = _needed(contents, lake)
    if as_json:
        print(json_line([dataclasses.asdict(topic) for topic in found]))
        return
    rows = [
        (
            t.topic, t.view, count(t.rows), count(t.files), size(t.nbytes),
            f"{t.first_day} to {t.last_day}, {t.days} days" if t.days > 1 else t.first_day or "none",
            ", ".join(f"{p}:{end}" for p, end in t.ends.items()),
        )
        for t in found
    ]  # fmt: skip
    names = ("topic", "view", "rows", "files", "size", "days", "ends at")
    make_console().print(columns_table(f"lake {lake}", names, rows, right=(2, 3, 4)))


@app.command()
def maintain(
    lake: LakeOption,
    keep: Annotated[
        Any, typer.Option("--keep", parser=duration, metavar="SPAN", help="Drop older days, as 400d; none without it.")
    ] = None,
    no_compact: Annotated[bool, typer.Option("--no-compact", help="Leave small files as they are.")] = False,
    vacuum: Annotated[
        Any, typer.Option(
            "--vacuum", parser=duration, metavar="SPAN",
            help="Remove files that are in no commit, or no more, when they are this old. Not below what a query or an "
            "archive may take: they read and write such files.",
        )
    ] = "7d",
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Join small files, drop old days, remove files that nobody needs. May run beside an archive.

    Example:  [cyan]heapline pipeline lake maintain --lake lake --keep 400d[/cyan]
    """
    from heapline.spark.lake.upkeep import maintain as run

    if keep is not None and keep < _DAY:
        raise BadRequest("--keep is a day or more: whole days are dropped, as in --keep 400d")
    with make_console(stderr=True).status("maintaining the lake …"):
        found = _needed(
            run, lake, keep_days=None if keep is None else int(keep // _DAY), compact=not no_compact,
            vacuum_hours=int(vacuum // 3600),
        )  # fmt: skip
    if as_json:
        print(json_line([dataclasses.asdict(done) for done in found]))
        return
    rows = [
        (d.view, count(d.files_before), count(d.files), count(d.rows_dropped), count(d.files_removed)) for d in found
    ]  # fmt: skip
    names = ("view", "files before", "files now", "rows dropped", "files removed")
    make_console().print(columns_table(f"lake {lake}", names, rows, right=(1, 2, 3, 4)))


@app.command()
def drop(
    lake: LakeOption,
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="Name, or namespace/name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a topic from the lake, to archive it anew: after it was deleted and made again, or restored.

    Example:  [cyan]heapline pipeline lake drop --lake lake --topic orders --yes[/cyan]
    """
    from heapline.spark.lake.upkeep import drop as run

    if not yes:
        typer.confirm(f"Remove all rows of topic {topic!r} from the lake {lake}?", abort=True)
    rows = _needed(run, lake, topic)
    make_console().print(f"{count(rows)} rows are no longer in the lake.")


def _needed(act: Any, *args: Any, **more: Any) -> Any:
    try:
        return act(*args, **more)
    except ImportError as error:
        raise BadRequest(str(error)) from None
