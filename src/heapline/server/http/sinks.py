"""Sinks: rows of commits whose last version is remembered for ever."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from heapline.errors import BadRequest
from heapline.server.http.answers import say
from heapline.server.http.confirming import Confirmed
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here
from heapline.wire.json_shapes import KnownTold, SinksTold

router = APIRouter(prefix="/v1", tags=["prepared batches"])
Name = Annotated[str, Path(max_length=600, description="the sink", examples=["txn:nightly-load@orders"])]


@documented(router, "GET", "/sinks", tells=SinksTold, summary="Sinks and their last commits")
async def list_sinks(house: Here) -> Response:
    async with house.visit("ListSinks"):
        return say(SinksTold(sinks=await house.broker.list_sinks()))


@documented(router, "DELETE", "/sinks/{name:path}", tells=KnownTold, confirmed=True, summary="Forget a sink")
async def forget_sink(name: Name, sure: Confirmed, house: Here) -> Response:
    """Its versions may start again; whoever still repeats a commit of it doubles messages. Needs `force=true` and, on a
    second call, the confirmation token of the first."""
    async with house.visit("ForgetSink") as caller:
        caller.tell(about=f"sink {name}")
        if not sure.force:
            raise BadRequest(f"that sink {name!r} is forgotten cannot be undone: if it is meant, add ?force=true")
        caller.confirm("ForgetSink", "", sure.confirmation or house.request.headers.get("x-confirmation"), name)
        return say(KnownTold(known=await house.broker.forget_sink(name)))
