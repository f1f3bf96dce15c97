"""`heapline journal verify|repair|dump|stats PATH`: check, inspect and repair the files of a data directory.

Verify, dump and stats may run beside an engine that has the directory open. Repair takes the directory's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from msgspec import Meta
from rich.console import Console
from rich.markup import escape

from heapline.cli.journal.check import (
    CATALOG_ADVICE,
    Finding,
    Verdict,
    plan_repair,
    show_verdicts,
    verdict_json,
    verify_topic,
)
from heapline.cli.journal.contents import Selection, row_line, rows, show_stats, stats_json, topic_stats
from heapline.cli.journal.topic_files import CountingDisk, DataDirectory, TopicFiles, find_topics, segment_sizes
from heapline.cli.main import CommandGroup
from heapline.cli.options import JsonOption, YesOption, takes
from heapline.cli.output import json_line, make_console, print_json, progress_bar, some
from heapline.contract.errors import BadRequest
from heapline.journal import Disk, RealDisk
from heapline.journal.verify import repair

T = TypeVar("T")
PathArgument = Annotated[
    Path, typer.Argument(help="Data directory (all its topics), or the directory of one topic.", show_default=False)
]
TopicOption = Annotated[str | None, "--topic -t", "Only this topic."]

app = CommandGroup(
    "journal",
    example="journal verify data",
    more="All commands except [bold]repair[/bold] only read, and may run while a server uses the directory.",
)


@app.command("verify", example="data --topic jobs")
def verify_command(
    path: PathArgument,
    topic: TopicOption = None,
    as_json: JsonOption = False,
    replay: Annotated[
        bool, "--replay/--no-replay", "Also rebuild each topic in memory, as opening it would do."
    ] = True,
) -> None:
    """Check every segment, unit, record, snapshot, index and watermark, and the catalog.

    Exit code 1 if there is damage. Each finding names the file and the byte, and says what to do.
    """
    directory = find_topics(path, topic)
    verdicts = _with_progress(directory, "checking", lambda disk, files, _: _verify(disk, directory, files, replay))
    catalog: list[Finding] = []
    if directory.catalog_damage:
        catalog.append(Finding(directory.catalog_path, 0, directory.catalog_damage, CATALOG_ADVICE))
    if as_json:
        for finding in catalog:
            print_json({"topic": None, "ok": False, "findings": [finding]})
        for verdict in verdicts:
            print_json(verdict_json(verdict))
    else:
        show_verdicts(make_console(), directory, catalog, verdicts)
    if catalog or any(verdict.findings for verdict in verdicts):
        raise typer.Exit(1)


def _verify(disk: Disk, directory: DataDirectory, files: TopicFiles, replay: bool) -> Verdict:
    """Verify a topic. Verify it again if an engine opened the directory meanwhile and so changed the files."""
    running = directory.is_open()
    verdict = verify_topic(disk, files, running=running, replay=replay)
    if verdict.findings and not running and directory.is_open():
        verdict = verify_topic(disk, files, running=True, replay=replay)
    return verdict


@app.command("stats", example="data --json")
def stats_command(path: PathArgument, topic: TopicOption = None, as_json: JsonOption = False) -> None:
    """Show what the journals contain: segments, bytes, live share, events by kind, times, snapshots."""
    directory = find_topics(path, topic)
    _check_catalog(directory)
    console = make_console()
    for stats in _with_progress(directory, "reading", lambda disk, files, run: topic_stats(disk, files, running=run)):
        if as_json:
            print_json(stats_json(stats))
        else:
            show_stats(console, stats)


@app.command("dump", example="data --topic jobs --kind enqueued --limit 20")
@takes(selection=Selection)
def dump_command(
    selection: Selection,
    path: PathArgument,
    topic: TopicOption = None,
    limit: Annotated[int | None, "Maximum number of rows.", Meta(ge=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the events of a journal, one line per message and event: partition:offset, time, kind, message."""
    directory = find_topics(path, topic)
    _check_catalog(directory)
    if len(directory.topics) != 1:
        names = some([files.topic for files in directory.topics], 20) or "no topics"
        raise BadRequest(f"choose one topic with --topic; this directory contains {names}")
    chosen = rows(RealDisk(), directory.topics[0], selection, running=directory.is_open())
    write, line = sys.stdout.write, json_line if as_json else row_line
    try:
        for row in islice(chosen, limit):
            write(line(row) + "\n")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the pipe, such as head, has ended


@app.command("repair", example="data --topic jobs")
def repair_command(path: PathArgument, topic: TopicOption = None, yes: YesOption = False) -> None:
    """Cut a damaged journal at its first damaged unit, so that the topic can be served again.

    Shows first what would be lost, and asks. The cut part is copied to damaged/ in the topic's directory. A journal
    that can be opened is never cut. Exit code 1 if a topic stays damaged.
    """
    directory = find_topics(path, topic)
    console, disk = make_console(), RealDisk()
    lock = disk.lock(directory.lock_path)
    try:
        _check_catalog(directory)
        results = [_repair(console, disk, files, yes) for files in directory.topics]
    finally:
        lock.release()
    if not all(results):
        raise typer.Exit(1)


def _repair(console: Console, disk: Disk, files: TopicFiles, yes: bool) -> bool:
    """Return whether the topic is undamaged afterwards."""
    plan = plan_repair(disk, files)
    console.print(f"[bold]{escape(files.topic)}[/bold]")
    if plan.report.ok:
        console.print("  [green]no damage, nothing to repair[/green]")
        return True
    for damage in plan.report.damage[:10]:
        console.print(f"  [red]{escape(damage.path)} at byte {damage.offset}: {escape(damage.detail)}[/red]")
    if plan.refusal:
        console.print(f"  [yellow]nothing was cut: {escape(plan.refusal)}[/yellow]")
        return False
    console.print(plan.table())
    if not yes and not typer.confirm("  Cut the journal there?"):
        console.print("  nothing was changed")
        return False
    report = repair(disk, files.folder)
    if not report.repaired:
        console.print(f"  [red]nothing was cut: {escape(report.refused)}[/red]")
        return False
    console.print(f"  [green]cut from unit {report.cut_from_unit} on[/green]; the cut part is in:")
    for kept in report.set_aside:
        console.print(f"    {escape(kept)}")
    after = verify_topic(disk, files, running=False)
    for finding in after.findings:
        console.print(f"  [red]{escape(str(finding))}[/red]")
    return not after.findings


def _check_catalog(directory: DataDirectory) -> None:
    if directory.catalog_damage and not directory.topics:
        raise BadRequest(directory.catalog_damage)


def _with_progress(directory: DataDirectory, verb: str, read: Callable[[Disk, TopicFiles, bool], T]) -> list[T]:
    """Read each topic, with a progress bar over the bytes of all topics."""
    disk = RealDisk()
    total = sum(sum(segment_sizes(disk, files.folder).values()) for files in directory.topics)
    running = directory.is_open()
    results = []
    with progress_bar(make_console(stderr=True), unit="bytes") as bar:
        task = bar.add_task(verb, total=total)
        counting = CountingDisk(lambda nbytes: bar.advance(task, nbytes))
        for files in directory.topics:
            bar.update(task, description=f"{verb} {files.topic}")
            results.append(read(counting, files, running))
    return results
