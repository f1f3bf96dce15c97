"""A client's own numbers on one topic: what it enqueues is recognised when it has to be sent again.

The client's name is random, so its first epoch is nobody else's and begins with its first message; no call opens it.
Numbers are given once. They are closed when their call ends, whatever became of it, since nobody sends them again.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Awaitable, Iterable, Sequence
from itertools import accumulate, islice
from typing import Any, cast

from heapline.client.checks import is_plain
from heapline.client.patience import pauses
from heapline.client.retrying import RetryingCalls
from heapline.client.wire import BATCH_BYTES
from heapline.config import PASSING
from heapline.errors import (
    ConflictError,
    HeaplineError,
    IdempotencyConflict,
    RequestError,
    ResourceExhausted,
    StaleEpoch,
    StaleSequence,
)
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
        self._name = f"{PASSING}{secrets.token_hex(8)}"  # forgotten some time after its last message
        self._line = Line(EPOCH)

    async def send(
        self, messages: Sequence[Outgoing], atomic: bool, until: float, *, begun_anew: bool = False
    ) -> list[Enqueued]:
        """Enqueue them; until the deadline, as often as it takes to know what became of them."""
        if not atomic and len(messages) > 1 and sum(len(m.payload) for m in messages) > BATCH_BYTES:
            half = len(messages) // 2
            return await self._piece(messages[:half], until) + await self._piece(messages[half:], until)
        name, line = self._name, self._line
        identity = self._identity()
        first = line.take(len(messages))
        try:
            results, repeated = await self._until_known(self._request(messages, first, atomic, identity), until)
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

    async def _piece(self, messages: Sequence[Outgoing], until: float) -> list[Enqueued]:
        """One of several calls: what goes wrong with it is told of its own messages, for others may have gone in."""
        try:
            return await self.send(messages, False, until)
        except HeaplineError as error:
            return [Enqueued(0, error=copy.copy(error)) for _ in messages]

    async def send_joined(
        self, batches: Sequence[Sequence[Outgoing]], until: float
    ) -> list[list[Enqueued] | Exception]:
        """Batches of which each is all or none, in one call; if that is refused, each for itself. What became of each.

        Where the refused call had been repeated, an earlier try of it may yet go in. Each then goes again under the
        numbers that it has: so none is doubled, and none is told what was wrong with another.
        """
        together = [message for batch in batches for message in batch]
        line, identity = self._line, self._identity()
        first = line.take(len(together))
        try:
            results, _ = await self._until_known(self._request(together, first, True, identity), until)
            rest = iter(told_once(together, results))
            return [list(islice(rest, len(batch))) for batch in batches]
        except (RequestError, ConflictError, ResourceExhausted) as error:
            if not error.repeated:
                return await _each(self.send(batch, True, until) for batch in batches)
            starts = accumulate(map(len, batches), initial=first)
            return await _each(
                self._send_again(batch, start, identity, until) for batch, start in zip(batches, starts, strict=False)
            )
        finally:
            line.answered(first)

    async def _send_again(self, batch: Sequence[Outgoing], first: int, identity: Any, until: float) -> list[Enqueued]:
        results, _ = await self._until_known(self._request(batch, first, True, identity), until)
        return told_once(batch, results)

    def _identity(self) -> Any:
        return pb.Identity(producer_id=self._name, epoch=EPOCH, answered_below=self._line.answered_below)

    def _request(self, messages: Sequence[Outgoing], first: int, atomic: bool, identity: Any) -> Any:
        return pb.EnqueueBatchRequest(
            topic=self._topic, columns=_columns(messages, first), each_alone=not atomic, identity=identity
        )

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


async def _each(calls: Iterable[Awaitable[list[Enqueued]]]) -> list[list[Enqueued] | Exception]:
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, Exception):
            raise one
    return cast(list[list[Enqueued] | Exception], found)


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
