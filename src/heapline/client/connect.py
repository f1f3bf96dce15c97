"""Create clients: `connect`, `connect_sync`, and `connect_from_env`, which reads server and key from the environment.

Nothing here connects. What a client needs is imported when one is created, so `import heapline` costs little.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from heapline.client.target import ClientTls, parse_target
from heapline.contract.errors import BadRequest

if TYPE_CHECKING:
    from heapline.client.sdk import ConnectedBroker
    from heapline.client.sync import SyncClient

TARGET = "localhost:7400"
URL, KEY_FILE, CA_FILE, DATA = "HEAPLINE_URL", "HEAPLINE_API_KEY_FILE", "HEAPLINE_CA_FILE", "HEAPLINE_DATA"
ADMIN_KEY_FILE = "admin.key"
KEY_BYTES_MAX = 4096
KEY_BEGINS = "hl_"
_NO_KEY = f"{KEY_FILE} or {ADMIN_KEY_FILE}: the file must contain one API key and nothing else"


def connect(
    target: str | None = None,
    *,
    endpoints: Sequence[str] | None = None,
    api_key: str | None = None,
    tls: ClientTls | None = None,
    deadline: float = 30.0,
) -> ConnectedBroker:
    """Return a client of a server, with the methods of `heapline.open`. It connects when it is first used.

    `target` is `host:port`, `heapline://host:port`, `heapline+tls://host:port` for TLS, `unix:///path`, or
    `http://host:port`. `endpoints` are several targets, of which one is used until it fails. `deadline` is how many
    seconds a call may take with all its repeats. Without an `api_key`, and for a server on this machine only, the
    client uses the key that `heapline serve` wrote to its data directory: HEAPLINE_DATA, or `data`. It is never sent to
    another machine.

    >>> hl = connect("localhost:7400", api_key="hl_key")
    """
    from heapline.client.sdk import ConnectedBroker, check_key

    found = _endpoints(target, endpoints)
    if api_key is not None:
        return ConnectedBroker(found, credential=check_key(api_key), tls=tls, deadline=deadline)
    find = partial(local_key, found)
    return ConnectedBroker(found, credential=find(), tls=tls, deadline=deadline, find_credential=find)


def connect_sync(
    target: str | None = None,
    *,
    endpoints: Sequence[str] | None = None,
    api_key: str | None = None,
    tls: ClientTls | None = None,
    deadline: float = 30.0,
) -> SyncClient:
    """Return a client for code that does not await. It is safe to use from several threads."""
    from heapline.client.sync import SyncClient

    return SyncClient(connect(target, endpoints=endpoints, api_key=api_key, tls=tls, deadline=deadline))


def connect_from_env(
    *, url: str | None = None, key_file: str | os.PathLike[str] | None = None, deadline: float = 30.0
) -> ConnectedBroker:
    """Return a client for the server that the environment names. Arguments take precedence over the environment.

    HEAPLINE_URL is the server, or several separated by commas; it defaults to localhost:7400. HEAPLINE_API_KEY_FILE
    names a file that contains the key, HEAPLINE_CA_FILE the certificate authorities to trust. Without a key file, the
    key of a server on this machine is found as `connect` finds it.
    """
    named = named_in_env(url=url, key_file=key_file)
    return connect(endpoints=named.endpoints, api_key=named.api_key, tls=named.tls, deadline=deadline)


class Named(NamedTuple):
    """A server and its key, as the caller or the environment names them."""

    endpoints: list[str]
    api_key: str | None
    tls: ClientTls | None


def named_in_env(*, url: str | None = None, key_file: str | os.PathLike[str] | None = None) -> Named:
    """Return what `connect_from_env` connects to, without a key that was found instead of named."""
    named = os.environ.get(URL, TARGET) if url is None else url
    endpoints = [part.strip() for part in named.split(",") if part.strip()]
    if not endpoints:
        raise BadRequest(f"{URL} does not name a server; write host:port")
    api_key = None
    if key_file is not None:
        api_key = _read_named_key(key_file, "the key file")
    elif from_env := os.environ.get(KEY_FILE):
        api_key = _read_named_key(from_env, KEY_FILE)
    ca = os.environ.get(CA_FILE)
    return Named(endpoints, api_key, ClientTls(ca=ca) if ca else None)


def _read_named_key(file: str | os.PathLike[str], named_by: str) -> str:
    try:
        return read_key(Path(file))
    except OSError as error:
        raise BadRequest(f"{named_by} cannot be read: {error.strerror}") from None


def local_key_file() -> Path:
    return Path(os.environ.get(DATA) or "data") / ADMIN_KEY_FILE


def local_key(endpoints: Sequence[str]) -> str | None:
    """Return the key that `heapline serve` wrote to its data directory, if all servers are on this machine."""
    if not all(is_loopback(endpoint) for endpoint in endpoints):
        return None
    try:
        key = read_key(local_key_file())
        if not key.startswith(KEY_BEGINS):
            raise BadRequest(_NO_KEY)
        return key
    except OSError:
        return None  # it does not exist, or belongs to another user
    except BadRequest:
        if os.environ.get(DATA):
            raise
        return None  # `data` may be another program's directory, whose secret must not be shown


def read_key(file: Path) -> str:
    with file.open("rb") as opened:
        text = opened.read(KEY_BYTES_MAX + 1)
    key = text.decode("ascii", "replace").strip()
    if not key or len(text) > KEY_BYTES_MAX or not key.isprintable() or not key.isascii():
        raise BadRequest(_NO_KEY)
    return key


def is_loopback(target: str) -> bool:
    """
    >>> is_loopback("heapline://127.0.0.1:7400"), is_loopback("[::1]"), is_loopback("queue.internal")
    (True, True, False)
    """
    host = parse_target(target).host
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _endpoints(target: str | None, endpoints: Sequence[str] | None) -> Sequence[str]:
    if target is not None and endpoints is not None:
        raise BadRequest("give target or endpoints=[…], not both")
    if isinstance(endpoints, str | bytes):
        raise BadRequest(f"endpoints must be a list of servers, got {endpoints!r}; pass a single server as target")
    found = [TARGET if target is None else target] if endpoints is None else list(endpoints)
    if not found:
        raise BadRequest("endpoints is empty; name at least one server as host:port")
    for endpoint in found:
        if not isinstance(endpoint, str):
            raise BadRequest(f"a server must be host:port, got {endpoint!r}")
    return found
