"""A client's own numbers on one topic: what it enqueues is recognised when it has to be sent again.

The client's name is random, so its first epoch is nobody else's and begins with its first message; no call opens it.
Numbers are given once. They are closed when their call ends, whatever became of it, since nobody sends them again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from heapline.client.checks import is_plain
from heapline.client.patience import pauses
from heapline.client.retrying import RetryingCalls
from heapline.client.wire import BATCH_BYTES
from heapline.errors import HeaplineError, IdempotencyConflict, StaleEpoch, StaleSequence
from heapline.model import Enqueued, Outgoing
from heapline.producer import Line, in_doubt, numbered, told_once
from heapline.wire import shapes
from heapline.wire.columns import ints, pack_outgoing, pack_plain
from heapline.wire.schema import pb

EPOCH = 1


class Numbered:
    def __init__(self, topic: str, calls: RetryingCalls) -> None:
        self._topic, self._calls = topic, calls
        self._begin()

    def _begin(self) -> None:
        self._name = f"sdk-{secrets.token_hex(8)}"
        self._line = Line(EPOCH)

    async def send(
        self, messages: Sequence[Outgoing], atomic: bool, until: float, *, begun_anew: bool = False
    ) -> list[Enqueued]:
        """Enqueue them; until the deadline, as often as it takes to know what became of them."""
        if not atomic and len(messages) > 1 and sum(len(m.payload) for m in messages) > BATCH_BYTES:
            half = len(messages) // 2
            return await self.send(messages[:half], False, until) + await self.send(messages[half:], False, until)
        name, line = self._name, self._line
        identity = pb.Identity(producer_id=name, epoch=EPOCH, answered_below=line.answered_below)
        first = line.take(len(messages))
        request = pb.EnqueueBatchRequest(
            topic=self._topic, columns=_columns(messages, first), each_alone=not atomic, identity=identity
        )
        try:
            results, repeated = await self._until_known(request, until)
        except HeaplineError as error:
            if begun_anew or error.repeated or not _is_used_up(error, None):
                raise
            results, repeated = [Enqueued(0, error=error)] * len(messages), False
        finally:
            line.answered(first)
        results = told_once(messages, results)
        if repeated or begun_anew:
            return results
        return await self._send_refused(messages, results, atomic, until, name)

    async def _until_known(self, request: Any, until: float) -> tuple[list[Enqueued], bool]:
        loop, repeated = asyncio.get_running_loop(), False
        for pause in pauses():
            told, doubt = await self._calls.ask("EnqueueBatch", request, until)
            repeated = repeated or doubt
            results = shapes.unpack_results(told)
            if not told.errors or not any(in_doubt(r.error) for r in results) or loop.time() + pause >= until:
                return results, repeated
            repeated = True
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: pauses never end")

    async def _send_refused(
        self, messages: Sequence[Outgoing], results: list[Enqueued], atomic: bool, until: float, name: str
    ) -> list[Enqueued]:
        """Numbers that somebody else has used up (a copy of this process, restored from an image) did not go in, if
        they were sent but once. They go again, under a new name."""
        rows = [i for i, r in enumerate(results) if r.error is not None and _is_used_up(r.error, messages[i])]
        if not rows:
            return results
        if self._name == name:
            self._begin()
        again = await self.send([messages[i] for i in rows], atomic, until, begun_anew=True)
        for i, result in zip(rows, again, strict=True):
            results[i] = result
        return results


def _is_used_up(error: Exception, message: Outgoing | None) -> bool:
    if isinstance(error, IdempotencyConflict):
        return error.identity.startswith("sequence ") and (message is None or message.idempotency_key is None)
    return isinstance(error, StaleEpoch | StaleSequence)


def _columns(messages: Sequence[Outgoing], first: int) -> Any:
    if not is_plain(messages):
        return pack_outgoing(numbered(messages, first))
    columns = pack_plain([m.payload for m in messages], [m.priority for m in messages])
    columns.seqs = ints(range(first, first + len(messages)))
    return columns
