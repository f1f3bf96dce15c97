"""`heapline pipeline replay`: messages of the past into a topic once more, chosen and changed by SQL."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.messages import print_json
from heapline.cli.pipeline.sharing import TopicOption, spark_job
from heapline.cli.present import count, facts_table, make_console, progress_bar, seconds
from heapline.cli.replay import place
from heapline.errors import BadRequest

_PLACE = "a moment as 2030-01-31T12:00:00Z, how long ago as 2h, or offsets by partition as 0:120,1:80."


@spark_job(writes=True)
def replay(
    spark: Any,
    where: dict[str, str],
    topic: TopicOption,
    name: Annotated[
        str, typer.Option("--name", metavar="JOB", help="The job: the same command again goes on with it.")
    ],
    into: Annotated[
        str | None, typer.Option("--into", metavar="TOPIC", help="Into this topic. Without it: the same.")
    ] = None,
    start: Annotated[Any, typer.Option("--start", parser=place, metavar="PLACE", help=f"From here: {_PLACE}")] = None,
    end: Annotated[
        Any, typer.Option("--end", parser=place, metavar="PLACE", help="Up to here. Without it: to what is there now.")
    ] = None,
    filter: Annotated[
        str | None, typer.Option(
            "--where", metavar="SQL", help="Only messages for which this holds, on the columns of the view messages: "
            "priority, key, get_json_object(CAST(value AS STRING), '$.kind') and so on.",
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option(
            "--select", metavar="SQL", help="Expressions with names, as 'priority + 10 AS priority': they replace what "
            "a message keeps.",
        ),
    ] = None,
    lake: Annotated[
        str | None, typer.Option("--lake", metavar="DIR", help="From the archive there, and the log from its end on.")
    ] = None,
    from_path: Annotated[
        Path | None, typer.Option("--from-path", metavar="DIR", help="From this data directory, such as a backup.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="At most so many messages a second.")
    ] = None,
    chunk_rows: Annotated[
        int | None, typer.Option("--chunk-rows", min=1, metavar="N", help="Rows of the log that are done at once.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Where the job keeps its plan; heapline-jobs/JOB unless given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:  # fmt: skip
    """Put messages of the past into a topic, each exactly once, also if this is killed and started again.

    "2h ago" is another moment each time: to go on with a job, write the moment, or the same as then.

    Example:  [cyan]heapline pipeline replay --topic orders --name again --into orders-again
    --start 2030-01-31T12:00Z --where "priority < 3" --select "priority + 10 AS priority"[/cyan]
    """
    from heapline.spark.jobs.replay import replay as job

    with progress_bar(make_console(stderr=True)) as bar:
        task = bar.add_task("looking", total=None)

        def tell(done: int, total: int, messages: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{count(messages)} messages, in chunks")

        result = job(
            spark, where, topic, name=name, into=into, start=_place(start), end=_place(end), filter=filter,
            select=select, lake=lake, source=None if from_path is None else {"path": str(from_path.resolve())},
            rate=rate, chunk_rows=chunk_rows, folder=folder, tell=tell,
        )  # fmt: skip
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    title = f"replay {escape(name)} of {escape(topic)} into {escape(result.into)}"
    rows = [
        ("messages", count(result.messages)), ("chunks", count(result.chunks)),
        ("read", ", ".join(f"{p}: {first}–{last}" for p, (first, last) in result.ranges.items())),
    ]  # fmt: skip
    if result.was_done:
        title += ": was done already"
    else:
        rows += [("of them before", count(result.chunks_before)), ("took", seconds(result.seconds))]
    make_console().print(facts_table(title, rows))


def _place(found: Any) -> Any:
    if found in (None, "earliest", "latest"):
        return None
    if isinstance(found, datetime | dict):
        return found
    raise BadRequest(f"a place is {_PLACE}")
