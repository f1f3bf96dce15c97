"""The relay's store on Django's ORM: the same transactions as in sql.py, for projects without SQLAlchemy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import Case, Exists, OuterRef, Q, Value, When
from django.db.models.functions import Length

from heapline.outbox.django.models import OutboxLane, OutboxMessage
from heapline.outbox.store import MESSAGE_COLUMNS, FreeLane, Row, Turn, number

T = TypeVar("T")
_ROW = ("id", "epoch", "seq", *MESSAGE_COLUMNS)


class DjangoStore:
    """`OutboxRelay(DjangoStore(), broker)`; `using` names the database."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._using = using

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(self._transact, work, args)

    def _transact(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Run in a thread of the pool, and close its connection, which would otherwise stay open."""
        try:
            with transaction.atomic(using=self._using):
                return work(*args)
        finally:
            connections[self._using].close()

    async def free_lanes(self, owner: str, stale_ms: int) -> list[FreeLane]:
        return await self._run(self._free_lanes, owner, stale_ms)

    async def take(self, lane: FreeLane, owner: str, epoch: int, now_ms: int) -> bool:
        return await self._run(self._take, lane, owner, epoch, now_ms)

    async def add_lane(self, name: str, owner: str, epoch: int, now_ms: int) -> None:
        await self._run(lambda: self._lanes().create(name=name, owner=owner, epoch=epoch, beat_ms=now_ms))

    async def held(self, lane: str) -> list[Row]:
        return await self._run(self._held, lane)

    async def turn(self, turn: Turn) -> list[Row] | None:
        return await self._run(self._turn, turn)

    async def give_back(self, lane: str, epoch: int) -> None:
        await self._run(lambda: self._lanes().filter(name=lane, epoch=epoch).update(owner=None))

    async def close(self) -> None:
        pass

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _lanes(self) -> Any:
        return OutboxLane.objects.using(self._using)

    def _rows(self) -> Any:
        return OutboxMessage.objects.using(self._using)

    def _free_lanes(self, owner: str, stale_ms: int) -> list[FreeLane]:
        free = self._lanes().filter(Q(owner=None) | Q(owner=owner) | Q(beat_ms__lt=stale_ms))
        has_rows = Exists(self._rows().filter(lane=OuterRef("name")))
        return [FreeLane(*lane) for lane in free.values_list("name", "owner", "epoch", "beat_ms", has_rows)]

    def _take(self, lane: FreeLane, owner: str, epoch: int, now_ms: int) -> bool:
        unchanged = self._lanes().filter(name=lane.name, epoch=lane.epoch, beat_ms=lane.beat_ms)
        return bool(unchanged.update(owner=owner, epoch=epoch, beat_ms=now_ms) == 1)

    # -- rows ------------------------------------------------------------------------------------------------------

    def _held(self, lane: str) -> list[Row]:
        return [Row(*row) for row in self._rows().filter(lane=lane).order_by("topic", "seq").values_list(*_ROW)]

    def _turn(self, turn: Turn) -> list[Row] | None:
        owned = self._lanes().filter(name=turn.lane, epoch=turn.owned_epoch)
        if owned.update(epoch=turn.epoch, beat_ms=turn.now_ms) != 1:
            return None
        held = self._rows().filter(lane=turn.lane)
        free: dict[str, Any] = {"lane": None, "epoch": None, "seq": None}
        if turn.sent:
            held.filter(id__in=turn.sent).delete()
        for id, error in turn.failed:
            held.filter(id=id).update(**free, failed_ms=turn.now_ms, error=error)
        if turn.returned:
            held.filter(id__in=turn.returned).update(**free)
        return self._claim(turn) if turn.rows_max else []

    def _claim(self, turn: Turn) -> list[Row]:
        waiting = self._rows().filter(lane=None, failed_ms=None)
        look = waiting.exclude(topic__in=turn.without) if turn.without else waiting
        features = connections[self._using].features
        if features.has_select_for_update:
            look = look.select_for_update(skip_locked=features.has_select_for_update_skip_locked)
        numbers = number(list(look.order_by("id").values_list("id", Length("payload"))[: turn.rows_max]), turn)
        if not numbers:
            return []
        seqs = [When(id=id, then=Value(seq)) for id, seq in numbers.items()]
        mine = waiting.filter(id__in=list(numbers))
        if mine.update(lane=turn.lane, epoch=turn.epoch, seq=Case(*seqs)) != len(numbers):
            raise RuntimeError(
                "two relays claimed the same rows; this database does not support row locks"
            )  # rolls it back
        rows = self._rows().filter(id__in=list(numbers)).order_by("id").values_list(*_ROW)
        return [Row(*row) for row in rows]
