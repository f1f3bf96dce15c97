"""From an HTTP request to a visit at the front, and to the body it brings.

A body is read and parsed when it is known who sent it, and never before: `House.asked` puts the reading into the visit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from heapline.config import DEFAULT_NAMESPACE, parse_topic
from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import BadRequest, TopicNotFound
from heapline.model import TopicInfo
from heapline.server.front import Caller, Front, Visit

T = TypeVar("T")


class NotJson(BadRequest):
    """Told as 415."""

    http_status = 415


class House:
    """What a route works with: the broker, and the door it lets callers in by."""

    def __init__(self, request: Request) -> None:
        state: Any = request.app.state
        self.broker: EmbeddedBroker = state.broker
        self.front: Front = state.front
        self.request = request

    def visit(self, call: str, topic: str | None = None, face: str = "http", read: Any = None) -> Visit:
        """`async with house.visit("Purge", topic) as caller:`; the call's name is one of `front.ACTIONS`."""
        headers = {name.lower(): value for name, value in self.request.headers.items()}
        headers["x-correlation-id"] = self.request.state.correlation_id
        return Visit(self.front, face, call, topic, headers, read=read)

    def asked(
        self, call: str, kind: type[T], topic: str | None = None, face: str = "http", topic_in: Any = None
    ) -> Asked[T]:
        """`async with house.asked("Pop", PopAsk) as (body, caller):`; a body that has a topic tells it, by `topic_in`
        where it is not called that."""
        return Asked(self, call, kind, topic, face, topic_in or _topic_in)

    async def read(self) -> bytes:
        try:
            return await self.request.body()
        except ClientDisconnect:
            raise BadRequest("the request ended before its body did") from None

    async def info(self, topic: str) -> TopicInfo:
        namespace, name = parse_topic(topic)
        wanted = name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
        for info in await self.broker.list_topics():
            if info.name == wanted:
                return info
        raise TopicNotFound(topic)

    async def body(self, kind: type[T], optional: bool = False) -> T:
        request = self.request
        if request.headers.get("content-encoding", "identity") != "identity":
            raise NotJson("bodies are not taken compressed: leave content-encoding away")
        data = await self.read()
        if not data and optional:
            data = b"{}"
        sort = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if data and sort != "application/json":  # what a browser's form can send from any page is not taken either
            raise NotJson("send the body as JSON, with `content-type: application/json` (curl has --json for it)")
        try:
            found: T = _decoder(kind).decode(data)
            return found
        except RecursionError:
            raise BadRequest("the body is nested too deeply") from None
        except UnicodeDecodeError:
            raise BadRequest("the body is not UTF-8") from None
        except msgspec.MsgspecError as error:
            raise BadRequest(f"the body does not fit: {error}") from None


class Asked(Generic[T]):
    def __init__(
        self, house: House, call: str, kind: type[T], topic: str | None, face: str, topic_in: Callable[[T], str | None]
    ) -> None:
        self._house, self._kind, self._topic_in = house, kind, topic_in
        self._visit = house.visit(call, topic, face, self._read)
        self._optional = topic is not None  # a path that says everything needs no body
        self._body: T

    async def _read(self, visit: Visit) -> None:
        self._body = await self._house.body(self._kind, self._optional)
        assert visit.caller is not None
        visit.caller.must_be_valid()  # a body takes as long as its sender likes: he may be out by now
        if visit.topic is None:
            visit.topic = self._topic_in(self._body)

    async def __aenter__(self) -> tuple[T, Caller]:
        caller = await self._visit.__aenter__()
        return self._body, caller

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._visit.__aexit__(kind, error, trace)


def _topic_in(body: Any) -> str | None:
    if not isinstance(body, dict):
        return getattr(body, "topic", None)
    topic = body.get("topic")
    if not isinstance(topic, str):
        raise BadRequest("the body does not fit: `topic` is missing, or is no text")
    return topic


def _decoder(kind: Any) -> Any:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind)
    return _DECODERS[kind]


_DECODERS: dict[Any, Any] = {}


async def _house(request: Request) -> House:
    return House(request)  # a class alone would be called in a thread


Here = Annotated[House, Depends(_house)]
