"""A replay into a topic as stored on disk: the request, its progress, and the batch in flight.

One file per job, `replays/<name>.json` in the data directory, in the format of files.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from heapline.contract.errors import CorruptionError
from heapline.contract.message import from_ms
from heapline.contract.stream import ReplayInfo
from heapline.engine.replays import files
from heapline.engine.replays.replay_request import Change, Request
from heapline.journal.disk import Disk
from heapline.logs import Log

log = Log("heapline.replay")
ENDING = ".json"


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
            self, claim=None, positions=claim.positions, skipped=claim.skipped, replayed=claim.first_seq + claim.count,
            seen=[*self.seen, *claim.seen],
        )  # fmt: skip

    def info(self) -> ReplayInfo:
        return ReplayInfo(
            name=self.name, source=self.request.topic, into=self.into, mode=self.request.mode, state=self.state,
            replayed=self.replayed, skipped=self.skipped, starts=self.starts, positions=self.positions, ends=self.ends,
            rate=self.request.rate, error=self.error, started_at=from_ms(self.started_ms),
        )  # fmt: skip


class JobFiles:
    """Reads and writes the files of jobs. Blocking: use it in I/O threads."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._folder = disk, f"{directory}/{files.FOLDER}"

    def load_all(self) -> tuple[list[Job], dict[str, CorruptionError]]:
        """Return all jobs, and the errors of those that cannot be read."""
        if not self._disk.exists(self._folder):
            return [], {}
        jobs: list[Job] = []
        damaged: dict[str, CorruptionError] = {}
        for file in self._disk.listdir(self._folder):
            if not file.endswith(ENDING):
                continue
            try:
                job = files.load(self._disk, f"{self._folder}/{file}", Job)
            except CorruptionError as error:
                log.error("replay refused", replay=file.removesuffix(ENDING), error=str(error))
                damaged[file.removesuffix(ENDING)] = error
            else:
                jobs += [] if job is None else [job]
        return jobs, damaged

    def save(self, job: Job) -> None:
        files.make_folder(self._disk, self._folder)
        files.save(self._disk, f"{self._folder}/{job.name}{ENDING}", job)

    def forget(self, name: str) -> None:
        self._disk.unlink(f"{self._folder}/{name}{ENDING}")
