"""The list of topics, one topic in tabs, and what an administrator does to a topic."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from heapline.cli.top.sampler import percentile_ms
from heapline.cli.topic import BACKOFF, SETTINGS
from heapline.contract import groups as group_calls
from heapline.contract.call import Right
from heapline.contract.config import FIXED_FIELDS, TopicConfig
from heapline.contract.errors import BadRequest
from heapline.contract.inspection import Explain, GetDueTimes
from heapline.contract.message import TopicStats
from heapline.contract.messages import Peek
from heapline.contract.topics import (
    CreateTopic,
    DeleteTopic,
    GetTopic,
    PauseTopic,
    Purge,
    ResumeTopic,
    SetPartitionThrottled,
    Snapshot,
    Stats,
    TopicSettings,
    UpdateTopic,
)
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given
from heapline.dashboard.caller import Caller
from heapline.dashboard.charts import SPANS, depths_of, rates_of, read_series, waits_of
from heapline.dashboard.features import features_of
from heapline.dashboard.page import Place, page, path_to
from heapline.dashboard.pages.leases import leases_of
from heapline.dashboard.render import count, counted
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
    "partitions": "Partitions",
    "config": "Config",
}
NEEDS = {"leases": "leases", "groups": "groups"}  # tab -> feature of the broker


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
        value, default = _value(config, setting.name), _value(TopicConfig(), setting.name)
        field = (setting.name, shown(value), value != default, setting.name not in FIXED_FIELDS, setting.help)
        panels.setdefault(setting.panel, []).append(field)
    return panels


def _value(config: TopicConfig, name: str) -> Any:
    if name.startswith(BACKOFF):
        return getattr(config.backoff, name.removeprefix(BACKOFF))
    return getattr(config, name)


def shown(value: Any) -> str:
    """Return a setting as JSON without quotes around text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# -- create, change, delete --------------------------------------------------------------------------------------------


async def _create_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    return Dialog(
        title="Create topic",
        text="Most settings can be changed later. The order of priorities cannot.",
        button="Create topic",
        inputs=[
            Input(name="name", label="Name", value=arguments.get("name", ""), hint="name, or namespace/name"),
            Input(name="mode", label="Served first", kind="select", options=["min", "max"],
                  value=arguments.get("mode", "min"), hint="the smallest or the largest priority"),
            Input(name="partitions", label="Partitions", kind="number", value=arguments.get("partitions", "1")),
        ],
    )  # fmt: skip


