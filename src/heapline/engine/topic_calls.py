"""Handlers of the calls on a topic as a whole: its settings, statistics, pausing, purging and snapshots."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from msgspec import UNSET

from heapline.contract import topics
from heapline.contract.call import Count, Page
from heapline.contract.check import fail, instant_to_ms
from heapline.contract.context import Context
from heapline.contract.message import TopicInfo, TopicStats
from heapline.core.events import Paused, Resumed, Throttled
from heapline.core.now import Now
from heapline.engine.handlers import handles, page_by_name
from heapline.engine.stats import topic_stats
from heapline.engine.topics import TopicKeeper


def given(settings: Any) -> dict[str, Any]:
    """Return the settings that a caller passed."""
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not UNSET}


@handles(topics.CreateTopic)
def create_topic(broker: TopicKeeper, command: topics.CreateTopic, context: Context) -> Awaitable[TopicInfo]:
    return broker.make_topic(command.topic, given(command.config))


@handles(topics.UpdateTopic)
def update_topic(broker: TopicKeeper, command: topics.UpdateTopic, context: Context) -> Awaitable[TopicInfo]:
    return broker.change_topic(command.topic, given(command.config))


@handles(topics.DeleteTopic)
def delete_topic(broker: TopicKeeper, command: topics.DeleteTopic, context: Context) -> Awaitable[None]:
    return broker.remove_topic(command.topic)


@handles(topics.ListTopics)
async def list_topics(broker: TopicKeeper, command: topics.ListTopics, context: Context) -> Page[TopicInfo]:
    return page_by_name(broker.topic_infos(), command.cursor, command.limit)


@handles(topics.GetTopic)
async def get_topic(broker: TopicKeeper, command: topics.GetTopic, context: Context) -> TopicInfo:
    return broker.topic_info(command.topic)


@handles(topics.Stats)
async def stats(broker: TopicKeeper, command: topics.Stats, context: Context) -> TopicStats:
    runner = broker.runner(command.topic)
    usage = await runner.io.run(runner.loaded.journal.usage)
    return await runner.call(lambda now: topic_stats(runner, usage, now))


@handles(topics.Purge)
async def purge(broker: TopicKeeper, command: topics.Purge, context: Context) -> Count:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> int:
        count = 0
        for partition in runner.loaded.topic.partitions:
            event = partition.decide_purge(now)
            if event is not None:
                count += event.count
                runner.loaded.emit(partition, event, now)
        return count

    return Count(await runner.call(decide))


@handles(topics.PauseTopic)
def pause_topic(broker: TopicKeeper, command: topics.PauseTopic, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)
    until = None if command.until is None else instant_to_ms(command.until)
    return runner.call(lambda now: runner.loaded.emit(runner.loaded.topic.partitions[0], Paused(until), now))


@handles(topics.ResumeTopic)
def resume_topic(broker: TopicKeeper, command: topics.ResumeTopic, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> None:
        if runner.loaded.topic.paused:
            runner.loaded.emit(runner.loaded.topic.partitions[0], Resumed(), now)

    return runner.call(decide)


@handles(topics.SetPartitionThrottled)
def set_partition_throttled(
    broker: TopicKeeper, command: topics.SetPartitionThrottled, context: Context
) -> Awaitable[None]:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> None:
        count = len(runner.loaded.topic.partitions)
        if command.partition >= count:
            fail("partition", f"an integer from 0 to {count - 1}", command.partition)
        chosen = runner.loaded.topic.partitions[command.partition]
        wanted = (command.reason or "") if command.throttled else None
        if chosen.throttled != wanted:
            runner.loaded.emit(chosen, Throttled(command.throttled, wanted or ""), now)

    return runner.call(decide)


@handles(topics.Snapshot)
def snapshot(broker: TopicKeeper, command: topics.Snapshot, context: Context) -> Awaitable[None]:
    return broker.runner(command.topic).upkeep.snapshot()
