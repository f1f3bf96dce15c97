"""`heapline pipeline load|replay`: jobs that enqueue messages, each exactly once, even if they are repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.markup import escape

from heapline.cli.options import Directory, Pair, Position, Sql, TopicName, Value, pair
from heapline.cli.output import Output, count, facts_table, make_console, progress_bar, rate, seconds
from heapline.cli.pipeline.job import ARCHIVE_HELP, TopicOption, spark_job
from heapline.contract.errors import BadRequest

POSITION = "a time such as 2030-01-31T12:00:00Z, how long ago such as 2h, or offsets by partition such as 0:120,1:80."
FILES_HELP = "Files or directories of Parquet, JSON, CSV, text or ORC, or a Delta table."
NAME_HELP = "Name of the job. Repeating the command with this name continues it."
VALUES_HELP = (
    "Expressions for value and, optionally, priority, key, deliver_at, delay, headers, ttl, idempotency_key, "
    "fairness_key. Default: the column value, or each row as JSON."
)
CHANGES_HELP = "Named expressions, such as 'priority + 10 AS priority', that replace fields of the message."
CONDITION_HELP = (
    "Only messages that satisfy this condition on the columns of the view messages: priority, key, "
    "get_json_object(CAST(value AS STRING), '$.kind') and so on."
)


def chunks(
    name: Annotated[str, NAME_HELP, Value("JOB")],
    rate: Annotated[float | None, "Maximum number of messages per second.", Value("N")] = None,
    chunk_rows: Annotated[int | None, "Rows per chunk.", Meta(ge=1), Value("N")] = None,
    folder: Annotated[Directory | None, "Directory for the job's plan and data. Default: heapline-jobs/JOB."] = None,
) -> dict[str, Any]:
    """Return the arguments that all jobs that write in chunks have."""
    return locals()


def rows_of_files(
    select: Annotated[Sql | None, VALUES_HELP] = None,
    filter: Annotated[Sql | None, "--where", "Only rows that satisfy this condition."] = None,
    format: Annotated[str | None, "Format of the files, if their names do not show it."] = None,
    options: Annotated[list[Pair] | None, "--option", "Option of Spark's reader, such as sep=; repeatable."] = None,
    bad_records: Annotated[Directory | None, "Write rows that are not valid messages to this directory."] = None,
) -> dict[str, Any]:
    return locals() | {"options": dict(map(pair, options or ()))}


def past_messages(
    into: Annotated[TopicName | None, "Target topic. Default: the same topic."] = None,
    start: Annotated[Position, f"First row: {POSITION}"] = None,
    end: Annotated[Position, "Position to stop before. Default: the end now."] = None,
    filter: Annotated[Sql | None, "--where", CONDITION_HELP] = None,
    count: Annotated[int | None, "-n", "Maximum number of messages, the first of each partition.", Meta(ge=1)] = None,
    select: Annotated[Sql | None, CHANGES_HELP] = None,
    lake: Annotated[str | None, ARCHIVE_HELP, Value("DIR")] = None,
) -> dict[str, Any]:
    return locals() | {"start": _checked(start), "end": _checked(end)}


@spark_job(
    example="orders.parquet --topic jobs --name friday "
    '--select "to_json(struct(*)) AS value, urgency AS priority, ship_at AS deliver_at"',
    writes=True,
    rows=rows_of_files,
    chunks=chunks,
)
def load(
    spark: Any,
    where: dict[str, str],
    out: Output,
    rows: dict[str, Any],
    chunks: dict[str, Any],
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help=FILES_HELP)],
    topic: TopicOption,
) -> None:
    """Enqueue the rows of files, each exactly once. You can repeat the command if it was killed."""
    from heapline.spark.jobs.load import load as job

    with _progress("copying the rows") as tell:
        result = job(spark, where, files, topic, **rows, **chunks, tell=tell)
    facts = [("rows", count(result.rows)), *_chunk_facts(result)]
    if not result.was_done and not result.chunks_before:
        facts.append(("rate", rate(result.messages, result.seconds)))
    title = f"load {escape(chunks['name'])} into {escape(topic)}"
    out.row(dataclasses.asdict(result), _table(title, result, facts))


@spark_job(
    example="--topic orders --name again --into orders-again --start 2030-01-31T12:00Z "
    '--where "priority < 3" --select "priority + 10 AS priority"',
    writes=True,
    messages=past_messages,
    chunks=chunks,
)
def replay(
    spark: Any,
    where: dict[str, str],
    out: Output,
    messages: dict[str, Any],
    chunks: dict[str, Any],
    topic: TopicOption,
    from_path: Annotated[Directory | None, "Read this data directory, such as a backup."] = None,
) -> None:
    """Enqueue past messages again, selected and changed by SQL, each exactly once.

    You can repeat the command if it was killed. "2h ago" means another time on each run: to continue a job, write the
    time itself.
    """
    from heapline.spark.jobs.replay import replay as job

    source = None if from_path is None else {"path": str(from_path.resolve())}
    with _progress("reading") as tell:
        result = job(spark, where, topic, **messages, **chunks, source=source, tell=tell)
    ranges = ", ".join(f"{p}: {first}–{last}" for p, (first, last) in result.ranges.items())
    title = f"replay {escape(chunks['name'])} of {escape(topic)} into {escape(result.into)}"
    out.row(dataclasses.asdict(result), _table(title, result, [*_chunk_facts(result), ("read", ranges)]))


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int, int], None]]:
    """Yield a function that reports chunks that are done, all chunks, and messages so far."""
    with progress_bar(make_console(stderr=True)) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total, messages: bar.update(
            task, completed=done, total=total, description=f"{count(messages)} messages, in chunks"
        )


def _chunk_facts(result: Any) -> list[tuple[str, str]]:
    facts = [("messages", count(result.messages)), ("chunks", count(result.chunks))]
    if not result.was_done:
        facts += [("chunks done before", count(result.chunks_before)), ("took", seconds(result.seconds))]
    return facts


def _table(title: str, result: Any, facts: list[tuple[str, str]]) -> Any:
    return facts_table(f"{title}: already done before" if result.was_done else title, facts)


def _checked(position: Any) -> Any:
    """Return the position for the job, in which None means the end of the log on that side."""
    if position in (None, "earliest", "latest"):
        return None
    if isinstance(position, datetime | dict):
        return position
    raise BadRequest(f"an offset needs its partition; use {POSITION}")
