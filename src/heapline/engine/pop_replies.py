"""Answer pops: read the records, build the messages, and send them once their leases are durable.

Reading starts while the leases are being made durable, for all pops of a turn together. Messages whose caller was
cancelled are released. A message whose record is corrupt becomes a dead letter and is never delivered. The messages of
a pop were chosen before (delivery.py); the committer decides when its answer can be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from heapline.contract.columns import NO_ROWS, unpack
from heapline.contract.errors import TopicReloading
from heapline.contract.leases import Leased, LeasedMessages
from heapline.core.events import I64
from heapline.core.ids import partition_of
from heapline.core.now import Now
from heapline.core.record import FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY
from heapline.engine.committer import refuse
from heapline.engine.delivery import LeasedRows, PopCall, rows_of, split_small
from heapline.engine.loaded_topic import RunningTopic
from heapline.engine.topic import Topic
from heapline.journal.records import Records
from heapline.logs import Log

log = Log("heapline.engine")


_await = asyncio.Future.__await__


class PopFuture(asyncio.Future[Leased]):
    """The answer to a pop. If its caller is cancelled between the answer and receiving it, the leases are returned."""

    __slots__ = ("handover", "is_named")  # without a dict and `__init__` it costs as little as a plain future

    handover: Handover
    is_named: bool  # it has a request id, so the caller can repeat it

    def __await__(self) -> Generator[Any, None, Leased]:
        try:
            return (yield from _await(self))
        except asyncio.CancelledError:
            if self.done() and not self.cancelled() and self.exception() is None and not self.is_named:
                messages = self.result().messages
                if messages is not None:
                    self.handover.release(unpack(messages.ids), unpack(messages.tokens))
            raise


class Handover:
    def __init__(self, runner: RunningTopic) -> None:
        self._runner = runner

    def read(self, calls: list[PopCall]) -> None:
        """Read the records of all pops of a turn while the leases are being made durable."""
        leased = rows_of(calls)
        positions = leased.positions
        records, missing = self._runner.loaded.journal.cached(positions)
        load = self._runner.load(positions[missing]) if len(missing) else None

        def hand_over(_: Any = None) -> None:
            if load is not None:
                if load.cancelled() or load.exception() is not None:
                    for call in calls:
                        refuse(call.future, TopicReloading(self._runner.name, f"records could not be read: {load}"))
                        self.give_back(call)
                    return
                records.fill(missing, load.result())
            answers = zip(calls, build_answers(calls, leased, records, self._runner.loaded.topic), strict=True)
            self._send(self._without_corrupt(answers, records) if records.bad else answers)

        def deliver() -> None:
            if load is None or load.done():
                hand_over()
            else:
                load.add_done_callback(hand_over)

        self._runner.loaded.committer.answer(deliver, [call.future for call in calls])

    def _send(self, answers: Iterable[tuple[PopCall, LeasedMessages]]) -> None:
        """Answer pops. If a caller was cancelled, release its messages immediately."""
        name, id_suffix = self._runner.name, self._runner.loaded.topic.id_suffix
        now, latencies = perf_counter(), []
        for call, answer in answers:
            if call.future.done():
                self.give_back(call)
            else:
                call.future.set_result(Leased(name, answer, id_suffix))
                latencies.append(now - call.began)
        self._runner.counters.pop.add(*latencies)

    def _without_corrupt(
        self, answers: Iterable[tuple[PopCall, LeasedMessages]], records: Records
    ) -> Iterator[tuple[PopCall, LeasedMessages]]:
        """Yield the answers without messages whose record is corrupt. A pop that has no other is served again."""
        for fact in records.bad.values():
            log.error("record corrupt", topic=self._runner.name, path=fact.path, offset=fact.offset, detail=fact.detail)
        start = 0
        for call, answer in answers:
            bad = [i - start for i in records.bad if start <= i < start + call.count]
            start += call.count
            if bad:
                self._set_aside(call, bad)
            if len(bad) < call.count or call.future.done():
                yield call, without(answer, bad) if bad else answer
            else:
                call.forget()
                self._runner.pop_again(call)

    def give_back(self, call: PopCall) -> None:
        if call.request_id is not None:
            return  # the caller may be repeating the named pop, or have repeated it, and then holds these leases
        rows = call.rows
        self.release(rows.ids.tolist(), rows.tokens.tolist())

    def release(self, ids: list[int], tokens: list[int]) -> None:
        """Release leases in the next turn, because no caller receives them."""

        def decide(now: Now) -> None:
            for partition, part_ids, part_tokens in self._runner.loaded.topic.by_partition(ids, tokens):
                seq = self._runner.loaded.topic.take_seq(len(part_ids))
                decision = partition.decide_release(part_ids, part_tokens, now, seq)
                self._runner.loaded.emit_decision(partition, decision, now)

        self._runner.later(decide)

    def _set_aside(self, call: PopCall, bad: list[int]) -> None:
        """Make messages with corrupt records dead letters; they are never delivered."""
        self._runner.counters.corrupt += len(bad)
        bad_ids, bad_tokens = call.rows.ids[bad].tolist(), call.rows.tokens[bad].tolist()

        def decide(now: Now) -> None:
            for partition, ids, tokens in self._runner.loaded.topic.by_partition(bad_ids, bad_tokens):
                decision = partition.decide_bury(ids, tokens, now, "record corrupt", keep=True)
                self._runner.loaded.emit_decision(partition, decision, now)

        self._runner.later(decide)


def build_answers(calls: Sequence[PopCall], leased: LeasedRows, records: Records, topic: Topic) -> list[LeasedMessages]:
    """Return the messages of each served pop as columns, in the order of `records`: built per turn, not per pop."""
    rows = records.rows
    flags = rows["flags"]
    keys = headers = fairness_keys = None
    if (flags & (FLAG_KEY | FLAG_HEADERS | FLAG_FAIRNESS)).any():
        lengths = rows["key_len"].tolist(), rows["fairness_len"].tolist()
        smalls = zip(records.smalls, *lengths, flags.tolist(), strict=True)
        keys, fairness_keys, headers = map(list, zip(*[split_small(*small) for small in smalls], strict=True))
    ids = leased.ids
    priorities = np.ascontiguousarray(rows["priority"])
    attempts = leased.positions.astype(np.uint8)  # the lowest byte
    partitions, owners = None, {0}
    if len(topic.partitions) > 1:
        numbers = partition_of(ids).astype(np.uint16)
        partitions, owners = packed(numbers), set(numbers.tolist())
    if any(topic.partitions[number].entries.touched for number in owners):
        priorities = _current_priorities(ids.tolist(), priorities, topic)
    whole = LeasedMessages(
        packed(ids),
        packed(leased.tokens),
        records.payloads,
        packed(priorities),
        packed(attempts),
        packed(np.ascontiguousarray(rows["enqueued_at"])),
        packed(leased.deadlines),
        partitions,
        keys,
        fairness_keys,
        headers,
    )
    return [whole] if len(calls) == 1 else _parts(whole, calls)


def _parts(whole: LeasedMessages, calls: Sequence[PopCall]) -> list[LeasedMessages]:
    """Return the rows of each pop, over the same memory: a turn of many small pops builds its columns once."""
    ids, tokens, payloads, priorities = whole.ids, whole.tokens, whole.payloads, whole.priorities
    attempts, enqueued_ms, deadline_ms = whole.attempts, whole.enqueued_ms, whole.deadline_ms
    partitions, keys, fairness_keys, headers = whole.partitions, whole.keys, whole.fairness_keys, whole.headers
    parts: list[LeasedMessages] = []
    start = 0
    for call in calls:
        end = start + call.count
        rows, wide = slice(start, end), slice(8 * start, 8 * end)
        parts.append(
            LeasedMessages(
                ids[wide],
                tokens[wide],
                payloads[rows],
                priorities[wide],
                attempts[rows],
                enqueued_ms[wide],
                deadline_ms[wide],
                partitions and partitions[2 * start : 2 * end],
                keys and keys[rows],
                fairness_keys and fairness_keys[rows],
                headers and headers[rows],
            )
        )
        start = end
    return parts


def packed(column: Any) -> memoryview:
    """Return a contiguous array as a packed column, over the same memory."""
    return column.data.cast("B") if len(column) else NO_ROWS


def without(answer: LeasedMessages, bad: Sequence[int]) -> LeasedMessages:
    """Return the messages without the rows in `bad`."""
    keep = np.array([i for i in range(len(answer)) if i not in bad], dtype=np.int64)

    def picked(column: Any, form: str = "<i8") -> Any:
        return None if column is None else packed(np.frombuffer(column, dtype=form)[keep])

    def listed(column: Any) -> Any:
        return None if column is None else [column[i] for i in keep.tolist()]

    return LeasedMessages(
        picked(answer.ids),
        picked(answer.tokens),
        listed(answer.payloads),
        picked(answer.priorities),
        picked(answer.attempts, "u1"),
        picked(answer.enqueued_ms),
        picked(answer.deadline_ms),
        picked(answer.partitions, "<u2"),
        listed(answer.keys),
        listed(answer.fairness_keys),
        listed(answer.headers),
    )


def _current_priorities(ids: list[int], priorities: I64, topic: Topic) -> I64:
    """Return the current priorities: a rescheduled message has a different priority than its record."""
    for i, id in enumerate(ids):
        touched = topic.partitions[partition_of(id)].entries.touched.get(id)
        if touched is not None and touched.priority is not None:
            priorities[i] = touched.priority
    return priorities
