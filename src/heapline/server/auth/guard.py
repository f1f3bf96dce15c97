"""The guard of a store of keys and users: recognizes API keys and tokens; creates the first admin key.

The admin key is created when a server first starts on a store. It is in `admin.key` (0600), where the command line
on the same machine finds it, and is shown and logged nowhere. The file is written before the store that holds its hash,
so a crash between the two leaves a file that the next start replaces, and never a key that is lost. The store
remembers that there was one: neither deleting the file nor revoking the key creates another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from heapline.clock import Clock, SystemClock
from heapline.contract.errors import BadRequest, HeaplineError, Unauthenticated, UnavailableError
from heapline.journal.disk import Disk
from heapline.logs import Log
from heapline.server.auth.keys import KeyRing, Keys, with_key
from heapline.server.auth.passwords import AT_ONCE, Argon2id, Hasher
from heapline.server.auth.principals import LOCAL, Principal, derive_secret
from heapline.server.auth.secret import PrivateDisk, Secret, SessionToken, refuse_readable_by_others
from heapline.server.auth.shared_store import SharedDocument, SharedStore
from heapline.server.auth.store import ADMIN_KEY_FILE, AuthFile, AuthStore, DirectoryStore, KeyRecord, key_id_of
from heapline.server.auth.users import TOKEN_MS, Sessions, Users, is_current

ADMIN_SCOPE = "*:produce,consume,admin"
CREDENTIAL_MAX = 4096
CLOSE_SECONDS = 2.0
NO_CREDENTIAL = (
    "no credential was sent; send `authorization: Bearer <API key or token>`. The first admin key is in admin.key in "
    "the server's data directory"
)
log = Log(__name__)
T = TypeVar("T")
OnLogin = Callable[[str, BaseException | None], None]  # receives the subject, and why it was not logged in


class StoreGuard:
    """A `Guard`. Creating it blocks on the store and on Argon2; use the rest from one event loop."""

    def __init__(self, store: AuthStore, hasher: Hasher | None = None, *, token_ms: int = TOKEN_MS) -> None:
        hasher = hasher or Argon2id()
        self.store = store
        self.keys = Keys(self.store, hasher)
        self.users = Users(self.store, hasher)
        ensure_admin_key(self.store, self.keys)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="argon2")
        self._ring = KeyRing(self.store, hasher, self._pool)
        self._sessions = Sessions(self.store, hasher, self._pool, token_ms)
        self._writing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.on_login: OnLogin | None = None  # receives every attempt to log in with a password

    async def authenticate(self, credential: str | None) -> Principal:
        if not credential:
            raise Unauthenticated(NO_CREDENTIAL)
        text = _without_scheme(credential)
        if len(text) > CREDENTIAL_MAX or not text.isascii():
            raise Unauthenticated("the credential is neither an API key nor a token")
        if not text.startswith("hl_"):
            return self._sessions.recognize(text)
        principal = await self._ring.recognize(text)
        if self._ring.wants_writing() and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write_back())
        return principal

    async def login(self, email: str, password: Secret) -> SessionToken:
        try:
            token = await self._sessions.login(email, password)
        except BaseException as error:  # a client that disconnects has not logged in either
            if self.on_login is not None:
                self.on_login(f"user:{email}", error)
            raise
        if self.on_login is not None:
            self.on_login(f"user:{email}", None)
        return token

    async def run_change(self, work: Callable[[], T], allowed: Callable[[], None] = lambda: None) -> T:
        """Run work on keys or users in a thread, one at a time; it blocks on Argon2 and the disk.

        `allowed` is called when its turn comes, and raises: an earlier change may have revoked the caller's key.
        """
        async with self._changing:
            allowed()
            return await asyncio.to_thread(work)

    def last_used(self, record: KeyRecord) -> int | None:
        """Return when a key was last used, including uses that are not written yet."""
        return self._ring.last_used(record)

    def secret(self, purpose: str) -> bytes:
        return derive_secret(bytes.fromhex(self.store.file.signing_secret), purpose)

    def is_valid(self, principal: Principal) -> bool:
        try:
            self.store.refresh()
        except UnavailableError:  # for now: the caller may retry with the same credential
            raise
        except (HeaplineError, OSError) as error:
            log.error("cannot read keys and users; closing open streams", cause=type(error).__name__)
            return False
        if principal.subject == LOCAL.subject:
            return True
        expires = principal.expires_at is not None or principal.subject.startswith("user:")
        if expires and not is_current(principal, self.store.clock.wall_ms()):
            return False
        now = self.principal(principal.subject)
        return now is not None and (now.scopes, now.token_epoch) == (principal.scopes, principal.token_epoch)

    def principal(self, subject: str) -> Principal | None:
        kind, _, name = subject.partition(":")
        if kind == "user":
            return self._sessions.principal_of(name)
        return self.store.key_principal(name) if kind == "key" else None

    def why_unready(self) -> str | None:
        """Return why no caller can be checked now, or None if they can."""
        try:
            self.store.refresh()
        except (HeaplineError, OSError):
            return "keys and users cannot be read"
        return None

    async def _write_back(self) -> None:
        """Write the times of last use. A failure is only logged."""
        try:
            await asyncio.to_thread(self._ring.write_back)
        except (HeaplineError, OSError) as error:
            log.warning("last use of keys not written; will retry", cause=type(error).__name__)

    async def _write_last(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._write_back()

    async def close(self) -> None:
        """Write the times of last use, if that does not take long: a stop must not wait for a store that is locked."""
        writing = asyncio.create_task(self._write_last())
        await asyncio.wait([writing], timeout=CLOSE_SECONDS)
        if writing.cancel():
            log.warning("last use of keys not written", cause="the store is busy")
        self._pool.shutdown(wait=False, cancel_futures=True)


class DirectoryGuard(StoreGuard):
    """The guard of a data directory."""

    def __init__(
        self,
        directory: str | Path,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        hasher: Hasher | None = None,
        token_ms: int = TOKEN_MS,
    ) -> None:
        store = DirectoryStore(disk or PrivateDisk(), str(directory), clock or SystemClock())
        store.refresh(now=True)  # before the first admin key is created: a lost file is never replaced by an empty one
        super().__init__(store, hasher, token_ms=token_ms)


def shared_guard(document: SharedDocument, directory: str | Path, token_ms: int = TOKEN_MS) -> StoreGuard:
    """Return the guard of keys and users that several servers share. Blocks; not on the event loop."""
    return StoreGuard(SharedStore(document, PrivateDisk(), str(directory), SystemClock()), token_ms=token_ms)


def _without_scheme(credential: str) -> str:
    scheme, space, rest = credential.strip().partition(" ")
    return rest.strip() if space and scheme.lower() == "bearer" else credential.strip()


def ensure_admin_key(store: AuthStore, keys: Keys) -> None:
    """Create the first admin key of a store, unless it was created before."""

    def edit(file: AuthFile) -> AuthFile:
        if file.has_admin_key:
            return file
        # A file left by an interrupted start, or without its store, holds a key that no store knows: replace it.
        record, secret = keys.draw("admin", [ADMIN_SCOPE])
        store.write_admin_key(secret)
        log.info("first admin key created", file=ADMIN_KEY_FILE)
        return msgspec.structs.replace(with_key(file, record), has_admin_key=True)

    store.change(edit)


def read_admin_key(directory: str | Path) -> Secret:
    """Read the admin key, for the command line on the server's own machine."""
    path = str(Path(directory) / ADMIN_KEY_FILE)
    refuse_readable_by_others(path)
    content = Path(path).read_bytes()
    if key_id_of(content) is None:
        raise BadRequest(f"{path!r} does not contain an API key")
    return Secret(content.decode().strip())
