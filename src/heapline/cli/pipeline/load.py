"""`heapline pipeline load`: files into a topic, each row once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.messages import print_json
from heapline.cli.pipeline.sharing import TopicOption, spark_job
from heapline.cli.present import count, facts_table, make_console, progress_bar, rate, seconds
from heapline.cli.units import pair


@spark_job(writes=True)
def load(
    spark: Any,
    where: dict[str, str],
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Parquet, JSON, CSV, text or ORC; files, folders, "
    "or a Delta table.")],
    topic: TopicOption,
    name: Annotated[
        str, typer.Option("--name", metavar="JOB", help="The job: the same command again goes on with it.")
    ],
    select: Annotated[
        str | None, typer.Option(
            "--select", metavar="SQL", help="Expressions that give value and, if you like, priority, key, deliver_at, "
            "delay, headers, ttl, idempotency_key, fairness_key. Without it: a column value as it is, else each row "
            "as JSON.",
        ),
    ] = None,
    filter: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="Only rows for which this holds.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="What the files are, where their names do not tell it.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="For Spark's reader, as sep=; may be repeated."),
    ] = None,
    rate_max: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="At most so many messages a second.")
    ] = None,
    chunk_rows: Annotated[
        int | None, typer.Option("--chunk-rows", min=1, metavar="N", help="Rows that come into the topic at once.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(
            "--folder", metavar="DIR", help="Where the job keeps its plan and a copy of the rows until they are sent; "
            "heapline-jobs/JOB unless given.",
        ),
    ] = None,
    bad_records: Annotated[
        Path | None, typer.Option("--bad-records", metavar="DIR", help="Put rows aside there that cannot be messages.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:  # fmt: skip
    """Put the rows of files into a topic, each exactly once, also if this is killed and started again.

    Example:  [cyan]heapline pipeline load orders.parquet --topic jobs --name friday
    --select "to_json(struct(*)) AS value, urgency AS priority, ship_at AS deliver_at"[/cyan]
    """
    from heapline.spark.jobs.load import load as job

    with progress_bar(make_console(stderr=True)) as bar:
        task = bar.add_task("copying the rows", total=None)

        def tell(done: int, total: int, messages: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{count(messages)} messages, in chunks")

        result = job(
            spark, where, files, topic, name=name, select=select, filter=filter, format=format,
            options=dict(map(pair, option or [])), rate=rate_max, chunk_rows=chunk_rows,
            folder=folder, bad_records=bad_records, tell=tell,
        )  # fmt: skip
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    title = f"load {escape(name)} into {escape(topic)}"
    if result.was_done:
        title += ": was done already"
    rows = [("rows", count(result.rows)), ("messages", count(result.messages)), ("chunks", count(result.chunks))]
    if result.chunks_before and not result.was_done:
        rows.append(("of them before", count(result.chunks_before)))
    if not result.was_done:
        rows.append(("took", f"{seconds(result.seconds)}"))
        if not result.chunks_before:
            rows.append(("rate", rate(result.messages, result.seconds)))
    make_console().print(facts_table(title, rows))
