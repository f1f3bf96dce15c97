"""Pages of the HTTP port that are not calls of the contract: health, metrics, login, docs.

`/healthz`: the process is alive. `/readyz`: it accepts calls. `/metrics` is for Prometheus. It has the names of all
topics and how much goes through them, so without a key it answers only if the server listens on loopback alone, unless
`metrics_public` says otherwise. `/v1/auth/login` is the one call of /v1 without a credential.

The OpenAPI document has the contract's calls from wire/json.py; these pages and MQueue's API are added here. `/docs` is
the same as plain HTML, which loads nothing from anywhere. Both are open to everyone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from html import escape
from typing import Annotated, Any

import msgspec

from heapline.contract.call import Right
from heapline.contract.check import describe_types
from heapline.contract.errors import BadRequest
from heapline.contract.message import from_ms
from heapline.server.auth.secret import Secret, SessionToken
from heapline.server.dispatcher import Dispatcher
from heapline.server.protocols import mqueue_shapes
from heapline.server.protocols.http import NO_STORE, Exchange, Page, TooSlow, is_local, read_json
from heapline.server.telemetry.metrics import CONTENT_TYPE, Metrics
from heapline.wire.json import ERRORS, openapi

TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
LOGIN_BYTES_MAX = 16 << 10  # email and password, however they are escaped
LOGIN_SECONDS_MAX = 10.0
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
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


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """A person's email and password."""

    email: str
    password: str


class Token(msgspec.Struct):
    """A token that replaces the password until it expires."""

    token: Annotated[str, msgspec.Meta(description="send it as `authorization: Bearer …`")]
    expires_at: datetime


describe_types(Login)


class Pages:
    """The pages by method and path."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        *,
        metrics_public: bool | None,
        on_loopback: bool,
        why_unready: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._dispatcher, self._gate, self._metrics = dispatcher, dispatcher.gate, metrics
        self._why_unready = why_unready
        self._is_public = bool(metrics_public)
        self._is_local = metrics_public is None and on_loopback
        self._made: dict[str, bytes] = {}  # public pages, which take 10 ms to make: made once

    def routes(self) -> dict[tuple[str, str], Page]:
        return {
            ("GET", "/healthz"): self.health,
            ("GET", "/readyz"): self.ready,
            ("GET", "/metrics"): self.metrics,
            ("POST", "/v1/auth/login"): self.login,
            ("GET", "/docs"): self.docs,
            ("GET", "/openapi.json"): self.openapi,
        }

    async def health(self, exchange: Exchange) -> None:
        await exchange.respond(b"ok\n", content_type=TEXT)

    async def ready(self, exchange: Exchange) -> None:
        if self._gate.stopping.is_set():
            await exchange.respond(b"stopping\n", 503, TEXT)
        elif reason := self._why_unready():
            await exchange.respond(f"{reason}\n".encode(), 503, TEXT)
        else:
            await exchange.respond(b"ok\n", content_type=TEXT)

    async def metrics(self, exchange: Exchange) -> None:
        headers = exchange.headers
        if not (self._is_public or (self._is_local and is_local(headers))):
            credential = headers.get("authorization") or headers.get("x-api-key")
            principal = await self._gate.guard.authenticate(credential)
            principal.check(Right.CONSUME, None)  # on all topics, because it shows all of them
        await exchange.respond(await self._metrics.text(), content_type=CONTENT_TYPE)

    async def login(self, exchange: Exchange) -> None:
        """Log in. Whatever is wrong with email or password, the answer is the same (401)."""
        try:
            async with asyncio.timeout(LOGIN_SECONDS_MAX):
                data = await exchange.json_body(LOGIN_BYTES_MAX)
        except TimeoutError:
            raise TooSlow(f"a login must arrive within {LOGIN_SECONDS_MAX:.0f} seconds") from None
        body = read_json(Login, data)
        log_in = getattr(self._gate.guard, "login", None)
        if log_in is None:
            raise BadRequest("this server has no users; call it without logging in")
        token: SessionToken = await log_in(body.email, Secret(body.password))
        answer = Token(token.reveal(), from_ms(token.expires_at))
        await exchange.respond(msgspec.json.encode(answer), headers=NO_STORE)

    # -- docs ------------------------------------------------------------------------------------------------------

    async def docs(self, exchange: Exchange) -> None:
        if "docs" not in self._made:
            self._made["docs"] = docs_page(document()).encode()
        await exchange.respond(self._made["docs"], content_type=HTML, headers=POLICY)

    async def openapi(self, exchange: Exchange) -> None:
        if "openapi" not in self._made:
            self._made["openapi"] = msgspec.json.encode(document())
        await exchange.respond(self._made["openapi"])


# -- the OpenAPI document --------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    """Return the document. Takes some milliseconds: keep it."""
    found = openapi()
    found["info"]["description"] = DESCRIPTION
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


def _login(request: Any, answer: Any) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/ErrorResponse"}
    responses = {str(code): _response(text, error) for code, text in ERRORS.items() if code != 428}
    return {
        "summary": "Log in",
        "description": "Whatever is wrong with email or password, the answer is the same (401).",
        "tags": ["auth"],
        "security": [],
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": responses | {"200": _response("Success", answer)},
    }


def _page(summary: str) -> dict[str, Any]:
    responses = {"200": _response("Success", {"type": "string"}, "text/plain")}
    return {"summary": summary, "tags": ["health"], "security": [], "responses": responses}


def _response(description: str, schema: Any, media: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": schema}}}


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
