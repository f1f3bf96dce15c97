"""A replay into a topic as stored on disk: the request, its progress, and the batch in flight.

One file per job, `replays/<name>.json` in the data directory: one line of version and checksum, then JSON; replaced
atomically. Checkpoints have files of the same format.

    heapline-replay 1 <crc32c of the rest, eight digits>
    {…}

FILE_VERSION 1. To change the contents: only add fields, with defaults; otherwise bump the version and keep reading the
old one. A file that does not pass its checksum is corrupt, and is never treated as empty.
"""

from __future__ import annotations

import re
from typing import Literal, TypeVar

import msgspec

from heapline.checksum import crc32c
from heapline.contract.check import describe_types
from heapline.contract.errors import CorruptionError, UnknownFormat
from heapline.contract.message import from_ms
from heapline.contract.stream import ReplayInfo
from heapline.engine.replays.requests import Change, Request
from heapline.journal.disk import Disk
from heapline.journal.small_files import REPLAYS, SmallFiles
from heapline.logs import Log

T = TypeVar("T")
FILE_VERSION = 1
_FIRST_LINE = re.compile(rb"heapline-replay (\d+) ([0-9a-f]{8})\n")
log = Log("heapline.replay")
ENDING = ".json"


def save(files: SmallFiles, name: str, content: msgspec.Struct) -> None:
    body = msgspec.json.encode(content)
    files.write(name + ENDING, b"heapline-replay %d %08x\n" % (FILE_VERSION, crc32c(body)) + body)


def load(files: SmallFiles, name: str, kind: type[T]) -> T | None:
    """Return the content of a file, or None if it does not exist."""
    data, path = files.read(name + ENDING), files.path(name + ENDING)
    if data is None:
        return None
    first = _FIRST_LINE.match(data)
    if first is not None and int(first[1]) != FILE_VERSION:
        raise UnknownFormat(path, int(first[1]))
    body = data[first.end() :] if first is not None else b""
    if first is None or crc32c(body) != int(first[2], 16):
        raise CorruptionError(f"{path} does not match its checksum; delete it and start that replay again")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{path} cannot be read ({error}): it may be a newer version's") from error


def producer_of(name: str) -> str:
    """Return the job's producer id. Users cannot have it: the names of users' producers contain no slash."""
    return f"_replay/{name}"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that may be in the target, all or none, and the job's progress if they are."""

    first_seq: int
    count: int
    positions: dict[int, int]
    skipped: int
    seen: list[int] = []  # new entries of the job's `seen`


class Job(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    request: Request
    into: str
    change: Change
    source_incarnation: int
    into_incarnation: int
    starts: dict[int, int]
    ends: dict[int, int]
    positions: dict[int, int]
    started_ms: int
    state: Literal["running", "done", "cancelled", "failed"] = "running"
    replayed: int = 0  # also the next number: numbers have no gaps
    skipped: int = 0
    epoch: int = 1  # of the job's producer
    seen: list[int] = []  # enqueued messages that may appear in the stream again
    claim: Claim | None = None
    error: str | None = None
    gaps: dict[int, int] = {}  # partition -> where the log started, if the request began before

    @property
    def producer_id(self) -> str:
        return producer_of(self.name)

    def claiming(self, count: int, positions: dict[int, int], skipped: int, seen: list[int]) -> Job:
        claim = Claim(first_seq=self.replayed, count=count, positions=positions, skipped=skipped, seen=seen)
        return msgspec.structs.replace(self, claim=claim)

    def settled(self, is_in: bool) -> Job:
        """Return the job after its claim was resolved; `is_in` is whether the claimed messages are in the target."""
        claim = self.claim
        if claim is None or not is_in:
            return msgspec.structs.replace(self, claim=None)
        return msgspec.structs.replace(
            self,
            claim=None,
            positions=claim.positions,
            skipped=claim.skipped,
            replayed=claim.first_seq + claim.count,
            seen=[*self.seen, *claim.seen],
        )

    def info(self) -> ReplayInfo:
        return ReplayInfo(
            name=self.name,
            source=self.request.topic,
            into=self.into,
            mode=self.request.mode,
            state=self.state,
            replayed=self.replayed,
            skipped=self.skipped,
            starts=self.starts,
            positions=self.positions,
            ends=self.ends,
            rate=self.request.rate,
            error=self.error,
            started_at=from_ms(self.started_ms),
            gaps=self.gaps,
            count=self.request.count,
        )


describe_types(Job)


class JobFiles:
    """Reads and writes the files of jobs. Blocking: use it in I/O threads."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._files = SmallFiles(disk, f"{directory}/{REPLAYS}")

    def load_all(self) -> tuple[list[Job], dict[str, CorruptionError]]:
        """Return all jobs, and the errors of those that cannot be read."""
        jobs: list[Job] = []
        damaged: dict[str, CorruptionError] = {}
        for name in [file.removesuffix(ENDING) for file in self._files.names() if file.endswith(ENDING)]:
            try:
                job = load(self._files, name, Job)
            except CorruptionError as error:
                log.error("replay refused", replay=name, error=str(error))
                damaged[name] = error
            else:
                jobs += [] if job is None else [job]
        return jobs, damaged

    def save(self, job: Job) -> None:
        save(self._files, job.name, job)

    def forget(self, name: str) -> None:
        self._files.delete(name + ENDING)
