"""The list of topics, and one topic in tabs."""

from __future__ import annotations

from typing import Any

import msgspec

from heapline.cli.top.sampler import percentile_ms
from heapline.cli.topic import BACKOFF, SETTINGS
from heapline.contract import groups as group_calls
from heapline.contract.call import Right
from heapline.contract.config import FIXED_FIELDS, TopicConfig
from heapline.contract.inspection import Explain, GetDueTimes
from heapline.contract.message import TopicStats
from heapline.contract.messages import Peek
from heapline.contract.schedules import ListSchedules
from heapline.contract.topics import (
    GetTopic,
    Stats,
)
from heapline.dashboard.caller import Caller
from heapline.dashboard.charts import SPANS, depths_of, rates_of, read_series, waits_of
from heapline.dashboard.features import features_of
from heapline.dashboard.page import Place, page
from heapline.dashboard.pages.leases import leases_of
from heapline.dashboard.topic_rows import ROWS_MAX, TopicRows, rates_now, read_stats

HERD = 0.5  # share of the delayed messages that become due in one bucket of at most an hour; many workers then wait
HERD_MIN = 100
LATENCIES = {
    "enqueue": "Enqueue, until durable",
    "pop": "Pop, without waiting",
    "commit": "Commit of a unit",
    "fired": "Due until ready",
    "late": "Timers, lateness",
}


@page("/topics", "topics", "topics.html")
async def topics(caller: Caller, place: Place) -> dict[str, Any]:
    stats, is_cut = await read_stats(caller)
    wanted = place.get("q").lower()
    found = [topic for topic in stats if wanted in topic.topic.lower()]
    rows = TopicRows(found, place.choice("sort", "topic", "oldest", "ready", "delayed", "leased", "dead"))
    first = min(int(place.get("from")) if place.get("from").isdecimal() else 0, max(0, len(found) - 1))
    return {
        "title": "Topics",
        "wanted": place.get("q"),
        "rates": rates_now(caller, stats),
        "rows": rows,
        "topics": rows.rows[first : first + ROWS_MAX],
        "first": first,
        "found": len(found),
        "topic_count": len(stats),
        "is_cut": is_cut,
        "page_rows": ROWS_MAX,
    }


# -- one topic ---------------------------------------------------------------------------------------------------------

TABS = {
    "now": "Now",
    "next": "Next",
    "leases": "Leases",
    "groups": "Groups",
    "schedules": "Schedules",
    "partitions": "Partitions",
    "config": "Config",
}
NEEDS = {"leases": "leases", "groups": "groups", "schedules": "schedules"}  # tab -> feature of the broker


@page("/topics/{topic:path}", "topics", "topic.html")
async def topic(caller: Caller, place: Place) -> dict[str, Any]:
    name = place["topic"]
    features = await features_of(caller)
    tabs = {tab: label for tab, label in TABS.items() if tab not in NEEDS or NEEDS[tab] in features}
    tab = place.choice("tab", *tabs)
    info = await caller.do(GetTopic(name))
    stats: TopicStats | None = None
    if caller.may(Right.CONSUME, name):
        stats = await caller.do(Stats(name))
    variables: dict[str, Any] = {
        "title": name,
        "topic": name,
        "info": info,
        "stats": stats,
        "tabs": tabs,
        "tab": tab,
        "features": features,
    }
    if stats is None and tab != "config":
        variables["tab"] = "config"
    if variables["tab"] == "config":
        variables["settings"] = settings_of(info.config)
    elif tab == "now":
        assert stats is not None
        variables |= _now(stats)
        if "due_times" in features and stats.delayed:
            variables["times"] = await caller.do(GetDueTimes(name))
        if "series" in features:
            series = await read_series(caller, name, place)
            charts = {"rates": rates_of(series), "depths": depths_of(series), "waits": waits_of(series)}
            variables |= {"charts": charts, "spans": SPANS, "span": place.choice("span", *SPANS)}
    elif tab == "next":
        variables |= await _next(caller, name, features)
    elif tab == "leases":
        variables |= await leases_of(caller, name, place)
    elif tab == "schedules":
        schedules, _ = await caller.all(ListSchedules, limit=1000)
        variables["schedules"] = [schedule for schedule in schedules if schedule.topic == name][:ROWS_MAX]
    elif tab == "groups":
        variables["groups"] = (await caller.do(group_calls.ListGroups(name, limit=ROWS_MAX))).items
    return variables


async def _next(caller: Caller, topic: str, features: frozenset[str]) -> dict[str, Any]:
    """Return the messages that would be popped next, with the reasons if the broker can give them."""
    if "explain" in features:
        explanation = await caller.do(Explain(topic, ROWS_MAX))
        return {
            "lines": [(item.line, item.message, item.text) for item in explanation.items],
            "holds": explanation.holds,
        }
    found = await caller.do(Peek(topic, limit=ROWS_MAX, max_bytes=1 << 20))
    return {"lines": [(line, message, "") for line, message in enumerate(found.items, 1)], "holds": []}


def _now(stats: TopicStats) -> dict[str, Any]:
    """Return the bars and figures of the tab Now."""
    due = [bucket for bucket in stats.due_histogram if bucket.count]
    soon = [bucket for bucket in due if bucket.within is not None and bucket.within <= 3600]
    herds = {b.within for b in soon if b.count >= max(HERD_MIN, HERD * stats.delayed)}
    waits = []
    for kind, label in LATENCIES.items():
        found = stats.latencies.get(kind)
        if found is not None and any(found.counts):
            half, most = (percentile_ms(found.bounds_ms, found.counts, percent) for percent in (50, 95))
            waits.append((label, _seconds(half), _seconds(most), sum(found.counts)))
    return {
        "depths": stats.depth_by_priority,
        "depth_max": max((bucket.count for bucket in stats.depth_by_priority), default=1),
        "charts": {},
        "times": None,
        "due": due,
        "due_max": max((bucket.count for bucket in due), default=1),
        "herds": herds,
        "waits": waits,
    }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def settings_of(config: TopicConfig) -> dict[str, list[tuple[str, str, bool, bool, str]]]:
    """Return the settings by panel: name, value, whether it was changed, whether it can be, and what it means."""
    panels: dict[str, list[tuple[str, str, bool, bool, str]]] = {}
    for setting in SETTINGS:
        value, default = setting_value(config, setting.name), setting_value(TopicConfig(), setting.name)
        field = (setting.name, shown(value), value != default, setting.name not in FIXED_FIELDS, setting.help)
        panels.setdefault(setting.panel, []).append(field)
    return panels


def setting_value(config: TopicConfig, name: str) -> Any:
    if name.startswith(BACKOFF):
        return getattr(config.backoff, name.removeprefix(BACKOFF))
    return getattr(config, name)


def shown(value: Any) -> str:
    """Return a setting as JSON without quotes around text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
