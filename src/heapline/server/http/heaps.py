"""Heaps, which are topics: make, change, list, delete, look at, stop and start them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from heapline.server.auth.principal import Action
from heapline.server.http.visiting import Here

router = APIRouter(prefix="/v1", tags=["heaps"])


class MakeHeap(BaseModel):
    """A topic and, beside its name, whatever the topic's config takes."""

    model_config = ConfigDict(extra="allow")
    topic: str


@router.post("/heaps", status_code=201)
async def make_heap(body: MakeHeap, house: Here) -> dict[str, Any]:
    async with house.visit("MakeHeap", body.topic):
        info = await house.broker.create_topic(body.topic, **(body.model_extra or {}))
        return {"topic": info.name}


@router.get("/heaps")
async def list_heaps(house: Here) -> dict[str, Any]:
    """Those on which the caller may do something."""
    async with house.visit("ListHeaps") as caller:
        infos = await house.broker.list_topics()
        return {"heaps": [{"topic": i.name} for i in infos if any(caller.may(a, i.name) for a in Action)]}
