"""Write many rows to a topic in chunks, exactly once, even if the driver is killed. Used by load and replay.

*Theory of operation.* A job is a name, a folder and a plan. The plan describes each chunk, numbered from 0, and is
durable in the folder, under a random run id, before anything is written. A chunk is one write with `txnAppId =
kind:name:run` and `txnVersion = its number`, so the server itself remembers, forever, the last chunk of the job; there
is no second record that could fall behind. A restarted driver reads the plan, asks the server, and continues after the
last chunk. A chunk that is nevertheless written twice counts once.

The folder is only needed to know what the chunks are. If it is lost, the server still knows that a job of this name
was started and rejects another one, instead of duplicating its messages.

The caller decides what chunks contain and how one is written. Errors in its SQL, or in the columns that it returns, are
raised before anything is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from heapline.contract.batches import ListSinks
from heapline.contract.errors import BadRequest, ConflictError
from heapline.contract.message import SinkInfo, TopicInfo
from heapline.contract.topics import GetTopic
from heapline.journal.disk import RealDisk
from heapline.spark.target import calls_of, server_target
from heapline.spark.write_options import parse_write, spark_columns

PLAN, PROGRESS, LOCK = "plan.json", "progress.json", "lock"
PLAN_VERSION = 1
CHUNK_ROWS = 100_000  # large enough to hide Spark's second per job, small enough to show progress
RATE_SECONDS = 2.0  # with a rate, a chunk has the messages of this many seconds
FOLDER = "heapline-jobs"  # default folder of jobs, in the working directory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Json = dict[str, Any]
Tell = Callable[[int, int, int], None]  # called with chunks done, chunks in total, messages so far


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The content of plan.json. `asked` has the job's arguments, to detect a different job under the same name."""

    version: int = PLAN_VERSION
    kind: str
    name: str
    run: str
    asked: Json
    chunks: list[Any]
    facts: Json = {}  # other values that a restarted job needs

    @property
    def app(self) -> str:
        return f"{self.kind}:{self.name}:{self.run}"


class ChunkProgress(msgspec.Struct, frozen=True):
    """The content of progress.json: the last chunk, the messages so far, and the server's version at that time."""

    chunk: int = -1
    messages: int = 0
    version: int = -1  # below `chunk` if the last chunks had nothing to commit


Sinks = Callable[[], Mapping[str, SinkInfo]]  # returns the server's sinks by name


@dataclass(frozen=True)
class RunResult:
    messages: int  # of all runs
    chunks: int
    chunks_before: int  # chunks that earlier runs wrote
    seconds: float  # of this run
    was_done: bool  # whether the job was complete before this run


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{name!r} is not a job name; use up to 100 letters, digits, dots, dashes and underscores")


def chunk_size(chunk_rows: int | None, rate: float | None) -> int:
    """Return the rows per chunk.

    >>> chunk_size(None, None), chunk_size(None, 5000), chunk_size(None, 0.5), chunk_size(7, 5000)
    (100000, 10000, 1, 7)
    """
    if chunk_rows:
        return chunk_rows
    return CHUNK_ROWS if rate is None else min(CHUNK_ROWS, max(1, round(rate * RATE_SECONDS)))


def write_chunk(rows: Any, server: Mapping[str, str], topic: str, app: str, number: int, **options: str) -> None:
    """Write a DataFrame as chunk `number` of a job."""
    writer = rows.write.format("heapline").options(**server, **options).option("topic", topic)
    writer.option("txnAppId", app).option("txnVersion", str(number)).mode("append").save()


class JobFolder:
    """The folder with a job's plan. One process at a time uses it."""

    def __init__(self, path: str | os.PathLike[str] | None, name: str = "") -> None:
        self.path = Path(path) if path is not None else Path(FOLDER) / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
            except BlockingIOError:
                raise ConflictError(f"another process is using {self.path}; wait for it, or stop it") from None
            yield

    def plan(self) -> Plan | None:
        try:
            found = msgspec.json.decode((self.path / PLAN).read_bytes(), type=Plan)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise BadRequest(f"cannot decode {self.path / PLAN}: {error}") from None
        if found.version != PLAN_VERSION:
            raise BadRequest(f"{self.path / PLAN} was written by a newer Heapline (version {found.version})")
        return found

    def progress(self) -> ChunkProgress:
        try:
            return msgspec.json.decode((self.path / PROGRESS).read_bytes(), type=ChunkProgress)
        except FileNotFoundError:
            return ChunkProgress()

    def write(self, name: str, content: msgspec.Struct) -> None:
        """Write a file atomically and durably."""
        RealDisk().write_file_atomic(str(self.path / name), msgspec.json.format(msgspec.json.encode(content), indent=1))


