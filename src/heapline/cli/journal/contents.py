"""`journal stats` and `journal dump` of one topic: the contents of its journal, as statistics and row by row.

heapline.core.events decides which columns an event has. Here they are only split into rows. Only reads.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console
from rich.markup import escape

from heapline.cli.journal.check import depths_text
from heapline.cli.journal.topic_files import (
    TopicFiles,
    depths,
    reader_lease,
    rebuild,
    segment_sizes,
    units_of,
    wall_ms,
)
from heapline.cli.output import columns_table, count, facts_table, size, some, timestamp
from heapline.contract.errors import BadRequest, CorruptionError, SnapshotCorrupt
from heapline.contract.ids import to_ulid
from heapline.contract.message import LogEvent, LogFrame
from heapline.core.events import KIND_NAMES, decode_events
from heapline.engine.delivery import split_small
from heapline.engine.log import decode_frame
from heapline.engine.recovery import stored_snapshots
from heapline.engine.retention import held
from heapline.engine.topic import Topic
from heapline.journal import Disk, LogReader, Unit
from heapline.journal.reclaim import read_leases
from heapline.journal.survey import Survey, Surveyor
from heapline.journal.verify import Report

Row = dict[str, Any]
#: Columns of an event -> the name of the value in one row.
_ONE = {
    "ids": "id", "dues": "due", "deadlines": "deadline", "holders": "holder", "tokens": "token", "keys": "heap_key",
    "positions": "position", "priorities": "priority", "offset": "stream_offset", "offsets": "stream_offset",
}  # fmt: skip
_TIMES = {"due", "deadline", "enqueued_at", "at", "until", "expires"}
_HIDDEN_IF_ZERO = {"due", "expires", "ttl_ms", "flags", "delayed", "turn"}
_INTERNAL = {"position", "heap_key", "seq", "token", "limit", "flags"}
_FIRST = ("topic", "partition", "offset", "unit", "time_ms", "kind", "id", "message_id")


# -- statistics --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupStats:
    lag: int  # messages
    dead: int
    holds: bool  # whether the journal is kept for the group


@dataclass(slots=True)
class Stats:
    topic: str
    folder: str
    running: bool
    segments: dict[int, int] = field(default_factory=dict)  # number -> bytes of its file
    live: dict[int, tuple[int, int]] | None = None  # segment -> live messages, and their bytes at most
    report: Report = field(default_factory=lambda: Report(""))  # counts the units
    events: Counter[str] = field(default_factory=Counter)  # by kind
    rows: Counter[str] = field(default_factory=Counter)
    from_ms: int = 0
    to_ms: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)  # unit -> bytes, with blobs
    state: dict[str, int] | None = None  # messages by state
    kept_for: dict[str, dict[str, int]] | None = None  # reason -> segments and bytes; a segment may have several
    groups: dict[str, GroupStats] | None = None
    segment_bytes: int = 0

    @property
    def reclaimed(self) -> int:
        """Segments deleted since the topic was created. They are numbered from 1 and deleted in that order."""
        return min(self.segments, default=1) - 1

    @property
    def live_bytes(self) -> int | None:
        return None if self.live is None else sum(nbytes for _, nbytes in self.live.values())

    def count_unit(self, unit: Unit) -> None:
        self.report.count(unit)
        self.from_ms = self.from_ms or unit.wall
        self.to_ms = unit.wall
        for frame in unit.frames:
            for event in decode_events(frame.events, f"unit {unit.number}"):
                kind = KIND_NAMES[type(event)]
                self.events[kind] += 1
                self.rows[kind] += event.rows()


def topic_stats(disk: Disk, files: TopicFiles, *, running: bool) -> Stats:
    stats = Stats(files.topic, files.folder, running)
    with reader_lease(disk, files.folder, running):
        stats.segments = segment_sizes(disk, files.folder)
        for unit in units_of(disk, files, running):
            stats.count_unit(unit)
        stats.snapshots = _snapshot_sizes(disk, files)
        if files.config is not None:
            with contextlib.suppress(CorruptionError):  # verify reports why the state is unknown
                topic = rebuild(disk, files, running)
                stats.state = depths(topic)
                stats.live = {n: (topic.live.count(n), topic.live.bytes(n)) for n in stats.segments}
                stats.segment_bytes = topic.config.segment_bytes
                stats.kept_for = _kept_for(disk, files, topic, list(stats.snapshots))
                stats.groups = _groups(topic)
    return stats


def _snapshot_sizes(disk: Disk, files: TopicFiles) -> dict[int, int]:
    sizes: dict[int, int] = {}
    store = stored_snapshots(disk, files.folder)
    for unit in store.units() if store is not None else ():
        assert store is not None
        with contextlib.suppress(SnapshotCorrupt):
            snapshot = store.load(unit)
            sizes[unit] = len(snapshot.state) + sum(blob.nbytes for blob in snapshot.blobs.values())
    return sizes


def _groups(topic: Topic) -> dict[str, GroupStats]:
    now, stats = wall_ms(), {}
    for group in topic.groups:
        partitions = group.partitions.items()
        stats[group.name] = GroupStats(
            lag=sum(offsets.lag(topic.counts[number].total) for number, offsets in partitions),
            dead=sum(len(offsets.dead) for _, offsets in partitions),
            holds=any(group.holds_below(number, now) is not None for number, _ in partitions),
        )
    return stats


def _kept_for(disk: Disk, files: TopicFiles, topic: Topic, snapshots: list[int]) -> dict[str, dict[str, int]]:
    """Return why segments are kept. `snapshots` are the units of the valid ones."""
    now = wall_ms()
    offsets = [partition.state.offset for partition in topic.partitions]
    survey = Surveyor(disk, files.folder).look(LogReader(disk, files.folder), offsets)
    readers: list[tuple[str, int]] = []
    with contextlib.suppress(OSError):
        leases = read_leases(disk, files.folder, now)
        readers = [(lease.name, lease.segment) for lease in leases if lease.name != f"cli-{os.getpid()}"]
    older_unit = sorted(snapshots)[-2] if len(snapshots) > 1 else 0
    segments: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for index, segment in enumerate(survey.segments):
        for reason in _reasons(topic, survey, index, older_unit, readers, now):
            segments[reason] += 1
            nbytes[reason] += segment.nbytes
    return {reason: {"segments": number, "bytes": nbytes[reason]} for reason, number in segments.most_common()}


def _reasons(
    topic: Topic, survey: Survey, index: int, older_unit: int, readers: list[tuple[str, int]], now: int
) -> list[str]:
    segment = survey.segments[index]
    if segment.closed_at is None:
        return ["being written"]
    reasons = [f"reader {name}" for name, first in readers if first <= segment.number]
    if segment.last_unit > older_unit:
        reasons.append("two newer snapshots")
    if topic.live.count(segment.number):
        reasons.append("live messages")
    holding = held(topic, survey, index, now, now)
    if holding:
        reasons += ["retention"] * holding.retention + [f"group {name}" for name in holding.groups]
    return reasons


def stats_json(stats: Stats) -> dict[str, Any]:
    names = ("topic", "folder", "running", "from_ms", "to_ms", "state", "kept_for", "groups")
    fields = {name: getattr(stats, name) for name in names}
    fields |= {name: getattr(stats.report, name) for name in ("units", "first_unit", "last_unit")}
    fields["unit_bytes"] = stats.report.bytes
    fields["segments"], fields["bytes"] = len(stats.segments), sum(stats.segments.values())
    fields["events"], fields["rows"] = dict(stats.events), dict(stats.rows)
    fields["snapshots"] = {str(unit): nbytes for unit, nbytes in stats.snapshots.items()}
    fields["live_messages"] = stats.live and {str(number): messages for number, (messages, _) in stats.live.items()}
    fields["live_bytes_max"], fields["moved_records"] = stats.live_bytes, stats.rows["moved"]
    fields["given_back_segments"], fields["given_back_bytes"] = stats.reclaimed, stats.reclaimed * stats.segment_bytes
    return fields


def show_stats(console: Console, stats: Stats) -> None:
    live = "unknown"
    if stats.live_bytes is not None and stats.report.bytes:
        share = min(1.0, stats.live_bytes / stats.report.bytes)
        live = f"at most {size(stats.live_bytes)} ({share:.0%} of what is written); the rest is of removed messages"
    disk = size(sum(stats.segments.values()))
    reclaimed = f"{count(stats.reclaimed)} segment(s), {size(stats.reclaimed * stats.segment_bytes)}"
    facts = [
        ("files", f"{len(stats.segments)} segment(s), {disk} on disk, {size(stats.report.bytes)} written"),
        ("live", live),
        ("units", f"{count(stats.report.units)} ({stats.report.first_unit} to {stats.report.last_unit})"),
        ("from", timestamp(stats.from_ms) if stats.report.units else "nothing is written"),
        ("to", timestamp(stats.to_ms) if stats.report.units else ""),
        ("messages now", depths_text(stats.state, "unknown")),
        ("snapshots", ", ".join(f"unit {unit} ({size(n)})" for unit, n in stats.snapshots.items()) or "none"),
        ("reclaimed", f"{reclaimed} since the topic was created; {count(stats.rows['moved'])} records moved for that"),
        ("in use", "a process has it open; counted up to its durable end" if stats.running else ""),
    ]
    console.print(facts_table(escape(stats.topic), facts))
    kinds = [(kind, count(stats.events[kind]), count(n)) for kind, n in stats.rows.most_common()]
    if kinds:
        console.print(columns_table("", ("kind", "events", "rows"), kinds, right=(1, 2)))
    if stats.kept_for is not None:
        kept = [(escape(r), count(n["segments"]), size(n["bytes"])) for r, n in stats.kept_for.items()]
        console.print(columns_table("", ("kept for", "segments", "bytes"), kept, right=(1, 2)))
    if stats.groups:
        groups = [(escape(n), count(g.lag), count(g.dead), "yes" if g.holds else "no") for n, g in stats.groups.items()]
        console.print(columns_table("", ("group", "lag", "dead letters", "holds the journal"), groups, right=(1, 2)))


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The options of the command that select the rows to dump."""

    partition: Annotated[int | None, "Only this partition.", Meta(ge=0)] = None
    start: Annotated[int, "First offset.", Meta(ge=0)] = 0
    end: Annotated[int | None, "Offset to stop before.", Meta(ge=0)] = None
    kind: Annotated[list[str] | None, "Only events of this kind; repeatable."] = None
    payloads: Annotated[bool, "Include payloads, in base64."] = False

    def __post_init__(self) -> None:
        if unknown := set(self.kind or ()) - set(KIND_NAMES.values()):
            raise BadRequest(f"unknown kind {some(sorted(unknown))}; use {', '.join(KIND_NAMES.values())}")

    def overlaps(self, partition: int, first: int, end: int) -> bool:
        """Return whether any of the partition's rows from `first` to before `end` is selected."""
        is_in_range = end > self.start and (self.end is None or first < self.end)
        return is_in_range and self.partition in (None, partition)


