"""A partition where fairness keys take turns and are limited, against the naive one: histories as in
test_partition_model, with keys, few slots and changing limits. Every step also checks that exactly the messages that
must not be delivered are parked (`rig_checks._check_parked`)."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from heapline.contract.config import Backoff
from heapline.contract.message import Outgoing
from heapline.core.fairness import keys
from heapline.core.heap.run_heap import RunHeap
from heapline.core.order import TURN_PRIORITY_MAX, TURN_PRIORITY_MIN
from tests.unit.core.partition_rig import Rig
from tests.unit.core.rig_journal import START, TINY_HEAP
from tests.unit.core.test_partition_model import PartitionMachine

KEYS = ("a", "b", None, "a", "a")


def clamped(priority: int) -> int:
    """Few different ones, so that keys collide; and the ends of the range."""
    ends = TURN_PRIORITY_MIN, TURN_PRIORITY_MAX
    return priority if 0 <= priority <= 2 else ends[priority % 2] if priority % 8 == 7 else 1


class FairMachine(PartitionMachine):
    @initialize(
        mode=st.sampled_from(["min", "max"]),
        streams=st.booleans(),
        limit=st.sampled_from([0, 1, 1, 2]),
        base=st.sampled_from([0.0, 1.0]),
        dlq=st.sampled_from([True, True, False]),
    )
    def begin(self, mode: Any, streams: bool, limit: int, base: float, dlq: bool) -> None:  # type: ignore[override]
        self.tiny = mock.patch.multiple(keys, RunHeap=partial(RunHeap, **TINY_HEAP), FEW_ROWS_MAX=2)
        self.tiny.start()
        self.rig = Rig(
            START, mode=mode, streams=streams, dlq=dlq, backoff=Backoff(base=base), max_retries_default=2,
            lease_max=120.0, dedup_window=3600.0, fairness="keys", max_inflight_per_key=limit,
        )  # fmt: skip
        self.dues: list[tuple[int, int, bool]] = []
        self.made = 0

    def outgoing(self, facts: dict[str, Any], **more: Any) -> Outgoing:
        self.made += 1
        key = KEYS[(self.made + facts["size"]) % len(KEYS)]
        return super().outgoing(facts | {"priority": clamped(facts["priority"])}, fairness_key=key, **more)

    def reprioritise(self, number: int, priority: int) -> None:
        super().reprioritise(number, clamped(priority))

    def do_something_rare(self, what: int, dlq: bool, retries: int) -> None:
        if what in (1, 3):
            self.rig.configure(max_inflight_per_key={0: 0, 1: 1, 2: 2, 5: 1}[retries])
        else:
            super().do_something_rare(what, dlq, retries)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "tiny"):
                self.tiny.stop()


TestFairPartitionAgainstNaiveModel = FairMachine.TestCase
TestFairPartitionAgainstNaiveModel.settings = settings(max_examples=25)
