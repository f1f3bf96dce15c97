"""The counters of a topic. They survive a reload."""

from __future__ import annotations

from heapline.core.events import (
    Acked,
    AnyEvent,
    DeadDeleted,
    DeadLettered,
    Expired,
    GroupDead,
    GroupMembers,
    LeaseExpired,
    Nacked,
)
from heapline.core.latency import Latency, Tally
from heapline.core.partition import LEASE_EXPIRED
from heapline.core.workers import Workers


class Counters:
    """Totals since the topic was opened."""

    def __init__(self) -> None:
        self.acked = self.nacked = self.timeouts = self.dead = self.expired = self.dead_expired = 0
        self.reloads = self.corrupt = 0
        self.timeouts_last = 0  # leases that expired without retries left; `timeouts` are the others
        self.enqueue = Latency()  # calls, from request to answer
        self.pop = Latency()  # pops that got messages, without the time that they waited for one
        self.commit = Latency()  # units: from handing to the disk until known to be durable
        self.late = Latency()  # how late the engine handled planned timers
        self.fired = Latency()  # delayed messages, including retries: from due to fired
        self.rebalances = 0  # times that partitions were reassigned to the members of a group
        self.group_dead = 0  # rows that became dead letters of groups
        self.workers = Workers()
        self.commits = self.bytes_written = self.enqueued = self.duplicates = self.leased = 0

    def latencies(self) -> dict[str, Tally]:
        return {name: getattr(self, name).tally() for name in ("enqueue", "pop", "commit", "late", "fired")}

    def count(self, event: AnyEvent) -> None:
        if isinstance(event, Acked):
            self.acked += len(event.ids)
        elif isinstance(event, Nacked):
            self.nacked += len(event.ids)
        elif isinstance(event, LeaseExpired):
            self.timeouts += len(event.ids)
        elif isinstance(event, DeadLettered):
            self.dead += len(event.ids)
            if event.reason == LEASE_EXPIRED:
                self.timeouts_last += len(event.ids)
        elif isinstance(event, DeadDeleted):
            self.dead_expired += len(event.ids) if event.expired else 0
        elif isinstance(event, Expired):
            self.expired += len(event.ids)
        elif isinstance(event, GroupMembers):
            self.rebalances += 1
        elif isinstance(event, GroupDead):
            self.group_dead += len(event.ids)
