"""A broker over HTTP: each command is one request with JSON, and feeds are lines of JSON. It needs httpx alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx
import msgspec

from heapline.client.target import ClientTls
from heapline.client.transports.transport import Transport, closed, seconds_left
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import BadRequest, DeadlineExceeded, HeaplineError, UnavailableError, Unsupported
from heapline.wire import error_codes
from heapline.wire.connection import NO_TLS
from heapline.wire.json import ROUTES, ErrorResponse, JsonOptions, Route, read_error

R = TypeVar("R")
_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=60.0)
_OPTIONS = JsonOptions(tell_lost=True, force=True)
#: The gRPC code of a status that came without a body of Heapline's, for example from a proxy.
_CODES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED", 429: "UNAVAILABLE"}
_CODES |= {502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
_error_decoder = msgspec.json.Decoder(ErrorResponse)


class HttpBroker(Transport):
    """`async with HttpBroker("http://localhost:7480", credential="Bearer …") as broker: …`"""

    def __init__(
        self,
        url: str,
        *,
        credential: str | None = None,
        timeout: float | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__()
        self._url, self._credential, self._timeout = url, credential, timeout
        # Loading certificates takes longer than many calls.
        self._verify = False if url.startswith("http://") else (tls or ClientTls()).context()
        self._client_or_none: httpx.AsyncClient | None = None

    def open(self) -> None:
        self._client_or_none = httpx.AsyncClient(
            base_url=self._url,
            headers={} if self._credential is None else {"authorization": self._credential},
            limits=_LIMITS,
            verify=self._verify,
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        await self._leases.wait()
        client, self._client_or_none = self._client_or_none, None
        if client is not None:
            await client.aclose()

    async def renew(self, credential: str) -> None:
        self._credential = credential
        self._client.headers["authorization"] = credential

    @property
    def _client(self) -> httpx.AsyncClient:
        if self._client_or_none is None:
            raise closed()
        return self._client_or_none

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _request(self, command: Command[R], context: Context) -> R:
        route, client = _route(command), self._client
        request = self._build(client, route, command, context)
        try:
            response = await client.send(request)
        except (httpx.HTTPError, RuntimeError) as error:
            raise self._connection_error(error, route.facts.rpc) from None
        if response.status_code >= 300:
            raise heapline_error(response.status_code, response.content)
        result: R = route.decode(response.content)
        return result

    def _build(self, client: httpx.AsyncClient, route: Route, call: Any, context: Context) -> httpx.Request:
        method, path, query, body = route.write(call, _OPTIONS)
        headers = {"content-type": "application/json"} if body else {}
        if context.trace is not None:
            headers["traceparent"] = context.trace
        if context.confirmation is not None:
            headers["x-confirmation"] = context.confirmation
        timeout = httpx.Timeout(seconds_left(context, self._timeout))
        return client.build_request(
            method, path, content=body or None, params=query or None, headers=headers, timeout=timeout
        )

    # -- feeds -----------------------------------------------------------------------------------------------------

    async def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        route, client = _route(feed), self._client
        request = self._build(client, route, feed, context)
        try:
            response = await client.send(request, stream=True)
            try:
                if response.status_code >= 300:
                    raise heapline_error(response.status_code, await response.aread())
                rest = b""
                async for chunk in response.aiter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.startswith(b'{"error"'):
                            raise read_error(_error_decoder.decode(line))
                        yield route.decode(line)
            finally:
                await response.aclose()
        except (httpx.HTTPError, RuntimeError) as error:
            raise self._connection_error(error, route.facts.rpc) from None

    def _connection_error(self, error: Exception, rpc: str) -> Exception:
        if self._client_or_none is None:
            return closed()
        if isinstance(error, HeaplineError | RuntimeError):
            return error  # a RuntimeError of an open client is a bug
        if isinstance(error, httpx.TimeoutException):
            return DeadlineExceeded(rpc)
        if any(sign in str(error) for sign in (*NO_TLS, "illegal status line", "illegal request line")):
            return BadRequest(
                f"{self._url} does not answer with {self._url.partition(':')[0].upper()}; give the port of `heapline "
                "serve --http-port` (7480 by default) as http://host:port, as https://host:port if the server has TLS, "
                "or its native port as host:port"
            )
        why = str(error) or type(error).__name__
        failed = UnavailableError(f"the connection to {self._url} failed ({why}); check that it serves HTTP")
        failed.reached = not isinstance(error, httpx.ConnectError)
        return failed


def _route(call: Any) -> Route:
    route = ROUTES.get(type(call))
    if route is None:
        facts = getattr(type(call), "facts", None)
        raise Unsupported(type(call).__name__, "streams" if facts is None else facts.feature)
    return route


def heapline_error(status: int, content: bytes) -> HeaplineError:
    """Return the error that the server raised. Without a body of Heapline's, return the error class of the status."""
    code = _CODES.get(status, "INVALID_ARGUMENT" if status < 500 else "UNKNOWN")
    try:
        response = _error_decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return error_codes.of_code(code, f"the server answered with status {status}")
    return read_error(response, code)
