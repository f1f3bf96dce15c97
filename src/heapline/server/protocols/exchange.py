"""One HTTP request and its response, on ASGI: headers, query, body, and how results and errors are written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from heapline.contract.errors import BadRequest, ConfirmationNeeded, HeaplineError
from heapline.server.gate import correlation_id
from heapline.wire import error_codes

JSON = "application/json"
RETRY_AFTER = 1  # seconds, if the error does not say
_CONFIRM = "; send it in an x-confirmation header, or as the query parameter confirmation"
_encode = msgspec.json.Encoder().encode


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
