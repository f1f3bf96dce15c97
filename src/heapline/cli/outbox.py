"""`heapline outbox`: the relay of an outbox on SQLAlchemy, its tables, what waits in them, and what was refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from heapline.errors import BadRequest

T = TypeVar("T")
REFUSED_SHOWN = 20
HELP = """Messages written in a database transaction, and the relay that brings them to the broker.

Example:  [cyan]heapline outbox relay --database postgresql+psycopg://app@db/app --to queue:7400[/cyan]
"""
app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=HELP)

Database = Annotated[
    str,
    typer.Option(
        envvar="HEAPLINE_OUTBOX_DATABASE",
        show_envvar=True,
        help="A SQLAlchemy URL: postgresql+psycopg://…, sqlite:///…",
    ),
]


@app.command()
def relay(
    database: Database,
    to: Annotated[str | None, typer.Option(help="The server, host:port; or HEAPLINE_URL, or localhost:7400.")] = None,
    data: Annotated[Path | None, typer.Option(help="A data directory of this machine, instead of a server.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file with the API key; or HEAPLINE_API_KEY_FILE.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Relay what is there now, and end.")] = False,
    poll: Annotated[float, typer.Option(help="Seconds between looks at an empty outbox.")] = 0.5,
    batch_rows: Annotated[int, typer.Option(help="Rows that are brought at a time.")] = 200,
) -> None:
    """Bring messages of committed transactions to the broker, each exactly once.

    Example:  [cyan]heapline outbox relay --database postgresql+psycopg://app@db/app --to queue:7400[/cyan]

    Several may run. Stops on SIGTERM or Ctrl-C; [bold]kill -9[/bold] is safe too.
    """
    _need_sqlalchemy()
    from heapline.client.outbox.serving import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with _database_errors():
        relayed = asyncio.run(
            serve(database, to=to, data=data, key_file=key_file, once=once, poll=poll, batch_rows=batch_rows)
        )
    typer.echo(f"{relayed} messages relayed")


@app.command()
def init(database: Database) -> None:
    """Make the outbox's two tables, where they are not there yet."""
    _need_sqlalchemy()
    from heapline.client.outbox import create_tables

    _transact(database, create_tables)
    typer.echo("tables heapline_outbox and heapline_outbox_lane are there")


@app.command()
def status(database: Database) -> None:
    """How many rows wait, are under way, or were refused, and why."""
    _need_sqlalchemy()
    from heapline.client.outbox.sql import counts, refused

    def look(connection: Any) -> tuple[list[tuple[str, int]], list[tuple[int, str, str]]]:
        return counts(connection), refused(connection, REFUSED_SHOWN)

    states, rows = _transact(database, look)
    for name, count in states:
        typer.echo(f"{name}: {count}")
    for id, topic, error in rows:
        typer.echo(f"row {id} for {topic}: {error}")
    if not states:
        typer.echo("nothing waits")


@app.command()
def retry(
    database: Database,
    rows: Annotated[list[int] | None, typer.Argument(help="Ids of refused rows, as status shows them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All refused rows, but those that may be in already.")] = False,
    topic: Annotated[str | None, typer.Option(help="Only rows for this topic.")] = None,
) -> None:
    """Let rows be sent again that the broker has refused, once the reason is mended.

    Example:  [cyan]heapline outbox retry --database sqlite:///shop.db --all --topic bills[/cyan]

    A row of which nobody knows whether it was enqueued is sent again only if it is named: look for it first.
    """
    _need_sqlalchemy()
    if bool(rows) == every:
        raise BadRequest("say which rows: their ids, as `heapline outbox status` shows them, or --all")
    from heapline.client.outbox.sql import retry_refused

    count = _transact(database, lambda connection: retry_refused(connection, rows or (), topic))
    typer.echo(f"{count} rows will be sent again")


def _transact(database: str, work: Callable[[Any], T]) -> T:
    """On the database of any URL that the relay takes too, also that of an async driver."""

    async def transact() -> T:
        from heapline.client.outbox.sql import SqlStore

        store = SqlStore(database)
        try:
            return await store.run(work)
        finally:
            await store.close()

    with _database_errors():
        return asyncio.run(transact())


@contextmanager
def _database_errors() -> Iterator[None]:
    """What goes wrong with a database is told by its kind alone: its own text may hold the URL, or a row."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ModuleNotFoundError as error:
        raise BadRequest(f"the driver of that database is not installed: pip install {error.name}") from error
    except SQLAlchemyError as error:
        raise BadRequest(
            f"the database cannot be used ({type(error).__name__}): check --database, and that its tables are there "
            "(heapline outbox init)"
        ) from error


def _need_sqlalchemy() -> None:
    if find_spec("sqlalchemy") is None:
        raise BadRequest("the outbox needs SQLAlchemy: pip install 'heapline[outbox]'")
