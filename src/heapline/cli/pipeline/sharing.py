"""What the commands of all jobs share: where the queue is, which Spark runs the job, and how its end is told.

`spark_job` makes a command of a function that takes a session and the options of a read: it adds --path, --to,
--key-file, --ca and --master, looks whether the queue is there (looking.py), starts Spark and runs the function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.messages import harmless
from heapline.cli.pipeline import looking
from heapline.cli.pipeline.failing import WHOLE
from heapline.cli.present import make_console
from heapline.client import connecting
from heapline.errors import BadRequest

PANEL = "Where"
LOG_LEVEL = "HEAPLINE_SPARK_LOG"  # as spark/quiet/log4j2.properties calls it
Job = Callable[..., None]

PathOption = Annotated[
    Path | None, typer.Option(
        "--path", metavar="DIR", rich_help_panel=PANEL,
        help="A data directory, read as it lies there, also beside a server that runs on it. Without it: the server.",
    ),
]  # fmt: skip
ToOption = Annotated[
    str | None, typer.Option(
        "--to", metavar="HOST:PORT", envvar=connecting.URL, rich_help_panel=PANEL,
        help="The server; heaplines://host:port over TLS.",
    ),
]  # fmt: skip
KeyFileOption = Annotated[
    Path | None, typer.Option(
        "--key-file", metavar="FILE", envvar=connecting.KEY_FILE, rich_help_panel=PANEL,
        help="A file with the API key. Without one, and for a server on this machine, its admin.key.",
    ),
]  # fmt: skip
CaOption = Annotated[
    Path | None, typer.Option(
        "--ca", metavar="FILE", envvar=connecting.CA_FILE, rich_help_panel=PANEL,
        help="Speak TLS, and trust the authorities in this PEM file.",
    ),
]  # fmt: skip
MasterOption = Annotated[
    str | None, typer.Option(
        "--master", metavar="URL", rich_help_panel=PANEL,
        help="Which Spark runs the job: local[2] is this machine, spark://host:7077 a cluster.",
    ),
]  # fmt: skip
TopicOption = Annotated[str, typer.Option("--topic", metavar="TOPIC", help="Name, or namespace/name.")]
MetricsPortOption = Annotated[
    int | None, typer.Option(
        "--metrics-port", metavar="PORT", min=0, max=65535,
        help="Tell Prometheus how far it is, on this port of this machine.",
    ),
]  # fmt: skip
_OPTIONS: dict[str, Any] = {
    "path": PathOption, "to": ToOption, "key_file": KeyFileOption, "ca": CaOption, "master": MasterOption,
}  # fmt: skip


def where_options(path: Path | None, to: str | None, key_file: Path | None) -> dict[str, str]:
    """As options of the format `heapline`, for reads; writes take the same but `path`."""
    if path is not None:
        if not path.is_dir():
            raise BadRequest(f"--path {str(path)!r} is no directory")
        return {"path": str(path)}
    found = {"heapline.url": to or connecting.TARGET}
    if key_file is not None:
        found["heapline.api_key_file"] = str(key_file.resolve())
    return found


#: Options of jobs that name directories, which are there or are made.
_FOLDERS = ("lake", "out", "opening", "folder", "bad_records", "from_path")


def _check_folders(given: dict[str, Any]) -> None:
    for name in _FOLDERS:
        value = given.get(name)
        if value is not None and os.path.isfile(value):
            raise BadRequest(f"--{name.replace('_', '-')} {str(value)!r} is a file, and no directory")


def spark_job(*, first: Callable[..., None] | None = None, writes: bool = False) -> Callable[[Job], Job]:
    """`@spark_job() def audit(spark, where, topic: …)` becomes a command; `where` is a dict of options of the format
    `heapline`.

    `first` gets the job's own options before anything else is done, to refuse them or to ask. A job that `writes` works
    with a server, and has no --path.
    """
    return functools.partial(_command_of, first=first, writes=writes)


def _command_of(job: Job, first: Callable[..., None] | None, writes: bool) -> Job:
    signature = inspect.signature(job, eval_str=True)
    own = list(signature.parameters.values())[2:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
        if not (writes and name == "path")
    ]

    @functools.wraps(job)
    def run(**given: Any) -> None:
        path, to, key_file, ca, master = (given.pop(name, None) for name in _OPTIONS)
        where = where_options(path, to, key_file)
        _check_folders(given)
        if first is not None:
            first(**given)
        if ca is not None:
            os.environ[connecting.CA_FILE] = str(ca.resolve())  # where Spark's side looks for it
        lake_only = given.get("lake_only", False)
        if not lake_only:
            looking.look(path, to or connecting.TARGET, key_file, ca, looking.needed_topics(given))
        # What writes to a server writes to a lake without Spark.
        job(None if lake_only and writes else _session(master), where, **given)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + added
    run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def cell(value: Any) -> str:
    """Of a row that Spark gave, for a table: what came with messages is text, never markup.

    >>> cell("[red]"), cell(None), cell(3)
    ('\\\\[red]', '', '3')
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds")  # Spark gives it in local time
    return "" if value is None else escape(harmless(str(value)).plain)


def _session(master: str | None) -> Any:
    """Spark ends with this process."""
    from heapline.spark import session
    from heapline.spark.java import NoJava

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with make_console(stderr=True).status("starting Spark …"), _quiet_java():
        try:
            return session(master=master, app="heapline pipeline")
        except ModuleNotFoundError:
            raise  # which package is missing is told by failing.py
        except (ImportError, NoJava) as error:
            raise BadRequest(str(error)) from None


@contextlib.contextmanager
def _quiet_java() -> Iterator[None]:
    """For a Java that is started within: what Spark would log as an error comes here too, and is told in a line."""
    if os.environ.get(WHOLE) or LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "fatal"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]
