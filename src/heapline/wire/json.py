"""Calls over HTTP as JSON: one route per call that has one, derived from its facts and its fields.

A field of a command is in the path, or else in the query (GET, DELETE) or the body. Options of the interface
(JsonOptions) are beside the fields, or in the query. The items of a feed are lines of JSON (NDJSON). json_forms.py says
how each type is written.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from heapline.contract import broker as _every_call  # noqa: F401  (registers the calls)
from heapline.contract.call import CALLS, Call, Feed
from heapline.contract.check import read
from heapline.contract.errors import BadRequest, DeliveryLost, LeaseLost
from heapline.contract.groups import LostRows, unpack_offsets
from heapline.contract.ids import shown_ids
from heapline.wire.codec import read_answer
from heapline.wire.json_forms import Form, request_form, result_form, suffix_in
from heapline.wire.json_values import PLAIN, ErrorResponse, JsonOptions, error_response, read_error

__all__ = [
    "NDJSON",
    "ROUTES",
    "ErrorResponse",
    "JsonOptions",
    "Route",
    "check_lost",
    "error_response",
    "find",
    "openapi",
    "read_error",
]

JSON, NDJSON = "application/json", "application/x-ndjson"
_IN_PATH = re.compile(r"\{(\w+)\}")
_IN_QUERY = ("GET", "DELETE")
_encoder = msgspec.json.Encoder()


class Done(msgspec.Struct, frozen=True):
    """The answer of a call that returns nothing."""

    done: bool = True


class Route:
    """One call over HTTP."""

    def __init__(self, kind: type[Call[Any]]) -> None:
        self.kind, self.facts = kind, kind.facts
        self.method, self.path = (kind.facts.http or "").split(" ", 1)
        self.in_path = tuple(_IN_PATH.findall(self.path))
        self.is_feed = issubclass(kind, Feed)
        self.has_body = self.method not in _IN_QUERY
        # At import: see `describe_types`.
        self._decoder = msgspec.json.Decoder(self.request.twin)
        self._answer_decoder = msgspec.json.Decoder(self.answer)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        escaped = re.escape(self.path).replace(r"\{", "{").replace(r"\}", "}")
        return re.compile(_IN_PATH.sub(lambda m: f"(?P<{m[1]}>{self._name(m[1])})", escaped) + r"\Z")

    def _name(self, field: str) -> str:
        """Return the pattern of a name in the path: a topic or schedule may have a namespace."""
        return "[^/:]+(?:/[^/:]+)?" if self._has_namespace(field) else "[^/:]+"

    def _has_namespace(self, field: str) -> bool:
        hint = next(f.type for f in msgspec.structs.fields(self.kind) if f.name == field)
        metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        return any(isinstance(m, Meta) and (m.extra or {}).get("name") in ("topic", "schedule") for m in metas)

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Names of the options that the route has."""
        found = ["payload_as"] if self.result is not None and self.result.has_payload else []
        if self.kind.result not in (None, type(None)) and "lost" in self._result_fields:
            found.append("tell_lost")
        return (*found, "force", "confirmation") if self.facts.destroys else tuple(found)

    @property
    def _result_fields(self) -> tuple[str, ...]:
        kind = get_origin(self.kind.result) or self.kind.result
        return tuple(kind.__struct_fields__)

    @cached_property
    def request(self) -> Form:
        return request_form(self.kind, self.method, self.in_path, self.options)

    @cached_property
    def result(self) -> Form | None:
        return None if self.kind.result in (None, type(None)) else result_form(self.kind.result)

    @cached_property
    def answer(self) -> Any:
        """The type of the answer's JSON."""
        return Done if self.result is None else self.result.twin

    # -- requests --------------------------------------------------------------------------------------------------

    def read(self, path: dict[str, str], query: dict[str, str], body: bytes) -> tuple[Any, JsonOptions]:
        """Build the command from a request."""
        outside: dict[str, Any] = {}
        if self.has_body:
            if query:
                outside = _options(self, query)
            twin = self._read_body(body or b"{}")
        else:
            twin = read(self.request.twin, query, lambda: self._from_query(query), lax=True)
        command = self.request.read_with(twin, path) if path else self.request.read(twin)
        if not self.options:
            return command, PLAIN
        given = {name: getattr(twin, name) for name in self.options} | outside
        return command, JsonOptions(**given, id_suffix=suffix_in(twin))

    def _from_query(self, query: dict[str, str]) -> Any:
        return msgspec.convert(query, self.request.twin, strict=False)

    def _read_body(self, body: bytes) -> Any:
        try:
            return read(self.request.twin, lambda: _without_raw(msgspec.json.decode(body)), lambda: self._decode(body))
        except RecursionError:
            raise BadRequest("the request body is nested too deeply") from None
        except msgspec.MsgspecError as error:  # a number out of range cannot be read again to explain it
            raise BadRequest(f"invalid request body: {error}") from None

    def _decode(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"cannot decode the request body as JSON: {error}") from None

    def write(self, command: Any, options: JsonOptions = PLAIN) -> tuple[str, str, dict[str, str], bytes]:
        """Return the method, path, query and body of a command."""
        twin = self.request.write(command)
        path = self.path
        for name in self.in_path:
            safe = "/" if self._has_namespace(name) else ""
            path = path.replace(f"{{{name}}}", quote(getattr(command, name), safe=safe))
        chosen = {name: value for name in self.options if (value := getattr(options, name)) != getattr(PLAIN, name)}
        if self.has_body:
            return self.method, path, {n: _text(v) for n, v in chosen.items()}, _encoder.encode(twin)
        fields = msgspec.to_builtins(twin) | chosen
        return self.method, path, {n: _text(v) for n, v in fields.items() if v is not None}, b""

    # -- answers ---------------------------------------------------------------------------------------------------

    def encode(self, result: Any, options: JsonOptions = PLAIN) -> bytes:
        """Return the body of an answer, or one line of a feed without its end."""
        if self.result is None:
            return b'{"done":true}'
        return _encoder.encode(self.result.write(result, options))

    def decode(self, body: bytes) -> Any:
        """Return the result from the body of an answer."""
        if self.result is None:
            return None
        try:
            answer = self._answer_decoder.decode(body)
        except msgspec.ValidationError:
            answer = read_answer(self.answer, msgspec.json.decode(body))
        return self.result.read(answer)


