"""`/docs`: the OpenAPI document as a page to read. Plain HTML, made here: nothing is fetched from anywhere. Page and
document are open to strangers, and take ten milliseconds to write: they are written once."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

router = APIRouter()
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
summary{cursor:pointer;padding:.3rem 0}code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:#f4f4f2;padding:.7rem;overflow:auto}details details{margin-left:1.5rem}.method{font-weight:700}
table{border-collapse:collapse}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"""


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    state = request.app.state
    if not hasattr(state, "docs_page"):
        state.docs_page = page(request.app.openapi()).encode()
    return HTMLResponse(state.docs_page, headers=POLICY)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    state = request.app.state
    if not hasattr(state, "openapi_json"):
        state.openapi_json = json.dumps(request.app.openapi()).encode()
    return Response(state.openapi_json, media_type="application/json")


def page(document: dict[str, Any]) -> str:
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
        f'<h1>Heapline</h1><p>{about}<p>The same for machines: <a href="/openapi.json">openapi.json</a>'
        f"{calls}<h2>Shapes</h2>{shapes}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation.get('description', ''))}"]
    if parameters := operation.get("parameters"):
        rows = "".join(_row(p["name"], p["schema"], p.get("description"), p.get("required")) for p in parameters)
        parts.append(f"<table>{rows}</table>")
    if body := operation.get("requestBody"):
        parts.append(f"<p>asks {_body(body)}")
    for code, response in operation["responses"].items():
        if code < "400":
            parts.append(f"<p>{code}: tells {_body(response)}")
    refusals = ", ".join(code for code in operation["responses"] if code >= "400")
    parts.append(f'<p>refused with {refusals}: <a href="#ErrorTold"><code>ErrorTold</code></a>' if refusals else "")
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
    needed = schema.get("required", ())
    rows = "".join(
        _row(name, inner, inner.get("description"), name in needed)
        for name, inner in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return f"<p>{about}<table>{rows}</table><pre>{escape(json.dumps(schema, indent=1))}</pre>" if rows else about


def _row(name: str, schema: dict[str, Any], about: str | None, needed: Any) -> str:
    kinds = [one.get("type") or one.get("$ref", "").rpartition("/")[2] for one in (schema, *schema.get("anyOf", ()))]
    kind = " or ".join(escape(kind) for kind in kinds if kind and kind != "null")
    star = "must be given" if needed else ""
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(about or '')}<td>{star}</tr>"
