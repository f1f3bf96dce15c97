"""Prepared batches across topics: the commit protocol, the order in which its steps become durable, and crash recovery.

Theory of operation
-------------------
*Prepare.* Each topic's share of a part is one unit of that topic's journal, fsynced by its group commit before the
answer. A crash between topics leaves an incomplete part; this is detected because each share names all its topics.

*Commit* has four steps. One commit runs at a time per batch.
1. Every topic that holds the batch is checked in a turn, so the answers wait until the shares are durable (under a
relaxed fsync policy the journal is synced here). Every named part must be complete, else `UnknownPart`.
2. The decision is written to the system journal and fsynced. **This is the commit**; before it the batch is undecided
whatever happens, after it the batch is committed whatever happens.
3. `BatchCommitted` is emitted in all topics in one step of the event loop, without an await: a pop sees all or none.
4. The answer waits until those events are durable too.
A topic that is being reloaded in step 3 serves no calls; it applies the decision after loading, before it serves.

*Killed here?* Before 2 is durable: the parts are still prepared, invisible, and wait for a repeat, an abort or the
timeout. After 2, before or while 3 is written: at open the decisions are read first, then each topic that still holds
parts of a decided batch emits the missing events before it serves. A named part that was already attached is no longer
prepared, so it cannot be attached twice; the decision lists the messages that are left out as duplicates. After 3: a
repeat finds the decision, has nothing left to attach, and returns the same number. Topics fsync step 3 independently:
one that did and one that did not differ only until the second is opened. If the decision's own write fails, it is
unknown whether step 2 happened. No batch is decided until the system journal has been read again; if the decision is
there, it is applied then.

*Sinks.* A commit with a sink and a version that is not above the sink's last is a no-op: it drops the parts prepared
under its batch id and returns what the first commit returned. The version is checked while this commit is the only one
of that sink, and the decision itself contains it. So of two concurrent commits of the same version, whatever their
batch ids and parts, one is applied, even if the power is cut between them. A prepare that names its sink and version is
checked in the same way. So an attempt that outlives its batch leaves no parts behind, even if the decision of that
batch is forgotten.

*Abort* needs no decision. Dropping parts makes nothing visible, so topics can drop them at different times: a crash
halfway leaves an undecided batch, and a commit that names a dropped part fails as a whole. Only a commit excludes an
abort, and commits are known for certain here. For the same reason a part that is prepared after an abort is accepted;
the timeout removes it.

*Timeout.* A topic never aborts on its own. The coordinator knows that no commit was decided, so it aborts a batch whose
last part was prepared longer than `batch_timeout` ago.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from heapline.contract.errors import BatchDecided, HeaplineError, UnavailableError, UnknownPart
from heapline.contract.message import BatchInfo, Enqueued, SinkInfo, from_ms
from heapline.core.now import Now
from heapline.engine.batches import prepared_share
from heapline.engine.batches.decisions import Decision, Decisions
from heapline.engine.batches.prepared_share import PartName, PartView, TopicView
from heapline.engine.columns import Columns, EnqueueCall, Identity
from heapline.engine.runner import TopicRunner
from heapline.logs import Log
from heapline.owned_tasks import KeyedLocks, OwnedTasks

log = Log("heapline.engine")
T = TypeVar("T")
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.005, 60.0  # between checks for overdue batches
SETTLE_PAUSE = 0.1  # seconds between attempts to read the system journal again


class BatchCoordinator:
    """Coordinates batches. `serving` yields the served topics; `missing` returns why some are not served, or None."""

    def __init__(
        self,
        decisions: Decisions,
        *,
        serving: Callable[[], Iterable[TopicRunner]],
        missing: Callable[[], HeaplineError | None],
        wall_ms: Callable[[], int],
    ) -> None:
        self.decisions = decisions
        self._serving = serving
        self._missing = missing
        self._wall_ms = wall_ms
        self._unrepeated: set[str] = set()
        self._locks: KeyedLocks[str | tuple[str, str]] = KeyedLocks()
        # Decisions finish even if their callers are cancelled: half of one would leave topics that disagree.
        self._calls = OwnedTasks()
        self.watches = OwnedTasks()

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def start(self, batch_timeout: float, decision_retention: float) -> None:
        self.watches.spawn(self._watch(batch_timeout, decision_retention))

    async def close(self) -> None:
        """Stop. Call it after the topics have been closed, which ends every call in progress."""
        await self.watches.cancel()
        await self._calls.join()

    @contextlib.asynccontextmanager
    async def _alone(self, what: str | tuple[str, str]) -> AsyncIterator[None]:
        """Run one commit or abort of a batch (its id), or one commit of a sink (_sink of its name), at a time, and only
        when all decisions are known. A caller that needs both locks the batch first."""
        async with self._locks.alone(what):
            await self._settle()
            yield

    async def _settle(self) -> None:
        """Read decisions in doubt and apply them. Start all before waiting, because the caller may be cancelled."""
        found = await self.decisions.settle()
        await self._all_durable([wait for decision in found for wait in self._begin(decision)])

    async def _find_out(self) -> None:
        """Resolve a decision whose write failed, whether or not a call needs it."""
        while self.decisions.in_doubt:
            await asyncio.sleep(SETTLE_PAUSE)
            try:
                await self._settle()
            except (UnavailableError, OSError) as error:
                log.warning("a decision is in doubt; will read it again", error=str(error))
            except HeaplineError as error:
                log.error("a decision is in doubt and cannot be read", error=str(error))
                return

    # -- prepare ---------------------------------------------------------------------------------------------------

    async def prepare(
        self,
        batch_id: str,
        part: str,
        shares: Mapping[TopicRunner, Columns],
        identity: Identity | None,
        sink: str = "",
        version: int = -1,
        *,
        quietly: bool = False,
    ) -> dict[TopicRunner, list[Enqueued]]:
        """Write a part to all its topics. With `quietly`, return no results for messages without identities."""
        content = {runner.name: columns for runner, columns in shares.items()}
        who = () if identity is None else (identity.producer_id, identity.epoch)
        name = PartName(batch_id, part, sorted(content), prepared_share.fingerprint_of(content, who))
        calls = {
            runner: EnqueueCall(runner.future(), columns=columns, identity=identity, is_quiet=quietly)
            for runner, columns in shares.items()
        }
        for runner, call in calls.items():
            prepared_share.check_share_bytes(call, name, runner.loaded.topic.config, runner.name)
        await self._settle()
        check = partial(self._refuse_late, batch_id, sink, version)
        check()
        # Topics that hold the part come first: a different part of the same name is refused before it is written
        # anywhere.
        there = {runner for runner in calls if prepared_share.shares_of(runner.loaded.topic, batch_id, part)}
        answers = await self._prepare_in(name, {r: call for r, call in calls.items() if r in there}, check)
        return answers | await self._prepare_in(name, {r: call for r, call in calls.items() if r not in there}, check)

    async def _prepare_in(
        self, name: PartName, calls: Mapping[TopicRunner, EnqueueCall], check: Callable[[], None]
    ) -> dict[TopicRunner, list[Enqueued]]:
        answers = await asyncio.gather(
            *(runner.bring(partial(self._prepare, runner, name, call, check)) for runner, call in calls.items()),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(calls, answers, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def _prepare(
        runner: TopicRunner, name: PartName, call: EnqueueCall, check: Callable[[], None], now: Now
    ) -> list[Enqueued]:
        check()  # the batch may have been decided since this call began
        return prepared_share.prepare(runner, name, call, now)

    def _refuse_late(self, batch_id: str, sink: str, version: int) -> None:
        """Raise BatchDecided if the batch, or its version of the sink, was committed."""
        self._refuse_decided(batch_id)
        last = self.decisions.last_of_sink(sink) if sink else None
        if last is not None and version <= last.version:
            raise BatchDecided(
                batch_id, f"is version {version} of sink {sink!r}, and version {last.version} was committed"
            )

    def _refuse_decided(self, batch_id: str) -> None:
        if self.decisions.get(batch_id) is not None:
            raise BatchDecided(batch_id, "was committed")

    # -- commit ----------------------------------------------------------------------------------------------------

    async def commit(self, batch_id: str, parts: Sequence[str], sink: str = "", version: int = -1) -> int:
        named = list(dict.fromkeys(parts))
        work = self._commit_to(sink, version, batch_id, named) if sink else self._commit(batch_id, named)
        return await self._calls.run_to_completion(work)

    async def _commit(self, batch_id: str, parts: list[str]) -> int:
        async with self._alone(batch_id):
            decision = self.decisions.get(batch_id)
            if decision is None:
                decision = await self._decide(batch_id, parts)
            elif set(decision.parts) != set(parts):
                raise BatchDecided(batch_id, f"was committed with other parts ({len(decision.parts)} of them)")
            await self._carry_out(decision)
            return decision.count

    async def _commit_to(self, sink: str, version: int, batch_id: str, parts: list[str]) -> int:
        async with self._alone(batch_id), self._alone(_sink(sink)):
            mine, last = self.decisions.get(batch_id), self.decisions.last_of_sink(sink)
            if last is not None and version <= last.version:
                return await self._leave_it_at(sink, version, batch_id, mine)
            if mine is not None:
                raise BatchDecided(batch_id, "was committed, but not as this version of this sink")
            decision = await self._decide(batch_id, parts, sink, version)
            await self._carry_out(decision)
            return decision.count

    async def _leave_it_at(self, sink: str, version: int, batch_id: str, mine: Decision | None) -> int:
        """Drop what a late attempt of a committed version has prepared, and return the first commit's answer."""
        first = next((d for d in self.decisions.of_sink(sink) if d.version == version), None)
        if mine is None:
            await self._drop(batch_id)
        else:
            await self._carry_out(mine)
        return 0 if first is None else first.count

    async def _decide(self, batch_id: str, parts: list[str], sink: str = "", version: int = -1) -> Decision:
        views = await self._look(batch_id, parts)
        for part in parts:
            self._check_whole(batch_id, part, {t: v.parts[part] for t, v in views.items() if part in v.parts})
        held = sum(view.parts[part].messages for view in views.values() for part in parts if part in view.parts)
        left_out = {topic: view.left_out for topic, view in views.items() if view.left_out}
        count = held - sum(map(len, left_out.values()))
        decision = Decision(
            batch_id=batch_id,
            parts=parts,
            topics=sorted(views),
            count=count,
            at=self._wall_ms(),
            left_out=left_out,
            sink=sink,
            version=version,
        )
        try:
            await self.decisions.record(decision)
        finally:
            if self.decisions.in_doubt:
                self.watches.spawn(self._find_out())
        return decision

    def _check_whole(self, batch_id: str, part: str, views: dict[str, PartView]) -> None:
        wanted = {topic for view in views.values() for topic in view.topics}
        if views and wanted == views.keys() and len({view.fingerprint for view in views.values()}) == 1:
            return
        # A topic that is not served now may hold the missing share, so the part is not known to be unknown.
        raise self._missing() or UnknownPart(batch_id, part)

    async def _look(self, batch_id: str, parts: Sequence[str] = ()) -> dict[str, TopicView]:
        """Return what the topics durably know of a batch."""
        runners = [r for r in self._serving() if prepared_share.holds(r.loaded.topic, batch_id)]
        views = await asyncio.gather(*(self._look_in(runner, batch_id, parts) for runner in runners))
        return {runner.name: view for runner, view in zip(runners, views, strict=True) if view.parts}

    async def _look_in(self, runner: TopicRunner, batch_id: str, parts: Sequence[str]) -> TopicView:
        return await self._durably(runner, lambda now: prepared_share.view(runner, batch_id, parts, now))

    async def _held_in(self, runner: TopicRunner) -> set[str]:
        return await self._durably(runner, lambda now: prepared_share.batch_ids(runner.loaded.topic))

    @staticmethod
    async def _durably(runner: TopicRunner, look: Callable[[Now], T]) -> T:
        """Return what `look` reads in a turn, once that survives a power cut under every fsync policy."""
        seen = await runner.call(look)
        if runner.loaded.topic.config.fsync != "commit":
            await runner.loaded.committer.between_commits(runner.loaded.journal.sync)
        return seen

    async def _carry_out(self, decision: Decision) -> None:
        """Apply the decision in all topics that hold the batch, in one event-loop step; wait until it is durable."""
        await self._all_durable(self._begin(decision))

    def _begin(self, decision: Decision) -> list[asyncio.Future[Any]]:
        holders = [r for r in self._serving() if prepared_share.holds(r.loaded.topic, decision.batch_id)]
        return [runner.act_now(partial(self._attach, runner, decision)) for runner in holders]

    @staticmethod
    async def _all_durable(waits: Iterable[asyncio.Future[Any]]) -> None:
        for wait in waits:
            with contextlib.suppress(HeaplineError):  # the topic is reloaded or reopened, and applies it then
                await wait

    @staticmethod
    def _attach(runner: TopicRunner, decision: Decision, now: Now) -> None:
        left_out = decision.left_out.get(runner.name, [])
        prepared_share.attach(runner, decision.batch_id, decision.parts, left_out, now)

    def catch_up(self, runner: TopicRunner, now: Now) -> None:
        """Apply the decisions that a topic missed. Runs when it was loaded, before it serves calls."""
        for batch_id in sorted(prepared_share.batch_ids(runner.loaded.topic)):
            decision = self.decisions.get(batch_id)
            if decision is not None:
                self._attach(runner, decision, now)

    # -- abort -----------------------------------------------------------------------------------------------------

    async def abort(self, batch_id: str) -> int:
        return await self._calls.run_to_completion(self._abort(batch_id))

    async def _abort(self, batch_id: str, older_than_ms: int | None = None) -> int:
        async with self._alone(batch_id):
            self._refuse_decided(batch_id)
            if older_than_ms is not None:
                views = await self._look(batch_id)
                if any(view.age_ms < older_than_ms for view in views.values()):
                    return 0  # a new part arrived
            problem = self._missing()
            if isinstance(problem, UnavailableError):
                raise problem  # a topic that comes back may hold parts
            return await self._drop(batch_id)

    async def _drop(self, batch_id: str) -> int:
        """Drop the batch from the topics served now. Return the number of parts."""
        runners = [r for r in self._serving() if prepared_share.holds(r.loaded.topic, batch_id)]
        drops = (runner.call(partial(prepared_share.drop, runner, batch_id)) for runner in runners)
        dropped = await asyncio.gather(*drops)
        return len(set().union(*dropped))

    # -- time ------------------------------------------------------------------------------------------------------

    async def _watch(self, batch_timeout: float, decision_retention: float) -> None:
        """Run the background loop until the broker closes."""
        while True:
            await asyncio.sleep(min(LOOK_SECONDS_MAX, max(LOOK_SECONDS_MIN, batch_timeout / 4)))
            try:
                await self._settle()
                await self.abort_overdue(batch_timeout)
                await self.forget_old(decision_retention)
            except Exception as error:  # any failed check is retried
                log.warning("batch cleanup failed; will retry", error=repr(error))

    async def abort_overdue(self, seconds: float) -> int:
        """Abort the undecided batches whose last part is older than `seconds`. Return their number."""
        limit = round(seconds * 1000)
        runners = list(self._serving())
        candidates = {b for runner in runners for b in prepared_share.batch_ids(runner.loaded.topic)}
        count = 0
        for batch_id in sorted(candidates):
            if self.decisions.get(batch_id) is not None:
                continue
            views = await self._look(batch_id)
            if views and all(view.age_ms >= limit for view in views.values()):
                log.warning("batch timed out, aborted", batch=batch_id, topics=sorted(views))
                count += bool(await self._abort(batch_id, limit))
        return count

    async def forget_old(self, seconds: float) -> None:
        """Forget decisions that are old and applied everywhere, but never the last one of a sink."""
        limit = self._wall_ms() - round(seconds * 1000)
        done_with = self._unrepeated | self.decisions.superseded()
        old = [d.batch_id for d in self.decisions.all() if d.at <= limit or d.batch_id in done_with]
        if not old or self._missing() is not None:
            return  # a topic that is not served may still have to apply it
        needed = await self._held_anywhere() | {key for key in self._locks if isinstance(key, str)}
        # Computed last, with no await before its use, because the last decision of a sink may change meanwhile.
        lasting = {last.batch_id for sink in self.decisions.sinks() if (last := self.decisions.last_of_sink(sink))}
        going = [batch_id for batch_id in old if batch_id not in needed | lasting]
        await self.decisions.forget(going)
        self._unrepeated.difference_update(going)

    async def _held_anywhere(self) -> set[str]:
        """Return the batches that a served topic durably holds. Applied in memory is not enough: a power cut could undo
        it, and then the decision would be missing."""
        held = [await self._held_in(runner) for runner in list(self._serving())]
        return set().union(*held)

    def nobody_repeats(self, batch_id: str) -> None:
        """Mark a decision that is not needed for a repeat. Not recorded: after a restart it is kept until it is old."""
        if self.decisions.get(batch_id) is not None:
            self._unrepeated.add(batch_id)

    # -- sinks -----------------------------------------------------------------------------------------------------

    async def sinks(self) -> list[SinkInfo]:
        await self._settle()
        return [d.as_sink() for sink in self.decisions.sinks() if (d := self.decisions.last_of_sink(sink))]

    async def forget_sink(self, sink: str) -> bool:
        return await self._calls.run_to_completion(self._forget_sink(sink))

    async def _forget_sink(self, sink: str) -> bool:
        """Forget all decisions of a sink together, or an older one would become its last."""
        async with self._alone(_sink(sink)):
            going = self.decisions.of_sink(sink)
            if not going:
                return False
            for decision in going:
                await self._carry_out(decision)
            problem = self._missing()
            if problem is None and await self._held_anywhere() & {d.batch_id for d in going}:
                problem = UnavailableError(f"a commit of sink {sink!r} is still being applied; call again")
            if problem is not None:
                raise problem
            await self.decisions.forget([d.batch_id for d in going])
            return True

    # -- queries ---------------------------------------------------------------------------------------------------

    async def listed(self) -> list[BatchInfo]:
        await self._settle()  # raises if the decisions cannot be read: committed batches would be listed as undecided
        found = []
        undecided = set().union(*await asyncio.gather(*map(self._held_in, self._serving())))
        for batch_id in sorted(undecided - {d.batch_id for d in self.decisions.all()}):
            views = await self._look(batch_id)
            parts: dict[str, dict[str, int]] = {}
            for topic, view in sorted(views.items()):
                for part, seen in view.parts.items():
                    parts.setdefault(part, {})[topic] = seen.messages
            if views:
                messages = sum(sum(counts.values()) for counts in parts.values())
                since = from_ms(min(view.since for view in views.values()))
                found.append(
                    BatchInfo(batch_id=batch_id, state="undecided", parts=parts, messages=messages, since=since)
                )
        for d in self.decisions.all():
            parts = {part: {} for part in d.parts}
            found.append(
                BatchInfo(batch_id=d.batch_id, state="committed", parts=parts, messages=d.count, since=from_ms(d.at))
            )
        return found


def _sink(name: str) -> tuple[str, str]:
    """Return the lock key of a sink, which never equals a batch id."""
    return "sink", name
