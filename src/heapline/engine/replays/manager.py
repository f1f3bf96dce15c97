"""The replays into topics of one broker: start, describe and cancel them, and resume them when the broker opens.

A job is on disk before its start is acknowledged, and runs as its own task. A name belongs to one request: the same
request again returns the same job. The last thousand ended jobs are remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from heapline.clock import Clock
from heapline.contract.errors import (
    BadName,
    Closed,
    CorruptionError,
    HeaplineError,
    ReplayExists,
    ReplayNotFound,
    UnavailableError,
)
from heapline.contract.stream import ReplayInfo
from heapline.engine.io import Io
from heapline.engine.replays.job_runner import JobRun
from heapline.engine.replays.jobs import Job, JobFiles, producer_of
from heapline.engine.replays.requests import Change, Request, find_ranges
from heapline.engine.runner import TopicRunner
from heapline.journal.disk import Disk
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks, until_done

log = Log("heapline.replay")
ENDED_MAX = 1000
PAUSE = 2.0  # seconds between attempts to list the jobs
NAME_MAX = 120  # the producer's name is a little longer


class ReplayJobs:
    def __init__(
        self, disk: Disk, directory: str, io: Callable[[], Io], clock: Clock, find: Callable[[str], TopicRunner]
    ) -> None:
        self._files = JobFiles(disk, directory)
        self._io, self._clock, self._find = io, clock, find
        self._runs: dict[str, JobRun] = {}
        self._damaged: dict[str, CorruptionError] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changes = OwnedTasks()  # starts and cancellations, finished even if their caller is cancelled
        self._opening: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._refusal: HeaplineError | None = None  # why jobs cannot be listed
        self._changing = asyncio.Lock()  # one start or cancel at a time

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Resume the jobs that an earlier run of the process left, in the background."""
        self._looked, self._refusal = asyncio.Event(), None
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        while True:
            try:
                jobs, self._damaged = await self._io().run(self._files.load_all)
                break
            except OSError as error:
                if self._refusal is None:
                    log.error("cannot list replays; will retry", error=str(error), retry_in=PAUSE)
                self._refusal = UnavailableError(f"cannot list the replays ({error.strerror}); retry later")
            except Exception:  # a bug: callers must not wait forever
                if self._refusal is None:
                    log.exception("cannot list replays; will retry", retry_in=PAUSE)
                self._refusal = UnavailableError("cannot list the replays; see the server's log")
            self._looked.set()
            await asyncio.sleep(PAUSE)
        self._refusal = None
        for job in jobs:
            self._add(job, is_taken_up=True)
        self._looked.set()

    async def _opened(self) -> None:
        if self._opening is None:
            raise Closed
        await self._looked.wait()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def _add(self, job: Job, is_taken_up: bool = False) -> JobRun:
        run = self._runs[job.name] = JobRun(job, self._find, self._save, self._clock, is_taken_up)
        if job.state == "running":
            task = self._tasks[job.name] = asyncio.ensure_future(self._run(run))
            task.add_done_callback(lambda task: self._ended(job.name, task))
        return run

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _run(self, run: JobRun) -> None:
        with contextlib.suppress(Closed):  # resumed when the broker opens
            await run.run()

    async def _save(self, job: Job) -> None:
        await until_done(self._io().run(self._files.save, job))

    def stop(self) -> None:
        """Stop. Running jobs are resumed at the next open."""
        self._refusal = Closed()
        self._looked.set()
        for task in [*self._tasks.values(), *([self._opening] if self._opening is not None else [])]:
            if not task.get_loop().is_closed():
                task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(
            *self._tasks.values(), *([self._opening] if self._opening is not None else []), return_exceptions=True
        )
        self._opening = None

    # -- calls -----------------------------------------------------------------------------------------------------

    async def start(self, name: str, request: Request, into: str | None, change: Change) -> ReplayInfo:
        if len(name) > NAME_MAX:
            raise BadName("replay", name)
        await self._opened()
        return await self._changes.run_to_completion(self._start(name, request, into, change))

    async def _start(self, name: str, request: Request, into: str | None, change: Change) -> ReplayInfo:
        async with self._changing:
            source = self._find(request.topic)
            request = msgspec.structs.replace(request, topic=source.name)
            known = self._known(name)
            target = source if into is None else self._find(into)
            if known is not None:
                if (known.request, known.into, known.change) != (request, target.name, change):
                    raise ReplayExists(name)
                return known.info()
            ranges, gaps = await find_ranges(source, request)
            starts = {p: start for p, (start, _) in ranges.items()}
            job = Job(
                name=name,
                request=request,
                into=target.name,
                change=change,
                source_incarnation=source.loader.incarnation,
                into_incarnation=target.loader.incarnation,
                starts=starts,
                ends={p: end for p, (_, end) in ranges.items()},
                positions=starts,
                gaps=gaps,
                started_ms=self._clock.wall_ms(),
                epoch=await _next_epoch(target, producer_of(name)),
            )
            try:
                await self._save(job)
            except OSError as error:
                raise UnavailableError(f"replay {name!r} cannot be written down: {error.strerror}") from None
            info = self._add(job).job.info()
            await self._forget_old()
            return info

    def _known(self, name: str) -> Job | None:
        if name in self._damaged:
            raise self._damaged[name]
        run = self._runs.get(name)
        return None if run is None else run.job

    async def _forget_old(self) -> None:
        ended = sorted((r.job.started_ms, n) for n, r in self._runs.items() if r.job.state != "running")
        for _, name in ended[:-ENDED_MAX]:
            try:
                await self._io().run(self._files.forget, name)
            except OSError as error:  # the new job has started; the next start retries deleting the old one
                log.warning("an old replay cannot be forgotten", replay=name, error=str(error))
                return
            del self._runs[name]

    async def get(self, name: str) -> ReplayInfo:
        await self._opened()
        job = self._known(name)
        if job is None:
            raise ReplayNotFound(name)
        return job.info()

    async def listed(self) -> list[ReplayInfo]:
        await self._opened()
        jobs = sorted((run.job for run in self._runs.values()), key=lambda job: (job.started_ms, job.name))
        return [job.info() for job in jobs]

    async def cancel(self, name: str) -> ReplayInfo:
        """Cancel a job. Messages already in the topic stay. A job that has ended does not change."""
        await self.get(name)
        return await self._changes.run_to_completion(self._cancel(self._runs[name]))

    async def _cancel(self, run: JobRun) -> ReplayInfo:
        async with self._changing:
            task = self._tasks.get(run.job.name)
            if run.job.state == "running":
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                with contextlib.suppress(HeaplineError):  # do not wait for a target that is unavailable
                    await run.settle()
            if run.job.state == "running":
                await self._write_off(run)
            return run.job.info()

    async def _write_off(self, run: JobRun) -> None:
        cancelled = msgspec.structs.replace(run.job, state="cancelled", error=None)
        try:
            await self._save(cancelled)
        except OSError as error:
            self._add(run.job)
            raise UnavailableError(f"the end of replay {run.job.name!r} cannot be written: {error.strerror}") from None
        run.job = cancelled
        await run.let_go()


async def _next_epoch(target: TopicRunner, producer_id: str) -> int:
    """Return an unused epoch: there may have been a replay of that name that was forgotten."""
    windows = [partition.state.sequences for partition in target.loaded.topic.partitions]
    return await target.call(lambda now: max(window.epoch_of(producer_id) or 0 for window in windows)) + 1
