"""The first admin key, and files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from heapline.contract.errors import BadRequest, Unauthenticated
from heapline.server.auth import DirectoryGuard, Right, read_admin_key
from heapline.server.auth.passwords import Argon2id
from heapline.server.auth.secret import PrivateDisk
from tests.unit.server.auth.rig import DIRECTORY, CountingHasher, Rig

QUICK = Argon2id(memory_kib=8, passes=1)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def lax_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("lax_umask")
async def test_first_start_creates_an_admin_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    guard = DirectoryGuard(tmp_path, hasher=QUICK)
    principal = await guard.authenticate(read_admin_key(tmp_path).reveal())
    for action in Right:
        principal.check(action, None)
    await guard.close()
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("admin.key", "auth.json", "auth.lock"), 0o600
    )


async def test_later_starts_keep_the_admin_key() -> None:
    rig = Rig()
    key = rig.admin_key
    again = Rig(rig.disk)
    assert again.admin_key == key
    await again.guard.authenticate(key)


async def test_revoked_admin_key_stays_revoked_and_its_file_is_deleted() -> None:
    rig = Rig()
    key = rig.admin_key
    rig.guard.keys.revoke(key)
    again = Rig(rig.disk)
    assert not again.disk.exists(f"{DIRECTORY}/admin.key")
    with pytest.raises(Unauthenticated):
        await again.guard.authenticate(key)


def test_deleting_the_admin_key_file_creates_no_second_admin_key() -> None:
    rig = Rig()
    rig.disk.unlink(f"{DIRECTORY}/admin.key")
    again = Rig(rig.disk)
    assert not again.disk.exists(f"{DIRECTORY}/admin.key")
    assert len(again.guard.store.file.keys) == 1


async def test_admin_key_file_without_its_store_is_rejected() -> None:
    rig = Rig()
    old = rig.admin_key
    rig.disk.unlink(f"{DIRECTORY}/auth.json")
    again = Rig(rig.disk)
    assert again.admin_key != old
    with pytest.raises(Unauthenticated):
        await again.guard.authenticate(old)


def test_admin_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    data.mkdir()
    elsewhere.write_text("mine")
    (data / "admin.key").symlink_to(elsewhere)
    (data / "admin.key.tmp").symlink_to(elsewhere)
    DirectoryGuard(data, hasher=CountingHasher())
    assert elsewhere.read_text() == "mine"
    assert not (data / "admin.key").is_symlink()


def test_admin_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    DirectoryGuard(tmp_path, hasher=CountingHasher())
    (tmp_path / "admin.key").chmod(0o640)
    with pytest.raises(BadRequest, match="chmod 600"):
        read_admin_key(tmp_path)
    (tmp_path / "admin.key").unlink()
    with pytest.raises(BadRequest, match="does not exist"):
        read_admin_key(tmp_path)


@pytest.mark.usefixtures("lax_umask")
def test_private_file_replaces_a_leftover_of_another_mode(tmp_path: Path) -> None:
    (tmp_path / "x.tmp").write_text("left by a crash")
    PrivateDisk().write_file_atomic(str(tmp_path / "x"), b"secret")
    assert mode(tmp_path / "x") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_argon2id_has_the_configured_parameters() -> None:
    stored = Argon2id().hash("secret")
    assert stored.startswith("$argon2id$v=19$m=19456,t=2,p=1$")
    assert Argon2id().verify(stored, "secret")
    assert not Argon2id().verify(stored, "other")
    assert not Argon2id().verify("not a hash", "secret")
