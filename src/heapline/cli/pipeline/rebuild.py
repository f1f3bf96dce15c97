"""`heapline pipeline rebuild`: the state of a topic at a moment of the past, as a summary, a listing or a table."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from heapline.cli.messages import print_json
from heapline.cli.pipeline.sharing import TopicOption, cell, spark_job
from heapline.cli.present import columns_table, count, make_console
from heapline.cli.replay import place
from heapline.cli.units import past
from heapline.errors import BadRequest

STATES = ("ready", "delayed", "leased", "dead")
_SHOWN = ("message_id", "state", "priority", "due", "attempts", "holder", "deadline", "reason")


def _places() -> Any:
    """What is next comes first, what is dead last."""
    from pyspark.sql import functions as F

    return F.array_position(F.array(*map(F.lit, STATES)), F.col("state"))


def _offsets(text: str) -> Any:
    found = place(text)
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} names no offsets by partition: write 0:120,1:80")
    return found


def _check(at: datetime | None, offsets: Any, out: Path | None, **_: Any) -> None:
    if (at is None) == (offsets is None):
        raise BadRequest("say which moment: --at WHEN or --offsets PLACE")
    if out is not None and out.exists():
        raise BadRequest(f"--out {str(out)!r} is there already: name a directory that is to be made")


@spark_job(first=_check)
def rebuild(
    spark: Any,
    where: dict[str, str],
    topic: TopicOption,
    at: Annotated[
        datetime | None,
        typer.Option("--at", parser=past, metavar="WHEN", help="The moment: 2030-01-31T12:00Z, or how long ago as 2h."),
    ] = None,
    offsets: Annotated[
        Any,
        typer.Option("--offsets", parser=_offsets, metavar="PLACE", help="Instead: where it ended, as 0:120,1:80."),
    ] = None,
    lake: Annotated[
        str | None, typer.Option("--lake", metavar="DIR", help="Read the archive there, and the log from its end on.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="With payloads, keys and headers.")] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Also of a log whose beginning is gone: what it still tells of.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the messages there, as Parquet.")
    ] = None,
    show: Annotated[int, typer.Option("--show", min=0, metavar="N", help="List so many, the best first.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: how many in each state.")] = False,
) -> None:
    """Which messages a topic held at a moment of the past, and in what state each of them was.

    Example:  [cyan]heapline pipeline rebuild --path data --topic jobs --at 2h --show 20[/cyan]
    """
    from heapline.spark.jobs.rebuild import rebuild as job

    console = make_console(stderr=True)
    with console.status("reading the log …"):
        found = job(spark, where, topic, at, offsets=offsets, lake=lake, values=values, incomplete=incomplete)
        if out is not None:
            found.write.parquet(str(out))
            found = spark.read.parquet(str(out))
        elif show:
            found = found.cache()
        counts = {row[0]: row[1] for row in found.groupBy("state").count().collect()}
        rows = found.select(*_SHOWN).orderBy(_places(), "priority", "id").limit(show).collect() if show else []
    told = {state: counts.get(state, 0) for state in STATES}
    if as_json:
        print_json({"topic": topic, "at": at, "offsets": offsets, **told, "out": None if out is None else str(out)})
        return
    whole = make_console()
    if rows:
        whole.print(columns_table("", _SHOWN, [[cell(value) for value in row] for row in rows], right=(2, 4)))
    when = at.isoformat(timespec="seconds") if at is not None else ", ".join(f"{p}:{o}" for p, o in offsets.items())
    title = f"{escape(topic)} at {when}"
    whole.print(columns_table(title, ("state", "messages"), [(s, count(n)) for s, n in told.items()], right=(1,)))
    if out is not None:
        whole.print(Text(f"{count(sum(told.values()))} messages are in {out}"))
