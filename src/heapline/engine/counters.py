"""What a topic counts: totals since this process opened it, which a reload does not end."""

from __future__ import annotations

from heapline.core.events import Acked, AnyEvent, DeadLettered, Expired, GroupDead, GroupMembers, LeaseExpired, Nacked
from heapline.core.partition import LEASE_EXPIRED
from heapline.engine.latency import Latency


class Counters:
    """Totals since the topic was opened."""

    def __init__(self) -> None:
        self.acked = self.nacked = self.timeouts = self.dead = self.expired = 0
        self.reloads = self.corrupt = 0
        self.timeouts_last = 0  # leases that ran out and left no retries; `timeouts` are the others
        self.enqueue = Latency()  # calls, from being asked to being answered
        self.pop = Latency()  # those that got something, without the time that they waited for it to be there
        self.commit = Latency()  # units: handed to the disk until known to be durable
        self.late = Latency()  # after what was planned: how late the engine looked at what time brings about
        self.fired = Latency()  # delayed messages, retries among them: from when they were due until they fired
        self.rebalances = 0  # times that partitions were spread anew over the members of a group
        self.group_dead = 0  # rows that groups gave up
        # Those before the last reload; the topic as it is loaded now counts its own.
        self.commits = self.bytes_written = self.enqueued = self.duplicates = self.leased = 0

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
        elif isinstance(event, Expired):
            self.expired += len(event.ids)
        elif isinstance(event, GroupMembers):
            self.rebalances += 1
        elif isinstance(event, GroupDead):
            self.group_dead += len(event.ids)
