"""Search of the messages in a topic: what matches, by pages, and that nothing is leased or lost."""

from __future__ import annotations

from typing import Any

import pytest

from heapline import Outgoing
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, TopicNotFound
from heapline.contract.inspection import FoundMessage
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take

pytestmark = pytest.mark.feature("search")


async def search(broker: Broker, text: str | None = None, limit: int = 50, **query: Any) -> list[FoundMessage]:
    found: list[FoundMessage] = []
    cursor = None
    while True:
        page = await broker.search_messages("jobs", text, limit=limit, cursor=cursor, **query)
        assert len(page.items) <= limit
        assert page.read <= page.total
        found += page.items
        cursor = page.cursor
        if cursor is None:
            assert page.read == page.total
            return found


async def test_text_is_found_in_payload_key_and_headers(jobs: Broker) -> None:
    sent = [
        Outgoing(b'{"order": "Umlaut-\xc3\x84"}'),
        Outgoing(b"x", key="Order-7"),
        Outgoing(b"y", headers={"order": "9"}),
        Outgoing(b"z", headers={"a": "my order"}),
        Outgoing(b"nothing"),
        Outgoing(b"\xff\x00order\x01"),
    ]
    ids = [(await jobs.enqueue_batch("jobs", [one]))[0].id for one in sent]
    found = await search(jobs, "ORDER")
    assert {(row.message.id, row.where) for row in found} == {
        (ids[0], "payload"), (ids[1], "key"), (ids[2], "header order"), (ids[3], "header a"), (ids[5], "payload"),
    }  # fmt: skip
    assert {row.message.payload for row in found} == {None}
    assert {len(row.message.headers) for row in found} == {0}
    (umlaut,) = await search(jobs, "umlaut-ä")
    assert umlaut.message.id == ids[0]
    assert "Umlaut-Ä" in umlaut.excerpt
    assert await search(jobs, "absent") == []


async def test_key_and_header_are_whole_and_narrow_the_text(jobs: Broker) -> None:
    for key, value in (("a", "1"), ("ab", "1"), ("a", "2")):
        await jobs.enqueue("jobs", b"same text", key=key, headers={"n": value, "m": "=x=y"})
    assert len(await search(jobs, key="a")) == 2
    assert len(await search(jobs, header="n=1")) == 2
    assert len(await search(jobs, header="n")) == 3
    assert len(await search(jobs, header="m==x=y")) == 3
    (only,) = await search(jobs, "TEXT", key="a", header="n=2")
    assert (only.where, only.excerpt) == ("payload", "same text")
    assert await search(jobs, "other", key="a") == []


async def test_every_state_is_searched_and_can_be_chosen(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_retries_default=0)
    dead, leased, ended, ready = await put(broker, 1, 2, 3, 4, headers={"h": "x"})
    await (await take(broker)).nack(reason="broken")
    held = await broker.pop("jobs", 2, holder="w")
    await broker.ack([held[1]])
    delayed = (await broker.enqueue("jobs", b"", delay=60, headers={"h": "x"})).id
    assert ended == held[1].id
    states = {row.message.id: row.message.state for row in await search(broker, header="h")}
    assert states == {dead: "dead", leased: "leased", ready: "ready", delayed: "delayed"}
    for id, state in states.items():
        assert [row.message.id for row in await search(broker, header="h", state=state)] == [id]
    (letter,) = await search(broker, header="h", state="dead")
    assert letter.message.reason == "broken"


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_pages_join_to_the_same_result(world: World, topic: MakeTopic, broker: Broker, limit: int) -> None:
    await topic(partitions=3)
    for n in range(20):
        await broker.enqueue("jobs", b"even" if n % 2 == 0 else b"odd", key=str(n))
    whole = await search(broker, "even")
    assert len(whole) == 10
    assert [row.message.id for row in await search(broker, "even", limit)] == [row.message.id for row in whole]
    again = await world.reopen()
    assert await search(again, "even") == whole


@pytest.mark.feature("batches")
async def test_prepared_messages_are_not_found(jobs: Broker) -> None:
    await jobs.prepare_batch("b", "p", {"jobs": [Outgoing(b"hidden")]})
    assert await search(jobs, "hidden") == []
    await jobs.commit_batch("b", ["p"])
    assert len(await search(jobs, "hidden")) == 1


async def test_wrong_arguments_are_refused(jobs: Broker) -> None:
    with pytest.raises(BadRequest, match="text"):
        await jobs.search_messages("jobs")
    with pytest.raises(BadRequest, match="text"):
        await jobs.search_messages("jobs", "")
    with pytest.raises(BadRequest, match="cursor"):
        await jobs.search_messages("jobs", "x", cursor="x")
    with pytest.raises(TopicNotFound):
        await jobs.search_messages("nothing", "x")
    assert await search(jobs, "x") == []
