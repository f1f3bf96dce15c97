"""Operations from Spark: rows name messages that wait in the queue, and what becomes of them.

`reschedule` and `cancel`, many calls under way at a time. They are not one step, and need not be: doing one twice is as
good as once, so a task that is tried again does no harm. A message that is gone, or out with a worker, cannot be
changed any more; that is counted and no error, unless `failOnMissing` says so, since the queue goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from heapline.broker import Broker
from heapline.engine.columns import check_moment
from heapline.errors import BadRequest, HeaplineError, MessageLeased, MessageNotFound
from heapline.logs import Log
from heapline.spark.bad_rows import BadRows
from heapline.spark.options import Target
from heapline.spark.outgoing import BadRow
from heapline.spark.write_options import CANCEL, WriteOptions
from heapline.ulid import parse_id

UNDER_WAY = 500
DEADLINE = 120.0  # seconds that a call may take, with all its repetitions
log = Log("heapline.spark")


@dataclass(frozen=True)
class Changed:
    """What became of the messages that a task named."""

    changed: int = 0
    gone: int = 0
    leased: int = 0

    def __add__(self, other: Changed) -> Changed:
        return Changed(self.changed + other.changed, self.gone + other.gone, self.leased + other.leased)

    @property
    def missed(self) -> int:
        return self.gone + self.leased


class MessagesMissing(BadRequest):
    """`failOnMissing`, and some were."""

    def __init__(self, operation: str, found: Changed) -> None:
        super().__init__(
            f"{operation}: {found.gone} message(s) are gone and {found.leased} are out with workers; the other "
            f"{found.changed} that were tried are changed. Set failOnMissing=false to go on without them"
        )


def change(options: WriteOptions, batches: Iterable[Any]) -> Changed:
    """What a task does with its rows."""
    return asyncio.run(_change(options, batches))


def tell(options: WriteOptions, found: Sequence[Changed]) -> Changed:
    """Of all tasks: said in the log, since Spark has no other way to give an answer to who writes."""
    total = sum(found, Changed())
    say = log.warning if total.missed else log.info
    say(options.operation, changed=total.changed, gone=total.gone, leased=total.leased)
    return total


async def _change(options: WriteOptions, batches: Iterable[Any]) -> Changed:
    total, first = Changed(), 0
    async with _connected(options.target) as hl:
        for batch in batches:
            wanted, bad = [], []
            for row, facts in enumerate(batch.to_pylist()):
                try:
                    wanted.append(_asked(options, facts))
                except HeaplineError as error:
                    bad.append(BadRow(row, facts.get("topic") or options.topic, str(error)))
            if bad:
                raise BadRows(bad, first)
            for some in _chunks(wanted):
                total += await _carry_out(hl, options, some)
            first += batch.num_rows
    return total


def _connected(target: Target) -> Any:
    from heapline.client.sdk import ConnectedBroker
    from heapline.client.target import ClientTls

    tls = None if target.ca_file is None else ClientTls(ca=target.ca_file)
    endpoints = (target.url or "").split(",")
    return ConnectedBroker(endpoints, credential=target.api_key, tls=tls, deadline=DEADLINE)


def _asked(options: WriteOptions, facts: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
    """Topic, id and what is to be changed, of a row."""
    topic = facts.get("topic") or options.topic
    if topic is None:
        raise BadRequest("topic is null")
    named = facts["id"] if "id" in facts else facts["message_id"]
    if named is None:
        raise BadRequest("it names no message: message_id is null")
    wanted = {name: facts[name] for name in ("priority", "deliver_at") if facts.get(name) is not None}
    if options.operation != CANCEL and not wanted:
        raise BadRequest("nothing to change: priority and deliver_at are null")
    if "deliver_at" in wanted:
        check_moment("deliver_at", wanted["deliver_at"])
    return topic, parse_id(named), wanted


async def _carry_out(hl: Broker, options: WriteOptions, asked: Sequence[tuple[str, int, dict[str, Any]]]) -> Changed:
    calls = [
        hl.cancel(topic, id) if options.operation == CANCEL else hl.reschedule(topic, id, **wanted)
        for topic, id, wanted in asked
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    gone = sum(isinstance(answer, MessageNotFound) for answer in answers)
    leased = sum(isinstance(answer, MessageLeased) for answer in answers)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, MessageNotFound | MessageLeased):
            raise answer
    found = Changed(len(answers) - gone - leased, gone, leased)
    if found.missed and options.fail_on_missing:
        raise MessagesMissing(options.operation, found)
    return found


def _chunks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(rows), UNDER_WAY):
        yield rows[start : start + UNDER_WAY]
