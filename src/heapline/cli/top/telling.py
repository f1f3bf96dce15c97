"""What `heapline top --json` says: one object a look, with rates and percentiles beside the plain figures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from heapline.cli.present import json_line
from heapline.cli.top.model import TopicWatch, Watch

FIGURES = ("ready", "delayed", "leased", "dead", "paused", "oldest_ready_age", "lease_ends_in", "journal_bytes",
           "memory_bytes")  # fmt: skip
LATENCIES = ("enqueue", "pop", "commit")


def as_json(watch: Watch, rows: Sequence[TopicWatch], server: str, *, in_full: bool = False) -> str:
    totals = watch.totals()
    told = {
        "at": _now(), "server": server, "totals": totals._asdict(),
        "topics": [_topic(row, in_full) for row in rows],
    }  # fmt: skip
    return json_line(told)


def trouble_as_json(server: str, error: Exception) -> str:
    return json_line({"at": _now(), "server": server, "error": type(error).__name__, "detail": str(error)})


def _topic(topic: TopicWatch, in_full: bool) -> dict[str, Any]:
    if topic.trouble or topic.stats is None:
        return {"topic": topic.name, "trouble": topic.trouble}
    told: dict[str, Any] = {"topic": topic.name, **{name: getattr(topic.stats, name) for name in FIGURES}}
    told["due_10s"], told["due_60s"] = topic.due_within(10), topic.due_within(60)
    told["rates"] = topic.rates and topic.rates._asdict()  # messages a second; null until there were two looks
    told["latency_ms"] = {what: topic.latency(what)._asdict() for what in LATENCIES}
    if in_full:
        told["partitions"] = [
            {**msgspec.to_builtins(part), "leased_rate": topic.served.get(part.partition)}
            for part in topic.stats.partitions
        ]
        told["depth_by_priority"] = msgspec.to_builtins(topic.stats.depth_by_priority)
        told["due_histogram"] = msgspec.to_builtins(topic.stats.due_histogram)
    return told


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
