"""What a topic counts: totals since this process opened it, which a reload does not end."""

from __future__ import annotations

from heapline.core.events import Acked, AnyEvent, DeadLettered, Expired, LeaseExpired, Nacked


class Counters:
    """Totals since the topic was opened."""

    def __init__(self) -> None:
        self.acked = self.nacked = self.timeouts = self.dead = self.expired = 0
        self.reloads = self.corrupt = 0
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
        elif isinstance(event, Expired):
            self.expired += len(event.ids)
