"""Answer pops: read the records, build the messages, and send them once their leases are durable.

Reading starts while the leases are being made durable, for all pops of a turn together. Messages whose caller was
cancelled are released. A message whose record is corrupt becomes a dead letter and is never delivered. The messages of
a pop were chosen before (delivery.py); the committer decides when its answer can be sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heapline.contract.errors import TopicReloading
from heapline.contract.leases import Leased, LeasedMessages
from heapline.core.now import Now
from heapline.engine.committer import refuse
from heapline.engine.delivery import PopCall, build_answers, without
from heapline.engine.loaded_topic import RunningTopic
from heapline.logs import Log

log = Log("heapline.engine")


class Handover:
    def __init__(self, runner: RunningTopic) -> None:
        self._runner = runner

    def read(self, calls: list[PopCall]) -> None:
        """Read the records of all pops of a turn while the leases are being made durable."""
        positions = calls[0].positions if len(calls) == 1 else np.concatenate([call.positions for call in calls])
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
            answers = build_answers(calls, records, self._runner.loaded.topic)
            start = 0
            for call, answer in zip(calls, answers, strict=True):
                end = start + call.count
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

        self._runner.loaded.committer.answer(deliver, [call.future for call in calls])

    def _hand_over(self, call: PopCall, answer: LeasedMessages, bad: list[int]) -> None:
        if bad:
            self._set_aside(call, bad)
            answer = without(answer, bad)
        if call.future.done():  # the caller was cancelled: release the messages immediately
            self.give_back(call)
        elif len(bad) < call.count:
            call.future.set_result(Leased(self._runner.name, answer, self._runner.loaded.topic.id_suffix))
        else:  # all were corrupt and became dead letters: pop again
            call.forget()
            self._runner.pop_again(call)

    def give_back(self, call: PopCall) -> None:
        if call.request_id is not None:
            return  # the caller may be repeating the named pop, or have repeated it, and then holds these leases

        def decide(now: Now) -> None:
            for partition, ids, tokens in self._runner.loaded.topic.by_partition(
                call.ids.tolist(), call.tokens.tolist()
            ):
                decision = partition.decide_release(ids, tokens, now, self._runner.loaded.topic.take_seq(len(ids)))
                self._runner.loaded.emit_decision(partition, decision, now)

        self._runner.later(decide)

    def _set_aside(self, call: PopCall, bad: list[int]) -> None:
        """Make messages with corrupt records dead letters; they are never delivered."""
        self._runner.counters.corrupt += len(bad)
        bad_ids, bad_tokens = call.ids[bad].tolist(), call.tokens[bad].tolist()

        def decide(now: Now) -> None:
            for partition, ids, tokens in self._runner.loaded.topic.by_partition(bad_ids, bad_tokens):
                decision = partition.decide_bury(ids, tokens, now, "record corrupt", keep=True)
                self._runner.loaded.emit_decision(partition, decision, now)

        self._runner.later(decide)
