"""`journal verify` and `journal repair` of one topic: find damage, and plan a cut.

Verify continues after the first fault and gives advice for each. Then it rebuilds the topic as opening would do: a
topic can be served despite damage before its newest snapshot, and then nothing should be cut. The plan of a repair says
where the journal would be cut, and which units, rows and messages would be lost. heapline.journal does the cut.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from heapline.cli import output
from heapline.cli.journal.topic_files import (
    DataDirectory,
    TopicFiles,
    depths,
    empty_topic,
    reader_lease,
    rebuild,
    units_of,
    wall_ms,
)
from heapline.cli.output import count, facts_table, size, some
from heapline.contract.errors import CorruptionError, JournalCorrupt, SnapshotCorrupt
from heapline.contract.ids import to_ulid
from heapline.core.events import KIND_NAMES, Acked, BatchPrepared, Enqueued, decode_events
from heapline.engine.recovery import stored_snapshots, thaw_unit
from heapline.journal import Disk, Unit
from heapline.journal.index import parse_index
from heapline.journal.log_bounds import read_watermark, watermark_path
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import index_path, numbered, segment_path
from heapline.journal.verify import Cut, Damage, Report, find_good_part, record_damage, salvage, verify

RECORD_ADVICE = "this message is never delivered, all others are; restore a backup to recover it"
JOURNAL_ADVICE = "restore a backup, or give up everything after the damage with: heapline journal repair"
RESTORE_ADVICE = "restore a backup; every unit is intact, so there is nothing that a repair could cut"
BELOW_ADVICE = "the topic opens from a newer snapshot; do not cut it; restore a backup to recover these units"
SNAPSHOT_ADVICE = "an older snapshot or the journal itself is used instead; the next snapshots replace it"
INDEX_ADVICE = "it is rebuilt from its segment when needed; the file can be deleted"
WATERMARK_ADVICE = "opening the topic writes a new one"
CATALOG_ADVICE = "restore it from a backup; the files of the topics are not affected"
OPENS = (
    "the topic can be opened as it is: the damage affects single records, or units before the newest snapshot. A cut "
    "would lose everything since; restore a backup to recover the damaged part"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One file that is missing or corrupt, and what to do about it."""

    path: str
    offset: int
    detail: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}: {self.detail}"


@dataclass(slots=True)
class Verdict:
    """The result of verifying one topic."""

    topic: str
    folder: str
    running: bool  # checked only up to the watermark, beside a running engine
    report: Report
    snapshots: int = 0
    indexes: int = 0
    findings: list[Finding] = field(default_factory=list)
    state: dict[str, int] | None = None  # messages by state, if the topic could be rebuilt


def verify_topic(disk: Disk, files: TopicFiles, *, running: bool, replay: bool = True) -> Verdict:
    with reader_lease(disk, files.folder, running):
        report = _verify_running(disk, files) if running else verify(disk, files.folder)
        verdict = Verdict(files.topic, files.folder, running, report)
        obstacle = _check_replay(disk, files, verdict) if replay and files.config is not None else None
        for damage in report.damage:
            advice = JOURNAL_ADVICE if verdict.state is None else BELOW_ADVICE
            advice = RECORD_ADVICE if damage.is_record else advice
            verdict.findings.append(Finding(damage.path, damage.offset, damage.detail, advice))
        if obstacle is not None and all(damage.is_record for damage in report.damage):
            verdict.findings.append(obstacle)
        _check_watermark(disk, verdict)
        _check_indexes(disk, verdict)
        _check_snapshots(disk, files, verdict)
    return verdict


def _verify_running(disk: Disk, files: TopicFiles) -> Report:
    report = Report(files.folder)
    try:
        report.segments = len(list_segments(disk, files.folder))
        for unit in units_of(disk, files, running=True):
            report.count(unit)
            report.damage.extend(record_damage(unit, segment_path(files.folder, unit.segment)))
    except JournalCorrupt as error:
        report.damage.append(Damage(error.path, error.offset, report.last_unit + 1, error.detail))
    return report


