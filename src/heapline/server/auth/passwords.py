"""Verify keys and passwords with Argon2id: few at a time, in their own threads, and as many as the throttle admits.

A name that does not exist is checked against a hash that nothing matches, so it costs as much as a wrong secret. The
throttle is asked after the wait for a slot: after a restart many valid keys queue and are admitted, while many invalid
ones are rejected without a single hash.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

from heapline.contract.errors import ResourceExhausted
from heapline.server.auth.throttle import Throttle

AT_ONCE = 2  # each takes a core and 19 MiB
WAITING_MAX = 1000


class Hasher(Protocol):
    """A slow hash. Calls block; the server makes them in a thread."""

    def hash(self, secret: str) -> str: ...

    def verify(self, stored: str, secret: str) -> bool: ...


class Argon2id:
    """Argon2id with the minimum parameters that OWASP recommends: 19 MiB, two passes, one lane, about 20 ms.

    API keys have 256 random bits and would be safe under a plain hash. They are hashed the same way, once per key and
    process.
    """

    def __init__(self, *, memory_kib: int = 19_456, passes: int = 2, lanes: int = 1) -> None:
        self._hasher = PasswordHasher(
            time_cost=passes, memory_cost=memory_kib, parallelism=lanes, hash_len=32, salt_len=16, type=Type.ID
        )

    def hash(self, secret: str) -> str:
        return self._hasher.hash(secret)

    def verify(self, stored: str, secret: str) -> bool:
        """Compare in constant time. A stored text that is not a hash matches nothing."""
        try:
            return self._hasher.verify(stored, secret)
        except (VerificationError, InvalidHashError):
            return False


class Prover:
    def __init__(self, hasher: Hasher, throttle: Throttle, pool: Executor, what: str) -> None:
        self._hasher, self._throttle, self._pool, self._what = hasher, throttle, pool, what
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._matches_nothing = hasher.hash(secrets.token_urlsafe(32))

    async def prove(
        self, name: str, secret: str, look_up: Callable[[], str | None], is_settled: Callable[[], bool]
    ) -> bool:
        """Return whether `secret` matches the hash that `look_up` returns (None: the name does not exist).

        `is_settled` is checked once a slot is free: another call may have proved the same secret meanwhile.
        """
        if self._waiting >= WAITING_MAX:
            raise ResourceExhausted(f"checks of {self._what} that wait", WAITING_MAX)
        self._waiting += 1
        try:
            async with self._slots:
                if is_settled():
                    return True
                if not self._throttle.admit(name):
                    raise ResourceExhausted(f"the number of failed attempts with {self._what}", self._throttle.burst)
                stored = look_up()
                # A caller that disconnects leaves its hash running; the size of the pool bounds those too.
                loop = asyncio.get_running_loop()
                hashed = stored or self._matches_nothing
                matches = await loop.run_in_executor(self._pool, self._hasher.verify, hashed, secret)
        finally:
            self._waiting -= 1
        is_proved = matches and stored is not None  # explicit, so that it does not depend on chance
        if is_proved:
            self._throttle.succeeded(name)
        return is_proved
