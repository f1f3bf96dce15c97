"""`heapline journal verify|repair|dump|stats PATH`: looking into a data directory, and giving up what is damaged.

Here are only flags, questions and tables; what is looked at is in examine.py, figures.py, losses.py and rows.py.
Verify, dump and stats may run beside an engine that has the directory open; repair takes the directory's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from heapline.cli.examine import Examined, Finding, examine
from heapline.cli.figures import figures
from heapline.cli.losses import plan_repair
from heapline.cli.places import Place, Places, find_topics, is_open
from heapline.cli.present import make_console, progress_bar, some
from heapline.cli.reading import counting, segment_sizes
from heapline.cli.rows import as_json, as_line, rows
from heapline.cli.views import (
    catalog_dict,
    figures_dict,
    print_json,
    show_figures,
    show_plan,
    show_verdict,
    verdict_dict,
)  # fmt: skip
from heapline.core.events import KIND_NAMES
from heapline.errors import BadRequest
from heapline.journal import Disk, RealDisk, repair

T = TypeVar("T")
PathArgument = Annotated[Path, typer.Argument(help="A data directory (all its topics), or the folder of one topic.")]
TopicOption = Annotated[str | None, typer.Option("--topic", "-t", help="Only this topic.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a topic instead of tables.")]
CATALOG_ADVICE = "restore it from a backup; the topics' own files are untouched"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Look into a data directory: does every byte check, what is in it, what happened?

    Example:  [cyan]heapline journal verify data[/cyan]

    Everything but [bold]repair[/bold] only reads, and may run beside a process that has the directory open.
    """,
)


@app.command("verify")
def verify_command(
    path: PathArgument, topic: TopicOption = None, as_json: JsonOption = False,
    replay: Annotated[bool, typer.Option(help="Also rebuild each topic in memory, as opening it would.")] = True,
) -> None:  # fmt: skip
    """Check every segment, unit, record, snapshot, index, watermark and the catalog.

    Exit code 1 if anything does not check; then each finding says which file and byte, and what to do.

    Example:  [cyan]heapline journal verify data --topic jobs[/cyan]
    """
    places = find_topics(path, topic)
    results = _with_progress(places, "checking", lambda disk, place, running: _settled(disk, places, place, replay))
    catalog = [Finding(places.catalog_path, 0, places.catalog_damage, CATALOG_ADVICE)] if places.catalog_damage else []
    damaged = bool(catalog) or any(found.findings for found in results)
    if as_json:
        for finding in catalog:
            print_json(catalog_dict(finding))
        for found in results:
            print_json(verdict_dict(found))
    else:
        show_verdict(make_console(), places, catalog, results)
    if damaged:
        raise typer.Exit(1)


def _settled(disk: Disk, places: Places, place: Place, replay: bool) -> Examined:
    """Examine; once more if an engine opened the directory meanwhile and so changed what was being looked at."""
    running = is_open(places)
    found = examine(disk, place, running=running, replay=replay)
    if found.findings and not running and is_open(places):
        found = examine(disk, place, running=True, replay=replay)
    return found


@app.command("stats")
def stats_command(path: PathArgument, topic: TopicOption = None, as_json: JsonOption = False) -> None:
    """What the journals hold: segments, bytes, how much of it is live, events by kind, times, snapshots.

    Example:  [cyan]heapline journal stats data --json[/cyan]
    """
    places = find_topics(path, topic)
    _refuse_bad_catalog(places)
    results = _with_progress(places, "reading", lambda disk, place, running: figures(disk, place, running=running))
    console = make_console()
    for found in results:
        if as_json:
            print_json(figures_dict(found))
        else:
            show_figures(console, found)


