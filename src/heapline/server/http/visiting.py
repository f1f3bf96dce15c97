"""From an HTTP request to a visit at the front."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from heapline.engine.embedded import EmbeddedBroker
from heapline.server.front import Front, Visit


class House:
    """What a route works with: the broker, and the door it lets callers in by."""

    def __init__(self, request: Request) -> None:
        state: Any = request.app.state
        self.broker: EmbeddedBroker = state.broker
        self.front: Front = state.front
        self._request = request

    def visit(self, call: str, topic: str | None = None, face: str = "http") -> Visit:
        """`async with house.visit("Purge", topic) as caller:`; the call's name is one of `front.ACTIONS`."""
        headers = {name.lower(): value for name, value in self._request.headers.items()}
        headers["x-correlation-id"] = self._request.state.correlation_id
        return Visit(self.front, face, call, topic, headers)


Here = Annotated[House, Depends(House)]
