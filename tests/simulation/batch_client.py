"""A seeded client that prepares, commits and aborts batches, like a sink with several attempts at each task.

Parts span one topic or two; an attempt may be prepared twice under two names with the same messages, of which the
driver names one; unanswered calls are repeated, abandoned, or decided anyway. All calls are in the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.contract.message import Enqueued
from tests.simulation.clients import Numbered, Producer

Shares = dict[str, list[Numbered]]
OPEN_MAX = 4


class Batcher(Producer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._batches: dict[str, dict[str, Shares]] = {}  # not known to be decided
        self._named: dict[str, list[str]] = {}  # the parts named by an unanswered commit
        self._made = 0

    async def act(self, topic: str) -> None:
        rng = self.rng
        batches = sorted(self._batches)
        if not batches or (len(batches) < OPEN_MAX and rng.random() < 0.3):
            self._made += 1
            self._batches[f"{self.name}-batch-{self._made}"] = {}
            batches = sorted(self._batches)
        batch = rng.choice(batches)
        kind = rng.choice(("prepare", "prepare", "prepare", "commit", "commit", "abort"))
        if batch in self._named or (kind == "commit" and self._batches[batch]):
            await self._commit(batch)
        elif kind == "abort" and self._batches[batch]:
            await self._abort(batch)
        else:
            await self._prepare(batch, topic)

    async def _prepare(self, batch: str, topic: str) -> None:
        rng, parts = self.rng, self._batches[batch]
        again = rng.choice(sorted(parts)) if parts and rng.random() < 0.3 else None
        if again is not None and rng.random() < 0.5:
            part, shares = again, parts[again]  # repeated unchanged
        else:
            part = f"part-{len(parts)}"
            # Another attempt at the same task has the same messages under the same identities.
            shares = self._new_shares(topic) if again is None or not _identified(parts[again]) else parts[again]
        parts[part] = shares
        sent = {name: [m.sent for m in messages] for name, messages in shares.items()}
        outgoing = {name: [m.outgoing(self.is_fair(name)) for m in messages] for name, messages in shares.items()}
        patience = rng.uniform(0, 0.01) if rng.random() < 0.03 else None
        await self.call(
            "prepare_batch", topic, self.node.hl.prepare_batch(batch, part, outgoing), _reported, patience,
            messages=[m for row in sent.values() for m in row], batch=batch, part=part, shares=sent,
        )  # fmt: skip

    def _new_shares(self, topic: str) -> Shares:
        rng = self.rng
        topics = self.topics if rng.random() < 0.6 else [topic]
        keyed = rng.random() < 0.5
        shares: Shares = {}
        for name in topics:
            messages = [self._message(True, small=True) for _ in range(rng.choice((0, 1, 1, 3, 10)))]
            if keyed:
                messages = [m._replace(idempotency_key=f"key-{m.sent.name}") for m in messages]
            shares[name] = messages
        return shares

    async def _commit(self, batch: str) -> None:
        rng, parts = self.rng, self._batches[batch]
        if batch in self._named:
            if rng.random() < 0.2:  # the driver died; its successor does not know of the commit
                del self._named[batch]
                await self._abort(batch)
                return
            named = self._named[batch]
        else:
            named = rng.sample(sorted(parts), rng.randint(0, len(parts)))
        patience = rng.uniform(0, 0.01) if rng.random() < 0.03 else None
        work = self.node.hl.commit_batch(batch, named)
        call = await self.call("commit_batch", self.topics[0], work, int, patience, batch=batch, parts=named)
        if call.outcome == "unknown":
            self._named[batch] = named
        elif call.outcome == "ok":
            self._named.pop(batch, None)
            if rng.random() < 0.7:  # otherwise it is repeated, or decided differently, later
                del self._batches[batch]

    async def _abort(self, batch: str) -> None:
        work = self.node.hl.abort_batch(batch)
        call = await self.call("abort_batch", self.topics[0], work, int, batch=batch)
        if call.outcome != "unknown":
            self._batches.pop(batch, None)


def _identified(shares: Mapping[str, list[Numbered]]) -> bool:
    return all(m.idempotency_key is not None for messages in shares.values() for m in messages)


def _reported(answer: dict[str, list[Enqueued]]) -> dict[str, list[tuple[int, bool]]]:
    return {topic: [(row.id, row.duplicate) for row in rows] for topic, rows in answer.items()}
