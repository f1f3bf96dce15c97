"""How `heapline journal` shows what it found: tables for people, plain dicts for --json. Looks at no file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from heapline.cli.examine import Examined, Finding
from heapline.cli.figures import Figures
from heapline.cli.holders import Holders
from heapline.cli.losses import Plan
from heapline.cli.places import Places
from heapline.cli.present import columns_table, count, facts_table, moment, size, some
from heapline.ulid import to_ulid


def show_plan(console: Console, plan: Plan) -> None:
    kinds = ", ".join(f"{count(n)} {kind}" for kind, n in plan.rows.most_common())
    units = f"{plan.first_lost} to {max(plan.last_lost, plan.first_lost)}"
    facts = [
        ("cut", f"{escape(plan.cut_path)} at byte {plan.cut_at}, and all segments after it"),
        ("units lost", f"{units}: {count(len(plan.readable))} readable, {count(plan.unreadable)} not"),
        ("rows lost, of the readable", kinds or "none"),
        ("messages gone", _ids(plan.messages)),
        ("acks undone: will come again", _ids(plan.acked)),
    ]
    console.print(facts_table("What repair will do", facts))


def _ids(ids: list[int]) -> str:
    return f"{count(len(ids))}: {some([to_ulid(id) for id in ids], 8)}" if ids else "none that can be read"


def print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def _finding_dict(finding: Finding) -> dict[str, Any]:
    return {"path": finding.path, "offset": finding.offset, "detail": finding.detail, "advice": finding.advice}


def catalog_dict(finding: Finding) -> dict[str, Any]:
    return {"topic": None, "ok": False, "findings": [_finding_dict(finding)]}


def verdict_dict(found: Examined) -> dict[str, Any]:
    report = found.report
    return {
        "topic": found.topic, "folder": found.folder, "ok": not found.findings, "running": found.running,
        "segments": report.segments, "units": report.units, "first_unit": report.first_unit,
        "last_unit": report.last_unit, "frames": report.frames, "messages": report.rows, "bytes": report.bytes,
        "torn_unit": report.torn_unit or None, "snapshots": found.snapshots, "indexes": found.indexes,
        "state": found.state, "findings": [_finding_dict(finding) for finding in found.findings],
    }  # fmt: skip


def show_verdict(console: Console, places: Places, catalog: list[Finding], results: list[Examined]) -> None:
    for found in results:
        report = found.report
        state = "not rebuilt" if found.state is None else ", ".join(f"{count(n)} {s}" for s, n in found.state.items())
        facts = [
            ("segments", f"{report.segments}, {size(report.bytes)} in units"),
            ("units", f"{count(report.units)} ({report.first_unit} to {report.last_unit})"),
            ("messages written", count(report.rows)),
            ("snapshots, indexes", f"{found.snapshots}, {found.indexes}"),
            ("messages now", state),
        ]  # fmt: skip
        if report.torn_unit:
            facts.append(("torn write", f"unit {report.torn_unit}, never answered for; the next open removes it"))
        if found.running:
            facts.append(("in use", "a process has it open; checked up to where it is durable"))
        verdict = (
            f"[red]{len(found.findings)} finding(s)[/red]" if found.findings else "[green]every byte checks[/green]"
        )
        facts.append(("verdict", verdict))
        console.print(facts_table(escape(found.topic), facts))
    for finding in [*catalog, *(finding for found in results for finding in found.findings)]:
        console.print(f"[red]{escape(finding.path)} at byte {finding.offset}: {escape(finding.detail)}[/red]")
        console.print(f"   → {escape(finding.advice)}")
    for folder in places.unnamed:
        console.print(f"[yellow]{escape(folder)} is in no catalog: the next open removes it[/yellow]")
    if not results and not catalog:
        console.print("there are no topics here")


def figures_dict(found: Figures) -> dict[str, Any]:
    return {
        "topic": found.topic, "folder": found.folder, "running": found.running, "segments": len(found.segments),
        "bytes": sum(found.segments.values()), "unit_bytes": found.unit_bytes, "live_bytes_max": found.live_bytes,
        "units": found.units, "first_unit": found.first_unit, "last_unit": found.last_unit,
        "events": dict(found.events), "rows": dict(found.rows), "from_ms": found.from_ms, "to_ms": found.to_ms,
        "snapshots": {str(unit): nbytes for unit, nbytes in found.snapshots.items()}, "state": found.state,
        "live_messages": None if found.live is None else {str(n): c for n, (c, _) in found.live.items()},
        "given_back_segments": found.given_back, "given_back_bytes": found.given_back * found.segment_bytes,
        "moved_records": found.rows["moved"], **_holders_dict(found.holders),
    }  # fmt: skip


def _holders_dict(found: Holders | None) -> dict[str, Any]:
    if found is None:
        return {"kept_for": None, "groups": None}
    kept = {name: {"segments": n, "bytes": found.bytes[name]} for name, n in found.segments.items()}
    return {"kept_for": kept, "groups": {name: asdict(figures) for name, figures in found.groups.items()}}


def show_figures(console: Console, found: Figures) -> None:
    total = sum(found.segments.values())
    live = "not known"
    if found.live_bytes is not None and found.unit_bytes:
        share = min(1.0, found.live_bytes / found.unit_bytes)
        live = (
            f"at most {size(found.live_bytes)} ({share:.0%} of what is written); the rest is of messages that are gone"
        )
    snapshots = ", ".join(f"unit {unit} ({size(n)})" for unit, n in found.snapshots.items()) or "none"
    state = "not known" if found.state is None else ", ".join(f"{count(n)} {s}" for s, n in found.state.items())
    facts = [
        ("files", f"{len(found.segments)} segment(s), {size(total)} on disk, {size(found.unit_bytes)} written"),
        ("live", live),
        ("units", f"{count(found.units)} ({found.first_unit} to {found.last_unit})"),
        ("from", moment(found.from_ms) if found.units else "nothing written yet"),
        ("to", moment(found.to_ms) if found.units else ""),
        ("messages now", state),
        ("snapshots", snapshots),
    ]
    won = f"{count(found.given_back)} segment(s), {size(found.given_back * found.segment_bytes)}"
    facts.append(("given back", f"{won} since the topic was made; {count(found.rows['moved'])} records moved for that"))
    if found.running:
        facts.append(("in use", "a process has it open; counted up to where it is durable"))
    console.print(facts_table(escape(found.topic), facts))
    kinds = [(kind, count(found.events[kind]), count(n)) for kind, n in found.rows.most_common()]
    if kinds:
        console.print(columns_table("", ("kind", "events", "rows"), kinds, right=(1, 2)))
    if found.holders is not None:
        _show_holders(console, found.holders)


def _show_holders(console: Console, found: Holders) -> None:
    kept = [(escape(name), count(n), size(found.bytes[name])) for name, n in found.segments.most_common()]
    console.print(columns_table("", ("kept for", "segments", "bytes"), kept, right=(1, 2)))
    groups = [
        (escape(name), count(group.lag), count(group.dead), "yes" if group.holds else "no")
        for name, group in found.groups.items()
    ]
    if groups:
        console.print(columns_table("", ("group", "lag", "dead letters", "holds the journal"), groups, right=(1, 2)))
