"""A span around each call, whose W3C trace context goes with the request.

Only for programs that use OpenTelemetry: until a tracer provider is set, a call costs one lookup. Attributes are names
and numbers, never payloads.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from msgspec.structs import replace

from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.span_attributes import request_attributes, result_attributes

R = TypeVar("R")


class Traced:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        found = _provider()
        if found is None:
            return self._inner.do(command, context)  # type: ignore[no-any-return]
        return self._do(found, command, context)

    async def _do(self, found: tuple[Any, Any], command: Command[R], context: Context) -> R:
        api, provider = found
        tracer = provider.get_tracer("heapline.client")
        span = tracer.start_span(
            f"client {type(command).facts.rpc}", kind=api.SpanKind.CLIENT, attributes=request_attributes(command)
        )
        try:
            result: R = await self._inner.do(command, replace(context, trace=_traceparent(api, span)))
            span.set_attributes(result_attributes(result))
            return result
        except BaseException as error:
            span.set_status(api.Status(api.StatusCode.ERROR, type(error).__name__))  # its text may quote the request
            raise
        finally:
            span.end()

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        """A feed has no span of its own, because it may last for days. The caller's context goes with it."""
        found = _provider()
        if found is not None:
            context = replace(context, trace=_traceparent(found[0], found[0].get_current_span()))
        return self._inner.stream(feed, context)  # type: ignore[no-any-return]


def _traceparent(api: Any, span: Any) -> str | None:
    found = span.get_span_context()
    if not found.is_valid:
        return None
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"


def _provider() -> tuple[Any, Any] | None:
    """OpenTelemetry's API and its tracer provider; None if this program does not trace."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else (api, provider)
