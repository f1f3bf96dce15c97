"""How a program gets a client: `connect`, `connect_sync`, and both settings and key from the environment.

Nothing here connects, and gRPC is imported only when a client is made: `import heapline` needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from heapline.client.target import ClientTls, parse_target
from heapline.errors import BadRequest

if TYPE_CHECKING:
    from heapline.client.sdk import ConnectedBroker
    from heapline.client.sync import SyncClient

TARGET = "localhost:7400"
URL, KEY_FILE, CA_FILE, DATA = "HEAPLINE_URL", "HEAPLINE_API_KEY_FILE", "HEAPLINE_CA_FILE", "HEAPLINE_DATA"
ADMIN_KEY_FILE = "admin.key"
KEY_BYTES_MAX = 4096


def connect(
    target: str | None = None, *, endpoints: Sequence[str] | None = None, api_key: str | None = None,
    tls: ClientTls | None = None, deadline: float = 30.0,
) -> ConnectedBroker:  # fmt: skip
    """A client of a server, with the contract of `heapline.open`; it connects when it is first used.

    `target` is `host:port`, `heapline://host:port`, or `heaplines://host:port` over TLS; `endpoints` are several of
    them, of which one is used until it fails. `deadline` is how many seconds a call may take with all its repetitions.

    >>> hl = connect("localhost:7400", api_key="hl_key")
    """
    _need_grpc()
    from heapline.client.sdk import ConnectedBroker

    return ConnectedBroker(_endpoints(target, endpoints), credential=_key(api_key), tls=tls, deadline=deadline)


def connect_sync(
    target: str | None = None, *, endpoints: Sequence[str] | None = None, api_key: str | None = None,
    tls: ClientTls | None = None, deadline: float = 30.0,
) -> SyncClient:  # fmt: skip
    """The same for code that does not await; safe to use from several threads."""
    _need_grpc()
    from heapline.client.sync import SyncClient

    made = connect(
        target, endpoints=endpoints, api_key=api_key, tls=tls, deadline=deadline
    )  # what is wrong is told now
    return SyncClient(made)


def connect_from_env(*, deadline: float = 30.0) -> ConnectedBroker:
    """A client as the environment says.

    HEAPLINE_URL is the server, or several with commas between (localhost:7400 if it is not set); HEAPLINE_API_KEY_FILE
    a file that holds the key; HEAPLINE_CA_FILE the authorities to trust over TLS. Without a key file, and for a server
    on this machine only, the key that `heapline serve` left in its data directory is used: HEAPLINE_DATA, or `data`.
    """
    endpoints = [part.strip() for part in os.environ.get(URL, TARGET).split(",") if part.strip()]
    if not endpoints:
        raise BadRequest(f"{URL} names no server: write host:port")
    ca = os.environ.get(CA_FILE)
    return connect(
        endpoints=endpoints, api_key=_key_from_env(endpoints), tls=ClientTls(ca=ca) if ca else None, deadline=deadline
    )


def _key_from_env(endpoints: Sequence[str]) -> str | None:
    named = os.environ.get(KEY_FILE)
    if named:
        try:
            return _read_key(Path(named))
        except OSError as error:
            raise BadRequest(f"{KEY_FILE} names a file that cannot be read: {error.strerror}") from None
    if not all(is_loopback(endpoint) for endpoint in endpoints):
        return None
    try:
        return _read_key(Path(os.environ.get(DATA) or "data") / ADMIN_KEY_FILE)
    except OSError:
        return None  # there may be none, or it is another user's


def _read_key(file: Path) -> str:
    with file.open("rb") as opened:
        text = opened.read(KEY_BYTES_MAX + 1)
    key = text.decode("ascii", "replace").strip()
    if not key or len(text) > KEY_BYTES_MAX or not key.isprintable() or not key.isascii():
        raise BadRequest(f"{KEY_FILE} or {ADMIN_KEY_FILE}: the file must hold one API key and nothing else")
    return key


def is_loopback(target: str) -> bool:
    """
    >>> is_loopback("heapline://127.0.0.1:7400"), is_loopback("[::1]"), is_loopback("queue.internal")
    (True, True, False)
    """
    host = parse_target(target)[0].rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _endpoints(target: str | None, endpoints: Sequence[str] | None) -> Sequence[str]:
    if target is not None and endpoints is not None:
        raise BadRequest("give a target or endpoints=[…], not both")
    if isinstance(endpoints, str | bytes):
        raise BadRequest(f"endpoints is a list of servers, not {endpoints!r}; a single one goes first: connect(…)")
    found = [TARGET if target is None else target] if endpoints is None else list(endpoints)
    if not found:
        raise BadRequest("endpoints is empty: name at least one server as host:port")
    for endpoint in found:
        if not isinstance(endpoint, str):
            raise BadRequest(f"a server is written host:port, not {endpoint!r}")
    return found


def _key(api_key: str | None) -> str | None:
    if api_key is None:
        return None
    if not isinstance(api_key, str) or not api_key.strip() or not api_key.isascii() or not api_key.isprintable():
        raise BadRequest("api_key is the text that `heapline keys create` printed: not empty, without line breaks")
    return api_key.strip()


def _need_grpc() -> None:
    # gRPC's own handlers of forks wake threads in the child, which end it with a segmentation fault one time in five,
    # whatever the child does. Without them it lives, as long as it lets gRPC alone: forking.py sees to that.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise ImportError("heapline.connect speaks gRPC: install it with `pip install 'heapline[client]'`") from None
