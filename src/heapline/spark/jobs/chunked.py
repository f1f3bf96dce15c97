"""Writing much into a topic piece by piece, exactly once, also when the driver is killed: what load and replay share.

*Theory of operation.* A job is a name, a folder and a plan. The plan says what each chunk is, numbered from 0, and is
settled before anything is written: durable in the folder, under a random run id. A chunk is one write with
`txnAppId = kind:name:run` and `txnVersion = its number`, so the server itself remembers, for ever, up to which chunk
the job has come; there is no second truth that could fall behind. A driver that is started again reads the plan, asks
the server, and goes on behind what is there; a chunk that is written twice all the same counts once.

The folder is only needed to know what the chunks are. If it is lost, the server still knows that a job of this name was
begun, and another one of that name is refused rather than doubling what is there.

What chunks hold and how one is written is not decided here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from heapline.errors import BadRequest, ConflictError

PLAN, PROGRESS, LOCK = "plan.json", "progress.json", "lock"
PLAN_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Json = dict[str, Any]
Tell = Callable[[int, int, int], None]  # chunks done, of how many, messages so far


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """plan.json. `asked`: what the job was started with, so that another request under its name is noticed."""

    version: int = PLAN_VERSION
    kind: str
    name: str
    run: str
    asked: Json
    chunks: list[Any]
    facts: Json = {}  # whatever else the job must know again

    @property
    def app(self) -> str:
        return f"{self.kind}:{self.name}:{self.run}"


class Progress(msgspec.Struct, frozen=True):
    """progress.json: how many messages all chunks up to this one have become, and where the server stood by then."""

    chunk: int = -1
    messages: int = 0
    version: int = -1  # below `chunk` if the last ones had nothing to commit


class Committed(Protocol):
    """What the server remembers of a sink (model.SinkInfo)."""

    name: str
    version: int
    messages: int


Sinks = Callable[[], Mapping[str, Any]]  # name of a sink -> Committed, as the server has it now


@dataclass(frozen=True)
class Ran:
    chunks: int
    chunks_before: int  # of them, written by earlier runs
    messages: int  # of all runs
    seconds: float  # of this run

    @property
    def was_done(self) -> bool:
        return self.chunks_before == self.chunks


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{name!r} is no name for a job: up to 100 letters, digits, dots, dashes and underscores")


class JobFolder:
    """Where a job's plan is kept. One process at a time works on it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
            except BlockingIOError:
                raise ConflictError(f"another process is at work on {self.path}: wait for it, or stop it") from None
            yield

    def plan(self) -> Plan | None:
        try:
            found = msgspec.json.decode((self.path / PLAN).read_bytes(), type=Plan)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise BadRequest(f"{self.path / PLAN} cannot be read: {error}") from None
        if found.version != PLAN_VERSION:
            raise BadRequest(f"{self.path / PLAN} was written by a newer Heapline (version {found.version})")
        return found

    def progress(self) -> Progress:
        try:
            return msgspec.json.decode((self.path / PROGRESS).read_bytes(), type=Progress)
        except FileNotFoundError:
            return Progress()

    def write(self, name: str, what: msgspec.Struct) -> None:
        """Whole and durable, or not at all."""
        made = self.path / f"{name}.new"
        with made.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(what), indent=1))
            file.flush()
            os.fsync(file.fileno())
        made.replace(self.path / name)
        sync_folder(self.path)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def settled_plan(
    folder: JobFolder, kind: str, name: str, asked: Json, sinks: Sinks, make: Callable[[], tuple[list[Any], Json]]
) -> Plan:
    """The plan that is there, or a new one. Nothing is written to the topic before it is durable."""
    asked = json.loads(json.dumps(asked))
    found = folder.plan()
    if found is None:
        _check_free(kind, name, sinks())
        chunks, facts = make()
        found = Plan(kind=kind, name=name, run=secrets.token_hex(8), asked=asked, chunks=chunks, facts=facts)
        folder.write(PLAN, found)
    elif (found.kind, found.name, found.asked) != (kind, name, asked):
        changed = sorted(key for key in found.asked.keys() | asked.keys() if found.asked.get(key) != asked.get(key))
        raise BadRequest(
            f"{folder.path} holds {found.kind} {found.name!r}, begun with another "
            f"{' and '.join(changed) if found.kind == kind and found.name == name else 'name'}: give the same as then "
            "to go on with it, or another name to begin anew"
        )
    return found


def _check_free(kind: str, name: str, known: Mapping[str, Any]) -> None:
    prefix = f"txn:{kind}:{name}:"
    taken = next((sink for sink in known if sink.startswith(prefix)), None)
    if taken is not None:
        raise BadRequest(
            f"the server knows a {kind} {name!r} already, and its plan is not in this folder: name the folder where it "
            f"is, or choose another name. To have it done a second time: heapline sink forget {taken}"
        )


def run_chunks(
    plan: Plan, folder: JobFolder, sinks: Sinks, write: Callable[[Any, str, int], None], *,
    rate: float | None = None, tell: Tell | None = None, clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Ran:  # fmt: skip
    """Write what is not written yet. `write(chunk, txnAppId, txnVersion)` returns when the chunk is committed."""
    if rate is not None and rate <= 0:
        raise BadRequest(f"a rate is messages a second, more than 0, not {rate}")
    began, total = clock(), len(plan.chunks)
    progress = _caught_up(folder.progress(), _last(plan, sinks()))
    before, sent_before = progress.chunk + 1, progress.messages
    for number in range(before, total):
        if tell is not None:
            tell(number, total, progress.messages)
        if rate is not None:
            wait = (progress.messages - sent_before) / rate - (clock() - began)
            if wait > 0:
                sleep(wait)
        write(plan.chunks[number], plan.app, number)
        progress = _caught_up(progress, _last(plan, sinks()))
        if progress.chunk < number:  # nothing of it was left to send, so there was nothing to commit
            progress = Progress(number, progress.messages, progress.version)
        folder.write(PROGRESS, progress)
    if tell is not None:
        tell(total, total, progress.messages)
    return Ran(total, before, progress.messages, clock() - began)


def _last(plan: Plan, known: Mapping[str, Any]) -> Committed | None:
    """Its run's id is in no other sink's name."""
    return next((sink for name, sink in known.items() if name.startswith(f"txn:{plan.app}@")), None)


def _caught_up(known: Progress, last: Committed | None) -> Progress:
    """What was noted, with the commit that the server remembers. Killed between the two, one chunk is not yet noted."""
    version = -1 if last is None else last.version
    if version < known.version:
        raise BadRequest(
            f"this job had come to chunk {known.version}, and the server knows it "
            + ("not at all" if last is None else f"only up to chunk {version}")
            + ": it is another server, its data were set back, or the sink was forgotten. Begin anew under another name"
        )
    if last is None or version <= known.chunk:
        return known
    return Progress(version, known.messages + last.messages, version)
