"""`journal repair` of one topic: what cutting would cost, told before it is done.

The cut itself is heapline.journal's. Here it is found out whether one is needed at all (damage below the newest
snapshot keeps nobody from opening the topic, and cutting there would lose everything since), where it would be, and
what of the lost part can still be read: its units, what happened in them, and to which messages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from heapline.cli.places import Place
from heapline.cli.reading import newest_snapshot, rebuild, units_of
from heapline.core.events import KIND_NAMES, Acked, BatchPrepared, Enqueued, decode_events
from heapline.errors import CorruptionError
from heapline.journal import Disk, Report, Unit, verify
from heapline.journal.repair import Cut, find_good_part
from heapline.journal.segment import segment_path
from heapline.journal.verify import salvage
from heapline.journal.watermark import read_watermark


@dataclass(slots=True)
class Plan:
    """What repair would do. With a `refusal` it does nothing, and that says why."""

    report: Report
    refusal: str = ""
    cut_path: str = ""
    cut_at: int = 0
    first_lost: int = 0  # unit
    last_lost: int = 0  # the last unit that is known to have been durable; 0 = none is
    readable: list[int] = field(default_factory=list)  # lost units that can still be read
    rows: Counter[str] = field(default_factory=Counter)  # lost rows by kind of event
    messages: list[int] = field(default_factory=list)  # ids that came in there: they will be gone
    acked: list[int] = field(default_factory=list)  # ids whose ack is undone: they will come again

    @property
    def unreadable(self) -> int:
        return max(0, self.last_lost - self.first_lost + 1 - len(self.readable))


def plan_repair(disk: Disk, place: Place) -> Plan:
    report = verify(disk, place.folder)
    plan = Plan(report)
    if report.ok:
        plan.refusal = "the journal is in order"
        return plan
    if opens(disk, place):
        plan.refusal = (
            "the topic can be opened as it is: what is damaged are single records, or units below the newest snapshot. "
            "Cutting would lose everything since; restore a backup to have the damaged part back"
        )
        return plan
    good = find_good_part(disk, place.folder)
    if good is None:
        plan.refusal = "the first segment's header does not check: restore a backup"
        return plan
    plan.refusal = Cut(disk, place.folder, good, report).obstacle()
    plan.cut_path, plan.cut_at = segment_path(place.folder, good.segment), good.at
    plan.first_lost = good.next_unit
    mark = read_watermark(disk, place.folder)
    plan.last_lost = mark.durable if mark is not None else 0
    for unit in salvage(disk, place.folder, good.next_unit):
        _count(plan, unit)
    return plan


def opens(disk: Disk, place: Place) -> bool:
    """Whether the topic can be opened as it is."""
    try:
        if place.config is not None:
            rebuild(disk, place, running=False)
        else:
            snapshot = newest_snapshot(disk, place)
            for _ in units_of(disk, place, running=False, after_unit=snapshot.unit if snapshot else 0):
                pass
    except CorruptionError:
        return False
    return True


def _count(plan: Plan, unit: Unit) -> None:
    plan.readable.append(unit.number)
    plan.last_lost = max(plan.last_lost, unit.number)
    for frame in unit.frames:
        for event in decode_events(frame.events, f"unit {unit.number}"):
            plan.rows[KIND_NAMES[type(event)]] += event.rows()
            if isinstance(event, Enqueued | BatchPrepared) and event.count:
                rows = unit.rows(unit.blocks[event.block])
                plan.messages += rows["id"][event.start : event.start + event.count].tolist()
            elif isinstance(event, Acked):
                plan.acked += event.ids.tolist()
