"""Enqueue to several topics atomically, for callers that do not use prepared batches.

The messages of one topic are an atomic batch. Those of several topics are prepared under an id that no one else knows,
and committed at once. If a topic fails, or this process is killed, such a batch stays prepared and undecided, and no
other caller can end it. Until its timeout, a day, the idempotency keys in it would be in doubt, and the retry that the
error advises would be rejected. So the next enqueue drops it, including batches of earlier runs. A batch that
turns out to be committed stays.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence

from heapline.contract.batches import AbortBatch, CommitBatch, ForgetBatch, ListBatches, PrepareBatch, Share
from heapline.contract.broker import Broker
from heapline.contract.context import HERE, Context
from heapline.contract.errors import BatchDecided, HeaplineError
from heapline.contract.message import Enqueued, Outgoing
from heapline.contract.messages import EnqueueBatch, pack_messages
from heapline.contract.results import enqueued

PREFIX = "mqueue:"
PART = "all"


class AtomicEnqueue:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._run = f"{PREFIX}{secrets.token_hex(8)}:"
        self._left: set[str] = set()  # batches that may be prepared and must be dropped
        self._knows_earlier = False  # whether those of earlier runs were looked up

    async def enqueue(
        self, shares: Mapping[str, Sequence[Outgoing]], context: Context = HERE
    ) -> dict[str, list[Enqueued]]:
        if self._left or not self._knows_earlier:
            await self._drop_left()
        if len(shares) == 1:
            ((topic, messages),) = shares.items()
            return {topic: enqueued(await self._broker.do(EnqueueBatch(topic, pack_messages(messages)), context))}
        batch_id = self._run + secrets.token_hex(16)
        packed = [Share(topic, pack_messages(messages)) for topic, messages in shares.items()]
        try:
            prepared = await self._broker.do(PrepareBatch(batch_id, PART, packed), context)
            await self._broker.do(CommitBatch(batch_id, [PART]), context)
        except HeaplineError:
            self._left.add(batch_id)
            await self._drop_left()
            raise
        except BaseException:
            self._left.add(batch_id)  # a cancelled caller does not wait for more
            raise
        await self._broker.do(ForgetBatch(batch_id))
        return {topic: enqueued(share.results) for topic, share in zip(shares, prepared.shares, strict=True)}

    async def _drop_left(self) -> None:
        """Drop what is left, as far as possible now: a topic that is being reloaded cannot say what it holds."""
        with contextlib.suppress(HeaplineError):
            if not self._knows_earlier:
                self._left |= {batch_id for batch_id in await self._undecided() if not batch_id.startswith(self._run)}
                self._knows_earlier = True
            for batch_id in list(self._left):
                try:
                    await self._broker.do(AbortBatch(batch_id))
                except BatchDecided:  # it is committed, although its caller received an error
                    await self._broker.do(ForgetBatch(batch_id))
                self._left.discard(batch_id)

    async def _undecided(self) -> list[str]:
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = await self._broker.do(ListBatches(cursor))
            found += [i.batch_id for i in page.items if i.state == "undecided" and i.batch_id.startswith(PREFIX)]
            cursor = page.cursor
            if cursor is None:
                return found
