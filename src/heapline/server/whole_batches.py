"""Messages over several topics, all or none, for callers who know nothing of prepared batches.

One topic's messages are an atomic batch. Several topics' are prepared under an id that nobody else knows and committed
at once. So nobody else can end such a batch that was prepared and not decided, because a topic failed or this process
was killed: until its timeout, a day, the idempotency keys in it would be in doubt, and the very retry that the caller
was told to make would be refused. Therefore it is dropped by whoever comes next, those of earlier runs included; a
batch that turns out to be committed stays, of course.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence

from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import BatchDecided, HeaplineError
from heapline.model import Enqueued, Outgoing

PREFIX = "mqueue:"
PART = "all"


class WholeBatches:
    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self._run = f"{PREFIX}{secrets.token_hex(8)}:"
        self._left: set[str] = set()  # prepared, perhaps, and to be dropped
        self._knows_earlier = False  # whether those of earlier runs were looked for

    async def enqueue(self, shares: Mapping[str, Sequence[Outgoing]]) -> dict[str, list[Enqueued]]:
        if self._left or not self._knows_earlier:
            await self._drop_left()
        if len(shares) == 1:
            ((topic, messages),) = shares.items()
            return {topic: await self._broker.enqueue_batch(topic, messages)}
        batch_id = self._run + secrets.token_hex(16)
        try:
            answers = await self._broker.prepare_batch(batch_id, PART, shares)
            await self._broker.commit_batch(batch_id, [PART])
        except HeaplineError:
            self._left.add(batch_id)
            await self._drop_left()
            raise
        except BaseException:
            self._left.add(batch_id)  # whoever is cancelled does not wait for more
            raise
        self._broker.forget_batch(batch_id)
        return answers

    async def _drop_left(self) -> None:
        """As far as it goes now: while a topic is away, nobody knows what it holds."""
        with contextlib.suppress(HeaplineError):
            if not self._knows_earlier:
                self._left |= {batch_id for batch_id in await self._undecided() if not batch_id.startswith(self._run)}
                self._knows_earlier = True
            for batch_id in list(self._left):
                try:
                    await self._broker.abort_batch(batch_id)
                except BatchDecided:  # its caller was not told, but it is in
                    self._broker.forget_batch(batch_id)
                self._left.discard(batch_id)

    async def _undecided(self) -> list[str]:
        infos = await self._broker.list_batches()
        return [i.batch_id for i in infos if i.state == "undecided" and i.batch_id.startswith(PREFIX)]
