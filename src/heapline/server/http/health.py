"""`/healthz`: the process lives. `/readyz`: it takes calls."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from heapline.server.http.visiting import Here

router = APIRouter(tags=["health"])


@router.get("/healthz", response_class=PlainTextResponse, summary="Does the process live?")
async def healthz() -> str:
    return "ok\n"


@router.get("/readyz", response_class=PlainTextResponse, summary="Does it take calls?")
async def readyz(house: Here) -> PlainTextResponse:
    if house.front.stopping.is_set():
        return PlainTextResponse("stopping\n", 503)
    return PlainTextResponse("ok\n")
