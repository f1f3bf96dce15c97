"""Keys and users in a document that several servers share, such as a row of a database.

The content is that of `auth.json` (store.py). The document follows the changes of other servers; this store decodes it
when it has changed. If the document cannot be read, its last content is used for STALE_SECONDS, so that a
reconnection is not noticed. After that all requests are rejected as unavailable: a key may have been revoked meanwhile
on a server that can still reach the database. So a revoked key is accepted for at most that long by a server that is
cut off, and otherwise until the notification arrives.

`admin.key` is written on the machine whose server created the first admin key, because only that server knows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from heapline.clock import Clock
from heapline.contract.errors import CorruptionError, UnavailableError
from heapline.journal.disk import Disk
from heapline.server.auth.principals import Principal
from heapline.server.auth.secret import Secret
from heapline.server.auth.store import AdminKeyFile, AuthFile, Principals, decode, encode

STALE_SECONDS = 5.0
Edit = Callable[[bytes | None], bytes | None]
NAME = "the shared document of keys and users"


class SharedDocument(Protocol):
    """Bytes that several servers share. `content` is None until they are first written."""

    content: bytes | None

    def age(self) -> float:
        """Return how many seconds ago the content was certainly current."""

    async def read(self) -> None:
        """Read the content now, or raise UnavailableError."""

    def read_blocking(self) -> None:
        """Read the document like `read`, from another thread."""

    def change_blocking(self, edit: Edit) -> None:
        """Replace the content by what `edit` returns, unless that is None. Not on the event loop.

        It is durable on return, and `content` is what the document holds then.
        """


class SharedStore:
    """An `AuthStore`."""

    def __init__(self, document: SharedDocument, disk: Disk, directory: str, clock: Clock) -> None:
        self._document, self.clock = document, clock
        self._admin_key = AdminKeyFile(disk, directory)
        self._mutex = threading.Lock()  # a change loads in another thread, and must not replace what is newer
        self._raw: bytes | None = None
        self.file = AuthFile()
        self._principals = Principals(self.file)
        self._load()

    def _load(self) -> AuthFile:
        """Decode the document's content if it is not what is known already."""
        with self._mutex:
            raw = self._document.content
            if raw is not self._raw:
                if raw is None:
                    raise _damaged("it was deleted")
                self.file = decode(raw, NAME, _damaged)
                self._principals = Principals(self.file)
                self._raw = raw
            return self.file

    def refresh(self, *, now: bool = False) -> AuthFile:
        """Return the current state. With `now` this reads the document, which is not allowed on the event loop."""
        if now:
            self._document.read_blocking()
        elif self._document.age() > STALE_SECONDS:
            raise UnavailableError(f"{NAME} cannot be read, so no key can be checked; retry later")
        return self._load()

    async def catch_up(self) -> AuthFile:
        self.refresh()  # callers that waited for their turn must not each wait for a database that does not answer
        await self._document.read()
        return self._load()

    def key_principal(self, key_id: str) -> Principal | None:
        """Return the principal of a key, or None if the key is unknown or revoked."""
        return self._principals.of(key_id)

    def change(self, edit: Callable[[AuthFile], AuthFile]) -> AuthFile:
        """Apply `edit` while no other server changes the document. Durable on return. Not on the event loop."""

        def apply(raw: bytes | None) -> bytes | None:
            if raw is None and self._raw is not None:
                raise _damaged("it was deleted")  # never an empty store: the next start would create an admin key
            before = AuthFile() if raw is None else decode(raw, NAME, _damaged)
            after = edit(before)
            return None if after is before and raw is not None else encode(after)

        self._document.change_blocking(apply)
        return self._load()

    def write_admin_key(self, key: Secret) -> None:
        self._admin_key.write(key)

    def drop_admin_key(self, key_id: str) -> None:
        self._admin_key.drop(key_id)


def _damaged(detail: str) -> CorruptionError:
    return CorruptionError(
        f"cannot read {NAME} ({detail}); all requests are rejected until you restore it from a backup"
    )
