"""Verify keys and passwords with Argon2id: few at a time, in their own threads, and as many as the throttle admits.

A name that does not exist is checked against a hash that nothing matches, so it costs as much as a wrong secret. The
throttle is asked after the wait for a slot: after a restart many valid keys queue and are admitted, while many invalid
ones are rejected without a single hash.

The throttle limits failed attempts: a bucket per name and one for all names together. An attempt takes one from both
buckets, and a successful one puts it back, so only failures count. Buckets refill over time. Names come from outside,
so only the most recent thousands are kept: a client that tries many names escapes the limit per name and meets the
limit for all.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

from heapline.clock import Clock
from heapline.contract.errors import ResourceExhausted

AT_ONCE = 2  # each takes a core and 19 MiB
WAITING_MAX = 1000
NAMES_MAX = 10_000  # that the throttle remembers


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


@dataclass(frozen=True, kw_only=True)
class Allowance:
    burst: int  # failures allowed in a row
    refill_ms: int  # one more is allowed after each interval of this length


class Bucket:
    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: int) -> None:
        self.tokens, self.at = tokens, at

    def fill(self, allowance: Allowance, now: int) -> None:
        self.tokens = min(float(allowance.burst), self.tokens + max(0, now - self.at) / allowance.refill_ms)
        self.at = now


class Throttle:
    def __init__(self, clock: Clock, by_name: Allowance, overall: Allowance) -> None:
        self._clock = clock
        self._by_name, self._overall = by_name, overall
        self._all = Bucket(overall.burst, clock.boot_ms())
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    @property
    def burst(self) -> int:
        return self._by_name.burst

    def admit(self, name: str) -> bool:
        """Take an attempt and return True, or return False if none is left. A rejected attempt costs nothing."""
        now = self._clock.boot_ms()
        bucket = self._buckets.setdefault(name, Bucket(self._by_name.burst, now))
        self._buckets.move_to_end(name)
        if len(self._buckets) > NAMES_MAX:
            self._buckets.popitem(last=False)
        bucket.fill(self._by_name, now)
        self._all.fill(self._overall, now)
        if bucket.tokens < 1 or self._all.tokens < 1:
            return False
        bucket.tokens -= 1
        self._all.tokens -= 1
        return True

    def succeeded(self, name: str) -> None:
        if name in self._buckets:
            self._buckets[name].tokens += 1
        self._all.tokens += 1


class Prover:
    def __init__(self, hasher: Hasher, throttle: Throttle, pool: Executor, what: str) -> None:
        self._hasher, self._throttle, self._pool, self._what = hasher, throttle, pool, what
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._matches_nothing = hasher.hash(secrets.token_urlsafe(32))

    async def prove(
        self, name: str, secret: str, look_up: Callable[[], Awaitable[str | None]], is_settled: Callable[[], bool]
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
                try:
                    stored = await look_up()
                except BaseException:
                    self._throttle.succeeded(name)  # nothing was tried
                    raise
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
