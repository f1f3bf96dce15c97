"""Facts about the audited topics that are known before messages are judged: settings, offsets, marks and balances.

A server returns its balance and the offsets for one point in time, and the audit ends at these offsets, so both
describe the same state. A directory provides settings and offsets but no balance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from heapline.contract.config import TopicConfig
from heapline.contract.errors import TopicNotFound
from heapline.spark.audit.batches import BatchBook
from heapline.spark.audit.histories import Purge, Topic
from heapline.spark.audit.marks import Mark, Reach, exclusions_of, settings_of
from heapline.spark.audit.ranks import Exclusion
from heapline.spark.options import Target, plain_topic
from heapline.spark.target import client_of, subscribed


class Balance(NamedTuple):
    """What a partition holds according to the broker, at an offset: that of the next row."""

    offset: int
    waits: int  # ready or delayed
    leased: int
    dead: int


Balances = Mapping[str, Mapping[int, Balance]]  # topic -> partition -> balance


class BrokerState(NamedTuple):
    """What the broker knows besides the events."""

    configs: dict[str, TopicConfig]
    closing: dict[str, dict[int, Balance]]  # empty if there is no server
    ends: dict[str, dict[int, int]]


def broker_state(where: Mapping[str, str], topics: Sequence[str]) -> BrokerState:
    """Return the settings, balances and ends of these topics."""
    names = [plain_topic(topic) for topic in topics]
    closing: dict[str, dict[int, Balance]] = {}
    with subscribed(where, subscribe=",".join(names), view="events") as (subscription, options):
        if options.target.path is None:
            configs, closing = _of_server(options.target, names)
        else:
            configs = _of_directory(options.target.path, names)
        ends = subscription.ends()
    for topic, balances in closing.items():
        ends[topic] = {partition: balance.offset for partition, balance in balances.items()}
    return BrokerState(configs, closing, ends)


def _of_server(target: Target, names: Sequence[str]) -> tuple[dict[str, TopicConfig], dict[str, dict[int, Balance]]]:
    with client_of(target) as client:
        configs = {info.name: info.config for info in client.list_topics() if info.name in names}
        for name in names:
            if name not in configs:
                raise TopicNotFound(name)
        closing = {name: balances_of(client.stats(name)) for name in names}
    return configs, closing


def balances_of(stats: Any) -> dict[int, Balance]:
    return {p.partition: Balance(p.offset, p.ready + p.delayed, p.leased, p.dead) for p in stats.partitions}


def _of_directory(path: str, names: Sequence[str]) -> dict[str, TopicConfig]:
    """Return the settings in the catalog. The directory of a single topic has no catalog, so none are known."""
    from heapline.engine.catalog import FILE, Catalog
    from heapline.journal.disk import RealDisk

    if not RealDisk().exists(f"{path}/{FILE}"):
        return {}
    entries = Catalog(RealDisk(), path).entries.values()
    return {entry.topic: entry.config for entry in entries if entry.topic in names}


@dataclass(frozen=True)
class RankRule:
    """How the ranks of a topic are judged."""

    k: int
    exclusions: tuple[Exclusion, ...]
    since: int  # unit; earlier leases are not judged
    older_is_better: bool


@dataclass
class Facts:
    """What is known before the messages are judged."""

    topics: list[Topic]
    rules: list[RankRule | None]
    why_not: list[str]  # per topic: why its ranks are not judged, or ""
    marks: list[Mark]
    reaches: list[Reach]
    book: BatchBook
    closing: Balances = field(default_factory=dict)


def facts_of(
    names: Sequence[str],
    marks: Sequence[Mark],
    reaches: Sequence[Reach],
    configs: Mapping[str, Any],
    closing: Balances | None = None,
    opened: bool = False,
) -> Facts:
    """Return the facts. `opened` means that steps describe the state before the first event."""
    book = BatchBook(marks, reaches)
    facts = Facts([], [], [], list(marks), list(reaches), book, closing or {})
    for name in names:
        mine, reach = [m for m in marks if m.topic == name], [r for r in reaches if r.topic == name]
        settings, since = settings_of(mine, configs.get(name))
        config = configs.get(name) or (settings[-1] if settings else None)
        why = _why_no_ranks(settings)
        whole = frozenset(r.partition for r in reach if r.first == 0 or opened)
        purges = tuple(Purge(m.partition, m.offset, m.unit) for m in mine if m.kind == "purged")
        ahead = max((r.wall_ahead for r in reach), default=0)
        facts.topics.append(Topic(name, None if why else config, whole, purges, ahead, book.hidden(name)))
        facts.why_not.append(why)
        rule = None
        if not why and config is not None:
            has_turns = config.fairness == "keys"
            exclusions = tuple(exclusions_of(mine, reach))
            rule = RankRule(max(c.k for c in settings), exclusions, since, not has_turns)
        facts.rules.append(rule)
    return facts


def _why_no_ranks(settings: Sequence[Any]) -> str:
    if not settings:
        return "the topic's settings are unknown; say where the queue is, or give config="
    if any(config.strategy != "best_first" for config in settings):
        return "pops use partitions in turn, which has no rank bound"
    if any(config.max_inflight_per_key for config in settings):
        return "leases per fairness key are limited, so any message may have been held back"
    return ""