def _check_watermark(disk: Disk, verdict: Verdict) -> None:
    path = watermark_path(verdict.folder)
    if read_watermark(disk, verdict.folder) is None and all(f.path != path for f in verdict.findings):
        detail = "the file is corrupt" if disk.exists(path) else "the file is missing"
        verdict.findings.append(Finding(path, 0, detail, WATERMARK_ADVICE))


def _check_indexes(disk: Disk, verdict: Verdict) -> None:
    names = disk.listdir(verdict.folder)
    present = set(numbered(names, ".seg"))
    for number in numbered(names, ".idx"):
        if number not in present:
            continue  # its segment was reclaimed; the next open removes the index
        path = index_path(verdict.folder, number)
        try:
            header = read_header(disk, verdict.folder, number)
            data = disk.read_file(path)
        except (FileNotFoundError, CorruptionError):
            continue  # reclaimed meanwhile, or the segment is damaged, which is already reported
        if header is not None and parse_index(data, number, header.incarnation) is None:
            verdict.findings.append(Finding(path, 0, "the index is corrupt", INDEX_ADVICE))
        else:
            verdict.indexes += 1


def _check_snapshots(disk: Disk, files: TopicFiles, verdict: Verdict) -> None:
    store = stored_snapshots(disk, files.folder)
    for unit in store.units() if store is not None else ():
        assert store is not None
        try:
            if files.config is not None:
                thaw_unit(empty_topic(files), store, unit, wall_ms())
            else:
                store.load(unit)
        except SnapshotCorrupt as error:
            if disk.exists(f"{store.directory}/{unit:016d}.snap"):  # otherwise pruned meanwhile
                verdict.findings.append(Finding(error.path, 0, error.detail, SNAPSHOT_ADVICE))
        else:
            verdict.snapshots += 1


def _check_replay(disk: Disk, files: TopicFiles, verdict: Verdict) -> Finding | None:
    """Return why the topic cannot be opened, or None if it can."""
    try:
        verdict.state = depths(rebuild(disk, files, verdict.running))
    except CorruptionError as error:
        path, offset = getattr(error, "path", files.folder), getattr(error, "offset", 0)
        detail = getattr(error, "detail", str(error))
        return Finding(path, offset, f"the topic cannot be rebuilt: {detail}", RESTORE_ADVICE)
    return None


# -- repair ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RepairPlan:
    """The changes that a repair would make. With a `refusal` it does nothing, for the reason given there."""

    report: Report
    id_suffix: int = 0  # the low bits of the topic's ULIDs
    refusal: str = ""
    cut_path: str = ""
    cut_at: int = 0
    first_lost: int = 0  # unit
    last_lost: int = 0  # the last unit that is known to have been durable, or 0
    readable: list[int] = field(default_factory=list)  # lost units that can still be read
    rows: Counter[str] = field(default_factory=Counter)  # lost rows by kind of event
    messages: list[int] = field(default_factory=list)  # ids enqueued there: they will be lost
    acked: list[int] = field(default_factory=list)  # ids acked there: they will be redelivered

    def count_unit(self, unit: Unit) -> None:
        self.readable.append(unit.number)
        self.last_lost = max(self.last_lost, unit.number)
        for frame in unit.frames:
            for event in decode_events(frame.events, f"unit {unit.number}"):
                self.rows[KIND_NAMES[type(event)]] += event.rows()
                if isinstance(event, Enqueued | BatchPrepared) and event.count:
                    rows = unit.rows(unit.blocks[event.block])
                    self.messages += rows["id"][event.start : event.start + event.count].tolist()
                elif isinstance(event, Acked):
                    self.acked += event.ids.tolist()

    def table(self) -> Table:
        kinds = ", ".join(f"{count(n)} {kind}" for kind, n in self.rows.most_common())
        unreadable = max(0, self.last_lost - self.first_lost + 1 - len(self.readable))
        units = f"{self.first_lost} to {max(self.last_lost, self.first_lost)}"
        facts = [
            ("cut", f"{escape(self.cut_path)} at byte {self.cut_at}, and all segments after it"),
            ("units lost", f"{units}: {count(len(self.readable))} readable, {count(unreadable)} not"),
            ("rows lost, in readable units", kinds or "none"),
            ("messages lost", _ids(self.messages, self.id_suffix)),
            ("acks lost: will be redelivered", _ids(self.acked, self.id_suffix)),
        ]
        return facts_table("Planned repair", facts)


