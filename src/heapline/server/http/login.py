"""`POST /v1/auth/login`: a person's email and password for a short-lived token. The one `/v1` call without a caller."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from heapline.errors import BadRequest
from heapline.server.auth.secret import Secret
from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here
from heapline.wire.json_requests import LoginAsk
from heapline.wire.json_shapes import LoginTold

router = APIRouter(prefix="/v1/auth", tags=["who calls"])


@documented(router, "POST", "/login", asks=LoginAsk, tells=LoginTold, summary="Log in")
async def login(house: Here) -> Response:
    """Whatever is wrong with email or password, the answer is one and the same (401)."""
    body = await house.body(LoginAsk)
    log_in = getattr(house.front.guard, "login", None)
    if log_in is None:
        raise BadRequest("this server knows no users: call without logging in")
    token: Secret = await log_in(body.email, Secret(body.password))
    return say(LoginTold(token=token.reveal()))
