"""Run a replay into a topic: read, claim, enqueue. Each message is enqueued exactly once, across crashes.

Theory of operation
-------------------
The job enqueues under its own producer, `_replay/<name>`, which users cannot use. Its epoch is in the job's file from
the beginning, and the first batch opens it in the topic. Its messages are numbered without gaps in the order in which
they are read. For each batch:

1. *Claim.* The batch's numbers and the job's position after it are written to the job's file, durably.
2. *Send.* The batch is enqueued, all or none, in one unit of the target's journal.
3. *Settle.* The job's position is after the batch; that is on disk with the next claim.

A run that finds an unsettled claim (after a crash, or a failed write of the target) asks the target for the highest
number that it has under this epoch. Numbers rise from batch to batch and a batch is one unit. So a number at or above
the claim's first means that the complete batch is in the target; a lower one means that none of it is. A topic forgets
single numbers after a while, but never a producer's highest one, which is durable with the messages themselves. So the
answer is right after any time, and no row is sent unless it is known to be missing. A batch that was not enqueued may
have other rows when it is read again (in a fast replay some may be deleted by then). This does no harm, because none of
its rows was enqueued.

A job that was restored from a backup may be behind its target by more than the claimed batch. The target's additional
messages are the next rows in the same order, which are skipped. For a fast replay it is unknown which rows those were,
so it fails.

A permanent error (the topic was deleted, a message is too large for it) ends the job as failed. Any other error is
retried, and `error` contains it. A topic that is full gets smaller batches until one fits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from heapline.clock import Clock
from heapline.contract.config import TopicConfig
from heapline.contract.errors import (
    BadRequest,
    Closed,
    HeaplineError,
    RequestError,
    ResourceExhausted,
    StaleEpoch,
    UnavailableError,
)
from heapline.contract.ids import to_ulid
from heapline.contract.message import Outgoing, from_ms
from heapline.core.now import Now
from heapline.core.record import DEFAULT_RETRIES
from heapline.engine.columns import Columns, EnqueueCall, Identity, batch_bytes_max, check_batch_bytes, check_one
from heapline.engine.replays.jobs import Job
from heapline.engine.replays.portions import Portion, Rows
from heapline.engine.replays.reader import AFTER_MS, ANY_NUMBER, Hold, Pace, Reading
from heapline.engine.replays.requests import Change, check_there
from heapline.engine.runner import TopicRunner
from heapline.logs import Log

#: Headers of a replayed message: the replay's name, `topic/partition/offset` of its row, and the id that it had.
REPLAY, REPLAYED_FROM, REPLAYED_ID = "heapline-replay", "heapline-replayed-from", "heapline-replayed-id"
OVERHEAD_BYTES = 640  # upper bound per message, without payload and small parts
log = Log("heapline.replay")
BATCH_ROWS = 1000
BATCH_BYTES = 1 << 20
PAUSE, PAUSE_MAX = 0.05, 2.0  # seconds between retries
SAVE_SECONDS = 1.0  # seconds between saves of the position while a job finds nothing to enqueue


def outgoing(portion: Portion, name: str, change: Change, target: TopicConfig, first_seq: int) -> list[Outgoing]:
    """Return numbered messages in the order of the rows. Does not read the clock, so the call can be repeated."""
    messages: list[Outgoing] = []
    for rows in portion.rows:
        messages += _of_rows(rows, name, change, target, first_seq + len(messages))
    return messages


def _of_rows(rows: Rows, name: str, change: Change, target: TopicConfig, first_seq: int) -> list[Outgoing]:
    batch, count = rows.batch, len(rows.batch)
    none: list[Any] = [None] * count
    fair = batch.fairness_keys if target.fairness == "keys" else None
    dues: list[int] = rows.dues.tolist() if change.keep_due and rows.dues is not None else [0] * count
    columns = zip(
        batch.offsets.tolist(),
        batch.ids.tolist(),
        batch.payloads,
        batch.priorities.tolist(),
        batch.keys or none,
        batch.headers or none,
        fair or none,
        rows.records["ttl_ms"].tolist(),
        rows.records["max_retries"].tolist(),
        dues,
        strict=True,
    )
    return [
        Outgoing(
            payload,
            priority if change.priority is None else change.priority,
            key,
            change.delay,
            _moment(due or change.deliver_at_ms),
            {
                **(headers or {}),
                REPLAY: name,
                REPLAYED_FROM: f"{batch.topic}/{batch.partition}/{offset}",
                REPLAYED_ID: to_ulid(id, batch.id_suffix),
            },
            ttl_ms / 1000 if ttl_ms else None,
            None if retries == DEFAULT_RETRIES else retries,
            seq=first_seq + i,
            fairness_key=fair_key,
        )
        for i, (offset, id, payload, priority, key, headers, fair_key, ttl_ms, retries, due) in enumerate(columns)
    ]


def _moment(ms: int | None) -> datetime | None:
    return from_ms(ms) if ms else None


def rows_within(portion: Portion, bytes_max: int) -> int:
    """Return how many of the first rows fit into `bytes_max`, at least one."""
    sizes = [rows.records["payload_len"].astype(np.int64) + rows.records["small_len"] for rows in portion.rows]
    total = np.cumsum(np.concatenate(sizes) + OVERHEAD_BYTES)
    return max(1, int(np.searchsorted(total, bytes_max, side="right")))


class JobRun:
    """One running job. `save` makes its state durable; `find` returns a topic's runner."""

    def __init__(
        self,
        job: Job,
        find: Callable[[str], TopicRunner],
        save: Callable[[Job], Any],
        clock: Clock,
        is_taken_up: bool = False,
    ) -> None:
        self.job = job
        self._find, self._save, self._clock = find, save, clock
        self._pace = Pace(job.request.rate, clock)
        self._hold: Hold | None = None  # on the source's journal, until the job has ended
        self._is_taken_up = is_taken_up
        self._rows_max = BATCH_ROWS
        self._tried = 0  # rows of the batch that was last sent
        self._pause = PAUSE
        self._saved_at = 0.0
        self._ahead = 0  # messages that the target has and the job, an older copy, does not know

    async def run(self) -> None:
        """Run until the job is done or has failed permanently."""
        while self.job.state == "running":
            try:
                await self._carry_out()
            except (Closed, asyncio.CancelledError):
                raise
            except (RequestError, StaleEpoch) as error:
                with contextlib.suppress(HeaplineError):  # a batch in flight may be in the target
                    await self.settle()
                await self._end("failed", str(error))
            except (HeaplineError, OSError) as error:
                await self._wait_out(error)
            except Exception:
                if self.job.error is None:
                    log.exception("replay failed; will retry", replay=self.job.name)
                await self._wait_out(UnavailableError("an unexpected error; see the server's log"))

    async def _end(self, state: Any, error: str | None = None) -> None:
        """End the job. If that cannot be saved, it is retried together with everything that led here."""
        ended = self._changed(state=state, error=error)
        try:
            await self._save(ended)
        except (HeaplineError, OSError) as problem:
            await self._wait_out(problem)
        else:
            self.job = ended
            await self.let_go()
            log.info("replay ended", replay=ended.name, state=state, replayed=ended.replayed, skipped=ended.skipped)

    async def let_go(self) -> None:
        """Release the source's journal."""
        if self._hold is not None:
            with contextlib.suppress(OSError, HeaplineError):  # the lease expires automatically
                await self._hold.end()

    async def _wait_out(self, error: Exception) -> None:
        if isinstance(error, ResourceExhausted) and self._tried > 1:  # a smaller batch may fit
            self._rows_max, self._tried = self._tried // 2, 0
            return
        if self.job.error is None:
            log.warning("replay waits", replay=self.job.name, error=str(error))
        said = str(error) if isinstance(error, HeaplineError) else f"its place cannot be kept: {error.strerror}"  # type: ignore[attr-defined]
        self.job = self._changed(error=said)
        if self._hold is not None:
            await self._hold.renew()
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, PAUSE_MAX)

    @property
    def _left(self) -> int:
        """How many more messages the job enqueues at most."""
        count = self.job.request.count
        return ANY_NUMBER if count is None else count - self.job.replayed

    def _changed(self, **fields: Any) -> Job:
        return msgspec.structs.replace(self.job, **fields)

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _carry_out(self) -> None:
        job = self.job
        source = self._topic(job.request.topic, job.source_incarnation)
        target = self._topic(job.into, job.into_incarnation)
        await self.settle()
        job = self.job
        ranges = {p: (job.positions[p], end) for p, end in job.ends.items()}
        await check_there(source, ranges)
        hold = self._hold = self._hold or Hold(source, self._clock, job.name, 0 if self._is_taken_up else AFTER_MS)
        reading = Reading(source, job.request, ranges, self._clock, job.seen, hold)
        try:
            while not reading.is_done and self._left:
                await self._pass_on(await reading.next(), reading, target)
        finally:
            await reading.close()
        await self._end("done")

    def _topic(self, name: str, incarnation: int) -> TopicRunner:
        runner = self._find(name)
        if runner.loader.incarnation != incarnation:
            raise BadRequest(f"topic {name!r} was deleted; the one that has its name now is another")
        return runner

    async def settle(self) -> None:
        """Resolve a claim, if there is one."""
        job = self.job
        target, epoch, claim = self._topic(job.into, job.into_incarnation), job.epoch, job.claim

        def highest(now: Now) -> int:
            windows = [partition.state.sequences for partition in target.loaded.topic.partitions]
            current = max(window.epoch_of(job.producer_id) or 0 for window in windows)
            if current > epoch:
                raise StaleEpoch(job.producer_id, epoch, current)
            return max(window.highest_of(job.producer_id, epoch) for window in windows)

        there = await target.call(highest) + 1
        self.job = job.settled(claim is not None and there > claim.first_seq)
        self._ahead = max(0, there - self.job.replayed)
        if self._ahead and job.request.mode == "fast":
            raise BadRequest(
                f"it is a copy, and older than what {job.into!r} has of it ({there} messages): which rows those were "
                "is unknown"
            )

    async def _pass_on(self, portion: Portion, reading: Reading, target: TopicRunner) -> None:
        while len(portion):
            if self._ahead:
                portion = self._pass_over(portion)
                continue
            if not self._left:
                return
            room = min(self._rows_max, self._left, await self._pace.room(reading.stay))
            nbytes = min(BATCH_BYTES, batch_bytes_max(target.loaded.topic.config, self._rows_max) // 2)
            count = rows_within(portion.split(room)[0], nbytes)
            head, portion = portion.split(count)
            await self._send(head, target)
            self._pace.went(count)
        self.job = self._changed(positions=portion.positions, skipped=self.job.skipped + portion.skipped)
        now = asyncio.get_running_loop().time()
        if now - self._saved_at >= SAVE_SECONDS:
            await self._keep(self.job)

    def _pass_over(self, portion: Portion) -> Portion:
        known, rest = portion.split(self._ahead)
        self._ahead -= len(known)
        skipped, replayed = self.job.skipped + known.skipped, self.job.replayed + len(known)
        self.job = self._changed(positions=known.positions, skipped=skipped, replayed=replayed)
        return rest

    async def _send(self, head: Portion, target: TopicRunner) -> None:
        job = self.job
        seen = [int(id) for rows in head.rows for id in rows.changed]
        messages = outgoing(head, job.name, job.change, target.loaded.topic.config, job.replayed)
        _check(messages, head, target)
        claimed = job.claiming(len(head), head.positions, job.skipped + head.skipped, seen)
        await self._keep(claimed)
        self._tried = len(head)
        identity = Identity(job.producer_id, job.epoch, job.replayed)
        call = EnqueueCall(target.future(), columns=Columns(messages), identity=identity)
        check_batch_bytes(call, target.loaded.topic.config)
        await target.enqueue(call)
        self.job = msgspec.structs.replace(self.job.settled(True), error=None)
        self._pause = PAUSE
        self._rows_max = min(BATCH_ROWS, self._rows_max * 2)

    async def _keep(self, job: Job) -> None:
        await self._save(job)
        self._saved_at = asyncio.get_running_loop().time()
        self.job = job


def _check(messages: list[Outgoing], head: Portion, target: TopicRunner) -> None:
    """Raise for a message that the topic never accepts. The error names its row, to start another replay after it."""
    places = [(rows.batch.partition, offset) for rows in head.rows for offset in rows.batch.offsets.tolist()]
    for message, (partition, offset) in zip(messages, places, strict=True):
        try:
            check_one(message, target.loaded.topic.config, target.name)
        except RequestError as error:
            raise BadRequest(f"the row at offset {offset} of partition {partition} cannot go in: {error}") from None
