"""`heapline pipeline report`: how a topic has been doing, in the terminal and as a page to keep or to send on."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from heapline.cli import units
from heapline.cli.pipeline.sharing import TopicOption, spark_job
from heapline.cli.present import columns_table, json_line, make_console
from heapline.errors import BadRequest
from heapline.spark.jobs.figures import harmless
from heapline.spark.jobs.pages import Section

ROWS_SHOWN = 24  # of the throughput's many: the page has them all


def page_file(text: str) -> Path:
    """Refused before Spark is started rather than after the work."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{text!r} is no file that could be written: its directory must be there")
    return path


HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", parser=page_file, help="Also write a page with plots there."),
]  # fmt: skip
SinceOption = Annotated[
    datetime | None, typer.Option(
        "--since", metavar="TIME", parser=units.past,
        help="Only what was enqueued since: how long ago, as 24h or 7d, or a moment, as 2030-01-31T12:00:00Z.",
    ),
]  # fmt: skip
UntilOption = Annotated[
    datetime | None, typer.Option("--until", metavar="TIME", parser=units.past, help="And before that; as --since."),
]  # fmt: skip
LakeOption = Annotated[
    str | None, typer.Option("--lake", metavar="DIR", help="Read the archive there, and the journal from its end on.")
]  # fmt: skip
LakeOnlyOption = Annotated[bool, typer.Option("--lake-only", help="With --lake: without the journal.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as one line of JSON.")]


def where_of(where: dict[str, str], lake: str | None, lake_only: bool) -> dict[str, str] | None:
    if lake_only and lake is None:
        raise BadRequest("--lake-only needs --lake DIR")
    return None if lake_only else where


def show(heading: str, lead: str, sections: list[Section]) -> None:
    """Tables one below the other. What came with messages is text, never markup."""
    console = make_console()
    console.print(Text(harmless(heading), style="bold"))
    console.print(Text(harmless(lead, 1000)), "\n")
    for section in sections:
        left_out = max(len(section.rows) - ROWS_SHOWN, 0)
        rows = [[Text(harmless(cell)) for cell in row] for row in section.rows[left_out:]]
        title = section.title + (f" (the last {ROWS_SHOWN} of {len(section.rows)} rows)" if left_out else "")
        console.print(columns_table(title, section.names, rows, section.right))  # type: ignore[arg-type]


def write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"the page could not be written to {str(path)!r}: {error.strerror}") from None
    make_console(stderr=True).print(Text(f"The page is in {path}"))


@spark_job()
def report(
    spark: Any, where: dict[str, str], topic: TopicOption, html: HtmlOption = None, since: SinceOption = None,
    until: UntilOption = None, lake: LakeOption = None,
    lake_only: LakeOnlyOption = False,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="So many keys and reasons.")] = 10,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Waits, service times, throughput, retries, dead letters, delays of timers and the busiest keys of a topic.

    Example:  [cyan]heapline pipeline report --path data --topic jobs --since 24h --html report.html[/cyan]
    """
    from heapline.spark.jobs import report as job
    from heapline.spark.jobs.report_page import lead, report_page, sections

    with make_console(stderr=True).status("looking at the topic …") as status:
        found = job.report(
            spark,
            where_of(where, lake, lake_only),
            topic,
            lake=lake,
            since=since,
            until=until,
            top=top,
            tell=lambda step: status.update(step),
        )
    if html is not None:
        write_page(html, report_page(found))
    if as_json:
        typer.echo(json_line(found))
    else:
        show(f"Topic {found.topic}", lead(found), sections(found))
