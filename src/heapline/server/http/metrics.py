"""`GET /metrics`, for Prometheus. The names of topics and how much goes through them are nobody else's business:
without a key it answers only where the server listens on loopback alone, unless `metrics_public` says otherwise."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from heapline.server.auth.principal import Action
from heapline.server.http.door import is_from_here
from heapline.server.http.visiting import Here
from heapline.server.observing.exposition import CONTENT_TYPE

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response, summary="Metrics in Prometheus' text format")
async def metrics(request: Request, house: Here) -> Response:
    state = request.app.state
    if not (state.metrics_public or (state.metrics_local and is_from_here(request.headers))):
        guard, headers = house.front.guard, request.headers
        principal = await guard.authenticate(headers.get("authorization") or headers.get("x-api-key"))
        guard.check(principal, Action.CONSUME, None)  # on all topics: it tells of all of them
    return Response(await state.metrics.text(), media_type=CONTENT_TYPE)
