"""`auth.json`: the keys and users of a data directory, in one small file of mode 0600 that is replaced whole.

Format version 1; ritual for changing it: bump the version, keep reading the old one, add a fixture. `crc32c` is the
checksum of the whole text with its own digits as zeros, as in the catalog.

Theory of operation. The file is the truth and several processes may change it: the server, and `heapline keys` beside
it. Every change takes `auth.lock`, reads the file afresh, and is durable before it is true in memory or answered; so
no writer loses another's change, and a revocation that was answered outlives any crash. Readers never lock: they see
the old file or the new one. A server looks at the file again at most once a second (`refresh`) and whenever it meets a
key that it has not verified. A file that went missing or does not check is an error for every caller, never an empty
store: when in doubt nobody comes in. Key and user records are never deleted, so an id never means two things.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable

import msgspec
from crc32c import crc32c

from heapline.clock import Clock
from heapline.errors import CorruptionError, DirectoryLocked, ResourceExhausted, UnknownFormat
from heapline.journal.disk import Disk, Lock
from heapline.server.auth.principal import Principal, Scope, parse_scope

VERSION = 1
FILE, LOCK_FILE = "auth.json", "auth.lock"
LOOK_EVERY_MS = 1000
LOCK_TRIES, LOCK_PAUSE_S = 500, 0.02  # ten seconds: longer than any change takes
_CRC = re.compile(rb'"crc32c": "[0-9a-f]{8}"')


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    hash: str
    scopes: tuple[str, ...]
    created_at: int
    last_used_at: int | None = None
    revoked_at: int | None = None

    def __repr__(self) -> str:
        return f"KeyRecord(id={self.id!r}, name={self.name!r}, scopes={self.scopes!r}, revoked_at={self.revoked_at!r})"


class UserRecord(msgspec.Struct, frozen=True, kw_only=True):
    email: str
    hash: str
    scopes: tuple[str, ...]
    created_at: int
    disabled_at: int | None = None
    token_epoch: int = 1  # raised by whatever must end the tokens given out so far

    def __repr__(self) -> str:
        return f"UserRecord(email={self.email!r}, scopes={self.scopes!r}, disabled_at={self.disabled_at!r})"


class AuthFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    crc32c: str = "00000000"
    has_admin_key: bool = False  # the first admin key was made; it is never made again
    signing_secret: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))
    keys: dict[str, KeyRecord] = {}
    users: dict[str, UserRecord] = {}

    def __repr__(self) -> str:
        return f"AuthFile({len(self.keys)} keys, {len(self.users)} users)"


def parse_scopes(record: KeyRecord | UserRecord) -> tuple[Scope, ...]:
    return tuple(parse_scope(scope) for scope in record.scopes)


def _with_checksum(text: bytes) -> bytes:
    blank = _CRC.sub(b'"crc32c": "00000000"', text, count=1)
    return _CRC.sub(b'"crc32c": "%08x"' % crc32c(blank), blank, count=1)


class AuthStore:
    def __init__(self, disk: Disk, directory: str, clock: Clock, pause: Callable[[float], None] = time.sleep) -> None:
        self.disk, self.directory, self.clock = disk, directory, clock
        self._path = f"{directory}/{FILE}"
        self._pause = pause
        self._mutex = threading.Lock()  # held while memory follows the file
        self._raw: bytes | None = None
        self._looked_at = clock.boot_ms()
        self._principals: dict[str, Principal] = {}
        self.file = self._take(self._read())

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> bytes | None:
        if self._raw is None and not self.disk.exists(self._path):
            return None
        try:
            return self.disk.read_file(self._path)
        except FileNotFoundError:
            raise self._damaged("it has gone") from None

    def _take(self, raw: bytes | None) -> AuthFile:
        """What these bytes say becomes what is true in memory."""
        self.file = self._decode(raw) if raw is not None else AuthFile()
        self._raw = raw
        self._principals = {}
        return self.file

    def _decode(self, raw: bytes) -> AuthFile:
        try:
            version = msgspec.json.decode(raw, type=dict)["version"]
            if version != VERSION:
                raise UnknownFormat(self._path, version)
            file = msgspec.json.decode(raw, type=AuthFile)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
            # The cause may quote the file; it stays out of the traceback.
            raise self._damaged("it is not the JSON that was written") from None
        if not _CRC.search(raw) or _with_checksum(raw) != raw:
            raise self._damaged("it does not match its checksum")
        return file

    def _damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(
            f"{FILE} of the data directory cannot be read ({detail}): nobody is let in; restore it from a backup, or "
            "move it away and make new keys with `heapline keys create`"
        )

    def refresh(self, *, now: bool = False) -> AuthFile:
        """Follow changes of other processes, at most once a second unless it must be now."""
        at = self.clock.boot_ms()
        if not now and 0 <= at - self._looked_at < LOOK_EVERY_MS:
            return self.file
        # While this process changes the file it holds the lock: nobody else can have, so there is nothing to follow.
        if self._mutex.acquire(blocking=False):
            try:
                raw = self._read()
                if raw != self._raw:
                    self._take(raw)
                self._looked_at = at
            finally:
                self._mutex.release()
        return self.file

    def key_principal(self, key_id: str) -> Principal | None:
        """Of a key that is good now."""
        record = self.file.keys.get(key_id)
        if record is None or record.revoked_at is not None:
            return None
        found = self._principals.get(key_id)
        if found is None:
            found = self._principals[key_id] = Principal(f"key:{key_id}", parse_scopes(record))
        return found

    # -- changing --------------------------------------------------------------------------------------------------

    def change(self, edit: Callable[[AuthFile], AuthFile]) -> AuthFile:
        """Durable on return. Blocks on the disk, and for as long as another process holds the lock."""
        lock = self._lock()
        try:
            with self._mutex:
                raw = self._read()
                before = self._take(raw) if raw != self._raw else self.file
                after = edit(before)
                if after is before and raw is not None:
                    return before
                text = _with_checksum(msgspec.json.format(msgspec.json.encode(after), indent=1))
                self.disk.write_file_atomic(self._path, text)
                return self._take(text)
        finally:
            lock.release()

    def _lock(self) -> Lock:
        for _ in range(LOCK_TRIES):
            try:
                return self.disk.lock(f"{self.directory}/{LOCK_FILE}")
            except DirectoryLocked:
                self._pause(LOCK_PAUSE_S)
        raise ResourceExhausted(f"waiting for {LOCK_FILE}, which another process holds,", LOCK_TRIES)
