"""Calls on a topic as a whole: its settings, statistics, pausing, purging, snapshots, and more partitions.

`update_topic(partitions=n)` adds partitions to a live topic. The journal is authoritative, then the catalog. In one
turn the topic takes its new settings, the event `Grown` adds the partitions, and both are recorded in partition 0. When
that is durable the catalog is changed, and then the call is answered. Waiting, leased and in-flight messages are not
touched: a new partition is empty, old messages stay where they are, and pops check all partitions. Placement of retries
after a growth is in duplicates.py.

*Durability.* The unit with `Grown` is durable before the catalog has the new count, even under the relaxed policies
(`grow`): with a catalog ahead of the journal, a topic would not know that it has grown and would treat retries as new
messages. The catalog replaces its file atomically and syncs it before the call is answered.
*Killed before the unit is durable:* the topic is as before; no caller got an answer. Messages enqueued to new
partitions are in the same unit or a later one, so none of them is left without its partition; within a unit the frame
with `Grown` is before those of the new partitions, because frames are in the order in which they were started.
*Killed between journal and catalog:* replay finds settings with more partitions than the catalog's and adopts all of
them, then `Grown`; a snapshot taken in between contains both. If the settings change how the journal is opened, it is
opened again (loaded_topic.py). TopicKeeper (topics.py) changes the catalog before it serves.
*Killed after the catalog:* a freshly loaded topic has all partitions from the start, and `Grown` only extends its
history.
*Groups* get the new partitions from their beginning, recorded right after `Grown`. What a crash cuts off of that is
recorded when the topic is loaded again, before it serves. Their members are reassigned (`runner.on_grown`).
*A failed write:* the runner reloads from disk, with the old settings or, if the unit was written after all, with the
new ones. If only the catalog's write fails, the topic has grown and serves; repeating the call changes the catalog.
*Fencing:* a producer's epoch is the highest that any partition knows, and is recorded in new partitions on the
producer's next call, so an older epoch cannot start again there. Growths run one at a time, under TopicKeeper's lock.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from heapline.contract import admin, topics
from heapline.contract.call import Count, Page
from heapline.contract.check import fail, instant_to_ms
from heapline.contract.config import TopicConfig
from heapline.contract.context import Context
from heapline.contract.errors import BadRequest, StorageFull
from heapline.contract.message import TopicInfo, TopicStats
from heapline.core.events import ConfigChanged, Grown, Paused, Resumed, Throttled
from heapline.core.now import Now
from heapline.engine.handlers import handles, page_by_name
from heapline.engine.stats import topic_stats

if TYPE_CHECKING:
    from heapline.engine.broker import EmbeddedBroker
    from heapline.engine.runner import TopicRunner

_EVENTS_BYTES = 1024  # upper bound of what the two events add to the settings


def check_growth(before: int, after: int) -> None:
    if after < before:
        raise BadRequest(
            f"partitions={after} would shrink a topic of {before}: partitions can only be added; "
            "make another topic and move over"
        )


def change(runner: TopicRunner, wanted: TopicConfig, now: Now) -> None:
    """Apply these settings and their number of partitions. Runs in a turn."""
    topic = runner.loaded.topic
    before, after = len(topic.partitions), wanted.partitions
    check_growth(before, after)
    if after > before and not runner.loaded.journal.can_grow:
        raise StorageFull  # the catalog could not be updated
    settings = msgspec.json.encode(wanted)
    topic.reserve(runner.loaded.journal, len(settings) + _EVENTS_BYTES, now, blocks=0)  # one unit for both
    topic.set_config(wanted)
    topic.settle()
    runner.loaded.delivery.retune(now)
    runner.loaded.emit(topic.partitions[0], ConfigChanged(settings), now)
    if after > before:
        until = max(now.steady, *(max(p.keys.expires_max, p.prepared.expires_max) for p in topic.partitions))
        runner.loaded.emit(topic.partitions[0], Grown(before, after, now.steady, until), now)
        runner.loaded.complete_groups(now)
        runner.grew()


async def grow(runner: TopicRunner, wanted: TopicConfig) -> None:
    """Grow the topic durably. Only the catalog is not updated yet."""
    await runner.call(partial(change, runner, wanted))
    runner.check()  # closed meanwhile: its journal accepts no more
    # Under the relaxed policies the answered growth may be written but not synced.
    if runner.loaded.journal.durable_unit < runner.loaded.journal.written_unit:
        await runner.loaded.committer.between_commits(runner.loaded.journal.sync)
        runner.check()
    runner.loader.config = wanted


def given(settings: Any) -> dict[str, Any]:
    """Return the settings that a caller passed."""
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not UNSET}


@handles(topics.CreateTopic)
def create_topic(broker: EmbeddedBroker, command: topics.CreateTopic, context: Context) -> Awaitable[TopicInfo]:
    return broker.make_topic(command.topic, given(command.config))


@handles(topics.UpdateTopic)
def update_topic(broker: EmbeddedBroker, command: topics.UpdateTopic, context: Context) -> Awaitable[TopicInfo]:
    return broker.change_topic(command.topic, given(command.config))


@handles(topics.DeleteTopic)
def delete_topic(broker: EmbeddedBroker, command: topics.DeleteTopic, context: Context) -> Awaitable[None]:
    return broker.remove_topic(command.topic)


@handles(topics.ListTopics)
async def list_topics(broker: EmbeddedBroker, command: topics.ListTopics, context: Context) -> Page[TopicInfo]:
    return page_by_name(broker.topic_infos(), command.cursor, command.limit)


@handles(topics.GetTopic)
async def get_topic(broker: EmbeddedBroker, command: topics.GetTopic, context: Context) -> TopicInfo:
    return broker.topic_info(command.topic)


@handles(topics.Stats)
async def stats(broker: EmbeddedBroker, command: topics.Stats, context: Context) -> TopicStats:
    runner = broker.runner(command.topic)
    usage = await runner.io.run(runner.loaded.journal.usage)
    return await runner.call(lambda now: topic_stats(runner, usage, now))


@handles(topics.Purge)
async def purge(broker: EmbeddedBroker, command: topics.Purge, context: Context) -> Count:
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
def pause_topic(broker: EmbeddedBroker, command: topics.PauseTopic, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)
    until = None if command.until is None else instant_to_ms(command.until)
    return runner.call(lambda now: runner.loaded.emit(runner.loaded.topic.partitions[0], Paused(until), now))


@handles(topics.ResumeTopic)
def resume_topic(broker: EmbeddedBroker, command: topics.ResumeTopic, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> None:
        if runner.loaded.topic.paused:
            runner.loaded.emit(runner.loaded.topic.partitions[0], Resumed(), now)

    return runner.call(decide)


@handles(topics.SetPartitionThrottled)
def set_partition_throttled(
    broker: EmbeddedBroker, command: topics.SetPartitionThrottled, context: Context
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
def snapshot(broker: EmbeddedBroker, command: topics.Snapshot, context: Context) -> Awaitable[None]:
    return broker.runner(command.topic).upkeep.snapshot()


@handles(admin.Describe)
async def describe(broker: EmbeddedBroker, command: admin.Describe, context: Context) -> admin.Description:
    return broker.description()
