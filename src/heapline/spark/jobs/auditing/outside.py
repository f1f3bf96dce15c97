"""What the audit asks others than the events: a topic's settings, how far its log goes, and what its broker holds.

A server is asked for all of it in one answer, which stands for one moment: the offsets that come with the balance are
where the audit ends, so that both speak of the same. A directory tells settings and ends; nobody counts for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from heapline.config import TopicConfig
from heapline.errors import TopicNotFound
from heapline.spark.jobs.auditing.concluding import Standing
from heapline.spark.options import parse_options, plain_topic
from heapline.spark.positions import Subscription
from heapline.spark.sources import client_of, settled, source_of


class Outside(NamedTuple):
    configs: dict[str, TopicConfig]
    closing: dict[str, dict[int, Standing]]  # empty: nobody could be asked
    starts: dict[str, dict[int, int]]
    ends: dict[str, dict[int, int]]


def ask(where: Mapping[str, str], topics: Sequence[str]) -> Outside:
    """All that is known beside the events of these topics."""
    names = [plain_topic(topic) for topic in topics]
    options = settled(parse_options({**where, "subscribe": ",".join(names), "view": "events"}, streaming=False))
    configs: dict[str, TopicConfig] = {}
    closing: dict[str, dict[int, Standing]] = {}
    if options.target.path is None:
        configs, closing = _of_server(options.target, names)
    else:
        configs = _of_directory(options.target.path, names)
    subscription = Subscription(source_of(options), options.which)
    try:
        subscription.find()
        starts, ends = subscription.starts(), subscription.ends()
    finally:
        subscription.close()
    for topic, held in closing.items():
        ends[topic] = {partition: standing.offset for partition, standing in held.items()}
    return Outside(configs, closing, starts, ends)


def _of_server(target: Any, names: Sequence[str]) -> tuple[dict[str, TopicConfig], dict[str, dict[int, Standing]]]:
    with client_of(target) as client:
        configs = {info.name: info.config for info in client.list_topics() if info.name in names}
        for name in names:
            if name not in configs:
                raise TopicNotFound(name)
        closing = {name: standing_of(client.stats(name)) for name in names}
    return configs, closing


def standing_of(stats: Any) -> dict[int, Standing]:
    return {p.partition: Standing(p.offset, p.ready + p.delayed, p.leased, p.dead) for p in stats.partitions}


def _of_directory(path: str, names: Sequence[str]) -> dict[str, TopicConfig]:
    """Of a topic's folder alone the settings are not known."""
    from heapline.engine.catalog import FILE, Catalog
    from heapline.journal.disk import RealDisk

    if not RealDisk().exists(f"{path}/{FILE}"):
        return {}
    entries = Catalog(RealDisk(), path).entries.values()
    return {entry.topic: entry.config for entry in entries if entry.topic in names}
