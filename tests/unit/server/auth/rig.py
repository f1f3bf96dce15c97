"""A guard on its own disk and clock, and a hasher that counts calls instead of using CPU time."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path

from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.secret import refuse_readable_by_others
from heapline.server.auth.store import DirectoryStore
from heapline.server.auth.tls import TlsFiles
from heapline.testing.clock import FakeClock
from tests.simulation.fake_disk import FakeDisk

DIRECTORY = "/data"
PASSWORD = "correct horse battery"


class CountingHasher:
    """A fast substitute for the slow hash; `verified` lists the compared pairs."""

    def __init__(self) -> None:
        self.hashed = 0
        self.verified: list[str] = []

    def hash(self, secret: str) -> str:
        self.hashed += 1
        return "counted:" + hashlib.sha256(secret.encode()).hexdigest()

    def verify(self, stored: str, secret: str) -> bool:
        self.verified.append(stored)
        return hmac.compare_digest(stored, "counted:" + hashlib.sha256(secret.encode()).hexdigest())


def new_disk() -> FakeDisk:
    disk = FakeDisk()
    disk.mkdir(DIRECTORY)
    disk.fsync_dir("/")
    return disk


def no_pause(seconds: float) -> None:
    raise AssertionError("no other process holds the lock")


class Rig:
    def __init__(self, disk: FakeDisk | None = None, clock: FakeClock | None = None) -> None:
        self.disk = disk or new_disk()
        self.clock = clock or FakeClock()
        self.hasher = CountingHasher()
        self.guard = DirectoryGuard(DIRECTORY, clock=self.clock, disk=self.disk, hasher=self.hasher)
        self.hasher.hashed = 0

    @property
    def admin_key(self) -> str:
        return self.disk.read_file(f"{DIRECTORY}/admin.key").decode().strip()

    def other_process(self) -> Rig:
        """Another process on the same directory, like `heapline keys`."""
        return Rig(self.disk, self.clock)

    def key(self, *scopes: str) -> tuple[str, str]:
        """Create a key; return its id and the whole key."""
        record, secret = self.guard.keys.create("a key", scopes or ("*:consume",))
        return record.id, secret.reveal()


def open_store(disk: FakeDisk) -> DirectoryStore:
    return DirectoryStore(disk, DIRECTORY, FakeClock(), no_pause)


def client_context(ca: Path, own: TlsFiles | None = None) -> ssl.SSLContext:
    """Return the context of a client that trusts only `ca`. `own` is its certificate, for servers that require one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ca)
    if own is not None:
        refuse_readable_by_others(str(own.key))
        context.load_cert_chain(own.certificate, own.key)
    return context
