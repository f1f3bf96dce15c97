"""Shared code of the `heapline pipeline` commands: `spark_job`, checks before Spark starts, and Spark's errors.

heapline.spark.jobs contains the jobs, as functions that take a session. `spark_job` turns a function that takes a
session and the options of a read into a command: it adds the options of a connection, --path and --master, checks that
the queue exists before Spark is started, which takes seconds, and starts Spark. Spark's errors contain the stacks of
Java and of its Python workers. They are reduced to one line, unless HEAPLINE_TRACEBACK=1 is set.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape

from heapline.cli import connection
from heapline.cli.main import TRACEBACK
from heapline.cli.options import Directory, Panel, TopicName, Value, compose
from heapline.cli.output import Output, harmless, make_console, not_a_directory, some
from heapline.client import connect
from heapline.contract.broker import Broker
from heapline.contract.config import short
from heapline.contract.errors import BadRequest, HeaplineError

LOG_LEVEL = "HEAPLINE_SPARK_LOG"  # as in spark/quiet/log4j2.properties
#: Options that name directories, which exist or are created.
_FOLDERS = {
    "lake": "--lake", "out_dir": "--out", "opening": "--opening", "folder": "--folder", "bad_records": "--bad-records",
    "from_path": "--from-path",
}  # fmt: skip
#: The last line of a traceback: a class with its module, and its text.
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*): (.+)$", re.MULTILINE)

PATH_HELP = "Read this data directory, even while a server runs on it, instead of calling a server."
MASTER_HELP = "Spark master: local[2] is this machine, spark://host:7077 a cluster."
MasterOption = Annotated[str | None, MASTER_HELP, Panel("Spark"), Value("URL")]
TopicOption = Annotated[TopicName, "--topic", "Topic name, or namespace/name."]
TopicsOption = Annotated[list[TopicName] | None, "--topic", "Topic name, or namespace/name; repeatable."]
ARCHIVE_HELP = "Also read this archive, which has rows that the journal no longer has."
ArchiveOption = Annotated[Directory | None, "--lake", ARCHIVE_HELP]


def spark_job(
    example: str,
    *,
    first: Callable[..., None] | None = None,
    writes: bool = False,
    **parts: Callable[..., dict[str, Any]],
) -> Callable[..., Any]:
    """Turn `def audit(spark, where, out, topic: …)` into a command.

    `where` is a dict of options of the Spark format `heapline`. `first` gets the job's own options before anything
    else happens, to check them or to ask. A job that `writes` uses a server, and has no --path. `parts` are functions
    that return some of the job's options by their names.
    """

    def decorate(job: Callable[..., None]) -> Callable[..., None]:
        def run(out: Output, server: connection.Settings, place: dict[str, Any], **given: Any) -> None:
            path, options = place.get("path"), dict(given)
            for part in parts:
                options |= options.pop(part)
            where = read_options(path, server)
            _check_folders(options)
            if first is not None:
                first(**options)
            if server.ca is not None:
                os.environ[connect.CA_FILE] = str(server.ca.resolve())  # read by Spark's side
            lake_only = options.get("lake_only", False)
            if not lake_only:
                check_topics(path, server, needed_topics(options))
            # A job that writes to a server changes a lake without Spark.
            spark = None if lake_only and writes else start_spark(place["master"])
            job(spark, where, out, **given)

        place = _write_place if writes else _read_place
        common = {"out": Output, "place": place, "server": connection.settle}
        return compose(
            job, run, {**parts, **common}, hidden=("spark", "where"), example=f"pipeline {job.__name__} {example}"
        )

    return decorate


def _read_place(
    path: Annotated[Directory | None, PATH_HELP, connection.SERVER] = None, master: MasterOption = None
) -> dict[str, Any]:
    return locals()


def _write_place(master: MasterOption = None) -> dict[str, Any]:
    return locals()


def read_options(path: Path | None, server: connection.Settings) -> dict[str, str]:
    """Return the options of the Spark format `heapline`."""
    if path is not None:
        if not path.is_dir():
            raise BadRequest(f"--path: {not_a_directory(path)}; choose a data directory")
        return {"path": str(path)}
    options = {"heapline.url": ",".join(server.endpoints)}
    if (file := server.key_from) is not None and file != server.local_key_file:  # the format finds a local key itself
        options["heapline.api_key_file"] = str(file.resolve())
    return options


def _check_folders(given: dict[str, Any]) -> None:
    for name, flag in _FOLDERS.items():
        value = given.get(name)
        if value is not None and os.path.isfile(value):
            raise BadRequest(f"{flag} {str(value)!r} is a file; choose a directory")


def cell(value: Any) -> str:
    """Return a value of a Spark row as markup. Text of messages is never markup.

    >>> cell("[red]"), cell(None), cell(3)
    ('\\\\[red]', '', '3')
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds")  # Spark returns local time
    return "" if value is None else escape(harmless(str(value)).plain)


