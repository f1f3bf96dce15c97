"""Where the server's log goes and what a line looks like: one JSON object an event, or text for a terminal.

All of it goes to stderr through the standard library's root logger: Heapline's own events (heapline.logs), uvicorn's,
gRPC's and asyncio's. A JSON line has `time`, `level`, `logger`, `event`; `facts`, where there are some; the
`correlation_id` of the call that is being served and its `trace_id`, and `exception`, a traceback without values.
The engine's events are not about one call, though one may have set them off: they carry neither id.

Heapline logs no payloads and no secrets. What others log is not in our hands: so every line goes through `redact`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog
from opentelemetry import trace

from heapline.server.auth.secret import redact
from heapline.server.observing.current import current_visit

Format = Literal["text", "json"]
ENGINE = ("heapline.engine", "heapline.journal")
_ABOUT = ("time", "level", "logger", "event")


def configure(format: Format | None = None, stream: TextIO | None = None, level: int = logging.INFO) -> logging.Handler:
    """Replace whatever handlers the root logger has; None: text if the stream is a terminal."""
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
    """An event of heapline.logs is a sentence and facts; others are a sentence alone."""
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
    visit = current_visit()
    if visit is not None:  # what the line itself says is nearer: a session's call stands within the session's
        event.setdefault("correlation_id", visit.correlation_id)
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
        visit = None if record.name.startswith(ENGINE) else current_visit()
        return line if visit is None or "correlation_id=" in line else f"{line} correlation_id={visit.correlation_id!r}"