def rows(disk: Disk, files: TopicFiles, selection: Selection, *, running: bool) -> Iterator[Row]:
    """Yield the selected rows, in the order in which they were written."""
    with reader_lease(disk, files.folder, running):
        for unit in _units(disk, files, selection, running):
            for frame in unit.frames:
                if selection.overlaps(frame.partition, frame.first_offset, frame.first_offset + frame.row_count):
                    for row in _frame_rows(decode_frame(unit, frame, files.topic, files.id_suffix), selection):
                        if selection.overlaps(row["partition"], row["offset"], row["offset"] + 1):
                            yield row


def _units(disk: Disk, files: TopicFiles, selection: Selection, running: bool) -> Iterator[Unit]:
    if selection.partition is not None and selection.start:
        reader = LogReader(disk, files.folder)
        place = reader.locate(selection.partition, offset=selection.start)
        if place is not None:
            # A closed journal may have complete units after its watermark, which opening would accept.
            return reader.read_units(place=place, durable_only=running)
    return units_of(disk, files, running)


def _frame_rows(frame: LogFrame, selection: Selection) -> Iterator[Row]:
    for event in frame.events:
        if selection.kind and event.kind not in selection.kind:
            continue
        for index in range(event.row_count):
            row: Row = {"topic": frame.topic, "partition": frame.partition, "offset": event.offset + index}
            row |= {"unit": frame.unit, "time_ms": frame.time_ms, "kind": event.kind, **_row_fields(event, index)}
            if "id" in row:
                row["message_id"] = to_ulid(row["id"], frame.id_suffix)
            if event.payloads is not None and selection.payloads:
                encoded = [base64.b64encode(payload).decode("ascii") for payload in event.payloads]
                row |= {"payloads": encoded} if event.kind == "batch_prepared" else {"payload": encoded[index]}
            yield row


