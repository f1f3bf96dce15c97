"""Read back the workers' records of what they held: holdings as time spans, and checks over all of them.

A worker holds a partition from the hook that adds it until the manager has forgotten it, and only while a lease that it
knew to be renewed had not ended on its own clock. A killed process counts as holding until the end of its last lease,
because that is what it would have believed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Holding:
    partition: str
    worker: str
    fence: int
    spans: tuple[Span, ...]
    who: str  # name of the process


@dataclass(slots=True)
class Record:
    who: str
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Record:
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return cls(path.stem, [json.loads(line) for line in whole.splitlines()])

    def last(self, kind: str) -> dict[str, Any] | None:
        return next((line for line in reversed(self.lines) if line["kind"] == kind), None)

    @property
    def worker(self) -> str:
        found = self.last("lease")
        return "" if found is None else str(found["worker"])

    def held_now(self) -> set[str]:
        """Return what it held at its last sample."""
        found = self.last("saw")
        return set() if found is None else set(found["partitions"])

    def holdings(self) -> list[Holding]:
        found: list[Holding] = []
        held: dict[str, tuple[float, int]] = {}
        leases: list[Span] = []
        worker = session = ""

        def end(ids: Iterable[str], at: float) -> None:
            for id in ids:
                if id in held:
                    begin, fence = held.pop(id)
                    found.append(Holding(id, worker, fence, tuple(overlaps(Span(begin, at), leases)), self.who))

        for line in self.lines:
            if line["kind"] == "lease":
                if line["session"] != session:  # a new session holds nothing yet
                    end(list(held), math.inf)
                    leases, worker, session = [], line["worker"], line["session"]
                leases.append(Span(line["t"], line["ends_at"]))
            elif line["kind"] == "add":
                for id, fence in line["partitions"].items():
                    if fence is not None and held.get(id, (0, -1))[1] != fence:  # a repeated hook adds nothing
                        end([id], line["t"])
                        held[id] = (line["t"], fence)
            elif line["kind"] == "drop":
                end(line["partitions"], line["t"])
        end(list(held), math.inf)
        return [holding for holding in found if holding.spans]


def overlaps(span: Span, leases: Iterable[Span]) -> list[Span]:
    """Return the parts of a span that are within any lease, joined where leases touch."""
    merged: list[Span] = []
    for lease in sorted(leases):
        if merged and lease.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(merged[-1].end, lease.end))
        else:
            merged.append(lease)
    cut = (Span(max(span.begin, lease.begin), min(span.end, lease.end)) for lease in merged)
    return [each for each in cut if each.begin < each.end]


def overlapping(records: Iterable[Record]) -> list[str]:
    """Describe every time at which a partition had two holders; there must be none."""
    wrong = []
    spans: dict[str, list[tuple[Span, Holding]]] = defaultdict(list)
    for record in records:
        for holding in record.holdings():
            spans[holding.partition] += [(span, holding) for span in holding.spans]
    for id, held in spans.items():
        held.sort(key=lambda each: each[0])
        latest = held[0] if held else None
        for span, holding in held[1:]:
            assert latest is not None
            if span.begin < latest[0].end and (latest[1].who, latest[1].fence) != (holding.who, holding.fence):
                wrong.append(f"{id}: {_describe(*latest)} and {_describe(span, holding)}")
            latest = max(latest, (span, holding), key=lambda each: each[0].end)
        for (_, before), (_, after) in pairwise(held):
            if after.fence < before.fence or (after.fence == before.fence and after.who != before.who):
                wrong.append(f"{id}: fence {after.fence} came after {before.fence}")
    return wrong


def _describe(span: Span, holding: Holding) -> str:
    return f"{holding.who} ({holding.worker}, fence {holding.fence}) {span.begin:.3f} to {span.end:.3f}"


def seen_by_two(records: list[Record]) -> list[str]:
    """Describe every sample in which a worker's `holds` was true while another worker's record says that it held the
    partition.
    """
    spans: dict[str, list[tuple[Span, str]]] = defaultdict(list)
    for record in records:
        for holding in record.holdings():
            spans[holding.partition] += [(span, record.who) for span in holding.spans]
    wrong = []
    for record in records:
        for line in record.lines:
            if line["kind"] != "saw" or line["t"] - line["before"] > 0.01:
                continue  # interrupted between the sample and the clock
            for id in line["partitions"]:
                for span, who in spans[id]:
                    if who != record.who and span.begin < line["before"] and line["t"] < span.end:
                        wrong.append(f"{id}: {record.who} holds it at {line['t']:.3f}, as {who} does")
    return wrong
