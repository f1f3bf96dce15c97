"""A consumer group as dictionaries and sets, the model for the tests of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.core.groups.deliveries import Columns
from heapline.core.groups.members import Shares
from heapline.core.groups.stream import StreamRows

I64 = npt.NDArray[np.int64]


def i64(values: Any) -> I64:
    return np.array(list(values), dtype=np.int64)


def spread(members: Sequence[str], partitions: Sequence[int], before: Shares) -> dict[str, list[int]]:
    """Each member keeps its partitions up to its fair share; the rest goes to the member that has fewest."""
    most = -(-len(partitions) // len(members))
    shares = {m: [p for p in before.get(m, ()) if p in partitions][:most] for m in members}
    for p in sorted(set(partitions) - {p for some in shares.values() for p in some}):
        shares[min(members, key=lambda m: len(shares[m]))].append(p)
    return shares


@dataclass
class Failed:
    failures: int
    due: int
    back: bool = False


@dataclass
class Out:
    member: str
    deadline: int


@dataclass
class Model:
    """One partition of the group."""

    end: int = 0
    ids: dict[int, int] = field(default_factory=dict)  # stream rows: offset -> id
    positions: dict[int, int] = field(default_factory=dict)  # id -> position of its record
    done: set[int] = field(default_factory=set)
    failed: dict[int, Failed] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    out: dict[int, Out] = field(default_factory=dict)
    forgotten: list[tuple[int, Out]] = field(default_factory=list)  # may still be processed
    seen: set[int] = field(default_factory=set)  # was delivered at least once
    floor: int = 0  # below it, the order is not guaranteed

    def append(self, gap: int, rows: int, id: int) -> None:
        self.end += gap
        for i in range(rows):
            self.ids[self.end] = id + i
            self.positions[id + i] = (id + i) << 13
            self.end += 1

    def page(self, end: int) -> StreamRows:
        offsets = [offset for offset in self.ids if offset < end]
        ids = [self.ids[offset] for offset in offsets]
        return StreamRows(Columns(i64(offsets), i64(ids), i64(self.positions[id] for id in ids)), 0, end)

    def undone(self) -> list[int]:
        return [offset for offset in self.ids if offset not in self.done]

    def expected(self, credits: int, end: int | None, now: int) -> list[tuple[int, int]]:
        """Return (offset, attempt) of the next delivery."""
        due = [(f.due, offset) for offset, f in self.failed.items() if offset not in self.out and f.due <= now]
        rows = [(offset, self.failed[offset].failures + 1) for _, offset in sorted(due)]
        if end is not None:
            new = [o for o in self.undone() if o < end and o not in self.out and o not in self.failed]
            rows += [(offset, 1) for offset in new]
        return rows[:credits]

    def hand_out(self, rows: list[tuple[int, int]], member: str, now: int, deadline: int) -> None:
        for offset, _ in rows:
            assert offset not in self.out, "two holders"
            others = [o for at, o in self.forgotten if at == offset and o.member != member and o.deadline > now]
            assert not others, "another member may still be processing it"
            if offset not in self.seen:
                before = [o for o in self.ids if self.floor <= o < offset and o not in self.seen]
                assert not before, "first deliveries are in order"
                self.seen.add(offset)
            self.out[offset] = Out(member, deadline)

    def forget_out(self) -> None:
        self.forgotten += self.out.items()
        self.out = {}

    def finish(self, offset: int) -> None:
        del self.out[offset]
        self.failed.pop(offset, None)
        self.done.add(offset)

    def fail(self, offset: int, due: int, max_retries: int) -> None:
        before = self.failed.get(offset, Failed(0, 0))
        if before.failures + 1 > max_retries:
            self.finish(offset)
            self.dead.add(offset)
        else:
            del self.out[offset]
            self.failed[offset] = Failed(before.failures + 1, due, before.back)

    def reset(self, offset: int) -> None:
        self.forget_out()
        self.failed = {o: f for o, f in self.failed.items() if f.back and o < offset}
        self.done = {o for o in self.ids if o < offset}
        self.floor = max(self.floor, offset)

    def lag(self) -> int:
        return len(self.undone()) + sum(f.back for f in self.failed.values())
