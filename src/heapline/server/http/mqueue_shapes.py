"""The bodies of MQueue's API, as JSON spells them: what is read, what is answered, and how OpenAPI describes both.

Read by msgspec rather than pydantic: ten thousand items in one request are nothing unusual, and what it says of an item
that does not fit names the place and never the value, which may be a payload. Names and types are those of the
original's API reference; what is optional beside them is marked. Nothing is decided here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from heapline.config import DEFAULT_NAMESPACE, parse_topic
from heapline.errors import BadRequest
from heapline.model import Outgoing, Popped, from_ms

T = TypeVar("T")
LIMIT_DEFAULT, LIMIT_MAX = 10, 10_000
ERROR_CHARACTERS_MAX = 4096  # of a nack's error: what is longer is cut, for it is said of work that has failed
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Digits = Annotated[str, Meta(pattern="^[0-9]{1,19}$")]
Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | Digits
Moment = Annotated[datetime, Meta(tz=True)]
NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
Base64 = Annotated[bytes, Meta(extra_json_schema={"pattern": BASE64_PATTERN})]  # told; msgspec checks it anyway


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to enqueue."""

    namespace: Name
    topic: Name
    payload: Base64
    priority: Int64 = 0  # the lowest is served first
    deliver_after: Moment | None = None
    idempotency_key: Annotated[str, Meta(min_length=1)] | None = None  # beyond the original: see docs/mqueue.md

    def outgoing(self) -> Outgoing:
        return Outgoing(
            self.payload, self.priority, deliver_at=self.deliver_after, idempotency_key=self.idempotency_key
        )


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work is done."""

    id: Id
    namespace: Name
    topic: Name
    lease_token: Digits | None = None  # beyond the original: as dequeue answered it


class Nack(Ack, frozen=True, forbid_unknown_fields=True):
    """The work has failed; try again later."""

    error: str | None = None


class Delivered(msgspec.Struct, frozen=True):
    """A message that is leased to the caller."""

    id: int
    payload: bytes
    lease_expires_at: datetime
    lease_token: str
    attempts: int
    priority: int


class Problem(msgspec.Struct, frozen=True):
    """What is answered instead of 200."""

    error: str  # a class of Heapline's errors
    facts: dict[str, Any]
    text: str


def topic_of(namespace: str, topic: str) -> str:
    """The topic's name as the broker tells it; refuses what is no name."""
    parse_topic(name := f"{namespace}/{topic}")
    return topic if namespace == DEFAULT_NAMESPACE else name


def namespace_of(topic: str) -> str:
    return parse_topic(topic)[0]


def read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body does not fit: {error} ($ is the body)") from None


def whole(number: int | str, name: str = "id") -> int:
    value = int(number)
    if value >= 1 << 63:
        raise BadRequest(f"{name} is a whole number below 2**63")
    return value


def delivered(popped: Popped) -> list[Delivered]:
    rows = zip(
        popped.ids, popped.payloads, popped.deadline_ms, popped.tokens, popped.attempts, popped.priorities, strict=True
    )
    return [
        Delivered(id, payload, from_ms(deadline), str(token), attempts, priority)
        for id, payload, deadline, token, attempts, priority in rows
    ]


# -- OpenAPI -----------------------------------------------------------------------------------------------------------

_SCHEMAS = msgspec.json.schema_components([Item, Ack, Nack, Delivered, Problem])[1]
_IDS = {"type": "array", "items": {"type": "integer"}}
_REFUSALS = {
    400: "The request does not fit, and changed nothing.",
    401: "Nobody is known by this token or key.",
    403: "The caller's scopes do not allow it.",
    404: "There is no such topic, and none is made.",
    409: "The caller holds no such lease; or the idempotency key was used for something else.",
    413: "A message, or the request, is too large.",
    429: "The namespace has asked too often, or may have no more topics. Retry-After tells when to come again.",
    503: "Not now: retry.",
    507: "The disk is full.",
}


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def described(
    body: Any, answer: Any, says: str, statuses: tuple[int, ...] = (400, 401, 403, 404, 409, 413, 429, 503, 507)
) -> dict[str, Any]:
    """What a route tells FastAPI, which reads neither these bodies nor these answers itself."""
    responses: dict[int, Any] = {200: {"description": says, "content": _content(answer)}}
    for status in statuses:
        responses[status] = {"description": _REFUSALS[status], "content": _content(_SCHEMAS["Problem"])}
    extra = {} if body is None else {"requestBody": {"required": True, "content": _content(body)}}
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


ENQUEUE = described({"type": "array", "minItems": 1, "items": _SCHEMAS["Item"]}, _IDS, "The ids, in the same order.")
DEQUEUE = described(None, {"type": "array", "items": _SCHEMAS["Delivered"]}, "Leased to the caller, best first.")
ACK = described(_SCHEMAS["Ack"], {"type": "object"}, "Gone for good.")
NACK = described(_SCHEMAS["Nack"], {"type": "object"}, "It comes again later, or is dead.")
