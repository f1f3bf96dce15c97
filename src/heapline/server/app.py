"""A server from start to stop: a broker on a directory, the gRPC face on one port, the HTTP faces on another.

Stopping is in four steps: refuse what is new (UNAVAILABLE, /readyz says 503), end what only waits (pops, streams), let
what is under way finish within `stop_grace`, close the broker. A server does not start without a guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from heapline.clock import Clock, SystemClock
from heapline.engine.embedded import EmbeddedBroker
from heapline.logs import Log
from heapline.server.auditing import Auditing
from heapline.server.auth.audit import AuditLog
from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.principal import Everybody, Guard
from heapline.server.front import Front
from heapline.server.grpc_service import GrpcService
from heapline.server.http.app import make_app
from heapline.server.http.running import HttpFace
from heapline.server.limiting import Limiting
from heapline.server.observing.metrics import Metrics
from heapline.server.observing.watching import make_broker, observers
from heapline.server.rpc import handler
from heapline.server.secure import http_context, open_grpc
from heapline.server.settings import ServerSettings
from heapline.wire.schema import SERVICE

log = Log("heapline.server")
FLUSH_SECONDS = 1.0  # for the last answers to go out


class Server:
    """One process's server. `async with Server(broker, guard, settings)`; the broker is opened by whoever made it."""

    def __init__(self, broker: EmbeddedBroker, guard: Guard, settings: ServerSettings) -> None:
        self.broker = broker
        self.settings = settings
        self.auditing = Auditing(AuditLog(broker.path, SystemClock()))
        self.metrics = Metrics(broker)
        self.metrics.watch("audit_lines_lost_total", lambda: self.auditing.lost)
        limits = settings.limits()
        self.front = Front(
            guard, [*observers(broker, self.metrics), self.auditing, Limiting(limits)], limits=limits
        )  # fmt: skip
        if isinstance(guard, DirectoryGuard):
            guard.on_login = self.auditing.logged_in
        self._service = GrpcService(broker, self.front)
        self._health = health.aio.HealthServicer()
        app = make_app(
            broker, self.front, request_bytes_max=settings.request_bytes_max, mqueue_rules=settings.mqueue_rules(),
            only_from_here=settings.insecure_everybody,
        )  # fmt: skip
        app.state.metrics = self.metrics
        app.state.metrics_public = settings.metrics_public
        app.state.metrics_local = settings.metrics_public is None and settings.on_loopback
        self._tls = settings.tls_files()
        ssl = None if self._tls is None else http_context(self._tls)
        self._http = HttpFace(app, settings.host, settings.http_port, settings.stop_grace, ssl)
        self._grpc = grpc.aio.server(options=_options(settings))
        self._watching: asyncio.Task[None] | None = None
        self.grpc_port = 0
        self.http_port = 0

    async def start(self) -> None:
        self._grpc.add_generic_rpc_handlers((handler(self.front, self._service),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        self.grpc_port = open_grpc(self._grpc, self.settings.host, self.settings.grpc_port, self._tls)
        await self._grpc.start()
        self.http_port = await self._http.start()
        self._watching = asyncio.create_task(self.front.lasting.watch())
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Once; the broker stays open."""
        self.front.stopping.set()
        await self._health.enter_graceful_shutdown()
        self._service.stop_waiting()
        await self.front.until_idle(self.settings.stop_grace)
        # gRPC itself would also wait for those who watch its health, and they stay for ever.
        await self._grpc.stop(min(FLUSH_SECONDS, self.settings.stop_grace))
        await self._http.stop()
        if self._watching is not None:
            self._watching.cancel()
        await self.auditing.close()

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.request_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls, and only one has the data
        ("grpc.max_concurrent_streams", settings.streams_per_connection_max),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(settings.keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", round(min(settings.keepalive, 10.0) * 1000)),
        ("grpc.http2.ping_timeout_ms", round(min(settings.keepalive, 10.0) * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # as often as that; the default is to give up asking
    ]


def make_guard(settings: ServerSettings, clock: Clock | None = None) -> Guard:
    """Who may call: the keys and users of the data directory. The first start leaves an administrator's key there.
    Blocks on the disk."""
    if settings.insecure_everybody:
        return Everybody()
    settings.data.mkdir(parents=True, exist_ok=True)
    return DirectoryGuard(settings.data, clock=clock)


async def serve(settings: ServerSettings, guard: Guard, ready: Any = None, clock: Clock | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(make_broker(settings, clock))
        if isinstance(guard, DirectoryGuard):
            stack.push_async_callback(guard.close)
        server = await stack.enter_async_context(Server(broker, guard, settings))
        log.info("serving", data=str(settings.data), grpc_port=server.grpc_port, http_port=server.http_port)
        if ready is not None:
            ready(server)
        await stop.wait()
        log.info("stopping")
    log.info("stopped")
