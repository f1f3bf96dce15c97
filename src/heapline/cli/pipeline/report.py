"""`heapline pipeline audit|report|forecast|rebuild`: jobs that read the log and print what they find."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.markup import escape
from rich.text import Text

from heapline.cli import options
from heapline.cli.options import Directory, Past, TopicName, Value
from heapline.cli.output import (
    Output,
    columns_table,
    count,
    depths,
    facts_table,
    make_console,
    rate,
    seconds,
    timestamp,
)
from heapline.cli.pipeline.job import ARCHIVE_HELP, ArchiveOption, TopicOption, cell, spark_job
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.spark.jobs.pages import Section, printable

ROWS_SHOWN = 24  # of a long table; the page has all rows
STATES = ("ready", "delayed", "leased", "dead")
STATE_COLUMNS = ("message_id", "state", "priority", "due", "attempts", "holder", "deadline", "reason")
VERDICT_STYLES = {"proved": "green", "refuted": "bold red", "not applicable": "dim"}


# -- audit -------------------------------------------------------------------------------------------------------------


@spark_job(example="--path data --topic jobs")
def audit(
    spark: Any,
    where: dict[str, str],
    out: Output,
    topic: Annotated[list[TopicName], "Topic name, or namespace/name; repeatable."],
    lake: ArchiveOption = None,
    opening: Annotated[Directory | None, "Lifecycles that were stored up to the start of the journal."] = None,
    examples: Annotated[int, "Maximum number of counterexamples per promise.", Meta(ge=1), Value("N")] = 10,
) -> None:
    """Prove or refute that no message was lost, leased twice or delivered early, from the complete log.

    Also checks that pops took the best message, and that batches are atomic. Exit code 1 if a promise was broken.

    With the admin right, the server keeps the result for the dashboard and for heapline topic show.
    """
    from heapline.spark.audit.job import audit as run
    from heapline.spark.audit.job import record
    from heapline.spark.jobs.lifecycle_updates import read_lifecycles

    until, notes = datetime.now(UTC), make_console(stderr=True)
    with notes.status("reading the log …"):
        before = None if opening is None else read_lifecycles(spark, str(opening), over=False)
        found = run(spark, where, topic, lake=None if lake is None else str(lake), opening=before, examples=examples)
    out.row(found.as_json(), *_audit_tables(found))
    if "path" not in where:
        try:
            record(where, found, until)
        except HeaplineError as error:  # the audit itself succeeded
            notes.print(Text(f"result not kept with the topic: {error}"))
    if found.is_refuted:
        raise typer.Exit(1)


def _audit_tables(found: Any) -> list[Any]:
    counterexamples = [
        Text.assemble((f"{check.name}: ", "bold red"), _example_text(example))
        for check in found.checks
        for example in check.examples
    ]
    rows = [
        [c.promise, f"[{VERDICT_STYLES[c.verdict]}]{c.verdict}[/]", count(c.looked_at), count(c.wrong), c.why]
        for c in found.checks
    ]
    names = ("promise", "verdict", "cases", "wrong", "remark")
    facts = [
        ("events", count(found.events)),
        ("messages", count(found.messages)),
        ("at the end", depths(found.standing)),
        ("took", f"{seconds(found.seconds)}, {rate(found.events, found.seconds)}"),
    ]
    table = columns_table(f"audit of {', '.join(found.topics)}", names, rows, right=(2, 3))
    return [*counterexamples, table, facts_table("checked", facts)]


def _example_text(example: Any) -> str:
    names = {
        "partition": "partition", "message_id": "message", "batch_id": "batch", "offset": "at offset",
        "before": "after offset",
    }  # fmt: skip
    parts = [f"{word} {getattr(example, name)}" for name, word in names.items() if getattr(example, name) is not None]
    times = {"at_ms": "at", "due_ms": "due"}
    parts += [f"{word} {timestamp(getattr(example, name))}" for name, word in times.items() if getattr(example, name)]
    return f"{example.topic}: {example.why} ({', '.join(parts)})"


# -- report and forecast -----------------------------------------------------------------------------------------------


def page_file(text: str) -> Path:
    """Check that the page can be written, before Spark is started."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"cannot write {text!r}; its directory must exist")
    return path


