"""`heapline pipeline forecast`: the past of a topic against other numbers of workers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from heapline.cli import units
from heapline.cli.pipeline.report import (
    HtmlOption,
    JsonOption,
    LakeOnlyOption,
    LakeOption,
    SinceOption,
    UntilOption,
    show,
    where_of,
    write_page,
)
from heapline.cli.pipeline.sharing import TopicOption, spark_job
from heapline.cli.present import json_line, make_console


def crowd_sizes(text: str) -> list[int]:
    """
    >>> crowd_sizes("1,2, 8")
    [1, 2, 8]
    """
    try:
        return [int(word) for word in str(text).split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write numbers of workers as 1,2,4,8") from None


def goal(text: str) -> tuple[int | None, float]:
    """
    >>> goal("5s"), goal("0=250ms")
    ((None, 5.0), (0, 0.25))
    """
    priority, equals, wait = str(text).rpartition("=")
    if not equals:
        return None, units.duration(wait)
    try:
        return int(priority), units.duration(wait)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write a goal as 5s, or for one priority as 0=250ms") from None


@spark_job()
def forecast(
    spark: Any, where: dict[str, str], topic: TopicOption,
    workers: Annotated[
        Any, typer.Option(
            "--workers", metavar="N,N,…", parser=crowd_sizes, help="Numbers of workers to try. Default: some that tell."
        ),
    ] = None,
    goals: Annotated[
        list[Any] | None, typer.Option(
            "--goal", metavar="[PRIORITY=]WAIT", parser=goal,
            help="Find the fewest workers that keep the p95 of waits within it, as 5s; as 0=250ms for one priority.",
        ),
    ] = None,
    growth: Annotated[float, typer.Option("--growth", metavar="X", help="As if X times as much came.")] = 1.0,
    html: HtmlOption = None, since: SinceOption = None, until: UntilOption = None, lake: LakeOption = None,
    lake_only: LakeOnlyOption = False, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """How long messages would wait with so many workers, and how many it takes to keep a goal.

    Example:  [cyan]heapline pipeline forecast --path data --topic jobs --workers 1,2,4,8 --goal 5s --growth 1.5[/cyan]
    """
    from heapline.spark.jobs import forecast as job
    from heapline.spark.jobs.forecast_page import forecast_page, lead, sections

    with make_console(stderr=True).status("looking at the past …") as status:
        found = job.forecast(
            spark, where_of(where, lake, lake_only), topic, lake=lake, workers=workers,
            goal=dict(goals) if goals else None, growth=growth, since=since, until=until,
            tell=lambda step: status.update(step),
        )  # fmt: skip
    if html is not None:
        write_page(html, forecast_page(found))
    if as_json:
        typer.echo(json_line(found))
    else:
        show(f"Topic {found.topic}", lead(found), sections(found))
