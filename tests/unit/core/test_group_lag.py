"""A group's lag under random deliveries, acks, failures, crashes and resets, against a naive count of rows.

Pages are short and crashes frequent, so failed rows are often acked beyond the cursor, next to ranges that are done.
test_group_model.py covers members, time and delivery order with longer histories.
"""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

from heapline.contract.config import Backoff, GroupConfig
from heapline.core.events import Event, GroupAcked, GroupDead, GroupDeadReplayed, GroupReset
from heapline.core.groups.deliveries import Columns
from heapline.core.groups.offsets import GroupOffsets
from heapline.core.groups.stream import StreamRows
from tests.unit.core.group_model import i64

CONFIG = GroupConfig(max_retries=2, backoff=Backoff(base=0.001, factor=1.0, jitter=0.0))


class History:
    """One group in one partition, with the sets of offsets from which its lag is counted."""

    def __init__(self, seed: int) -> None:
        self.dice, self.now = Random(seed), 1_000_000
        self.offsets = GroupOffsets("g", 0, 0)
        self.log: list[Event] = []
        self.saved: tuple[int, bytes] | None = None
        self.rows: list[int] = []
        self.end = 0
        self.done: set[int] = set()
        self.dead: set[int] = set()
        self.replayed: set[int] = set()  # dead letters that are waiting or in flight again

    def run(self, steps: int) -> None:
        self.append()
        actions = [self.append, self.take, self.take, self.ack, self.ack, self.ack, self.fail, self.fail, self.crash]
        rare = [self.reset, self.replay_dead, self.save, self.keep_offset]
        for _ in range(steps):
            self.now += 2
            self.dice.choice(rare if self.dice.random() < 0.1 else actions)()
            self.check()

    def check(self) -> None:
        offsets = self.offsets
        lag = len([row for row in self.rows if row not in self.done]) + len(self.replayed)
        assert offsets.lag(len(self.rows)) == lag
        assert offsets.count == len([row for row in self.rows if row < offsets.committed])
        assert not [row for row in self.rows if row < offsets.committed and row not in self.done]

    def record(self, event: Event | None) -> None:
        if event is None:
            return
        self.log.append(event)
        self.offsets.apply(event)

    def held(self) -> list[int]:
        rows = i64(self.rows)
        return rows[self.offsets.held(rows)].tolist()

    def some(self, rows: list[int]) -> list[int]:
        share = self.dice.choice((0.3, 0.7, 1.0))
        return [row for row in rows if self.dice.random() < share]

    # -- actions ---------------------------------------------------------------------------------------------------

    def append(self) -> None:
        for _ in range(self.dice.randrange(1, 6)):
            self.end += self.dice.choice((0, 0, 0, 1, 2))  # journal rows that are not in the stream
            self.rows.append(self.end)
            self.end += 1

    def take(self) -> None:
        end = min(self.end, self.offsets.cursor + self.dice.randrange(5))
        seen = i64(row for row in self.rows if row < end)
        page = StreamRows(Columns(seen, seen + 1, seen << 13), 0, end)
        self.offsets.take(self.dice.randrange(1, 8), page, self.now, self.now + 1000)

    def ack(self) -> None:
        chosen = self.some(self.held())
        event, lost = self.offsets.decide_ack(i64(chosen), self.now)
        assert not len(lost)
        self.record(event)
        self.done.update(chosen)
        self.replayed.difference_update(chosen)

    def fail(self) -> None:
        chosen = self.some(self.held())
        if chosen:
            events, lost = self.offsets.decide_fail(i64(chosen), np.zeros(len(chosen)), "no", self.now, CONFIG)
            assert not len(lost)
            for event in events:
                self.record(event)
                if isinstance(event, GroupDead):
                    self.done.update(event.offsets.tolist())
                    self.dead.update(event.offsets.tolist())
                    self.replayed.difference_update(event.offsets.tolist())

    def replay_dead(self) -> None:
        for event in self.offsets.decide_replay_dead(i64(self.some(sorted(self.dead))), self.now, self.now):
            self.record(event)
            self.dead.difference_update(event.offsets.tolist())
            if isinstance(event, GroupDeadReplayed):
                self.replayed.update(event.offsets.tolist())

    def reset(self) -> None:
        to = self.dice.randrange(self.end + 1)
        below = {row for row in self.rows if row < to}
        event: GroupReset = self.offsets.decide_reset(to, len(below), self.now)
        self.record(event)
        self.done = below
        self.replayed &= below

    def keep_offset(self) -> None:
        event: GroupAcked = self.offsets.decide_record(self.now)
        self.record(event)

    def save(self) -> None:
        self.saved = len(self.log), msgspec.msgpack.encode(self.offsets.to_state())

    def crash(self) -> None:
        if self.saved is not None and self.dice.random() < 0.5:
            start, state = self.saved
            self.offsets = GroupOffsets.from_state("g", msgspec.msgpack.decode(state))
        else:
            # Without a readable snapshot, the log alone is read; that snapshot is not read again later.
            start, self.saved, self.offsets = 0, None, GroupOffsets("g", 0, 0)
        for event in self.log[start:]:
            self.offsets.apply(event)
        self.offsets.rewind()


@pytest.mark.parametrize("runs", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_lag_agrees_with_a_naive_count(runs: int) -> None:
    for seed in range(runs):
        try:
            History(seed).run(60)
        except AssertionError as error:
            raise AssertionError(f"History({seed}).run(60) differs") from error
