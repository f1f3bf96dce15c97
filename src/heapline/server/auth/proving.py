"""The one door to Argon2: few at a time, in threads of their own, and never more than the throttle lets through.

Keys and passwords both pass here. A name that does not exist is checked against a hash that nothing matches, so it
costs what a wrong secret costs. Admission is asked after the wait for a place: a crowd of good keys after a restart
queues and comes in, a crowd of bad ones is turned away without a single hash.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Executor

from heapline.errors import ResourceExhausted
from heapline.server.auth.hashing import Hasher
from heapline.server.auth.throttle import Throttle

AT_ONCE = 2  # each takes a core and 19 MiB
WAITING_MAX = 1000


class Prover:
    def __init__(self, hasher: Hasher, throttle: Throttle, pool: Executor, what: str) -> None:
        self._hasher, self._throttle, self._pool, self._what = hasher, throttle, pool, what
        self._places = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._nobody = hasher.hash(secrets.token_urlsafe(32))

    async def prove(
        self, name: str, secret: str, look_up: Callable[[], str | None], is_settled: Callable[[], bool]
    ) -> bool:
        """Whether `secret` matches the hash that `look_up` finds; None if there is nobody of that name.

        `is_settled` is asked when a place is free: another call may have proved the same meanwhile.
        """
        if self._waiting >= WAITING_MAX:
            raise ResourceExhausted(f"checks of {self._what} that wait", WAITING_MAX)
        self._waiting += 1
        try:
            async with self._places:
                if is_settled():
                    return True
                if not self._throttle.admit(name):
                    raise ResourceExhausted(f"the number of failed attempts with {self._what}", self._throttle.burst)
                stored = look_up()
                # A caller who hangs up leaves his hash running; the pool's size bounds those too.
                loop = asyncio.get_running_loop()
                matches = await loop.run_in_executor(self._pool, self._hasher.verify, stored or self._nobody, secret)
        finally:
            self._waiting -= 1
        # A hash of nobody matches nothing; said again so that it does not rest on chance.
        good = matches and stored is not None
        if good:
            self._throttle.succeeded(name)
        return good
