"""Change the settings of a live topic and add partitions to it.

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

from functools import partial

import msgspec

from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, StorageFull
from heapline.core.events import ConfigChanged, Grown
from heapline.core.now import Now
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
        until = max(
            now.steady, *(max(p.state.keys.expires_max, p.entries.prepared.expires_max) for p in topic.partitions)
        )
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
