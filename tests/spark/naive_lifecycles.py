"""A naive model of lifecycles: one event after the other, one message at a time."""

from __future__ import annotations

from typing import Any

from heapline.spark.jobs.lifecycles import COLUMNS

Row = dict[str, Any]
ENDS = {"acked": "acked", "cancelled": "cancelled", "expired": "expired"}


def followed(events: list[Row]) -> dict[tuple[str, int], Row]:
    lives: dict[tuple[str, int], Row] = {}
    counted: dict[tuple[str, int], Any] = {}
    for event in sorted(events, key=lambda row: (row["topic"], row["partition"], row["offset"])):
        if event["kind"] == "purged":
            purge(lives, event)
        elif event["kind"] == "fired" and event["id"] is None:
            counted[event["topic"], event["partition"]] = event["timestamp"]
        elif event["id"] is not None and not event["kind"].startswith("group") and event["kind"] != "moved":
            life = lives.setdefault((event["topic"], event["id"]), born(event))
            happen(life, event)
    for life in lives.values():
        fired = counted.get((life["topic"], life["partition"]))
        if life["outcome"] == "delayed" and fired is not None and life["ready_at"] <= fired:
            life["outcome"], life["ready_at"] = "waiting", None
    return lives


def born(event: Row) -> Row:
    life = dict.fromkeys(COLUMNS)
    life |= {name: event[name] for name in ("topic", "partition", "message_id", "id")}
    return life | {"attempts": 0, "retries": 0, "lease_expiries": 0, "is_over": False}


def wait(life: Row, due: Any) -> None:
    life["outcome"], life["ready_at"] = ("waiting", None) if due is None else ("delayed", due)


def end(life: Row, outcome: str, at: Any, over: bool = True) -> None:
    life |= {"outcome": outcome, "done_at": at, "ready_at": None, "is_over": over}


def happen(life: Row, event: Row) -> None:
    kind, at = event["kind"], event["at"]
    life["last_offset"] = event["offset"]
    if kind in ("enqueued", "batch_committed"):
        life |= {name: event[name] for name in ("priority", "batch_id", "payload_bytes")}
        life |= {"enqueued_at": at, "enqueued_offset": event["offset"], "due_at": max(at, event["due"] or at)}
        wait(life, event["due"])
    elif kind == "rescheduled":
        life["priority"] = event["priority"]
        if life["first_leased_at"] is None:
            life["due_at"] = max(at, event["due"] or at)
        wait(life, event["due"])
    elif kind == "leased":
        life["attempts"] += 1
        life |= {"outcome": "leased", "ready_at": None, "last_leased_at": at}
        if life["first_leased_at"] is None:
            late = (at - life["due_at"]).total_seconds()
            life |= {"first_leased_at": at, "wait_ms": max(0, round(late * 1000))}
    elif kind in ("nacked", "lease_expired"):
        life["retries" if kind == "nacked" else "lease_expiries"] += 1
        life["reason"] = "lease expired" if kind == "lease_expired" else event["reason"] or life["reason"]
        wait(life, event["due"])
    elif kind == "released":
        life["attempts"] -= 1
        wait(life, None)
    elif kind == "fired":
        wait(life, None)
    elif kind == "replayed":
        life |= {"done_at": None, "service_ms": None}
        wait(life, event["due"])
    elif kind == "dead_lettered":
        life["reason"] = event["reason"]
        end(life, "dead", at, over=not event["kept"])
    elif kind == "dead_deleted":
        life["is_over"] = True
    elif kind in ENDS and event["returned"] is not False:
        end(life, ENDS[kind], at)
    if kind in ("acked", "dead_lettered"):
        life["service_ms"] = round((at - life["last_leased_at"]).total_seconds() * 1000)


def purge(lives: dict[tuple[str, int], Row], event: Row) -> None:
    for life in lives.values():
        mine = (life["topic"], life["partition"]) == (event["topic"], event["partition"])
        if mine and life["outcome"] in ("waiting", "delayed"):
            end(life, "purged", event["at"])
