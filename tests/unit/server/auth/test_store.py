"""The file of keys and users: crashes, two writers, damage."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path

import msgspec
import pytest

from heapline.contract.errors import CorruptionError, ResourceExhausted, UnavailableError, UnknownFormat
from heapline.server.auth import store as store_module
from heapline.server.auth.keys import Keys
from heapline.server.auth.secret import PrivateDisk
from heapline.server.auth.store import FILE, LOCK_FILE, DirectoryStore
from heapline.testing.clock import FakeClock
from tests.simulation.fake_disk import FakeDisk, PowerCut
from tests.unit.server.auth.rig import DIRECTORY, CountingHasher, Rig, new_disk, open_store

SEEDS = 4


def keys_of(disk: FakeDisk) -> Keys:
    return Keys(open_store(disk), CountingHasher())


def crash_at_every_step(prepare, act):  # type: ignore[no-untyped-def]
    """Yield for each step it could stop at: whether the call was answered, its answer, and the disk after the crash."""
    for steps in range(1000):
        for seed in range(SEEDS):
            disk = new_disk()
            ready = prepare(disk)
            disk.cut_power_in(steps)
            answer, answered = None, False
            try:
                answer = act(ready)
                answered = True
            except PowerCut:
                pass
            disk.cut_power_in(None)
            yield answered, answer, disk.crash(random.Random(seed))
        if answered:
            return
    raise AssertionError("it never finished")


def test_acknowledged_revocation_survives_a_crash_at_any_step() -> None:
    made: list[str] = []

    def prepare(disk: FakeDisk) -> Keys:
        keys = keys_of(disk)
        made[:] = [keys.create("kept", ["*:consume"])[0].id, keys.create("ended", ["*:consume"])[0].id]
        return keys

    outcomes = set()
    for answered, _, disk in crash_at_every_step(prepare, lambda keys: keys.revoke(made[1])):
        file = open_store(disk).file
        assert set(file.keys) == set(made)
        assert file.keys[made[0]].revoked_at is None
        is_revoked = file.keys[made[1]].revoked_at is not None
        assert is_revoked or not answered
        outcomes.add((answered, is_revoked))
    assert outcomes == {(False, False), (False, True), (True, True)}


def test_acknowledged_key_survives_a_crash_at_any_step() -> None:
    for answered, answer, disk in crash_at_every_step(keys_of, lambda keys: keys.create("new", ["*:consume"])):
        file = open_store(disk).file
        assert not answered or set(file.keys) == {answer[0].id}


def test_first_start_interrupted_at_any_step_leaves_a_valid_admin_key() -> None:
    for _, _, disk in crash_at_every_step(lambda disk: disk, Rig):
        rig = Rig(disk)  # the next start
        key_id = rig.admin_key.split("_")[1]
        assert list(rig.guard.store.file.keys) == [key_id]
        assert rig.hasher.verify(rig.guard.store.file.keys[key_id].hash, rig.admin_key)


@pytest.mark.parametrize("operation", ["create", "pwritev", "fdatasync", "rename"])
def test_failed_change_is_not_kept_in_memory(operation: str) -> None:
    disk = new_disk()
    keys = keys_of(disk)
    record, _ = keys.create("a", ["*:consume"])
    disk.inject(operation, errno.EIO, path=FILE)
    with pytest.raises(UnavailableError, match="injected"):
        keys.revoke(record.id)
    assert keys.list() == [record]
    assert keys.revoke(record.id).revoked_at is not None


def test_two_writers_never_lose_each_others_change() -> None:
    disk = new_disk()
    one, other = keys_of(disk), keys_of(disk)
    first, _ = one.create("one", ["*:consume"])
    second, _ = other.create("other", ["*:consume"])
    one.revoke(second.id)
    other.create("third", ["*:consume"])
    records = {record.name: record for record in keys_of(disk).list()}
    assert set(records) == {"one", "other", "third"}
    assert records["other"].revoked_at is not None
    assert records["one"] == first


def test_many_threads_on_a_real_directory_lose_nothing(tmp_path: Path) -> None:
    def work(name: str) -> None:
        # Its own disk and store, like another process; flock distinguishes them by descriptor.
        keys = Keys(DirectoryStore(PrivateDisk(), str(tmp_path), FakeClock()), CountingHasher())
        for n in range(5):
            keys.create(f"{name}-{n}", ["*:consume"])

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = DirectoryStore(PrivateDisk(), str(tmp_path), FakeClock()).file
    assert sorted(record.name for record in left.keys.values()) == sorted(
        f"{a}-{b}" for a in range(4) for b in range(5)
    )


def test_writer_waits_for_the_lock_and_gives_up_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_TRIES", 3)
    disk, pauses = new_disk(), []
    lock = disk.lock(f"{DIRECTORY}/{LOCK_FILE}")
    store = DirectoryStore(disk, DIRECTORY, FakeClock(), pauses.append)
    with pytest.raises(ResourceExhausted, match="another process holds"):
        Keys(store, CountingHasher()).create("a", ["*:consume"])
    assert len(pauses) == 3
    lock.release()
    Keys(store, CountingHasher()).create("a", ["*:consume"])


def test_store_checks_the_file_at_most_once_per_second() -> None:
    disk, clock = new_disk(), FakeClock()
    keys_of(disk).create("a", ["*:consume"])
    store = DirectoryStore(disk, DIRECTORY, clock)
    reads: list[str] = []
    disk.on_step = lambda operation, path: reads.append(path) if operation == "open" else None
    for _ in range(1000):
        store.refresh()
    assert reads == []
    clock.advance(1)
    for _ in range(1000):
        store.refresh()
    assert len(reads) == 1


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_flipped_bit_anywhere_is_detected(at: int) -> None:
    disk = new_disk()
    keys_of(disk).create("a", ["*:consume"])
    raw = bytearray(disk.read_file(f"{DIRECTORY}/{FILE}"))
    raw[at % len(raw)] ^= 0x01
    disk.write_file_atomic(f"{DIRECTORY}/{FILE}", bytes(raw))
    with pytest.raises(CorruptionError):
        open_store(disk)


def test_corruption_error_does_not_quote_the_file() -> None:
    disk = new_disk()
    keys_of(disk).create("a", ["*:consume"])
    raw = disk.read_file(f"{DIRECTORY}/{FILE}").replace(b'"hash": "', b'"hash": 7, "x": "')
    disk.write_file_atomic(f"{DIRECTORY}/{FILE}", raw)
    with pytest.raises(CorruptionError) as caught:
        open_store(disk)
    assert "counted:" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_file_of_a_later_version_is_refused() -> None:
    disk = new_disk()
    disk.write_file_atomic(f"{DIRECTORY}/{FILE}", msgspec.json.encode({"version": 2}))
    with pytest.raises(UnknownFormat):
        open_store(disk)


FIXTURE = b"""{
 "version": 1,
 "crc32c": "00000000",
 "has_admin_key": true,
 "signing_secret": "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
 "keys": {
  "0011223344556677": {
   "id": "0011223344556677",
   "name": "a",
   "hash": "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaA",
   "scopes": ["orders/*:produce"],
   "created_at": 1,
   "last_used_at": null,
   "revoked_at": 2
  }
 },
 "users": {}
}"""


def test_version_1_stays_readable() -> None:
    disk = new_disk()
    disk.write_file_atomic(f"{DIRECTORY}/{FILE}", store_module._with_checksum(FIXTURE))
    file = open_store(disk).file
    assert (file.has_admin_key, file.keys["0011223344556677"].revoked_at) == (True, 2)
