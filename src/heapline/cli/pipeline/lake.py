"""`heapline pipeline archive|lake|lifecycles|forget`: jobs that write to a lake."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from rich.markup import escape

from heapline.cli.main import CommandGroup
from heapline.cli.options import Directory, JsonOption, Seconds, Value, YesOption, span
from heapline.cli.output import (
    Output,
    columns_table,
    confirm,
    count,
    counted,
    facts_table,
    make_console,
    progress_bar,
    seconds,
    size,
)
from heapline.cli.pipeline.job import ArchiveOption, TopicOption, TopicsOption, cell, spark_job
from heapline.contract.errors import BadRequest

DAY = 86400.0  # seconds
LIFECYCLE_COLUMNS = ("message_id", "priority", "enqueued_at", "wait_ms", "service_ms", "attempts", "outcome", "reason")
LakeOption = Annotated[Directory, "--lake", "Directory of the lake."]


# -- archive -----------------------------------------------------------------------------------------------------------


def _check_group(group: str | None, no_group: bool, **_: Any) -> None:
    if no_group and group is not None:
        raise BadRequest("--group and --no-group exclude each other; omit one")


@spark_job(example="--topic orders --lake lake", first=_check_group)
def archive(
    spark: Any,
    where: dict[str, str],
    out: Output,
    lake: Annotated[Directory, "Directory of the lake, created if needed; executors must see it too."],
    topic: TopicsOption = None,
    pattern: Annotated[
        str | None, "All topics whose names match, including new ones, instead of --topic.", Value("REGEX")
    ] = None,
    view: Annotated[list[str] | None, "Only messages, or only events. Default: all that exists.", Value("VIEW")] = None,
    follow: Annotated[bool, "Continue with new rows until Ctrl-C."] = False,
    every: Annotated[float, "Seconds between two commits, with --follow.", Value("SECONDS")] = 10.0,
    group: Annotated[str | None, "Consumer group that holds the journal on a server.", Value("NAME")] = None,
    no_group: Annotated[bool, "Do not hold the journal: rows that are reclaimed meanwhile are lost."] = False,
    accept_loss: Annotated[bool, "Continue after rows that the journal no longer has."] = False,
    metrics_port: Annotated[
        int | None, "Serve progress to Prometheus on this port.", Meta(ge=0, le=65535), Value("PORT")
    ] = None,
) -> None:
    """Copy new rows of topics into a lake, each row once. You can repeat it after any failure."""
    from heapline.spark.jobs.archive import GROUP, Progress
    from heapline.spark.jobs.archive import archive as run

    readings = None
    if metrics_port is not None:
        from heapline.spark.metrics import watch

        readings = watch(spark, metrics_port).readings
    with progress_bar(make_console(stderr=True)) as bar:
        task = bar.add_task("rows of the log", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total)
            if readings is not None:
                readings.round_done("archive", progress.done, progress.total)

        result = run(
            spark,
            where,
            topic or None,
            lake,
            pattern=pattern,
            views=view or None,
            available_now=not follow,
            trigger=every,
            group=None if no_group else group or GROUP,
            fail_on_loss=not accept_loss,
            on_progress=show,
            until=_interrupted() if follow else lambda: False,
        )
    rows = [(t.topic, t.view, count(t.rows), count(t.files), size(t.nbytes), _ends(t)) for t in result.tables]
    title = f"archived in {seconds(result.seconds)}, {result.commits} commits"
    names = ("topic", "view", "rows", "files", "size", "the lake ends at")
    out.row(dataclasses.asdict(result), columns_table(title, names, rows, right=(2, 3, 4)))
    if result.group is None and not no_group:
        out.note("No group holds the log: until the next run, only the topic's retention keeps its rows.")


def _interrupted() -> Any:
    """Return a function that returns whether Ctrl-C was pressed. A run then ends between two rounds."""
    is_interrupted = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends it immediately

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    return lambda: is_interrupted


def _ends(table: Any) -> str:
    return ", ".join(f"{partition}:{end}" for partition, end in table.ends.items())


# -- lake --------------------------------------------------------------------------------------------------------------

lake_app = CommandGroup(
    "pipeline lake", example="pipeline lake show --lake lake", help="Inspect and maintain a lake. Needs no Spark."
)


@lake_app.command(example="--lake lake")
def show(lake: LakeOption, as_json: JsonOption = False) -> None:
    """Show the rows, files and days of each topic in a lake, and the offsets it has reached."""
    from heapline.spark.lake.maintenance import contents

    topics = _with_packages(contents, lake)
    rows = [(t.topic, t.view, count(t.rows), count(t.files), size(t.nbytes), _days(t), _ends(t)) for t in topics]
    names = ("topic", "view", "rows", "files", "size", "days", "ends at")
    Output(as_json).row(topics, columns_table(f"lake {lake}", names, rows, right=(2, 3, 4)))


def _days(table: Any) -> str:
    several = f"{table.first_day} to {table.last_day}, {table.days} days"
    return several if table.days > 1 else table.first_day or "none"


@lake_app.command(example="--lake lake --keep 400d")
def maintain(
    lake: LakeOption,
    keep: Annotated[Seconds | None, "Drop days older than this, such as 400d. Default: keep all days."] = None,
    no_compact: Annotated[bool, "Do not join small files."] = False,
    vacuum: Annotated[
        Seconds,
        "Delete files that are in no commit when they are this old. Must be longer than any query or archive runs, "
        "because those use such files.",
    ] = 7 * DAY,
    as_json: JsonOption = False,
) -> None:
    """Join small files, drop old days, and delete unused files. May run beside an archive."""
    from heapline.spark.lake.maintenance import maintain as run

    if keep is not None and keep < DAY:
        raise BadRequest("--keep must be a day or more, because whole days are dropped; use a form such as 400d")
    keep_days, vacuum_hours = None if keep is None else int(keep // DAY), int(vacuum // 3600)
    with make_console(stderr=True).status("maintaining the lake …"):
        done = _with_packages(run, lake, keep_days=keep_days, compact=not no_compact, vacuum_hours=vacuum_hours)
    names = ("view", "files before", "files now", "rows dropped", "files removed")
    rows = [
        (d.view, count(d.files_before), count(d.files), count(d.rows_dropped), count(d.files_removed)) for d in done
    ]
    Output(as_json).row(done, columns_table(f"lake {lake}", names, rows, right=(1, 2, 3, 4)))


@lake_app.command(example="--lake lake --topic orders --yes")
def drop(lake: LakeOption, topic: TopicOption, yes: YesOption = False) -> None:
    """Remove a topic from a lake, so that it can be archived again after it was recreated or restored. Asks first."""
    from heapline.spark.lake.maintenance import drop as run

    confirm(f"Remove all rows of topic {topic!r} from the lake {lake}?", yes)
    rows = _with_packages(run, lake, topic)
    make_console().print(f"{counted(rows, 'row')} removed from the lake")


def _with_packages(act: Any, *args: Any, **more: Any) -> Any:
    try:
        return act(*args, **more)
    except ImportError as error:
        raise BadRequest(str(error)) from None


# -- lifecycles --------------------------------------------------------------------------------------------------------


def _check_target(out_dir: Path | None, show: int | None, **_: Any) -> None:
    if out_dir is None and show is None:
        raise BadRequest("no output chosen; use --out DIR to store them in a table, or --show N to print some")


@spark_job(example="--path data --topic jobs --out lifecycles", first=_check_target)
def lifecycles(
    spark: Any,
    where: dict[str, str],
    out: Output,
    topic: TopicOption,
    out_dir: Annotated[Directory | None, "--out", "Store the rows in this Delta table, updated to now."] = None,
    show: Annotated[int | None, "Print this many rows, newest first.", Meta(ge=1), Value("N")] = None,
    lake: ArchiveOption = None,
) -> None:
    """Show or store what happened to each message, one row per message: times, attempts and outcome."""
    from heapline.spark.jobs.lake import topic_rows
    from heapline.spark.jobs.lifecycle_updates import keep_lifecycles, read_lifecycles
    from heapline.spark.jobs.lifecycles import NEEDS
    from heapline.spark.jobs.lifecycles import lifecycles as lifecycles_of

    archive_dir = None if lake is None else str(lake)
    with make_console(stderr=True).status("reading the log …"):
        if out_dir is not None:
            stored = keep_lifecycles(spark, where, topic, str(out_dir), lake=archive_dir)
            rows = read_lifecycles(spark, str(out_dir), topic=topic)
        else:
            stored = None
            rows = lifecycles_of(topic_rows(spark, where, archive_dir, topic, columns=NEEDS))
        by_outcome = {row["outcome"]: row["count"] for row in rows.groupBy("outcome").count().collect()}
        newest = rows.orderBy("id", ascending=False).limit(show).select(*LIFECYCLE_COLUMNS).collect() if show else []
    facts = [(outcome, count(number)) for outcome, number in sorted(by_outcome.items())]
    if stored is not None:
        facts += [("new events", count(stored.events)), ("rows written", count(stored.rows))]
    tables = [facts_table(f"messages of {escape(topic)}", facts)]
    if newest:
        cells = [[cell(value) or "–" for value in row] for row in newest]
        title = f"newest messages of {escape(topic)}"
        tables.insert(0, columns_table(title, LIFECYCLE_COLUMNS, cells, right=(1, 3, 4, 5)))
    fields = {"outcomes": by_outcome, "rows": [row.asDict() for row in newest]}
    out.row(fields if stored is None else {**dataclasses.asdict(stored), **fields}, *tables)


# -- forget ------------------------------------------------------------------------------------------------------------


def _confirm_forget(lake: Path | None, lake_only: bool, yes: bool, **_: Any) -> None:
    if lake_only and lake is None:
        raise BadRequest("--lake-only needs --lake DIR")
    confirm("Erase all messages of this key? They cannot be restored.", yes)


@spark_job(example="--key customer-17 --lake lake", first=_confirm_forget, writes=True)
def forget(
    spark: Any,
    where: dict[str, str],
    out: Output,
    key: Annotated[str, "Partition key of the messages.", Value("KEY")],
    topic: TopicsOption = None,
    lake: Annotated[Directory | None, "Erase from this archive too, before the queue."] = None,
    lake_only: Annotated[bool, "Do not change queue and journal."] = False,
    yes: YesOption = False,
) -> None:
    """Erase the payloads of a key from lake and queue: rows, waiting messages and dead letters. Asks first.

    The journal is never overwritten: payloads in it are deleted when their segments are reclaimed. The command lists
    those segments; run it again to see what is left. Backups and copies of messages elsewhere are not searched.
    """
    from heapline.spark.jobs.forget import forget as job

    with make_console(stderr=True).status("searching …"):
        result = job(spark, None if lake_only else where, key, topics=topic, lake=lake)
    shown: list[Any] = []
    if result.lake is not None:
        erased = f"{count(result.lake.rows)} rows erased, {count(result.lake.files)} files removed"
        shown.append(facts_table("", [("lake", erased)]))
    for t in result.topics:
        if t.cancelled or t.dead_deleted or t.leased or t.payloads_left or topic:
            shown.append(facts_table(escape(t.topic), _forget_facts(t)))
    if result.is_erased:
        shown.append("no message of the key is left")
    out.row({**dataclasses.asdict(result), "is_erased": result.is_erased}, *shown)


def _forget_facts(topic: Any) -> list[tuple[str, str]]:
    facts = [("cancelled", count(topic.cancelled)), ("dead letters deleted", count(topic.dead_deleted))]
    if topic.leased:
        facts.append(("leased", f"{count(topic.leased)}; run the command again when the workers have finished"))
    if topic.payloads_left and topic.segments is not None:
        first, last = topic.segments
        segments = f"segment {first}" if first == last else f"segments {first} to {last}"
        facts.append(("left in the journal", f"{count(topic.payloads_left)} payloads, in {segments}"))
        facts.append(("newest of them", topic.newest.isoformat(timespec="seconds")))
        conditions = (
            "when these segments are reclaimed: each is full, no message in it or before it is waiting, every group "
            f"has read it, and the topic's retention ({span(topic.retention)}) is over"
        )
        facts.append(("deleted", conditions))
    return facts
