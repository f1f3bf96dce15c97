"""API keys: recognized, revoked, and never worth more than one Argon2."""

from __future__ import annotations

import asyncio
import errno
import secrets

import pytest

from heapline.contract.errors import BadRequest, CorruptionError, ResourceExhausted, Unauthenticated
from heapline.server.auth import keys as keys_module
from heapline.server.auth.principals import Principal, Right, parse_scope
from heapline.server.auth.store import FILE
from tests.unit.server.auth.rig import DIRECTORY, Rig


def wrong(key_id: str) -> str:
    return f"hl_{key_id}_{secrets.token_urlsafe(32)}"


async def refused(rig: Rig, credential: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await rig.guard.authenticate(credential)


async def test_key_is_recognized_bare_and_as_bearer() -> None:
    rig = Rig()
    key_id, key = rig.key("orders/*:produce")
    expected = Principal(f"key:{key_id}", (parse_scope("orders/*:produce"),))
    for credential in (key, f"Bearer {key}", f"bearer  {key} "):
        assert await rig.guard.authenticate(credential) == expected


@pytest.mark.parametrize(
    "credential",
    [None, "", "Bearer", "Bearer ", "hl_", "hl_x_y", "Basic abc", "é" * 50, "x" * 10_000, "hl_" + "0" * 70],
)
async def test_malformed_key_is_rejected_without_argon2(credential: str | None) -> None:
    rig = Rig()
    await refused(rig, credential)
    assert rig.hasher.verified == []


async def test_argon2_runs_once_for_a_new_key_and_never_again() -> None:
    rig = Rig()
    _, key = rig.key()
    for _ in range(100):
        await rig.guard.authenticate(key)
    assert len(rig.hasher.verified) == 1


async def test_concurrent_requests_with_one_new_key_cost_one_argon2() -> None:
    rig = Rig()
    _, key = rig.key()
    await asyncio.gather(*(rig.guard.authenticate(key) for _ in range(200)))
    assert len(rig.hasher.verified) <= 2  # two may have run at the same time


async def test_many_valid_keys_are_accepted_after_a_restart() -> None:
    rig = Rig()
    keys = [rig.key()[1] for _ in range(keys_module.ALL_KEYS.burst + 20)]
    await asyncio.gather(*(rig.guard.authenticate(key) for key in keys))
    assert len(rig.hasher.verified) == len(keys)


async def test_wrong_secret_for_a_known_key_is_refused_and_leaves_the_key_known() -> None:
    rig = Rig()
    key_id, key = rig.key()
    await rig.guard.authenticate(key)
    await refused(rig, wrong(key_id))
    await rig.guard.authenticate(key)
    assert len(rig.hasher.verified) == 2


async def test_repeated_wrong_key_costs_one_argon2() -> None:
    rig = Rig()
    key = wrong("0" * 16)
    for _ in range(100):
        await refused(rig, key)
    assert len(rig.hasher.verified) == 1


async def test_unknown_revoked_and_wrong_keys_cost_and_return_the_same() -> None:
    rig = Rig()
    key_id, _ = rig.key()
    revoked_id, revoked = rig.key()
    rig.guard.keys.revoke(revoked_id)
    said = []
    for credential in (wrong(key_id), wrong("f" * 16), revoked):
        with pytest.raises(Unauthenticated) as caught:
            await rig.guard.authenticate(credential)
        said.append((str(caught.value), len(rig.hasher.verified)))
    assert [count for _, count in said] == [1, 2, 3]
    assert all(stored.startswith("counted:") for stored in rig.hasher.verified)  # even that of an unknown key
    assert len({text for text, _ in said}) == 1


async def test_repeated_revoked_key_costs_one_argon2() -> None:
    rig = Rig()
    key_id, key = rig.key()
    await rig.guard.authenticate(key)
    rig.guard.keys.revoke(key_id)
    for _ in range(100):
        await refused(rig, key)
    assert len(rig.hasher.verified) == 2


@pytest.mark.parametrize("known_id", [True, False])
async def test_guesses_at_one_id_are_bounded(known_id: bool) -> None:
    rig = Rig()
    key_id = rig.key()[0] if known_id else "a" * 16
    for _ in range(300):
        with pytest.raises((Unauthenticated, ResourceExhausted)):
            await rig.guard.authenticate(wrong(key_id))
    assert len(rig.hasher.verified) == keys_module.BY_KEY.burst
    rig.clock.advance(keys_module.BY_KEY.refill_ms / 1000)
    await refused(rig, wrong(key_id))
    with pytest.raises(ResourceExhausted):
        await rig.guard.authenticate(wrong(key_id))


async def test_guesses_at_many_ids_are_bounded_and_do_not_affect_verified_keys() -> None:
    rig = Rig()
    _, key = rig.key()
    await rig.guard.authenticate(key)
    for _ in range(500):
        with pytest.raises((Unauthenticated, ResourceExhausted)):
            await rig.guard.authenticate(wrong(secrets.token_hex(8)))
    assert len(rig.hasher.verified) == 1 + keys_module.ALL_KEYS.burst
    await rig.guard.authenticate(key)


async def test_attack_with_ten_thousand_ids_keeps_memory_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.server.auth.passwords.NAMES_MAX", 20)
    monkeypatch.setattr(keys_module, "KNOWN_MAX", 20)
    rig = Rig()
    for _ in range(100):
        rig.clock.advance(1)
        await refused(rig, wrong(secrets.token_hex(8)))
    ring = rig.guard._ring
    assert len(ring._rejected) == 20
    assert len(ring._prover._throttle._buckets) == 20


async def test_forgotten_key_is_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "KNOWN_MAX", 1)
    rig = Rig()
    (_, first), (_, second) = rig.key(), rig.key()
    for key in (first, second, first):
        await rig.guard.authenticate(key)
    assert len(rig.hasher.verified) == 3


