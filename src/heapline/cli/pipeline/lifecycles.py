"""`heapline pipeline lifecycles`: one row per message, kept in a table, or shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.pipeline.sharing import TopicOption, cell, spark_job
from heapline.cli.present import columns_table, count, facts_table, json_line, make_console
from heapline.errors import BadRequest

_SHOWN = ("message_id", "priority", "enqueued_at", "wait_ms", "service_ms", "attempts", "outcome", "reason")


def _check(out: Path | None, show: int | None, **_: Any) -> None:
    if out is None and show is None:
        raise BadRequest("say --out DIR to keep them in a table, or --show N to see some")


@spark_job(first=_check)
def lifecycles(
    spark: Any,
    where: dict[str, str],
    topic: TopicOption,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep them in this Delta table, brought up to now.")
    ] = None,
    show: Annotated[
        int | None, typer.Option("--show", metavar="N", min=1, help="Show so many, the latest first.")
    ] = None,
    lake: Annotated[
        Path | None, typer.Option("--lake", metavar="DIR", help="An archive with what the journal no longer has.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON.")] = False,
) -> None:
    """What became of each message: when it came, was due, was leased, how often it was tried, when and how it ended.

    Example:  [cyan]heapline pipeline lifecycles --path data --topic jobs --out lifecycles[/cyan]
    """
    from heapline.spark.jobs.inputs import events_of
    from heapline.spark.jobs.keeping import keep_lifecycles, read_lifecycles
    from heapline.spark.jobs.lifecycles import NEEDS
    from heapline.spark.jobs.lifecycles import lifecycles as made

    archive = None if lake is None else str(lake)
    with make_console(stderr=True).status("following every message …"):
        if out is not None:
            kept = keep_lifecycles(spark, where, topic, str(out), lake=archive)
            rows = read_lifecycles(spark, str(out), topic=topic)
        else:
            kept = None
            rows = made(events_of(spark, where, archive, topic, columns=NEEDS))
        by_outcome = {row["outcome"]: row["count"] for row in rows.groupBy("outcome").count().collect()}
        latest = rows.orderBy("id", ascending=False).limit(show).select(*_SHOWN).collect() if show else []
    if as_json:
        told = {"outcomes": by_outcome, "rows": [row.asDict() for row in latest]}
        print(json_line(told if kept is None else {**dataclasses.asdict(kept), **told}))
        return
    console = make_console()
    if latest:
        shown = [[cell(value) or "–" for value in row] for row in latest]
        console.print(columns_table(f"the latest of {escape(topic)}", _SHOWN, shown, right=(1, 3, 4, 5)))
    facts = [(outcome, count(number)) for outcome, number in sorted(by_outcome.items())]
    if kept is not None:
        facts += [("new events", count(kept.events)), ("rows written", count(kept.rows))]
    console.print(facts_table(f"messages of {escape(topic)}", facts))
