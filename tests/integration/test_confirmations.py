"""Destructive calls need a confirmation token over gRPC; the contract's methods do both steps automatically."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.admin import DisableUser, RevokeKey
from heapline.contract.call import CALLS
from heapline.contract.dead_letters import DeleteDeadLetters
from heapline.contract.errors import ConfirmationNeeded, TopicNotFound
from heapline.contract.groups import Position, ResetOffsets
from heapline.contract.message import DlqFilter
from heapline.contract.schedules import DeleteSchedule
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import request_of
from tests.integration.guarded_rig import EMAIL, GuardedRig
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


def state_of(rig: GuardedRig) -> Any:
    """Return the keys and users that are valid."""
    file = rig.guard.store.file
    keys = [key for key, record in file.keys.items() if record.revoked_at is None]
    return keys, [email for email, record in file.users.items() if record.disabled_at is None]


@pytest.mark.parametrize("kind", [RevokeKey, DisableUser, DeleteSchedule, ResetOffsets])
async def test_key_user_schedule_and_offsets_stay_until_the_call_is_repeated(tmp_path: Path, kind: Any) -> None:
    async with GuardedRig(tmp_path) as rig, rig.as_(rig.admin_key) as admin, rig.as_(rig.key("*:admin")[1]) as other:
        await rig.token()
        key_id = rig.key("jobs:consume")[0]
        await rig.behind.enqueue("jobs", b"x")
        await rig.behind.create_group("jobs", "g", start="latest")
        await rig.behind.create_schedule("nightly", every=3600, topic="jobs")
        command, unlike = {
            RevokeKey: (RevokeKey(key_id), RevokeKey(rig.key("jobs:produce")[0])),
            DisableUser: (DisableUser(EMAIL), DisableUser("other@example.org")),
            DeleteSchedule: (DeleteSchedule("nightly"), DeleteSchedule("hourly")),
            ResetOffsets: (
                ResetOffsets("jobs", "g", Position(edge="earliest")),
                ResetOffsets("jobs", "g", Position(edge="latest")),
            ),
        }[kind]

        async def state() -> Any:
            info = await rig.behind.get_group("jobs", "g")
            return state_of(rig), await rig.behind.list_schedules(), info.offsets

        async def call(hl: RawGrpc, command: Any, **headers: str) -> None:
            await hl.calls(kind.facts.rpc, request_of(kind).pack(command), **headers)

        before = await state()
        with pytest.raises(ConfirmationNeeded) as needed:
            await call(admin, command)
        token = needed.value.token
        assert needed.value.topic == {"ResetOffsets": "jobs"}.get(
            kind.__name__, getattr(command, command.__struct_fields__[0])
        )
        for hl, sent in ((other, command), (admin, unlike)):
            with pytest.raises(ConfirmationNeeded):
                await call(hl, sent, x_confirmation=token)
        assert await state() == before
        await call(admin, command, x_confirmation=token)
        with pytest.raises(ConfirmationNeeded):
            await call(admin, command, x_confirmation=token)
        assert await state() != before


async def test_confirmation_of_a_pasted_key_does_not_repeat_its_secret(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path) as rig:
        key_id, key = rig.key("jobs:consume")
        needed = await rig.ask("DELETE", f"/v1/keys/{key}?force=true")
        assert needed.status_code == 428
        assert key.split("_", 2)[2] not in needed.text
        assert key_id in needed.text
        assert (await rig.confirm("DELETE", f"/v1/keys/{key}")).json()["key"]["revoked_at"]


def test_every_deletion_over_http_needs_a_confirmation() -> None:
    deletions = [kind for kind in CALLS.values() if (kind.facts.http or "").startswith("DELETE")]
    assert [kind.__name__ for kind in deletions if not kind.facts.destroys] == []
