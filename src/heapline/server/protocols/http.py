"""The HTTP interface: one ASGI application. Its routes are the contract's calls (wire/json.py), pages, MQueue's API.

A body is read and parsed only after its sender is authenticated. A call that waits ends when its client disconnects,
and what it has leased by then is returned. Feeds are lines of JSON (NDJSON); if one ends early, its last line is the
error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from heapline.contract.errors import BadRequest, HeaplineError, Unauthenticated
from heapline.logs import Log
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping
from heapline.server.protocols.exchange import Exchange, error_document, while_connected
from heapline.server.settings import is_loopback
from heapline.wire import error_codes
from heapline.wire.json import NDJSON, Route, check_lost, find

ALWAYS = ("/healthz", "/readyz", "/metrics")  # served even while the server is stopping
CLIENT_GONE = 499  # what proxies log for it; the client does not see it
NO_STORE = {"cache-control": "no-store"}  # some of these answers contain a secret
log = Log("heapline.server")

Page = Callable[[Exchange], Awaitable[None]]


class CrossSiteRequest(Unauthenticated):
    """A request from another site's page, to a server that trusts everyone on its own machine."""


def is_local(headers: Mapping[str, str]) -> bool:
    """Return whether a request comes from a program or page of this machine.

    A browser sends what any page wants to 127.0.0.1, and says whose page it is. A page whose own name resolves to
    127.0.0.1 calls the server by that name.
    """
    named = [f"//{headers['host']}"] if "host" in headers else []
    if "origin" in headers:
        named.append(headers["origin"])
    return headers.get("sec-fetch-site") != "cross-site" and all(map(_is_loopback_url, named))


def _is_loopback_url(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


class HttpApp:
    """The ASGI application."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pages: Mapping[tuple[str, str], Page],
        *,
        request_bytes_max: int = 64 << 20,
        only_local: bool = False,
    ) -> None:
        self._dispatcher, self._gate = dispatcher, dispatcher.gate
        self._pages = dict(pages)
        self._request_bytes_max, self._only_local = request_bytes_max, only_local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._request_bytes_max, self._gate.stopping.is_set)
        try:
            await self._respond(exchange)
        except HeaplineError as error:
            if not exchange.is_begun:
                await exchange.respond_error(error, ids_as_numbers=not exchange.path.startswith("/v1"))
        except Exception:
            log.exception(
                "request failed",
                method=exchange.method,
                path=exchange.path,
                correlation_id=exchange.correlation_id,
            )
            if exchange.is_begun:
                raise
            await exchange.respond_plain_error(500, error_codes.INTERNAL_TEXT)

    async def _respond(self, exchange: Exchange) -> None:
        if self._gate.stopping.is_set() and exchange.path not in ALWAYS:
            raise Stopping
        if self._only_local and not is_local(exchange.headers):
            raise CrossSiteRequest(
                "this server has no authentication; it serves only programs and pages of its machine"
            )
        page = self._pages.get((exchange.method, exchange.path))
        if page is not None:
            await page(exchange)
            return
        found = find(exchange.method, exchange.raw_path)
        if found is not None:
            await self._call(exchange, *found)
            return
        methods = [m for m in ("GET", "POST", "PATCH", "DELETE") if self._exists(m, exchange)]
        status, what = (405, "method not allowed") if methods else (404, "not found")
        text = f"{exchange.method} {exchange.path}: {what}; see /openapi.json"
        await exchange.respond_plain_error(status, text, {"allow": ", ".join(methods)} if methods else None)

    def _exists(self, method: str, exchange: Exchange) -> bool:
        return (method, exchange.path) in self._pages or find(method, exchange.raw_path) is not None

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _call(self, exchange: Exchange, route: Route, path: dict[str, str]) -> None:
        kind = route.kind
        async with Request(
            self._gate,
            "http",
            kind.facts.rpc,
            exchange.headers,
            is_stream=route.is_feed,
            topic=path.get("topic", ""),
        ) as request:
            query = exchange.query()
            data = await exchange.json_body() if route.has_body else b""
            if data:
                request.check_credential()  # a client may take long to send it
            command, options = route.read(path, query, data)
            if route.is_feed:
                await self._feed(exchange, route, command, options, request)
                return
            result = await self._run(exchange, command, request, _confirmation(command, options, exchange.headers))
            if result is CLIENT_GONE:
                await exchange.respond(b"", CLIENT_GONE)
                return
            check_lost(command, result, options)
            answer = route.encode(result, options)
        headers = NO_STORE if kind.facts.feature == "auth" else None
        await exchange.respond(answer, kind.facts.status, headers=headers)

    async def _run(self, exchange: Exchange, command: Any, request: Request, confirmation: str | None) -> Any:
        running = self._dispatcher.run(command, request, confirmation)
        if not type(command).facts.waits:
            return await running
        task = asyncio.ensure_future(running)
        try:
            if await while_connected(exchange, task):
                return task.result()
        except BaseException:
            self._abandon(task, command, request)
            raise
        self._abandon(task, command, request)
        return CLIENT_GONE

    def _abandon(self, task: asyncio.Future[Any], command: Any, request: Request) -> None:
        """End a call whose client is gone. The dispatcher returns what a cancelled call has leased."""
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self._dispatcher.return_leases(command, task.result(), request)

    async def _feed(self, exchange: Exchange, route: Route, feed: Any, options: Any, request: Request) -> None:
        async def send(item: Any) -> None:
            if not exchange.is_begun:
                await exchange.begin(200, NDJSON, {})
            await exchange.write(route.encode(item, options) + b"\n")

        task = asyncio.ensure_future(self._dispatcher.feed(feed, request, send))
        try:
            if not await while_connected(exchange, task):
                return  # nobody reads the rest; what the feed holds must be released
            await task
            if not exchange.is_begun:
                await exchange.begin(200, NDJSON, {})
        except HeaplineError as error:
            if not exchange.is_begun:
                raise
            await exchange.write(msgspec.json.encode(error_document(error)) + b"\n", more=False)
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await exchange.write(b"", more=False)


def _confirmation(command: Any, options: Any, headers: Mapping[str, str]) -> str | None:
    """Return the confirmation token of a destructive call. Raise BadRequest without `force`."""
    facts = type(command).facts
    if not facts.destroys:
        return None
    if not options.force:
        raise BadRequest(f"{facts.rpc} cannot be undone; if you mean it, add ?force=true")
    token: str | None = options.confirmation or headers.get("x-confirmation")
    return token
