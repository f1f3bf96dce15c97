"""The base of every broker: its methods, each made from a command, and `do`, which an implementation supplies.

A broker is anything that answers commands: the embedded engine, a client over a wire, a router over several brokers,
or a wrapper that retries, traces or joins calls and passes them on to another `do`. The methods are in methods.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar, Unpack

from heapline.contract import log, replays
from heapline.contract.arguments import log_range
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.keywords import GroupKeywords
from heapline.contract.message import LogFrame
from heapline.contract.method import method
from heapline.contract.methods import Methods
from heapline.contract.stream import GroupEvents, Place, ReplayFilter, StreamBatch, StreamMessage

if TYPE_CHECKING:
    from heapline.contract.subscription import Subscription

R = TypeVar("R")


class Broker(Methods):
    """The base of every broker. An implementation supplies `do`, `stream`, `close` and `features`."""

    features: ClassVar[frozenset[str]] = frozenset()  # empty for a client: its server's are in `describe()`

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        """Execute a command. A broker that lacks its feature raises Unsupported."""
        raise NotImplementedError

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        """The answers of a feed, one by one. Close it with `aclose` (or contextlib.aclosing) to end it early."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def leases_returned(self) -> None:
        """Wait, for some seconds at most, until what cancelled pops have leased is returned."""

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        member: str | None = None,
        credits: int = 1000,
        batches: bool = False,
        start: Place = "earliest",
        on_assigned: GroupEvents | None = None,
        on_revoked: GroupEvents | None = None,
        **config: Unpack[GroupKeywords],
    ) -> Subscription:
        """Read a topic as a member of a group, which is created if it does not exist. Use it with `async with`.

        At most `credits` rows are out at a time; more arrive as they are acked. Without `member` the subscription has
        a name of its own and leaves the group when it is closed. Another subscription of the same member takes over.
        """
        from heapline.contract.subscription import Subscription

        return Subscription(
            self,
            topic,
            group=group,
            member=member,
            credits=credits,
            batches=batches,
            start=start,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            config=config,
        )

    def replay(
        self,
        topic: str,
        *,
        start: Place = "earliest",
        end: Place | None = None,
        partitions: Sequence[int] | None = None,
        mode: replays.Mode = "all",
        where: ReplayFilter | None = None,
        rate: float | None = None,
        checkpoint: str | None = None,
        batches: bool = False,
        allow_gaps: bool = False,
        count: int | None = None,
    ) -> AsyncIterator[StreamMessage | StreamBatch]:
        """Read the stream from `start` to `end`, which is what is durable when it begins.

        mode="fast" reads only the last state of each message, and only messages that still exist. With `checkpoint`,
        a name, it continues after a crash where it was: a few rows may be delivered again, none is missing.
        If rows after `start` were reclaimed, BadRequest is raised; with `allow_gaps` the replay begins where the log
        does, and a warning is logged. With `count` it ends after that many rows; the next replay with the same
        checkpoint continues after them.
        """
        first, last, chosen = log_range(start, end, partitions)
        feed = replays.Replay(topic, first, last, chosen, mode, where, rate, checkpoint, allow_gaps, count)
        if checkpoint is None:
            return replays.deliver(self.stream(feed), None, batches)
        name = checkpoint

        async def save(positions: dict[int, int]) -> None:
            await self.do(replays.SaveCheckpoint(topic, name, positions))

        return replays.deliver(self.stream(feed), save, batches)

    def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]:
        """Read the events of a partition, one durable frame at a time."""
        return self.stream(log.ReadLog(topic, partition, start, end))


for _name, _method in vars(Methods).items():
    if isinstance(_method, method):  # a plain function, because the descriptor would cost a call on each access
        setattr(Broker, _name, _method.function)
