"""Connect to what options name: a data directory, or a server whose address and key may be in the environment.

Targets are resolved on the driver, because executors may have a different environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from heapline.contract.errors import BadRequest
from heapline.spark.directory import DirectorySource
from heapline.spark.offsets import Subscription
from heapline.spark.options import ReadOptions, Target, parse_options
from heapline.spark.topic_log import Source

if TYPE_CHECKING:
    from heapline.client.sdk import ConnectedBroker
    from heapline.client.sync import SyncClient
    from heapline.client.target import ClientTls
    from heapline.client.transports.blocking_calls import BlockingCalls
    from heapline.spark.write_options import WriteOptions

SERVER_OPTIONS = ("heapline.url", "heapline.api_key", "heapline.token", "heapline.api_key_file")
Options = TypeVar("Options", ReadOptions, "WriteOptions")


def resolve(options: Options) -> Options:
    """Return the options with the server's address and key filled in."""
    return dataclasses.replace(options, target=resolve_target(options.target))


def resolve_target(target: Target) -> Target:
    """Return a target with the server's address and key from the options or the environment; a directory unchanged."""
    if target.path is not None:
        if target.api_key is not None or target.api_key_file is not None:
            raise BadRequest("a directory is read without a key; omit the key, or set heapline.url instead of path")
        return target
    from heapline.client.connect import local_key, named_in_env

    named = named_in_env(url=target.url, key_file=None if target.api_key is not None else target.api_key_file)
    key = target.api_key or named.api_key or local_key(named.endpoints)
    ca = None if named.tls is None or named.tls.ca is None else str(named.tls.ca)
    return Target(url=",".join(named.endpoints), api_key=key, ca_file=ca)


def server_options(where: Mapping[str, str]) -> dict[str, str]:
    """Return the options of `where` that name a server, as a write accepts them."""
    if "path" in where:
        raise BadRequest("only the server writes to a data directory; give its address (--to, heapline.url), not path")
    return {name: value for name, value in where.items() if name.lower() in SERVER_OPTIONS}


def server_target(where: Mapping[str, str]) -> Target:
    """Return the resolved target of the server that `where` names."""
    return resolve_target(Target.of({name.lower(): value for name, value in server_options(where).items()}))


# -- connections to a resolved target ------------------------------------------------------------------------------


def source_of(options: ReadOptions) -> Source:
    target = options.target
    if target.path is not None:
        return DirectorySource(target.path, options.lease_seconds)
    from heapline.spark.remote import RemoteSource

    return RemoteSource(tuple(_endpoints(target)), target.api_key, _tls(target), options.lease_seconds)


@contextmanager
def subscribed(where: Mapping[str, str], **options: str) -> Iterator[tuple[Subscription, ReadOptions]]:
    """Open the logs that a batch read with these options would read, and close them on exit."""
    read = resolve(parse_options({**where, **options}, streaming=False))
    subscription = Subscription(source_of(read), read.selection)
    try:
        subscription.find()
        yield subscription, read
    finally:
        subscription.close()


def client_of(target: Target, deadline: float = 30.0) -> SyncClient:
    from heapline.client.connect import connect_sync

    return connect_sync(endpoints=_endpoints(target), api_key=target.api_key, tls=_tls(target), deadline=deadline)


def broker_of(target: Target, deadline: float) -> ConnectedBroker:
    from heapline.client.sdk import ConnectedBroker

    return ConnectedBroker(_endpoints(target), credential=target.api_key, tls=_tls(target), deadline=deadline)


def calls_of(target: Target) -> BlockingCalls:
    from heapline.client.transports.blocking_calls import BlockingCalls

    return BlockingCalls(tuple(_endpoints(target)), target.api_key, _tls(target))


def _endpoints(target: Target) -> list[str]:
    return (target.url or "").split(",")


def _tls(target: Target) -> ClientTls | None:
    from heapline.client.target import ClientTls

    return None if target.ca_file is None else ClientTls(ca=target.ca_file)
