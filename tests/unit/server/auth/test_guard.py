"""The first admin key, and files that only their owner may read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, CorruptionError, Unauthenticated, UnavailableError
from heapline.engine.catalog import Catalog
from heapline.server.auth import DirectoryGuard, Right, Secret, read_admin_key
from heapline.server.auth.keys import Keys
from heapline.server.auth.passwords import Argon2id
from heapline.server.auth.secret import PrivateDisk
from heapline.server.auth.store import KeysMissing
from heapline.server.auth.users import Users
from heapline.testing.clock import FakeClock
from tests.simulation.fake_disk import FakeDisk
from tests.unit.server.auth.rig import DIRECTORY, PASSWORD, CountingHasher, Rig, new_disk, open_store

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


def served_before(disk: FakeDisk) -> None:
    """Do what a server does: create keys, then open the broker, which records that there are some."""
    Rig(disk)
    Catalog(disk, DIRECTORY).make()


def test_lost_keys_are_never_replaced_by_a_start() -> None:
    disk = new_disk()
    served_before(disk)
    disk.unlink(f"{DIRECTORY}/auth.json")
    key = disk.read_file(f"{DIRECTORY}/admin.key")
    for _ in range(2):
        with pytest.raises(KeysMissing, match="restore it from a backup, or, if there is none, create new keys"):
            Rig(disk)
    assert not disk.exists(f"{DIRECTORY}/auth.json")
    assert disk.read_file(f"{DIRECTORY}/admin.key") == key


def test_catalog_remembers_keys_when_topics_change_and_after_an_error() -> None:
    disk = new_disk()
    Catalog(disk, DIRECTORY).make()
    assert not Catalog(disk, DIRECTORY).has_keys
    Rig(disk)
    disk.inject("pwritev", errno.ENOSPC, path="catalog.json")
    Catalog(disk, DIRECTORY).make()  # opens nevertheless
    assert not Catalog(disk, DIRECTORY).has_keys
    catalog = Catalog(disk, DIRECTORY)
    catalog.make()
    catalog.add(catalog.planned("default", "jobs", TopicConfig(), 1))
    assert Catalog(disk, DIRECTORY).has_keys


async def test_only_a_new_administrator_replaces_lost_keys() -> None:
    disk = new_disk()
    served_before(disk)
    disk.unlink(f"{DIRECTORY}/auth.json")
    store = open_store(disk)
    with pytest.raises(KeysMissing):
        Keys(store, CountingHasher()).list()
    with pytest.raises(KeysMissing):
        Keys(store, CountingHasher()).create("worker", ["jobs:consume"])
    with pytest.raises(KeysMissing):
        Users(store, CountingHasher()).add("a@example.com", Secret(PASSWORD), ["*:admin"])
    record, secret = Keys(store, CountingHasher()).create("admin", ["*:produce,consume,admin"])
    again = Rig(disk)
    assert list(again.guard.store.file.keys) == [record.id]  # no admin key besides the new one
    await again.guard.authenticate(secret.reveal())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
async def test_file_of_keys_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    guard = DirectoryGuard(tmp_path, hasher=QUICK)
    await guard.close()
    (tmp_path / "auth.json").chmod(mode)
    with pytest.raises(CorruptionError, match=f"other users can read or change .*{mode:04o}.*chmod 600"):
        DirectoryGuard(tmp_path, hasher=QUICK)
    (tmp_path / "auth.json").chmod(0o600)
    await DirectoryGuard(tmp_path, hasher=QUICK).close()


async def test_replaced_file_that_others_can_change_is_not_used(tmp_path: Path) -> None:
    clock = FakeClock()
    guard = DirectoryGuard(tmp_path, hasher=QUICK, clock=clock)
    key = read_admin_key(tmp_path).reveal()
    await guard.authenticate(key)
    file = tmp_path / "auth.json"
    file.write_bytes(file.read_bytes() + b"\n")
    file.chmod(0o666)
    clock.advance(1)
    with pytest.raises(CorruptionError, match="chmod 600"):
        await guard.authenticate(key)
    await guard.close()


async def test_file_of_keys_that_cannot_be_read_is_unavailable_and_not_new() -> None:
    rig = Rig()
    principal = await rig.guard.authenticate(rig.admin_key)
    rig.disk.inject("open", errno.EIO, path="auth.json", times=3)
    rig.clock.advance(1)
    with pytest.raises(UnavailableError, match="of the data directory cannot be read"):
        await rig.guard.authenticate(rig.admin_key)
    with pytest.raises(UnavailableError):
        rig.guard.is_valid(principal)
    with pytest.raises(UnavailableError):
        Rig(rig.disk)  # a start
    assert await rig.guard.authenticate(rig.admin_key) == principal


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
