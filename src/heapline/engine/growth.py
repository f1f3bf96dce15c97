"""A live topic gets more partitions: `update_topic(partitions=n)`.

The journal is the truth, then the catalog. In one turn the topic takes its new settings, the event `Grown` adds the
partitions, and both are recorded in partition 0; when that is durable the catalog is changed, and then it is answered.
Nothing that waits, is leased or is being written is touched: a new partition is empty, old messages stay where they
are, and pops look at all partitions. Where a retry goes after a growth is in former_places.py.

*Who fsyncs.* The unit with `Grown` is durable before the catalog says `after`, also under the relaxed policies
(`grow`): a catalog ahead of the journal would give a topic that does not know that it has grown, and takes
retries for new. The catalog replaces its file whole and syncs it before it is answered.
*Killed before the unit is durable:* the topic is as before; nobody was answered. Messages that were enqueued into new
partitions lie in the same unit or a later one, so none of them is left without its partition; within a unit the frame
with `Grown` stands before those of the new partitions, because frames stand in the order in which they were begun.
*Killed between journal and catalog:* replay meets settings with more partitions than the catalog's and takes them
whole, then `Grown`; a snapshot taken in between carries both. If they ask for another way of opening the journal it is
opened once more (loading.py). The keeper changes the catalog before it serves.
*Killed after the catalog:* a fresh topic has all partitions from the start, and `Grown` adds to its history only.
*Groups* get the new partitions from their beginning on, recorded right behind `Grown`; what of that a crash cuts off
is recorded when the topic is loaded again, before it serves. Their members are spread anew (`runner.on_grown`).
*A write that fails:* the runner reloads from disk, with the old settings or, if the unit got there after all, with the
new ones. If only the catalog's write fails the topic has grown and serves; repeating the call changes the catalog.
*Who fences:* an epoch is known by the highest that any partition knows, and is recorded in new partitions when its
producer next speaks, so an older one cannot begin anew there. Growths themselves are made one at a time, under the
keeper's lock.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from heapline.config import TopicConfig
from heapline.core.events import ConfigChanged, Grown
from heapline.errors import BadRequest, StorageFull
from heapline.model import Now

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

_EVENTS_BYTES = 1024  # what the two events add to the settings, at most


def check_growth(before: int, after: int) -> None:
    if after < before:
        raise BadRequest(
            f"partitions={after} would shrink a topic of {before}: partitions can only be added; "
            "make another topic and move over"
        )


def change(runner: TopicRunner, wanted: TopicConfig, now: Now) -> None:
    """In a turn: take these settings, and as many partitions as they say."""
    topic = runner.topic
    before, after = len(topic.partitions), wanted.partitions
    check_growth(before, after)
    if after > before and not runner.journal.can_grow:
        raise StorageFull  # the catalog could not follow
    settings = msgspec.json.encode(wanted)
    topic.reserve(runner.journal, len(settings) + _EVENTS_BYTES, now, blocks=0)  # one unit for both
    topic.set_config(wanted)
    topic.settle()
    runner.delivery.retune(now)
    runner.emit(topic.partitions[0], ConfigChanged(settings), now)
    if after > before:
        until = max(now.steady, *(max(p.keys.expires_max, p.prepared.expires_max) for p in topic.partitions))
        runner.emit(topic.partitions[0], Grown(before, after, now.steady, until), now)
        runner.complete_groups(now)
        runner.grew()


async def grow(runner: TopicRunner, wanted: TopicConfig) -> None:
    """Have the topic grown for good; only the catalog does not know yet."""
    await runner.call(partial(change, runner, wanted))
    runner.check()  # closed meanwhile: its journal takes no more
    # What was answered may be only written, under the relaxed policies.
    if runner.journal.durable_unit < runner.journal.written_unit:
        await runner.committer.between_commits(runner.journal.sync)
        runner.check()
    runner.loader.config = wanted
