"""A member whose rows are pushed: credits for what is asked, another stream when one breaks, errors that end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from heapline.client.pushed_member import PushedMember
from heapline.client.transports.transport import RowStream
from heapline.contract.config import GroupConfig
from heapline.contract.errors import Closed, MemberReplaced, UnavailableError
from heapline.contract.groups import EARLIEST, FetchedRows
from heapline.contract.stream import Fetched, GroupInfo
from heapline.contract.subscription import Subscription
from tests.unit.server.fake_groups import batch


class Server:
    """The other end of a stream, as a test goes on; and all that was said to it."""

    def __init__(self) -> None:
        self.said: list[list[int]] = []  # credits, by stream
        self.opened: list[Any] = []
        self._partitions = [0, 1]
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self.streams = 0  # that are open
        self.streams_when_left: list[int] = []

    async def stream(self, feed: RowStream) -> AsyncIterator[Any]:
        self.opened.append(feed.open)
        self.said.append(said := [])
        listening = asyncio.ensure_future(self._listen(feed.credits, said))
        self.streams += 1
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            listening.cancel()
            self.streams -= 1

    async def _listen(self, credits: AsyncIterator[int], said: list[int]) -> None:
        async for count in credits:
            said.append(count)

    def say(self, *batches: Any, partitions: list[int] | None = None) -> None:
        self._partitions = self._partitions if partitions is None else partitions
        self._answers.put_nowait(FetchedRows("jobs", 1, self._partitions, list(batches)))

    def fail(self, error: Exception) -> None:
        self._answers.put_nowait(error)

    def credits(self, stream: int = -1) -> int:
        return sum(self.said[stream])

    def _member(self) -> PushedMember:
        return PushedMember(self)

    async def get_group(self, topic: str, group: str) -> GroupInfo:
        return GroupInfo(name=group, topic=topic, config=GroupConfig(), generation=1, members={}, offsets=[])

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        self.streams_when_left.append(self.streams)


async def fetch(member: PushedMember, count: int = 10, wait: float = 5.0) -> Fetched:
    async with asyncio.timeout(5):
        return await member.group_fetch(
            "jobs", "g", "m", session="s", max_messages=count, wait=wait, config={"max_retries": 3}
        )


async def opened(server: Server, count: int = 10) -> PushedMember:
    member = PushedMember(server)
    server.say(partitions=[0, 1])
    assert (await fetch(member, count, 0.0)).partitions == [0, 1]
    return member


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_first_fetch_opens_the_stream_with_all_arguments() -> None:
    server = Server()
    member = await opened(server)
    (first,) = server.opened
    assert (first.topic, first.group, first.member, first.session) == ("jobs", "g", "m", "s")
    assert (first.start, first.config.max_retries) == (EARLIEST, 3)
    assert server.said == [[10]]
    await member.stop_pushing()


async def test_rows_are_prefetched_and_credits_follow_requests() -> None:
    server = Server()
    member = await opened(server)
    server.say(batch(0, 0, [b"a"] * 6))
    (first,) = (await fetch(member)).batches
    assert len(first) == 6
    waiting = asyncio.ensure_future(fetch(member, 10))  # six were acked: there is room for ten again
    await settle()
    assert server.credits() == 16
    server.say(batch(0, 6, [b"b"] * 10))
    assert len((await waiting).batches[0]) == 10
    await member.stop_pushing()


async def test_few_more_rows_are_not_worth_a_message() -> None:
    server = Server()
    member = await opened(server)
    server.say(batch(0, 0, [b"a"]))
    await fetch(member)
    await fetch(member, 10, 0.0)
    await settle()
    assert server.credits() == 10
    await member.stop_pushing()


async def test_no_more_rows_are_returned_than_requested() -> None:
    server = Server()
    member = await opened(server)
    server.say(batch(0, 0, [b"a"] * 4), batch(1, 0, [b"b"] * 4))
    assert (await fetch(member, 0, 0.1)).batches == []
    assert [len(b) for b in (await fetch(member, 5)).batches] == [4]
    assert [len(b) for b in (await fetch(member, 5)).batches] == [4]
    await member.stop_pushing()


async def test_broken_stream_is_reopened_with_credits_for_missing_rows() -> None:
    server = Server()
    member = await opened(server)
    server.say(batch(0, 0, [b"a"] * 4))
    await settle()
    server.fail(UnavailableError("cut"))
    server.say(partitions=[1])
    async with asyncio.timeout(5):
        while len(server.said) < 2 or not server.said[1]:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
    assert server.opened[1].session == "s"
    assert server.credits() == 6
    (kept,) = (await fetch(member)).batches
    assert len(kept) == 4, "what had arrived stays good"
    await member.stop_pushing()


async def test_received_rows_are_returned_before_the_final_error() -> None:
    server = Server()
    member = await opened(server)
    server.say(batch(0, 0, [b"a"]))
    server.fail(MemberReplaced("jobs", "g", "m"))
    await settle()
    assert len((await fetch(member)).batches) == 1
    for _ in range(2):
        with pytest.raises(MemberReplaced):
            await fetch(member)


async def test_first_fetch_raises_the_servers_rejection() -> None:
    server = Server()
    member = PushedMember(server)
    server.fail(MemberReplaced("jobs", "g", "m"))
    with pytest.raises(MemberReplaced):
        await fetch(member, 10, 0.0)


async def test_subscription_ends_its_stream_before_it_leaves_the_group() -> None:
    server = Server()
    server.say()
    async with Subscription(server, "jobs", group="g"):  # type: ignore[arg-type]
        assert server.streams == 1
    assert server.streams_when_left == [0]
    await settle()
    assert len(server.said) == 1


async def test_age_of_rows_counts_from_their_arrival() -> None:
    server = Server()
    member = await opened(server)
    server.say(batch(0, 0, [b"a"]))
    await settle()
    await asyncio.sleep(0.02)
    assert (await fetch(member)).waited >= 0.02
    await member.stop_pushing()


async def test_waiting_fetch_raises_when_the_client_is_closed() -> None:
    server = Server()
    member = await opened(server)
    waiting = asyncio.ensure_future(fetch(member, wait=60.0))
    await settle()
    await member.end()
    with pytest.raises(Closed):
        await waiting


async def test_stopped_member_begins_a_new_session() -> None:
    server = Server()
    member = await opened(server)
    await member.stop_pushing()
    server.say(partitions=[1])
    assert (await fetch(member, 10, 0.0)).partitions == [1]
    await member.stop_pushing()


async def test_stream_that_breaks_while_stopping_is_not_reopened() -> None:
    class Breaking(Server):
        async def stream(self, feed: RowStream) -> AsyncIterator[Any]:
            try:
                async for answer in super().stream(feed):
                    yield answer
            except asyncio.CancelledError:
                raise UnavailableError("gone") from None

    server = Breaking()
    member = await opened(server)
    async with asyncio.timeout(5):
        await member.stop_pushing()
    assert len(server.said) == 1