HtmlOption = Annotated[Path | None, "--html", "Also write a page with plots to this file.", Value("FILE", page_file)]
_SINCE_HELP = "Only messages enqueued since: how long ago, such as 7d, or 2030-01-31T12:00:00Z."


def period(
    since: Annotated[Past | None, _SINCE_HELP] = None,
    until: Annotated[Past | None, "Only messages enqueued before; as --since."] = None,
    lake: Annotated[str | None, ARCHIVE_HELP, Value("DIR")] = None,
    lake_only: Annotated[bool, "Read only the archive, not the journal. Needs --lake."] = False,
) -> dict[str, Any]:
    """Return the arguments that choose the messages of a report or a forecast."""
    if lake_only and lake is None:
        raise BadRequest("--lake-only needs --lake DIR")
    return locals()


def _run(job: Callable[..., Any], spark: Any, where: dict[str, str], topic: str, given: dict[str, Any]) -> Any:
    """Run a report or a forecast, and show its steps."""
    given, source = dict(given), None if given["lake_only"] else where
    del given["lake_only"]
    with make_console(stderr=True).status("reading the log …") as status:
        return job(spark, source, topic, **given, tell=lambda step: status.update(step))


def _sections(heading: str, lead: str, sections: list[Section]) -> list[Any]:
    """Return a heading and tables. Text of messages is never markup."""
    shown: list[Any] = [Text(printable(heading), style="bold"), Text(printable(lead, 1000) + "\n")]
    for section in sections:
        left_out = max(len(section.rows) - ROWS_SHOWN, 0)
        rows = [[Text(printable(cell)) for cell in row] for row in section.rows[left_out:]]
        title = section.title + (f" (the last {ROWS_SHOWN} of {len(section.rows)} rows)" if left_out else "")
        shown.append(columns_table(title, section.names, rows, section.right))
    return shown


