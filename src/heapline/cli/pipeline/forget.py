"""`heapline pipeline forget`: erase a key's payloads, and say where some still lie."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.asking import YesOption, ask
from heapline.cli.messages import print_json
from heapline.cli.pipeline.sharing import spark_job
from heapline.cli.present import count, facts_table, make_console
from heapline.cli.units import span
from heapline.errors import BadRequest


def _ask(lake: Path | None, lake_only: bool, yes: bool, **_: Any) -> None:
    if lake_only and lake is None:
        raise BadRequest("--lake-only goes with --lake")
    ask("Erase all messages of this key? They cannot be brought back.", yes)


@spark_job(first=_ask, writes=True)
def forget(
    spark: Any,
    where: dict[str, str],
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Whose messages.")],
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only there; may be repeated. Else: all.")
    ] = None,
    lake: Annotated[
        Path | None, typer.Option("--lake", metavar="DIR", help="Also, and first, from the archive there.")
    ] = None,
    lake_only: Annotated[bool, typer.Option("--lake-only", help="Leave queue and journal as they are.")] = False,
    yes: YesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:  # fmt: skip
    """Erase the payloads of a key: rows of the lake, messages that wait, dead letters. Asks first.

    The journal is never overwritten: what lies in it goes when its segments are reclaimed. This says which those are;
    run it again to see what is left. Backups, and topics and files that somebody copied messages to, are not searched.

    Example:  [cyan]heapline pipeline forget --key customer-17 --lake lake[/cyan]
    """
    from heapline.spark.jobs.forget import forget as job

    with make_console(stderr=True).status("looking for them …"):
        result = job(spark, None if lake_only else where, key, topics=topic, lake=lake)
    if as_json:
        print_json({**dataclasses.asdict(result), "is_erased": result.is_erased})
        return
    console = make_console()
    if result.lake is not None:
        told = f"{count(result.lake.rows)} rows erased, {count(result.lake.files)} files removed"
        console.print(facts_table("", [("lake", told)]))
    for found in result.topics:
        if found.cancelled or found.dead_deleted or found.leased or found.payloads_left or topic:
            console.print(facts_table(escape(found.topic), _facts(found)))
    if result.is_erased:
        console.print("nothing of it is left that was looked for")


def _facts(found: Any) -> list[tuple[str, str]]:
    rows = [("cancelled", count(found.cancelled)), ("dead letters deleted", count(found.dead_deleted))]
    if found.leased:
        rows.append(("workers have", f"{count(found.leased)}: run this again when they are done with them"))
    if found.payloads_left and found.segments is not None:
        first, last = found.segments
        lie = f"in segment {first}" if first == last else f"in segments {first} to {last}"
        rows.append(("left in the journal", f"{count(found.payloads_left)} payloads, {lie}"))
        rows.append(("written last", found.newest.isoformat(timespec="seconds")))
        rows.append((
            "they go", "when these segments are reclaimed: each is full, nothing in it or before it waits, no group "
            f"has yet to read it, and the topic's retention ({span(found.retention)}) is over",
        ))  # fmt: skip
    return rows
