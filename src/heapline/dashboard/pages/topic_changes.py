"""The actions of an administrator on a topic: create, change, pause, purge and delete it; its partitions and groups."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from heapline.cli.topic import BACKOFF, SETTINGS
from heapline.contract import groups as group_calls
from heapline.contract.config import FIXED_FIELDS, TopicConfig
from heapline.contract.errors import BadRequest
from heapline.contract.topics import (
    CountPurge,
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
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given, instant
from heapline.dashboard.caller import Caller
from heapline.dashboard.features import features_of
from heapline.dashboard.page import path_to
from heapline.dashboard.pages.topics import setting_value, shown
from heapline.dashboard.render import count, counted

UNDO_MAX = 1500  # characters of an address

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
    value = arguments.get("value", shown(setting_value(config, name)))
    return Dialog(
        title=f"{name} of {topic}",
        text=setting.help,
        button="Change",
        inputs=[Input(name="value", label="Value, in seconds or bytes where it is a time or a size", value=value)],
        facts={"Default": shown(setting_value(TopicConfig(), name))},
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
    before = shown(setting_value((await caller.do(GetTopic(topic))).config, name))
    await caller.do(UpdateTopic(topic, settings))
    undo = path_to("/do/set-config", topic=topic, setting=name, value=before)
    return Done(text=f"{name} of {topic} is now {text}", undo=undo)


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
    except (msgspec.DecodeError, RecursionError) as error:
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
    return Done(text=f"Resumed {topic}", undo=path_to("/do/pause", topic=topic))


async def _purge_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic = given(arguments, "topic")
    if "purge_count" in await features_of(caller):
        found = await caller.do(CountPurge(topic))
        as_of, number = found.as_of.isoformat(), found.count
        text = f"Removes what was enqueued before {as_of[11:19]} UTC and is ready or delayed when you confirm. "
        text += "Messages that are enqueued later stay, as does what is leased or dead then."
        pin = [Input(name="as_of", label="", kind="hidden", value=as_of)]
    else:
        stats = await caller.do(Stats(topic))
        pin, number = [], stats.ready + stats.delayed
        text = "Removes every message that is ready or delayed when you confirm, even if it arrives after this dialog "
        text += "was opened. Leased messages and dead letters stay."
    return Dialog(title=f"Purge {topic}", text=text, button=f"Purge {count(number)}", inputs=pin, to_type=topic)


@action("purge", _purge_dialog, types_topic=True)
async def purge(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic = given(arguments, "topic")
    is_pinned = "purge_count" in await features_of(caller)
    removed = await caller.do_confirmed(Purge(topic, instant(given(form, "as_of")) if is_pinned else None))
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
    before = await caller.do(group_calls.GetGroup(topic, group))
    await caller.do_confirmed(group_calls.ResetOffsets(topic, group, _position(text)))
    offsets = {str(each.partition): each.committed for each in before.offsets}
    undo = path_to("/do/reset-offsets", topic=topic, group=group, to=msgspec.json.encode(offsets).decode())
    return Done(text=f"Group {group} continues from {text}", undo=undo if len(undo) <= UNDO_MAX else None)


def _position(text: str) -> group_calls.Position:
    """Return the position that a person typed, or that an undo has filled in: {partition: offset}."""
    where: Any = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text
    try:
        if text.startswith("{"):
            where = msgspec.json.decode(text, type=dict[int, int], strict=False)
        elif isinstance(where, str) and where not in ("earliest", "latest"):
            where = datetime.fromisoformat(where)
    except (ValueError, msgspec.DecodeError):
        raise BadRequest(f"{text!r} is not earliest, latest, an offset or a time") from None
    return group_calls.position("to", where)


async def _delete_group_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    topic, group = given(arguments, "topic"), given(arguments, "group")
    text = "Deletes its offsets and its dead letters. The messages stay. The journal is no longer kept for it."
    return Dialog(title=f"Delete group {group} of {topic}", text=text, button="Delete group", to_type=topic)


@action("delete-group", _delete_group_dialog, types_topic=True)
async def delete_group(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    topic, group = given(arguments, "topic"), given(arguments, "group")
    await caller.do_confirmed(group_calls.DeleteGroup(topic, group))
    return Done(text=f"Deleted group {group} of {topic}")
