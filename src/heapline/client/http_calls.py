"""Calls of the HTTP face over one pool of connections: JSON out and in, errors as Heapline's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx
import msgspec

from heapline.errors import Closed, DeadlineExceeded, HeaplineError, UnavailableError
from heapline.wire import codes

T = TypeVar("T")
_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=60.0)
#: What a status means that came without a body of ours, from a proxy for example: as the gRPC code of the same meaning.
_BRANCHES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED", 429: "UNAVAILABLE"}
_BRANCHES |= {502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


class HttpCalls:
    def __init__(self, url: str, credential: str | None, timeout: float | None) -> None:
        headers = {} if credential is None else {"authorization": credential}
        # Certificates are looked up for https alone: loading them takes longer than many calls.
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=httpx.Timeout(timeout), limits=_LIMITS,
            verify=not url.startswith("http://"), trust_env=False, follow_redirects=False,
        )  # fmt: skip

    async def __call__(
        self, method: str, path: str, kind: type[T], body: Any = None, query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> T:  # fmt: skip
        """The answer, as a struct of wire/json_shapes.py. `body` is a struct, or bytes that are JSON already."""
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        sent = {"content-type": "application/json"} | (headers or {}) if content is not None else headers
        given = None if query is None else {name: value for name, value in query.items() if value is not None}
        try:
            response = await self._client.request(method, path, content=content, params=given, headers=sent)
        except (httpx.HTTPError, RuntimeError) as error:
            raise _broken(error, path, self._client.is_closed) from None
        if response.status_code >= 300:
            raise heapline_error(response.status_code, response.content)
        return msgspec.json.decode(response.content, type=kind)

    async def lines(self, path: str, query: dict[str, Any] | None = None, body: Any = None) -> AsyncIterator[bytes]:
        """The lines of an answer that is a stream of them; `body` is a struct, if there is one."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        sent: dict[str, Any] = {}
        if body is not None:
            sent = {"content": msgspec.json.encode(body), "headers": {"content-type": "application/json"}}
        try:
            async with self._client.stream("GET" if body is None else "POST", path, params=given, **sent) as response:
                if response.status_code >= 300:
                    raise heapline_error(response.status_code, await response.aread())
                rest = b""
                async for chunk in response.aiter_bytes():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line
        except (httpx.HTTPError, RuntimeError) as error:
            raise _broken(error, path, self._client.is_closed) from None

    async def close(self) -> None:
        await self._client.aclose()


def heapline_error(status: int, content: bytes) -> HeaplineError:
    """The exception that the server raised; without a body of ours, what the status says."""
    code = _BRANCHES.get(status, "INVALID_ARGUMENT" if status < 500 else "UNKNOWN")
    try:
        told = msgspec.json.decode(content)
    except ValueError:
        told = None
    if not isinstance(told, dict) or "error" not in told:
        return codes.of_code(code, f"the server answered with status {status}")
    return read_error(told, code)


def read_error(told: dict[str, Any], code: str = "UNKNOWN") -> HeaplineError:
    facts = told.get("facts")
    if isinstance(facts, dict) and isinstance(facts.get("lost"), list):
        told = told | {"facts": facts | {"lost": [int(id) for id in facts["lost"]]}}
    return codes.rebuild(told, code)


def _broken(error: Exception, path: str, closed: bool) -> Exception:
    if closed:
        return Closed()
    if isinstance(error, RuntimeError):
        return error  # a bug, and not the connection's
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded(path)
    return UnavailableError(f"the connection to the server failed ({type(error).__name__}): retry")
