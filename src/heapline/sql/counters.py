"""Totals of a node: of each topic since it first used it, and of schedules."""

from __future__ import annotations

from heapline.core.latency import Latency


class Counters:
    def __init__(self) -> None:
        self.enqueued = self.duplicates = self.leased = self.acked = self.nacked = 0
        self.prefetched = 0  # of those that were leased, through the ready queue
        self.timeouts = self.dead = self.expired = self.dead_expired = 0
        self.enqueue = Latency()  # calls, from request to answer
        self.pop = Latency()  # pops that got messages, without the time that they waited for one


class Firings:
    """Totals of the schedules that this node has fired."""

    def __init__(self) -> None:
        self.fired = 0  # messages enqueued
        self.missed = 0  # times that a schedule was late, and `misfire` decided
        self.failed = 0  # attempts that did not enqueue everything
        self.delay = Latency()  # from a firing's planned time until it was enqueued