@app.command("dump")
def dump_command(
    path: PathArgument, topic: TopicOption = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    start: Annotated[int, typer.Option(min=0, help="First offset.")] = 0,
    end: Annotated[int | None, typer.Option(min=0, help="Offset to stop before.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many rows.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind; may be given again.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
    payloads: Annotated[bool, typer.Option("--payloads", help="Payloads too, as base64.")] = False,
) -> None:  # fmt: skip
    """What happened, one message in one event a line: partition:offset, time, kind, message.

    Example:  [cyan]heapline journal dump data --topic jobs --kind enqueued --limit 20[/cyan]
    """
    unknown = set(kind or ()) - set(KIND_NAMES.values())
    if unknown:
        raise BadRequest(f"there is no kind {some(sorted(unknown))}; there are {', '.join(KIND_NAMES.values())}")
    places = find_topics(path, topic)
    _refuse_bad_catalog(places)
    if len(places.topics) != 1:
        names = some([place.topic for place in places.topics], 20) or "no topics"
        raise BadRequest(f"choose one topic with --topic; this directory holds {names}")
    found = rows(
        RealDisk(), places.topics[0], running=is_open(places), partition=partition, start=start, end=end,
        kinds=frozenset(kind or ()), payloads=payloads,
    )  # fmt: skip
    write, shape = sys.stdout.write, as_json if json_lines else as_line
    try:
        for row in islice(found, limit):
            write(shape(row) + "\n")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe (head, less) had enough


@app.command("repair")
def repair_command(
    path: PathArgument, topic: TopicOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:  # fmt: skip
    """Cut a damaged journal at its first damaged unit, so that the topic can be served again.

    Says first what that loses, and asks. What is cut is copied to damaged/ in the topic's folder before. A journal
    that can be opened is never cut. Exit code 1 if a topic stays damaged.

    Example:  [cyan]heapline journal repair data --topic jobs[/cyan]
    """
    places = find_topics(path, topic)
    console, disk = make_console(), RealDisk()
    lock = disk.lock(places.lock_path)
    try:
        _refuse_bad_catalog(places)
        results = [_repair_one(console, disk, place, yes) for place in places.topics]
    finally:
        lock.release()
    if not all(results):
        raise typer.Exit(1)


def _repair_one(console: Console, disk: Disk, place: Place, yes: bool) -> bool:
    """Whether the topic is in order afterwards."""
    plan = plan_repair(disk, place)
    console.print(f"[bold]{escape(place.topic)}[/bold]")
    if plan.report.ok:
        console.print("  [green]in order, nothing to repair[/green]")
        return True
    for damage in plan.report.damage[:10]:
        console.print(f"  [red]{escape(damage.path)} at byte {damage.offset}: {escape(damage.detail)}[/red]")
    if plan.refusal:
        console.print(f"  [yellow]nothing was cut: {escape(plan.refusal)}[/yellow]")
        return False
    show_plan(console, plan)
    if not yes and not typer.confirm("  Cut the journal there?"):
        console.print("  nothing was changed")
        return False
    report = repair(disk, place.folder)
    if not report.repaired:
        console.print(f"  [red]nothing was cut: {escape(report.refused)}[/red]")
        return False
    console.print(f"  [green]cut from unit {report.cut_from_unit} on[/green]; what was there lies in:")
    for kept in report.set_aside:
        console.print(f"    {escape(kept)}")
    after = examine(disk, place, running=False)
    for finding in after.findings:
        console.print(f"  [red]{escape(finding.path)} at byte {finding.offset}: {escape(finding.detail)}[/red]")
    return not after.findings


def _refuse_bad_catalog(places: Places) -> None:
    if places.catalog_damage and not places.topics:
        raise BadRequest(places.catalog_damage)


def _with_progress(places: Places, verb: str, look: Callable[[Disk, Place, bool], T]) -> list[T]:
    """Look at each topic, with a bar over all their bytes if there is somebody to see it."""
    disk = RealDisk()
    total = sum(sum(segment_sizes(disk, place.folder).values()) for place in places.topics)
    running = is_open(places)
    results = []
    with progress_bar(make_console(stderr=True), unit="bytes") as bar:
        task = bar.add_task(verb, total=total)
        for place in places.topics:
            bar.update(task, description=f"{verb} {place.topic}")
            results.append(look(counting(disk, lambda n: bar.advance(task, n)), place, running))
    return results
