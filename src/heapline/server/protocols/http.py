"""The HTTP interface: one ASGI application. Its routes are the contract's calls (wire/json.py), pages, MQueue's API.

An `Exchange` is one request and its response: headers, query, body, and how results and errors are written. A body is
read and parsed only after its sender is authenticated. A call that waits ends when its client disconnects, and what it
has leased by then is returned. Feeds are lines of JSON (NDJSON); if one ends early, its last line is the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from heapline.contract.errors import BadRequest, ConfirmationNeeded, HeaplineError, Unauthenticated
from heapline.logs import Log
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping, correlation_id
from heapline.server.settings import is_loopback
from heapline.wire import error_codes
from heapline.wire.json import NDJSON, Route, check_lost, find

JSON = "application/json"
RETRY_AFTER = 1  # seconds, if the error does not say
_CONFIRM = "; send it in an x-confirmation header, or as the query parameter confirmation"
_encode = msgspec.json.Encoder().encode
ALWAYS = ("/healthz", "/readyz", "/metrics")  # served even while the server is stopping
CLIENT_GONE = 499  # what proxies log for it; the client does not see it
NO_STORE = {"cache-control": "no-store"}  # for answers that contain a secret, or that lease
log = Log("heapline.server")


class TooLarge(BadRequest):
    """Request body over the size limit; answered with HTTP 413."""

    http_status = 413


class TooSlow(BadRequest):
    """Request body that takes too long to arrive; answered with HTTP 408."""

    http_status = 408


class NotJson(BadRequest):
    """Request body of another type than JSON; answered with HTTP 415."""

    http_status = 415


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Any, receive: Any, send: Any, bytes_max: int, is_stopping: Callable[[], bool]) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: str = scope["raw_path"].decode("latin-1")  # still percent-encoded
        self.receive, self._send, self._bytes_max = receive, send, bytes_max
        # Of a header that is sent twice the first one counts.
        self.headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in reversed(scope["headers"])}
        self.correlation_id = correlation_id(self.headers.get("x-correlation-id"))
        self.headers["x-correlation-id"] = self.correlation_id
        self._query: bytes = scope["query_string"]
        self.is_begun = False  # the response has begun
        self._is_stopping = is_stopping  # the connection closes after the response

    # -- request ---------------------------------------------------------------------------------------------------

    def query(self) -> dict[str, str]:
        try:
            pairs = parse_qsl(self._query.decode(), keep_blank_values=True, errors="strict")
        except UnicodeDecodeError:
            raise BadRequest("the query is not UTF-8") from None
        query = dict(pairs)
        if len(query) < len(pairs):
            raise BadRequest("a query parameter is given twice")
        return query

    async def body(self, bytes_max: int | None = None) -> bytes:
        """Read the body, up to the limit."""
        limit = self._bytes_max if bytes_max is None else bytes_max
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise BadRequest("the request ended before its body did")
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise TooLarge(f"a request may have at most {limit} bytes; send fewer messages at a time")
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def json_body(self, bytes_max: int | None = None) -> bytes:
        """Read a body that must be JSON. What a browser's form can send from any page is not accepted."""
        if self.headers.get("content-encoding", "identity") != "identity":
            raise NotJson("compressed bodies are not accepted; omit content-encoding")
        data = await self.body(bytes_max)
        kind = self.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if data and kind != JSON:
            raise NotJson("send the body as JSON, with `content-type: application/json` (curl has --json for it)")
        return data

    async def until_disconnected(self) -> None:
        """Return when the client has disconnected. Call it after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    # -- response --------------------------------------------------------------------------------------------------

    async def begin(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        self.is_begun = True
        headers = {"content-type": content_type, "x-correlation-id": self.correlation_id, **headers}
        if self._is_stopping() or status in (408, 413):  # the rest of the request is not read
            headers["connection"] = "close"
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(
        self, data: bytes, status: int = 200, content_type: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        await self.begin(status, content_type, {"content-length": str(len(data)), **(headers or {})})
        await self.write(data, more=False)

    async def respond_error(self, error: HeaplineError, ids_as_numbers: bool = False) -> None:
        """Answer with an error: its class, its data, and text that says what to do."""
        status = getattr(error, "http_status", None) or error_codes.codes_of(type(error)).http
        headers = {"retry-after": str(getattr(error, "retry_after", RETRY_AFTER))} if status in (429, 503) else {}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        await self.respond(_encode(error_document(error, ids_as_numbers)), status, headers=headers)

    async def respond_plain_error(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        kind = "RequestError" if status < 500 else "HeaplineError"
        await self.respond(_encode({"error": kind, "facts": {}, "text": text}), status, headers=headers)


def error_document(error: HeaplineError, ids_as_numbers: bool = False) -> dict[str, Any]:
    """Return an error as JSON has it.

    Ids are strings in /v1, because JavaScript cannot represent them as numbers. MQueue's API has them as numbers.
    """
    document = error_codes.describe(error)
    document["text"] = error_codes.advise(document, "http")
    if isinstance(error, ConfirmationNeeded):
        document["text"] += _CONFIRM
    if not ids_as_numbers and "lost" in document["facts"]:
        document["facts"] = document["facts"] | {"lost": list(map(str, document["facts"]["lost"]))}
    return document


async def while_connected(exchange: Exchange, task: asyncio.Future[Any]) -> bool:
    """Wait for a task. Return False if the client disconnects first; the task then still runs."""
    gone = asyncio.ensure_future(exchange.until_disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return not gone.done()
    finally:
        gone.cancel()


def read_json(kind: Any, data: bytes) -> Any:
    """Decode a body. Raise BadRequest with the place of the error, and never with a value: it may be a secret."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None
    except msgspec.MsgspecError as error:
        raise BadRequest(f"invalid request body: {error} ($ is the body)") from None


Page = Callable[[Exchange], Awaitable[None]]
#: An ASGI application that handles the errors of its pages itself.
Mounted = Callable[[Any, Any, Any], Awaitable[None]]
DASHBOARD = "/ui"


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
        dashboard: Mounted | None = None,
        prefix: str = "",
    ) -> None:
        self._dispatcher, self._gate = dispatcher, dispatcher.gate
        self._dashboard, self._prefix = dashboard, prefix
        self._pages = dict(pages)
        self._request_bytes_max, self._only_local = request_bytes_max, only_local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._prefix and scope["path"].startswith(f"{self._prefix}/"):  # a proxy may keep it or strip it
            size = len(self._prefix)
            scope = {**scope, "path": scope["path"][size:], "raw_path": scope["raw_path"][size:]}
        exchange = Exchange(scope, receive, send, self._request_bytes_max, self._gate.stopping.is_set)
        try:
            self._admit(exchange)
            if self._dashboard is not None and f"{exchange.path}/".startswith(f"{DASHBOARD}/"):
                await self._dashboard(scope, receive, send)
            else:
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

    def _admit(self, exchange: Exchange) -> None:
        if self._gate.stopping.is_set() and exchange.path not in ALWAYS:
            raise Stopping
        if self._only_local and not is_local(exchange.headers):
            raise CrossSiteRequest(
                "this server has no authentication; it serves only programs and pages of its machine"
            )

    async def _respond(self, exchange: Exchange) -> None:
        page = self._pages.get((exchange.method, exchange.path))
        if page is not None:
            await page(exchange)
            return
        if self._dashboard is not None and exchange.path == "/" and "text/html" in exchange.headers.get("accept", ""):
            await exchange.respond(b"", 302, headers={"location": f"{self._prefix}{DASHBOARD}/"})
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
                return  # the client does not read the rest; what the feed holds must be released
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
