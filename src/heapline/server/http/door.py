"""What is settled before a request is read: its size, its correlation id, and whether the server still takes any."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import MutableHeaders

from heapline.errors import BadRequest
from heapline.logs import Log
from heapline.server.front import Front, Stopping, correlation_id
from heapline.server.http import answers
from heapline.wire import codes

ALWAYS = ("/healthz", "/readyz", "/metrics")  # also asked of a server that stops
log = Log("heapline.server")


class TooLarge(BadRequest):
    """Told as 413."""

    http_status = 413


class Door:
    """ASGI middleware."""

    def __init__(self, app: Any, front: Front, bytes_max: int) -> None:
        self._app, self._front, self._bytes_max = app, front, bytes_max

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-correlation-id", b"").decode("latin-1")
        scope.setdefault("state", {})["correlation_id"] = told = correlation_id(given)
        begun = False

        async def send_with_id(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["x-correlation-id"] = told
                if self._front.stopping.is_set() or message["status"] == 413:  # of which the rest is not read
                    headers["connection"] = "close"
            await send(message)

        try:
            if self._front.stopping.is_set() and scope["path"] not in ALWAYS:
                raise Stopping
            await self._app(scope, self._bounded(receive), send_with_id)
        except (Stopping, TooLarge) as error:
            await answers.tell(error)(scope, receive, send_with_id)
        except Exception:
            log.exception("a request failed", method=scope["method"], path=scope["path"], correlation_id=told)
            if begun:
                raise
            body = {"error": "HeaplineError", "facts": {}, "text": codes.INTERNAL_TEXT}
            await answers.answer(500, body)(scope, receive, send_with_id)

    def _bounded(self, receive: Any) -> Any:
        seen = 0

        async def receive_some() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._bytes_max:
                raise TooLarge(f"a request may hold {self._bytes_max} bytes: send fewer messages at a time")
            return message

        return receive_some
