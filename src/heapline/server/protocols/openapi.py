"""The OpenAPI document of the HTTP port, and the same as a page to read.

The contract's calls come from wire/json.py; pages and MQueue's API are added here. The page is plain HTML that loads
nothing from anywhere. Both are open to everyone.
"""

from __future__ import annotations

import json
from html import escape
from typing import Annotated, Any

import msgspec

from heapline.server.protocols import mqueue_shapes
from heapline.wire.json import ERRORS, openapi

DESCRIPTION = """
A durable queue of priorities and times: the most urgent message that is due, to one worker at a time.

Send an API key, or a token of `POST /v1/auth/login`, as `authorization: Bearer …`. Bodies are JSON
(`content-type: application/json`). A topic is a path, and an action on it follows a colon
(`POST /v1/heaps/jobs:pause`), as do its consumer groups (`/v1/heaps/jobs:groups/billing`). Calls on messages are verbs
with the `topic` in the body or query.
Payloads are bytes: send `payload` in base64, or `payload_text`, or `payload_json`. Times are RFC 3339. Every error has
the same shape: `error` (its class), `facts` (its data), `text` (what to do).
"""
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
summary{cursor:pointer;padding:.3rem 0}code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:#f4f4f2;padding:.7rem;overflow:auto}details details{margin-left:1.5rem}.method{font-weight:700}
table{border-collapse:collapse}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"""
ERROR = {"$ref": "#/components/schemas/ErrorResponse"}


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """A person's email and password."""

    email: str
    password: str


class Token(msgspec.Struct):
    """A token that replaces the password for a quarter of an hour."""

    token: Annotated[str, msgspec.Meta(description="send it as `authorization: Bearer …`")]


def document() -> dict[str, Any]:
    """Return the document. Takes some milliseconds: keep it."""
    found = openapi()
    found["info"]["description"] = DESCRIPTION
    _describe_stats(found)
    refs, schemas = msgspec.json.schema_components([Login, Token], ref_template="#/components/schemas/{name}")
    found["components"]["schemas"].update(schemas)
    found["paths"] |= {
        "/v1/auth/login": {"post": _login(*refs)},
        "/healthz": {"get": _page("Whether the process is alive")},
        "/readyz": {"get": _page("Whether the server accepts calls")},
        "/metrics": {"get": _page("Metrics in Prometheus' text format")},
        **mqueue_shapes.paths(),
    }
    return found


def _describe_stats(found: dict[str, Any]) -> None:
    """Without a topic, /v1/stats returns the statistics of all topics, as `items`."""
    stats = found["paths"]["/v1/stats"]["get"]
    for parameter in stats["parameters"]:
        parameter["required"] = False
    content = stats["responses"]["200"]["content"]["application/json"]
    one = content["schema"]
    every = {"type": "object", "properties": {"items": {"type": "array", "items": one}}, "required": ["items"]}
    found["components"]["schemas"]["StatsAnswer"] = {"anyOf": [one, every]}
    content["schema"] = {"$ref": "#/components/schemas/StatsAnswer"}


def _login(request: Any, answer: Any) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(code): {"description": text, "content": {"application/json": {"schema": ERROR}}}
        for code, text in ERRORS.items()
        if code != 428
    }
    responses["200"] = {"description": "Success", "content": {"application/json": {"schema": answer}}}
    return {
        "summary": "Log in",
        "description": "Whatever is wrong with email or password, the answer is the same (401).",
        "tags": ["auth"],
        "security": [],
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": responses,
    }


def _page(summary: str) -> dict[str, Any]:
    responses = {"200": {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    return {"summary": summary, "tags": ["health"], "security": [], "responses": responses}


# -- the page ----------------------------------------------------------------------------------------------------------


def docs_page(document: dict[str, Any]) -> str:
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(_operation(method, path, operation))
    calls = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in by_tag.items())
    shapes = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_shape(schema)}</details>'
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    about = escape(document["info"]["description"]).replace("\n\n", "<p>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Heapline</title><style>{STYLE}</style>'
        f'<h1>Heapline</h1><p>{about}<p>For programs: <a href="/openapi.json">openapi.json</a>'
        f"{calls}<h2>Types</h2>{shapes}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation.get('description', ''))}"]
    if parameters := operation.get("parameters"):
        rows = "".join(_row(p["name"], p["schema"], p.get("description"), p.get("required")) for p in parameters)
        parts.append(f"<table>{rows}</table>")
    if body := operation.get("requestBody"):
        parts.append(f"<p>request: {_body(body)}")
    for code, response in operation["responses"].items():
        if code < "400":
            parts.append(f"<p>{code}: {_body(response)}")
    errors = ", ".join(code for code in operation["responses"] if code >= "400")
    parts.append(f'<p>errors {errors}: <a href="#ErrorResponse"><code>ErrorResponse</code></a>' if errors else "")
    head = f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code> {escape(operation["summary"])}'
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _body(holder: dict[str, Any]) -> str:
    (media, content), *_ = holder.get("content", {"nothing": {}}).items()
    schema = content.get("schema", {})
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a> ({escape(media)})'
    return f"{escape(media)}{_shape(schema)}" if schema.get("properties") else escape(media)


def _shape(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        _row(name, inner, inner.get("description"), name in required)
        for name, inner in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return f"<p>{about}<table>{rows}</table><pre>{escape(json.dumps(schema, indent=1))}</pre>" if rows else about


def _row(name: str, schema: dict[str, Any], about: str | None, is_required: Any) -> str:
    kinds = [one.get("type") or one.get("$ref", "").rpartition("/")[2] for one in (schema, *schema.get("anyOf", ()))]
    kind = " or ".join(escape(kind) for kind in kinds if kind and kind != "null")
    star = "required" if is_required else ""
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(about or '')}<td>{star}</tr>"
