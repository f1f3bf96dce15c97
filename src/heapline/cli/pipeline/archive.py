"""`heapline pipeline archive`: the log into a lake."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from heapline.cli.pipeline.sharing import MetricsPortOption, spark_job
from heapline.cli.present import columns_table, count, json_line, make_console, progress_bar, seconds, size
from heapline.errors import BadRequest

LakeOption = Annotated[
    Path, typer.Option("--lake", metavar="DIR", help="The lake's directory; it is made. Executors must see it, too."),
]  # fmt: skip


def _check(group: str | None, no_group: bool, **_: Any) -> None:
    if no_group and group is not None:
        raise BadRequest("--group and --no-group exclude each other")


@spark_job(first=_check)
def archive(
    spark: Any,
    where: dict[str, str],
    lake: LakeOption,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Name, or namespace/name; may be repeated.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="REGEX", help="Instead: all topics whose names fit, also new ones."),
    ] = None,
    view: Annotated[
        list[str] | None, typer.Option("--view", metavar="VIEW", help="Only messages, or only events; both without it.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C, not only up to now.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="With --follow: between two commits.")
    ] = 10.0,
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="The group that holds the journal, on a server.")
    ] = None,
    no_group: Annotated[
        bool, typer.Option("--no-group", help="Hold nothing: what is reclaimed meanwhile is lost.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on behind rows that are in no journal any more.")
    ] = False,
    metrics_port: MetricsPortOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """Bring what the lake lacks of a topic into it: each row once, whatever fails and however often this is run.

    Example:  [cyan]heapline pipeline archive --topic orders --lake lake[/cyan]
    """
    from heapline.spark.jobs.archive import GROUP, VIEWS, Progress
    from heapline.spark.jobs.archive import archive as run

    console = make_console(stderr=True)
    readings = None
    if metrics_port is not None:
        from heapline.spark.listening import watch

        readings = watch(spark, metrics_port).readings
    with progress_bar(console) as bar:
        task = bar.add_task("rows of the log", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total)
            if readings is not None:
                readings.round_done("archive", progress.done, progress.total)

        result = run(
            spark, where, topic or None, lake, pattern=pattern, views=view or VIEWS, available_now=not follow,
            trigger=every, group=None if no_group else group or GROUP, fail_on_loss=not accept_loss, on_progress=show,
            until=_until_interrupted() if follow else lambda: False,
        )  # fmt: skip
    if as_json:
        print(json_line(dataclasses.asdict(result)))
        return
    make_console().print(_table(result))
    if result.group is None and not no_group:
        console.print("Read from a directory: nothing holds the journal until the next run; its retention must reach.")


def _until_interrupted() -> Any:
    """Ctrl-C ends a run between two rounds."""
    import signal

    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends it at once

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    return lambda: asked


def _table(result: Any) -> Any:
    rows = [
        (t.topic, t.view, count(t.rows), count(t.files), size(t.nbytes), _listed(t.ends))
        for t in result.tables
    ]  # fmt: skip
    title = f"archived in {seconds(result.seconds)}, {result.commits} commits"
    return columns_table(title, ("topic", "view", "rows", "files", "size", "the lake ends at"), rows, right=(2, 3, 4))


def _listed(ends: Any) -> str:
    return ", ".join(f"{partition}:{end}" for partition, end in ends.items())