# --- revocation -------------------------------------------------------------------------------------------------------


async def test_revoked_key_is_rejected_immediately_and_its_streams_end() -> None:
    rig = Rig()
    key_id, key = rig.key()
    principal = await rig.guard.authenticate(key)
    assert rig.guard.is_valid(principal)
    rig.guard.keys.revoke(key_id)
    assert not rig.guard.is_valid(principal)
    await refused(rig, key)


async def test_key_revoked_by_another_process_is_rejected_within_a_second() -> None:
    rig = Rig()
    key_id, key = rig.key()
    principal = await rig.guard.authenticate(key)
    rig.other_process().guard.keys.revoke(key_id)
    rig.clock.advance(1)
    assert not rig.guard.is_valid(principal)
    await refused(rig, key)


async def test_key_created_by_another_process_is_valid_immediately() -> None:
    rig = Rig()
    _, key = rig.other_process().key()
    await rig.guard.authenticate(key)


async def test_key_revoked_by_another_process_is_rejected_at_first_use() -> None:
    rig = Rig()
    key_id, key = rig.key()
    rig.other_process().guard.keys.revoke(key_id)
    await refused(rig, key)  # in the same millisecond: a key that was not verified is looked up again


async def test_key_revoked_during_argon2_is_rejected() -> None:
    rig = Rig()
    key_id, key = rig.key()
    verify = rig.hasher.verify

    def revoke_meanwhile(stored: str, secret: str) -> bool:
        rig.guard.keys.revoke(key_id)
        return verify(stored, secret)

    rig.hasher.verify = revoke_meanwhile  # type: ignore[method-assign]
    await refused(rig, key)


async def test_missing_or_corrupt_file_rejects_all_requests() -> None:
    rig = Rig()
    principal = await rig.guard.authenticate(rig.admin_key)
    good = rig.disk.read_file(f"{DIRECTORY}/{FILE}")
    for bad in (None, b"", good[:-3], good.replace(b'"revoked_at": null', b'"revoked_at": 1234')):
        rig.disk.unlink(f"{DIRECTORY}/{FILE}") if bad is None else rig.disk.write_file_atomic(
            f"{DIRECTORY}/{FILE}", bad
        )
        rig.clock.advance(1)
        with pytest.raises(CorruptionError):
            await rig.guard.authenticate(rig.admin_key)
        assert not rig.guard.is_valid(principal)
    rig.disk.write_file_atomic(f"{DIRECTORY}/{FILE}", good)
    rig.clock.advance(1)
    assert await rig.guard.authenticate(rig.admin_key) == principal