def _ids(ids: list[int], id_suffix: int) -> str:
    return f"{count(len(ids))}: {some([to_ulid(id, id_suffix) for id in ids], 8)}" if ids else "none that can be read"


def plan_repair(disk: Disk, files: TopicFiles) -> RepairPlan:
    report = verify(disk, files.folder)
    if report.ok:
        return RepairPlan(report, refusal="the journal is not damaged")
    if _opens(disk, files):
        return RepairPlan(report, refusal=OPENS)
    good = find_good_part(disk, files.folder)
    if good is None:
        return RepairPlan(report, refusal="the header of the first segment is corrupt; restore a backup")
    mark = read_watermark(disk, files.folder)
    plan = RepairPlan(
        report,
        files.id_suffix,
        refusal=Cut(disk, files.folder, good, report).obstacle(),
        cut_path=segment_path(files.folder, good.segment),
        cut_at=good.at,
        first_lost=good.next_unit,
        last_lost=mark.durable if mark is not None else 0,
    )
    for unit in salvage(disk, files.folder, good.next_unit):
        plan.count_unit(unit)
    return plan


def _opens(disk: Disk, files: TopicFiles) -> bool:
    """Return whether the topic can be opened as it is."""
    try:
        if files.config is not None:
            rebuild(disk, files, running=False)
        else:
            store = stored_snapshots(disk, files.folder)
            snapshot = None if store is None else store.load_newest()
            for _ in units_of(disk, files, running=False, after_unit=snapshot.unit if snapshot else 0):
                pass
    except CorruptionError:
        return False
    return True


# -- output ------------------------------------------------------------------------------------------------------------


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    report, findings = verdict.report, [asdict(finding) for finding in verdict.findings]
    names = ("segments", "units", "first_unit", "last_unit", "frames", "bytes")
    counts = {name: getattr(report, name) for name in names} | {"messages": report.rows}
    fields = {name: getattr(verdict, name) for name in ("topic", "folder", "running", "snapshots", "indexes", "state")}
    return {**fields, "ok": not findings, **counts, "torn_unit": report.torn_unit or None, "findings": findings}


def show_verdicts(console: Console, directory: DataDirectory, catalog: list[Finding], verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        console.print(facts_table(escape(verdict.topic), _verdict_facts(verdict)))
    for finding in [*catalog, *(finding for verdict in verdicts for finding in verdict.findings)]:
        console.print(f"[red]{escape(str(finding))}[/red]")
        console.print(f"   → {escape(finding.advice)}")
    for folder in directory.unnamed:
        console.print(f"[yellow]{escape(folder)} is not in the catalog; the next open removes it[/yellow]")
    if not verdicts and not catalog:
        console.print("there are no topics here")


def _verdict_facts(verdict: Verdict) -> list[tuple[str, str]]:
    report, findings = verdict.report, verdict.findings
    torn = f"unit {report.torn_unit}, never acknowledged; the next open removes it"
    return [
        ("segments", f"{report.segments}, {size(report.bytes)} in units"),
        ("units", f"{count(report.units)} ({report.first_unit} to {report.last_unit})"),
        ("messages written", count(report.rows)),
        ("snapshots, indexes", f"{verdict.snapshots}, {verdict.indexes}"),
        ("messages now", depths_text(verdict.state, "not rebuilt")),
        ("torn write", torn if report.torn_unit else ""),
        ("in use", "a process has it open; checked up to its durable end" if verdict.running else ""),
        ("verdict", f"[red]{len(findings)} finding(s)[/red]" if findings else "[green]no damage found[/green]"),
    ]


def depths_text(state: dict[str, int] | None, unknown: str) -> str:
    return unknown if state is None else output.depths(state)
