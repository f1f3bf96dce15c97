"""The relay's store on Django's ORM: the same transactions as in sql.py, for projects without SQLAlchemy."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import Case, Exists, OuterRef, Q, Value, When
from django.db.models.functions import Length

from heapline.client.outbox.django.models import OutboxLane, OutboxMessage
from heapline.client.outbox.rows import MESSAGE_COLUMNS, Row
from heapline.client.outbox.store import Claimed, Turn, cut, number

T = TypeVar("T")
_ROW = ("id", "epoch", "seq", *MESSAGE_COLUMNS)


class DjangoStore:
    """`OutboxRelay(DjangoStore(), broker)`; `using` names the database."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._using = using

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(self._transact, work, args)

    def _transact(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        """In a thread of the pool, whose connection would otherwise stay open for as long as the thread."""
        try:
            with transaction.atomic(using=self._using):
                return work(*args)
        finally:
            connections[self._using].close()

    async def take_lane(self, owner: str, now_ms: int, stale_ms: int) -> str:
        return await self._run(self._take_lane, owner, now_ms, stale_ms)

    async def abandoned_lanes(self, stale_ms: int) -> list[str]:
        return await self._run(self._abandoned_lanes, stale_ms)

    async def adopt(self, lane: str, owner: str, now_ms: int, stale_ms: int) -> bool:
        return await self._run(self._adopt, lane, owner, now_ms, stale_ms)

    async def held(self, lane: str) -> list[Row]:
        return await self._run(self._held, lane)

    async def turn(self, turn: Turn) -> Claimed | None:
        return await self._run(self._turn, turn)

    async def give_back(self, lane: str, owner: str) -> None:
        await self._run(lambda: self._lanes().filter(name=lane, owner=owner).update(owner=None))

    async def close(self) -> None:
        pass

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _lanes(self) -> Any:
        return OutboxLane.objects.using(self._using)

    def _rows(self) -> Any:
        return OutboxMessage.objects.using(self._using)

    def _free(self, owner: str, stale_ms: int) -> Any:
        return self._lanes().filter(Q(owner=None) | Q(owner=owner) | Q(beat_ms__lt=stale_ms))

    def _take_lane(self, owner: str, now_ms: int, stale_ms: int) -> str:
        mine_first = Case(When(owner=owner, then=Value(0)), default=Value(1))
        for name in list(self._free(owner, stale_ms).order_by(mine_first, "name").values_list("name", flat=True)[:10]):
            if self._adopt(name, owner, now_ms, stale_ms):
                return str(name)
        name = uuid.uuid4().hex
        self._lanes().create(name=name, owner=owner, beat_ms=now_ms)
        return name

    def _adopt(self, lane: str, owner: str, now_ms: int, stale_ms: int) -> bool:
        return bool(self._free(owner, stale_ms).filter(name=lane).update(owner=owner, beat_ms=now_ms) == 1)

    def _abandoned_lanes(self, stale_ms: int) -> list[str]:
        holds = Exists(self._rows().filter(lane=OuterRef("name")))
        gone = self._lanes().filter(Q(owner=None) | Q(beat_ms__lt=stale_ms)).filter(holds)
        return list(gone.values_list("name", flat=True))

    # -- rows ------------------------------------------------------------------------------------------------------

    def _held(self, lane: str) -> list[Row]:
        return [Row(*row) for row in self._rows().filter(lane=lane).order_by("topic", "seq").values_list(*_ROW)]

    def _turn(self, turn: Turn) -> Claimed | None:
        if self._lanes().filter(name=turn.lane, owner=turn.owner).update(beat_ms=turn.now_ms) != 1:
            return None
        held = self._rows().filter(lane=turn.lane)
        free: dict[str, Any] = {"lane": None, "epoch": None, "seq": None}
        if turn.sent:
            held.filter(id__in=turn.sent).delete()
        for id, error in turn.failed:
            held.filter(id=id).update(**free, failed_ms=turn.now_ms, error=error)
        if turn.returned:
            held.filter(id__in=turn.returned).update(**free)
        return self._claim(turn) if turn.rows_max else Claimed([], [])

    def _claim(self, turn: Turn) -> Claimed:
        waiting = self._rows().filter(lane=None, failed_ms=None)
        look = waiting.exclude(topic__in=turn.without) if turn.without else waiting
        features = connections[self._using].features
        if features.has_select_for_update:
            look = look.select_for_update(skip_locked=features.has_select_for_update_skip_locked)
        found = look.order_by("id").values_list("id", "topic", Length("payload"))[: turn.rows_max]
        taken, unknown = cut(list(found), turn)
        if not taken:
            return Claimed([], unknown)
        numbers = number(taken, turn.lines)
        epochs = [When(id=id, then=Value(epoch)) for id, (epoch, _) in numbers.items()]
        seqs = [When(id=id, then=Value(seq)) for id, (_, seq) in numbers.items()]
        mine = waiting.filter(id__in=list(numbers))
        if mine.update(lane=turn.lane, epoch=Case(*epochs), seq=Case(*seqs)) != len(taken):
            # raising rolls the claim back
            raise RuntimeError("two relays claimed the same rows; this database does not support row locks")
        rows = self._rows().filter(id__in=list(numbers)).order_by("id").values_list(*_ROW)
        return Claimed([Row(*row) for row in rows], unknown)