def _write_page(path: Path | None, page: Callable[[Any], str], found: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write the page to {str(path)!r}: {error.strerror}") from None
    make_console(stderr=True).print(Text(f"wrote the page to {path}"))


@spark_job(example="--path data --topic jobs --since 24h --html report.html", period=period)
def report(
    spark: Any,
    where: dict[str, str],
    out: Output,
    period: dict[str, Any],
    topic: TopicOption,
    html: HtmlOption = None,
    top: Annotated[int, "Number of keys and reasons to list.", Meta(ge=1, le=1000)] = 10,
) -> None:
    """Report waits, throughput, retries and the busiest keys of a topic.

    Also service times, dead letters and timer delays.
    """
    from heapline.spark.jobs.report import report as job
    from heapline.spark.jobs.report_page import report_lead, report_page, report_sections

    found = _run(job, spark, where, topic, {**period, "top": top})
    _write_page(html, report_page, found)
    out.row(found, *_sections(f"Topic {found.topic}", report_lead(found), report_sections(found)))


def worker_counts(text: str) -> list[int]:
    """
    >>> worker_counts("1,2, 8")
    [1, 2, 8]
    """
    try:
        return [int(word) for word in str(text).split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers; use a form such as 1,2,4,8") from None


def goal(text: str) -> tuple[int | None, float]:
    """
    >>> goal("5s"), goal("0=250ms")
    ((None, 5.0), (0, 0.25))
    """
    priority, equals, wait = str(text).rpartition("=")
    if not equals:
        return None, options.duration(wait)
    try:
        return int(priority), options.duration(wait)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a goal; use 5s, or 0=250ms for one priority") from None


_WORKERS_HELP = "Numbers of workers to try. Default: chosen automatically."
_GOAL_HELP = (
    "Find the fewest workers that keep the p95 of waits below this: 5s, or 0=250ms for one priority; repeatable."
)


@spark_job(example="--path data --topic jobs --workers 1,2,4,8 --goal 5s --growth 1.5", period=period)
def forecast(
    spark: Any,
    where: dict[str, str],
    out: Output,
    period: dict[str, Any],
    topic: TopicOption,
    workers: Annotated[Any, _WORKERS_HELP, Value("N,N,…", worker_counts)] = None,
    goals: Annotated[list[Any] | None, "--goal", _GOAL_HELP, Value("[PRIORITY=]WAIT", goal)] = None,
    growth: Annotated[float, "Multiply the load by this factor.", Value("X")] = 1.0,
    html: HtmlOption = None,
) -> None:
    """Forecast how long messages would wait with other numbers of workers, and how many a goal needs."""
    from heapline.spark.jobs.forecast import forecast as job
    from heapline.spark.jobs.report_page import forecast_lead, forecast_page, forecast_sections

    scenario = {"workers": workers, "goal": dict(goals) if goals else None, "growth": growth}
    found = _run(job, spark, where, topic, {**period, **scenario})
    _write_page(html, forecast_page, found)
    out.row(found, *_sections(f"Topic {found.topic}", forecast_lead(found), forecast_sections(found)))


# -- rebuild -----------------------------------------------------------------------------------------------------------


def _offsets(text: str) -> Any:
    position = options.position(text)
    if not isinstance(position, dict):
        raise typer.BadParameter(f"{text!r} has no partitions; use offsets by partition, such as 0:120,1:80")
    return position


def _check_rebuild(at: datetime | None, offsets: Any, out_dir: Path | None, **_: Any) -> None:
    if (at is None) == (offsets is None):
        raise BadRequest("choose a time with --at TIME, or offsets with --offsets")
    if out_dir is not None and out_dir.exists():
        raise BadRequest(f"--out {str(out_dir)!r} already exists; choose a directory that does not")


@spark_job(example="--path data --topic jobs --at 2h --show 20", first=_check_rebuild)
def rebuild(
    spark: Any,
    where: dict[str, str],
    out: Output,
    topic: TopicOption,
    at: Annotated[Past | None, "Time: 2030-01-31T12:00Z, or how long ago, such as 2h."] = None,
    offsets: Annotated[Any, "End of the log instead of --at: 0:120,1:80.", Value("OFFSETS", _offsets)] = None,
    lake: Annotated[str | None, ARCHIVE_HELP, Value("DIR")] = None,
    values: Annotated[bool, "Include payloads, keys and headers."] = False,
    incomplete: Annotated[bool, "Accept a log whose beginning was deleted, and use the rest."] = False,
    out_dir: Annotated[Directory | None, "--out", "Write the messages to this directory, as Parquet."] = None,
    show: Annotated[int, "Print this many messages, best first.", Meta(ge=0), Value("N")] = 0,
) -> None:
    """Show which messages a topic contained at a past time, and their states."""
    from heapline.spark.jobs.rebuild import rebuild as job

    with make_console(stderr=True).status("reading the log …"):
        found = job(spark, where, topic, at, offsets=offsets, lake=lake, values=values, incomplete=incomplete)
        if out_dir is not None:
            found.write.parquet(str(out_dir))
            found = spark.read.parquet(str(out_dir))
        elif show:
            found = found.cache()
        counts = {row[0]: row[1] for row in found.groupBy("state").count().collect()}
        order = (_state_order(), "priority", "id") if show else ()
        rows = found.select(*STATE_COLUMNS).orderBy(*order).limit(show).collect() if show else []
    depths = {state: counts.get(state, 0) for state in STATES}
    when = at.isoformat(timespec="seconds") if at is not None else ", ".join(f"{p}:{o}" for p, o in offsets.items())
    shown: list[Any] = []
    if rows:
        cells = [[cell(value) for value in row] for row in rows]
        shown.append(columns_table("", STATE_COLUMNS, cells, right=(2, 4)))
    numbers = [(state, count(number)) for state, number in depths.items()]
    shown.append(columns_table(f"{escape(topic)} at {when}", ("state", "messages"), numbers, right=(1,)))
    if out_dir is not None:
        shown.append(Text(f"wrote {count(sum(depths.values()))} messages to {out_dir}"))
    written = None if out_dir is None else str(out_dir)
    out.row({"topic": topic, "at": at, "offsets": offsets, **depths, "out": written}, *shown)


def _state_order() -> Any:
    """Return an expression that sorts ready messages first and dead ones last."""
    from pyspark.sql import functions as F

    return F.array_position(F.array(*map(F.lit, STATES)), F.col("state"))
