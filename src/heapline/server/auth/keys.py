"""API keys: create, list and revoke them, and recognize them with Argon2 only on a key's first call.

A verified key is known by the SHA-256 digest of its complete text, compared in constant time. A rejected key is
remembered the same way, so a worker with a wrong key costs one hash and not one per call. The store is asked on every
call whether a known key is still valid, so a revocation needs no cache to be cleared. The time of a key's last use is
written at most once per minute. Creating and revoking block on Argon2 and the disk; the server does them in a thread.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TypeVar

import msgspec

from heapline.contract.errors import BadRequest, Unauthenticated
from heapline.server.auth.passwords import Allowance, Hasher, Prover, Throttle
from heapline.server.auth.principals import Principal, parse_scope
from heapline.server.auth.secret import KEY, Secret, new_key
from heapline.server.auth.store import AuthFile, AuthStore, KeyRecord

KNOWN_MAX = 10_000
WRITE_BACK_MS = 60_000
BY_KEY = Allowance(burst=10, refill_ms=5_000)
ALL_KEYS = Allowance(burst=50, refill_ms=100)
K = TypeVar("K")
V = TypeVar("V")
REJECTED = "the API key is not valid; check it, or create one with `heapline keys create`"


class Keys:
    def __init__(self, store: AuthStore, hasher: Hasher) -> None:
        self._store, self._hasher = store, hasher

    def create(self, name: str, scopes: Sequence[str]) -> tuple[KeyRecord, Secret]:
        """Create a key. Its secret appears only in this result and cannot be shown again."""
        record, secret = self.draw(name, scopes)
        self._store.change(lambda file: with_key(file, record))
        return record, secret

    def draw(self, name: str, scopes: Sequence[str]) -> tuple[KeyRecord, Secret]:
        """Return a new key that is not in the store yet."""
        if not name.strip() or len(name) > 128 or not name.isprintable():
            raise BadRequest("a key needs a name of 1 to 128 printable characters, so that you can recognize it later")
        if not scopes:
            raise BadRequest("a key needs at least one scope, such as 'orders/*:produce'")
        spelled = tuple(str(parse_scope(scope)) for scope in scopes)
        key_id, secret = new_key()
        hashed, now = self._hasher.hash(secret.reveal()), self._store.clock.wall_ms()
        record = KeyRecord(id=key_id, name=name.strip(), hash=hashed, scopes=spelled, created_at=now)
        return record, secret

    def list(self) -> list[KeyRecord]:
        return sorted(self._store.refresh(now=True).keys.values(), key=lambda record: (record.created_at, record.id))

    def revoke(self, key_id: str) -> KeyRecord:
        """Revoke a key: immediately in this process, within a second in other ones. Doing it again changes nothing."""
        key_id = _public_part(key_id)

        def edit(file: AuthFile) -> AuthFile:
            record = file.keys.get(key_id)
            if record is None:
                raise BadRequest(f"key {key_id!r} does not exist; see `heapline keys list`")
            if record.revoked_at is not None:
                return file
            return with_key(file, msgspec.structs.replace(record, revoked_at=self._store.clock.wall_ms()))

        file = self._store.change(edit)
        self._store.drop_admin_key(key_id)  # the file of a revoked key would only mislead
        return file.keys[key_id]


def with_key(file: AuthFile, record: KeyRecord) -> AuthFile:
    return msgspec.structs.replace(file, keys=file.keys | {record.id: record})


def _public_part(text: str) -> str:
    """Return the id alone. People paste complete keys, or `key:<id>` from the audit log."""
    text = text.strip().removeprefix("key:")
    return text.split("_")[1] if text.startswith("hl_") and text.count("_") > 1 else text


class KeyRing:
    """Recognizes keys for a running server."""

    def __init__(self, store: AuthStore, hasher: Hasher, pool: Executor) -> None:
        self._store = store
        self._prover = Prover(hasher, Throttle(store.clock, BY_KEY, ALL_KEYS), pool, "API keys")
        self._known: OrderedDict[str, bytes] = OrderedDict()  # key id -> digest of the verified key
        self._rejected: OrderedDict[bytes, None] = OrderedDict()  # digests of keys that are not valid
        self._rejected_by = store.file  # the state that rejected them; after a change they are checked again
        self._used: dict[str, int] = {}
        self._written_at = store.clock.boot_ms()

    async def recognize(self, text: str) -> Principal:
        match = KEY.match(text)
        if match is None:
            raise Unauthenticated(REJECTED)  # the form is public, so a quick answer reveals nothing
        key_id, digest = match[1], hashlib.sha256(text.encode()).digest()
        self._store.refresh()
        if not self._is_known(key_id, digest):
            await self._prove(key_id, digest, text)
        principal = self._store.key_principal(key_id)
        if principal is None:
            self._known.pop(key_id, None)
            raise Unauthenticated(REJECTED)
        self._used[key_id] = self._store.clock.wall_ms()
        return principal

    def _is_known(self, key_id: str, digest: bytes) -> bool:
        known = self._known.get(key_id)
        if known is None or not hmac.compare_digest(known, digest):
            return False
        self._known.move_to_end(key_id)
        return True

    async def _prove(self, key_id: str, digest: bytes, text: str) -> None:
        if self._rejected_by is not self._store.file:
            self._rejected.clear()
            self._rejected_by = self._store.file
        if digest in self._rejected:
            raise Unauthenticated(REJECTED)

        async def stored_hash() -> str | None:
            record = (await self._store.catch_up()).keys.get(key_id)
            return record.hash if record is not None and record.revoked_at is None else None

        if not await self._prover.prove(key_id, text, stored_hash, lambda: self._is_known(key_id, digest)):
            _remember(self._rejected, digest, None)
            raise Unauthenticated(REJECTED)
        _remember(self._known, key_id, digest)

    # -- time of last use --------------------------------------------------------------------------------------------

    def last_used(self, record: KeyRecord) -> int | None:
        known = [at for at in (record.last_used_at, self._used.get(record.id)) if at is not None]
        return max(known, default=None)

    def wants_writing(self) -> bool:
        return bool(self._used) and self._store.clock.boot_ms() - self._written_at >= WRITE_BACK_MS

    def write_back(self) -> None:
        """Write the times of last use. Blocks on the disk. What cannot be written now is written next time."""
        self._written_at = self._store.clock.boot_ms()
        used = dict(self._used)

        def edit(file: AuthFile) -> AuthFile:
            newer = {
                key_id: msgspec.structs.replace(file.keys[key_id], last_used_at=at)
                for key_id, at in used.items()
                if key_id in file.keys and at > (file.keys[key_id].last_used_at or 0)
            }
            return msgspec.structs.replace(file, keys=file.keys | newer) if newer else file

        if used:
            self._store.change(edit)
            for key_id, at in used.items():
                if self._used.get(key_id) == at:
                    del self._used[key_id]


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > KNOWN_MAX:
        memory.popitem(last=False)
