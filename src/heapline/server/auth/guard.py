"""The guard of a data directory: API keys and tokens in, principals out; and the first admin key.

The admin key is made on a directory's first start and stands in `admin.key` (0600), where the command line on the
same machine finds it; it is shown and logged nowhere. The file is written before the store that knows its hash, so a
crash between the two leaves a file that the next start replaces, never a key that nobody has. After that the store
remembers that there was one: neither deleting the file nor revoking the key brings another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from heapline.clock import Clock, SystemClock
from heapline.errors import BadRequest, HeaplineError, Unauthenticated
from heapline.journal.disk import Disk
from heapline.logs import Log
from heapline.server.auth.hashing import Argon2id, Hasher
from heapline.server.auth.keys import ADMIN_KEY_FILE, KeyRing, Keys, key_id_of, with_key
from heapline.server.auth.principal import Action, Principal, check_scopes
from heapline.server.auth.private import PrivateDisk, refuse_readable_by_others
from heapline.server.auth.proving import AT_ONCE
from heapline.server.auth.secret import Secret
from heapline.server.auth.store import AuthFile, AuthStore, KeyRecord
from heapline.server.auth.users import Sessions, Users

ADMIN_SCOPE = "*:produce,consume,admin"
CREDENTIAL_MAX = 4096
NOTHING_SENT = (
    "this server wants to know who is calling: send `authorization: Bearer <API key or token>`; the first admin key "
    "stands in admin.key in the server's data directory"
)
log = Log(__name__)
T = TypeVar("T")


class DirectoryGuard:
    """See `Guard`. Opening blocks on the disk and on Argon2; the rest is for one event loop."""

    def __init__(
        self, directory: str | Path, *,
        clock: Clock | None = None, disk: Disk | None = None, hasher: Hasher | None = None,
    ) -> None:  # fmt: skip
        hasher = hasher or Argon2id()
        self.store = AuthStore(disk or PrivateDisk(), str(directory), clock or SystemClock())
        self.keys = Keys(self.store, hasher)
        self.users = Users(self.store, hasher)
        ensure_admin_key(self.store, self.keys)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="argon2")
        self._ring = KeyRing(self.store, hasher, self._pool)
        self._sessions = Sessions(self.store, hasher, self._pool)
        self._writing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.on_login: Callable[[str, BaseException | None], None] | None = None  # told of every attempt

    async def authenticate(self, credential: str | None) -> Principal:
        if not credential:
            raise Unauthenticated(NOTHING_SENT)
        text = _without_scheme(credential)
        if len(text) > CREDENTIAL_MAX or not text.isascii():
            raise Unauthenticated("what was sent is neither an API key nor a token")
        if not text.startswith("hl_"):
            return self._sessions.recognise(text)
        principal = await self._ring.recognise(text)
        if self._ring.wants_writing() and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write_back())
        return principal

    async def login(self, email: str, password: Secret) -> Secret:
        try:
            token = await self._sessions.login(email, password)
        except BaseException as error:  # one who hangs up has not logged in either
            if self.on_login is not None:
                self.on_login(email, error)
            raise
        if self.on_login is not None:
            self.on_login(email, None)
        return token

    async def aside(self, work: Callable[[], T], allowed: Callable[[], None] = lambda: None) -> T:
        """Work on keys or users, which blocks on Argon2 and the disk: in a thread, one at a time. `allowed` is asked
        when its turn has come, and raises: what one does before it may be to revoke whoever asked for the next."""
        async with self._changing:
            allowed()
            return await asyncio.to_thread(work)

    def last_used(self, record: KeyRecord) -> int | None:
        """Also what is not written back yet."""
        return self._ring.last_used(record)

    def check(self, principal: Principal, action: Action, topic: str | None) -> None:
        check_scopes(principal, action, topic)

    def is_valid(self, principal: Principal) -> bool:
        kind, _, name = principal.subject.partition(":")
        try:
            self.store.refresh()
        except (HeaplineError, OSError) as error:
            log.error("the store of keys cannot be read; streams are ended", cause=type(error).__name__)
            return False
        if kind == "key":
            now = self.store.key_principal(name)
        elif kind == "user" and self._sessions.is_current(principal):
            now = self._sessions.principal_of(name)
        else:
            return kind == "local"
        return now is not None and (now.scopes, now.token_epoch) == (principal.scopes, principal.token_epoch)

    async def _write_back(self) -> None:
        """When keys were last used is good to know, and not worth failing for."""
        try:
            await asyncio.to_thread(self._ring.write_back)
        except (HeaplineError, OSError) as error:
            log.warning("the last use of keys was not written", cause=type(error).__name__)

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._write_back()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _without_scheme(credential: str) -> str:
    scheme, space, rest = credential.strip().partition(" ")
    return rest.strip() if space and scheme.lower() == "bearer" else credential.strip()


def ensure_admin_key(store: AuthStore, keys: Keys) -> None:
    """On a directory's first start; later starts find that it was done and change nothing."""

    def edit(file: AuthFile) -> AuthFile:
        if file.has_admin_key:
            return file
        # A file that a start left when it was cut off, or that outlived its store, is of a key that nobody knows.
        record, secret = keys.draw("admin", [ADMIN_SCOPE])
        store.disk.write_file_atomic(f"{store.directory}/{ADMIN_KEY_FILE}", secret.reveal().encode() + b"\n")
        log.info("the first admin key was made", file=ADMIN_KEY_FILE)
        return msgspec.structs.replace(with_key(file, record), has_admin_key=True)

    store.change(edit)


def read_admin_key(directory: str | Path) -> Secret:
    """For the command line on the server's own machine."""
    path = str(Path(directory) / ADMIN_KEY_FILE)
    refuse_readable_by_others(path)
    content = Path(path).read_bytes()
    if key_id_of(content) is None:
        raise BadRequest(f"{path!r} does not hold an API key")
    return Secret(content.decode().strip())
