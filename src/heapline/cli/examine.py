"""`journal verify` of one topic: does every segment, unit, record, snapshot, index and watermark check?

Goes on after the first fault, and says of each what to do. Then the topic is rebuilt as opening would do it: damage
below the newest snapshot does not keep a topic from being served, and then nothing should be cut. Only reads; how
findings are shown is journal.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heapline.cli.places import Place
from heapline.cli.reading import held_for_reading, rebuild, state_of, thawed, units_of
from heapline.errors import CorruptionError, JournalCorrupt, SnapshotCorrupt
from heapline.journal import Damage, Disk, Report, SnapshotStore, verify
from heapline.journal.index import parse_index
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import index_path, numbered, segment_path
from heapline.journal.verify import record_damage
from heapline.journal.watermark import read_watermark, watermark_path

RECORD_ADVICE = "this message is never delivered, all others are; restore a backup to have it back"
JOURNAL_ADVICE = "restore a backup, or give up what lies behind the damage: heapline journal repair"
BELOW_ADVICE = (
    "the topic opens all the same, from a newer snapshot: do not cut; restore a backup to have these units back"
)
SNAPSHOT_ADVICE = "an older snapshot or the journal itself serves instead; the next snapshots replace it"
INDEX_ADVICE = "it is rebuilt from its segment when needed; the file can be deleted"
WATERMARK_ADVICE = "opening the topic once writes it anew"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not check."""

    path: str
    offset: int
    detail: str
    advice: str


@dataclass(slots=True)
class Examined:
    topic: str
    folder: str
    running: bool  # examined up to the watermark only, beside an engine that has it open
    report: Report
    snapshots: int = 0
    indexes: int = 0
    findings: list[Finding] = field(default_factory=list)
    state: dict[str, int] | None = None  # messages by state, if the topic could be rebuilt


def examine(disk: Disk, place: Place, *, running: bool, replay: bool = True) -> Examined:
    with held_for_reading(disk, place.folder, running):
        report = _verify_running(disk, place) if running else verify(disk, place.folder)
        found = Examined(place.topic, place.folder, running, report)
        obstacle = _check_replay(disk, place, found) if replay and place.config is not None else None
        found.findings += [_of_damage(damage, found.state is not None) for damage in report.damage]
        if obstacle is not None and all(damage.is_record for damage in report.damage):
            found.findings.append(obstacle)
        _check_watermark(disk, found)
        _check_indexes(disk, found)
        _check_snapshots(disk, place, found)
    return found


def _of_damage(damage: Damage, opens: bool) -> Finding:
    advice = RECORD_ADVICE if damage.is_record else BELOW_ADVICE if opens else JOURNAL_ADVICE
    return Finding(damage.path, damage.offset, damage.detail, advice)


def _verify_running(disk: Disk, place: Place) -> Report:
    report = Report(place.folder)
    try:
        report.segments = len(list_segments(disk, place.folder))
        for unit in units_of(disk, place, running=True):
            report.count(unit)
            report.damage.extend(record_damage(unit, segment_path(place.folder, unit.segment)))
    except JournalCorrupt as error:
        report.damage.append(Damage(error.path, error.offset, report.last_unit + 1, error.detail))
    return report


def _check_watermark(disk: Disk, found: Examined) -> None:
    path = watermark_path(found.folder)
    if read_watermark(disk, found.folder) is None and all(f.path != path for f in found.findings):
        detail = "it does not check" if disk.exists(path) else "it is missing"
        found.findings.append(Finding(path, 0, detail, WATERMARK_ADVICE))


def _check_indexes(disk: Disk, found: Examined) -> None:
    names = disk.listdir(found.folder)
    present = set(numbered(names, ".seg"))
    for number in numbered(names, ".idx"):
        if number not in present:
            continue  # its segment was reclaimed; the next open removes it
        try:
            header = read_header(disk, found.folder, number)
            data = disk.read_file(index_path(found.folder, number))
        except (FileNotFoundError, CorruptionError):
            continue  # reclaimed just now, or the segment itself is damaged, which has been said
        if header is not None and parse_index(data, number, header.incarnation) is None:
            path = index_path(found.folder, number)
            found.findings.append(Finding(path, 0, "the index does not check", INDEX_ADVICE))
        else:
            found.indexes += 1


def _check_snapshots(disk: Disk, place: Place, found: Examined) -> None:
    directory = f"{place.folder}/snapshots"
    if not disk.exists(directory):
        return
    store = SnapshotStore(disk, directory)
    for unit in store.units():
        try:
            snapshot = store.load(unit)
            if place.config is not None:
                thawed(place, snapshot)
        except SnapshotCorrupt as error:
            if disk.exists(f"{directory}/{unit:016d}.snap"):  # a running engine may have pruned it just now
                found.findings.append(Finding(error.path, 0, error.detail, SNAPSHOT_ADVICE))
        else:
            found.snapshots += 1


def _check_replay(disk: Disk, place: Place, found: Examined) -> Finding | None:
    """Why the topic cannot be opened, if so."""
    try:
        topic = rebuild(disk, place, found.running)
        found.state = state_of(topic)
        present = numbered(disk.listdir(place.folder), ".seg")
        for segment in topic.live.segments():
            if segment not in present and (count := topic.live.count(segment)):
                detail = f"the segment is missing, and with it {count} message(s) that are not gone"
                found.findings.append(Finding(segment_path(place.folder, segment), 0, detail, RECORD_ADVICE))
    except CorruptionError as error:
        path, offset = getattr(error, "path", place.folder), getattr(error, "offset", 0)
        detail = getattr(error, "detail", str(error))
        return Finding(path, offset, f"the topic cannot be rebuilt: {detail}", JOURNAL_ADVICE)
    except Exception as error:  # a journal that contradicts itself may fail anywhere; to say so is what verify is for
        return Finding(place.folder, 0, f"the topic cannot be rebuilt: {error!r}", JOURNAL_ADVICE)
    return None
