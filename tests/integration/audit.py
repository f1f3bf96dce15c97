"""Verify a topic with one partition independently: replay its whole log with the simplest possible model.

Every event must be valid in the state before it, pops must take the best first, timers must not be early, and at the
end the model must agree with the engine. This module uses nothing of heapline.core.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from typing import Any

import heapline


class LogAudit:
    def __init__(self) -> None:
        self.priority: dict[int, int] = {}
        self.ready: list[tuple[int, int]] = []  # sorted: priority, id
        self.delayed: dict[int, int] = {}  # id -> due
        self.leased: dict[int, list[int]] = {}  # id -> token, deadline
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self.tags: dict[int, str] = {}
        self.happened: set[tuple[str, int, int]] = set()  # how, id, token
        self.rows = 0

    async def read(self, hl: heapline.Broker, topic: str) -> None:
        async for frame in hl.read_log(topic):
            for event in frame.events:
                assert event.offset == self.rows, "offsets are not dense"
                self.rows += event.row_count
                getattr(self, f"_{event.kind}")(event, frame.time_ms)

    def states(self) -> Counter[str]:
        return Counter(
            {"ready": len(self.ready), "delayed": len(self.delayed), "leased": len(self.leased), "dead": len(self.dead)}
        )

    def _wait(self, id: int, due: int) -> None:
        if due:
            self.delayed[id] = due
        else:
            insort(self.ready, (self.priority[id], id))

    def _enqueued(self, event: Any, _: int) -> None:
        columns = event.columns
        for id, priority, due, payload in zip(
            columns["ids"].tolist(), columns["priority"].tolist(), columns["due"].tolist(), event.payloads, strict=True
        ):
            assert id not in self.priority, f"message {id} was enqueued twice"
            self.priority[id] = priority
            self.tags[id] = payload.partition(b" ")[0].decode()
            self._wait(id, due)

    def _fired(self, event: Any, at: int) -> None:
        for id in event.columns["ids"].tolist():
            due = self.delayed.pop(id)
            assert due <= at, f"NeverEarly: message {id} fired {due - at} ms early"
            self._wait(id, 0)

    def _leased(self, event: Any, _: int) -> None:
        ids, tokens = event.columns["ids"].tolist(), event.columns["tokens"].tolist()
        best = [id for _, id in self.ready[: len(ids)]]
        assert ids == best, f"Order: {ids} were leased, the best were {best}"
        del self.ready[: len(ids)]
        for id, token, deadline in zip(ids, tokens, event.columns["deadlines"].tolist(), strict=True):
            self.leased[id] = [token, deadline]
            self.happened.add(("pop", id, token))

    def _lease_expired(self, event: Any, at: int) -> None:
        for id, due in zip(event.columns["ids"].tolist(), event.columns["dues"].tolist(), strict=True):
            _, deadline = self.leased.pop(id)
            assert deadline <= at, f"SingleLease: the lease of {id} ended {deadline - at} ms early"
            self._wait(id, due)

    def _end(self, event: Any, how: str) -> list[int]:
        ids: list[int] = event.columns["ids"].tolist()
        for id, token in zip(ids, event.columns["tokens"].tolist(), strict=True):
            assert self.leased.pop(id)[0] == token, f"{how} of message {id} with a token that is not that of its lease"
            self.happened.add((how, id, token))
        return ids

    def _acked(self, event: Any, _: int) -> None:
        self.gone.update(self._end(event, "ack"))

    def _nacked(self, event: Any, _: int) -> None:
        for id, due in zip(self._end(event, "nack"), event.columns["dues"].tolist(), strict=True):
            self._wait(id, due)

    def _released(self, event: Any, _: int) -> None:
        for id in self._end(event, "release"):
            self._wait(id, 0)

    def _extended(self, event: Any, _: int) -> None:
        columns = event.columns
        for id, token, deadline in zip(
            columns["ids"].tolist(), columns["tokens"].tolist(), columns["deadlines"].tolist(), strict=True
        ):
            assert self.leased[id][0] == token
            assert deadline >= self.leased[id][1], f"the lease of {id} was shortened"
            self.leased[id][1] = deadline

    def _dead_lettered(self, event: Any, _: int) -> None:
        for id in event.columns["ids"].tolist():
            token, _ = self.leased.pop(id)
            # A nack past the last retry is recorded only as this, and so is a burial.
            self.happened |= {("bury", id, token), ("nack", id, token)}
            self.dead.add(id)

    def _replayed(self, event: Any, _: int) -> None:
        for id, due in zip(event.columns["ids"].tolist(), event.columns["dues"].tolist(), strict=True):
            self.dead.remove(id)
            self._wait(id, due)

    def has(self, id: int) -> str:
        """Return the message's state."""
        if id in self.leased:
            return "leased"
        if id in self.delayed:
            return "delayed"
        if id in self.dead:
            return "dead"
        entry = (self.priority.get(id, 0), id)
        at = bisect_left(self.ready, entry)
        if at < len(self.ready) and self.ready[at] == entry:
            return "ready"
        return "gone" if id in self.gone else "unknown"
