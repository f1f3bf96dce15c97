"""Facts about the audited topics that are known before messages are judged: settings, balances and prepared batches.

A server returns its balance and the offsets for one point in time, and the audit ends at these offsets, so both
describe the same state. A directory provides settings and offsets but no balance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from heapline.contract.config import TopicConfig, canonical_topic
from heapline.contract.errors import BadRequest, TopicNotFound
from heapline.spark.audit.histories import Purge, Topic
from heapline.spark.audit.ranks import NEVER, Exclusion
from heapline.spark.audit.steps import Mark, Reach
from heapline.spark.options import Target
from heapline.spark.target import client_of, subscribed


class Balance(NamedTuple):
    """Messages that a partition holds according to the broker. `offset` is that of the next row."""

    offset: int
    waits: int  # ready or delayed
    leased: int
    dead: int


Balances = Mapping[str, Mapping[int, Balance]]  # topic -> partition -> balance


class BrokerState(NamedTuple):
    """Facts that only the broker knows, not the events."""

    configs: dict[str, TopicConfig]
    closing: dict[str, dict[int, Balance]]  # empty if there is no server
    ends: dict[str, dict[int, int]]


def broker_state(where: Mapping[str, str], topics: Sequence[str]) -> BrokerState:
    """Return the settings, balances and ends of these topics."""
    names = [canonical_topic(topic) for topic in topics]
    closing: dict[str, dict[int, Balance]] = {}
    with subscribed(where, subscribe=",".join(names), view="events") as (subscription, options):
        for log in subscription.logs.values():
            if not log.ref.has_journal:
                raise BadRequest(
                    f"topic {log.ref.topic!r} cannot be audited: its broker records what happened to messages, but not "
                    "the order in which it chose them; the audit needs the log broker"
                )
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


# -- prepared batches --------------------------------------------------------------------------------------------------

TopicPartition = tuple[str, int]  # topic, partition


class Torn(NamedTuple):
    """A batch that was not atomic."""

    topic: str
    partition: int
    batch_id: str
    offset: int
    why: str


@dataclass
class _Share:
    part: str
    count: int
    identified: int
    offset: int
    ids: tuple[int, int] | None


@dataclass
class _PartitionBatch:
    """One batch in one partition, from its first part to its decision."""

    shares: dict[str, _Share] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    committed: int = 0
    commit: Mark | None = None
    aborted: Mark | None = None


class BatchBook:
    """All prepared batches of the audited topics, and whether each was committed completely or not at all.

    A part has a share in each partition that it reaches, possibly of several topics. A commit names parts: each of
    their shares must appear with all its messages (only messages that repeat the identity of another part's message are
    left out), and nothing else of the batch may appear. An undecided share is not a fault while the commit may be in
    progress. A topic applies a decision before it serves anything else, so once its log continues after the commit, it
    is a fault.
    """

    def __init__(self, marks: Sequence[Mark], reaches: Sequence[Reach]) -> None:
        self._begins = {(reach.topic, reach.partition): reach.first for reach in reaches}
        self._last_unit: dict[str, int] = {}
        for reach in reaches:
            self._last_unit[reach.topic] = max(reach.last_unit, self._last_unit.get(reach.topic, 0))
        self._open: dict[tuple[TopicPartition, str], _PartitionBatch] = {}
        self._done: list[tuple[TopicPartition, str, _PartitionBatch]] = []
        for mark in sorted(marks, key=lambda m: (m.topic, m.partition, m.offset)):
            if mark.kind.startswith("batch_"):
                self._read(mark)
        self._all = self._done + [(where, batch, entry) for (where, batch), entry in self._open.items()]
        self.count = len({batch for _, batch, _ in self._all})

    def _read(self, mark: Mark) -> None:
        where, batch = (mark.topic, mark.partition), mark.batch_id or ""
        entry = self._open.setdefault((where, batch), _PartitionBatch())
        fields = mark.fields()
        if mark.kind == "batch_prepared":
            ids = (fields["first_id"], fields["last_id"]) if "first_id" in fields else None
            entry.shares[fields["part"]] = _Share(
                fields["part"], mark.messages, fields.get("identified", 0), mark.offset, ids
            )
            return
        if mark.kind == "batch_aborted":
            entry.aborted = mark
        else:
            entry.named |= set(fields["parts"])
            entry.committed += mark.named
            entry.commit = mark
            if fields["more"]:
                return
        self._done.append((where, batch, self._open.pop((where, batch))))

    def hidden(self, topic: str) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return, by partition, the id ranges of shares that were not committed."""
        found: dict[int, list[tuple[int, int]]] = {}
        for (name, partition), _, entry in self._all:
            if name == topic:
                ranges = (s.ids for s in entry.shares.values() if s.part not in entry.named and s.ids is not None)
                found.setdefault(partition, []).extend(ranges)
        return {partition: tuple(ranges) for partition, ranges in found.items() if ranges}

    def torn(self) -> Iterator[Torn]:
        """Yield the batches that were not atomic."""
        named: dict[str, set[str]] = {}
        last: dict[tuple[str, str], int] = {}  # (topic, batch) -> unit of the last commit
        for (topic, _), batch, entry in self._all:
            if entry.commit is not None:
                named.setdefault(batch, set()).update(entry.named)
                last[topic, batch] = max(entry.commit.unit, last.get((topic, batch), 0))
        for where, batch, entry in self._all:
            yield from self._judge(where, batch, entry, named.get(batch, set()), last.get((where[0], batch)))

    def _judge(
        self, where: TopicPartition, batch: str, entry: _PartitionBatch, named: set[str], last: int | None
    ) -> Iterator[Torn]:
        missing = sorted(part for part in entry.shares if part in named and part not in entry.named)
        if entry.commit is not None:
            yield from self._judge_commit(where, batch, entry)
        if missing and entry.aborted is not None:
            why = f"aborted here, but parts {missing} were committed elsewhere"
            yield Torn(*where, batch, entry.aborted.offset, why)
        elif missing and entry.commit is not None:
            why = f"parts {missing} were named by the commit but left out"
            yield Torn(*where, batch, entry.commit.offset, why)
        elif missing and last is not None and self._last_unit[where[0]] > last:
            why = f"parts {missing} are undecided but committed elsewhere"
            yield Torn(*where, batch, entry.shares[missing[0]].offset, why)

    def _judge_commit(self, where: TopicPartition, batch: str, entry: _PartitionBatch) -> Iterator[Torn]:
        assert entry.commit is not None
        unknown = entry.named - entry.shares.keys()
        if unknown and self._begins.get(where, 0) == 0:
            yield Torn(*where, batch, entry.commit.offset, f"parts {sorted(unknown)} were committed but never prepared")
        if unknown:
            return  # prepared before the first event
        shares = [entry.shares[part] for part in entry.named]
        most = sum(share.count for share in shares)
        least = most - (sum(share.identified for share in shares) if len(entry.named) > 1 else 0)
        if not least <= entry.committed <= most:
            why = f"{entry.committed} messages were committed of {most} that were prepared"
            yield Torn(*where, batch, entry.commit.offset, why)


