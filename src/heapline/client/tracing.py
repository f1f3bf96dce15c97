"""A client's side of a trace: a span around each call, and its W3C context sent along.

Only for programs that trace already: as long as nobody has imported OpenTelemetry and set a tracer provider, a call
costs one look-up here. Attributes are names and numbers, never a payload.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class ClientSpan:
    """One call's span, open and current from its making to `end`; `headers` go with the request."""

    def __init__(self, api: Any, provider: Any, call: str, topic: str | None) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {"topic": topic} if topic else {}
        tracer = provider.get_tracer("heapline.client")
        self._span = tracer.start_span(f"client {call}", kind=api.SpanKind.CLIENT, attributes=attributes)
        self._error_status = api.Status, api.StatusCode.ERROR
        self.headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(self.headers, api.set_span_in_context(self._span))

    def __enter__(self) -> ClientSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            status, code = self._error_status
            self._span.set_status(status(code, kind.__name__))  # not its text: that may quote what was sent
        self._span.end()


def span_of(call: str, topic: str | None) -> ClientSpan | None:
    """None: this program does not trace."""
    found = _provider()
    return None if found is None else ClientSpan(*found, call, topic)


def context_headers() -> dict[str, str]:
    """For a stream, which has no span of its own: the current context, if there is one."""
    headers: dict[str, str] = {}
    if _provider() is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


def _provider() -> tuple[Any, Any] | None:
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else (api, provider)
