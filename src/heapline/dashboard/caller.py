"""A logged-in person, or one of their open pages, as the broker sees them.

Each command is a request of its own at the server's gate, so rights, limits, metrics and the audit log treat it as they
treat a call over HTTP. The commands of one page share a correlation id.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from heapline.contract.call import Command, Page, Right
from heapline.contract.errors import ConfirmationNeeded
from heapline.contract.message import TopicStats
from heapline.server.auth.principals import Principal, Scope
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, correlation_id

INTERFACE = "dashboard"
PAGES_MAX = 20  # of a list that is read as a whole
R = TypeVar("R")


@dataclass
class SharedStats:
    """Statistics of all topics that callers with the same rights may see, as they were read last."""

    found: tuple[list[TopicStats], bool] | None = None
    read_at: float = 0.0
    took: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Memory:
    """Data that the pages of one server keep between two renderings.

    A page uses an entry only after a command of its caller has shown the same topic or message, or if a caller with
    the same scopes has read it, so rights hold.
    """

    stats: dict[tuple[Scope, ...], SharedStats] = field(default_factory=dict)  # see topic_rows.py
    shared_seconds: float = 0.0  # of the processor, that reading them took in all

    sparks: dict[str, tuple[float, str]] = field(default_factory=dict)  # see topic_rows.py
    totals: dict[str, deque[tuple[float, int, int]]] = field(default_factory=dict)  # see topic_rows.py
    lives: OrderedDict[tuple[str, str, str | None], Any] = field(default_factory=OrderedDict)  # see message_life.py

    def forget_stats(self) -> None:
        """Read statistics again: something was changed."""
        self.stats.clear()


class Caller:
    def __init__(
        self, dispatcher: Dispatcher, principal: Principal, memory: Memory, headers: Mapping[str, str] | None = None
    ) -> None:
        self._dispatcher, self.principal, self.memory = dispatcher, principal, memory
        self.correlation_id = correlation_id((headers or {}).get("x-correlation-id"))
        self._headers = {"x-correlation-id": self.correlation_id}

    async def do(self, command: Command[R], confirmation: str | None = None) -> R:
        kind = type(command)
        request = Request(self._dispatcher.gate, INTERFACE, kind.facts.rpc, self._headers)
        request.begin(self.principal)
        try:
            result: R = await self._dispatcher.run(command, request, confirmation)
        except BaseException as error:
            request.end(error)
            raise
        request.end()
        return result

    async def do_confirmed(self, command: Command[R]) -> R:
        """Run a command that cannot be undone, which the person has confirmed in a dialog."""
        try:
            return await self.do(command)
        except ConfirmationNeeded as needed:
            return await self.do(command, needed.token)

    async def all(self, kind: Any, **fields: Any) -> tuple[list[Any], bool]:
        """Return the items of a list's pages, and whether there are more than were read."""
        items: list[Any] = []
        cursor = None
        for _ in range(PAGES_MAX):
            page: Page[Any] = await self.do(kind(cursor=cursor, **fields))
            items += page.items
            cursor = page.cursor
            if cursor is None:
                return items, False
        return items, True

    def may(self, right: Right | None, topic: str | None) -> bool:
        return self.principal.may(right, topic)

    def may_admin(self, topic: str | None = None) -> bool:
        return self.may(Right.ADMIN, topic)
