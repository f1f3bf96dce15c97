"""Part of the contract over variants of the native wire: TLS, a Unix socket, the sync client, and so on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple

import heapline
from heapline.client.target import ClientTls
from heapline.client.transports.native import NativeBroker
from heapline.clock import SystemClock
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Context
from heapline.contract.errors import ConfirmationNeeded
from heapline.contract.leased_batch import LeasedBatch
from heapline.contract.message import Message
from heapline.contract.method import method
from heapline.contract.methods import Methods
from heapline.contract.sync_broker import SyncLeasedBatch, SyncMessage
from heapline.server.auth.dev_certs import make_dev_certs
from heapline.wire import blocking_connection as blocking
from heapline.wire.compressed_topics import CompressedTopics
from heapline.wire.frames import Headers, peer
from heapline.wire.frames.compression import Zstd, installed
from tests.conformance.test_batch import *  # noqa: F403
from tests.conformance.test_dead_letters import *  # noqa: F403
from tests.conformance.test_lazy_batches import *  # noqa: F403
from tests.conformance.test_leases import *  # noqa: F403
from tests.conformance.test_limits import *  # noqa: F403
from tests.conformance.test_order import *  # noqa: F403
from tests.conformance.test_pop import *  # noqa: F403
from tests.conformance.worlds import GrpcWorld, World


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "certs"
    make_dev_certs(directory, SystemClock().wall_ms())
    return directory


class TlsWorld(GrpcWorld):
    def __init__(self, directory: Path, certs: Path) -> None:
        super().__init__(directory)
        self._certs = certs

    def settings(self) -> dict[str, Any]:
        files = {"tls_certificate": self._certs / "server.crt", "tls_key": self._certs / "server.key"}
        return files | {"tls_client_ca": self._certs / "ca.crt"}

    def connect(self) -> Broker:
        own = {"certificate": self._certs / "client.crt", "key": self._certs / "client.key"}
        tls = ClientTls(ca=self._certs / "ca.crt", **own)
        return NativeBroker(f"heapline+tls://localhost:{self.server.port}", tls=tls)


class UnixWorld(GrpcWorld):
    def __init__(self, directory: Path, certs: Path) -> None:
        super().__init__(directory)
        self._socket = directory / "heapline.sock"

    def settings(self) -> dict[str, Any]:
        return {"unix_socket": self._socket}

    def connect(self) -> Broker:
        return NativeBroker(f"unix://{self._socket}")


class BlockingBroker(Broker):
    """The blocking connection, in a separate thread."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._address = host, int(port)
        self._thread = ThreadPoolExecutor(1)

    async def _run(self, act: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act, *given)

    async def __aenter__(self) -> BlockingBroker:
        self._connection = await self._run(blocking.connect, self._address)
        return self

    async def close(self) -> None:
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def do(self, command: Any, context: Context = HERE, /) -> Any:
        try:
            return await self._run(self._connection.call, command)
        except ConfirmationNeeded as needed:
            return await self._run(self._connection.call, command, Headers(confirmation=needed.token))


class BlockingWorld(GrpcWorld):
    def __init__(self, directory: Path, certs: Path) -> None:
        super().__init__(directory)

    def connect(self) -> Broker:
        return BlockingBroker(f"127.0.0.1:{self.server.port}")


class SyncAdapter(Broker):
    """The blocking client of the SDK, called from threads."""

    def __init__(self, target: str) -> None:
        self._sync = heapline.connect_sync(target, deadline=20.0)

    async def __aenter__(self) -> SyncAdapter:
        return self

    async def close(self) -> None:
        await asyncio.to_thread(self._sync.close)

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        result = await asyncio.to_thread(getattr(self._sync, name), *args, **options)
        if isinstance(result, SyncLeasedBatch):
            return LeasedBatch(self, result.leased)
        if isinstance(result, list) and result and isinstance(result[0], SyncMessage):
            return [Message(self, *astuple(message)[1:]) for message in result]
        return result


for _name, _method in vars(Methods).items():
    if isinstance(_method, method):
        setattr(SyncAdapter, _name, partialmethod(SyncAdapter.call, _name))


class SyncWorld(GrpcWorld):
    log_is_bare = False

    def __init__(self, directory: Path, certs: Path) -> None:
        super().__init__(directory)

    def connect(self) -> Broker:
        return SyncAdapter(f"127.0.0.1:{self.server.port}")


class CompressedWorld(GrpcWorld):
    """Topics with compression="zstd"; both sides compress bodies of any size and know every setting."""

    small = GrpcWorld.small | {"compression": "zstd"}

    def __init__(self, directory: Path, certs: Path) -> None:
        super().__init__(directory)
        if not installed():
            pytest.skip("no module for zstd is installed")
        self._patch = pytest.MonkeyPatch()
        self.compressed = 0

    def connect(self) -> Broker:
        self._patch.setattr(peer, "COMPRESS_MIN", 0)
        self._patch.setattr(CompressedTopics, "has", lambda self, topic: bool(topic))
        compress = Zstd.compress

        def count(zstd: Zstd, data: Any) -> bytes:
            self.compressed += 1
            return compress(zstd, data)

        self._patch.setattr(Zstd, "compress", count)
        return NativeBroker(f"127.0.0.1:{self.server.port}")

    async def stop(self) -> None:
        await super().stop()
        self._patch.undo()
        assert self.compressed


VARIANTS: dict[str, Callable[[Path, Path], World]] = {
    "tls": TlsWorld,
    "unix": UnixWorld,
    "blocking": BlockingWorld,
    "sync": SyncWorld,
    "compressed": CompressedWorld,
}


#: Their pops wait until another call on the same connection wakes them.
WAITING_MODULES = ("test_limits", "test_pop")
CANCELLING_TESTS = ("test_cancelled_wait_leases_nothing", "test_pop_cancelled_at_any_time_leaves_no_lease")


@pytest.fixture(params=sorted(VARIANTS))
async def world(request: pytest.FixtureRequest, tmp_path: Path, certs: Path) -> AsyncIterator[World]:
    if request.param == "blocking" and request.function.__module__.endswith(WAITING_MODULES):
        pytest.skip("a waiting call blocks the other threads of its blocking connection")
    if request.param == "sync" and request.node.originalname in CANCELLING_TESTS:
        pytest.skip("a call in a thread cannot be cancelled")
    world = VARIANTS[request.param](tmp_path, certs)
    await world.start()
    yield world
    await world.stop()
