"""Leases that a driver holds while a job runs on what it leased: taken in batches, extended, and given back.

Extending is done by a thread, every third of the time that a lease runs. A lease that ended all the same (the driver
stood still, the server was away for too long) is noted: its message is or will be somebody else's. Knows nothing of
Spark. Killed anywhere: what was not acked comes back when its lease ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from heapline.errors import HeaplineError, LeaseLost
from heapline.logs import Log

log_ = Log("heapline.spark")
POP_MESSAGES, POP_BYTES = 1000, 16 << 20
ACT_MESSAGES = 10_000  # in one call


class Leases:
    """Use it with `with`, around everything from the first pop to the last ack. `client` blocks and may be used from
    several threads."""

    def __init__(self, client: Any, topic: str, visibility: float, holder: str | None = None) -> None:
        self._client, self._topic, self._visibility, self._holder = client, topic, visibility, holder
        self._held: dict[int, Any] = {}  # id -> message
        self.lost: set[int] = set()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="heapline-leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if error is not None:
            try:
                self.act("release", self.held())
            except HeaplineError as told:  # they come back by themselves; what went wrong first is what is told
                log_.warning("leases were not released and will run out", topic=self._topic, error=str(told))

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def take(self, count: int, wait: float) -> list[Any]:
        """Up to so many messages, as many as there are now; waits for the first."""
        taken: list[Any] = []
        while len(taken) < count:
            found = self._client.pop(
                self._topic, min(POP_MESSAGES, count - len(taken)), visibility=self._visibility,
                wait=0.0 if taken else wait, holder=self._holder, max_bytes=POP_BYTES,
            )  # fmt: skip
            if not found:
                break
            with self._lock:
                self._held.update((message.id, message) for message in found)
            taken += found
        return taken

    def held(self) -> list[Any]:
        with self._lock:
            return list(self._held.values())

    def _keep(self) -> None:
        pause = self._visibility / 3
        while not self._ended.wait(pause):
            try:
                self.act("extend", self.held(), self._visibility, ends=False)
                pause = self._visibility / 3
            except Exception as error:  # the next try may do: leases run for three of them
                log_.warning("leases were not extended, will be tried again", topic=self._topic, error=repr(error))
                pause = self._visibility / 10

    def act(self, what: str, messages: Sequence[Any], *args: Any, ends: bool = True, **more: Any) -> int:
        """Carry out ack, nack, release or extend on those that are still held; how many that were."""
        done = 0
        for first in range(0, len(messages), ACT_MESSAGES):
            part = list(messages[first : first + ACT_MESSAGES])
            call: Callable[..., None] = getattr(self._client, what)
            try:
                call(part, *args, **more)
                gone: list[int] = []
            except LeaseLost as error:  # all others were carried out
                gone = error.lost
            with self._lock:
                for id in gone if not ends else [message.id for message in part]:
                    self._held.pop(id, None)
                self.lost.update(gone)
            done += len(part) - len(gone)
        return done

    def settle(self, refused: Mapping[int, str | None]) -> tuple[int, int]:
        """Ack everything but what is refused, which is nacked with its reason; (acked, nacked)."""
        self._stop()  # nobody extends what is being acked
        held = self.held()
        acked = self.act("ack", [message for message in held if message.id not in refused])
        nacked = 0
        for reason in sorted(set(refused.values()), key=str):
            some = [message for message in held if message.id in refused and refused[message.id] == reason]
            nacked += self.act("nack", some, reason=reason)
        return acked, nacked
