"""What is settled before a request is read: its size, its correlation id, and whether the server still takes any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders

from heapline.errors import BadRequest, Unauthenticated
from heapline.logs import Log
from heapline.server.front import Front, Stopping, correlation_id
from heapline.server.http import answers
from heapline.server.settings import is_loopback
from heapline.wire import codes

ALWAYS = ("/healthz", "/readyz", "/metrics")  # also asked of a server that stops
log = Log("heapline.server")


class TooLarge(BadRequest):
    """Told as 413."""

    http_status = 413


class TooSlow(BadRequest):
    """Told as 408."""

    http_status = 408


class NotFromHere(Unauthenticated):
    """Of a server that lets everybody in who is on its machine, which pages of others in its browser are not."""


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Where being local is all that is asked. A browser carries out what any page wants of 127.0.0.1, and tells whose
    page it is; and a page whose own name is made to resolve to 127.0.0.1 calls the server by that name."""
    named = [f"//{headers['host']}"] if "host" in headers else []
    if "origin" in headers:
        named.append(headers["origin"])
    return headers.get("sec-fetch-site") != "cross-site" and all(map(_is_loopback_url, named))


def _is_loopback_url(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


class Door:
    """ASGI middleware."""

    def __init__(self, app: Any, front: Front, bytes_max: int, only_from_here: bool = False) -> None:
        self._app, self._front, self._bytes_max, self._only_from_here = app, front, bytes_max, only_from_here

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
                if self._front.stopping.is_set() or message["status"] in (408, 413):  # whose rest is not read
                    headers["connection"] = "close"
            await send(message)

        try:
            if self._front.stopping.is_set() and scope["path"] not in ALWAYS:
                raise Stopping
            if self._only_from_here and not is_from_here(Headers(scope=scope)):
                raise NotFromHere("this server has no locks, and is for programs and pages of its own machine alone")
            await self._app(scope, self._bounded(receive), send_with_id)
        except (Stopping, TooLarge, NotFromHere) as error:
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