def test_revoking_again_or_by_the_whole_key_names_the_same_key() -> None:
    rig = Rig()
    key_id, key = rig.key()
    first = rig.guard.keys.revoke(key)
    rig.clock.advance(5)
    assert rig.guard.keys.revoke(f"key:{key_id}") == first
    with pytest.raises(BadRequest, match="does not exist"):
        rig.guard.keys.revoke("nothing")


@pytest.mark.parametrize(("name", "scopes"), [("", ["*:admin"]), ("a\nb", ["*:admin"]), ("a", []), ("a", ["x"])])
def test_malformed_key_is_refused_and_changes_nothing(name: str, scopes: list[str]) -> None:
    rig = Rig()
    before = rig.disk.read_file(f"{DIRECTORY}/{FILE}")
    with pytest.raises(BadRequest):
        rig.guard.keys.create(name, scopes)
    assert rig.disk.read_file(f"{DIRECTORY}/{FILE}") == before


# --- last use ---------------------------------------------------------------------------------------------------------


async def settle(rig: Rig) -> None:
    if rig.guard._writing is not None:
        await rig.guard._writing


async def test_last_use_is_written_at_most_once_a_minute() -> None:
    rig = Rig()
    key_id, key = rig.key()
    writes = []
    rig.disk.on_step = lambda operation, path: writes.append(path) if operation == "rename" else None
    for _ in range(300):
        rig.clock.advance(1)
        await rig.guard.authenticate(key)
        await settle(rig)
    assert len(writes) == 5
    at = rig.other_process().guard.store.file.keys[key_id].last_used_at
    assert at == rig.clock.wall_ms()


async def test_last_use_is_written_when_the_server_stops() -> None:
    rig = Rig()
    key_id, key = rig.key()
    await rig.guard.authenticate(key)
    await rig.guard.close()
    assert rig.other_process().guard.store.file.keys[key_id].last_used_at == rig.clock.wall_ms()


async def test_older_last_use_never_replaces_a_newer_one() -> None:
    rig = Rig()
    other = rig.other_process()
    key_id, key = rig.key()
    await rig.guard.authenticate(key)
    rig.clock.advance(5)
    await other.guard.authenticate(key)
    await other.guard.close()
    await rig.guard.close()
    assert rig.other_process().guard.store.file.keys[key_id].last_used_at == rig.clock.wall_ms()


async def test_writing_the_last_use_never_loses_a_revocation() -> None:
    rig = Rig()
    key_id, key = rig.key()
    await rig.guard.authenticate(key)
    rig.other_process().guard.keys.revoke(key_id)  # the server has not checked since
    await rig.guard.close()
    record = rig.other_process().guard.store.file.keys[key_id]
    assert record.revoked_at is not None
    assert record.last_used_at is not None


async def test_last_use_that_cannot_be_written_fails_no_call() -> None:
    rig = Rig()
    key_id, key = rig.key()
    rig.disk.inject("fdatasync", errno.EIO, path=FILE)
    rig.clock.advance(61)
    await rig.guard.authenticate(key)
    await settle(rig)
    rig.clock.advance(61)
    await rig.guard.authenticate(key)
    await settle(rig)
    assert rig.other_process().guard.store.file.keys[key_id].last_used_at == rig.clock.wall_ms()


async def test_scopes_of_a_key_decide_its_rights() -> None:
    rig = Rig()
    _, key = rig.key("orders/*:produce", "jobs:consume")
    principal = await rig.guard.authenticate(key)
    assert principal.may(Right.PRODUCE, "orders/new")
    assert principal.may(Right.CONSUME, "jobs")
    assert not principal.may(Right.CONSUME, "orders/new")
    assert not principal.may(Right.ADMIN, "jobs")
