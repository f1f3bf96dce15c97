"""Which source a read's options name: a directory, or a server, whose address and key may stand in the environment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from heapline.errors import BadRequest
from heapline.spark.directory import DirectorySource
from heapline.spark.log import Source
from heapline.spark.options import ReadOptions, Target

if TYPE_CHECKING:
    from heapline.client.sync import SyncClient


def settled(options: ReadOptions) -> ReadOptions:
    """The same with server and key found: on the driver, because the environment of executors may be another."""
    return dataclasses.replace(options, target=settled_target(options.target))


def settled_target(target: Target) -> Target:
    if target.path is not None:
        if target.api_key is not None or target.api_key_file is not None:
            raise BadRequest("a directory is read without a key: leave it away, or give heapline.url instead of path")
        return target
    from heapline.client.connecting import local_key, named_in_env

    named = named_in_env(url=target.url, key_file=None if target.api_key is not None else target.api_key_file)
    key = target.api_key or named.api_key or local_key(named.endpoints)
    ca = None if named.tls is None or named.tls.ca is None else str(named.tls.ca)
    return Target(url=",".join(named.endpoints), api_key=key, ca_file=ca)


def source_of(options: ReadOptions) -> Source:
    """Of settled options."""
    target = options.target
    if target.path is not None:
        return DirectorySource(target.path, options.lease_seconds)
    from heapline.client.target import ClientTls
    from heapline.spark.remote import RemoteSource

    tls = None if target.ca_file is None else ClientTls(ca=target.ca_file)
    return RemoteSource(tuple((target.url or "").split(",")), target.api_key, tls, options.lease_seconds)


def client_of(target: Target, deadline: float = 30.0) -> SyncClient:
    """A client of the server that a settled target names."""
    from heapline.client.connecting import connect_sync
    from heapline.client.target import ClientTls

    tls = None if target.ca_file is None else ClientTls(ca=target.ca_file)
    return connect_sync(endpoints=(target.url or "").split(","), api_key=target.api_key, tls=tls, deadline=deadline)
