"""What destroys is asked for twice over gRPC; the contract's calls do both steps by themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heapline.client.wire import WireBroker
from heapline.errors import ConfirmationNeeded, TopicNotFound
from heapline.model import DlqFilter
from heapline.wire.schema import pb
from tests.integration.server_rig import Keys, Rig

DESTRUCTIVE: list[tuple[str, Any]] = [
    ("DeleteHeap", pb.Heap),
    ("Purge", pb.Heap),
    ("DlqDelete", partial(pb.DlqRequest, where=pb.DlqFilter())),
]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path, Keys(one="*:produce,consume,admin", two="*:admin")) as rig:
        for topic in ("jobs", "other"):
            await rig.behind.create_topic(topic, **rig.small)
            await rig.behind.enqueue(topic, b"x")
            await rig.behind.enqueue(topic, b"dead")
            await rig.behind.bury(await rig.behind.pop(topic))
        yield rig


async def seen(rig: Rig, topic: str = "jobs") -> tuple[int, int] | None:
    try:
        stats = await rig.behind.stats(topic)
    except TopicNotFound:
        return None
    return stats.ready, stats.dead


@pytest.mark.parametrize(("method", "request_of"), DESTRUCTIVE)
async def test_destructive_call_changes_nothing_until_it_is_repeated_with_its_token(
    rig: Rig, method: str, request_of: Any
) -> None:
    async with WireBroker(rig.target, credential="one") as one, WireBroker(rig.target, credential="two") as two:
        with pytest.raises(ConfirmationNeeded) as needed:
            await one.calls(method, request_of(topic="jobs"))
        token = needed.value.token
        for broker, topic in ((two, "jobs"), (one, "other")):  # another caller, another topic
            with pytest.raises(ConfirmationNeeded):
                await broker.calls(method, request_of(topic=topic, confirmation=token))
        assert await seen(rig) == await seen(rig, "other") == (1, 1)
        await one.calls(method, request_of(topic="jobs", confirmation=token))
        assert await seen(rig) == {"DeleteHeap": None, "Purge": (0, 1), "DlqDelete": (1, 0)}[method]
        with pytest.raises(ConfirmationNeeded):
            await one.calls(method, request_of(topic="jobs", confirmation=token))


async def test_token_for_some_dead_letters_deletes_no_others(rig: Rig) -> None:
    async with WireBroker(rig.target, credential="one") as one:
        with pytest.raises(ConfirmationNeeded) as needed:
            await one.calls("DlqDelete", pb.DlqRequest(topic="jobs", ids=pb.Ids(message_ids=["1"])))
        with pytest.raises(ConfirmationNeeded):
            await one.calls(
                "DlqDelete", pb.DlqRequest(topic="jobs", where=pb.DlqFilter(), confirmation=needed.value.token)
            )
    assert await seen(rig) == (1, 1)


async def test_contract_confirms_by_itself(rig: Rig) -> None:
    async with WireBroker(rig.target, credential="one") as one:
        assert await one.dlq_delete("jobs", where=DlqFilter()) == 1
        assert await one.purge("jobs") == 1
        await one.delete_topic("jobs")
    assert await seen(rig) is None
