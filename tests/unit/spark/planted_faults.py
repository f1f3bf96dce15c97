"""Faults planted into the events of a correct history: one of each kind that the audit must find.

Each function takes the rows of a log and returns them with one fault, as a faulty broker would have written them, with
offsets without gaps. It returns None if the history is not suitable for the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

Row = dict[str, Any]
Rows = list[Row]
NEW = ("enqueued", "batch_committed")
STATES = (*NEW, "fired", "leased", "acked", "nacked", "lease_expired", "released", "dead_lettered", "replayed",
          "dead_deleted", "cancelled", "expired", "rescheduled")  # fmt: skip


def numbered(rows: Rows) -> Rows:
    """Return offsets without gaps; inserted rows are at fractions."""
    ends: dict[int, int] = {}
    found = []
    for row in sorted(rows, key=lambda row: (row["partition"], row["offset"])):
        offset = ends.get(row["partition"], 0)
        ends[row["partition"]] = offset + 1
        found.append({**row, "offset": offset})
    return found


def of_message(rows: Rows, id: int) -> Rows:
    return sorted((r for r in rows if r["id"] == id and r["kind"] in STATES), key=lambda r: r["offset"])


def end_of(rows: Rows, partition: int) -> Row:
    return max((r for r in rows if r["partition"] == partition), key=lambda r: r["offset"])


def dropped_ack(rows: Rows) -> Rows | None:
    ack = next((r for r in rows if r["kind"] == "acked"), None)
    return None if ack is None else [r for r in rows if r is not ack]


def second_lease(rows: Rows) -> Rows | None:
    lease = next((r for r in rows if r["kind"] == "leased"), None)
    return None if lease is None else [*rows, {**lease, "offset": lease["offset"] + 0.5, "holder": "bob"}]


def early_lease(rows: Rows) -> Rows | None:
    for lease in (r for r in rows if r["kind"] == "leased"):
        before = [r for r in of_message(rows, lease["id"]) if r["offset"] < lease["offset"] and r["kind"] != "fired"]
        if before and before[-1]["due"] is not None and not before[-1]["due_wall"]:
            early = {**lease, "at": before[-1]["due"] - timedelta(milliseconds=1)}
            return [early if r is lease else r for r in rows]
    return None


def worse_pop(rows: Rows) -> Rows | None:
    """A message that waited while another was popped had the best priority of all."""
    quiet = max((r["unit"] for r in rows if r["kind"] in ("throttled", "config_changed")), default=0)
    leases = [r for r in rows if r["kind"] == "leased" and r["unit"] > quiet]
    for new in (r for r in rows if r["kind"] in NEW and r["id"] is not None and r["due"] is None):
        life = of_message(rows, new["id"])
        until = life[1]["unit"] if len(life) > 1 else 1 << 60
        purges = [r["unit"] for r in rows if r["kind"] == "purged" and r["partition"] == new["partition"]]
        until = min([until, *(unit for unit in purges if unit >= new["unit"])])
        if any(new["unit"] < lease["unit"] < until for lease in leases):
            return [{**r, "priority": r["best"]} if r is new else r for r in rows]
    return None


def torn_batch(rows: Rows) -> Rows | None:
    for row in (r for r in rows if r["kind"] == "batch_committed" and r["id"] is not None):
        mates = [r for r in rows if r["kind"] == row["kind"] and r["details"] == row["details"] and r["id"] is not None]
        if len(of_message(rows, row["id"])) == 1 and len(mates) > 1 and not _purged(rows, row["partition"]):
            return [r for r in rows if r is not row]
    return None


def _purged(rows: Rows, partition: int) -> bool:
    return any(r["kind"] == "purged" and r["partition"] == partition for r in rows)


def lease_after_ack(rows: Rows) -> Rows | None:
    ack = next((r for r in rows if r["kind"] == "acked"), None)
    return None if ack is None else _later(rows, ack["id"], ack["partition"], "leased")


def seen_though_aborted(rows: Rows) -> Rows | None:
    for row in (r for r in rows if r["kind"] == "batch_prepared"):
        aborted = any(r["kind"] == "batch_aborted" and r["batch_id"] == row["batch_id"] for r in rows)
        if aborted and "first_id" in (said := msgspec.json.decode(row["details"])):
            return _later(rows, said["first_id"], row["partition"], "leased")
    return None


def ack_of_a_waiting_message(rows: Rows) -> Rows | None:
    for row in (r for r in rows if r["kind"] == "enqueued"):
        if len(of_message(rows, row["id"])) == 1 and not _purged(rows, row["partition"]):
            return _later(rows, row["id"], row["partition"], "acked")
    return None


def message_from_nowhere(rows: Rows) -> Rows | None:
    known = next((r for r in rows if r["kind"] == "enqueued"), None)
    return None if known is None else _later(rows, known["id"] + (1 << 40), known["partition"], "cancelled")


def came_twice(rows: Rows) -> Rows | None:
    known = next((r for r in rows if r["kind"] == "enqueued" and len(of_message(rows, r["id"])) > 1), None)
    return None if known is None else [*rows, {**known, "offset": known["offset"] + 0.5}]


def _later(rows: Rows, id: int, partition: int, kind: str) -> Rows:
    """Something happens to a message when all else has."""
    last = end_of(rows, partition)
    empty = dict.fromkeys(last, None)
    copied = ("topic", "partition", "timestamp", "wall_time", "best")
    unit, seq = max(r["unit"] for r in rows) + 1, max(r["seq"] or 0 for r in rows) + 1
    reported = {name: last[name] for name in copied} | {"at": last["timestamp"], "kind": kind, "id": id, "unit": unit}
    return [*rows, empty | reported | {"offset": last["offset"] + 1, "seq": seq if kind == "leased" else None}]


#: The planted faults, and the promise that each breaks.
PLANTS: dict[Callable[[Rows], Rows | None], str] = {
    dropped_ack: "none_lost", message_from_nowhere: "none_lost", came_twice: "none_lost", second_lease: "one_holder",
    early_lease: "not_early", worse_pop: "rank", torn_batch: "batches", seen_though_aborted: "batches",
    lease_after_ack: "stays_over", ack_of_a_waiting_message: "lawful",
}  # fmt: skip
