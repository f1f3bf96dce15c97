"""`auth.json`: the keys and users of a data directory, in one small file of mode 0600 that is replaced atomically.

Format version 1. To change the format: raise the version, keep the reader of the old one, add a fixture to the tests.
`crc32c` is the checksum of the complete text with its own digits set to zero, as in the catalog.

Theory of operation. The file is the truth, and several processes may change it: the server, and `heapline keys` next
to it. Every change takes `auth.lock`, reads the file again, and is durable before it is visible in memory or answered.
So no writer loses another's change, and a revocation that was answered survives any crash. Readers never lock: they see
the old file or the new one. A server checks the file at most once per second (`refresh`), and whenever it meets a key
that it has not verified. A missing or corrupt file, or one that other users can read, is an error for every caller and
never an empty store: if in doubt, no caller is admitted. The catalog records that a directory has keys, so a file that
was removed while no server ran is missed too: only an administrator's command creates another. Records of keys and
users are never deleted, so an id never means two things.

`AuthStore` is the seam: keys, users and the guard need no more than it says. `shared_store.py` keeps the same document
in a place that several servers share.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from heapline.checksum import crc32c
from heapline.clock import Clock
from heapline.contract.call import Right
from heapline.contract.errors import (
    CorruptionError,
    DirectoryLocked,
    ResourceExhausted,
    UnavailableError,
    UnknownFormat,
)
from heapline.journal.disk import Disk, Lock
from heapline.server.auth.principals import Principal, Scope, parse_scope
from heapline.server.auth.secret import KEY, Secret

VERSION = 1
FILE, LOCK_FILE, CATALOG = "auth.json", "auth.lock", "catalog.json"
CHECK_EVERY_MS = 1000
LOCK_TRIES, LOCK_PAUSE_S = 500, 0.02  # ten seconds: longer than any change takes
ADMIN_KEY_FILE = "admin.key"
_CRC = re.compile(rb'"crc32c": "[0-9a-f]{8}"')


class KeysMissing(CorruptionError):
    """The directory has had keys, and their file is gone. Clients see CorruptionError."""

    def __init__(self) -> None:
        super().__init__(
            f"{FILE} is missing from a data directory that had keys; restore it from a backup, or, if there is none, "
            "create new keys: `heapline keys create --data DIRECTORY --name admin --scope '*:produce,consume,admin'`"
        )


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
    token_epoch: int = 1  # raised by every change that revokes the user's tokens

    def __repr__(self) -> str:
        return f"UserRecord(email={self.email!r}, scopes={self.scopes!r}, disabled_at={self.disabled_at!r})"


class AuthFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    crc32c: str = "00000000"
    has_admin_key: bool = False  # the first admin key was created; it is never created again
    signing_secret: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))
    keys: dict[str, KeyRecord] = {}
    users: dict[str, UserRecord] = {}

    def __repr__(self) -> str:
        return f"AuthFile({len(self.keys)} keys, {len(self.users)} users)"


class _Catalog(msgspec.Struct):
    """The field of the catalog (engine/catalog.py) that is about this store."""

    has_keys: bool = False


_decode_file = msgspec.json.Decoder(AuthFile).decode
_decode_catalog = msgspec.json.Decoder(_Catalog).decode


def parse_scopes(record: KeyRecord | UserRecord) -> tuple[Scope, ...]:
    return tuple(parse_scope(scope) for scope in record.scopes)


def _with_checksum(text: bytes) -> bytes:
    blank = _CRC.sub(b'"crc32c": "00000000"', text, count=1)
    return _CRC.sub(b'"crc32c": "%08x"' % crc32c(blank), blank, count=1)


def encode(file: AuthFile) -> bytes:
    return _with_checksum(msgspec.json.format(msgspec.json.encode(file), indent=1))


def decode(raw: bytes, name: str, damaged: Callable[[str], CorruptionError]) -> AuthFile:
    """Read what `encode` wrote. `damaged` makes the error of unreadable content from a detail."""
    try:
        version = msgspec.json.decode(raw, type=dict)["version"]
        if version != VERSION:
            raise UnknownFormat(name, version)
        file = _decode_file(raw)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
        # The cause may quote the file, so it must not appear in the traceback.
        raise damaged("not the JSON that was written") from None
    if not _CRC.search(raw) or _with_checksum(raw) != raw:
        raise damaged("checksum does not match")
    return file


class AuthStore(Protocol):
    """The place where keys and users are stored."""

    clock: Clock
    file: AuthFile  # the state as this process knows it

    def refresh(self, *, now: bool = False) -> AuthFile:
        """Return the current state, following the changes of other processes."""

    async def catch_up(self) -> AuthFile:
        """Return the state as it is now, for a credential that this process has not verified."""

    def key_principal(self, key_id: str) -> Principal | None:
        """Return the principal of a key, or None if the key is unknown or revoked."""

    def change(self, edit: Callable[[AuthFile], AuthFile]) -> AuthFile:
        """Replace the state by what `edit` returns. Durable on return. May block for long."""

    def write_admin_key(self, key: Secret) -> None:
        """Leave the first admin key where an administrator of this machine finds it."""

    def drop_admin_key(self, key_id: str) -> None:
        """Remove what `write_admin_key` left, if it is the key with this id."""


class Principals:
    """The principals of a state's keys, made when first needed: the same object for as long as the state is the same,
    because rights are checked on every call."""

    def __init__(self, file: AuthFile) -> None:
        self._file = file
        self._known: dict[str, Principal] = {}

    def of(self, key_id: str) -> Principal | None:
        record = self._file.keys.get(key_id)
        if record is None or record.revoked_at is not None:
            return None
        found = self._known.get(key_id)
        if found is None:
            found = self._known[key_id] = Principal(f"key:{key_id}", parse_scopes(record))
        return found


class AdminKeyFile:
    """`admin.key` in a data directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._directory, self._path = disk, directory, f"{directory}/{ADMIN_KEY_FILE}"

    def write(self, key: Secret) -> None:
        self._disk.write_file_atomic(self._path, key.reveal().encode() + b"\n")

    def drop(self, key_id: str) -> None:
        """Remove the file if it has the key with this id."""
        with contextlib.suppress(FileNotFoundError):
            if key_id_of(self._disk.read_file(self._path)) == key_id:
                self._disk.unlink(self._path)
                self._disk.fsync_dir(self._directory)


