"""A worker's side of leading: taking part in the election, and leading while it lasts.

The lead is given up by our own clock when it was not renewed. What a leader does is decided in leading.py and carried
out by directing.py; here it is only driven.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from heapline.assign.beating import patience, within
from heapline.assign.board import Board
from heapline.assign.config import Config
from heapline.assign.directing import Director
from heapline.assign.document import Document
from heapline.assign.election import ElectionAgent, NumberedElection
from heapline.assign.errors import ElectionFailed
from heapline.assign.kv import KV, Entry
from heapline.assign.leading import Leading
from heapline.assign.leases import GUARD
from heapline.assign.member import Member
from heapline.assign.model import Partition
from heapline.assign.records import worker_key
from heapline.assign.sources import PartitionSource, listed
from heapline.assign.strategies import AssignmentStrategy
from heapline.logs import Log

log = Log("heapline.assign")

ROUNDS_MAX = 20  # steps of leading without a pause


class Office:
    """`news` is set when there may be something to do for whoever drives it."""

    def __init__(
        self, config: Config, kv: KV, source: PartitionSource, strategy: AssignmentStrategy, election: ElectionAgent,
        clock: Callable[[], float], board: Board, news: asyncio.Event,
    ) -> None:  # fmt: skip
        self._config, self._kv, self._source, self._strategy = config, kv, source, strategy
        self._election, self._clock, self._board, self._news = election, clock, board, news
        self._patience = patience(config)
        self._until = -math.inf
        self._partitions: tuple[Partition, ...] | None = None
        self._director: Director | None = None
        self._eyed: tuple[Entry, float] | None = None  # a leader's key as worker, and when it was seen so first
        self.taken = asyncio.Event()  # we lead
        self.list_wanted = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        return self._director is not None and self._clock() < self._until

    @property
    def is_new(self) -> bool:
        """We have just begun to lead, and have read nothing yet."""
        return self._director is not None and self._director.leading.document is None

    @property
    def document(self) -> Document | None:
        return None if self._director is None else self._director.leading.document

    # --- the election

    async def elect(self, member: Member, since: float) -> None:
        """Renew the lead, or ask for it. `since`: when our process came into being."""
        sent_at = self._clock()
        lease = float(self._config.heartbeat_ttl)
        if self.is_leader:
            try:
                await self._election.renew_leadership()
            except ElectionFailed:
                await self.resign()
                raise
            self._until = sent_at + lease * (1 - GUARD)
            return
        await self.resign()
        sent_at = self._clock()
        if await self._election.request_leadership(member.worker, lease):
            self._until = sent_at + lease * (1 - GUARD)
            self._take(member, since)

    def _take(self, member: Member, since: float) -> None:
        term = self._election.epoch if isinstance(self._election, NumberedElection) else None
        leading = Leading(self._config, member.session, since, term)
        if self._partitions is not None:
            leading.see_partitions(self._partitions)
        self._director = Director(self._kv, self._config, self._clock, leading, self._strategy, self._planned)
        if self._eyed is not None:
            self._director.feed(*self._eyed)
            self._eyed = None
        log.info("assign.leads", worker=member.worker)
        self._board.leads(member.worker)
        self.taken.set()
        self.list_wanted.set()
        self._news.set()

    async def resign(self) -> None:
        if self._director is None:
            return
        self._director, self._until = None, -math.inf
        self.taken.clear()
        self._board.lead_no_more()
        self._board.leads("")
        with contextlib.suppress(Exception):  # whatever an agent raises: the lead ends by time, too
            await within(self._patience, self._election.release_leadership())

    # --- readings

    async def read_workers(self, document: Document | None) -> None:
        """A leader looks at all workers. The others keep an eye on the leader itself: whoever succeeds it then knows
        already for how long it has been silent, and need not wait for another lease."""
        if self._director is not None:
            await self._director.list_workers()
        elif document is not None and (leader := document.written_by()) is not None:
            entry = await within(self._patience, self._kv.get(worker_key(leader)))
            last = None if self._eyed is None else self._eyed[0]
            if entry is not None and (last is None or last.key != entry.key or last.revision < entry.revision):
                self._eyed = (entry, self._clock())

    def see_worker(self, entry: Entry) -> None:
        if self._director is not None and self._director.feed(entry):
            self._news.set()

    def see_document(self, document: Document | None, revision: int) -> None:
        if self._director is not None:
            self._director.leading.see_document(document, revision, self._clock())
            self._news.set()

    async def list_partitions(self) -> None:
        self._partitions = listed(await within(float(self._config.operation_timeout), self._source.list_partitions()))
        if self._director is not None:
            self._director.leading.see_partitions(self._partitions)
            self._news.set()

    async def keep_listing(self) -> None:
        """Partitions are listed when we begin to lead and when somebody asks for it."""
        failures = 0
        while True:
            await self.list_wanted.wait()
            self.list_wanted.clear()
            if self._director is None:
                continue
            try:
                await self.list_partitions()
                failures = 0
            except Exception as error:
                self._board.tell(error)
                await asyncio.sleep(self._config.retry.delay(failures))
                failures += 1
                self.list_wanted.set()

    # --- leading

    async def lead(self) -> float:
        """All that can be done now; the moment at which to look again."""
        for _ in range(ROUNDS_MAX):
            director = self._director
            if director is None:
                return math.inf
            decision = director.leading.look(self._clock())
            if decision.deposed and isinstance(self._election, NumberedElection):
                assert director.leading.document is not None
                self._election.stay_above(director.leading.document.epoch)
            if decision.deposed or not self.is_leader:
                await self.resign()
                return math.inf
            if decision.refresh:
                self.list_wanted.set()
            self._board.lead(decision.state)
            if not await director.carry_out(decision):
                return decision.wake_at
        return self._clock()

    def _planned(self, seconds: float, affinity: float) -> None:
        self._board.metrics.record_assignment_calculation_time(seconds)
        self._board.metrics.record_affinity_score(affinity)
