"""From a lease to the one who asked: records are read, messages built and handed over once their leases are durable.

Reading begins while the leases are being made durable, for all pops of a turn at once. What nobody waits for any more
is given back, and a record that does not check is set aside as a dead letter and never delivered. Which messages a pop
gets was decided before (delivery.py); when its answer may go out is the committer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from heapline.engine.committer import refuse
from heapline.engine.delivery import PopCall, build_answers
from heapline.errors import TopicReloading
from heapline.logs import Log
from heapline.model import Message, Now, Popped

if TYPE_CHECKING:
    from heapline.broker import Broker
    from heapline.engine.runner import TopicRunner

log = Log("heapline.engine")


class Handover:
    def __init__(self, runner: TopicRunner, broker: Broker) -> None:
        self._runner = runner
        self._broker = broker

    def read(self, calls: list[PopCall]) -> None:
        """Get the records while the leases are being made durable: those of all pops of a turn at once."""
        positions = np.array([p for call in calls for p in call.positions], dtype=np.int64)
        records, missing = self._runner.journal.cached(positions)
        load = self._runner.load(positions[missing]) if len(missing) else None

        def hand_over(_: Any = None) -> None:
            if load is not None:
                if load.cancelled() or load.exception() is not None:
                    for call in calls:
                        refuse(call.future, TopicReloading(self._runner.name, f"records could not be read: {load}"))
                        self.give_back(call)
                    return
                records.fill(missing, load.result())
            answers = build_answers(calls, records, self._runner.topic, self._broker)
            start = 0
            for call, answer in zip(calls, answers, strict=True):
                end = start + len(call.ids)
                bad = [i - start for i in records.bad if start <= i < end] if records.bad else []
                self._hand_over(call, answer, bad)
                start = end
            for fact in records.bad.values():
                log.error(
                    "record corrupt", topic=self._runner.name, path=fact.path, offset=fact.offset, detail=fact.detail
                )

        def deliver() -> None:
            if load is None or load.done():
                hand_over()
            else:
                load.add_done_callback(hand_over)

        self._runner.committer.answer(deliver, [call.future for call in calls])

    def _hand_over(self, call: PopCall, answer: list[Message] | Popped, bad: list[int]) -> None:
        if bad:
            self._set_aside(call, bad)
            if isinstance(answer, Popped):
                answer = answer.without(bad)
            else:
                answer = [m for i, m in enumerate(answer) if i not in bad]
        if call.future.done():  # the one who asked has gone: give the messages back at once
            self.give_back(call)
        elif len(bad) < len(call.ids):
            call.future.set_result(answer)
        else:  # all of them were damaged and have been set aside: look again
            call.ids, call.tokens, call.positions = [], [], []
            self._runner.pop_again(call)

    def give_back(self, call: PopCall) -> None:
        if call.request_id is not None:
            return  # whoever named the pop may be repeating it, or have repeated it, and then holds these leases

        def decide(now: Now) -> None:
            for partition, ids, tokens in self._runner.by_partition(call.ids, call.tokens):
                decision = partition.decide_release(ids, tokens, now, self._runner.topic.take_seq(len(ids)))
                self._runner.emit_decision(partition, decision, now)

        self._runner.later(decide)

    def _set_aside(self, call: PopCall, bad: list[int]) -> None:
        """Records that do not check are never delivered: they become dead letters."""
        self._runner.counters.corrupt += len(bad)
        bad_ids, bad_tokens = [call.ids[i] for i in bad], [call.tokens[i] for i in bad]

        def decide(now: Now) -> None:
            for partition, ids, tokens in self._runner.by_partition(bad_ids, bad_tokens):
                decision = partition.decide_bury(ids, tokens, now, "record corrupt", keep=True)
                self._runner.emit_decision(partition, decision, now)

        self._runner.later(decide)