class DirectoryStore:
    """The `AuthStore` of a data directory."""

    def __init__(self, disk: Disk, directory: str, clock: Clock, pause: Callable[[float], None] = time.sleep) -> None:
        self.disk, self.directory, self.clock = disk, directory, clock
        self._path = f"{directory}/{FILE}"
        self._pause = pause
        self._mutex = threading.Lock()  # held while the in-memory state is replaced
        self._raw: bytes | None = None
        self._checked_at = clock.boot_ms()
        self._admin_key = AdminKeyFile(disk, directory)
        self.file = self._load(self._read())

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> bytes | None:
        try:
            return self.disk.read_file(self._path)
        except FileNotFoundError:
            if self._raw is None:
                return None
            raise self._damaged("file is missing") from None
        except OSError as error:
            raise _unavailable("read", FILE, error) from error

    def _load(self, raw: bytes | None) -> AuthFile:
        """Decode the file and replace the in-memory state with it."""
        if raw is None:
            # A file that replaces a lost one is made by an administrator, who then has a key.
            self.file = AuthFile(has_admin_key=self._had_keys())
        else:
            self._refuse_readable_by_others()
            self.file = decode(raw, self._path, self._damaged)
        self._raw = raw
        self._principals = Principals(self.file)
        return self.file

    def _had_keys(self) -> bool:
        """Return whether the catalog says so. If in doubt, it does."""
        try:
            return _decode_catalog(self.disk.read_file(f"{self.directory}/{CATALOG}")).has_keys
        except FileNotFoundError:
            return self.disk.exists(f"{self.directory}/topics")
        except msgspec.MsgspecError:
            return True
        except OSError as error:
            raise _unavailable("read", CATALOG, error) from error

    def _refuse_readable_by_others(self) -> None:
        """Raise if other users can read or change the file. Only a disk with modes knows."""
        mode_of = getattr(self.disk, "mode_for_others", None)
        if mode_of is not None and (mode := mode_of(self._path)) is not None:
            raise CorruptionError(
                f"other users can read or change {FILE} of the data directory (mode {mode}); all requests are rejected "
                "until you run `chmod 600` on it"
            )

    def _damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(
            f"cannot read {FILE} of the data directory ({detail}); all requests are rejected until you restore it from "
            "a backup, or move it away and create new keys with `heapline keys create`"
        )

    def refresh(self, *, now: bool = False) -> AuthFile:
        """Reload the file if another process changed it. Checks at most once per second unless `now` is true."""
        at = self.clock.boot_ms()
        if not now and 0 <= at - self._checked_at < CHECK_EVERY_MS:
            return self.file
        # If another thread is changing the file it holds the lock, so no other process can have changed it.
        if self._mutex.acquire(blocking=False):
            try:
                raw = self._read()
                if raw is None and self._had_keys():
                    raise KeysMissing
                if raw != self._raw:
                    self._load(raw)
                self._checked_at = at
            finally:
                self._mutex.release()
        return self.file

    def key_principal(self, key_id: str) -> Principal | None:
        """Return the principal of a key, or None if the key is unknown or revoked."""
        return self._principals.of(key_id)

    async def catch_up(self) -> AuthFile:
        return self.refresh(now=True)

    # -- changing --------------------------------------------------------------------------------------------------

    def change(self, edit: Callable[[AuthFile], AuthFile]) -> AuthFile:
        """Apply `edit` to the file under the lock. Durable on return. Blocks on disk I/O and on the lock."""
        lock = self._lock()
        try:
            with self._mutex:
                raw = self._read()
                before = self._load(raw) if raw != self._raw else self.file
                after = edit(before)
                if after is before and raw is not None:
                    return before
                if raw is None and before.has_admin_key and not any(map(_administers, after.keys.values())):
                    raise KeysMissing  # only a key of an administrator replaces a lost file
                text = encode(after)
                try:
                    self.disk.write_file_atomic(self._path, text)
                except OSError as error:
                    raise _unavailable("written", FILE, error) from error
                return self._load(text)
        finally:
            lock.release()

    def _lock(self) -> Lock:
        for _ in range(LOCK_TRIES):
            try:
                return self.disk.lock(f"{self.directory}/{LOCK_FILE}")
            except DirectoryLocked:
                self._pause(LOCK_PAUSE_S)
        raise ResourceExhausted(f"waiting for {LOCK_FILE}, which another process holds,", LOCK_TRIES)

    # -- the first admin key ---------------------------------------------------------------------------------------

    def write_admin_key(self, key: Secret) -> None:
        self._admin_key.write(key)

    def drop_admin_key(self, key_id: str) -> None:
        self._admin_key.drop(key_id)


def _administers(record: KeyRecord) -> bool:
    return Principal(record.id, parse_scopes(record)).may(Right.ADMIN, None)


def _unavailable(what: str, file: str, error: OSError) -> UnavailableError:
    text = f"{file} of the data directory cannot be {what} ({error.strerror or error}); check its disk and its owner"
    return UnavailableError(text)


def key_id_of(content: bytes) -> str | None:
    match = KEY.match(content.decode("ascii", "replace").strip())
    return match[1] if match else None