#: Columns of events that describe the event, with any number of entries, and not its rows.
_NOT_BY_ROW = frozenset(
    ("starts", "ends", "counts", "again", "members", "readers", "partitions", "owners", "targets", "parts")
)


def _row_fields(event: LogEvent, index: int) -> Row:
    fields: Row = {}
    for column, value in event.columns.items():
        name, cell = _ONE.get(column, column), value
        if column in _NOT_BY_ROW:
            cell = value.tolist() if isinstance(value, np.ndarray) else value
        elif isinstance(value, np.ndarray):
            cell = value[index].item()
        elif isinstance(value, list) or (column == "delayed" and isinstance(value, bytes)):
            cell = value[index]
        elif column == "messages":
            name, cell = "ids", value["ids"].tolist()
        elif column == "config":
            cell = msgspec.json.decode(value)
        fields[name] = cell
    if "smalls" in fields:
        lengths = fields.pop("key_len"), fields.pop("fairness_len")
        key, fairness_key, headers = split_small(fields.pop("smalls"), *lengths, fields["flags"])
        optional = {"key": key, "fairness_key": fairness_key, "headers": headers or None}
        fields |= {name: value for name, value in optional.items() if value is not None}
    return fields


def row_line(row: Row) -> str:
    """Return a line for people: offset, time, kind, message id, and the other fields that are set."""
    head = f"{row['partition']}:{row['offset']:<8} {timestamp(row['time_ms'])} {row['kind']:<15}"
    parts = [row.get("message_id", "")]
    for name, value in row.items():
        is_hidden = value is None or name in _FIRST or name in _INTERNAL or (name in _HIDDEN_IF_ZERO and not value)
        if is_hidden or (name == "max_retries" and value == 0xFFFF):
            continue
        if name in _TIMES and isinstance(value, int):
            value = timestamp(value)
        elif isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        parts.append(f"{name}={value}")
    return f"{head} {' '.join(part for part in parts if part)}".rstrip()
