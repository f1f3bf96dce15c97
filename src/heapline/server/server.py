"""A server from start to stop: the native wire, gRPC and HTTP, each on its own port, in front of one broker.

Stopping takes four steps: reject new calls (UNAVAILABLE; /readyz answers 503), end calls that only wait (pops,
streams), let calls in flight finish within `stop_grace`, close the ports. The broker is opened and closed by the
caller. A server does not start without a guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from opentelemetry.sdk.trace import TracerProvider

from heapline.clock import Clock, SystemClock
from heapline.contract.admin import ReadAudit
from heapline.contract.broker import Broker
from heapline.contract.groups import GroupLeave
from heapline.logs import Log
from heapline.server.audit import Audit, AuditLog
from heapline.server.auth.commands import AuthCommands
from heapline.server.auth.guard import DirectoryGuard, StoreGuard
from heapline.server.auth.principals import Guard, NoAuthGuard
from heapline.server.auth.sessions import BrowserSessions
from heapline.server.auth.tls import TlsFiles, grpc_credentials, reloading_context
from heapline.server.dispatcher import Dispatcher, Handler
from heapline.server.gate import Gate, Observer, Request
from heapline.server.protocols.grpc import GrpcHandlers
from heapline.server.protocols.http import HttpApp, Mounted
from heapline.server.protocols.http_server import HttpServer
from heapline.server.protocols.mqueue import MQueue
from heapline.server.protocols.native import NativeServer
from heapline.server.protocols.pages import Pages
from heapline.server.protocols.subscribe_stream import Subscriptions
from heapline.server.settings import ServerSettings
from heapline.server.telemetry.logs import CurrentRequest
from heapline.server.telemetry.metrics import CallCounts, Metrics
from heapline.server.telemetry.traces import TracedBroker, Traces, make_provider
from heapline.wire.connection import with_alpn
from heapline.wire.descriptors import METHODS, SERVICE, declared_pool

log = Log("heapline.server")
FLUSH_SECONDS = 1.0  # for the last answers to be sent


@runtime_checkable
class LocalBroker(Protocol):
    """A broker with a data directory and a clock, which its server uses too."""

    @property
    def path(self) -> str: ...

    @property
    def clock(self) -> Clock: ...


class Server:
    """One process's server: `async with Server(broker, guard, settings)`. The caller opens the broker.

    `dashboard` makes what answers below /ui/, for a package that this one does not import.
    """

    def __init__(
        self,
        broker: Broker,
        guard: Guard,
        settings: ServerSettings,
        traces: TracerProvider | None = None,
        dashboard: Callable[[Server], Mounted] | None = None,
    ) -> None:
        self.broker, self.settings = broker, settings
        self._provider = traces
        if traces is None and settings.otlp_endpoint is not None:
            self._provider = make_provider(settings.otlp_endpoint, settings.trace_sample)
        local = broker if isinstance(broker, LocalBroker) else None
        self._clock: Clock = SystemClock() if local is None else local.clock
        directory = str(settings.data) if local is None else local.path
        self.audit = Audit(AuditLog(directory, SystemClock()))
        self.metrics = Metrics(broker, CallCounts(name for name, m in METHODS.items() if m.streams_out))
        self.metrics.watch("audit_lines_lost_total", lambda: self.audit.lost)
        self.gate = Gate(guard, self._observers(), settings.limits(), self._clock)
        if isinstance(guard, StoreGuard):
            guard.on_login = self.audit.logged_in
        guard_clock = guard.store.clock if isinstance(guard, StoreGuard) else self._clock
        self.sessions = BrowserSessions(guard, guard_clock, settings.session_ms)
        self.sessions.on_login = self.audit.logged_in
        self._subscriptions = Subscriptions()
        traced = broker if self._provider is None else TracedBroker(broker, self._provider)
        own: dict[type[Any], Handler] = {
            **AuthCommands(guard, self.sessions).handlers(),
            ReadAudit: self.audit.read,
            GroupLeave: self._leave_group,
        }
        self.dispatcher = Dispatcher(traced, own, self.gate)
        self._health = health.aio.HealthServicer()
        self._tls = settings.tls_files()
        self.dashboard = None if dashboard is None else dashboard(self)
        self._http = self._make_http()
        self._grpc = grpc.aio.server(options=_options(settings))
        self._native = self._make_native()
        self._watching: asyncio.Task[None] | None = None
        self.port = 0
        self.grpc_port = 0
        self.http_port = 0

    def _observers(self) -> list[Observer]:
        observers: list[Observer] = [CurrentRequest()]
        if self._provider is not None:
            observers.append(Traces(self._provider))
        return [*observers, self.metrics.calls, self.audit]

    def _make_http(self) -> HttpServer:
        settings = self.settings
        pages = Pages(
            self.dispatcher,
            self.metrics,
            metrics_public=settings.metrics_public,
            on_loopback=settings.on_loopback,
            why_unready=self._why_unready,
        )
        mqueue = MQueue(self.dispatcher, settings.mqueue_rules(), self._clock, self.broker)
        app = HttpApp(
            self.dispatcher,
            {**pages.routes(), **mqueue.routes()},
            request_bytes_max=settings.request_bytes_max,
            only_local=settings.insecure_everybody,
            dashboard=self.dashboard,
            prefix=settings.http_prefix,
        )
        tls = None if self._tls is None else reloading_context(self._tls, "http")
        return HttpServer(app, settings.host, settings.http_port, settings.stop_grace, tls)

    def _why_unready(self) -> str | None:
        for part in (self.broker, self.gate.guard):
            reason: str | None = getattr(part, "why_unready", lambda: None)()
            if reason is not None:
                return reason
        return None

    def _make_native(self) -> NativeServer:
        settings = self.settings
        tls = None if self._tls is None else with_alpn(reloading_context(self._tls, "native"))
        return NativeServer(
            self.dispatcher,
            settings.host,
            settings.port,
            request_bytes_max=settings.request_bytes_max,
            unix_socket=settings.unix_socket,
            tls=tls,
        )

    async def _leave_group(self, command: GroupLeave, request: Request) -> None:
        self._subscriptions.end(command)
        await self.dispatcher.broker.do(command, request.context())

    async def start(self) -> None:
        self._grpc.add_generic_rpc_handlers((GrpcHandlers(self.dispatcher, self._subscriptions),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc, declared_pool(health_pb2, reflection_pb2))
        self.grpc_port = _open_grpc(self._grpc, self.settings.host, self.settings.grpc_port, self._tls)
        await self._grpc.start()
        self.port = await self._native.start()
        self.http_port = await self._http.start()  # last: /readyz reports that all ports accept calls
        self._watching = asyncio.create_task(self.gate.credentials.watch())
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Stop, once. The broker stays open."""
        self.gate.stopping.set()
        await self._health.enter_graceful_shutdown()
        self._native.go_away()
        self.dispatcher.stop_waiting()
        await self.gate.until_idle(self.settings.stop_grace)
        # gRPC itself would also wait for clients that watch its health, and they never leave.
        await self._grpc.stop(min(FLUSH_SECONDS, self.settings.stop_grace))
        await self._native.stop()
        await self._http.stop()
        await self.dispatcher.compressed.close()
        if self._watching is not None:
            self._watching.cancel()
        await self.audit.close()
        if self._provider is not None and self.settings.otlp_endpoint is not None:
            await asyncio.to_thread(self._provider.shutdown)  # sends the remaining spans

    async def __aenter__(self) -> Server:
        try:
            await self.start()
        except BaseException:
            await self.stop()  # ports that are already open
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _open_grpc(server: Any, host: str, port: int, files: TlsFiles | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if files is None:
        opened: int = server.add_insecure_port(address)
    else:
        opened = server.add_secure_port(address, grpc_credentials(files))
    return opened


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.request_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls, and only one has the data
        ("grpc.max_concurrent_streams", settings.streams_per_connection_max),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(settings.grpc_keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", round(min(settings.grpc_keepalive, 10.0) * 1000)),
        ("grpc.http2.ping_timeout_ms", round(min(settings.grpc_keepalive, 10.0) * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # without a limit; by default gRPC stops sending them
    ]


def make_guard(settings: ServerSettings, clock: Clock | None = None) -> Guard:
    """Return the guard of the data directory; its first start creates an admin key there. Blocks on the disk."""
    if settings.insecure_everybody:
        return NoAuthGuard()
    settings.data.mkdir(parents=True, exist_ok=True)
    return DirectoryGuard(settings.data, clock=clock, token_ms=settings.token_ms)


async def serve(
    settings: ServerSettings,
    guard: Guard,
    broker: contextlib.AbstractAsyncContextManager[Any],
    ready: Callable[[Server], None] | None = None,
    dashboard: Callable[[Server], Mounted] | None = None,
) -> None:
    """Open the broker and serve it until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(broker)
        if isinstance(guard, StoreGuard):
            stack.push_async_callback(guard.close)
        server = await stack.enter_async_context(Server(opened, guard, settings, dashboard=dashboard))
        ports = {"port": server.port, "grpc_port": server.grpc_port, "http_port": server.http_port}
        log.info("serving", data=str(settings.data), **ports)
        if ready is not None:
            ready(server)
        await stop.wait()
        log.info("stopping")
    log.info("stopped")