# -- checks before Spark starts ----------------------------------------------------------------------------------------


def check_topics(path: Path | None, server: connection.Settings, topics: Sequence[str]) -> None:
    """Raise an error if the server or the directory cannot be used, or if a topic does not exist."""
    if path is not None:
        _check_directory(path, topics)
    else:
        connection.run_on(lambda hl: _check_server(hl, topics), server)


def needed_topics(given: dict[str, Any]) -> list[str]:
    """Return the topics that must exist. Topics that are read from a lake or another directory need not."""
    from_elsewhere = given.get("from_path") is not None or (given.get("lake") is not None and "follow" not in given)
    named = given.get("topic") or []
    topics = [named] if isinstance(named, str) else list(named)
    into = [given["into"]] if given.get("into") else topics if "into" in given else []
    return ([] if from_elsewhere else topics) + into


async def _check_server(hl: Broker, topics: Sequence[str]) -> None:
    await hl.describe()  # even without topics to check: is there a server, and is the key valid?
    for topic in topics:
        await hl.get_topic(topic)


def _check_directory(path: Path, topics: Sequence[str]) -> None:
    from heapline.spark.directory import DirectorySource

    known = {short(ref.topic) for ref in DirectorySource(str(path)).topics()}
    for topic in topics:
        if short(topic) not in known:
            others = f"there are {some(sorted(known), 10)}" if known else "it contains no topics"
            raise BadRequest(f"topic {topic!r} does not exist in --path {str(path)!r}; {others}")


# -- Spark -------------------------------------------------------------------------------------------------------------


def start_spark(master: str | None) -> Any:
    """Return a session. Spark ends with this process."""
    from heapline.spark import session
    from heapline.spark.session import NoJava

    with make_console(stderr=True).status("starting Spark …"), _quiet_java():
        try:
            return session(master=master, app="heapline pipeline")
        except ModuleNotFoundError:
            raise  # short_error names the missing package
        except (ImportError, NoJava) as error:
            raise BadRequest(str(error)) from None


@contextlib.contextmanager
def _quiet_java() -> Iterator[None]:
    """Silence the log of a Java that is started within: its errors also arrive here, as exceptions."""
    if os.environ.get(TRACEBACK) or LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "fatal"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]


class JobFailed(HeaplineError):
    """Spark aborted the job. What was committed before stays."""


def short_error(error: Exception) -> HeaplineError | None:
    """Return the error to show instead, or None to show the original. Knows only texts, so it needs no Spark."""
    if isinstance(error, HeaplineError) or os.environ.get(TRACEBACK):
        return None
    if isinstance(error, ModuleNotFoundError):
        missing = str(error.name).partition(".")[0]
        if missing == "heapline":
            return None
        return BadRequest(
            f"the job needs {missing!r}; run pip install 'heapline[spark-local]', or 'heapline[spark,lake]' if Spark "
            "is installed"
        )
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    return JobFailed(f"{reason(str(error))} (set {TRACEBACK}=1 for the complete error)")


def reason(text: str) -> str:
    """Return the line of a Spark error that says what happened.

    >>> reason("Failed\\nTraceback (most recent call last):\\n  File x\\nheapline.errors.TopicFull: full\\n\\tat a.b")
    'TopicFull: full'
    >>> reason("[UNRESOLVED_COLUMN] no column. SQLSTATE: 42703\\n'Project")
    '[UNRESOLVED_COLUMN] no column. SQLSTATE: 42703'
    """
    _, traceback, inner = text.rpartition("Traceback (most recent call last):")
    raised = _RAISED.search(inner) if traceback else None
    if raised is not None:
        return f"{raised[1]}: {raised[2]}"
    lines = [line.strip(" :") for line in text.splitlines() if line.strip()]
    java = next((line for line in lines if re.match(r"(?:[a-z]\w*\.)+[A-Z]\w*: ", line)), None)
    return java or (lines[0] if lines else "Spark gives no reason")
