"""Where a topic's log begins and ends, asked of its directory or its server by the driver alone: no Spark job is run.

What is asked for is written as options of a read (startingOffsets, endingTimestamp and so on) and means the same here.
"""

from __future__ import annotations

from collections.abc import Mapping

from heapline.spark.options import parse_options, plain_topic
from heapline.spark.positions import Subscription
from heapline.spark.sources import settled, source_of

Ranges = dict[int, tuple[int, int]]  # partition -> [start, end)


def ranges_of(where: Mapping[str, str], topic: str, **options: str) -> Ranges:
    """What a batch read with these options would read, as things are now."""
    asked = settled(parse_options({**where, "subscribe": topic, **options}, streaming=False))
    subscription = Subscription(source_of(asked), asked.which)
    try:
        subscription.find()
        starts = subscription.resolve(asked.start, "startingOffsets", late="latest")
        ends = subscription.resolve(asked.end, "endingOffsets", late="latest")
        name = plain_topic(topic)
        return {p: (start, ends[name][p]) for p, start in sorted(starts[name].items())}
    finally:
        subscription.close()
