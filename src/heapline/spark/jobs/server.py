"""The server that jobs write to, asked by the driver: which sinks it remembers, and what a topic is like.

Where it is stands in the same options as for a read or a write, or in the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from heapline.errors import BadRequest, TopicNotFound
from heapline.spark.options import Target, plain_topic
from heapline.spark.sources import settled_target

_NAMES = ("heapline.url", "heapline.api_key", "heapline.token", "heapline.api_key_file")


def server_options(where: Mapping[str, str]) -> dict[str, str]:
    """Those of `where` that name a server: what a write takes."""
    if "path" in where:
        raise BadRequest("a directory has one writer, its server: say where that is (--to, heapline.url), not its path")
    return {name: value for name, value in where.items() if name.lower() in _NAMES}


@contextmanager
def server(where: Mapping[str, str]) -> Iterator[Any]:
    """A client (heapline.SyncBroker's calls), closed at the end."""
    from heapline.client.connecting import connect_sync
    from heapline.client.target import ClientTls

    given = {name.lower(): value for name, value in server_options(where).items()}
    key = given.get("heapline.api_key", given.get("heapline.token"))
    target = settled_target(Target(None, given.get("heapline.url"), key, given.get("heapline.api_key_file")))
    tls = None if target.ca_file is None else ClientTls(ca=target.ca_file)
    client = connect_sync(endpoints=(target.url or "").split(","), api_key=target.api_key, tls=tls)
    try:
        yield client
    finally:
        client.close()


def sinks_of(client: Any) -> dict[str, Any]:
    return {sink.name: sink for sink in client.list_sinks()}


def check_topic(client: Any, topic: str) -> None:
    if plain_topic(topic) not in {plain_topic(info.name) for info in client.list_topics()}:
        raise TopicNotFound(topic)