@action("create-topic", _create_dialog)
async def create_topic(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    name = given(form, "name").strip()
    settings = {"mode": form.get("mode", "min"), "partitions": form.get("partitions") or "1"}
    await caller.do(CreateTopic(name, _settings(settings)))
    return Done(text=f"Created {name}", goto=f"/topics/{name}")


async def _setting_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    name, topic = given(arguments, "setting"), given(arguments, "topic")
    setting = next((setting for setting in SETTINGS if setting.name == name), None)
    if setting is None or name in FIXED_FIELDS:
        raise BadRequest(f"{name} is not a setting that can be changed")
    config = (await caller.do(GetTopic(topic))).config
    value = arguments.get("value", shown(_value(config, name)))
    return Dialog(
        title=f"{name} of {topic}",
        text=setting.help,
        button="Change",
        inputs=[Input(name="value", label="Value, in seconds or bytes where it is a time or a size", value=value)],
        facts={"Default": shown(_value(TopicConfig(), name))},
    )


@action("set-config", _setting_dialog)
async def set_config(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    name, topic = given(arguments, "setting"), given(arguments, "topic")
    text = form.get("value", "").strip()
    if name.startswith(BACKOFF):
        config = (await caller.do(GetTopic(topic))).config
        field = name.removeprefix(BACKOFF)
        try:
            value = float(text)
        except ValueError:
            raise BadRequest(f"{name} must be a number, got {text!r}") from None
        settings = TopicSettings(backoff=msgspec.structs.replace(config.backoff, **{field: value}))
    else:
        settings = _settings({name: text})
    await caller.do(UpdateTopic(topic, settings))
    return Done(text=f"{name} of {topic} is now {text}")


def _settings(texts: Mapping[str, str]) -> Any:
    """Return settings from what a person typed: numbers, true and false, text, or JSON."""
    values = {name: _parsed(text) for name, text in texts.items()}
    try:
        return msgspec.convert(values, TopicSettings, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error).replace(" - at `$.", " (").replace("`", ")")) from None


def _parsed(text: str) -> Any:
    if text[:1] not in ("{", "["):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadRequest(f"this is not valid JSON: {error}") from None


async def _pause_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic = given(arguments, "topic")
    stats = await caller.do(Stats(topic))
    return Dialog(
        title=f"Pause {topic}",
        text=f"Workers receive nothing more; {count(stats.ready)} messages wait. Enqueues continue, and leases stay.",
        button="Pause",
        inputs=[Input(name="minutes", label="For how many minutes", kind="number", value=arguments.get("minutes", ""),
                      hint="empty: until it is resumed")],
    )  # fmt: skip


@action("pause", _pause_dialog)
async def pause(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    until = None
    if minutes := form.get("minutes", "").strip():
        try:
            until = datetime.now(UTC) + timedelta(minutes=float(minutes))
        except (ValueError, OverflowError):
            raise BadRequest(f"{minutes!r} is not a number of minutes") from None
    await caller.do(PauseTopic(topic, until))
    return Done(text=f"Paused {topic}", undo=path_to("/do/resume", topic=topic))


async def _resume_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic = given(arguments, "topic")
    stats = await caller.do(Stats(topic))
    text = f"Workers receive messages again; {count(stats.ready)} wait."
    return Dialog(title=f"Resume {topic}", text=text, button="Resume")


@action("resume", _resume_dialog)
async def resume(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    await caller.do(ResumeTopic(topic))
    return Done(text=f"Resumed {topic}")


async def _purge_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic = given(arguments, "topic")
    stats = await caller.do(Stats(topic))
    return Dialog(
        title=f"Purge {topic}",
        text="Removes every message that is ready or delayed when you confirm. Leased messages and dead letters stay.",
        button=f"Purge {count(stats.ready + stats.delayed)}",
        facts={"Ready": count(stats.ready), "Delayed": count(stats.delayed)},
        to_type=topic,
    )


@action("purge", _purge_dialog, types_topic=True)
async def purge(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    removed = await caller.do_confirmed(Purge(topic))
    return Done(text=f"Removed {counted(removed.count, 'message')} of {topic}")


async def _delete_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic = given(arguments, "topic")
    stats = await caller.do(Stats(topic))
    total = stats.ready + stats.delayed + stats.leased + stats.dead
    return Dialog(
        title=f"Delete {topic}",
        text=f"Deletes the topic with {counted(total, 'message')}, dead letters included, its groups and its journal.",
        button="Delete topic",
        to_type=topic,
    )


@action("delete-topic", _delete_dialog, types_topic=True)
async def delete_topic(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    await caller.do_confirmed(DeleteTopic(topic))
    return Done(text=f"Deleted {topic}", goto="/topics")


# -- partitions --------------------------------------------------------------------------------------------------------


def _partition(arguments: Arguments) -> int:
    text = given(arguments, "partition")
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise BadRequest(f"{text!r} is not a partition")
    return int(text)


async def _throttle_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, partition = given(arguments, "topic"), _partition(arguments)
    return Dialog(
        title=f"Throttle partition {partition} of {topic}",
        text="Pops leave the partition out until it is released; its messages wait. This survives a restart.",
        button="Throttle",
        inputs=[Input(name="reason", label="Reason", value=arguments.get("reason", ""), hint="shown to others")],
    )


@action("throttle", _throttle_dialog)
async def throttle(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, partition = given(arguments, "topic"), _partition(arguments)
    await caller.do(SetPartitionThrottled(topic, partition, True, form.get("reason") or None))
    undo = path_to("/do/release-partition", topic=topic, partition=str(partition))
    return Done(text=f"Partition {partition} of {topic} is throttled", undo=undo)


async def _release_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, partition = given(arguments, "topic"), _partition(arguments)
    title = f"Release partition {partition} of {topic}"
    return Dialog(title=title, text="Pops take messages from it again.", button="Release")


@action("release-partition", _release_dialog)
async def release_partition(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, partition = given(arguments, "topic"), _partition(arguments)
    await caller.do(SetPartitionThrottled(topic, partition, False))
    return Done(text=f"Partition {partition} of {topic} is released")


async def _snapshot_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic = given(arguments, "topic")
    text = "The next start then reads less of the journal. It takes a moment of the disk and nothing else."
    return Dialog(title=f"Write a snapshot of {topic}", text=text, button="Snapshot now")


@action("snapshot", _snapshot_dialog)
async def snapshot(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    await caller.do(Snapshot(topic))
    return Done(text=f"Wrote a snapshot of {topic}")


# -- groups ------------------------------------------------------------------------------------------------------------


async def _reset_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, group = given(arguments, "topic"), given(arguments, "group")
    info = await caller.do(group_calls.GetGroup(topic, group))
    return Dialog(
        title=f"Move group {group}",
        text="The group continues from another position. Backwards, it reads rows again; forwards, it skips rows.",
        button="Move group",
        facts={"Lag": count(info.lag), "Members": count(len(info.members))},
        inputs=[Input(name="to", label="To", value=arguments.get("to", "latest"),
                      hint="earliest, latest, an offset, or a time such as 2026-11-19T03:00:00Z")],
    )  # fmt: skip


@action("reset-offsets", _reset_dialog)
async def reset_offsets(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, group = given(arguments, "topic"), given(arguments, "group")
    text = given(form, "to").strip()
    where: Any = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text
    if isinstance(where, str) and where not in ("earliest", "latest"):
        try:
            where = datetime.fromisoformat(where)
        except ValueError:
            raise BadRequest(f"{text!r} is not earliest, latest, an offset or a time") from None
    await caller.do(group_calls.ResetOffsets(topic, group, group_calls.position("to", where)))
    return Done(text=f"Group {group} continues from {text}")


async def _delete_group_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, group = given(arguments, "topic"), given(arguments, "group")
    text = "Deletes its offsets and its dead letters. The messages stay. The journal is no longer kept for it."
    return Dialog(title=f"Delete group {group} of {topic}", text=text, button="Delete group", to_type=topic)


@action("delete-group", _delete_group_dialog, types_topic=True)
async def delete_group(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, group = given(arguments, "topic"), given(arguments, "group")
    await caller.do_confirmed(group_calls.DeleteGroup(topic, group))
    return Done(text=f"Deleted group {group} of {topic}")