def load_or_make_plan(
    folder: JobFolder, kind: str, name: str, asked: Json, sinks: Sinks, make: Callable[[], tuple[list[Any], Json]]
) -> Plan:
    """Return the existing plan, or a new one. Nothing is written to the topic before the plan is durable."""
    asked = json.loads(json.dumps(asked))
    plan = folder.plan()
    if plan is None:
        _check_free(kind, name, sinks())
        chunks, facts = make()
        plan = Plan(kind=kind, name=name, run=secrets.token_hex(8), asked=asked, chunks=chunks, facts=facts)
        folder.write(PLAN, plan)
    elif (plan.kind, plan.name, plan.asked) != (kind, name, asked):
        changed = sorted(key for key in plan.asked.keys() | asked.keys() if plan.asked.get(key) != asked.get(key))
        raise BadRequest(
            f"{folder.path} contains {plan.kind} {plan.name!r}, started with a different "
            f"{' and '.join(changed) if plan.kind == kind and plan.name == name else 'name'}; use the same arguments "
            "to continue it, or another name to start a new job"
        )
    return plan


def _check_free(kind: str, name: str, known: Mapping[str, Any]) -> None:
    prefix = f"txn:{kind}:{name}:"
    taken = next((sink for sink in known if sink.startswith(prefix)), None)
    if taken is not None:
        raise BadRequest(
            f"the server already knows a {kind} {name!r}, whose plan is not in this folder; use the folder that has "
            f"the plan, or choose another name. To repeat the job: heapline sink forget {taken}"
        )


def run_chunks(
    plan: Plan,
    folder: JobFolder,
    sinks: Sinks,
    write: Callable[[Any, str, int], None],
    *,
    rate: float | None = None,
    tell: Tell | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RunResult:
    """Write the remaining chunks. `write(chunk, txnAppId, txnVersion)` returns when the chunk is committed."""
    if rate is not None and rate <= 0:
        raise BadRequest(f"rate must be more than 0 messages per second, not {rate}")
    started, total = clock(), len(plan.chunks)
    recorded = folder.progress()
    progress = _caught_up(recorded, _committed(plan, sinks()))
    if progress != recorded:  # or a second kill would lose the count of the chunk that the first one left unrecorded
        folder.write(PROGRESS, progress)
    before, sent_before = progress.chunk + 1, progress.messages
    for number in range(before, total):
        if tell is not None:
            tell(number, total, progress.messages)
        if rate is not None:
            wait = (progress.messages - sent_before) / rate - (clock() - started)
            if wait > 0:
                sleep(wait)
        write(plan.chunks[number], plan.app, number)
        progress = _caught_up(progress, _committed(plan, sinks()))
        if progress.chunk < number:  # the chunk had no rows, so there was nothing to commit
            progress = ChunkProgress(number, progress.messages, progress.version)
        folder.write(PROGRESS, progress)
    if tell is not None:
        tell(total, total, progress.messages)
    return RunResult(progress.messages, total, before, clock() - started, was_done=before == total)


def _committed(plan: Plan, known: Mapping[str, Any]) -> SinkInfo | None:
    """Return the job's sink. The run id makes its name unique."""
    return next((sink for name, sink in known.items() if name.startswith(f"txn:{plan.app}@")), None)


def _caught_up(known: ChunkProgress, last: SinkInfo | None) -> ChunkProgress:
    """Add the server's last commit to the recorded progress, which may be one chunk behind after a kill."""
    version = -1 if last is None else last.version
    if version < known.version:
        raise BadRequest(
            f"this job had written chunk {known.version}, but the server "
            + ("does not know the job" if last is None else f"only knows chunk {version}")
            + ": it is another server, it was restored from a backup, or the sink was forgotten. Start a new job under "
            "another name"
        )
    if last is None or version <= known.chunk:
        return known
    return ChunkProgress(version, known.messages + last.messages, version)


class Server:
    """The server that a job writes to: its sinks and topics.

    Every call is retried while the server is unreachable, so a restarting server does not end a job.
    """

    def __init__(self, where: Mapping[str, str]) -> None:
        self.calls = calls_of(server_target(where))

    def sinks(self) -> dict[str, SinkInfo]:
        return {sink.name: sink for sink in self.calls.every(ListSinks())}

    def topic(self, topic: str) -> TopicInfo:
        return self.calls.do(GetTopic(topic))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.calls.close()


def make_active(spark: Any) -> None:
    """Make `spark` the active session of this thread.

    Spark looks up Python formats in the thread's active session, and finds none if the thread has not used a session
    yet. Creating a DataFrame is the public call that sets it.
    """
    spark.createDataFrame([(0,)], "n int")


# -- SQL of a job ------------------------------------------------------------------------------------------------------


def selected(spark: Any, rows: Any, select: str) -> Any:
    """Return `SELECT {select} FROM rows`."""
    view = f"heapline_rows_{secrets.token_hex(6)}"
    rows.createOrReplaceTempView(view)
    try:
        return spark.sql(f"SELECT {select} FROM {view}")
    finally:
        spark.catalog.dropTempView(view)


def sink_columns(options: Mapping[str, str], rows: Any) -> tuple[str, ...]:
    """Return the columns. Raises BadRequest if the sink does not accept one."""
    return parse_write(options, spark_columns(rows.schema), streaming=False, overwrite=False).columns


@contextlib.contextmanager
def short_sql_errors() -> Iterator[None]:
    """Raise the first line of Spark's SQL errors, without the plan and the stack that Spark adds and logs."""
    from pyspark.errors import AnalysisException, ParseException

    log = logging.getLogger("SQLQueryContextLogger")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise BadRequest(f"Spark rejected the SQL: {str(error).strip().splitlines()[0]}") from None
    finally:
        log.disabled = was_off
