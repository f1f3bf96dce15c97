"""`heapline outbox`: the relay of an outbox on SQLAlchemy, its tables, and its waiting and refused rows."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from sqlalchemy.exc import SQLAlchemyError

from heapline.cli.connection import SERVER, TO_HELP, Address, CaOption, KeyFileOption
from heapline.cli.main import CommandGroup
from heapline.cli.options import Env, JsonOption
from heapline.cli.output import Output, counted, harmless
from heapline.client import connect
from heapline.contract.errors import BadRequest
from heapline.outbox import create_tables
from heapline.outbox.relay import serve
from heapline.outbox.sql import SqlStore, counts, refused, retry_refused

T = TypeVar("T")
REFUSED_SHOWN = 20

app = CommandGroup("outbox", example="outbox relay --database postgresql+psycopg://app@db/app --to queue:7400")
DatabaseOption = Annotated[
    str, "--database", "SQLAlchemy URL: postgresql+psycopg://…, sqlite:///…", Env("HEAPLINE_OUTBOX_DATABASE")
]


@app.command(example="--database postgresql+psycopg://app@db/app --to queue:7400")
def relay(
    database: DatabaseOption,
    to: Annotated[Address | None, f"{TO_HELP} Default: HEAPLINE_URL, or localhost:7400.", SERVER] = None,
    data: Annotated[Path | None, "Data directory on this machine, instead of a server.", SERVER] = None,
    key_file: KeyFileOption = None,
    ca: CaOption = None,
    once: Annotated[bool, "Relay the rows that are waiting now, and exit."] = False,
    poll: Annotated[float, "Seconds between checks of an empty outbox."] = 0.5,
    batch_rows: Annotated[int, "Rows per call."] = 200,
) -> None:
    """Relay messages of committed transactions to the broker, each exactly once.

    Several relays can run. SIGTERM or Ctrl-C stops one; [bold]kill -9[/bold] is safe too.
    """
    if ca is not None:
        os.environ[connect.CA_FILE] = str(ca)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with _database_errors():
        relayed = asyncio.run(
            serve(database, to=to, data=data, key_file=key_file, once=once, poll=poll, batch_rows=batch_rows)
        )
    typer.echo(f"{counted(relayed, 'message')} relayed")


@app.command(example="--database sqlite:///shop.db")
def init(database: DatabaseOption) -> None:
    """Create the two tables of the outbox, if they do not exist."""
    _transact(database, create_tables)
    typer.echo("tables heapline_outbox and heapline_outbox_lane exist")


@app.command(example="--database sqlite:///shop.db")
def status(database: DatabaseOption, as_json: JsonOption = False) -> None:
    """Show how many rows wait, are in progress, or were refused, and why."""

    def read(connection: Any) -> tuple[list[tuple[str, int]], list[tuple[int, str, str]]]:
        return counts(connection), refused(connection, REFUSED_SHOWN)

    out = Output(as_json)
    states, rows = _transact(database, read)
    for state, number in states:
        out.row({"state": state, "count": number}, f"{state}: {number}")
    for id, topic, error in rows:
        out.row({"row": id, "topic": topic, "error": error}, harmless(f"row {id} for {topic}: {error}"))
    if not (states or as_json):
        typer.echo("no rows are waiting")


@app.command(example="--database sqlite:///shop.db --all --topic bills")
def retry(
    database: DatabaseOption,
    rows: Annotated[list[int] | None, typer.Argument(help="Ids of refused rows, as status shows them.")] = None,
    every: Annotated[bool, "--all", "All refused rows, except those that may have been enqueued."] = False,
    topic: Annotated[str | None, "Only rows for this topic."] = None,
) -> None:
    """Send refused rows again, after you have fixed the reason.

    A row that may have been enqueued is sent again only if you name it. Check the topic first.
    """
    if bool(rows) == every:
        raise BadRequest("select rows by their ids, as `heapline outbox status` shows them, or use --all")
    count = _transact(database, lambda connection: retry_refused(connection, rows or (), topic))
    typer.echo(f"{counted(count, 'row')} will be sent again")


def _transact(database: str, work: Callable[[Any], T]) -> T:
    """Run `work` in a transaction, on any URL that the relay accepts, including those of async drivers."""

    async def transact() -> T:
        store = SqlStore(database)
        try:
            return await store.run(work)
        finally:
            await store.close()

    with _database_errors():
        return asyncio.run(transact())


@contextmanager
def _database_errors() -> Iterator[None]:
    """Report only the class of a database error, because its text may contain the URL or a row."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise BadRequest(f"the driver of this database is not installed; pip install {error.name}") from error
    except SQLAlchemyError as error:
        raise BadRequest(
            f"cannot use the database ({type(error).__name__}); check --database, and create the tables with "
            "heapline outbox init"
        ) from error
