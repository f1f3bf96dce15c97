"""The OpenAPI document: routes are FastAPI's, the bodies and answers are msgspec's structs of wire/json_*.py.

Bodies do not go through FastAPI: it would parse a stranger's, and a batch of 1000 messages takes it five times as long
(3.0 ms against 0.6). `documented` says on a route what it asks and tells; `make_document` brings in the schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from heapline.config import TopicConfig
from heapline.server.http.answers import JSON
from heapline.wire.json_shapes import INT64_MAX, INT64_MIN, ErrorTold, Topic

REFUSALS = {
    400: "Something in the request is not as it must be", 401: "It is not known who calls",
    403: "The caller may not do this here", 404: "There is no such heap, message or part",
    409: "Somebody or something else got there first", 413: "The request or a payload is too large",
    415: "The body is not plain JSON", 428: "This destroys: repeat it with the confirmation token of this answer",
    429: "A limit is reached", 500: "The server failed, or stored bytes are damaged",
    503: "Not now: retry", 504: "It took too long", 507: "The disk is full",
}  # fmt: skip
OPEN = ("/healthz", "/readyz", "/metrics", "/v1/auth/login")
BODILESS = {415}
CONFIRMED = {428}
_KINDS: set[Any] = {ErrorTold}
_ONE_PAYLOAD = [{"required": [name]} for name in ("payload", "payload_text", "payload_json")]


def documented(
    router: APIRouter, method: str, path: str, *, tells: Any, asks: Any = None, status: int = 200,
    confirmed: bool = False, optional: bool = False, media: str = JSON, **more: Any,
) -> Callable[[Any], Any]:  # fmt: skip
    """`@documented(router, "POST", "/pop", asks=PopAsk, tells=PopTold, summary=…)` over a route."""
    _KINDS.update(kind for kind in (asks, tells) if _is_struct(kind))
    left_out = (set() if asks else BODILESS) | (set() if confirmed else CONFIRMED)
    responses: dict[int | str, dict[str, Any]] = {
        code: _content(text, ErrorTold) for code, text in REFUSALS.items() if code not in left_out
    }
    responses[status] = _content("Done", tells, media)
    extra = dict(more.pop("openapi_extra", {}))
    if asks is not None:
        extra["requestBody"] = {"required": not optional} | _content(None, asks)
    return router.api_route(
        path, methods=[method], status_code=status, responses=responses, response_model=None, openapi_extra=extra,
        **more,
    )  # fmt: skip


def _content(description: str | None, kind: Any, media: str = JSON) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"} if _is_struct(kind) else kind
    found: dict[str, Any] = {"content": {media: {"schema": schema}}}
    return found if description is None else {"description": description} | found


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def make_document(app: FastAPI) -> dict[str, Any]:
    """Made when first asked for: a server that nobody asks does not pay for it."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
        )
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(_schemas())
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "an API key, or a token of /v1/auth/login"}
        }
        document["security"] = [{"key": []}]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own way of telling; ours is 400
                for response in operation["responses"].values():
                    if len(response.get("content", ())) > 1:  # FastAPI's guess beside what we said
                        response["content"].pop(JSON, None)
                if path in OPEN:
                    operation["security"] = []
        _bound(document)
        app.openapi_schema = document
    return app.openapi_schema


def _schemas() -> dict[str, Any]:
    kinds = sorted(_KINDS, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name in ("NewMessage", "EnqueueAsk"):
        schemas[name]["oneOf"] = _ONE_PAYLOAD
    return schemas


def _bound(schema: Any) -> None:
    """Numbers without bounds of their own are of 64 bits; FastAPI makes floats of bounds, and 2^63 is too much."""
    if isinstance(schema, list):
        for inner in schema:
            _bound(inner)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["minimum"] = max(INT64_MIN, int(schema.get("minimum", INT64_MIN)))
            schema["maximum"] = min(INT64_MAX, int(schema.get("maximum", INT64_MAX)))
        for inner in schema.values():
            _bound(inner)


def settings_schema(*, with_topic: bool) -> dict[str, Any]:
    """A heap's settings, none of which must be given; with the topic's name beside them where a heap is made."""
    (_,), schemas = msgspec.json.schema_components([TopicConfig], ref_template="#/components/schemas/{name}")
    schema = dict(schemas["TopicConfig"])
    schema.pop("title", None)
    schema["properties"] = dict(schema["properties"])
    if with_topic:
        (topic,), _ = msgspec.json.schema_components([Topic])
        schema["properties"] = {"topic": topic} | schema["properties"]
        schema |= {"required": ["topic"], "examples": [{"topic": "jobs", "mode": "min", "partitions": 4}]}
    return schema
