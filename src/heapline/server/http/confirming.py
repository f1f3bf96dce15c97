"""What cannot be undone is asked for twice: the first call is answered with a token (428), the second brings it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from heapline.errors import BadRequest
from heapline.server.front import Caller
from heapline.server.http.queries import Sure
from heapline.server.http.visiting import House

Confirmed = Annotated[Sure, Query()]


async def confirm(house: House, caller: Caller, call: str, topic: str, sure: Sure, arguments: str = "") -> None:
    """Returns if this very call was confirmed; on a heap that is there, for nobody can mean another."""
    if not sure.force:
        raise BadRequest(f"{call} of topic {topic!r} cannot be undone: if it is meant, add ?force=true")
    name = (await house.info(topic)).name
    caller.confirm(call, name, sure.confirmation or house.request.headers.get("x-confirmation"), arguments)
