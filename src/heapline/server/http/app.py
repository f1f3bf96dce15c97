"""The HTTP application: its routers, and how errors are answered."""

from __future__ import annotations

from functools import lru_cache

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import HeaplineError
from heapline.server.front import Front
from heapline.server.http import (
    access,
    answers,
    batches,
    dead_letters,
    docs_page,
    enqueuing,
    groups,
    health,
    heap_verbs,
    heaps,
    leases,
    log,
    login,
    messages,
    metrics,
    mqueue,
    popping,
    replays,
    schedules,
    sinks,
)  # fmt: skip
from heapline.server.http.door import Door
from heapline.server.http.openapi import make_document
from heapline.server.mqueue_rules import MQueueRules

DESCRIPTION = """
A durable queue of priorities and times: the most urgent message that is due, to one worker at a time.

Send an API key, or a token of `POST /v1/auth/login`, as `authorization: Bearer …`. Bodies are JSON
(`content-type: application/json`). A heap is a path, with what is done to it behind a colon
(`POST /v1/heaps/jobs:pause`), as are its consumer groups (`/v1/heaps/jobs:groups/billing`); everything about messages
is a verb with the `topic` in its body or query.
Payloads are bytes: give `payload` in base64, or `payload_text`, or `payload_json`. Times are RFC 3339. Every refusal
has the same shape: `error` (its class), `facts` (its data), `text` (what to do).
"""
# Verbs of a heap, and its groups, stand before the heap itself: its path would swallow them.
ROUTERS = (
    groups.router,
    health.router, metrics.router, heap_verbs.router, heaps.router, enqueuing.router, popping.router, leases.router,
    messages.router, dead_letters.router, batches.router, log.router, login.router, access.router, docs_page.router,
    replays.router, schedules.router, sinks.router,
)  # fmt: skip


@lru_cache
def _routes() -> list[BaseRoute]:
    """Shared by all servers of a process: FastAPI takes long to make them, and a test suite starts many servers."""
    template = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in (*ROUTERS, mqueue.router):
        template.include_router(router)
    return list(template.router.routes)


def make_app(
    broker: EmbeddedBroker, front: Front, *, request_bytes_max: int = 64 << 20,
    mqueue_rules: MQueueRules | None = None, only_from_here: bool = False,
) -> FastAPI:  # fmt: skip
    app = FastAPI(
        title="Heapline", version="1", description=DESCRIPTION, openapi_url=None, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.broker = broker
    app.state.front = front
    app.state.mqueue = mqueue.MQueue(broker, mqueue_rules or MQueueRules())
    app.router.routes = _routes()
    app.openapi = lambda: make_document(app)  # type: ignore[method-assign]
    app.add_exception_handler(HeaplineError, answers.told)
    app.add_exception_handler(RequestValidationError, answers.malformed)
    app.add_exception_handler(HTTPException, answers.plain)
    app.add_middleware(Door, front=front, bytes_max=request_bytes_max, only_from_here=only_from_here)
    return app
