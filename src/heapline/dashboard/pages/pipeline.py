"""The page of what moves data beside the workers: the archive to the lake, replays, sinks and undecided batches."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from heapline.contract.batches import ListBatches, ListSinks
from heapline.contract.call import Right
from heapline.contract.errors import GroupNotFound, PermissionDenied, TopicNotFound
from heapline.contract.groups import GetGroup
from heapline.contract.message import TopicAudit
from heapline.contract.replays import CancelReplay, GetReplay, ListReplays
from heapline.contract.stream import GroupInfo
from heapline.contract.topics import ListTopics
from heapline.dashboard.actions import Arguments, Dialog, Done, action, given
from heapline.dashboard.caller import Caller
from heapline.dashboard.features import features_of
from heapline.dashboard.page import Place, page
from heapline.dashboard.render import counted
from heapline.dashboard.topic_rows import ROWS_MAX, read_stats

ARCHIVE = "archive"  # the group that `heapline pipeline archive` moves on, in each topic


@page("/pipeline", "pipeline", "pipeline.html")
async def pipeline(caller: Caller, place: Place) -> dict[str, Any]:
    features = await features_of(caller)
    audits, job_topic = await _audits(caller)
    variables: dict[str, Any] = {"title": "Pipeline", "audits": audits, "job_topic": job_topic}
    variables |= {"archives": [], "replays": [], "sinks": [], "batches": []}
    if "groups" in features and (archives := await _archives(caller)):
        variables |= {"archives": archives, "job_topic": archives[0].topic}
    if "replay" in features:
        variables["replays"] = (await caller.do(ListReplays(limit=ROWS_MAX))).items
    if "batches" in features and caller.may_admin():
        variables["sinks"] = (await caller.do(ListSinks(limit=ROWS_MAX))).items
        with contextlib.suppress(PermissionDenied):  # that of producing to all topics
            found = await caller.do(ListBatches(limit=ROWS_MAX))
            variables["batches"] = [batch for batch in found.items if batch.state == "undecided"]
    return variables


async def _archives(caller: Caller) -> list[GroupInfo]:
    """Return the archive's group of each topic that has one, the largest lag first."""
    found = []
    for topic in (await caller.do(ListTopics(limit=ROWS_MAX))).items:
        if caller.may(Right.CONSUME, topic.name):
            with contextlib.suppress(GroupNotFound, TopicNotFound):
                found.append(await caller.do(GetGroup(topic.name, ARCHIVE)))
    return sorted(found, key=lambda group: (-group.lag, group.topic))


async def _audits(caller: Caller) -> tuple[list[tuple[str, TopicAudit]], str | None]:
    """Return the last audits by topic, broken promises first, then the oldest; and a topic that can be audited."""
    stats, _ = await read_stats(caller)
    logs = [(topic.topic, topic.log) for topic in stats if topic.log is not None]
    found = [(name, log.audit) for name, log in logs if log.audit is not None]
    found.sort(key=lambda pair: (not pair[1].refuted, pair[1].until, pair[0]))
    return found[:ROWS_MAX], (logs[0][0] if logs else None)


async def _cancel_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    replay = await caller.do(GetReplay(given(arguments, "name")))
    text = f"It has enqueued {counted(replay.replayed, 'message')} into {replay.into}, which stay."
    return Dialog(title=f"Cancel replay {replay.name}", text=text, button="Cancel replay")


@action("cancel-replay", _cancel_dialog)
async def cancel_replay(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    name = given(arguments, "name")
    await caller.do(CancelReplay(name))
    return Done(text=f"Cancelled the replay {name}")
