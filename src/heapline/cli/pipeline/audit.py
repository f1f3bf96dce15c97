"""`heapline pipeline audit`: were the promises kept? Exit code 1 if one was not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from heapline.cli.pipeline.sharing import spark_job
from heapline.cli.present import columns_table, count, facts_table, json_line, make_console, moment, rate, seconds

_STYLES = {"proved": "green", "refuted": "bold red", "not applicable": "dim"}


@spark_job()
def audit(
    spark: Any,
    where: dict[str, str],
    topic: Annotated[
        list[str], typer.Option("--topic", metavar="TOPIC", help="Name, or namespace/name; may be repeated.")
    ],
    lake: Annotated[
        Path | None, typer.Option("--lake", metavar="DIR", help="An archive with what the journal no longer has.")
    ] = None,
    opening: Annotated[
        Path | None,
        typer.Option("--opening", metavar="DIR", help="Lifecycles that were kept up to where the journal begins."),
    ] = None,
    examples: Annotated[int, typer.Option("--examples", metavar="N", min=1, help="Counterexamples of each kind.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON.")] = False,
) -> None:
    """Prove or refute, from all that happened, that nothing was lost, leased twice, delivered early or again.

    Also that pops took the best, and that batches came whole. Exit code 1 if a promise was broken.

    Example:  [cyan]heapline pipeline audit --path data --topic jobs[/cyan]
    """
    from heapline.spark.jobs.audit import audit as run
    from heapline.spark.jobs.keeping import read_lifecycles

    with make_console(stderr=True).status("going through all that happened …"):
        before = None if opening is None else read_lifecycles(spark, str(opening), over=False)
        found = run(spark, where, topic, lake=None if lake is None else str(lake), opening=before, examples=examples)
    if as_json:
        print(json_line(found.as_json()))
    else:
        _show(found)
    if found.is_refuted:
        raise typer.Exit(1)


def _show(found: Any) -> None:
    console = make_console()
    for check in found.checks:
        for example in check.examples:
            console.print(Text.assemble((f"{check.name}: ", "bold red"), _told(example)))
    rows = [
        [c.promise, f"[{_STYLES[c.verdict]}]{c.verdict}[/]", count(c.looked_at), count(c.wrong), c.why]
        for c in found.checks
    ]  # fmt: skip
    title = f"audit of {', '.join(found.topics)}"
    console.print(columns_table(title, ("promise", "verdict", "cases", "wrong", "remark"), rows, right=(2, 3)))
    held = ", ".join(f"{count(number)} {state}" for state, number in found.standing.items())
    facts = [
        ("events", count(found.events)), ("messages", count(found.messages)), ("in the end", held),
        ("took", f"{seconds(found.seconds)}, {rate(found.events, found.seconds)}"),
    ]  # fmt: skip
    console.print(facts_table("what was looked at", facts))


def _told(example: Any) -> str:
    names = {"partition": "partition", "message_id": "message", "batch_id": "batch", "offset": "at offset"}
    names |= {"before": "after offset"}
    parts = [f"{word} {getattr(example, name)}" for name, word in names.items() if getattr(example, name) is not None]
    times = {"at_ms": "at", "due_ms": "due"}
    parts += [f"{word} {moment(getattr(example, name))}" for name, word in times.items() if getattr(example, name)]
    return f"{example.topic}: {example.why} ({', '.join(parts)})"
