"""The HTTP application: its routers, and how errors are answered."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import HeaplineError
from heapline.server.front import Front
from heapline.server.http import access, answers, health, heaps, metrics, mqueue
from heapline.server.http.door import Door
from heapline.server.mqueue_rules import MQueueRules


def make_app(
    broker: EmbeddedBroker, front: Front, *, request_bytes_max: int = 64 << 20, mqueue_rules: MQueueRules | None = None
) -> FastAPI:
    app = FastAPI(title="Heapline", version="1", description="A durable priority and time queue.", redoc_url=None)
    app.state.broker = broker
    app.state.front = front
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(heaps.router)
    app.include_router(access.router)
    mqueue.install(app, broker, mqueue_rules or MQueueRules())
    app.add_exception_handler(HeaplineError, answers.told)
    app.add_exception_handler(RequestValidationError, answers.malformed)
    app.add_exception_handler(HTTPException, answers.plain)
    app.add_middleware(Door, front=front, bytes_max=request_bytes_max)
    return app
