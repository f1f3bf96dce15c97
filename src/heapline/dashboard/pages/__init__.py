"""The pages. Importing this package registers them and their actions."""

from __future__ import annotations

from typing import NamedTuple

from heapline.dashboard.pages import (
    access,
    dead_letters,
    leases,
    messages,
    overview,
    pipeline,
    schedules,
    topic_changes,
    topics,
)

__all__ = [
    "SECTIONS",
    "access",
    "dead_letters",
    "leases",
    "messages",
    "overview",
    "pipeline",
    "schedules",
    "topic_changes",
    "topics",
]


class Section(NamedTuple):
    """An entry of the rail."""

    name: str
    path: str
    icon: str
    label: str
    for_admins: bool = False  # of all topics
    feature: str = "queue"  # that the broker must have


SECTIONS = (
    Section("overview", "/", "layout-dashboard", "Overview"),
    Section("topics", "/topics", "layers", "Topics"),
    Section("messages", "/messages", "mail-search", "Messages"),
    Section("dead", "/dead", "skull", "Dead letters"),
    Section("workers", "/workers", "cpu", "Workers", feature="leases"),
    Section("schedules", "/schedules", "calendar-clock", "Schedules", feature="schedules"),
    Section("pipeline", "/pipeline", "workflow", "Pipeline", feature="replay"),
    Section("access", "/access", "key-round", "Keys and users", for_admins=True),
    Section("audit", "/audit", "scroll-text", "Audit log", for_admins=True),
)
