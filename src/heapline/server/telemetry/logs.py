"""The server's log: one JSON object per event, or text for a terminal; and the request that a line belongs to.

Everything goes to stderr through the standard library's root logger: Heapline's own events (heapline.logs), and those
of uvicorn, gRPC and asyncio. A JSON line has `time`, `level`, `logger` and `event`; `facts`, if there are any; the
`correlation_id` and `trace_id` of the current request; and `exception`, a traceback without values. The engine's events
do not belong to one request, even if one caused them: they have neither id.

Heapline logs no payloads and no secrets. Other libraries may, so every line goes through `redact`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

import structlog
from opentelemetry import trace

from heapline.server.auth.secret import redact
from heapline.server.gate import Observer, Request

Format = Literal["text", "json"]
#: The notes of the current request, from which it is removed when it ends. Tasks and timers that a request starts keep
#: a copy of its context, perhaps for the life of a topic; they must not keep the request alive or log in its name. For
#: the same reason nothing is reset at the end: every request has its own task and context.
_current: ContextVar[dict[type, Any] | None] = ContextVar("heapline_request", default=None)
ENGINE = ("heapline.engine", "heapline.journal")
_ABOUT = ("time", "level", "logger", "event")


def current_request() -> Request | None:
    notes = _current.get()
    return notes.get(CurrentRequest) if notes else None


class CurrentRequest(Observer):
    """Makes each request the current one for the log."""

    def begin(self, request: Request) -> None:
        request.notes[CurrentRequest] = request
        _current.set(request.notes)


def configure(format: Format | None = None, stream: TextIO | None = None, level: int = logging.INFO) -> logging.Handler:
    """Replace the handlers of the root logger. Format None means text if the stream is a terminal, otherwise JSON."""
    stream = sys.stderr if stream is None else stream
    if format is None:
        format = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_json() if format == "json" else _Text("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    return handler


def _json() -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            _facts,
        ],
        processors=[
            _call,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _in_order,
            structlog.processors.JSONRenderer(default=str),
            _redacted,
        ],
    )


Event = MutableMapping[str, Any]


def _facts(logger: Any, method: str, event: Event) -> Event:
    """Take an event of heapline.logs apart: its name and its facts. Other events are text alone."""
    record: logging.LogRecord = event["_record"]
    facts = getattr(record, "facts", None)
    if facts is not None:
        event["event"] = getattr(record, "event", event["event"])
        if facts:
            event["facts"] = dict(facts)
    return event


def _call(logger: Any, method: str, event: Event) -> Event:
    facts = event.get("facts", {})
    if "correlation_id" in facts:
        event["correlation_id"] = facts.pop("correlation_id")
    if str(event.get("logger", "")).startswith(ENGINE):
        return event
    request = current_request()
    if request is not None:
        event.setdefault("correlation_id", request.correlation_id)
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = format(span.trace_id, "032x")
    return event


def _in_order(logger: Any, method: str, event: Event) -> Event:
    return {**{name: event[name] for name in _ABOUT if name in event}, **event}


def _redacted(logger: Any, method: str, line: Any) -> str:
    return redact(line)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = redact(super().format(record))
        request = None if record.name.startswith(ENGINE) else current_request()
        if request is None or "correlation_id=" in line:
            return line
        return f"{line} correlation_id={request.correlation_id!r}"
