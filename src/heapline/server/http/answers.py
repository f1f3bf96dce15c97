"""How an answer is written, and how an error is told: `{"error": class, "facts": {…}, "text": …}` with the code of the
one table."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from heapline.errors import BadRequest, ConfirmationNeeded, HeaplineError
from heapline.server.front import Front
from heapline.wire import codes
from heapline.wire.json_shapes import tell_error

RETRY_AFTER = 1  # seconds, where an error does not know better
JSON = "application/json"
_SAID = {"extra_forbidden": "there is no such parameter", "missing": "is missing"}
_WHERE = ", in an x-confirmation header or behind the path as &confirmation="  # of the token
_ENCODER = msgspec.json.Encoder()


def say(document: Any, status: int = 200) -> Response:
    return Response(_ENCODER.encode(document), status, media_type=JSON)


async def told(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeaplineError)
    return tell(error, ids_as_numbers=not request.url.path.startswith("/v1"))


async def malformed(request: Request, error: Exception) -> Response:
    """What FastAPI says of a parameter that does not fit, without its value: it may be a secret. FastAPI looks at them
    before the visit begins; a stranger is told first that he is one."""
    assert isinstance(error, RequestValidationError)
    front: Front = request.app.state.front
    try:
        await front.guard.authenticate(request.headers.get("authorization") or request.headers.get("x-api-key"))
    except HeaplineError as refused:
        return tell(refused)
    said = [f"{'.'.join(map(str, e['loc']))}: {_SAID.get(e['type'], e['msg'])}" for e in error.errors()[:5]]
    return tell(BadRequest("; ".join(said)))


async def plain(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: no such path, no such method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail} (what there is stands in /openapi.json)"
    return answer(error.status_code, {"error": "RequestError", "text": text, "facts": {}}, error.headers)


def tell(error: HeaplineError, ids_as_numbers: bool = False) -> Response:
    """Ids are strings in /v1, because JavaScript cannot hold them as numbers; MQueue's API has them as numbers."""
    status = getattr(error, "http_status", None) or codes.codes_of(type(error)).http
    headers = {"retry-after": str(getattr(error, "retry_after", RETRY_AFTER))} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    document = tell_error(error)
    if isinstance(error, ConfirmationNeeded):
        document.text += _WHERE
    if ids_as_numbers:
        document.facts = codes.describe(error)["facts"]
    return answer(status, msgspec.to_builtins(document), headers)


def answer(status: int, body: dict[str, Any], headers: Any = None) -> Response:
    return Response(json.dumps(body), status, headers, media_type=JSON)