# -- all facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankRule:
    """The rules by which the ranks of a topic are judged."""

    k: int
    exclusions: tuple[Exclusion, ...]
    since: int  # unit; earlier leases are not judged
    older_is_better: bool


@dataclass
class Facts:
    """Facts that are known before messages are judged."""

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
        settings, since = _settings(mine, configs.get(name))
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
            exclusions = tuple(_exclusions(mine, reach))
            rule = RankRule(max(c.k for c in settings), exclusions, since, not has_turns)
        facts.rules.append(rule)
    return facts


def _exclusions(marks: Sequence[Mark], reaches: Sequence[Reach]) -> list[Exclusion]:
    """Return when partitions of a topic may have been excluded from pops.

    Unless the events begin with the topic, it is unknown whether a partition was excluded at their start. It was not
    once it delivered a message or was included again.
    """
    found: list[Exclusion] = []
    for reach in reaches:
        mine = sorted(
            (m for m in marks if m.kind == "throttled" and m.partition == reach.partition), key=lambda mark: mark.offset
        )
        since = None if reach.first == 0 else -1
        if since is not None and reach.first_lease < NEVER and (not mine or reach.first_lease < mine[0].unit):
            found.append(Exclusion(reach.partition, since, reach.first_lease))
            since = None
        for mark in mine:
            if mark.fields()["throttled"]:
                since = mark.unit if since is None else since
            else:
                found.append(Exclusion(reach.partition, mark.unit if since is None else since, mark.unit))
                since = None
        if since is not None:
            found.append(Exclusion(reach.partition, since, NEVER - 1))
    return found


def _settings(marks: Sequence[Mark], now: TopicConfig | None) -> tuple[list[TopicConfig], int]:
    """Return all settings that were in force, and the unit from which on they are known.

    The settings before the first recorded change are unknown.
    """
    changes = sorted((m for m in marks if m.kind == "config_changed"), key=lambda m: m.unit)
    found = [msgspec.convert(m.fields()["config"], TopicConfig) for m in changes]
    since = changes[0].unit + 1 if changes else -1
    return ([*found, now] if now is not None and not found else found) or [], since


def _why_no_ranks(settings: Sequence[Any]) -> str:
    if not settings:
        return "the topic's settings are unknown; say where the queue is, or give config="
    if any(config.strategy != "best_first" for config in settings):
        return "pops use partitions in turn, which has no rank bound"
    if any(config.max_inflight_per_key for config in settings):
        return "leases per fairness key are limited, so any message may have been held back"
    return ""
