"""Argon2id, behind a protocol so that tests can count and need not burn.

The parameters are those that OWASP gives as a minimum for passwords (19 MiB, two passes, one lane: about 20 ms). API
keys carry 256 random bits and would be safe under a plain hash; they get the same treatment, once per key and process.
Calls block for as long as they take: the server makes them in a thread.
"""

from __future__ import annotations

from typing import Protocol

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError


class Hasher(Protocol):
    def hash(self, secret: str) -> str: ...

    def verify(self, stored: str, secret: str) -> bool: ...


class Argon2id:
    def __init__(self, *, memory_kib: int = 19_456, passes: int = 2, lanes: int = 1) -> None:
        self._hasher = PasswordHasher(
            time_cost=passes, memory_cost=memory_kib, parallelism=lanes, hash_len=32, salt_len=16, type=Type.ID
        )

    def hash(self, secret: str) -> str:
        return self._hasher.hash(secret)

    def verify(self, stored: str, secret: str) -> bool:
        """Compares in constant time; a stored text that is no hash matches nothing."""
        try:
            return self._hasher.verify(stored, secret)
        except (VerificationError, InvalidHashError):
            return False
