"""`POST /v1/auth/login`: a person's email and password for a short-lived token. The one `/v1` call without a caller."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from heapline.errors import BadRequest
from heapline.server.auth.secret import Secret
from heapline.server.http.answers import say
from heapline.server.http.door import TooLarge, TooSlow
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here, House
from heapline.wire.json_requests import LoginAsk
from heapline.wire.json_shapes import LoginTold

router = APIRouter(prefix="/v1/auth", tags=["who calls"])
BODY_BYTES_MAX = 16 << 10  # email and password, however they are escaped
BODY_SECONDS_MAX = 10.0


class Stranger(House):
    """Whose body is read before it is known who he is: a small one, and soon."""

    async def read(self) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS_MAX):
                async for chunk in self.request.stream():
                    data += chunk
                    if len(data) > BODY_BYTES_MAX:
                        raise TooLarge(f"a login may hold {BODY_BYTES_MAX} bytes")
        except ClientDisconnect:
            raise BadRequest("the request ended before its body did") from None
        except TimeoutError:
            raise TooSlow(f"a login is sent within {BODY_SECONDS_MAX:.0f} seconds") from None
        return bytes(data)


@documented(router, "POST", "/login", asks=LoginAsk, tells=LoginTold, summary="Log in")
async def login(house: Here) -> Response:
    """Whatever is wrong with email or password, the answer is one and the same (401)."""
    body = await Stranger(house.request).body(LoginAsk)
    log_in = getattr(house.front.guard, "login", None)
    if log_in is None:
        raise BadRequest("this server knows no users: call without logging in")
    token: Secret = await log_in(body.email, Secret(body.password))
    return say(LoginTold(token=token.reveal()))