ROUTES: dict[type[Call[Any]], Route] = {kind: Route(kind) for kind in CALLS.values() if kind.facts.http}
_LONGEST_FIRST = sorted(ROUTES.values(), key=lambda route: -len(_IN_PATH.sub("", route.path)))


def find(method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """Return the route of a path as it was sent, still percent-encoded, and the decoded names in it."""
    for route in _LONGEST_FIRST:
        if route.method == method and (match := route.pattern.match(path)) is not None:
            return route, {name: unquote(value) for name, value in match.groupdict().items()}
    return None


def check_lost(command: Any, result: Any, options: JsonOptions) -> None:
    """Raise LeaseLost or DeliveryLost if something was lost and the caller does not want to read it in the answer."""
    if options.tell_lost or not getattr(result, "lost", None):
        return
    if not isinstance(result, LostRows):
        raise LeaseLost.showing(result.lost, command.topic, shown_ids(result.lost, options.id_suffix))
    pairs = [(p, offset) for p, offsets in unpack_offsets(result.lost).items() for offset in offsets]
    raise DeliveryLost([p for p, _ in pairs], [o for _, o in pairs], command.topic, command.group)


def _options(route: Route, query: dict[str, str]) -> dict[str, Any]:
    for name in query:
        if name not in route.options:
            known = ", ".join(route.options) or "none"
            raise BadRequest(f"unknown parameter {name!r}; the parameters of {route.kind.__name__} are {known}")
    given = read(JsonOptions, query, lambda: msgspec.convert(query, JsonOptions, strict=False), lax=True)
    return {name: getattr(given, name) for name in query}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_raw(value: Any) -> Any:
    """Drop payload_json, which can be any JSON, from what is searched for mistakes."""
    if isinstance(value, list):
        return [_without_raw(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _without_raw(inner) for name, inner in value.items() if name != "payload_json"}
    return value


# -- OpenAPI -----------------------------------------------------------------------------------------------------------

ERRORS = {
    400: "The request is invalid",
    401: "The caller is not authenticated",
    403: "The caller lacks a right",
    404: "The topic, message or part does not exist",
    409: "Another call was first, or a lease had ended",
    413: "The request or a payload is too large",
    415: "The body is not JSON",
    428: "The call destroys; repeat it with the confirmation token of this answer",
    429: "A limit is reached",
    500: "The server failed, or stored bytes are corrupt",
    501: "The broker does not support the call",
    503: "Temporarily unavailable; retry",
    504: "The deadline passed",
    507: "The disk is full",
}
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


def openapi(version: str = "1") -> dict[str, Any]:
    """Describe every route."""
    routes = list(ROUTES.values())
    kinds = [kind for route in routes for kind in (route.request.twin, route.answer)]
    refs, schemas = msgspec.json.schema_components([*kinds, ErrorResponse], ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    used = []
    for i, route in enumerate(routes):
        name = refs[2 * i]["$ref"].rsplit("/", 1)[1]
        operation = _operation(route, schemas[name], refs[2 * i], refs[2 * i + 1], refs[-1])
        paths.setdefault(route.path, {})[route.method.lower()] = operation
        if not route.has_body:
            used.append(name)
    for name in used:  # all of its fields are parameters
        schemas.pop(name, None)
    for name in ("Enqueue", "Outgoing"):
        schemas[name]["oneOf"] = [{"required": [one]} for one in ("payload", "payload_text", "payload_json")]
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Heapline", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "an API key or a token"}},
        },
        "security": [{"key": []}],
    }
    _bound(document)
    return document


def _operation(route: Route, schema: dict[str, Any], request: Any, answer: Any, error: Any) -> dict[str, Any]:
    facts, text = route.facts, route.kind.__doc__ or ""
    hints = {f.name: f.type for f in msgspec.structs.fields(route.kind)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": msgspec.json.schema(hints[name])}
        for name in route.in_path
    ]
    if not route.has_body:
        parameters += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": inner}
            for name, inner in schema["properties"].items()
        ]
    refused = {code for code in ERRORS if (code != 428 or facts.destroys) and (code != 415 or route.has_body)}
    responses = {
        str(code): {"description": ERRORS[code], "content": {JSON: {"schema": error}}} for code in sorted(refused)
    }
    media = NDJSON if route.is_feed else JSON
    responses[str(facts.status)] = {"description": "Success", "content": {media: {"schema": answer}}}
    operation: dict[str, Any] = {
        "operationId": facts.rpc,
        "summary": text.split("\n")[0].split(". ")[0].rstrip("."),
        "description": " ".join(text.split()),
        "tags": [facts.feature],
        "parameters": parameters,
        "responses": responses,
    }
    if route.has_body:
        required = bool(schema.get("required"))
        operation["requestBody"] = {"required": required, "content": {JSON: {"schema": request}}}
    return operation


def _bound(schema: Any) -> None:
    """Give integers without bounds those of 64 bits."""
    if isinstance(schema, list):
        for inner in schema:
            _bound(inner)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["minimum"] = max(INT64_MIN, schema.get("minimum", INT64_MIN))
            schema["maximum"] = min(INT64_MAX, schema.get("maximum", INT64_MAX))
        for inner in schema.values():
            _bound(inner)
