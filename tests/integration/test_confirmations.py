"""Destructive calls need a confirmation token over gRPC; the contract's methods do both steps automatically."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.dead_letters import DeleteDeadLetters
from heapline.contract.errors import ConfirmationNeeded, TopicNotFound
from heapline.contract.message import DlqFilter
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import request_of
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Keys, Rig

DESTRUCTIVE: list[tuple[str, Any]] = [
    ("DeleteHeap", pb.DeleteHeapRequest),
    ("Purge", pb.PurgeRequest),
    ("DlqDelete", partial(pb.DlqDeleteRequest, where=pb.DlqFilter())),
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


@pytest.mark.parametrize(("method", "message_of"), DESTRUCTIVE)
async def test_destructive_call_changes_nothing_until_it_is_repeated_with_its_token(
    rig: Rig, method: str, message_of: Any
) -> None:
    async with RawGrpc(rig.grpc_target, credential="one") as one, RawGrpc(rig.grpc_target, credential="two") as two:
        with pytest.raises(ConfirmationNeeded) as needed:
            await one.calls(method, message_of(topic="jobs"))
        token = needed.value.token
        for broker, topic in ((two, "jobs"), (one, "other")):  # another caller, another topic
            with pytest.raises(ConfirmationNeeded):
                await broker.calls(method, message_of(topic=topic), x_confirmation=token)
        assert await seen(rig) == await seen(rig, "other") == (1, 1)
        await one.calls(method, message_of(topic="jobs"), x_confirmation=token)
        assert await seen(rig) == {"DeleteHeap": None, "Purge": (0, 1), "DlqDelete": (1, 0)}[method]
        with pytest.raises(ConfirmationNeeded):
            await one.calls(method, message_of(topic="jobs"), x_confirmation=token)


async def test_token_for_some_dead_letters_deletes_no_others(rig: Rig) -> None:
    async with RawGrpc(rig.grpc_target, credential="one") as one:
        some = request_of(DeleteDeadLetters).pack(DeleteDeadLetters("jobs", ["1"]))
        with pytest.raises(ConfirmationNeeded) as needed:
            await one.calls("DlqDelete", some)
        every = pb.DlqDeleteRequest(topic="jobs", where=pb.DlqFilter())
        with pytest.raises(ConfirmationNeeded):
            await one.calls("DlqDelete", every, x_confirmation=needed.value.token)
    assert await seen(rig) == (1, 1)


async def test_client_confirms_destructive_calls_automatically(rig: Rig) -> None:
    async with RawGrpc(rig.grpc_target, credential="one") as one:
        assert await one.dlq_delete("jobs", where=DlqFilter()) == 1
        assert await one.purge("jobs") == 1
        await one.delete_topic("jobs")
    assert await seen(rig) is None
