"""The bodies of MQueue's API as JSON, and their OpenAPI description.

Names and types are those of the original's API reference; optional additions are marked. An error names the place in
the body and never the value, which may be a payload. Nothing is decided here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from heapline.contract.columns import unpack
from heapline.contract.config import DEFAULT_NAMESPACE, parse_topic
from heapline.contract.errors import BadRequest
from heapline.contract.leases import LeasedMessages
from heapline.contract.message import Outgoing, from_ms

LIMIT_DEFAULT, LIMIT_MAX = 10, 10_000
ERROR_CHARACTERS_MAX = 4096  # of a nack's error; longer ones are cut
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digits = Annotated[str, Meta(pattern="^[0-9]{1,19}$")]
Id = Natural | Digits
Instant = Annotated[datetime, Meta(tz=True)]
NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
Base64 = Annotated[bytes, Meta(extra_json_schema={"pattern": BASE64_PATTERN})]  # for the document; msgspec checks it


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to enqueue."""

    namespace: Name
    topic: Name
    payload: Base64
    priority: Int64 = 0  # the lowest is served first
    deliver_after: Instant | None = None
    idempotency_key: Annotated[str, Meta(min_length=1)] | None = None  # an addition: see docs/mqueue.md

    def outgoing(self) -> Outgoing:
        return Outgoing(
            self.payload, self.priority, deliver_at=self.deliver_after, idempotency_key=self.idempotency_key
        )


class Dequeue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a dequeue."""

    namespace: Name
    topic: Name
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # an addition


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work is done."""

    id: Id
    namespace: Name
    topic: Name
    lease_token: Digits | None = None  # an addition: as in the answer of dequeue


class Nack(Ack, frozen=True, forbid_unknown_fields=True):
    """The work failed; deliver the message again later."""

    error: str | None = None


class Delivered(msgspec.Struct, frozen=True):
    """A message that is leased to the caller."""

    id: Natural
    payload: bytes
    lease_expires_at: datetime
    lease_token: str
    attempts: Natural
    priority: Int64


class Problem(msgspec.Struct, frozen=True):
    """The answer to a call that fails."""

    error: str  # a class of Heapline's errors
    facts: dict[str, Any]
    text: str


def topic_of(namespace: str, topic: str) -> str:
    """Return the topic's name as the broker has it. Raise BadName if it is not valid."""
    parse_topic(name := f"{namespace}/{topic}")
    return topic if namespace == DEFAULT_NAMESPACE else name


def namespace_of(topic: str) -> str:
    return parse_topic(topic)[0]


def whole(number: int | str, name: str = "id") -> int:
    value = int(number)
    if value >= 1 << 63:
        raise BadRequest(f"{name} must be below 2^63, got {number}")
    return value


def delivered(messages: LeasedMessages) -> list[Delivered]:
    rows = zip(
        unpack(messages.ids),
        messages.payloads,
        unpack(messages.deadline_ms),
        unpack(messages.tokens),
        bytes(messages.attempts),
        unpack(messages.priorities),
        strict=True,
    )
    return [
        Delivered(id, payload, from_ms(deadline), str(token), attempts, priority)
        for id, payload, deadline, token, attempts, priority in rows
    ]


# -- OpenAPI -----------------------------------------------------------------------------------------------------------

ENQUEUE = "Enqueue messages to any topics, all or none; returns their ids."
DEQUEUE = (
    "Lease the most urgent messages that are due, at most `limit` and about 2 MiB of them. With a `request_id`, a "
    "repeat returns what the first request leased and still holds, if it leased anything."
)
ACK = "The work is done: remove the message. 409 unless the caller holds its lease."
NACK = (
    "The work failed: deliver the message again later, or make it a dead letter. 409 unless the caller holds its lease."
)
_ERRORS = {
    400: "The request is not valid and changed nothing.",
    401: "The token or key is not valid.",
    403: "The caller lacks the right.",
    404: "The topic does not exist and is not created.",
    409: "The caller does not hold the lease; or the idempotency key was used for another message.",
    413: "A message, or the request, is too large.",
    429: "The namespace is over its limit of requests or topics. Retry-After says when to retry.",
    503: "Not available now; retry.",
    507: "The disk is full.",
}


def paths() -> dict[str, Any]:
    """Return the paths of the API for the OpenAPI document."""
    schemas = msgspec.json.schema_components([Item, Ack, Nack, Delivered, Problem, Dequeue])[1]
    query = schemas["Dequeue"]
    parameters = [
        {"name": name, "in": "query", "required": name in query["required"], "schema": schema}
        for name, schema in query["properties"].items()
    ]
    items = {"type": "array", "minItems": 1, "items": schemas["Item"]}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}}
    messages = {"type": "array", "items": schemas["Delivered"]}
    refusals = {str(status): _json(schemas["Problem"], description=text) for status, text in _ERRORS.items()}
    calls = (
        ("post", "Enqueue", ENQUEUE, {"requestBody": _json(items, required=True)}, ids),
        ("get", "Dequeue", DEQUEUE, {"parameters": parameters}, messages),
        ("post", "Ack", ACK, {"requestBody": _json(schemas["Ack"], required=True)}, {"type": "object"}),
        ("post", "Nack", NACK, {"requestBody": _json(schemas["Nack"], required=True)}, {"type": "object"}),
    )
    return {
        f"/{name.lower()}": {
            method: {
                "summary": name,
                "description": description,
                "tags": ["mqueue"],
                "responses": {"200": _json(answer, description="OK"), **refusals},
                **request,
            }
        }
        for method, name, description, request, answer in calls
    }


def _json(schema: Any, **more: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}, **more}
